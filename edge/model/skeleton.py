"""Skeleton of a model: the whole architecture with adapters and head, without base weights; and seeds of dropout.

Every node builds the skeleton of the *whole* model with the same seed, so the initial adapters and head are those of
one process, and none is sent. ``edge.model.slice`` then makes the hosted modules real, auxiliary models
(``edge.model.auxiliary``) included, and drops the rest. A skeleton takes a few megabytes.

An invertible adapter is a module of the base model, which an owner has with the embedding: a hook of the library
computes it after the embedding.

With ``adapter.config = "full"`` there is no adapter: the blocks' own weights are marked to train. Under a method that
trains all parameters, those of the embedding and of the head are marked too.

Base weights are zeros of stride 0 (4 bytes each), not ``meta`` tensors, because some adapters create their weights on
the device of the wrapped weight. Buffers are real, because no file has them.

torch's global generator is seeded before each unit (embedding, block, head) from (seed, step, micro-batch, unit), so
that every dropout mask is a function of these four, whatever the split or the order.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from edge.model.auxiliary import add_auxiliary
from edge.model.families import FamilyForward, family_of
from edge.model.families.plugged import plug_in
from edge.model.families.stored_names import use_stored_names
from edge.model.prediction_heads import ModelWithHead
from ringtune.errors import JobError, ModelError
from ringtune.job.job import Job
from ringtune.models.adapter_config import INVERTIBLE, auxiliary_of, library_config, trains_own_weights
from ringtune.models.adapter_support import generic_refusal
from ringtune.models.auxiliary_models import AuxiliaryConfig
from ringtune.models.families import LAYOUTS, family_named
from ringtune.models.family import Family
from ringtune.models.folder import CONFIG_FILE, name_of_folder, read_config

ADAPTER = "ringtune"
_register_lock = threading.Lock()


class Skeleton(NamedTuple):
    """A model with adapters and head, but without base weights.

    Attributes:
        model: the base model with a head; adapters and head are real float32 tensors, frozen weights stride-0 zeros.
        layout: paths of its blocks and of an owner's parts.
        own_weights: names, inside a block, of its trained base weights; empty with an adapter.
        full_parameters: whether all parameters train: of blocks, embedding and head.
        auxiliary: auxiliary models in the blocks, alone or beside adapters of the library.
        seed: of the run, for initial values of hosted blocks.
    """

    model: ModelWithHead
    family: FamilyForward
    layout: Family
    own_weights: tuple[str, ...] = ()
    full_parameters: bool = False
    auxiliary: tuple[AuxiliaryConfig, ...] = ()
    has_library: bool = False
    seed: int = 0

    @property
    def base(self) -> Any:
        """The base model inside."""
        return self.model.base_model

    @property
    def blocks(self) -> nn.ModuleList:
        """The list of blocks inside."""
        blocks = self.base.get_submodule(self.layout.blocks_path)
        if not isinstance(blocks, nn.ModuleList):
            raise ModelError(f"{self.layout.blocks_path} of {type(self.base).__name__} is not a list of blocks")
        return blocks

    @property
    def invertible(self) -> nn.Module | None:
        """The invertible adapter; None without one, and at a node without the embedding."""
        found = getattr(self.base, INVERTIBLE, None)
        return found[ADAPTER] if isinstance(found, nn.ModuleDict) and ADAPTER in found else None


def build_skeleton(folder: Path, job: Job) -> Skeleton:
    """Build the architecture of ``folder`` and add the job's adapter, if it has one, seeded with ``train.seed``.

    The generator stays as ``add_adapter`` left it, so that a head added next gets the values of one process; call this
    and ``Task.add`` inside ``torch.random.fork_rng``.

    Raises:
        ModelError: no such folder, or a family that is not supported.
        JobError: the library refuses the adapter configuration, or it has parts outside the blocks.
    """
    values = read_config(folder)
    layout, config = family_named(values["model_type"]), library_config_of(values)
    if layout.generic and (problem := generic_refusal(layout, job.adapter.config)):
        raise JobError(f"adapter.config = {job.adapter.config!r}: {problem}")
    config.name_or_path = name_of_folder(folder.resolve())  # written to adapter_config.json: no local path
    set_dropout(config, job.train.dropout)
    has_own_weights = trains_own_weights(job.adapter.config)
    library = "" if has_own_weights else library_config(job.adapter.config)
    with without_weights(), no_initial_values():  # of base weights: half the time
        base = _base_model(config)
        use_stored_names(base, layout.model_type, layout.blocks_path)
        if library:
            plug_in(base, layout)
    _fill_with_zeros(base)
    model, full = ModelWithHead(base, layout), job.method.full_parameters
    skeleton = Skeleton(model=model, family=family_of(layout.model_type), layout=layout, full_parameters=full)
    if has_own_weights:
        torch.manual_seed(job.train.seed)
        return _training_own_weights(skeleton)
    auxiliary = auxiliary_of(job.adapter.config)
    torch.manual_seed(job.train.seed)
    if library:
        _add_adapter(skeleton, job, library)
    else:
        skeleton.model.eval()
    add_auxiliary(skeleton.blocks, LAYOUTS[layout.model_type], auxiliary, name=ADAPTER)
    return skeleton._replace(auxiliary=auxiliary, has_library=bool(library), seed=job.train.seed)


def library_config_of(values: Mapping[str, Any]) -> Any:
    """Make transformers' configuration object of ``read_config`` alone, without other keys of the file."""
    from transformers import CONFIG_MAPPING

    own = {key: copy.deepcopy(value) for key, value in values.items() if key != "model_type"}
    try:
        return CONFIG_MAPPING[values["model_type"]](**own)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(
            f"{CONFIG_FILE}: transformers refuses it for a {values['model_type']}: {error}; fetch the model again"
        ) from error


