"""Text about a run: numbers of steps and rounds, figures of evaluations, and rows.

Plans, turns and frames count from 0. Screens, ``metrics.jsonl``, ``report.json`` and status count from 1, so the number
of a step is also the number of steps done: the evaluation of "step 40" follows step 40, and a checkpoint of step 40
contains it. Only the ledger converts (``shown``). A line of a step in ``metrics.jsonl`` has ``"kind": "train"``.

Screen, page, model card and ``ringtune eval`` write figures by these functions alone.

Facts about training follow from the course. Owners tell the coordinator names of classes and numbers of rows, not the
rows of each class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ringtune.costs.profile import NodeFacts
from ringtune.job.job import Job
from ringtune.job.rows import look_alike_lines
from ringtune.quantities import format_bytes, format_seconds
from ringtune.run_control.events import LogFetched, LogRecovery, Replanned
from ringtune.schedule.course import Course
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import EQUAL
from ringtune.schedule.turns import Evaluations, RowUse, evaluates_as, row_uses
from ringtune.schedule.units import Units
from ringtune.techniques import TECHNIQUES
from ringtune.techniques.generation import JUDGED
from ringtune.texts import listed

STEP_KIND = "train"


def shown(index: int) -> int:
    """Convert a step or round of the protocol, from 0, to the number for people, from 1."""
    return index + 1


def is_step(line: Mapping[str, Any]) -> bool:
    """Whether a line of ``metrics.jsonl`` is of a train step."""
    return bool(line.get("kind") == STEP_KIND)


def placement_number(line: Mapping[str, Any], otherwise: int = 0) -> int:
    """The placement number of a line; ``otherwise`` if it has none."""
    return int(line.get("placement_number", line.get("epoch", otherwise)))  # version 0.2.0 and before: epoch


def is_settled(line: Mapping[str, Any], steps_done: int) -> bool:
    """Whether a line stays after a resume from ``steps_done`` steps.

    Decisions and evaluations of that step are repeated.
    """
    step = int(line["step"])
    return step <= steps_done if is_step(line) else step < steps_done


def trained_at(course: Course, step: int, depth: int) -> Units:
    """The units that a step, from 0, trained: its group, or the head and the top ``depth`` blocks."""
    return course.method.trained(course, step) if course.method.full_parameters else Units.top(course.num_blocks, depth)


class LastStep:
    """The finished train step with the highest number; its loss is shown as that of the run.

    Reports of owners may arrive out of order.

    Attributes:
        line: the step's entry of metrics.jsonl; empty before the first.
    """

    def __init__(self) -> None:
        self.line: Mapping[str, Any] = {}

    def take(self, line: Mapping[str, Any]) -> bool:
        """Take a finished item; return whether it is the last step now."""
        if line["kind"] != STEP_KIND or (self.line and line["step"] <= self.line["step"]):
            return False
        self.line = line
        return True


def replan_line(plan: Plan, why: Replanned) -> dict[str, Any]:
    """Make the line of a replanned placement, with the predicted seconds of the steps that are left."""
    newest = plan.placements[-1]
    predicted = {"stays_s": why.stays_s, "moves_s": why.moves_s, "cost_s": why.cost_s}
    step = newest.first_turn * plan.course.local_iterations
    told = {key: round(value, 6) for key, value in predicted.items()}
    return {"kind": "replan", "step": step, "to": newest.placement_number, "predicted": told}


def fetched_line(command: LogFetched) -> dict[str, Any]:
    """Make the line of base weights prefetched for a later placement."""
    problems = {"problems": dict(command.problems)} if command.problems else {}
    came = dict(command.fetched_bytes)
    return {
        "kind": "fetched",
        "to": command.placement_number,
        "seconds": round(command.seconds, 6),
        "bytes": came,
        **problems,
    }


def fetched_text(command: LogFetched) -> str:
    """Describe a prefetch; empty if no weights were fetched."""
    if command.problems:
        problems = "; ".join(problem for _, problem in command.problems)
        return f"placement {command.placement_number} is not there yet: {problems}"
    count = sum(count for _, count in command.fetched_bytes)
    if not count:
        return ""
    return (
        f"{format_bytes(count)} of base weights were fetched for placement {command.placement_number} in"
        f" {format_seconds(command.seconds)}, while the run trained"
    )


def recovery_line(command: LogRecovery) -> dict[str, Any]:
    """Make the line of a recovery."""
    course = command.plan.course
    return {
        "kind": "recovery",
        "step": command.step,
        "lost": list(command.lost),
        "placement_number": command.part.placement.placement_number,
        "seconds": round(command.seconds, 6),
        "fetched_bytes": dict(command.fetched_bytes),
        **({"bad_step": command.bad_step} if command.bad_step else {}),
        **({"link": command.link} if command.link else {}),
        **({"back": [*command.back]} if command.back else {}),
        **({"left_out": [*command.left_out]} if command.left_out else {}),
        **({"returned": [*command.returned], "missed_turns": course.missed} if command.returned else {}),
        **({"num_steps": course.num_steps} if command.left_out or command.returned else {}),
    }


def owners_text(job: Job, before: Course, after: Course) -> str:
    """Say whose rows are left out or taken in from one course to the next, and what follows; empty where nobody's."""
    out = [owner.node for owner in before.owners if after.owner(owner.node) is None]
    back = [owner.node for owner in after.owners if before.owner(owner.node) is None]
    if not (out or back):
        return ""
    missed = ", ".join(f"{node} has missed {_turns(after.missed.get(node, 0))}" for node in back)
    text = f"; the rows of {', '.join(out)} are left out" if out else ""
    text += f"; the rows of {', '.join(back)} are trained again ({missed})" if back else ""
    text += f", so that the run ends with step {after.num_steps}"
    anew = bool(job.train.keep_best) and not evaluates_as(before, after)
    whom = "without" if out else "with"
    return text + f"; the best of the evaluations from here on, which are {whom} them, is kept" * anew


