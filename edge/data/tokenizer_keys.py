"""Every key of ``tokenizer_config.json``: carried out, refused by name, or known to change no token.

Special tokens have the names of the settings; which of them are put around a text is said by ``tokenizer.json``. Most
keys are carried out by the classes of transformers. Some of these drop a key without a word: the fast one of GPT-2 adds
no first token whatever ``add_bos_token`` says. What such a key says is compared with what the tokenizer does.

Source: transformers 4.57 and 5.24, the tokenizers of the supported families and their bases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from ringtune.errors import ModelError

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
    """Refuse keys with a value of which nobody knows here whether it changes tokens.

    Args:
        path: of ``tokenizer_config.json``.
        saved: what it says.

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
        saved: what it says.
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
