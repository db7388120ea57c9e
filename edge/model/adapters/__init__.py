"""AdapterHub's adapters in the modules of transformers: where each has its place, and in which order they are drawn.

========================  ==========================================================  ==============================
kind                      place                                                       tensors
========================  ==========================================================  ==============================
bottleneck                after attention or feed-forward (``BottleneckHooks``)       ``output.adapters.NAME.*``
LoRA, DoRA, MTL-LoRA,     beside a matrix                                             ``query.loras.NAME.*``
(IA)3
ReFT                      behind a block                                              ``reft_layer.refts.NAME.*``
invertible                behind the embedding                                        ``invertible_adapters.NAME.*``
========================  ==========================================================  ==============================

A block is not changed: hooks on its modules run the adapters. All places follow from ``BlockLayout``. The order of the
draws of initial values is that of the library, so that a seed gives the same adapter. ``adapter.config`` names options
that differ from the defaults; AdapterHub writes all of them (``options_of``) to ``adapter_config.json``.

Source: adapters 1.3.0, ``ModelAdaptersMixin._add_adapter_weights``, the mixins of its models, ``init_bottleneck``;
``configuration.adapter_config``, ``build_full_config``, ``AdapterModelInterface``.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from torch import nn

from edge.model.adapters.bottleneck import Bottleneck, BottleneckHooks, Invertible
from edge.model.adapters.lora import IA3, LoRA, MatrixAdapter, MtlLoRA, attach
from edge.model.adapters.reft import Reft
from edge.model.prediction_heads import LIBRARY_VERSION
from ringtune.errors import JobError
from ringtune.models.adapter_config import INVERTIBLE, AdapterPart, bottleneck_width, parse_adapter_config
from ringtune.models.decoders import interface_of
from ringtune.models.family import BlockLayout, Family

_REFT: Final = "reft_layer"
_BOTTLENECKS: Final = ("mh_adapter", "output_adapter")
_EMBEDDING: Final = {"gpt2": "drop", "llama": "embed_tokens", "mistral": "embed_tokens"}
"""``model_type`` -> module behind which an invertible adapter is; ``embeddings`` for all others."""


class _Matrix(NamedTuple):
    """A matrix beside which LoRA may be.

    Attributes:
        option: of LoRA, that puts it there.
        letters: of ``attn_matrices``, for which the matrix stands.
    """

    option: str
    letters: str = ""


def add_adapters(base: Any, family: Family, config: str, *, dropout: float, name: str) -> tuple[Options, ...]:
    """Add adapters to all blocks of a base model of transformers, with initial values by torch's generator.

    Weights of ``base``, a model without head, may be placeholders; DoRA's magnitudes are then to be set. ``config`` is
    an ``adapter.config`` without auxiliary models; all options of each part are returned. Raises ``JobError`` as
    ``options_of``, or if the family has no place for a part, or two parts are at one place.
    """
    parts = options_of(config, dropout=dropout)
    for part in parts:
        if problem := _no_place(family, part):
            raise JobError(f"adapter.config = {config!r} can't be used with a {type(base).__name__}: {problem}")
    width = base.config.hidden_size
    for index, block in enumerate(base.get_submodule(family.blocks_path)):
        _Block(block, index, width, family.layout, parts, name).add(reft_first=not family.plugged)
    for part in parts:
        if part.get("inv_adapter"):
            adapter = Invertible(
                getattr(base.config, "embedding_size", width),
                part["inv_adapter_reduction_factor"],
                part["non_linearity"],
            )
            setattr(base, INVERTIBLE, nn.ModuleDict({name: adapter}))
            embedding = base.get_submodule(_EMBEDDING.get(family.model_type, "embeddings"))
            embedding.register_forward_hook(adapter.changed)
    return parts


def _no_place(family: Family, part: Options) -> str:
    """Say why a family can't have a part; empty if it can."""
    kind, layout = part.get("architecture", "bottleneck"), family.layout
    if family.plugged and kind not in family.methods:
        return f"its adapters are {' and '.join(family.methods)}; use lora"
    if part.get("inv_adapter") and (family.plugged or family.model_type == "vit"):
        return "it has no place for an invertible adapter; use seq_bn"
    if family.plugged and not part.get("original_ln_after", True):
        return "its blocks always add the residual; leave original_ln_after out"
    is_sum_kept = part.get("residual_before_ln") == "post_add" and not part["is_parallel"]
    if is_sum_kept and (layout.norm_first or not part["original_ln_before"]):
        return "residual_before_ln = 'post_add' takes a sum before a norm, and there is none; leave it out"
    if layout.is_merged and kind == "mtl_lora" and part["selfattn_lora"] and part["attn_matrices"]:
        return "queries, keys and values are one matrix, and MTL-LoRA has no form for it; use lora"
    if layout.inputs_first and part.get("use_dora"):
        return "its matrices have a row for each input, and DoRA needs one for each output; use lora"
    return ""


