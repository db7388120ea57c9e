"""Model folders, given or in the hub's cache: config, tensors and tokenizer, read without torch and code of the model.

Tensors are in one safetensors file, or in several with an index; only headers are read. The index may name files of the
folder only, and these must have its tensors.

``config.json`` can name code to load, so only the keys of a known family are used. Each key of the file is supported,
refused by name, or known to have no effect on numbers. Rotary positions are read in the forms of transformers 4 and 5.
Names and shapes of the tensors are compared with the config before a model is built, and tokenizer, preprocessor and
classes of the head too: files of two models, or a token without a row in the embedding, would otherwise end a run at
the first batch with such a token. Tokens that no text needs may be beyond the table, as in Gemma 3, where they stand
for pictures.

The Hugging Face cache has a folder for each model: ``models--OWNER--NAME/refs/REVISION`` has a commit, and
``snapshots/COMMIT`` its files, which are checked like any other folder. No network is used here.

Source: the layouts of ``save_pretrained``; the documentation of huggingface_hub, "Understand caching"; CVE-2026-4372
(code execution from a crafted config.json) and related ones; transformers 5.24, ``RotaryEmbeddingConfigMixin`` and
``Gemma3TextConfig``.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, Final, NamedTuple

from ringtune.errors import ModelError
from ringtune.models.families import FAMILIES, family_named
from ringtune.models.family import MAX_BLOCKS, MAX_LONGEST, NO_NUMBER, ConfigKey, Dimensions, Family, Shapes
from ringtune.models.four_bit import FourBitTensor, check_quantization, four_bit_tensors
from ringtune.models.gguf import gguf_tensors, only_gguf_file
from ringtune.models.preprocessor import read_image_steps
from ringtune.models.text_towers import is_tower, text_values, tower_name
from ringtune.models.tokenizer import (
    SETTINGS_FILE,
    SPECIAL_TOKENS_FILE,
    WHOLE_FILE,
    read_settings_table,
    read_tokenizer_settings,
)
from ringtune.storage.gguf import SUFFIX, GgufType
from ringtune.storage.pieces import file_sha256
from ringtune.storage.strict import is_lfs_pointer, json_digest, pointer_advice, read_given, read_json, regular
from ringtune.storage.tensor_files import TensorInfo, read_safetensors_header
from ringtune.texts import shown

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILES: Final[tuple[str, ...]] = (
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "preprocessor_config.json",
    "sentencepiece.bpe.model",
    SPECIAL_TOKENS_FILE,
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
"""Files besides the weights that an owner may need to convert its rows to tensors."""

MODEL_SIDE_FILES: Final[tuple[str, ...]] = ("generation_config.json", *TOKENIZER_FILES)
"""Files besides config and weights that are copied from the base model to a trained one."""

_MAX_INDEX_BYTES = 20_000_000
_LEGACY_ENDS = {".gamma": ".weight", ".beta": ".bias"}  # LayerNorm names of the first BERT files
NO_WEIGHTS = (".position_ids", ".token_type_ids", ".attn.bias", ".attn.masked_bias", ".inv_freq", ".mask_token")
"""Ends of names of buffers that old versions of the library saved, and of the mask token of ViT's pretraining."""


class StoredTensor(NamedTuple):
    """A tensor's header entry, and the path of its file.

    Attributes:
        four_bit: of a matrix in 4 bits, whose header entry is that of its bytes; else None.
    """

    path: Path
    info: TensorInfo
    four_bit: FourBitTensor | None = None

    @property
    def is_coded(self) -> bool:
        """Whether the bytes are no plain numbers: of a matrix in 4 bits, or of a tensor of a GGUF file."""
        return self.four_bit is not None or GgufType.of(self.info.dtype) is not None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor: that in the header, unless it is a matrix in 4 bits."""
        return self.info.shape if self.four_bit is None else self.four_bit.shape

    @property
    def sha256(self) -> str:
        """Digest of the bytes, hex; of a matrix in 4 bits with those beside it. See ``file_sha256``."""
        digest = file_sha256(self.path, self.info.offset, self.info.nbytes)
        if self.four_bit is None:
            return digest
        parts = [
            [end, info.dtype, file_sha256(path, info.offset, info.nbytes)]
            for end, (path, info) in sorted(self.four_bit.parts.items())
        ]
        return json_digest([digest, self.four_bit.kind, self.four_bit.offset, parts])


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Read the headers of all weight files: name in the file -> tensor; raises ``ModelError`` or ``IntegrityError``.

    A matrix in 4 bits is one tensor; those beside it are left out.
    """
    tensors = _headers(folder)
    matrices = four_bit_tensors({name: (stored.path, stored.info) for name, stored in tensors.items()})
    if not matrices:
        return tensors
    beside = {f"{name}.{end}" for name, matrix in matrices.items() for end in matrix.ends}
    return {
        name: stored._replace(four_bit=matrices.get(name)) for name, stored in tensors.items() if name not in beside
    }


