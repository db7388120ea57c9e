"""Checks before a plan runs on the virtual clock: the profile fits the plan, and every node has room."""

from __future__ import annotations

from ringtune.costs.measured.profile_match import check_profile
from ringtune.costs.memory.estimate import memory_estimate
from ringtune.costs.memory.moves import fullest, most_memory
from ringtune.costs.memory.share import Share
from ringtune.costs.memory.sizes import Sizes
from ringtune.costs.memory.terms import MemoryEstimate
from ringtune.costs.profile import Profile, TimedShape
from ringtune.errors import CapacityError, PlanError
from ringtune.files.strict import nearest
from ringtune.quantities import format_bytes
from ringtune.schedule.plan import Plan


def check_fits(plan: Plan, profile: Profile, *, optimizer: str, dtype: str, shape: TimedShape | None = None) -> None:
    """Refuse a plan that its profile can't time, or that does not fit in the memory of a node.

    Args:
        plan: the plan.
        profile: of its nodes.
        optimizer: of the job.
        dtype: of the computation.
        shape: what the timings have to belong to; None = whatever.

    Raises:
        PlanError: the plan names a node that the profile lacks, or the profile is of another model or shape.
        CapacityError: a node has less memory than the plan needs there; names it with both numbers.
    """
    known = profile.by_name
    for node in plan.nodes:
        if node not in known:
            raise PlanError(f"the plan names node {node!r}, which the profile lacks; {nearest(node, known)}")
    check_profile(profile, plan.course, shape=shape)
    for node, needs in memory_bounds(plan, profile, optimizer=optimizer, dtype=dtype).items():
        if needs.total_bytes > known[node].memory_bytes:
            pieces = dict.fromkeys(piece for part in plan.placements if (piece := part.slice_of(node)).num_blocks)
            what = f"blocks {', then '.join(piece.text for piece in pieces)}" if pieces else "embedding and head"
            raise CapacityError(
                f"node {node} needs {needs} for {what} but has {format_bytes(known[node].memory_bytes)}; give it fewer "
                "blocks, lower batch_size or max_length, or raise microbatches"
            )


def memory_bounds(plan: Plan, profile: Profile, *, optimizer: str, dtype: str) -> dict[str, MemoryEstimate]:
    """What each node of the plan holds at most in any placement or move, whatever the timing."""
    facts = profile.by_name
    sizes = {node: Sizes.at(plan.course, facts[node], optimizer=optimizer, dtype=dtype) for node in plan.nodes}
    parts = [
        {node: memory_estimate(plan.course, Share.of(part, node), sizes[node]) for node in part.nodes}
        for part in plan.parts
    ]
    found = fullest([*most_memory(plan, parts)])
    return {node: found[node] for node in plan.nodes}


def recorded_shape(profile: Profile, plan: Plan) -> TimedShape | None:
    """The shape that timings should have where no job says it; None if nothing was measured.

    Tokens and wire dtype are the plan's, all else is that of the first measured node; so are the tokens of images.
    """
    measured = [node for node in profile.nodes if node.shape.is_measured]
    if not measured:
        return None
    first = measured[0].shape
    return TimedShape(
        rows=first.rows,
        tokens=first.tokens if measured[0].model.fixed_tokens else plan.course.max_length,
        task=first.task,
        adapter=first.adapter,
        dtype=first.dtype,
        wire_dtype=plan.course.wire_dtype,
        optimizer=first.optimizer,
        dropout=first.dropout,
    )
