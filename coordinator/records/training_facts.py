"""What a run trains on and how much of it, for the opening lines and for report.json: known from its course alone.

Names of classes and numbers of rows are what the owners tell the coordinator anyway; how many rows a class has stays
with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from ringtune.costs.profile import NodeFacts
from ringtune.jobs.labels import look_alike_lines
from ringtune.rounds.group_owners import lone_groups, mixing_iterations
from ringtune.rounds.row_use import RowUse, row_uses
from ringtune.schedule.course import Course
from ringtune.schedule.owner_turns import EQUAL

_FAR_APART = 1.5


def training_facts(course: Course) -> dict[str, Any]:
    """Return steps, turns, classes, and how much each owner's rows are used, as numbers and names."""
    uses = row_uses(course)
    rows = sum(use.rows for use in uses)
    used = sum(use.used_rows for use in uses)
    return {
        "steps": course.num_steps,
        "turns": course.turns,
        "steps_of_turn": course.local_iterations,
        "rounds": -(-course.turns_of_owners(-(-course.num_steps // course.local_iterations)) // len(course.owners)),
        "rows": rows,
        "used_rows": used,
        "used_share": round(used / rows, 6),
        "epochs": round(sum(use.trained_rows for use in uses) / rows, 6),
        "classes": list(course.labels),
        "owners": {use.owner: _owner(use) for use in uses},
        "left_out": [one.owner.node for one in course.left_out],
        "notes": training_notes(course),
    }


def _owner(use: RowUse) -> dict[str, Any]:
    return {
        "rows": use.rows,
        "steps": use.steps,
        "rows_of_batch": use.batch_rows,
        "used_rows": use.used_rows,
        "epochs": round(use.epochs, 6),
        "least_times": use.least,
        "most_times": use.most,
    }


def rows_facts(nodes: Iterable[NodeFacts]) -> dict[str, Any]:
    """Return how many rows of the owners' files are left out, by why, and how many are cut at ``train.max_length``."""
    left_out = Counter[str]()
    cut = 0
    for node in nodes:
        left_out.update({each.why: each.rows for each in node.left_out})
        cut += node.cut_rows
    return {"left_out": dict(sorted(left_out.items())), "cut": cut}


def rows_lines(nodes: Iterable[NodeFacts], max_length: int) -> list[str]:
    """Say what of the owners' files is left out or cut, a sentence for each reason."""
    facts = rows_facts(nodes)
    lines = [f"{rows:,} left out: {why}" for why, rows in facts["left_out"].items()]
    if facts["cut"]:
        lines.append(f"{facts['cut']:,} rows are longer than train.max_length = {max_length} tokens and are cut")
    return lines


def training_notes(course: Course) -> list[str]:
    """Say what a person may not expect: rows that are left out or used more often than others, alike classes."""
    if not course.num_steps:
        return []
    uses = row_uses(course)
    idle = [use.owner for use in uses if not use.steps]
    small = [use for use in uses if use.batch_rows < course.batch_size]
    found = []
    if idle:
        remedy = "train longer, or lower train.local_iterations"
        steps = f"{course.num_steps} step{'s' * (course.num_steps > 1)}"
        found.append(f"no turn in {steps}, so no row is used: {_names(idle)}; {remedy}")
    elif any(use.used_rows < use.rows for use in uses):
        found.append("not every row is used; train.epochs = 1 would use each about once")
    lost = [(one.owner.node, one.turns) for one in course.left_out]
    found += [f"{node} is lost, and its rows are left out after {turns} of its turns" for node, turns in lost]
    there = uses[: len(course.owners)]
    least, most = min(there, key=lambda use: use.epochs), max(there, key=lambda use: use.epochs)
    if course.turns == EQUAL and not idle and most.epochs > _FAR_APART * least.epochs:
        found.append(
            f"rows of {most.owner} are used {most.epochs / least.epochs:.1f} times as often as those of {least.owner}, "
            "because every owner has as many steps; train.turns = 'rows' gives steps by rows"
        )
    if small:
        sizes = ", ".join(f"{use.owner} {use.rows}" for use in small)
        found.append(f"fewer rows than a batch of {course.batch_size}, so smaller batches: {sizes}")
    found += _group_notes(course)
    found += look_alike_lines(course.labels)
    return found


def _group_notes(course: Course) -> list[str]:
    """Say which owners train some of the groups only, because their turns keep step with the sweeps."""
    lone = lone_groups(course)
    if not lone:
        return []
    period, steps = course.method.period(course), mixing_iterations(course)
    remedy = f"; train.local_iterations = {steps} would mix them" if steps else ""
    return [
        f"turns of {course.local_iterations} steps keep step with sweeps of {period}, so that rows of "
        f"{_names([*lone])} train some of the groups only{remedy}"
    ]


def _names(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
