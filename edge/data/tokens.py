"""Texts as token ids, by the model's own tokenizer, and the check of every key of ``tokenizer_config.json``.

A key is carried out, refused by name, or known to change no token. The classes of transformers carry most of them
out, but drop some silently: the fast tokenizer of GPT-2 adds no first token whatever ``add_bos_token`` says. Such a
key is compared with what the tokenizer does. Special tokens have the names of the settings; ``tokenizer.json`` says
which of them are put around a text.

Source: transformers 4.57 and 5.24, the tokenizers of the supported families and their bases.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from ringtune.errors import ModelError
from ringtune.storage.strict import is_lfs_pointer, pointer_advice

_SETTINGS = "tokenizer_config.json"
_CLASSES_OF_5 = ("TokenizersBackend", "PythonBackend")
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


def check_ids(batch: Batch, base: Any) -> None:
    """Refuse a batch with a token that the embedding has no row for.

    Args:
        batch: of texts, or of images, which have no ids.
        base: the Hugging Face base model.

    Raises:
        ModelError: names both numbers.
    """
    if not batch.ids.numel():
        return
    largest, rows = int(batch.ids.max()), int(base.config.vocab_size)
    if largest >= rows:
        raise ModelError(
            f"a text has token {largest:,}, counted from 0, and the embedding of the model has {rows:,} rows; take the "
            "tokenizer that belongs to the model, or leave such texts out"
        )


class Padder:
    """Puts rows of tokens side by side, padded on the right, whatever side the tokenizer pads on.

    Positions then count from the first token of each row, and a token sees no padding before it: the numbers of a row
    do not depend on the length of its neighbours.

    Args:
        tokenizer: knows the padding token.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._id = next(
            int(found) for found in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if found is not None
        )
        self._type = int(tokenizer.pad_token_type_id)

    def pad(self, rows: Sequence[TokenRow]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pad rows to ids, mask and token types that are as wide as the longest row."""
        shape = (len(rows), max(len(row.ids) for row in rows))
        ids = torch.full(shape, self._id, dtype=torch.int64)
        types = torch.full(shape, self._type, dtype=torch.int64)
        mask = torch.zeros(shape, dtype=torch.int64)
        for index, row in enumerate(rows):
            length = len(row.ids)
            ids[index, :length] = torch.tensor(row.ids)
            types[index, :length] = torch.tensor(row.types)
            mask[index, :length] = 1
        return ids, mask, types


class NoTokenError(Exception):
    """A text has no token, such as one of odd characters with a tokenizer that adds none; the caller adds its place.

    Attributes:
        row: index of the text among those that examples were made of.
        what: is wrong, and the remedy.
    """

    def __init__(self, row: int, length: str) -> None:
        self.row = row
        self.what = f"a text of {length} has no token that the tokenizer knows; remove its row"
        super().__init__(self.what)


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
            NoTokenError: a text has none.
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
                raise NoTokenError(row, f"{sum(map(len, both))} characters")
            if len(ids) == max_length and len(self._tokenizer(*both, verbose=False)["input_ids"]) > max_length:
                self._cut.add(row)
            self._encoded[key] = TokenRow(ids, array("i", found.get("token_type_ids", [0] * len(ids))))
        return self._encoded[key]


def load_tokenizer(folder: Path, **settings: Any) -> Any:
    """Load the tokenizer of a model folder, from local files only.

    Of a tokenizer that transformers 5 saved ``tokenizer.json`` is complete, and the classes of transformers 4 would
    change it: their settings of first and last tokens are not written any more.

    Args:
        folder: of the model.
        settings: of the tokenizer, in place of those in its files.

    Raises:
        ModelError: there is none, it needs a package that is missing, or its settings have a key that is not known or
            not carried out.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder; set model.path, or fetch the model")
    saved = _checked_settings(folder)
    loader: Any = AutoTokenizer
    if _is_of_transformers_5(saved):
        if not (folder / _WHOLE).is_file():
            raise ModelError(
                f"{folder}: its tokenizer was saved by transformers 5 (tokenizer_class "
                f"{saved.get('tokenizer_class')!r}) without {_WHOLE}, which is what is read; save that file too"
            )
        loader = PreTrainedTokenizerFast
        extra = saved.get("extra_special_tokens") or []
        if isinstance(extra, list):
            settings = {"extra_special_tokens": {}, "additional_special_tokens": extra, **settings}
    try:
        found = loader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **settings)
    except ImportError as error:
        what = f"{folder}: its tokenizer needs a package that is missing ({_reason(error)})"
        raise ModelError(f"{what}; install it") from error
    except Exception as error:  # the library of the tokenizers raises bare Exception for a damaged file
        what = f"{folder} has no tokenizer that can be read ({_reason(error)})"
        raise ModelError(f"{what}; {_remedy(folder)}") from error
    if loader is AutoTokenizer:
        check_done(folder / _SETTINGS, {**saved, **settings}, found)
    return found


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:_REASON_LENGTH]


def _remedy(folder: Path) -> str:
    """Return the remedy; where a package is missing to convert a file, the library only reports a failure."""
    needs_package = (folder / _PIECES).is_file() and not (folder / _WHOLE).is_file()
    if needs_package and find_spec("sentencepiece") is None:
        return f"it has {_PIECES} without {_WHOLE}, which needs the package sentencepiece; install it"
    return "fetch the model again"