class _Block:
    """Adds adapters to one block."""

    def __init__(
        self, block: nn.Module, index: int, width: int, layout: BlockLayout, parts: Sequence[Options], name: str
    ) -> None:
        self._block, self._index, self._width, self._layout, self._name = block, index, width, layout, name
        self._parts = [part for part in parts if index not in part.get("leave_out", ())]
        self._homes = dict(zip((layout.attention_adapter, layout.feed_forward_adapter), _BOTTLENECKS, strict=True))
        self._homes.pop("", None)

    def add(self, *, reft_first: bool) -> None:
        """Add all adapters in the order of the library's modules; ReFT's is made before or after the bottlenecks'."""
        paths = [_REFT, *self._homes] if reft_first else [*self._homes, _REFT]
        made = [path for path in paths if self._make(path)]
        matrices = _matrices(self._layout)
        for path, module in list(self._block.named_modules()):
            if path in matrices:
                self._add_beside(module, matrices[path])
            elif path in self._homes:
                self._add_bottleneck(module, path)
            elif path == _REFT:
                self._add_reft(module)
        for path in made:
            parent, _, last = path.rpartition(".")
            if not list(self._block.get_submodule(path).children()):
                del self._block.get_submodule(parent)._modules[last]

    def _make(self, path: str) -> bool:
        """Make an empty module at a path where there is none."""
        parent, _, last = path.rpartition(".")
        home = self._block.get_submodule(parent)
        if hasattr(home, last):
            return False
        home.add_module(last, nn.Module())
        return True

    def _part(self, kinds: tuple[str | None, ...], option: str) -> Options | None:
        """Return the part of these architectures at a place."""
        matching = [part for part in self._parts if part.get("architecture") in kinds and part[option]]
        if len(matching) > 1:
            raise JobError(f"adapter.config has two parts at {option} of block {self._index}; leave one out")
        return matching[0] if matching else None

    def _add_beside(self, matrix: nn.Module, place: _Matrix) -> None:
        options = self._part(("lora", "mtl_lora"), place.option)
        letters = () if options is None else options["attn_matrices"]
        enabled = tuple(letter in letters for letter in place.letters)
        if options is None or (place.letters and not any(enabled)):
            return
        weight = matrix.get_parameter("weight")
        outputs, inputs = reversed(weight.shape) if self._layout.inputs_first else weight.shape
        enabled = enabled if len(enabled) > 1 else ()
        adapter: MatrixAdapter
        if options["composition_mode"] == "scale":
            adapter = IA3(inputs, outputs, options, enabled)
        elif options["architecture"] == "mtl_lora":
            adapter = MtlLoRA(inputs, outputs, options)
        else:
            adapter = LoRA(inputs, outputs, options, enabled, weight.detach())
        attach(matrix, adapter, name=self._name)

    def _add_bottleneck(self, home: nn.Module, path: str) -> None:
        options, layout = self._part((None,), self._homes[path]), self._layout
        if options is None:
            return
        adapter = Bottleneck(self._width, bottleneck_width(options, self._index, self._width), options)
        home.add_module("adapters", nn.ModuleDict({self._name: adapter}))
        if path == layout.attention_adapter:
            norm, first, last = layout.attention_norm, layout.attention, layout.attention_dropout
            last = last or layout.attention_out
        else:
            norm, first, last = layout.feed_forward_norm, layout.up, layout.feed_forward_dropout or layout.down
        of = self._block.get_submodule
        seat = BottleneckHooks(adapter, None if layout.norm_first else of(norm))
        seat.install(of(norm if layout.norm_first else first), of(last))

    def _add_reft(self, home: nn.Module) -> None:
        options = self._part(("reft",), "output_reft")
        if options is None or (options["layers"] != "all" and self._index not in options["layers"]):
            return
        reft = Reft(self._width, options)
        home.add_module("refts", nn.ModuleDict({self._name: reft}))
        self._block.register_forward_hook(reft.changed)


def _matrices(layout: BlockLayout) -> Mapping[str, _Matrix]:
    """Return path -> matrix; of a fused one that has a single name, that of the values."""
    if layout.is_merged:
        by_path = {layout.query: _Matrix("selfattn_lora", "qkv")}
    else:
        roles = zip(("query", "key", "value"), "qkv", strict=True)
        by_path = {
            path: _Matrix("selfattn_lora", letter) for role, letter in roles for path in layout.matrices_of(role)
        }
    by_path |= {layout.lora_intermediate: _Matrix("intermediate_lora"), layout.lora_output: _Matrix("output_lora")}
    by_path.pop("", None)
    return by_path


Options = Mapping[str, Any]

