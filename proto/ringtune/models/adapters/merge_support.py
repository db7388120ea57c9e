"""Which adapters are a change of matrices, so that they can be added to the weights of the base model."""

from __future__ import annotations

from ringtune.models.adapters.adapter_config import (
    AdapterPart,
    known_configurations,
    parse_adapter_config,
    trains_own_weights,
)
from ringtune.models.adapters.auxiliary_config import LINEAR, PLACES, places_beside


def merge_refusal(config: str) -> str:
    """Say why what an ``adapter.config`` trains can't be merged into the weights; empty if it can.

    Raises:
        JobError: the configuration itself is refused.
    """
    if trains_own_weights(config):
        return "the blocks' own weights trained, there is nothing to merge"
    parts = parse_adapter_config(config)
    problem, name = next(((why, part.name) for part in parts if (why := part_refusal(part))), ("", ""))
    return f"its part {name!r} can't, as {problem}" if problem and len(parts) > 1 else problem


def part_refusal(part: AdapterPart) -> str:
    """Say why one method of a configuration can't be merged into the weights; empty if it can."""
    kind, defaults = known_configurations()[part.name]
    options = {**defaults, **part.options}
    if kind == LINEAR:
        return ""
    if kind == "lora" and options["composition_mode"] == "add":
        gated = options["use_gating"] or options["use_dora"]
        return "its gate, or DoRA's norm, is no change of a matrix by itself" if gated else ""
    return "it is no change of matrices"


def places_of(config: str) -> tuple[str, ...]:
    """The matrices of a block beside which a configuration puts something, in the order of ``PLACES``.

    Example: query and value of ``lora``; nothing of ``seq_bn``, which stands beside no matrix.

    Raises:
        JobError: the configuration itself is refused.
    """
    found = {place for part in parse_adapter_config(config) for place in places_of_part(part)}
    return tuple(place for place in PLACES if place in found)


def places_of_part(part: AdapterPart) -> tuple[str, ...]:
    """The matrices of a block beside which one method puts something."""
    options = {**known_configurations()[part.name][1], **part.options}
    return places_beside(options) if "attn_matrices" in options else ()