def _turns(count: int) -> str:
    return "1 turn" if count == 1 else f"{count} turns"


FIGURES: Final = (
    *("accuracy", "macro_f1", "entity_f1", "mse", "mae", "pearson", "spearman"),
    *("perplexity", "f1", "exact_match", "loss", "rouge_l"),
)
"""Names of the shown figures, in order."""

_OF_QUESTIONS: Final = ("f1", "exact_match")
_OF_COUNTED: Final = (
    *("macro_f1", "macro_precision", "macro_recall", "matthews", "pearson", "r2", "spearman"),
    *("entity_f1", "entity_precision", "entity_recall"),
)
_COUNTS: Final = ("count", "counted_rows")
_RISES_BY: Final = 1.05
_EVALUATIONS_OF_A_RISE: Final = 2


def figure(value: float | None) -> str:
    """Write a loss or accuracy with four decimals: 0.5 is ``0.5000``; None is ``-``."""
    return "-" if value is None else f"{value:.4f}"


def rows_of(entry: Mapping[str, Any], name: str) -> str:
    """Say on how many rows a figure of an evaluation is.

    Example: ``20 of 29 rows`` of a macro F1, where an owner of 9 rows has sent no counts of classes; the accuracy is on
    ``29 rows``.
    """
    if name == "rouge_l" and JUDGED in entry:
        return f"{entry[JUDGED]} texts"
    if name in _OF_QUESTIONS and "questions" in entry:
        return f"{entry['questions']} questions"
    count = entry["count"]
    counted = entry.get("counted_rows", count) if name in _OF_COUNTED else count
    return f"{count if counted == count else f'{counted} of {count}'} {_unit(entry)}"


def _unit(entry: Mapping[str, Any]) -> str:
    """The unit of the mean loss: words with tags, tokens of a language model, windows of questions, or rows."""
    if "words" in entry:
        return "words"
    if entry.get("perplexity") is not None:
        return "tokens"
    return "windows" if entry.get("questions") else "rows"


def all_figures(entry: Mapping[str, Any]) -> list[str]:
    """Write each figure of an evaluation on a line, with its rows where they differ from those of the loss.

    Counts that equal the number of rows are left out.
    """
    lines = []
    for name, value in entry.items():
        if isinstance(value, dict) or (name in _COUNTS and value == entry.get("rows")):
            continue
        counted = rows_of(entry, name)
        of = f" (on {counted})" if counted != rows_of(entry, "loss") else ""
        lines.append(f"{name}: {figure(value) if isinstance(value, float) or value is None else value}{of}")
    return lines