def _headers(folder: Path) -> dict[str, StoredTensor]:
    path = folder / WEIGHTS_FILE
    if path.is_file():
        return {name: StoredTensor(path, info) for name, info in read_safetensors_header(path).items()}
    if not (folder / INDEX_FILE).is_file():
        if (whole := only_gguf_file(folder)) is None:
            raise ModelError(_no_weights(folder))
        return {name: StoredTensor(whole, info) for name, info in gguf_tensors(whole).items()}
    file_of = _read_index(folder / INDEX_FILE)
    headers = {file: read_safetensors_header(folder / file) for file in sorted(set(file_of.values()))}
    for name, file in file_of.items():
        if name not in headers[file]:
            raise ModelError(f"{folder / file} has no tensor {name!r}, which {INDEX_FILE} says; fetch the model again")
    return {name: StoredTensor(folder / file, headers[file][name]) for name, file in file_of.items()}


def shard_name(number: int, count: int) -> str:
    """Name of one of several weight files, counted from 1. Example: ``model-00002-of-00003.safetensors``."""
    return f"model-{number:05}-of-{count:05}.safetensors"


def base_name(name: str, family: Family) -> str:
    """Name of a tensor in the base model: without the family's prefix, with the current ending.

    Example: BERT's ``bert.embeddings.LayerNorm.gamma`` is ``embeddings.LayerNorm.weight``.
    """
    name = tower_name(name) or name.removeprefix(family.prefix)
    for old, new in _LEGACY_ENDS.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def select_tensors(
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any],
    *,
    where: str,
    blocks: Iterable[int],
    is_owner: bool,
    with_decoder: bool,
    with_unused: bool = False,
) -> list[str]:
    """Select the names of the tensors of some blocks and of an owner, and compare their shapes with the config.

    A tensor that one block has is required of every block, in the same shape, unless the family is generic: the first
    blocks of a mixture may have no experts. Left out are task heads, buffers, and a decoder that is tied to the token
    table. Names and ``shapes`` are those of the base model. With ``with_decoder`` an owner's head is the pretrained
    decoder; ``with_unused`` adds what the file has of ``Family.unused_paths``, such as a pooler.
    """
    family = FAMILIES[config["model_type"]]
    unread = family.unread(config)
    weights = {
        name: shape for name, shape in shapes.items() if not name.endswith(NO_WEIGHTS) and not name.startswith(unread)
    }
    selected: Shapes = (_unlike_blocks if family.generic else _like_blocks)(weights, config, blocks, where)
    shared = tuple(f"{path}." for path in family.shared_paths)
    selected |= {name: shape for name, shape in weights.items() if name.startswith(shared)}
    if is_owner:
        of_owner = tuple(f"{path}." for path in family.owner_paths)
        selected |= {name: shape for name, shape in weights.items() if name.startswith(of_owner)} | family.owner_shapes(
            config
        )
        if with_decoder and not config["tie_word_embeddings"]:
            dimensions = family.dimensions(config)
            selected[f"{family.head}.weight"] = (dimensions.vocab, dimensions.hidden)
        if with_decoder and has_head_bias(family, config):
            selected[f"{family.head}.bias"] = (family.dimensions(config).vocab,)
    for name, shape in selected.items():
        if name not in shapes:
            raise ModelError(f"{where} has no tensor {name!r}, which {CONFIG_FILE} asks for; is the model complete?")
        if shapes[name] != shape:
            raise ModelError(f"{where}: tensor {name!r} has shape {shapes[name]}, {CONFIG_FILE} means {shape}")
    unused = tuple(f"{path}." for path in family.unused_paths) if with_unused else ()
    return [*selected, *(name for name in shapes if name.startswith(unused))]


