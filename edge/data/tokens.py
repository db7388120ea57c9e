"""Texts as token ids, by the model's own tokenizer, which has to do what each key of ``tokenizer_config.json`` says.

The classes of transformers implement most keys, but drop some silently: the fast tokenizer of GPT-2 adds no first
token whatever ``add_bos_token`` says. Such a key is compared with the tokenizer's behaviour. Special tokens have the
names of the settings; ``tokenizer.json`` decides which of them are put around a text.

Source: transformers 4.57 and 5.24, the tokenizers of the supported families and their bases.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from ringtune.errors import DataError, ModelError
from ringtune.models.tokenizer import (
    ONLY_SLOW,
    OTHER_PIECES,
    PIECES_FILE,
    SETTINGS_FILE,
    WHOLE_FILE,
    is_of_transformers_5,
    read_tokenizer_settings,
    require_tokenizer,
)

_REASON_LENGTH = 300
MAX_CHARACTERS: Final = 1 << 21
"""Most characters of a text that is encoded at once; a character takes up to 1 KiB in the tokenizer."""
IGNORED = -100  # a label that does not count, as in torch.nn.functional.cross_entropy


class Batch(NamedTuple):
    """One batch as input of embedding and head (B rows, T tokens)."""

    ids: torch.Tensor  # (B, T) int64; (B, 0) for images
    mask: torch.Tensor  # (B, T) int64, 1 = token, 0 = padding; rows packed into a sequence have 1 and 2 in turn
    token_type_ids: torch.Tensor  # (B, T) int64; (B, 0) for images
    labels: (
        torch.Tensor
    )  # int64, -100 = no target: (B,) classes or float64 numbers, (B, T) next tokens or tags, (B, 2) start and end
    pixels: torch.Tensor | None = None  # (B, C, H, W) float32
    examples: torch.Tensor | None = None  # (B,) int64: which example each row is, where an evaluation scores rows
    positions: torch.Tensor | None = None  # (B, T) int64: of each token, where others precede it in a cache

    def rows(self, start: int, stop: int) -> Batch:
        """Cut rows ``[start, stop)`` out; their padding stays."""
        return Batch(*(None if tensor is None else tensor[start:stop] for tensor in self))  # type: ignore[arg-type]

    def to(self, device: torch.device) -> Batch:
        """Copy the batch to another device."""
        return Batch(*(None if tensor is None else tensor.to(device) for tensor in self))  # type: ignore[arg-type]

    def tensors(self) -> list[torch.Tensor]:
        """List the tensors that are not None."""
        return [tensor for tensor in self if tensor is not None]


class TokenRow(NamedTuple):
    """One row of tokens: ids and token types, equally long."""

    ids: array[int]
    types: array[int]


def check_ids(ids: torch.Tensor, base: Any, types: torch.Tensor | None = None) -> None:
    """Refuse token ids and types beyond the tables of the Hugging Face base model; raises ``ModelError``.

    Images have no tokens, and some models no types.
    """
    if not ids.numel():
        return
    largest, rows = int(ids.max()), int(base.config.vocab_size)
    if largest >= rows:
        raise ModelError(
            f"a text has token {largest:,}, counted from 0, and the embedding of the model has {rows:,} rows; take the "
            "tokenizer that belongs to the model, or leave such texts out"
        )
    kinds = getattr(base.config, "type_vocab_size", 0)
    if kinds and types is not None and int(types.max()) >= kinds:
        raise ModelError(
            f"the tokenizer gives a token type {int(types.max())}, counted from 0, as of the second of two texts, and "
            f"config.json of the model says type_vocab_size = {kinds}; take the tokenizer that belongs to the model"
        )


class Padder:
    """Pads rows of tokens on the right, whatever side the tokenizer pads on.

    Positions then count from the first token of each row, and no padding precedes a token: the numbers of a row do not
    depend on the length of its neighbours.

    Args:
        tokenizer: gives the padding id; else its end-of-text id, else 0.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._id = next(
            int(number) for number in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if number is not None
        )
        self._type = int(tokenizer.pad_token_type_id)

    def pad(self, rows: Sequence[TokenRow]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pad rows to ids, mask and token types (B, T), as wide as the longest row."""
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


class RowFaultError(Exception):
    """A row can't be encoded; callers add the place."""

    def __init__(self, row: int, what: str) -> None:
        self.row, self.what = row, what
        super().__init__(what)


class NoTokenError(RowFaultError):
    """A text has no token, such as one of odd characters with a tokenizer that adds none."""

    def __init__(self, row: int, length: str) -> None:
        super().__init__(row, f"a text of {length} has no token that the tokenizer knows; remove its row")


Text = str | tuple[str, str]


class Encoder(Sequence[TokenRow]):
    """Texts as rows of tokens, special ones included; each text is encoded once, at its first use.

    Of a text of more than ``MAX_CHARACTERS``, those up to a blank are encoded, from the end that rows are not cut at.

    Args:
        texts: of all rows; of a pair the longer text is cut first.
        max_length: most tokens of a row.
        end: token that each row ends with, unless it is cut; None = what the tokenizer adds.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[Text], max_length: int, *, end: int | None = None) -> None:
        self._tokenizer, self._texts, self._max_length, self._end = tokenizer, texts, max_length, end
        self._encoded: dict[int, TokenRow] = {}
        self._cut: set[int] = set()

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def cut_rows(self) -> int:
        """Number of cut texts, among those encoded so far."""
        return len(self._cut)

    def __getitem__(self, row: Any) -> Any:
        """Return the row of a text; raises ``NoTokenError``."""
        if row not in self._encoded:
            self._encoded[row] = self._encode(row)
        return self._encoded[row]

    def _encode(self, row: int) -> TokenRow:
        # One text at a time: a list would start a thread pool on every core.
        text, longest = self._texts[row], self._max_length
        whole = (text,) if isinstance(text, str) else text
        both = tuple(self._bounded(part, MAX_CHARACTERS // len(whole)) for part in whole)
        encoding = self._tokenizer(*both, truncation=True, max_length=longest)
        ids = array("i", encoding["input_ids"])
        if not ids:
            raise NoTokenError(row, f"{sum(map(len, both))} characters")
        types = array("i", encoding.get("token_type_ids", [0] * len(ids)))
        is_cut = len(ids) == longest and len(self._tokenizer(*both, verbose=False)["input_ids"]) > longest
        if is_cut or sum(map(len, both)) < sum(map(len, whole)):
            self._cut.add(row)
        elif self._end is not None and ids[-1] != self._end:
            if len(ids) < longest:
                ids.append(self._end)
                types.append(types[-1])
            else:
                self._cut.add(row)
        return TokenRow(ids, types)

    def _bounded(self, text: str, most: int) -> str:
        if len(text) <= most:
            return text
        if self._tokenizer.truncation_side == "right":
            return text[: text.rfind(" ", 0, most) + 1 or most]
        first = len(text) - most
        return text[max(first, text.find(" ", first)) :]


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """Encode a text that is to be continued: without the token that a tokenizer may put at its end."""
    ids = list(tokenizer(text, verbose=False)["input_ids"])
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a model folder, from local files only.

    A tokenizer saved by transformers 5 is read from ``tokenizer.json`` alone, which is complete: the classes of
    transformers 4 would change its first and last tokens, because their settings are not written any more. Transformers
    5 divides any text as that file says, so there a key that says otherwise is refused, not carried out.

    Raises:
        ModelError: there is none, it needs a missing package, or its settings have a key that is unknown or dropped.
    """
    import transformers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder; set model.path, or fetch the model")
    require_tokenizer(folder)
    saved = read_tokenizer_settings(folder)
    loader: Any = AutoTokenizer
    settings: dict[str, Any] = {}
    is_made_anew = hasattr(transformers, "TokenizersBackend")  # by the classes of transformers 5, from the vocabulary
    if is_of_transformers_5(saved) and not is_made_anew:
        loader = PreTrainedTokenizerFast
        extra = saved.get("extra_special_tokens") or []
        if isinstance(extra, list):
            settings = {"extra_special_tokens": {}, "additional_special_tokens": extra}
    try:
        tokenizer = loader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **settings)
        if is_made_anew and tokenizer.is_fast and (folder / WHOLE_FILE).is_file():
            _divide_as_in_file(tokenizer, folder / WHOLE_FILE)
        tokenizer("a")  # some settings, such as model_input_names, are looked at by the first text
    except ImportError as error:
        what = f"{folder}: its tokenizer needs a package that is missing ({_reason(error)})"
        raise ModelError(f"{what}; install it") from error
    except BaseException as error:  # the library of the tokenizers raises bare Exception for a damaged file, or panics
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        what = f"{folder} has no tokenizer that can be read ({_reason(error)})"
        raise ModelError(f"{what}; {_remedy(folder)}") from error
    if tokenizer.is_fast:
        inner = "_encode_plus" if is_made_anew else "_batch_encode_plus"  # what calls with one text and with many do
        setattr(tokenizer, inner, _bounded(getattr(tokenizer, inner), folder))
    check_done(folder / SETTINGS_FILE, {**saved, **settings}, tokenizer)
    return tokenizer