def _base_model(config: Any) -> Any:
    """Make the base model; fused attention ignores a cap on the scores, so a model with a cap gets eager attention."""
    from transformers import AutoModel

    if getattr(config, "attn_logit_softcapping", None):
        config._attn_implementation = "eager"
    return AutoModel.from_config(config)


def _training_own_weights(skeleton: Skeleton) -> Skeleton:
    """Mark the trained base weights of every block, and with full parameters those of an owner's parts."""
    for block in skeleton.blocks:
        for name, parameter in block.named_parameters():
            parameter.requires_grad_(skeleton.full_parameters or name in skeleton.layout.subnet_weights)
    if skeleton.full_parameters:
        for _, part in owner_modules(skeleton):
            part.requires_grad_(True)
    names = tuple(name for name, parameter in skeleton.blocks[0].named_parameters() if parameter.requires_grad)
    skeleton.model.eval()
    return skeleton._replace(own_weights=names)


def owner_modules(skeleton: Skeleton) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of each owner's part of the base model that this model has."""
    found = dict(skeleton.base.named_modules())
    return ((path, found[path]) for path in skeleton.layout.owner_paths if path in found)


def no_initial_values() -> contextlib.AbstractContextManager[None]:
    """Return transformers' context in which new modules draw no values; version 5 has it in another module."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:
        from transformers.modeling_utils import no_init_weights
    found: contextlib.AbstractContextManager[None] = no_init_weights()
    return found


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Put parameters of new modules on ``meta`` inside the context; buffers stay real."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        original(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    with _register_lock:
        nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = original  # type: ignore[method-assign]


def _fill_with_zeros(model: nn.Module) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                zeros = torch.zeros((), dtype=torch.float32).expand(parameter.shape)
                module._parameters[name] = nn.Parameter(zeros, requires_grad=False)


def _add_adapter(skeleton: Skeleton, job: Job, text: str) -> None:
    base = skeleton.base
    config = _adapter_config(job, text)
    before = set(_tensors(skeleton.model))
    try:
        base.add_adapter(ADAPTER, config=config)
    except (ValueError, AssertionError, KeyError, NotImplementedError, RuntimeError) as error:
        kind = type(base).__name__
        raise JobError(f"adapter.config = {text!r} is refused by the library for {kind}: {error}") from error
    _check_inside_blocks(skeleton, before, text)
    _check_that_it_runs(skeleton, text)
    with _quiet():
        base.train_adapter(ADAPTER)
    skeleton.model.eval()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the library's warning that no adapter is active, which ``train_adapter`` gives needlessly."""
    logger = logging.getLogger("adapters.model_mixin")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _adapter_config(job: Job, text: str) -> Any:
    """Make the library's configuration object of ``adapter.config``, with ``train.dropout`` in each part.

    Only names that the library ships: a path or a hub name could differ on each node.
    """
    from adapters import AdapterConfig
    from adapters.configuration import ADAPTER_CONFIG_MAP

    names = [re.split(r"[\[\s]", part.strip(), maxsplit=1)[0] for part in text.split("|")]
    for name in names:
        if name not in ADAPTER_CONFIG_MAP:
            known = ", ".join(sorted(ADAPTER_CONFIG_MAP))
            raise JobError(
                f"adapter.config = {text!r}: {name!r} is not a configuration of AdapterHub; use one of {known}"
            )
    try:
        config = AdapterConfig.load(text)
    except (ValueError, TypeError) as error:
        raise JobError(f"adapter.config = {text!r} is not readable: {error}") from error
    for part in getattr(config, "configs", [config]):
        if part.get("architecture") == "reft" and job.model.dtype == "float64":
            raise JobError(
                f"adapter.config = {text!r}: the library can't run it in float64; set model.dtype = 'float32'"
            )
        lost = ", ".join(_lost_when_saved(part))
        if lost:
            raise JobError(
                f"adapter.config = {text!r}: the library does not write {lost} down, so that a saved adapter loads as "
                "another method; use loreft or noreft"
            )
        if part.get("stochastic_depth", 0.0):
            raise JobError(f"adapter.config = {text!r}: stochastic_depth is not supported; use train.dropout")
    return _with_dropout(config, job.train.dropout)