def _like_blocks(weights: Shapes, config: Mapping[str, Any], blocks: Iterable[int], where: str) -> Shapes:
    """Return the tensors of blocks of equal shapes: those that the config asks for, and those that any block has."""
    family = FAMILIES[config["model_type"]]
    inside = dict(family.block_shapes(config))
    for name, shape in weights.items():
        if name.startswith(family.block_prefix):
            inside.setdefault(name.removeprefix(family.block_prefix).partition(".")[2], shape)
    return {f"{family.block_prefix}{block}.{name}": shape for block in blocks for name, shape in inside.items()}


def _unlike_blocks(weights: Shapes, config: Mapping[str, Any], blocks: Iterable[int], where: str) -> Shapes:
    """Return the tensors of blocks that may differ; loading compares them with the model that the library builds."""
    selected: Shapes = {}
    for block in blocks:
        start = f"{FAMILIES[config['model_type']].block_prefix}{block}."
        of_block = {name: shape for name, shape in weights.items() if name.startswith(start)}
        if not of_block:
            raise ModelError(f"{where} has no tensor of block {block}, which {CONFIG_FILE} asks for; is it complete?")
        selected |= of_block
    return selected


def has_head_bias(family: Family, config: Mapping[str, Any]) -> bool:
    """Whether the head of a language model has a bias."""
    return family.head_bias or bool(config.get("lm_head_bias"))


def _read_index(path: Path) -> dict[str, str]:
    try:
        if path.stat().st_size > _MAX_INDEX_BYTES:
            raise ModelError(f"{path} has {path.stat().st_size:,} bytes, an index has {_MAX_INDEX_BYTES:,} at most")
        weight_map = read_json(path)["weight_map"]
        files = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} is not a readable index ({error!r}); fetch the model again") from error
    for file in files.values():
        if Path(file).name != file or file in ("", ".", ".."):
            raise ModelError(f"{path} names the file {file!r}, which is not in the folder; fetch the model again")
    return files


def _no_weights(folder: Path) -> str:
    if any(folder.glob("*.bin")):
        return f"{folder} has pickled weights only, which are never opened; save them as {WEIGHTS_FILE}"
    return f"{folder} has no {WEIGHTS_FILE}; give a folder that has one, saved with safe_serialization=True"


MAIN: Final = "main"
_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_ID: Final = re.compile(rf"(?P<owner>{_NAME})/(?P<name>{_NAME})(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]{{0,127}}))?")
COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_MAX_REF_BYTES: Final = 128


class HubId(NamedTuple):
    """A model on a hub."""

    owner: str
    name: str
    revision: str = MAIN

    @property
    def repository(self) -> str:
        """Id without a revision."""
        return f"{self.owner}/{self.name}"

    def __str__(self) -> str:
        """Write the id as in a job."""
        return self.repository if self.revision == MAIN else f"{self.repository}@{self.revision}"


def hub_id(text: str) -> HubId | None:
    """Parse ``OWNER/NAME`` or ``OWNER/NAME@REVISION``; None if the text has another form, as a path.

    Example: ``sentence-transformers/all-MiniLM-L6-v2`` is an id; ``./models/tiny``, ``a/b/c`` and ``tiny`` are not.
    """
    match = _ID.fullmatch(text)
    if match is None or any(".." in part for part in match.groups(default="")):
        return None
    return HubId(match["owner"], match["name"], match["revision"] or MAIN)


def cached_folder(model: HubId, cache: Path) -> Path | None:
    """Return the folder of a model's snapshot in a cache; None if it, its config or its weights are missing."""
    place = place_of(model, cache)
    commit = model.revision if COMMIT.fullmatch(model.revision) else _commit_of(place / "refs" / model.revision)
    folder = place / "snapshots" / commit
    return folder if commit and _is_whole(folder) else None


def place_of(model: HubId, cache: Path) -> Path:
    """Return the folder of a model in a cache, above its snapshots."""
    return cache / f"models--{model.owner}--{model.name}"


def id_of_folder(folder: PurePath) -> str:
    """Return ``OWNER/NAME`` for a snapshot in a cache, the folder's name for another folder."""
    place = folder.parent.parent.name.split("--")
    if folder.parent.name == "snapshots" and COMMIT.fullmatch(folder.name) and place[0] == "models":
        return "/".join(place[1:3])
    return folder.name