def _is_of_transformers_5(saved: Mapping[str, Any]) -> bool:
    """Tell whether transformers 5 wrote these settings: it names a backend, or lists extra tokens without names."""
    return (
        saved.get("tokenizer_class") in _CLASSES_OF_5
        or "backend" in saved
        or isinstance(saved.get("extra_special_tokens"), list)
    )


def _checked_settings(folder: Path) -> dict[str, Any]:
    """Read ``tokenizer_config.json``; refuse files that only point to their content, and settings that name code."""
    for name in _TOKENIZER_FILES:
        if is_lfs_pointer(folder / name):
            raise ModelError(pointer_advice(folder / name))
    settings = folder / _SETTINGS
    try:
        found = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{settings} is not JSON that can be read; fetch the model again") from error
    if not isinstance(found, dict):
        raise ModelError(f"{settings} has to be a table; fetch the model again")
    check_keys(settings, found)
    return found


_CARRIED_OUT: Final = """
    added_tokens_decoder additional_special_tokens backend bos_token clean_up_tokenization_spaces cls_token eos_token
    extra_special_tokens from_slow keep_accents legacy mask_token model_input_names model_specific_special_tokens
    normalization pad_token remove_space sep_token split_special_tokens tokenizer_class trim_offsets truncation_side
    unk_token
"""
CARRIED_OUT: Final = frozenset(_CARRIED_OUT.split())
_NO_NUMBER: Final = """
    _commit_hash cache_dir chat_template do_pad errors fast full_tokenizer_file is_local local_files_only max_len
    max_length model_max_length name_or_path pad_to_multiple_of pad_token_type_id padding padding_side
    processor_class special_tokens_map_file stride transformers_version truncation_strategy
    unsloth_fixed unsloth_version use_default_system_prompt use_fast verbose
"""
NO_NUMBER: Final = frozenset(_NO_NUMBER.split())
"""Keys that change no token: rows are cut at ``train.max_length`` and padded on the right, and texts have no template.

So are further keys that end in ``_token``: their tokens are in the vocabulary.
"""
_SLOW: Final = frozenset({"never_split", "sp_model_kwargs"})
"""Keys that only tokenizers without ``tokenizer.json`` carry out."""


_FILES: Final = ("tokenizer_file", "vocab_file", "merges_file")


def _normal(tokenizer: Any, text: str) -> str:
    normalizer = tokenizer.backend_tokenizer.normalizer
    return text if normalizer is None else str(normalizer.normalize_str(text))


def _begins_with_blank(tokenizer: Any) -> bool:
    text, divider = _normal(tokenizer, "a"), tokenizer.backend_tokenizer.pre_tokenizer
    pieces = [text] if divider is None else [piece for piece, _ in divider.pre_tokenize_str(text)]
    return pieces[0].startswith((" ", "\u0120", "\u2581"))  # as byte-level and sentencepiece tokenizers write a blank


DOES: Final[Mapping[str, Callable[[Any], bool]]] = {
    "add_bos_token": lambda tokenizer: tokenizer.bos_token_id in tokenizer("a")["input_ids"][:1],
    "add_eos_token": lambda tokenizer: tokenizer.eos_token_id in tokenizer("a")["input_ids"][-1:],
    "add_prefix_space": _begins_with_blank,
    "do_basic_tokenize": lambda tokenizer: True,
    "do_lower_case": lambda tokenizer: "a" in _normal(tokenizer, "A"),
    "strip_accents": lambda tokenizer: "e" in _normal(tokenizer, "\u00e9"),
    "tokenize_chinese_chars": lambda tokenizer: " \u4e2d" in _normal(tokenizer, "a\u4e2d"),
}
"""Key -> whether a tokenizer with ``tokenizer.json`` does what true says."""


def check_keys(path: Path, saved: Mapping[str, Any]) -> None:
    """Refuse keys with a value that may change tokens in a way unknown here.

    Args:
        path: of ``tokenizer_config.json``.
        saved: its content.

    Raises:
        ModelError: names them, or a key that names code or another file.
    """
    if saved.get("auto_map"):
        raise ModelError(f"{path}: auto_map is refused: it names code to run; use a tokenizer without it")
    for key in _FILES:
        if saved.get(key):
            raise ModelError(
                f"{path}: {key} = {saved[key]!r} is refused: it names a file to read in place of that in this folder; "
                "remove the key"
            )
    known = CARRIED_OUT | NO_NUMBER | _SLOW | DOES.keys()
    unknown = sorted(
        key
        for key, value in saved.items()
        if key not in known and not key.endswith("_token") and value not in (None, False, "", [], {})
    )
    if unknown:
        raise ModelError(
            f"{path}: {', '.join(unknown)}: not known, and may change tokens; use a tokenizer without it, or remove it "
            "from tokenizer_config.json if it changes none"
        )


def check_done(path: Path, saved: Mapping[str, Any], tokenizer: Any) -> None:
    """Refuse a tokenizer that does not do what a key says.

    Args:
        path: of ``tokenizer_config.json``.
        saved: its content.
        tokenizer: that was made of it by transformers.

    Raises:
        ModelError: names the key and its value.
    """
    if not tokenizer.is_fast:
        return
    dropped = [key for key in sorted(_SLOW) if saved.get(key)]
    dropped += [key for key, does in DOES.items() if isinstance(saved.get(key), bool) and saved[key] != does(tokenizer)]
    if dropped:
        said = ", ".join(f"{key} = {saved[key]!r}" for key in dropped)
        raise ModelError(
            f"{path}: {said} is not what the tokenizer does: {type(tokenizer).__name__} of transformers drops it; save "
            "the tokenizer with tokenizer.json that does it, or remove the key"
        )
