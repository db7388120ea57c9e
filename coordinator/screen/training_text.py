"""Text about training: rows, groups of units, helpers and operation tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from coordinator.run.run_text import training_facts
from ringtune.costs.memory_terms import MemoryEstimate
from ringtune.costs.offload_costs import step_traffic
from ringtune.costs.profile import KindFacts, NodeFacts
from ringtune.quantities import format_bytes, format_seconds
from ringtune.schedule.course import ALONE, COLLABORATION, EXACT, Course
from ringtune.schedule.operation_tables import BatchOperations, Operations, pattern_of
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import BY_ROWS, users_text
from ringtune.schedule.units import EMBEDDING, unit_name, units_text
from ringtune.schedule.versions import ever_trained
from ringtune.techniques import TECHNIQUES
from ringtune.techniques.offload import rows_by_user
from ringtune.techniques.operations import expected_table
from ringtune.texts import listed

_MAX_OWNERS = 8
_MAX_CLASSES = 8
_LONGEST_NAME = 30


def training_lines(course: Course) -> list[str]:
    """Describe rows, epochs and turns of a course, with warnings; empty for a course without steps."""
    if not course.num_steps:
        return []
    facts, row = training_facts(course), "sequence" if course.packed else "row"
    how = f"turns of {_counted(course.local_iterations, 'step')}, {'by rows' if course.turns == BY_ROWS else 'equal'}"
    lines = [
        f"trains {_counted(facts['steps'], 'step')} in {_counted(facts['rounds'], 'round')} ({how}): "
        f"{facts['used_rows']:,} of {facts['rows']:,} {row}s ({facts['used_share']:.0%}), {facts['epochs']:.3g} epochs"
    ]
    owners = list(facts["owners"].items())
    width = max(len(name) for name, _ in owners)
    for name, own in owners[:_MAX_OWNERS]:
        times = _times(own["least_times"], own["most_times"])
        lines.append(
            f"  {name:<{width}}  {_counted(own['steps'], 'step')} of {_counted(own['rows_of_batch'], row)}: "
            f"{own['used_rows']:,} of its {own['rows']:,} {row}s{times}"
        )
    if len(owners) > _MAX_OWNERS:
        epochs = [own["epochs"] for _, own in owners[_MAX_OWNERS:]]
        lines.append(f"  and {len(epochs)} more owners, {min(epochs):.3g} to {max(epochs):.3g} epochs each")
    if course.labels:
        lines.append(f"{len(course.labels)} classes: {_classes(course.labels)}")
    lines += [line for technique in TECHNIQUES for line in technique.course_lines(course)]
    return [*lines, *(f"note: {text}" for text in facts["notes"])]


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _times(least: int, most: int) -> str:
    """Say how often each used row is used."""
    least = max(1, least)
    if most <= 1:
        return ", each once" if most else ""
    return f", each {most} times" if least == most else f", each {least} to {most} times"


def _classes(labels: tuple[str, ...]) -> str:
    """List the first names; those with spaces at an end or invisible characters in quotes."""
    shown = [label if label == label.strip() and label.isprintable() and label else repr(label) for label in labels]
    cut = [name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…" for name in shown]
    return listed(cut, _MAX_CLASSES)


_MAX_GROUPS = 8
_EMBEDDING_TELLS = "with texts, the embedding's which tokens it had and, of learned positions, where they stood"
_HEAD_TELLS = "the head's about how many rows of each class"


def groups_lines(course: Course, memory: Mapping[str, MemoryEstimate]) -> list[str]:
    """Describe groups, sweeps and gradients of copies; empty with adapters. ``memory`` has the sizes of gradients."""
    if not course.method.full_parameters or not course.num_steps:
        return []
    period = course.method.period(course)
    kinds = [course.method.trained(course, step) for step in range(period)]
    shown = " | ".join(units_text(units) for units in kinds[:_MAX_GROUPS])
    more = f" | and {period - _MAX_GROUPS} more" if period > _MAX_GROUPS else ""
    rate = course.method.rate_at(course, course.num_steps - 1)[1]
    lines = [
        f"trains all parameters, one group a step: {shown}{more}",
        f"a sweep over all groups is {_counted(period, 'step')}; the run has {_counted(rate, 'sweep')}, and the "
        "learning rate advances once a sweep",
    ]
    return [*lines, *_copies_lines(course, memory)]


def _copies_lines(course: Course, memory: Mapping[str, MemoryEstimate]) -> list[str]:
    """Describe the gradients from initiators to the other owners, for their copies of embedding and head."""
    if len(course.owners) < 2:
        return []
    reach = ever_trained(course)
    sizes = {term.what: term.each_bytes for estimate in memory.values() for term in estimate.terms}
    parts = []
    for unit in (EMBEDDING, course.head):
        if unit in reach:
            name = unit_name(unit, course.num_blocks)
            size = sizes.get(f"gradient of the {name} on its way")
            parts.append(f"{name}{f' (at most {format_bytes(size)})' if size else ''}")
    lines = [
        f"every owner has a copy of embedding and head; a step that trains one sends its gradient to the other owners: "
        f"{', '.join(parts)}"
    ]
    tells = [_EMBEDDING_TELLS] if EMBEDDING in reach else []
    tells += [_HEAD_TELLS] if course.labels and course.head in reach else []
    if tells:
        lines.append(f"note: these gradients tell the other owners much of a batch: {'; '.join(tells)}")
    return lines


_MAX_NAMED = 20
_USERS = {
    ALONE: "train adapters of their own, which only their rows go through",
    COLLABORATION: "train adapters of their own, and every row goes through the sum of all",
}
_MANNERS = {"bfloat16": "rounded to 16 bits", "velora": "with projections of inputs"}


def run_lines(plan: Plan) -> list[str]:
    """Describe the training of a run and its helpers, for a screen beside the nodes."""
    return [*training_lines(plan.course), *helper_lines(plan)]


def helper_lines(plan: Plan, facts: NodeFacts | None = None) -> list[str]:
    """Describe the helper of each host; empty without helpers. ``facts`` of any node add the bytes."""
    placement = plan.placement
    lines = []
    for one in placement.joined_helpers():
        sent = ""
        if facts is not None:
            pairs, weights = step_traffic(plan, one, facts)
            sent = f": at most {format_bytes(pairs)} of pairs a step, {format_bytes(weights)} of weights an update"
        lines.append(f"{one.node} fits the adapters of {placement.host_of(one.start)}'s blocks {one.text}{sent}")
    kinds = facts.model.kinds if facts is not None else ()
    return [*lines, *_user_lines(plan, kinds), _result(plan)] if lines else []


def _user_lines(plan: Plan, kinds: Sequence[KindFacts]) -> list[str]:
    """List the users with adapters of their own, with their rows and other adapter configurations."""
    if not plan.course.user_sets:
        return []
    users = plan.course.user_sets
    own = [f"{kind.config}: {listed([user for user in users if user in kind.users], _MAX_NAMED)}" for kind in kinds]
    own = [f"adapters in place of the job's: {'; '.join(own)}"] if own else []
    return [f"users, with training and evaluation rows: {users_text(rows_by_user(plan.course))}", *own]


def _result(plan: Plan) -> str:
    offload = plan.course.offload
    if offload is None:
        return "helpers fit after every step from exact pairs: the result is that of a run without helpers"
    said: list[str] = []
    if users := plan.course.user_sets:
        said.append(f"{len(users)} users {_USERS[offload.users]}")
    if offload.interval > 1:
        said.append(f"helpers add up {offload.interval} steps for one update")
    if offload.pairs != EXACT:
        said.append(f"pairs travel {_MANNERS[offload.pairs]}")
    if offload.merged:
        said.append("hosts hold the adapters inside matrices, with the rounding of these")
    if offload.overlap:
        said.append("hosts don't wait, so that these adapters are one step behind within a turn")
    return f"{'; '.join(said)}: the result is not that of a run without helpers"


MAX_BATCHES = 2


def choice_lines(plan: Plan) -> list[str]:
    """Describe in a line how a run gets its operations; empty where everything is full."""
    course = plan.course
    if course.choice is None:
        if course.operations is None:
            return []
        batches = len({(entry.owner, entry.batch_id) for entry in course.operations.batches})
        return [f"operations are given, for {batches} batches"]
    choice = course.choice
    if choice.tables:
        return [f"operations are given, {len(choice.tables)} tables, which follow each other"]
    what = f"{choice.subnets} subnets a block" if choice.subnets > 1 else "whole blocks"
    what = "whole slices" if choice.by_slice else what
    scores = " and ".join(choice.scores)
    by = f" by {scores}" if scores else ""
    anew = f", and anew every {choice.refresh_steps} steps" if choice.refresh_steps else ""
    return [f"operations of {what} are chosen by the policy {choice.policy}{by} before training{anew}"]


def operations_lines(plan: Plan, *, max_batches: int = MAX_BATCHES) -> list[str]:
    """Write the first batches of a plan's operation table with a legend; says where the table is only assumed.

    Example: ``1132 3333`` is a micro-batch that passes the second of two blocks of four subnets by.
    """
    course = plan.course
    if not course.may_skip:
        return []
    table = expected_table(course)
    assumed = ", assumed until the run has chosen" if course.operations is None else ""
    lines = [f"operations{assumed}: 1 full, 2 forward-only, 3 shortcut; a word for each block, a code for each subnet"]
    for entry in table.batches[:max_batches]:
        lines += _batch(entry, course.num_blocks, table)
    more = len(table.batches) - max_batches
    return [*lines, f"  and {more} more batches"] if more > 0 else lines


def saved_lines(operations: Mapping[str, Any] | None) -> list[str]:
    """Describe done and saved work of operations, from a run's report; empty where everything was full."""
    if not operations:
        return []
    width = max(len(node) for node in operations["nodes"])
    lines = ["operations of its train steps, as shares of all full:"]
    for node, shares in operations["nodes"].items():
        full, forward, skipped = (f"{shares[name]:.0%}" for name in ("full", "forward_only", "skipped"))
        lines.append(f"  {node:<{width}}  {full} full, {forward} forward-only, {skipped} skipped")
    lines += [f"  {name:<{width}}  {_shares(operations[name])}" for name in ("compute", "bytes")]
    scores = operations.get("scores") or {"batches": 0}
    if not scores["batches"]:
        return lines
    on_top = f"{format_seconds(scores['busy_s'])} and {format_bytes(scores['sent_bytes'])} on top"
    steps = f"{format_seconds(operations['compute']['busy_s'])} and {format_bytes(operations['bytes']['sent_bytes'])}"
    return [
        *lines,
        f"  {'scores':<{width}}  {on_top}, measured, for {scores['batches']} batches; the steps took {steps}",
    ]


def _shares(figures: Mapping[str, Any]) -> str:
    """Write the shares: ``62 % measured, 61 % predicted, 60 % by the paper's count``."""
    words = {"measured": "measured", "predicted": "predicted", "paper": "by the paper's count"}
    known = [f"{figures[name]:.0%} {word}" for name, word in words.items() if figures.get(name) is not None]
    if "all_full_s" in figures and figures["all_full_s"] is None:
        known.insert(0, "not measured")
    return ", ".join(known) or "nothing to compare with"


def _batch(entry: BatchOperations, num_blocks: int, table: Operations) -> Iterator[str]:
    in_pass = f", pass {entry.of_pass + 1} of {table.passes}" if table.passes > 1 else ""
    yield f"  owner {entry.owner}, batch {entry.batch_id}{in_pass}"
    for micro, row in enumerate(entry.rows):
        words = " ".join(pattern_of(row, block, table.subnets) for block in range(num_blocks))
        yield f"    micro-batch {micro}  {words}"