def name_of_folder(folder: PurePath) -> str:
    """Return a model's name from its folder, without the owner."""
    return id_of_folder(folder).rpartition("/")[2]


def _commit_of(ref: Path) -> str:
    try:
        with open(ref, "rb", opener=regular) as file:
            text = file.read(_MAX_REF_BYTES).decode("ascii", errors="replace").strip()
    except OSError:
        return ""
    return text if COMMIT.fullmatch(text) else ""


def _is_whole(folder: Path) -> bool:
    """Whether config and some weights exist; missing files of an index are found when they are read."""
    weights = [*folder.glob("*.safetensors"), *folder.glob(INDEX_FILE)]
    return (folder / CONFIG_FILE).is_file() and any(path.is_file() for path in weights)


_MAX_CONFIG_BYTES = 1_000_000
_RUNS_CODE = {"auto_map": "it names code to run"}
_QUANTIZATION = "quantization_config"
_ATTENTIONS = ("eager", "sdpa", None)
_ATTENTION_KEYS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
OLD: Final = 4
"""Version of transformers that reads the older form of rotary positions."""
_ROPE_PARAMETERS, _ROPE_SCALING = "rope_parameters", "rope_scaling"
_LOCAL_BASE = "rope_local_base_freq"
_THETA_OF_LAYERS = {"full_attention": "rope_theta", "sliding_attention": _LOCAL_BASE}


def read_config(folder: str | Path) -> dict[str, Any]:
    """Read the keys of ``config.json`` that affect numbers, with defaults, as transformers 4 names them."""
    path = Path(folder) / CONFIG_FILE
    values = text_values(_read_json(path), where=str(path))
    family = family_named(values.get("model_type"), where=str(path))
    values = _by_own_names(path, family, family.as_read(with_old_rope(values, where=path)))
    if settings := values.get(_QUANTIZATION):
        check_quantization(settings, where=str(path), inputs_first=family.layout.inputs_first)
    for key, reason in {**_RUNS_CODE, **family.refused}.items():
        if values.get(key):
            raise ModelError(f"{path}: {key} is refused: {reason}; use a model without it")
    for key in _ATTENTION_KEYS:
        if values.get(key) not in _ATTENTIONS:
            raise ModelError(f"{path}: {key} = {values[key]!r} is refused; remove it, or use eager or sdpa")
    _check_known(path, family, values)
    config = {key: _config_value(path, key, spec, values) for key, spec in family.config_keys.items()}
    if family.generic and family.config_keys:
        absent = {key for key, spec in family.config_keys.items() if spec.default is None and config[key] is None}
        config = {key: value for key, value in config.items() if key not in absent}
    elif family.generic:  # the library's own class knows the other keys
        left_out = NO_NUMBER | family.no_number | {_QUANTIZATION}
        left_out |= {_LOCAL_BASE} if values.get(_LOCAL_BASE) == values.get("rope_theta") else frozenset()
        passed_on = {key: value for key, value in values.items() if key not in left_out and not key.startswith("_")}
        config = {"tie_word_embeddings": family.tied, **passed_on}
    problem = family.problem(config)
    if problem:
        raise ModelError(f"{path}: {problem}")
    padding, vocab = config.get("pad_token_id"), config.get("vocab_size", 0)
    if padding is not None and not padding < vocab:
        raise ModelError(f"{path}: pad_token_id {padding} is no row of a table of {vocab}; make them fit")
    dimensions = family.dimensions(config)
    for count, most, what in (
        (dimensions.num_blocks, MAX_BLOCKS, "blocks"),
        (dimensions.longest, MAX_LONGEST, "tokens of a text"),
    ):
        if count > most:
            raise ModelError(f"{path}: {count:,} {what} are more than {most:,}, the most that can be planned")
    return {"model_type": family.model_type, **config}


def has_tower(folder: str | Path) -> bool:
    """Whether a folder has a model of texts and pictures, whose text tower trains; not if there is no config."""
    path = Path(folder) / CONFIG_FILE
    return path.is_file() and is_tower(_read_json(path))


