"""Which adapters a helper node can fit from pairs, and which can be merged into the matrices of their host.

A pair is what enters an adapter module, and the gradient of what the module adds. From both together the gradient of
the module's weights follows, unless the module draws numbers or reads something that no pair has.

Source: ColA, section 3, Propositions 1 and 2.
"""

from __future__ import annotations

from ringtune.models.adapters.adapter_config import (
    AdapterPart,
    known_configurations,
    parse_adapter_config,
    trains_own_weights,
)
from ringtune.models.adapters.merge_support import part_refusal

_ADVICE = "use lora, seq_bn or double_seq_bn"


def offload_refusal(adapter_config: str, *, dropout: float, fused: bool = False) -> str:
    """Why a helper can't fit these adapters exactly; empty if it can.

    Args:
        adapter_config: ``adapter.config`` of the job.
        dropout: ``train.dropout`` of the job.
        fused: whether query, key and value of the family are one matrix.

    Raises:
        JobError: the configuration itself is refused.
    """
    if trains_own_weights(adapter_config):
        return f"adapter.config = {adapter_config!r} has no adapter that a helper could fit; {_ADVICE}"
    for part in parse_adapter_config(adapter_config):
        if problem := _problem(part, dropout, fused):
            return f"adapter.config {adapter_config!r} can't be fitted by a helper, as {problem}"
    return ""


def merged_refusal(adapter_config: str, *, dropout: float) -> str:
    """Why a host can't have these adapters in the matrices beside them; empty if it can.

    Args:
        adapter_config: ``adapter.config`` of the job.
        dropout: ``train.dropout`` of the job.

    Raises:
        JobError: the configuration itself is refused.
    """
    if trains_own_weights(adapter_config):
        return offload_refusal(adapter_config, dropout=dropout)
    for part in parse_adapter_config(adapter_config):
        problem = part_refusal(part)
        if not problem and dropout > 0 and known_configurations()[part.name][0] == "lora":
            problem = f"train.dropout = {dropout} drops a part of its input only"
        if problem:
            return f"adapter {part.name!r} can't be merged into its matrix, as {problem}; set offload.merged = false"
    return ""


def _problem(part: AdapterPart, dropout: float, fused: bool) -> str:
    kind, defaults = known_configurations()[part.name]
    options = {**defaults, **part.options}
    if kind == "bottleneck":
        return _bottleneck_problem({"is_parallel": "par_bn" in part.name, **options}, dropout)
    if kind in ("linear", "mlp"):
        return ""
    if kind == "mtl_lora":
        return f"MTL-LoRA mixes several copies of its second matrix; {_ADVICE}"
    if kind != "lora":
        return f"ReFT changes chosen tokens of the hidden state itself; {_ADVICE}"
    if options["composition_mode"] != "add":
        return f"{part.name} scales what a matrix gives, and adds nothing; {_ADVICE}"
    if options["use_dora"]:
        return f"DoRA needs the norms of the base weights, which a helper does not have; {_ADVICE}"
    if options["use_gating"] and fused:
        return "one matrix for query, key and value has a gate for each of them; leave use_gating out"
    if options["use_gating"] and dropout > 0:
        return "its gate reads the input before dropout, the rest reads it after; leave use_gating or train.dropout out"
    return ""


def _bottleneck_problem(options: dict[str, object], dropout: float) -> str:
    if options.get("ln_after") and options.get("adapter_residual_before_ln") and not options.get("is_parallel"):
        return "its last norm reads the residual too; leave adapter_residual_before_ln or ln_after out"
    for name in ("use_gating", "ln_after"):
        if options.get(name) and dropout > 0:
            return f"{name} has weights behind the dropout, whose mask stays at the host; leave it or train.dropout out"
    return ""
