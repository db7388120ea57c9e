"""Explain what each slice does to save activations, and what it would need without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coordinator.planner.fitting.memory_caps import MemoryCaps
from coordinator.planner.fitting.slice_saving import extra_share, planned_saving
from ringtune.costs.memory.activations import dropout_token_bytes
from ringtune.jobs.parts.memory import AUTO
from ringtune.quantities import format_bytes
from ringtune.schedule.placement import Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.slice_policy import NONE, SlicePolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceReason:
    """What one slice does to save activations, and why.

    Attributes:
        node: its host.
        policy: one of ``slice_policy.POLICIES``.
        says: the policy in words; empty where everything is kept.
        needed_bytes: of the node, so.
        keeping_bytes: of the node if everything were kept.
        budget_bytes: what the node has.
        longer: the share by which its forwards and backwards take longer.
        projected_bytes: of the node with VeLoRA instead, where ``auto`` may not choose it and it would do; else 0.
    """

    node: str
    policy: str
    says: str
    needed_bytes: int
    keeping_bytes: int
    budget_bytes: int
    longer: float
    projected_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationsReason:
    """What a run keeps of its forwards, and what that saves.

    Attributes:
        asked: ``memory.activations`` of the job.
        slices: of the hosts in ring order.
        block_bytes: what a block keeps of a micro-batch.
        velora_bytes: the same with VeLoRA, by the job's settings or the defaults; 0 where it has nothing to do.
        dropout_bytes: what dropout adds to it, as the attention kernel is not fused then; 0 without dropout.
    """

    asked: str
    slices: tuple[SliceReason, ...]
    block_bytes: int
    velora_bytes: int = 0
    dropout_bytes: int = 0


def explain_activations(plan: Plan, caps: MemoryCaps, *, dropout: float = 0.0) -> ActivationsReason | None:
    """Explain the policies of a plan; None where everything is kept because nothing else was asked for.

    Args:
        plan: with its slices.
        caps: memory of the draft that it was made of.
        dropout: of the job; with it there is always something to say.
    """
    draft, hosts = caps.draft, plan.placement.hosts
    if (draft.activations == NONE and not dropout) or not hosts or not plan.course.num_steps:
        return None
    tokens = plan.course.microbatch_sizes()[0] * plan.course.max_length
    facts = caps.facts[hosts[0].node]
    whole, projected = caps.block_bytes(hosts[0].node, tokens)
    dropped = dropout_token_bytes(facts.model, tokens=plan.course.max_length, dtype=caps.dtype) if dropout else 0
    return ActivationsReason(
        asked=draft.activations,
        slices=tuple(_slice(plan, piece, caps) for piece in hosts) if draft.activations != NONE else (),
        block_bytes=whole,
        velora_bytes=projected if projected < whole else 0,
        dropout_bytes=round(tokens * dropped),
    )


def _slice(plan: Plan, piece: Slice, caps: MemoryCaps) -> SliceReason:
    node, policy = piece.node, SlicePolicy.of(plan, piece.start, piece.stop)
    saving, facts = planned_saving(plan, piece.start, piece.stop), caps.facts[node]
    proposed = 0
    if caps.draft.activations == AUTO and policy.recomputed and not caps.draft.may_project:
        with_velora = caps.with_velora(plan, node).total_bytes
        proposed = with_velora if with_velora <= facts.memory_bytes else 0
    return SliceReason(
        node=node,
        policy=policy.name,
        says=policy.text,
        needed_bytes=caps.estimate(plan, node).total_bytes,
        keeping_bytes=caps.keeping_everything(plan, node).total_bytes,
        budget_bytes=facts.memory_bytes,
        longer=extra_share(saving, caps.kept_blocks(piece.start, piece.stop), facts, gain=caps.projected_gain(node)),
        projected_bytes=proposed,
    )


def activation_lines(found: ActivationsReason) -> list[str]:
    """Write the reasons as lines of text."""
    lines = [f"  memory.activations = '{found.asked}':"] if found.slices else []
    width = max((len(each.node) for each in found.slices), default=0)
    lines += [f"    {each.node:<{width}}  {_slice_text(each)}" for each in found.slices]
    size: Callable[[int], str] = format_bytes
    if found.velora_bytes:
        less = 1 - found.velora_bytes / found.block_bytes
        lines.append(
            f"    VeLoRA keeps {size(found.velora_bytes)} instead of {size(found.block_bytes)} of each block and "
            f"micro-batch, {less:.1%} less"
        )
    if found.dropout_bytes:
        without = found.block_bytes - found.dropout_bytes
        lines.append(
            f"    train.dropout = 0 would keep {size(without)} instead of {size(found.block_bytes)} of each block and "
            "micro-batch, at no cost in time: the attention kernel is fused then and keeps no probabilities"
        )
    return lines


def _longer_text(share: float) -> str:
    return f"{abs(share):.0%} {'longer' if share >= 0 else 'shorter'}"


def _slice_text(each: SliceReason) -> str:
    budget = format_bytes(each.budget_bytes)
    if not each.says:
        return f"keeps everything: {format_bytes(each.needed_bytes)} of {budget}"
    fits = "fits too" if each.keeping_bytes <= each.budget_bytes else "does not fit"
    text = (
        f"{each.says}: {format_bytes(each.needed_bytes)} of {budget}, "
        f"forwards and backwards {_longer_text(each.longer)}; "
        f"keeping everything needs {format_bytes(each.keeping_bytes)}, which {fits}"
    )
    if each.projected_bytes:
        text += f"; VeLoRA would do ({format_bytes(each.projected_bytes)}): a section [velora] lets auto choose it"
    return text