def _with_dropout(config: Any, probability: float) -> Any:
    """Set the dropout probability of every part of a configuration that has one."""
    from adapters import ConfigUnion

    if isinstance(config, ConfigUnion):
        return ConfigUnion(*[_with_dropout(part, probability) for part in config.configs])
    return config.replace(dropout=probability) if hasattr(config, "dropout") else config


def _lost_when_saved(part: Any) -> list[str]:
    """List the options of a configuration that change when it is written and read again."""
    from adapters import AdapterConfig

    again = AdapterConfig.load(part.to_dict())
    names = [name for name in dir(type(part)) if not name.startswith("_") and not callable(getattr(part, name))]
    return [name for name in names if getattr(part, name) != getattr(again, name, None)]


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def _check_inside_blocks(skeleton: Skeleton, before: set[str], text: str) -> None:
    """Refuse adapters with tensors outside the blocks, but for an invertible one, or shared by two blocks."""
    prefix = f"{skeleton.model.base_model_prefix}.{skeleton.layout.blocks_path}."
    invertible = f"{skeleton.model.base_model_prefix}.{INVERTIBLE}."
    homes: dict[int, set[str]] = {}
    for name, tensor in _tensors(skeleton.model).items():
        if name in before or name.startswith(invertible):
            continue
        if not name.startswith(prefix):
            raise JobError(f"adapter.config = {text!r} has {name} outside the blocks, which can't be split; use seq_bn")
        homes.setdefault(id(tensor), set()).add(name[len(prefix) :].split(".")[0])
    if any(len(blocks) > 1 for blocks in homes.values()):
        raise JobError(f"adapter.config = {text!r} shares a tensor between blocks, which can't be split; use seq_bn")


def _check_that_it_runs(skeleton: Skeleton, text: str) -> None:
    """Refuse MTL-LoRA on a fused matrix for query, key and value, which the library adds but can't run.

    Source: adapters 1.3.0, ``LoRAMergedLinear.forward`` (it takes its input for a picture there).
    """
    from adapters.methods.lora import LoRAMergedLinear, MTLLoRA

    for module in skeleton.blocks.modules():
        if isinstance(module, LoRAMergedLinear) and isinstance(_lora(module), MTLLoRA):
            raise JobError(
                f"adapter.config = {text!r}: the library can't run MTL-LoRA on a {type(skeleton.base).__name__}, whose "
                "query, key and value are one matrix; use lora"
            )


def _lora(module: Any) -> Any:
    loras: nn.ModuleDict = module.loras
    return dict(loras.items()).get(ADAPTER)


EMBEDDING_UNIT = "embedding"
HEAD_UNIT = "head"


def block_unit(block: int) -> str:
    """Name of a block in dropout seeds: block 3 is ``block.3``."""
    return f"block.{block}"


def unit_seed(seed: int, step: int, micro: int, unit: str) -> int:
    """Seed of the generator before ``unit`` runs: 63 bits of a SHA-256."""
    digest = hashlib.sha256(f"{seed}/{step}/{micro}/{unit}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & (2**63 - 1)


def seed_unit(seed: int, step: int, micro: int, unit: str) -> None:
    """Seed torch's generators for ``unit``.

    Unlike ``torch.manual_seed`` it ignores an unused accelerator, for which that function would store each call with
    its stack.
    """
    number = unit_seed(seed, step, micro, unit)
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(number)


def set_dropout(config: Any, probability: float) -> None:
    """Set every dropout probability of a Hugging Face configuration (hidden, attention, head)."""
    for key, value in config.to_dict().items():
        if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, float | int):
            setattr(config, key, probability)