def with_old_rope(values: Mapping[str, Any], *, where: str | Path = CONFIG_FILE) -> dict[str, Any]:
    """Copy a config with its rotary positions in the keys of transformers 4, which transformers 5 reads too.

    Those of a family that only transformers 5 has stay as they are.

    Example: ``rope_parameters`` of ``{"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}`` become ``rope_theta``
    5e5 and ``rope_scaling`` of ``{"rope_type": "linear", "factor": 2.0}``.
    """
    family = FAMILIES.get(str(values.get("model_type")))
    if family is not None and family.since > OLD:
        return dict(values)
    config = {key: value for key, value in values.items() if key != _ROPE_PARAMETERS}
    parameters = values.get(_ROPE_PARAMETERS) or {}
    source = _ROPE_PARAMETERS
    if not parameters and isinstance(values.get(_ROPE_SCALING), dict):
        parameters, source = config.pop(_ROPE_SCALING), _ROPE_SCALING
    if not isinstance(parameters, dict):
        raise ModelError(f"{where}: {source} has to be a table, but is {parameters!r}; fetch the model again")
    by_layer = {key: value or {} for key, value in parameters.items() if key in _THETA_OF_LAYERS}
    if by_layer.keys() != parameters.keys():
        if by_layer:
            other = ", ".join(sorted(parameters.keys() - by_layer.keys()))
            raise ModelError(f"{where}: {source} has {other} beside {', '.join(by_layer)}; use one form")
        by_layer = {"full_attention": parameters}
    for layers, given in by_layer.items():
        if not isinstance(given, dict):
            raise ModelError(
                f"{where}: {source} of {layers} has to be a table, but is {given!r}; fetch the model again"
            )
        rest = {key: value for key, value in given.items() if key not in ("rope_theta", "partial_rotary_factor")}
        moved = {_THETA_OF_LAYERS[layers]: given.get("rope_theta")}
        moved["partial_rotary_factor"] = given.get("partial_rotary_factor")
        if rest.keys() - {"type", "rope_type"} or rest.get("rope_type", rest.get("type", "default")) != "default":
            if layers != "full_attention":
                raise ModelError(f"{where}: {source} of {layers} is {given}; only rope_theta is supported there")
            moved[_ROPE_SCALING] = rest
        for key, value in moved.items():
            if value is not None and config.get(key, value) not in (value, None):
                raise ModelError(f"{where}: {key} is {config[key]!r}, and {value!r} in {source}; make them equal")
            config |= {} if value is None else {key: value}
    return config


def model_dimensions(config: Mapping[str, Any]) -> Dimensions:
    """Return the dimensions in a config from ``read_config``."""
    return FAMILIES[config["model_type"]].dimensions(config)


def base_tensors(
    folder: str | Path, config: Mapping[str, Any], *, with_decoder: bool = False
) -> dict[str, StoredTensor]:
    """Read the headers of a whole base model, and compare shapes with the config.

    Names are without the model prefix, such as ``encoder.layer.0...``; task heads and buffers are left out. With
    ``with_decoder`` the language model's head is added, unless it is tied to the token table. Raises ``ModelError``
    also where two tensors have one such name and differ: a node would take either.
    """
    family, headers = FAMILIES[config["model_type"]], read_headers(Path(folder))
    tensors = {base_name(name, family): stored for name, stored in headers.items()}
    names = select_tensors(
        {name: stored.shape for name, stored in tensors.items()},
        config,
        where=str(folder),
        blocks=range(family.dimensions(config).num_blocks),
        is_owner=True,
        with_decoder=with_decoder,
        with_unused=True,
    )
    used = set(names)
    for stored_name, stored in headers.items() if len(headers) > len(tensors) else ():
        name = base_name(stored_name, family)
        if name in used and (stored.shape, stored.sha256) != (tensors[name].shape, tensors[name].sha256):
            raise ModelError(
                f"{folder} has two tensors {shown(name)} that differ, one of them as {shown(stored_name)}; save the "
                "model again without it"
            )
    return {name: tensors[name] for name in names}


def near_folder(path: Path) -> str:
    """Name the folder or GGUF file beside ``path`` whose name is nearest; empty if there is none."""
    beside = [entry.name for entry in path.parent.glob("*") if entry.is_dir() or entry.suffix == SUFFIX]
    close = difflib.get_close_matches(path.name, sorted(beside), n=1)
    return f" (did you mean '{path.parent / close[0]}'?)" if close else ""