def figures_text(entry: Mapping[str, Any]) -> str:
    """Write the figures of an evaluation in groups of equal rows.

    Example: ``accuracy 0.6207, loss 0.6932 on 29 rows; macro f1 0.5200 on 20 of 29 rows``.
    """
    of_all = rows_of(entry, "loss")
    groups: dict[str, list[str]] = {of_all: []}
    for name in FIGURES:
        if entry.get(name) is not None or name == "loss":
            of = rows_of(entry, name)
            groups.setdefault(of, []).append(f"{name.replace('_', ' ')} {figure(entry.get(name))}")
    return "; ".join(
        f"{', '.join(figures)} on {of}{_cut(entry) if of == of_all else ''}" for of, figures in groups.items()
    )


def _cut(entry: Mapping[str, Any]) -> str:
    """Describe uncounted input: words beyond the longest text, tokens beyond the longest row."""
    if entry.get("cut_words"):
        return f" ({entry['cut_words']:,} more are cut, or have no token)"
    is_cut = "words" not in entry and entry.get("perplexity") is not None and entry.get("max_length")
    return f", rows cut at {entry['max_length']}" if is_cut else ""


def rise_text(job: Job, known: Evaluations, loss: float | None, *, is_last: bool) -> str:
    """Say that the evaluation loss rises, and how to keep the best result; empty where it does not rise.

    It rises if it is 5 % above the best one after two evaluations that were not better, or after one if that is the
    last. Empty also where ``train.patience_evals`` ends the run, or another figure than the loss is judged. ``known``
    includes this evaluation.

    Example: ``evaluation loss has risen since step 30 (0.6780 -> 1.826): ...``.
    """
    if isinstance(job.train.keep_best, str) or known.best is None or loss is None or loss <= known.best * _RISES_BY:
        return ""
    if known.waited < (1 if is_last else _EVALUATIONS_OF_A_RISE) or known.stops_run(job.train.patience_evals):
        return ""
    rise = f"evaluation loss has risen since step {known.best_step} ({known.best:.4g} -> {loss:.4g})"
    remedy = "is kept" if job.train.keep_best else "was better; train.keep_best = true keeps it"
    return f"{rise}: the result of step {known.best_step} {remedy}"


def stop_text(step: int, evaluations: Evaluations, *, keeps_best: bool = False) -> str:
    """Say that the run ends early, with the best evaluation and the number that were not better.

    Example: ``the run ends with step 40: the loss of 2 evaluations was not below 0.5000, that after step 20``.
    """
    where = f"that after step {evaluations.best_step}"
    best = "that of any" if evaluations.best is None else f"{evaluations.best:.4f}, {where}"
    count = "1 evaluation" if evaluations.waited == 1 else f"{evaluations.waited} evaluations"
    what, side = evaluations.by or "loss", "above" if evaluations.is_rising else "below"
    of = evaluations.best_step if keeps_best and evaluations.best is not None else step
    ended = f"the run ends with step {step}: the {what} of {count} was not {side} {best}"
    return f"{ended}; the result is that of step {of}"


_FAR_APART = 1.5


