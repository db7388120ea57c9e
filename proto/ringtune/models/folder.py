"""What a model folder says about itself, read without torch and without trusting it.

``config.json`` can name code to load, so only the keys of a known family are taken over. The tensors'
names and shapes are compared with what that config means, before anybody builds a model.

Source: CVE-2026-4372 (code execution from a crafted config.json) and its siblings.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ringtune.costs.profile import ModelFacts
from ringtune.errors import JobError, ModelError
from ringtune.files.safetensors_header import TensorInfo, read_safetensors_header
from ringtune.jobs.job import Job
from ringtune.models.adapter_config import adapter_block_params
from ringtune.models.families import FAMILIES, check_task, family_named
from ringtune.models.family import (
    CAUSAL_LM,
    CLASSIFICATION,
    IMAGE_CLASSIFICATION,
    LM_HEAD,
    QUESTION_ANSWERING,
    ConfigKey,
    Family,
    Sizes,
)
from ringtune.models.tensors import INDEX_FILE, WEIGHTS_FILE, StoredTensor, read_headers

__all__ = [
    "COMPUTE_BYTES",
    "CONFIG_FILE",
    "INDEX_FILE",
    "WEIGHTS_FILE",
    "TensorInfo",
    "base_name",
    "base_tensors",
    "check_job",
    "model_facts",
    "model_sizes",
    "read_config",
    "read_safetensors_header",
]

CONFIG_FILE = "config.json"
COMPUTE_BYTES = {"float32": 4, "float64": 8}

_MAX_CONFIG_BYTES = 1_000_000
_RUNS_CODE = {
    "auto_map": "it names code to run",
    "quantization_config": "it names a quantizer to load; give the plain weights",
}
_ATTENTIONS = ("eager", "sdpa", None)
_ATTENTION_KEYS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
_SAMPLE_BYTES = 64
_LEGACY_ENDS = {".gamma": ".weight", ".beta": ".bias"}  # LayerNorm names of the first BERT files


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
    family = family_named(values.get("model_type"), where=str(path))
    for key, reason in {**_RUNS_CODE, **family.refused}.items():
        if values.get(key):
            raise ModelError(f"{path}: {key} is refused: {reason}; use a model without it")
    for key in _ATTENTION_KEYS:
        if values.get(key) not in _ATTENTIONS:
            raise ModelError(f"{path}: {key} = {values[key]!r} is refused; remove it, or use eager or sdpa")
    config = {key: _config_value(path, key, spec, values) for key, spec in family.config_keys.items()}
    problem = family.problem(config)
    if problem:
        raise ModelError(f"{path}: {problem}")
    return {"model_type": family.model_type, **config}


def model_sizes(config: Mapping[str, Any]) -> Sizes:
    """The sizes in a config from ``read_config``, whatever its keys are called."""
    return FAMILIES[config["model_type"]].sizes(config)


def base_tensors(
    folder: str | Path, config: Mapping[str, Any], *, with_decoder: bool = False
) -> dict[str, StoredTensor]:
    """The base model's tensors by their name without the model prefix, checked against the config.

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
    folder = Path(folder)
    family = FAMILIES[config["model_type"]]
    found = {base_name(name, family): stored for name, stored in read_headers(folder).items()}
    tensors: dict[str, StoredTensor] = {}
    for name, shape in _expected(family, config, with_decoder).items():
        if name not in found and name in family.optional:
            continue
        if name not in found:
            raise ModelError(f"{folder} has no tensor {name!r}, which {CONFIG_FILE} asks for; is the folder complete?")
        if found[name].shape != shape:
            raise ModelError(
                f"{found[name].path}: tensor {name!r} has shape {found[name].shape}, {CONFIG_FILE} means {shape}"
            )
        tensors[name] = found[name]
    return tensors