def _read_json(path: Path) -> dict[str, Any]:
    if not path.parent.is_dir():
        is_file = path.parent.exists()
        what = "is a file, it has to be a folder" if is_file else f"does not exist{near_folder(path.parent)}"
        raise ModelError(
            f"model folder {path.parent} {what}; model.path (or --model) is a folder on this machine with config.json "
            "and model.safetensors, a GGUF file, or OWNER/NAME of a model on a hub"
        )
    if is_lfs_pointer(path):
        raise ModelError(pointer_advice(path))
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ModelError(f"{path} has {path.stat().st_size:,} bytes, a config has {_MAX_CONFIG_BYTES:,} at most")
        values = json.loads(read_given(path), parse_int=_in_64_bits)
    except OSError as error:
        raise ModelError(
            f"can't read {path}: {error.strerror}; give a folder with config.json, or a GGUF file by its name"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}; fetch the model again") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} has to be a table")
    return values


def _in_64_bits(text: str) -> int:
    number = int(text)
    if number.bit_length() > 63:
        raise ValueError(f"{text[:20]}... is a number beyond 64 bits")
    return number


def _by_own_names(path: Path, family: Family, values: dict[str, Any]) -> dict[str, Any]:
    """Replace aliases of keys by the family's names. Example: GPT-2's ``hidden_size`` becomes ``n_embd``."""
    for alias, key in family.aliases.items():
        value = values.pop(alias, None)
        if value is not None and values.setdefault(key, value) != value:
            raise ModelError(
                f"{path}: {alias} is {value!r} and {key} is {values[key]!r}, which are one; make them equal"
            )
    return values


def _check_known(path: Path, family: Family, values: Mapping[str, Any]) -> None:
    """Refuse keys that are neither supported nor known to have no effect on numbers, unless their value is empty.

    The keys of a generic decoder are its class's, which the library knows.
    """
    if not family.config_keys:
        return
    known = (
        family.config_keys.keys()
        | family.refused.keys()
        | family.no_number
        | NO_NUMBER
        | _RUNS_CODE.keys()
        | {_QUANTIZATION}
    )
    unknown = sorted(
        key for key, value in values.items() if key not in known and value not in (None, False, "", [], {})
    )
    if unknown:
        raise ModelError(
            f"{path}: {', '.join(unknown)}: not known for model_type {family.model_type!r}, and may change numbers; "
            "use a model without it, or remove it from config.json if it changes none"
        )


def _config_value(path: Path, key: str, spec: ConfigKey, values: Mapping[str, Any]) -> Any:
    value = values.get(key)
    if value is None:
        return None if spec.nullable and key in values else spec.default
    kind = spec.nullable or type(spec.default)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ModelError(f"{path}: {key} has to be {kind.__name__}, but is {type(value).__name__} {value!r}")
    if spec.choices and value not in spec.choices:
        choices = ", ".join(map(str, spec.choices))
        raise ModelError(f"{path}: {key} = {value!r} is not supported; supported: {choices}")
    if isinstance(value, int | float) and not spec.at_least <= value < math.inf:
        raise ModelError(f"{path}: {key} is {value}, it has to be at least {spec.at_least}")
    return value


_LISTS: Final = ("vocab.txt", "vocab.json")
_SETTINGS: Final = (SETTINGS_FILE, SPECIAL_TOKENS_FILE)
_HEADS: Final = ("classifier.weight", "classifier.out_proj.weight", "score.weight")
_NAMED: Final = ("pad_token", "bos_token", "eos_token", "unk_token", "cls_token", "sep_token")


class _Tokens(NamedTuple):
    """Tokens of a tokenizer, each with its number."""

    ids: Mapping[str, int]
    added: Mapping[str, int]
    around: Mapping[str, int]

    def __len__(self) -> int:
        return 1 + max([*self.ids.values(), *self.added.values()], default=-1)


def check_files(folder: str | Path, config: Mapping[str, Any]) -> None:
    """Refuse inconsistent files, or settings that would change tokens or pixels without notice; some may be missing."""
    vocab = model_dimensions(config).vocab
    if vocab:
        _check_tokens(Path(folder), vocab)
    else:
        read_image_steps(Path(folder), channels=config["num_channels"], side=config["image_size"])
    _check_classes(Path(folder))


