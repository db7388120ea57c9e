"""Settings of a tokenizer, ``tokenizer_config.json``, checked without torch: no key may change tokens without notice.

Each key is supported, refused by name, or known not to change tokens. Keys that some classes of transformers apply and
others ignore are compared with the loaded tokenizer (``edge.data.tokens``).

Source: transformers 4.57 and 5.24, the tokenizers of the supported families and their bases.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ringtune.errors import ModelError
from ringtune.storage.strict import is_lfs_pointer, pointer_advice, read_json

SETTINGS_FILE: Final = "tokenizer_config.json"
SPECIAL_TOKENS_FILE: Final = "special_tokens_map.json"
WHOLE_FILE: Final = "tokenizer.json"
PIECES_FILE: Final = "tokenizer.model"
OTHER_PIECES: Final = ("spm.model", "sentencepiece.bpe.model")
"""Files of DeBERTa's and XLM-RoBERTa's tokenizers, which nobody fetches or exports: ``WHOLE_FILE`` has all of them."""

TEMPLATE_FILE: Final = "chat_template.jinja"
TEMPLATE_FOLDER: Final = "additional_chat_templates"
MAX_TEMPLATES: Final = 32
"""Most files of a ``TEMPLATE_FOLDER`` that are read."""

TEMPLATE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
_MAX_TEMPLATE_BYTES: Final = 1 << 20
_FILES: Final = (WHOLE_FILE, SETTINGS_FILE, "vocab.txt", "vocab.json", "merges.txt", PIECES_FILE)
CLASSES_OF_5: Final = ("TokenizersBackend", "PythonBackend")

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
    unsloth_fixed unsloth_version use_default_system_prompt use_fast verbose vocab_type
"""
NO_NUMBER: Final = frozenset(_NO_NUMBER.split())
"""Keys that change no token: rows are cut at ``train.max_length`` and padded on the right, and only the task chat has a
template.

Other keys that end in ``_token`` are accepted too: their tokens are in the vocabulary.
"""
ONLY_SLOW: Final = frozenset({"never_split", "sp_model_kwargs"})
"""Keys that only tokenizers without ``tokenizer.json`` apply."""
_COMPARED: Final = """
    add_bos_token add_eos_token add_prefix_space do_basic_tokenize do_lower_case strip_accents tokenize_chinese_chars
"""
COMPARED: Final = frozenset(_COMPARED.split())
"""Keys that are compared with the loaded tokenizer if there is a ``tokenizer.json``."""
_NAMES_OF_FILES: Final = ("tokenizer_file", "vocab_file", "merges_file")


def read_tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Read and check ``tokenizer_config.json``; empty if the file is missing; raises ``ModelError``."""
    for name in _FILES:
        if is_lfs_pointer(folder / name):
            raise ModelError(pointer_advice(folder / name))
    path = folder / SETTINGS_FILE
    settings = read_settings_table(path)
    _check_keys(path, settings)
    if is_of_transformers_5(settings) and not (folder / WHOLE_FILE).is_file():
        raise ModelError(
            f"{folder}: its tokenizer was saved by transformers 5 (tokenizer_class "
            f"{settings.get('tokenizer_class')!r}) without {WHOLE_FILE}, which is what is read; save that file too"
        )
    return settings


def require_tokenizer(folder: Path) -> None:
    """Refuse a folder without any file of a tokenizer, as ``model.save_pretrained`` alone writes it: ``ModelError``."""
    if not any((folder / name).is_file() for name in (*_FILES, *OTHER_PIECES)):
        raise ModelError(
            f"{folder} has no tokenizer ({WHOLE_FILE}); save it there too: tokenizer.save_pretrained({str(folder)!r})"
        )


def read_settings_table(path: Path) -> dict[str, Any]:
    """Read a file of settings of a tokenizer; empty if it is missing; raises ``ModelError``."""
    try:
        table = read_json(path) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not JSON that can be read ({error}); fetch the model again") from error
    if not isinstance(table, dict):
        raise ModelError(f"{path} has to be a table; fetch the model again")
    return table


def is_of_transformers_5(saved: Mapping[str, Any]) -> bool:
    """Whether transformers 5 wrote these settings: they name a backend, or list extra tokens without names."""
    return (
        saved.get("tokenizer_class") in CLASSES_OF_5
        or "backend" in saved
        or isinstance(saved.get("extra_special_tokens"), list)
    )


def _check_keys(path: Path, saved: Mapping[str, Any]) -> None:
    """Refuse keys that name code or another file, and unknown keys that may change tokens, with ``ModelError``."""
    if saved.get("auto_map"):
        raise ModelError(f"{path}: auto_map is refused: it names code to run; use a tokenizer without it")
    for key in _NAMES_OF_FILES:
        if saved.get(key):
            raise ModelError(
                f"{path}: {key} = {saved[key]!r} is refused: it names a file to read in place of that in this folder; "
                "remove the key"
            )
    known = CARRIED_OUT | NO_NUMBER | ONLY_SLOW | COMPARED
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


def is_template_file(name: str) -> bool:
    """Whether a name in a model folder is that of a further chat template: ``additional_chat_templates/rag.jinja``."""
    folder, _, file = name.partition("/")
    return folder == TEMPLATE_FOLDER and file.endswith(".jinja") and bool(TEMPLATE_NAME.fullmatch(file[:-6]))


def template_files(folder: Path) -> list[str]:
    """Return the sorted names of a model's further chat templates, relative to its folder; at most 32."""
    names = sorted(f"{TEMPLATE_FOLDER}/{path.name}" for path in (folder / TEMPLATE_FOLDER).glob("*.jinja"))
    return [name for name in names if is_template_file(name) and (folder / name).is_file()][:MAX_TEMPLATES]


def chat_templates(folder: Path) -> dict[str, str]:
    """Return name -> text of a model's chat templates; the one of a model without names is ``default``.

    As in transformers, files take the place of what ``tokenizer_config.json`` has, where there are any.
    """
    templates: dict[str, str] = {}
    for name in ((TEMPLATE_FILE,) if (folder / TEMPLATE_FILE).is_file() else ()) + tuple(template_files(folder)):
        path = folder / name
        try:
            if path.stat().st_size > _MAX_TEMPLATE_BYTES:
                raise ModelError(f"{path} has more than {_MAX_TEMPLATE_BYTES >> 20} MiB, which no chat template has")
            templates["default" if name == TEMPLATE_FILE else path.stem] = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} is no text that can be read ({error}); fetch the model again") from error
    if templates:
        return templates
    settings = folder / SETTINGS_FILE
    try:
        saved = dict(read_json(settings)).get("chat_template") if settings.is_file() else None
    except (OSError, ValueError, TypeError):
        saved = None  # told when the tokenizer is loaded
    if isinstance(saved, str) and saved:
        return {"default": saved}
    try:
        return {str(template["name"]): str(template["template"]) for template in saved or ()}
    except (KeyError, TypeError) as error:
        what = f"{folder / SETTINGS_FILE}: chat_template is neither a text nor a list of name and template"
        raise ModelError(f"{what}; fetch the model again") from error
