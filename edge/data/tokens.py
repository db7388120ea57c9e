"""Turn texts into token ids with the model's own tokenizer."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ringtune.errors import DataError, ModelError
from ringtune.files.pointers import is_lfs_pointer, pointer_advice

_SETTINGS = "tokenizer_config.json"
_WHOLE, _PIECES = "tokenizer.json", "tokenizer.model"
_TOKENIZER_FILES = (_WHOLE, _SETTINGS, "vocab.txt", "vocab.json", "merges.txt", _PIECES)
_REASON_LENGTH = 300
IGNORED = -100  # a label that does not count, as in torch.nn.functional.cross_entropy


class Batch(NamedTuple):
    """One batch as the embedding and the head need it (B rows, T tokens)."""

    ids: torch.Tensor  # (B, T) int64; (B, 0) for images
    mask: torch.Tensor  # (B, T) int64, 1 = token, 0 = padding
    token_type_ids: torch.Tensor  # (B, T) int64; (B, 0) for images
    labels: (
        torch.Tensor
    )  # int64, -100 = no target: (B,) classes or float64 numbers, (B, T) next tokens or tags, (B, 2) start and end
    pixels: torch.Tensor | None = None  # (B, C, H, W) float32
    examples: torch.Tensor | None = None  # (B,) int64: which example each row is, where an evaluation scores rows

    def rows(self, start: int, stop: int) -> Batch:
        """Cut rows ``[start, stop)`` out; they stay as wide as the whole batch."""
        return Batch(*(None if tensor is None else tensor[start:stop] for tensor in self))  # type: ignore[arg-type]

    def to(self, device: torch.device) -> Batch:
        """Copy the batch to another device."""
        return Batch(*(None if tensor is None else tensor.to(device) for tensor in self))  # type: ignore[arg-type]

    def tensors(self) -> list[torch.Tensor]:
        """List the tensors that the batch has."""
        return [tensor for tensor in self if tensor is not None]


class TokenRow(NamedTuple):
    """One row of tokens: ids and token types, equally long."""

    ids: array[int]
    types: array[int]


class Padder:
    """Puts rows of tokens side by side, padded as the tokenizer pads.

    Args:
        tokenizer: knows the padding token and the side.
        side: ``left`` or ``right``; that of the tokenizer if not given.
    """

    def __init__(self, tokenizer: Any, *, side: str = "") -> None:
        self.side = side or str(tokenizer.padding_side)
        self._id = next(
            int(found) for found in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if found is not None
        )
        self._type = int(tokenizer.pad_token_type_id)

    def start(self, length: int, width: int) -> int:
        """Index at which a row of ``length`` tokens begins in a batch of ``width``.

        Example: with padding on the left 3 tokens begin at 2 in a batch of 5, with padding on the right at 0.
        """
        return width - length if self.side == "left" else 0

    def pad(self, rows: Sequence[TokenRow]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pad rows to ids, mask and token types that are as wide as the longest row."""
        shape = (len(rows), max(len(row.ids) for row in rows))
        ids = torch.full(shape, self._id, dtype=torch.int64)
        types = torch.full(shape, self._type, dtype=torch.int64)
        mask = torch.zeros(shape, dtype=torch.int64)
        for index, row in enumerate(rows):
            first = self.start(len(row.ids), shape[1])
            last = first + len(row.ids)
            ids[index, first:last] = torch.tensor(row.ids)
            types[index, first:last] = torch.tensor(row.types)
            mask[index, first:last] = 1
        return ids, mask, types


Text = str | tuple[str, str]
"""A text, or two that belong together."""


class Encoder:
    """Turns texts into rows of tokens; each text is encoded once, when it is first used.

    Args:
        tokenizer: the model's.
        texts: of all rows; the longer of two is cut first.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[Text]) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        self._encoded: dict[tuple[int, int], TokenRow] = {}
        self._cut: set[int] = set()

    def __len__(self) -> int:
        """Number of texts."""
        return len(self._texts)

    @property
    def cut_rows(self) -> int:
        """How many of the texts that were encoded are longer than they may be."""
        return len(self._cut)

    def rows(self, rows: Sequence[int], *, max_length: int) -> list[TokenRow]:
        """Encode these texts, special tokens included, cut at ``max_length``.

        Raises:
            DataError: a text has no token, as one of odd characters with a tokenizer that adds none.
        """
        return [self._encode(row, max_length) for row in rows]

    def _encode(self, row: int, max_length: int) -> TokenRow:
        key = (row, max_length)
        if key not in self._encoded:
            # One text at a time: a list would start a thread pool on every core.
            text = self._texts[row]
            both = (text,) if isinstance(text, str) else text
            found = self._tokenizer(*both, truncation=True, max_length=max_length)
            ids = array("i", found["input_ids"])
            if not ids:
                raise DataError(
                    f"a text of {sum(map(len, both))} characters has no token that the tokenizer knows; remove its row"
                )
            if len(ids) == max_length and len(self._tokenizer(*both, verbose=False)["input_ids"]) > max_length:
                self._cut.add(row)
            self._encoded[key] = TokenRow(ids, array("i", found.get("token_type_ids", [0] * len(ids))))
        return self._encoded[key]


def load_tokenizer(folder: Path, **settings: Any) -> Any:
    """Load the tokenizer of a model folder, from local files only.

    Args:
        folder: of the model.
        settings: of the tokenizer, in place of those in its files.

    Raises:
        ModelError: there is none, or it needs a package that is missing.
    """
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder; set model.path, or fetch the model")
    _check_tokenizer_files(folder)
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **settings)
    except ImportError as error:
        what = f"{folder}: its tokenizer needs a package that is missing ({_reason(error)})"
        raise ModelError(f"{what}; install it") from error
    except Exception as error:  # the library of the tokenizers raises bare Exception for a damaged file
        what = f"{folder} has no tokenizer that can be read ({_reason(error)})"
        raise ModelError(f"{what}; {_remedy(folder)}") from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:_REASON_LENGTH]


def _remedy(folder: Path) -> str:
    """Tell what helps; the library says of a package that is missing to convert a file only that it failed."""
    needs_package = (folder / _PIECES).is_file() and not (folder / _WHOLE).is_file()
    if needs_package and find_spec("sentencepiece") is None:
        return f"it has {_PIECES} without {_WHOLE}, which needs the package sentencepiece; install it"
    return "fetch the model again"


def _check_tokenizer_files(folder: Path) -> None:
    """Refuse files that only point to their content, and settings that name code."""
    for name in _TOKENIZER_FILES:
        if is_lfs_pointer(folder / name):
            raise ModelError(pointer_advice(folder / name))
    settings = folder / _SETTINGS
    try:
        found = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{settings} is not JSON that can be read; fetch the model again") from error
    if isinstance(found, dict) and found.get("auto_map"):
        raise ModelError(f"{settings}: auto_map is refused: it names code to run; use a tokenizer without it")