def _check_classes(folder: Path) -> None:
    """Refuse a head, which is not used, with other classes than ``id2label``: one of the files is of another model."""
    values = read_json(folder / CONFIG_FILE)
    named = values.get("id2label") if isinstance(values, dict) else None
    if not isinstance(named, dict):
        return
    for name, stored in _heads(folder).items():
        if stored.shape[0] != len(named):
            raise ModelError(
                f"{folder}: tensor {name} of {stored.path.name} has {stored.shape[0]} classes, id2label of "
                f"{CONFIG_FILE} has {len(named)}; take both files of one model"
            )


def classes_of_head(folder: str | Path) -> int:
    """Number of classes of the classifier in a folder's weights, which no run uses; 0 without one."""
    return next((stored.shape[0] for stored in _heads(Path(folder)).values()), 0)


def _heads(folder: Path) -> dict[str, StoredTensor]:
    if not any((folder / name).is_file() for name in (WEIGHTS_FILE, INDEX_FILE)):
        return {}
    return {name: stored for name, stored in read_headers(folder).items() if name in _HEADS and stored.shape}


def _check_tokens(folder: Path, vocab: int) -> None:
    """Refuse a tokenizer with unknown settings, or with tokens beyond the embedding table."""
    read_tokenizer_settings(folder)
    tokens = _tokens(folder)
    if tokens is None:
        return
    used = {**tokens.ids, **tokens.around, **dict(_named(folder, tokens))}
    token = max(used, key=used.__getitem__, default="")
    if token and used[token] >= vocab:
        count = max(len(tokens), used[token] + 1)
        raise ModelError(
            f"{folder}: the tokenizer has {count:,} tokens, the embedding {vocab:,} rows (vocab_size of config.json), "
            f"and {token!r} is token {used[token]:,}, counted from 0; take the tokenizer that belongs to the model, or "
            f"enlarge the embedding: model.resize_token_embeddings({count}) and save both"
        )


def _tokens(folder: Path) -> _Tokens | None:
    """Read the tokens of the first file that has them; None without such a file."""
    name = next((name for name in (WHOLE_FILE, *_LISTS) if (folder / name).is_file()), None)
    if name is None:
        return None
    status = (folder / name).stat()
    return _tokens_of(folder / name, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=4)
def _tokens_of(path: Path, changed_ns: int, size_bytes: int) -> _Tokens:
    """Read a file of tokens, cached by its time and size; a damaged file has none, and is refused when it is loaded."""
    try:
        if path.name == "vocab.txt":
            lines = read_given(path).splitlines()
            return _Tokens({token: index for index, token in enumerate(lines)}, {}, {})
        content = read_json(path)
        if path.name != WHOLE_FILE:
            return _Tokens(_numbers(content), {}, {})
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, list):  # of a unigram model: tokens with their scores
            vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
        added = {str(token["content"]): int(token["id"]) for token in content.get("added_tokens") or ()}
        return _Tokens(_numbers(vocabulary), added, dict(_around(content.get("post_processor"))))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return _Tokens({}, {}, {})


def _numbers(vocabulary: Any) -> dict[str, int]:
    """Return a copy of a vocabulary; raises ``TypeError`` where a value is no whole number."""
    if not all(type(number) is int for number in vocabulary.values()):
        raise TypeError("a token has no number")
    return dict(vocabulary)


def _around(processor: Any) -> Iterator[tuple[str, int]]:
    """Yield the tokens that a post-processor puts around every text, with their numbers."""
    if not isinstance(processor, dict):
        return
    for part in processor.get("processors") or ():
        yield from _around(part)
    for token, entry in (processor.get("special_tokens") or {}).items():
        yield from ((str(token), int(number)) for number in entry["ids"])
    for key in ("cls", "sep"):
        if isinstance(pair := processor.get(key), list):
            yield str(pair[0]), int(pair[1])


def _named(folder: Path, tokens: _Tokens) -> Iterator[tuple[str, int]]:
    """Yield the tokens that the settings name, with their numbers; an unknown one gets the number after all others."""
    for name in _SETTINGS:
        settings = read_settings_table(folder / name)
        for entry in map(settings.get, _NAMED):
            token = entry.get("content") if isinstance(entry, dict) else entry
            if isinstance(token, str) and token:
                yield token, tokens.added.get(token, tokens.ids.get(token, len(tokens)))
