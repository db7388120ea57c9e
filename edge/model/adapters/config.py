"""Options of adapters, and their description in AdapterHub's files.

``adapter.config`` names options that differ from the defaults; here are all of them, as AdapterHub writes them to
``adapter_config.json``. Combinations that a module can't have are refused.

Source: adapters 1.3.0, ``configuration.adapter_config``, ``build_full_config``, ``AdapterModelInterface``.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from edge.model.prediction_heads import LIBRARY_VERSION
from ringtune.errors import JobError
from ringtune.models.adapter_config import AdapterPart, parse_adapter_config
from ringtune.models.decoders import interface_of
from ringtune.models.family import Family

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
"""Kind -> options besides those of ``known_configurations``, with their defaults."""
_BESIDE: Final = ("lora", "mtl_lora")
"""Architectures of which the library loads one in a union, whatever blocks they leave out."""
_START: Final = {"par_bn": "mam_adapter", "scaled_par_bn": "mam_adapter", "ia3": "ia3"}


def options_of(config: str, *, dropout: float) -> tuple[Options, ...]:
    """Return all options of each part of an ``adapter.config`` without auxiliary models, with a dropout probability.

    Raises ``JobError``: as ``parse_adapter_config``; options that a module can't have; two parts of one kind.
    """
    parts = parse_adapter_config(config)
    found = [_whole(part, dropout) for part in parts]
    for part, options in zip(parts, found, strict=True):
        if problem := _problem(part.name, options):
            raise JobError(f"adapter.config = {config!r}: {problem}")
    for first, second in itertools.combinations(found, 2):
        if not _go_together(first, second):
            raise JobError(f"adapter.config = {config!r} has two parts of one kind; leave one out")
    return tuple(found)


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