def training_facts(course: Course) -> dict[str, Any]:
    """Return steps, turns, classes, and the use of each owner's rows, as numbers and names."""
    uses = row_uses(course)
    rows = sum(use.rows for use in uses)
    used = sum(use.used_rows for use in uses)
    return {
        "steps": course.num_steps,
        "turns": course.turns,
        "steps_of_turn": course.local_iterations,
        "rounds": -(-course.turns_of_owners(course.turns_of(course.num_steps)) // len(course.owners)),
        "rows": rows,
        "used_rows": used,
        "used_share": round(used / rows, 6),
        "epochs": round(sum(use.trained_rows for use in uses) / rows, 6),
        "classes": list(course.labels),
        "owners": {use.owner: _owner(use) for use in uses},
        "left_out": [dropped.owner.node for dropped in course.absent],
        "missed_turns": course.missed,
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


def rows_facts(nodes: Sequence[NodeFacts], max_length: int) -> dict[str, Any]:
    """Count rows of the owners' files that are left out, by reason, and rows cut at ``max_length``.

    Where rows are packed, ``packed`` has their number and that of the sequences, and which share of their batches is
    no padding: of sequences of ``max_length`` tokens, and of rows that are not packed.
    """
    left_out = Counter[str]()
    cut = 0
    for node in nodes:
        left_out.update({each.why: each.rows for each in node.left_out})
        cut += node.cut_rows
    facts: dict[str, Any] = {"left_out": dict(sorted(left_out.items())), "cut": cut}
    packed = [(node.train_rows, node.packed) for node in nodes if node.packed is not None]
    if packed:
        sequences = sum(count for count, _ in packed)
        tokens = sum(each.tokens for _, each in packed)
        facts["packed"] = {
            "rows": sum(each.rows for _, each in packed),
            "sequences": sequences,
            "full": round(tokens / (sequences * max_length), 6),
            "full_unpacked": round(tokens / sum(each.rows * each.row_tokens for _, each in packed), 6),
        }
    return facts


def wait_text(nodes: Sequence[str], left: str, why: str) -> str:
    """Say for whom a run waits, how long, why, and what helps; no nodes = for any with room."""
    waited, remedy = f"node {', '.join(nodes)}", "start it again with its name and its data"
    if not nodes:
        waited, remedy = "a node with room", "start one"
    return f"waits for {waited}, {left}: {why}; {remedy}, or stop the run and --resume it later"


def rows_lines(nodes: Sequence[NodeFacts], max_length: int) -> list[str]:
    """Describe left out, cut and packed rows, a sentence for each reason."""
    facts = rows_facts(nodes, max_length)
    lines = [f"{rows:,} left out: {why}" for why, rows in facts["left_out"].items()]
    if facts["cut"]:
        lines.append(f"{facts['cut']:,} rows are longer than train.max_length = {max_length} tokens and are cut")
    if packed := facts.get("packed"):
        lines.append(
            f"{packed['rows']:,} rows in {packed['sequences']:,} sequences of {max_length} tokens, "
            f"{packed['full']:.0%} full (unpacked {packed['full_unpacked']:.0%})"
        )
    return lines


def training_notes(course: Course) -> list[str]:
    """Warn of rows that are left out or used unevenly, of small batches, and of classes with similar names."""
    if not course.num_steps:
        return []
    uses = row_uses(course)
    idle = [use.owner for use in uses if not use.steps]
    small = [use for use in uses if use.batch_rows < course.batch_size]
    notes = []
    if idle:
        remedy = "train longer, or lower train.local_iterations"
        steps = f"{course.num_steps} step{'s' * (course.num_steps > 1)}"
        notes.append(f"no turn in {steps}, so no row is used: {listed(idle, 5)}; {remedy}")
    elif any(use.used_rows < use.rows for use in uses):
        notes.append("not every row is used; train.epochs = 1 would use each about once")
    missed = course.missed
    lost = [(dropped.owner.node, dropped.turns - missed.pop(dropped.owner.node, 0)) for dropped in course.absent]
    notes += [f"{node} is lost, and its rows are left out after {turns} of its turns" for node, turns in lost]
    notes += [f"{node} was lost and came back, and has missed {_turns(count)}" for node, count in missed.items()]
    there = uses[: len(course.owners)]
    least, most = min(there, key=lambda use: use.epochs), max(there, key=lambda use: use.epochs)
    if course.turns == EQUAL and not idle and most.epochs > _FAR_APART * least.epochs:
        notes.append(
            f"rows of {most.owner} are used {most.epochs / least.epochs:.1f} times as often as those of {least.owner}, "
            "because every owner has as many steps; train.turns = 'rows' gives steps by rows"
        )
    if small:
        sizes = ", ".join(f"{use.owner} {use.rows}" for use in small)
        notes.append(f"fewer rows than a batch of {course.batch_size}, so smaller batches: {sizes}")
    notes += [note for technique in TECHNIQUES for note in technique.course_notes(course)]
    notes += look_alike_lines(course.labels)
    return notes
