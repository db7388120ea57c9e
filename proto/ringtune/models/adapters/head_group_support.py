"""Which adapters and which dropout a block can have whose heads are divided into subnets.

A block runs by head groups in a forward of our own: attention and feed-forward part over the active subnets only. Norms
and bottlenecks stay the library's modules, applied once to the whole. LoRA has its own rows or columns for each subnet.
Whatever mixes the subnets inside a matrix, or draws numbers there, is refused.
"""

from __future__ import annotations

from ringtune.models.adapters.adapter_config import AdapterPart, known_configurations, parse_adapter_config
from ringtune.models.adapters.auxiliary_config import AUXILIARY_KINDS

_WHOLE_BLOCKS = "or set operations.heads = 0, which takes whole blocks"


def refusal(adapter_config: str, *, dropout: float, heads: int) -> str:
    """Why blocks with this adapter can't be run by head groups; empty if they can.

    Args:
        adapter_config: ``adapter.config`` of the job.
        dropout: ``train.dropout`` of the job.
        heads: attention heads of one subnet; 0 = a whole block is one subnet, which every adapter can.

    Raises:
        JobError: the configuration itself is refused.
    """
    if not heads:
        return ""
    if dropout > 0:
        return (
            f"train.dropout = {dropout} can't be drawn for a part of the heads only (operations.heads = {heads}); set "
            f"train.dropout = 0, {_WHOLE_BLOCKS}"
        )
    for part in parse_adapter_config(adapter_config):
        if problem := _problem(part):
            return (
                f"adapter.config {adapter_config!r} can't be run by head groups (operations.heads = {heads}), as "
                f"{problem}; "
                f"use seq_bn, double_seq_bn or lora, {_WHOLE_BLOCKS}"
            )
    return ""


def _problem(part: AdapterPart) -> str:
    kind, defaults = known_configurations()[part.name]
    options = {**defaults, **part.options}
    if kind == "bottleneck":
        return "its dropout draws numbers" if options.get("dropout") else ""
    if kind == "reft":
        return "ReFT changes what leaves a block, outside of attention and feed-forward part"
    if kind in AUXILIARY_KINDS:
        return "an auxiliary model is not divided among subnets"
    if kind == "mtl_lora":
        return "MTL-LoRA mixes several copies of its second matrix"
    if options["composition_mode"] != "add":
        return "it scales what a matrix gives, and has no part for each subnet"
    if options["use_dora"]:
        return "DoRA takes norms over the whole matrix"
    if options["use_gating"]:
        return "the gate of LoRA depends on the whole matrix"
    return "its dropout draws numbers" if options.get("dropout") else ""