def _divide_as_in_file(tokenizer: Any, path: Path) -> None:
    """Let a tokenizer of transformers 5 divide texts as ``tokenizer.json`` says, with the tokens that it has added."""
    from tokenizers import Tokenizer

    whole = Tokenizer.from_file(str(path))
    known = whole.get_added_tokens_decoder()
    whole.add_tokens([token for number, token in sorted(tokenizer.added_tokens_decoder.items()) if number not in known])
    whole.no_padding()
    whole.no_truncation()
    whole.encode_special_tokens = tokenizer.split_special_tokens
    tokenizer._tokenizer = whole


def _is_panic(error: BaseException) -> bool:
    """Whether code in Rust has panicked: that is no ``Exception``, so a thread would end and leave others waiting."""
    return type(error).__name__ == "PanicException"


def _characters(value: Any) -> int:
    parts = value if isinstance(value, list | tuple) else ()
    return len(value) if isinstance(value, str) else sum(map(_characters, parts))


def _bounded(encode: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """Let a tokenizer refuse too long texts with ``DataError``, and raise ``ModelError`` where it panics.

    An expression that needs too many steps for a text panics, for one; the words of the panic, which may have the text,
    are left out.
    """

    def encoded(*texts: Any, **how: Any) -> Any:
        given = [*texts, *(value for key, value in how.items() if "text" in key)]
        if (count := _characters(given)) > MAX_CHARACTERS:
            what = f"a text has {count:,} characters, and at most {MAX_CHARACTERS:,} are encoded"
            raise DataError(f"{what}; divide it into several rows")
        try:
            return encode(*texts, **how)
        except BaseException as error:
            if not _is_panic(error):
                raise
            raise ModelError(
                f"{folder}: its tokenizer fails at a text; take the {WHOLE_FILE} that belongs to the model, or leave "
                "such texts out"
            ) from None

    return encoded


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:_REASON_LENGTH]


