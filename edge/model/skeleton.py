"""Skeleton of a model: the whole architecture with adapters and head, without base weights; and seeds of dropout.

Every node builds the skeleton of the *whole* model with the same seed, so the initial adapters and head are those of
one process, and none is sent. ``edge.model.slice`` then makes the hosted modules real, auxiliary models
(``edge.model.auxiliary``) included, and drops the rest. A skeleton takes a few megabytes.

An invertible adapter is a module of the base model, which an owner has with the embedding: a hook computes it after the
embedding.

With ``adapter.config = "full"`` there is no adapter: the blocks' own weights are marked to train. Under a method that
trains all parameters, those of the embedding and of the head are marked too.

Base weights are zeros of stride 0 (4 bytes each), not ``meta`` tensors, because some adapters create their weights on
the device of the wrapped weight. Buffers are real, because no file has them, but for masks that nothing reads.

torch's global generator is seeded before each unit (embedding, block, head) from (seed, step, micro-batch, unit), so
that every dropout mask is a function of these four, whatever the split or the order.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from edge.model.adapters import Options, add_adapters
from edge.model.auxiliary import add_auxiliary
from edge.model.families import FamilyForward, family_of
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
        own_weights: names, inside some block, of trained base weights; empty with an adapter.
        full_parameters: whether all parameters train: of blocks, embedding and head.
        auxiliary: auxiliary models in the blocks, alone or beside AdapterHub's adapters.
        parts: all options of AdapterHub's adapters (``edge.model.adapters``).
        seed: of the run, for initial values of hosted blocks.
    """

    model: ModelWithHead
    family: FamilyForward
    layout: Family
    own_weights: tuple[str, ...] = ()
    full_parameters: bool = False
    auxiliary: tuple[AuxiliaryConfig, ...] = ()
    parts: tuple[Options, ...] = ()
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
        holder = getattr(self.base, INVERTIBLE, None)
        return holder[ADAPTER] if isinstance(holder, nn.ModuleDict) and ADAPTER in holder else None


def build_skeleton(folder: Path, job: Job) -> Skeleton:
    """Build the architecture of ``folder`` and add the job's adapter, if it has one, seeded with ``train.seed``.

    The generator stays as ``add_adapters`` left it, so that a head added next gets the values of one process; call this
    and ``Task.add`` inside ``torch.random.fork_rng``.

    Raises:
        ModelError: no such folder, or a family that is not supported.
        JobError: an adapter that this family can't have.
    """
    values = read_config(folder)
    layout, config = family_named(values["model_type"]), library_config_of(values)
    if layout.generic and (problem := generic_refusal(layout, job.adapter.config)):
        raise JobError(f"adapter.config = {job.adapter.config!r}: {problem}")
    config.name_or_path = name_of_folder(folder.resolve())  # written to adapter_config.json: no local path
    set_dropout(config, job.train.dropout)
    with without_weights(), no_initial_values():  # of base weights: half the time
        try:
            base = _base_model(config)
        except ImportError:  # a package is missing here, which is no fault of the model
            raise
        except Exception as error:  # the class of an architecture has its own kinds for values that make no sense
            raise ModelError(
                f"{CONFIG_FILE}: transformers makes no {layout.model_type} of it ({type(error).__name__}: {error}); "
                "fetch the model again"
            ) from error
        use_stored_names(base, layout.model_type, layout.blocks_path, folder)
        _fix_modes(base.get_submodule(layout.blocks_path), layout.model_type)
    _fill_with_zeros(base)
    model, full = ModelWithHead(base, layout), job.method.full_parameters
    skeleton = Skeleton(model=model, family=family_of(layout.model_type), layout=layout, full_parameters=full)
    torch.manual_seed(job.train.seed)
    if trains_own_weights(job.adapter.config):
        return _training_own_weights(skeleton)
    auxiliary, text = auxiliary_of(job.adapter.config), library_config(job.adapter.config)
    parts = add_adapters(base, layout, text, dropout=job.train.dropout, name=ADAPTER) if text else ()
    add_auxiliary(skeleton.blocks, LAYOUTS[layout.model_type], auxiliary, name=ADAPTER)
    model.eval()
    return skeleton._replace(auxiliary=auxiliary, parts=parts, seed=job.train.seed)


def library_config_of(values: Mapping[str, Any]) -> Any:
    """Make transformers' configuration object of ``read_config`` alone, without other keys of the file."""
    from transformers import CONFIG_MAPPING

    since, keys = family_named(values["model_type"]).since, {key: copy.deepcopy(value) for key, value in values.items()}
    del keys["model_type"]
    is_known = values["model_type"] in CONFIG_MAPPING
    if not is_known or int(version("transformers").partition(".")[0]) < since:
        does = "trains another model than it predicts with for" if is_known else "has no"
        raise ModelError(
            f"{CONFIG_FILE}: transformers {version('transformers')} of this machine {does} {values['model_type']}; "
            f"install version {since} or later: pip install 'transformers>={since}'"
        )
    try:
        return _with_one_base(CONFIG_MAPPING[values["model_type"]](**keys), keys)
    except ImportError:
        raise
    except Exception as error:
        raise ModelError(
            f"{CONFIG_FILE}: transformers refuses it for a {values['model_type']}: {error}; fetch the model again"
        ) from error