def model_facts(folder: str | Path, job: Job, *, adapter_params: int | None = None) -> ModelFacts:
    """Sizes of the model in ``folder`` with the job's adapters and head, in the job's compute dtype.

    Args:
        folder: the model folder.
        job: for task, adapter, dtype, longest text and private blocks.
        adapter_params: trainable weights of one block, if they were counted on the built model.

    Raises:
        ModelError: not a folder of a supported family or task, a tensor is missing or has another shape.
        JobError: the job asks for longer texts or more private blocks than the model has.
        IntegrityError: a safetensors file is damaged.
    """
    config = read_config(folder)
    family, sizes = FAMILIES[config["model_type"]], model_sizes(config)
    check_job(job, config, where=str(Path(folder) / CONFIG_FILE))
    tensors = base_tensors(folder, config, with_decoder=job.model.task == CAUSAL_LM)
    item_bytes = COMPUTE_BYTES[job.model.dtype]
    if adapter_params is None:
        adapter_params = adapter_block_params(
            job.adapter.config, hidden_size=sizes.hidden, widths=family.widths(config), num_blocks=sizes.num_blocks
        )
    in_block = sum(
        math.prod(stored.shape) for name, stored in tensors.items() if name.startswith(f"{family.block_prefix}0.")
    )
    outside = sum(math.prod(stored.shape) for name, stored in tensors.items() if not _in_block(name, family))
    head = _head_sizes(job.model.task, sizes)
    return ModelFacts(
        model_type=config["model_type"],
        num_blocks=sizes.num_blocks,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_heads=sizes.num_heads,
        vocab_size=sizes.vocab,
        block_bytes=in_block * item_bytes,
        embedding_bytes=outside * item_bytes,
        head_bytes=head.params * item_bytes,
        head_class_bytes=head.class_params * item_bytes,
        head_token_logits=head.token_logits,
        inner_kept=sizes.inner_kept,
        adapter_block_bytes=adapter_params * item_bytes,
        digest=_digest(config, tensors),
    )


def check_job(job: Job, config: Mapping[str, Any], *, where: str = CONFIG_FILE) -> None:
    """Whether a model can do what a job asks for.

    Raises:
        ModelError: its family has no head for the task.
        JobError: longer texts or more private blocks than it has.
    """
    family, sizes = FAMILIES[config["model_type"]], model_sizes(config)
    check_task(family, job.model.task, where=where)
    longest, asked = sizes.longest, job.train.max_length
    if sizes.fixed and asked < longest:
        raise JobError(f"train.max_length is {asked}, an image of this model has {longest} tokens; set it to {longest}")
    if not sizes.fixed and asked > longest:
        raise JobError(f"train.max_length is {asked}, the model takes {longest} tokens at most; lower it")
    if job.privacy.private_blocks >= sizes.num_blocks:
        raise JobError(
            f"privacy.private_blocks is {job.privacy.private_blocks}, the model has {sizes.num_blocks} blocks; "
            "leave at least one to train"
        )


class _HeadSizes(NamedTuple):
    """Trainable weights of a head, what each class adds, and its logits for each token."""

    params: int
    class_params: int
    token_logits: int


def _head_sizes(task: str, sizes: Sizes) -> _HeadSizes:
    """What AdapterHub's default heads have; a language model's head is frozen and counts as embedding."""
    row = sizes.hidden + 1
    return {
        CLASSIFICATION: _HeadSizes(sizes.hidden * row, row, 0),
        IMAGE_CLASSIFICATION: _HeadSizes(0, row, 0),
        QUESTION_ANSWERING: _HeadSizes(2 * row, 0, 2),
        CAUSAL_LM: _HeadSizes(0, 0, sizes.vocab),
    }[task]


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
        raise ModelError(f"{path}: {key} = {value!r} is not supported; supported: {', '.join(spec.choices)}")
    if isinstance(value, int | float) and not spec.at_least <= value < math.inf:
        raise ModelError(f"{path}: {key} is {value}, it has to be at least {spec.at_least}")
    return value


def base_name(name: str, family: Family) -> str:
    """The name in the base model of a tensor in a file: without prefix, and as it is written today."""
    name = name.removeprefix(family.prefix)
    for old, new in _LEGACY_ENDS.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _in_block(name: str, family: Family) -> bool:
    return name.startswith(family.block_prefix)


def _expected(family: Family, config: Mapping[str, Any], with_decoder: bool) -> dict[str, tuple[int, ...]]:
    shapes = dict(family.owner_shapes(config))
    sizes = family.sizes(config)
    if with_decoder and not config["tie_word_embeddings"]:
        shapes[LM_HEAD] = (sizes.vocab, sizes.hidden)
    inside = family.block_shapes(config)
    for block in range(sizes.num_blocks):
        shapes |= {f"{family.block_prefix}{block}.{name}": shape for name, shape in inside.items()}
    return shapes


def _digest(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> str:
    """Config, names, types, shapes, and a sample of each tensor: tells two trainings of one architecture apart.

    The number of files does not matter, only what is in them.
    """
    digest = hashlib.sha256(json.dumps(dict(config), sort_keys=True).encode())
    with contextlib.ExitStack() as stack:
        paths = {stored.path for stored in tensors.values()}
        files = {path: stack.enter_context(path.open("rb")) for path in paths}
        for name, stored in sorted(tensors.items()):
            info, file = stored.info, files[stored.path]
            digest.update(json.dumps([name, info.dtype, info.shape]).encode())
            file.seek(info.offset + max(0, info.nbytes - _SAMPLE_BYTES) // 2)
            digest.update(file.read(min(info.nbytes, _SAMPLE_BYTES)))
    return digest.hexdigest()