_HYPERCOMPLEX: Final = {
    "phm_dim": 4,
    "factorized_phm_W": True,
    "shared_W_phm": False,
    "shared_phm_rule": True,
    "factorized_phm_rule": False,
    "phm_c_init": "normal",
    "phm_init_range": 0.0001,
    "learn_phm": True,
    "hypercomplex_nonlinearity": "glorot-uniform",
    "phm_rank": 1,
    "phm_bias": True,
}
_LORA: Final = {"init_weights": "lora", "init_weights_seed": None, "vera_b": None, "dtype": None}
_REST: Final[Mapping[str, Mapping[str, Any]]] = {
    "bottleneck": {
        "init_weights": "bert",
        "init_weights_seed": None,
        "cross_adapter": False,
        "stochastic_depth": 0.0,
        **_HYPERCOMPLEX,
    },
    "lora": {"architecture": "lora", **_LORA},
    "mtl_lora": {"architecture": "mtl_lora", **_LORA},
    "reft": {"architecture": "reft", "init_weights_seed": None, "dtype": None},
}
"""Kind -> options besides those of ``CONFIGURATIONS``, with their defaults."""
_BESIDE: Final = ("lora", "mtl_lora")
"""Architectures of which the library loads one in a union, whatever blocks they leave out."""
_START: Final = {"par_bn": "mam_adapter", "scaled_par_bn": "mam_adapter", "ia3": "ia3"}


def options_of(config: str, *, dropout: float) -> tuple[Options, ...]:
    """Return all options of each part of an ``adapter.config`` without auxiliary models, with a dropout probability.

    Raises ``JobError``: as ``parse_adapter_config``; options that a module can't have; two parts of one kind.
    """
    parts = parse_adapter_config(config)
    wholes = [_whole(part, dropout) for part in parts]
    for part, options in zip(parts, wholes, strict=True):
        if problem := _problem(part.name, options):
            raise JobError(f"adapter.config = {config!r}: {problem}")
    for first, second in itertools.combinations(wholes, 2):
        if not _go_together(first, second):
            raise JobError(f"adapter.config = {config!r} has two parts of one kind; leave one out")
    return tuple(wholes)


def _whole(part: AdapterPart, dropout: float) -> Options:
    start = {"init_weights": _START[part.name]} if part.name in _START else {}
    return {**_REST[part.kind], **part.whole, **start, **part.options, "dropout": dropout}


def _problem(name: str, options: Options) -> str:
    """Say which options exclude each other; empty if none do."""
    if options.get("stochastic_depth"):
        return "stochastic_depth is not supported; use train.dropout"
    if type(options.get("scaling")) is int:
        return f"scaling is the whole number {options['scaling']}; write {float(options['scaling'])}"
    if options.get("composition_mode") != "scale":
        if name == "mtl_lora" and options["use_dora"]:
            return "use_dora goes with LoRA only; leave it out, or use dora"
        return ""
    if options["architecture"] == "mtl_lora":
        return "composition_mode = 'scale' goes with LoRA only; use ia3"
    if options["use_dora"] or options["init_weights"] == "vera":
        what = "use_dora" if options["use_dora"] else "init_weights = 'vera'"
        return f"{what} goes with composition_mode = 'add' only; leave it out"
    if options["r"] > 1:
        return f"composition_mode = 'scale' needs r = 1, not {options['r']}"
    return "(IA)3 does not support dropout; set train.dropout = 0" if options["dropout"] else ""


def _go_together(first: Options, second: Options) -> bool:
    """Whether a union may have both parts, as the library checks it."""
    if first.get("architecture") in _BESIDE and second.get("architecture") in _BESIDE:
        return False
    if first.get("architecture") != second.get("architecture") or first.get("leave_out") or second.get("leave_out"):
        return True
    places = ("mh_adapter", "output_adapter")
    return "architecture" not in first and all(first[place] != second[place] for place in places)


def description(parts: Sequence[Options], base: Any, family: Family, *, name: str) -> bytes:
    """Write ``adapter_config.json`` of an adapter in a base model of transformers."""
    kind = type(base).__name__
    options: Options = parts[0] if len(parts) == 1 else {"architecture": "union", "configs": list(parts)}
    described = {
        "model_type": base.config.model_type,
        "hidden_size": getattr(base.config, "hidden_size", None),
        "model_name": base.config.name_or_path,
        "name": name,
        "model_class": kind if family.plugged else kind.removesuffix("Model") + "AdapterModel",
        "config": options,
        "version": LIBRARY_VERSION,
    }
    return json.dumps(described, indent=2, sort_keys=True).encode()


def interface(family: Family) -> bytes:
    """Write ``adapter_interface.json``, by which AdapterHub finds the modules of a family without a class there."""
    unused = ("attn_qkv_proj", "layer_pre_cross_attn", "layer_ln_1", "layer_ln_2")
    fields = {**dict.fromkeys(unused), **interface_of(family)}
    described = {"model_type": family.model_type, "interface": fields, "version": LIBRARY_VERSION}
    return json.dumps(described, indent=2, sort_keys=True).encode()