def _remedy(folder: Path) -> str:
    """Return the remedy; the library reports only a failure where a package for the conversion of a file is missing."""
    if (folder / WHOLE_FILE).is_file():
        return "fetch the model again"
    if pieces := next((name for name in OTHER_PIECES if (folder / name).is_file()), ""):
        what = f"it has {pieces} without {WHOLE_FILE}, which is what is read"
        return f"{what}; save that file too, with AutoTokenizer where the package sentencepiece is installed"
    needs_package = (folder / PIECES_FILE).is_file()
    if needs_package and find_spec("sentencepiece") is None:
        return f"it has {PIECES_FILE} without {WHOLE_FILE}, which needs the package sentencepiece; install it"
    return "fetch the model again"


def _normal(tokenizer: Any, text: str) -> str:
    normalizer = tokenizer.backend_tokenizer.normalizer
    return text if normalizer is None else str(normalizer.normalize_str(text))


def begins_with_blank(tokenizer: Any) -> bool:
    """Whether a fast tokenizer puts a blank before a text that begins with a letter."""
    text, divider = _normal(tokenizer, "a"), tokenizer.backend_tokenizer.pre_tokenizer
    pieces = [text] if divider is None else [piece for piece, _ in divider.pre_tokenize_str(text)]
    return pieces[0].startswith((" ", "\u0120", "\u2581"))  # as byte-level and sentencepiece tokenizers write a blank


DOES: Final[Mapping[str, Callable[[Any], bool]]] = {
    "add_bos_token": lambda tokenizer: tokenizer.bos_token_id in tokenizer("a")["input_ids"][:1],
    "add_eos_token": lambda tokenizer: tokenizer.eos_token_id in tokenizer("a")["input_ids"][-1:],
    "add_prefix_space": begins_with_blank,
    "do_basic_tokenize": lambda tokenizer: True,
    "do_lower_case": lambda tokenizer: "a" in _normal(tokenizer, "A"),
    "strip_accents": lambda tokenizer: "e" in _normal(tokenizer, "\u00e9"),
    "tokenize_chinese_chars": lambda tokenizer: " \u4e2d" in _normal(tokenizer, "a\u4e2d"),
}
"""Key -> whether a tokenizer with ``tokenizer.json`` behaves as with the value true."""


def check_done(path: Path, saved: Mapping[str, Any], tokenizer: Any) -> None:
    """Refuse a fast tokenizer that behaves otherwise than a key of ``tokenizer_config.json`` (content ``saved``) says.

    Raises ``ModelError``: names the key and its value.
    """
    if not tokenizer.is_fast:
        return
    dropped = [key for key in sorted(ONLY_SLOW) if saved.get(key)]
    dropped += [key for key, does in DOES.items() if isinstance(saved.get(key), bool) and saved[key] != does(tokenizer)]
    if dropped:
        said = ", ".join(f"{key} = {saved[key]!r}" for key in dropped)
        raise ModelError(
            f"{path}: {said} is not what the tokenizer does: {type(tokenizer).__name__} of transformers drops it; save "
            "the tokenizer with tokenizer.json that does it, or remove the key"
        )