def _with_one_base(config: Any, values: Mapping[str, Any]) -> Any:
    """Use the base of rotary positions in blocks with a window too, where a config of transformers 4 names no other.

    Transformers 5 takes its default for them; of the decoders that have both kinds only Gemma 3 names two bases.
    """
    windowed = (getattr(config, "rope_parameters", None) or {}).get("sliding_attention")
    if windowed and values.get("rope_theta") is not None and "rope_local_base_freq" not in values:
        windowed["rope_theta"] = values["rope_theta"]
    return config


def _base_model(config: Any) -> Any:
    """Make the base model; fused attention ignores a cap on the scores, so a model with a cap gets eager attention.

    ELECTRA's attention is fused in transformers 5 alone, and plans know one kind. Doge's fused one sees the tokens
    behind in transformers 4.57, which leaves the mask out where rows have no padding. Experts of transformers 5 are
    computed one after the other: its grouped products know no float64.
    """
    from transformers import AutoModel

    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"
    if getattr(config, "attn_logit_softcapping", None) or config.model_type in ("doge", "electra"):
        config._attn_implementation = "eager"
    if config.model_type == "gpt2":  # each block makes a mask of its positions squared, for eager attention alone
        with torch.device("meta"):
            base = AutoModel.from_config(config)
        for module in base.modules():
            module._buffers.update(dict.fromkeys(module._buffers))
        return base
    if config.model_type != "modernbert":
        return AutoModel.from_config(config)
    # a compiled part, or a kernel that takes no padding, computes the same
    config.reference_compile, config._attn_implementation = False, "sdpa"
    with _without_compiler():
        return AutoModel.from_config(config)


_FIXED_MODES: Final[Mapping[str, tuple[str, bool]]] = {
    "gpt_oss": ("mlp.experts", True),
    "phimoe": ("block_sparse_moe|mlp", False),
}
"""``model_type`` -> module of a block that stays in training mode (True) or out of it, under its name in 4 or 5.

Out of training GPT-OSS lets every expert read every token on an accelerator. In training Phi-3.5-MoE draws experts and
their factors at random; here a token's experts are those of an evaluation, also where a block is run again.
"""


def _fix_modes(blocks: Any, model_type: str) -> None:
    names, is_training = _FIXED_MODES.get(model_type, ("", False))
    for block in blocks if names else ():
        module: Any = next(module for name, module in block.named_modules() if name in names.split("|"))
        module.training = is_training
        module.train = lambda mode=True, of=module: of


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """Let ``torch.compile`` return a function as it is: the compiler, which nothing here uses, takes 110 MiB."""
    original = torch.compile
    torch.compile = lambda *_, **__: lambda function: function  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = original


def _training_own_weights(skeleton: Skeleton) -> Skeleton:
    """Mark the trained base weights of every block, and with full parameters those of an owner's parts."""
    names: dict[str, None] = {}  # blocks may be unlike
    for block in skeleton.blocks:
        for name, parameter in block.named_parameters():
            parameter.requires_grad_(skeleton.layout.trains(name, all_parameters=skeleton.full_parameters))
            names |= {name: None} if parameter.requires_grad else {}
    if skeleton.full_parameters:
        for _, part in owner_modules(skeleton):
            part.requires_grad_(True)
    skeleton.model.eval()
    return skeleton._replace(own_weights=tuple(names))


def owner_modules(skeleton: Skeleton) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of each owner's part of the base model that this model has."""
    return base_modules(skeleton, skeleton.layout.owner_paths)


def base_modules(skeleton: Skeleton, paths: Iterable[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of each of these parts of the base model that this model has."""
    modules = dict(skeleton.base.named_modules())
    return ((path, modules[path]) for path in paths if path in modules)


def no_initial_values() -> contextlib.AbstractContextManager[None]:
    """Return transformers' context in which new modules draw no values; version 5 has it in another module."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:
        from transformers.modeling_utils import no_init_weights
    context: contextlib.AbstractContextManager[None] = no_init_weights()
    return context


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
    """Seed torch's generators for ``unit``; ``torch.manual_seed`` would store each call for an unused accelerator."""
    number = unit_seed(seed, step, micro, unit)
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(number)


def set_dropout(config: Any, probability: float) -> None:
    """Set every dropout probability of a Hugging Face configuration (hidden, attention, head)."""
    for key, value in config.to_dict().items():
        if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, float | int):
            setattr(config, key, probability)
