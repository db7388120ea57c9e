"""What a model folder says about itself, read without torch and without trusting it.

``config.json`` can name code to load, so only the keys of a known family are taken over, and the model is built of
these alone. Each key of the file is carried out, refused by name, or known to change no number; there is no fourth
kind. Transformers 5 writes rotary positions in another form than 4; both are read. The tensors' names and shapes are
compared with what that config means, before anybody builds a model.

Source: CVE-2026-4372 (code execution from a crafted config.json) and its siblings; transformers 5.24,
``RotaryEmbeddingConfigMixin`` and ``Gemma3TextConfig``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringtune.errors import ModelError
from ringtune.files.given_files import read_json
from ringtune.files.pointers import is_lfs_pointer, pointer_advice
from ringtune.models.families import FAMILIES, family_named
from ringtune.models.family import MOST_BLOCKS, NO_NUMBER, ConfigKey, Dimensions, Family
from ringtune.models.tensors import CONFIG_FILE, StoredTensor, base_name, read_headers, select_tensors

_MAX_CONFIG_BYTES = 1_000_000
_RUNS_CODE = {
    "auto_map": "it names code to run",
    "quantization_config": "it names a quantizer to load; give the plain weights",
}
_ATTENTIONS = ("eager", "sdpa", None)
_ATTENTION_KEYS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
_ROPE_PARAMETERS, _ROPE_SCALING = "rope_parameters", "rope_scaling"
_THETA_OF_LAYERS = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}


def read_config(folder: str | Path) -> dict[str, Any]:
    """The keys of ``config.json`` that change numbers, defaults filled in, and ``model_type``.

    Args:
        folder: the model folder.

    Returns:
        Keys that are carried out, as transformers 4 names them. Keys that change no number are left out.

    Raises:
        ModelError: no such folder or file, not JSON, a family that is not supported, a key that would load
            code, that is not carried out or not known, or a value of a wrong type or out of range.
    """
    path = Path(folder) / CONFIG_FILE
    values = _read_json(path)
    family = family_named(values.get("model_type"), where=str(path))
    values = _by_own_names(path, family, with_old_rope(values, where=path))
    for key, reason in {**_RUNS_CODE, **family.refused}.items():
        if values.get(key):
            raise ModelError(f"{path}: {key} is refused: {reason}; use a model without it")
    for key in _ATTENTION_KEYS:
        if values.get(key) not in _ATTENTIONS:
            raise ModelError(f"{path}: {key} = {values[key]!r} is refused; remove it, or use eager or sdpa")
    _check_known(path, family, values)
    config = {key: _config_value(path, key, spec, values) for key, spec in family.config_keys.items()}
    problem = family.problem(config)
    if problem:
        raise ModelError(f"{path}: {problem}")
    padding, vocab = config.get("pad_token_id"), config.get("vocab_size", 0)
    if padding is not None and not padding < vocab:
        raise ModelError(f"{path}: pad_token_id {padding} is no row of a table of {vocab}; make them fit")
    num_blocks = family.dimensions(config).num_blocks
    if num_blocks > MOST_BLOCKS:
        raise ModelError(f"{path}: {num_blocks:,} blocks are more than {MOST_BLOCKS:,}, the most that can be planned")
    return {"model_type": family.model_type, **config}


def with_old_rope(values: Mapping[str, Any], *, where: str | Path = CONFIG_FILE) -> dict[str, Any]:
    """Write the rotary positions of a config as transformers 4 does, which transformers 5 reads as well.

    Example: ``rope_parameters`` of ``{"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}`` become ``rope_theta``
    5e5 and ``rope_scaling`` of ``{"rope_type": "linear", "factor": 2.0}``.

    Args:
        values: of a ``config.json``; not changed.
        where: the file, for messages.

    Returns:
        A copy with ``rope_theta``, ``rope_scaling``, ``rope_local_base_freq`` and ``partial_rotary_factor`` in place of
        ``rope_parameters``.

    Raises:
        ModelError: a form that is not known, or two values for one key.
    """
    found = {key: value for key, value in values.items() if key != _ROPE_PARAMETERS}
    parameters = values.get(_ROPE_PARAMETERS) or {}
    source = _ROPE_PARAMETERS
    if not parameters and isinstance(values.get(_ROPE_SCALING), dict):
        parameters, source = found.pop(_ROPE_SCALING), _ROPE_SCALING
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
            if value is not None and found.get(key, value) not in (value, None):
                raise ModelError(f"{where}: {key} is {found[key]!r}, and {value!r} in {source}; make them equal")
            found |= {} if value is None else {key: value}
    return found


def model_dimensions(config: Mapping[str, Any]) -> Dimensions:
    """The dimensions in a config from ``read_config``, whatever its keys are called."""
    return FAMILIES[config["model_type"]].dimensions(config)


def base_tensors(
    folder: str | Path, config: Mapping[str, Any], *, with_decoder: bool = False
) -> dict[str, StoredTensor]:
    """The base model's tensors by their name without the model prefix, compared with the config.

    Args:
        folder: of the model, with one safetensors file or several and their index.
        config: from ``read_config``.
        with_decoder: also the language model's head, unless it is the token table itself.

    Returns:
        ``encoder.layer.0...`` and so on; what else the file has (position ids, a task head) is left out.

    Raises:
        ModelError: no safetensors file, a tensor is missing or has another shape than the config says.
        IntegrityError: a file is damaged.
    """
    family = FAMILIES[config["model_type"]]
    found = {base_name(name, family): stored for name, stored in read_headers(Path(folder)).items()}
    names = select_tensors(
        {name: stored.shape for name, stored in found.items()},
        config,
        where=str(folder),
        blocks=range(family.dimensions(config).num_blocks),
        is_owner=True,
        with_decoder=with_decoder,
    )
    unused = tuple(f"{path}." for path in family.unused_paths)
    return {name: found[name] for name in [*names, *(name for name in found if name.startswith(unused))]}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.parent.is_dir():
        what = "is a file, it has to be a folder" if path.parent.exists() else "does not exist"
        raise ModelError(
            f"model folder {path.parent} {what}; model.path is a folder on this machine with config.json and "
            "model.safetensors, or OWNER/NAME of a model on a hub"
        )
    if is_lfs_pointer(path):
        raise ModelError(pointer_advice(path))
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ModelError(f"{path} has {path.stat().st_size:,} bytes, a config has {_MAX_CONFIG_BYTES:,} at most")
        values = read_json(path)
    except OSError as error:
        raise ModelError(f"can't read {path}: {error.strerror}; give a folder with config.json") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} has to be a table")
    return values


def _by_own_names(path: Path, family: Family, values: dict[str, Any]) -> dict[str, Any]:
    """Give keys that have two names the one of the family.

    Example: GPT-2's ``hidden_size`` is its ``n_embd``.
    """
    for alias, key in family.aliases.items():
        value = values.pop(alias, None)
        if value is not None and values.setdefault(key, value) != value:
            raise ModelError(
                f"{path}: {alias} is {value!r} and {key} is {values[key]!r}, which are one; make them equal"
            )
    return values


def _check_known(path: Path, family: Family, values: Mapping[str, Any]) -> None:
    """Refuse keys with a value of which nobody knows here whether it changes numbers."""
    known = family.config_keys.keys() | family.refused.keys() | family.no_number | NO_NUMBER | _RUNS_CODE.keys()
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
