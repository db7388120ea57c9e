"""A plan as text: slices, memory, privacy, and the action table of some steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coordinator.planner.explain import Explanation, explanation_text
from coordinator.planner.planned import JobTime, copies_line
from coordinator.screen.progress import helper_lines, training_lines
from coordinator.screen.tables import table_lines
from ringtune.costs.memory_terms import PART_WORDS, MemoryEstimate
from ringtune.costs.profile import NodeFacts
from ringtune.errors import UsageError
from ringtune.quantities import format_bytes
from ringtune.schedule.actions import ops
from ringtune.schedule.migration import due, first_step
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import BY_ROWS
from ringtune.schedule.stages import num_assigned, replicas
from ringtune.schedule.table import build_table, format_table
from ringtune.schedule.turns import StepKind, Turn
from ringtune.schedule.units import units_text
from ringtune.schedule.versions import depth, in_flight, is_stale
from ringtune.techniques import TECHNIQUES
from ringtune.techniques.activation_checkpointing import SlicePolicy
from ringtune.texts import counted

NEEDS = "what the plan reserves in memory on a node, beside the libraries that every process loads"


def plan_text(
    plan: Plan,
    memory: Mapping[str, MemoryEstimate],
    *,
    at_step: int = 0,
    num_steps: int = 1,
    measured: bool,
    note: str = "",
    effort: str = "",
    why: Explanation | None = None,
    time: JobTime | None = None,
    budgets: Mapping[str, int] | None = None,
    facts: NodeFacts | None = None,
    rows: Sequence[str] = (),
) -> list[str]:
    """Write a plan as lines for people.

    ``num_steps`` = 0: no table of actions. ``measured``: nodes were measured, else equal ones are assumed. ``note``
    says which numbers are estimates; ``facts`` are of any node, for the bytes to helpers; ``rows`` are sentences
    about the files of rows.
    """
    source = "measured nodes" if measured else "assumed equal nodes"
    course = plan.course
    batch = counted(course.batch_size, "sequence" if course.packed else "row")
    lines = [
        f"{course.method.name}, {course.num_blocks} blocks, {course.num_steps} steps of {batch} in "
        f"{course.microbatches} micro-batch{'es' if course.microbatches > 1 else ''}, {course.wire_dtype} on the wire, "
        f"{source}, digest {plan.digest[:12]}"
    ]
    lines += [*rows, *filter(None, (note, effort))]
    lines += _nodes(plan, memory, budgets or {})
    lines.append(f"needs: {NEEDS}")
    lines += [time.line()] if time is not None else []
    lines.append(_turns(plan))
    lines += _moves(plan)
    lines += training_lines(course)
    lines += [line for technique in TECHNIQUES for line in technique.training_lines(plan, memory)]
    lines += helper_lines(plan, facts)
    if is_stale(course):
        lines.append(_staleness(plan))
    lines.append(_privacy(plan))
    lines += [line for technique in TECHNIQUES for line in technique.plan_lines(plan)]
    lines += copies_line(plan, memory)
    if why is not None:
        lines += [f"  {node} needs {estimate}" for node, estimate in memory.items()]
        shown = {part for estimate in memory.values() for part, size in estimate.parts().items() if size}
        lines += [f"    {part}: {words}" for part, words in PART_WORDS.items() if part in shown]
        lines += explanation_text(why)
    if num_steps:
        most = " at most, the losses decide" if course.decides else ""
        trains = f"depth {depth(course.soonest(), at_step)}{most}"
        if course.method.full_parameters:
            trains = f"which trains {units_text(course.method.trained(course, at_step))}"
        lines.append(f"actions from step {at_step}, {trains}:")
        lines += table_text(plan, at_step=at_step, num_steps=num_steps).splitlines()
        lines += legend_lines()
        lines += [line for technique in TECHNIQUES for line in technique.table_lines(plan)]
    return lines


def _nodes(plan: Plan, memory: Mapping[str, MemoryEstimate], budgets: Mapping[str, int]) -> list[str]:
    rows = []
    for node in plan.nodes:
        piece, owner = plan.slice_of(node), plan.owner(node)
        blocks = f"[{piece.start}, {piece.stop})" if piece.num_blocks else "none"
        if replicas(plan.placement, node):
            count = len(plan.course.microbatch_sizes())
            blocks += f", {num_assigned(plan.placement, node, count)} of {count} micro-batches"
        saves = SlicePolicy.of(plan, piece.start, piece.stop).text or "kept"
        needs = format_bytes(memory[node].total_bytes) if node in memory else ""
        has = format_bytes(budgets[node]) if node in budgets else ""
        rows.append([node, blocks, f"{owner.train_rows:,}" if owner else "none", needs, has, saves])
    titles = ["node", "blocks", "sequences" if plan.course.packed else "rows", "needs", "has"]
    if all(row[-1] == "kept" for row in rows):
        return table_lines(titles, [row[:-1] for row in rows])
    return table_lines([*titles, "activations"], rows)


def _turns(plan: Plan) -> str:
    owners, steps = [owner.node for owner in plan.course.owners], plan.course.local_iterations
    each = f"{steps} steps" if steps > 1 else "a step"
    if plan.course.turns == BY_ROWS:
        return f"turns of {each}, by rows: {', '.join(owners)}"
    return f"turns of {each}: {', then '.join(owners)}{', and again' if len(owners) > 1 else ''}"


def _moves(plan: Plan) -> list[str]:
    """Describe every placement after the first, with its step."""
    lines = []
    for placement in plan.placements[1:]:
        hosts = ", ".join(f"{piece.node} {piece.text}" for piece in placement.hosts)
        lines.append(f"placement {placement.placement_number} after step {first_step(plan.course, placement)}: {hosts}")
    return lines


def legend_lines() -> list[str]:
    """Explain the letters and numbers of the table of actions."""
    letters = ", ".join(f"{op} {op.name}" for op in ops())
    return [
        f"{letters}; . nothing",
        "E12.0: item 12 (a step or a batch of an evaluation), micro-batch 0; [2,4): blocks 2 and 3; "
        ">h12.0#2@b: the hidden state that enters block 2, to node b; g: its gradient; t3: the head, for turn 3; "
        "u12#head: the gradient of the head; r: gradients of a replica",
    ]


def _staleness(plan: Plan) -> str:
    hosts, course = plan.placement.hosts, plan.course
    lags = ", ".join(f"{piece.node} {in_flight(course, piece.start) - 1}" for piece in hosts)
    return f"weights are stale on purpose, by up to so many steps, each with its version of the adapters: {lags}"


def _privacy(plan: Plan) -> str:
    if len(plan.nodes) == 1:
        return "there is one node, nothing leaves it"
    private, course = plan.placement.private_blocks, plan.course
    if course.entering and (readers := _readers_of_inputs(plan)):
        return (
            f"privacy: {_named(readers)} can reconstruct the input text from the inputs of blocks that it receives, "
            f"each made of one token; privacy.private_blocks does not change that{_seen_by_helpers(plan)}"
        )
    if private:
        said = f"owners run blocks [0, {private}) themselves; later hidden states travel to the other nodes"
        return said + _seen_by_helpers(plan)
    with_adapters = " with adapters," if course.method.full_parameters else ""
    first = list(dict.fromkeys(piece.node for placement in plan.placements for piece in placement.stages[0]))
    return (
        f"privacy: {_named(first)} can reconstruct the input text from the embeddings it receives;{with_adapters} "
        f"set privacy.private_blocks to make that harder{_seen_by_helpers(plan)}"
    )


def _named(nodes: Sequence[str]) -> str:
    return f"node {nodes[0]}" if len(nodes) == 1 else f"each of the nodes {', '.join(nodes)}"


def _readers_of_inputs(plan: Plan) -> list[str]:
    """Return the hosts that get inputs of blocks, which are what has no gradient (``Course.entering``)."""
    course, pieces = (
        plan.course,
        (piece for placement in plan.placements for stage in placement.stages for piece in stage),
    )
    return list(
        dict.fromkeys(piece.node for piece in pieces if course.width(piece.start) > course.returning[piece.start])
    )


def _seen_by_helpers(plan: Plan) -> str:
    """Describe the hidden states that helpers see: those inside the blocks that they help with."""
    helpers = plan.placement.joined_helpers()
    if not helpers:
        return ""
    seen = ", ".join(f"{helper.node} of {helper.text}" for helper in helpers)
    lowest = "" if helpers[0].start else f"; {helpers[0].node} can tell the tokens from those of block 0"
    return f"; helpers see the hidden states inside the blocks that they help with: {seen}{lowest}"


def table_text(plan: Plan, *, at_step: int, num_steps: int) -> str:
    """Write the action table of some steps of the first owner, at the greatest depth where losses decide it.

    It is that of the placement at the first of them. A run without step ``at_step`` raises ``UsageError``.
    """
    plan = plan.soonest()
    if not 0 <= at_step < plan.course.num_steps:
        raise UsageError(f"--at-step {at_step} is not in [0, {plan.course.num_steps})")
    turn = Turn(
        index=0,
        kind=StepKind.TRAIN,
        owner=plan.course.owners[0].node,
        round=0,
        first_seq=at_step,
        num_items=min(num_steps, plan.course.num_steps - at_step),
        first_step=at_step,
        first_batch=0,
    )
    part = plan.at(due(plan.course, plan.placements, turn))
    return format_table(build_table(part, [turn]), plan.course.num_blocks)
