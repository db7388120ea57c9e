"""What a model folder says about itself, read without torch and without trusting it.

``config.json`` can name code to load, so only the keys of a known family are taken over. The tensors'
names and shapes are compared with what that config means, before anybody builds a model.

Source: CVE-2026-4372 (code execution from a crafted config.json) and its siblings.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringtune.adapter_config import adapter_block_params
from ringtune.errors import JobError, ModelError
from ringtune.job import Job
from ringtune.model_family import FAMILIES, ConfigKey, Family
from ringtune.profile import ModelFacts
from ringtune.safetensors_header import TensorInfo, read_safetensors_header

__all__ = [
    "COMPUTE_BYTES",
    "CONFIG_FILE",
    "WEIGHTS_FILE",
    "TensorInfo",
    "base_tensors",
    "model_facts",
    "read_config",
    "read_safetensors_header",
]

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
COMPUTE_BYTES = {"float32": 4, "float64": 8}

_MAX_CONFIG_BYTES = 1_000_000
_RUNS_CODE = {
    "auto_map": "it names code to run",
    "quantization_config": "it names a quantizer to load; give the plain weights",
}
_ATTENTIONS = ("eager", "sdpa", None)
_ATTENTION_KEYS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
_SAMPLE_BYTES = 64


def read_config(folder: str | Path) -> dict[str, Any]:
    """The keys of ``config.json`` that the family knows, defaults filled in, and ``model_type``.

    Args:
        folder: the model folder.

    Returns:
        Only allowed keys; everything else in the file is dropped.

    Raises:
        ModelError: no such folder or file, not JSON, a family that is not supported, a key that would load
            code, or a value of a wrong type or out of range.
    """
    path = Path(folder) / CONFIG_FILE
    values = _read_json(path)
    family = _family(path, values)
    for key, reason in {**_RUNS_CODE, **family.refused}.items():
        if values.get(key):
            raise ModelError(f"{path}: {key} is refused: {reason}; use a model without it")
    for key in _ATTENTION_KEYS:
        if values.get(key) not in _ATTENTIONS:
            raise ModelError(f"{path}: {key} = {values[key]!r} is refused; remove it, or use eager or sdpa")
    config = {key: _config_value(path, key, spec, values) for key, spec in family.config_keys.items()}
    if config["hidden_size"] % config["num_attention_heads"]:
        raise ModelError(
            f"{path}: hidden_size {config['hidden_size']} can't be shared by {config['num_attention_heads']} heads"
        )
    return {"model_type": family.model_type, **config}


def base_tensors(folder: str | Path, config: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """The base model's tensors by their name without the model prefix, checked against the config.

    Returns:
        ``encoder.layer.0...`` and so on; what else the file has (position ids, a task head) is left out.

    Raises:
        ModelError: no safetensors file, a tensor is missing or has another shape than the config says.
        IntegrityError: the file is damaged.
    """
    folder = Path(folder)
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise ModelError(_no_weights(folder))
    family = FAMILIES[config["model_type"]]
    found = {name.removeprefix(family.prefix): info for name, info in read_safetensors_header(path).items()}
    tensors: dict[str, TensorInfo] = {}
    for name, shape in _expected(family, config).items():
        if name not in found and name in family.optional:
            continue
        if name not in found:
            raise ModelError(f"{path} has no tensor {name!r}, which {CONFIG_FILE} asks for; is the folder complete?")
        if found[name].shape != shape:
            raise ModelError(f"{path}: tensor {name!r} has shape {found[name].shape}, {CONFIG_FILE} means {shape}")
        tensors[name] = found[name]
    return tensors


def model_facts(folder: str | Path, job: Job, *, adapter_params: int | None = None) -> ModelFacts:
    """Sizes of the model in ``folder`` with the job's adapters and head, in the job's compute dtype.

    Args:
        folder: the model folder.
        job: for adapter, dtype, longest text and private blocks.
        adapter_params: trainable weights of one block, if they were counted on the built model.

    Raises:
        ModelError: not a folder of a supported family, a tensor is missing or has another shape.
        JobError: the job asks for longer texts or more private blocks than the model has.
        IntegrityError: the safetensors file is damaged.
    """
    config = read_config(folder)
    tensors = base_tensors(folder, config)
    _check_job(job, config)
    item_bytes = COMPUTE_BYTES[job.model.dtype]
    hidden, num_blocks = config["hidden_size"], config["num_hidden_layers"]
    if adapter_params is None:
        adapter_params = adapter_block_params(
            job.adapter.config,
            hidden_size=hidden,
            intermediate_size=config["intermediate_size"],
            num_blocks=num_blocks,
        )
    prefix = FAMILIES[config["model_type"]].block_prefix
    in_block = sum(math.prod(info.shape) for name, info in tensors.items() if name.startswith(f"{prefix}0."))
    outside = sum(math.prod(info.shape) for name, info in tensors.items() if not name.startswith(prefix))
    return ModelFacts(
        model_type=config["model_type"],
        num_blocks=num_blocks,
        hidden_size=hidden,
        intermediate_size=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        vocab_size=config["vocab_size"],
        block_bytes=in_block * item_bytes,
        embedding_bytes=outside * item_bytes,
        # AdapterHub's classification head: a square layer with bias, then one row with bias per class.
        head_bytes=(hidden * hidden + hidden) * item_bytes,
        head_class_bytes=(hidden + 1) * item_bytes,
        adapter_block_bytes=adapter_params * item_bytes,
        digest=_digest(Path(folder) / WEIGHTS_FILE, config, tensors),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.parent.is_dir():
        raise ModelError(f"model folder {path.parent} does not exist; check model.path")
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ModelError(f"{path} has {path.stat().st_size:,} bytes, a config has {_MAX_CONFIG_BYTES:,} at most")
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"can't read {path}: {error.strerror}; give a folder with config.json") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} has to be a table")
    return values


def _family(path: Path, values: Mapping[str, Any]) -> Family:
    model_type = values.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ModelError(f"{path}: model_type {model_type!r} is not supported yet; supported: {', '.join(FAMILIES)}")
    return family


def _config_value(path: Path, key: str, spec: ConfigKey, values: Mapping[str, Any]) -> Any:
    value = values.get(key)
    if value is None:
        return spec.default
    if isinstance(spec.default, float) and type(value) is int:
        value = float(value)
    if type(value) is not type(spec.default):
        kind = type(spec.default).__name__
        raise ModelError(f"{path}: {key} has to be {kind}, but is {type(value).__name__} {value!r}")
    if spec.choices and value not in spec.choices:
        raise ModelError(f"{path}: {key} = {value!r} is not supported; supported: {', '.join(spec.choices)}")
    if isinstance(value, int | float) and not spec.at_least <= value < math.inf:
        raise ModelError(f"{path}: {key} is {value}, it has to be at least {spec.at_least}")
    return value


def _expected(family: Family, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes = dict(family.owner_shapes(config))
    for block in range(config["num_hidden_layers"]):
        inside = family.block_shapes(config)
        shapes |= {f"{family.block_prefix}{block}.{name}": shape for name, shape in inside.items()}
    return shapes


def _no_weights(folder: Path) -> str:
    if (folder / f"{WEIGHTS_FILE}.index.json").exists():
        return f"{folder} has its weights in several files, which is not supported yet; save them as one {WEIGHTS_FILE}"
    if any(folder.glob("*.bin")):
        return f"{folder} has pickled weights only, which are never opened; save them as {WEIGHTS_FILE}"
    return f"{folder} has no {WEIGHTS_FILE}; give a folder that has one"


def _check_job(job: Job, config: Mapping[str, Any]) -> None:
    longest, num_blocks = config["max_position_embeddings"], config["num_hidden_layers"]
    if job.train.max_length > longest:
        raise JobError(
            f"train.max_length is {job.train.max_length}, the model takes {longest} tokens at most; lower it"
        )
    if job.privacy.private_blocks >= num_blocks:
        raise JobError(
            f"privacy.private_blocks is {job.privacy.private_blocks}, the model has {num_blocks} blocks; "
            "leave at least one to train"
        )


def _digest(path: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> str:
    """Config, names, types, shapes, and a sample of each tensor: tells two trainings of one architecture apart."""
    digest = hashlib.sha256(json.dumps(dict(config), sort_keys=True).encode())
    with path.open("rb") as file:
        for name, info in sorted(tensors.items()):
            digest.update(json.dumps([name, info.dtype, info.shape]).encode())
            file.seek(info.offset + max(0, info.nbytes - _SAMPLE_BYTES) // 2)
            digest.update(file.read(min(info.nbytes, _SAMPLE_BYTES)))
    return digest.hexdigest()
