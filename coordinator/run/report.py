"""Ledgers of a run: a line of metrics for each step, the totals of the report, and the savings of operations.

Pure, without a clock. When an owner reports a step, its loss is shown as progress. When every node has done the turn,
its bytes are complete and its line of ``metrics.jsonl`` is written; the bytes of finished turns are dropped, so memory
does not grow with the run.

Operations save in train steps only; the cost of scores is counted apart. The cost of steps with everything full is
computed: seconds from the recorded times of the run, bytes from the mean lengths of the owners' rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from coordinator.run.run_text import LastStep, rise_text, shown, training_facts
from ringtune import __version__
from ringtune.config.sections import learning_rate
from ringtune.costs.action_costs import CourseCosts, NodeWork, all_full, done_of, total
from ringtune.costs.profile import Profile
from ringtune.engine.events import Span
from ringtune.errors import IntegrityError, PlanError
from ringtune.job.job import Job
from ringtune.machine.resources import busy_text
from ringtune.run_control.evaluation import class_figures, entity_figures, number_figures, table_of
from ringtune.run_control.events import LogMove, LogStep, ShowStep
from ringtune.run_control.turns import Judge
from ringtune.schedule.actions import Op, Payload
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import NONE_DONE, Evaluations, Item, StepKind, Turn, items
from ringtune.schedule.units import units_text
from ringtune.techniques import TECHNIQUES
from ringtune.techniques.activation_checkpointing import SlicePolicy
from ringtune.techniques.generation import generation_figures
from ringtune.texts import MAX_NAME, printable
from ringtune.transport.codecs import total_of

_LARGEST_EXPONENT = 700.0


def mean(values: Mapping[str, float], name: str) -> float | None:
    """``values[name] / values["count"]``; None if the count is 0 or the quotient not finite, as JSON has no NaN.

    Example: loss_sum 6 and count 4 are 1.5.
    """
    count = values.get("count", 0.0)
    quotient = values.get(name, 0.0) / count if count else math.nan
    return quotient if math.isfinite(quotient) else None


def figures(values: Mapping[str, float], labels: Sequence[str] = (), max_length: int = 0) -> dict[str, Any]:
    """Compute loss and accuracy from an evaluation's sums, and the further figures of its task.

    ``mse`` and ``mae`` of numbers with those of ``number_figures``; ``perplexity`` of a language model over all its
    ``tokens``, with ``max_length`` (0 = unknown) at which rows were cut; ``f1`` and ``exact_match`` over the
    ``questions``, as shares; of tags the number of ``words`` and of ``cut_words`` that are in no batch; and where
    classes or entities were counted those of ``class_figures`` and ``entity_figures``.
    """
    named: dict[str, Any] = {
        "loss": mean(values, "loss_sum"),
        "accuracy": mean(values, "correct") if "correct" in values else None,
    }
    if "tokens" in values:
        loss = named["loss"]
        named["perplexity"] = math.exp(loss) if loss is not None and loss < _LARGEST_EXPONENT else None
        named |= {"max_length": max_length} if max_length else {}
    if table := table_of(values, len(labels)):
        named |= class_figures(table, labels)
    if "absolute_sum" in values:
        named |= {"mse": named["loss"], "mae": mean(values, "absolute_sum"), **number_figures(values)}
    if "words" in values:
        counted = {name: int(values[name]) for name in ("words", "cut_words") if name in values}
        named |= {**counted, **entity_figures(values, labels)}
    if "questions" in values:
        judged = {**values, "count": values["questions"]}
        named |= {"f1": mean(judged, "f1_sum"), "exact_match": mean(judged, "exact_sum")}
        named["questions"] = int(values["questions"])
    return named | generation_figures(values)


def judge_of(keep_best: bool | str) -> Judge | None:
    """Return what compares evaluations by the figure that ``train.keep_best`` names; None for the loss."""
    if isinstance(keep_best, bool):
        return None

    def value(values: Mapping[str, float], labels: Sequence[str]) -> float:
        value_of = figures(values, labels).get(keep_best)
        return math.nan if value_of is None else float(value_of)

    return Judge(keep_best, value)


REPORT_SCHEMA = 1
_TABLES = ("classes", "confusion", "entity_types")


def _newest(_: float, value: float) -> float:
    return value


_SURE: Final[Mapping[str, Callable[[float, float], float]]] = {
    "peak_rss_bytes": max,
    "hosted_bytes": _newest,
    "cpu_s": _newest,
    "peak_versions": max,
    "peak_version_bytes": max,
}
_TOGETHER: Final[tuple[Mapping[str, Callable[[float, float], float]], ...]] = (
    _SURE,
    {"peak_device_bytes": max, "device_bytes": _newest},
    {"links_reopened": _newest},
    {"load": _newest, "cores": _newest},
)
"""Figures that a node reports together, each with the function that combines two placements; ``_SURE`` always."""


@dataclass(slots=True)
class NodeTotals:
    """Totals of one node over the whole run.

    Attributes:
        fit_s: part of ``busy_s`` in which it fitted adapters as a helper.
        device: ``cpu``, or the name of an accelerator; empty = unknown.
        figures: what it reported last: processor seconds, weights that it materialised, peaks of memory (of an
            accelerator with the whole memory of that), most versions of its trained tensors at once and the bytes of
            those besides the newest, threads per core that wanted to compute (0 = unknown), how often links to other
            nodes broke and were opened again, and figures of techniques, see ``Technique.totals``.
    """

    busy_s: float = 0.0
    fit_s: float = 0.0
    num_actions: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    device: str = ""
    figures: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*_SURE, "load"), 0))


_NAMES: Final[Mapping[str, str]] = {
    Payload.UNIT_GRAD: "unit_gradient",
    Payload.PAIRS: "pair",
    Payload.WEIGHTS: "helper_weight",
}


Sent = Counter[tuple[str, str]]
"""Sent bytes by payload and link."""


def _by_link(sent: Sent, *payloads: str) -> dict[str, int]:
    """Add up sent bytes by link, in the order of names; of these payloads alone, if any are given."""
    by_link = Counter[str]()
    for (payload, link), sent_bytes in sent.items():
        if not payloads or payload in payloads:
            by_link[link] += sent_bytes
    return dict(sorted(by_link.items()))


def _parcels(sent: Sent, what: str) -> dict[str, dict[str, int]]:
    """Return each kind of parcels with bytes under its name, such as ``pair_links`` for ``what`` = ``links``."""
    return {f"{name}_{what}": by_link for kind, name in _NAMES.items() if (by_link := _by_link(sent, kind))}


class RunLedger:
    """Steps, evaluations, bytes by link, and totals of each node of one run.

    Args:
        placement_number: of the first placement; None = the run does not move.

    Attributes:
        placement_number: of the present placement; None = the run does not move.
    """

    def __init__(self, plan: Plan, job: Job, *, placement_number: int | None = None) -> None:
        self._plan = plan
        self.placement_number = placement_number
        self._moves: list[dict[str, Any]] = []
        self._node_errors: list[dict[str, Any]] = []
        self._job = job
        self._last_end_unix_s = 0.0
        self._lines: dict[int, dict[str, Any]] = {}  # of finished steps of open turns
        self._ends_unix_s: dict[int, float] = {}  # of finished items of open turns
        self._steps_s = 0.0
        self._decisions: list[dict[str, Any]] = []
        self._sent, self._sent_of = Sent(), defaultdict[int, Sent](Sent)  # of the run, and of items of open turns
        self._evaluations: list[dict[str, Any]] = []
        self._known = NONE_DONE
        self._final: dict[str, Any] = {"rows": 0, "count": 0, "loss": None, "accuracy": None}
        self._best: dict[str, Any] = {}
        self._stop: dict[str, Any] = {}
        self._losses: list[float] = []
        self._first_loss: float | None = None
        self._last = LastStep()
        self._steps_done = 0
        self._next_seq = 0
        self.nodes = {node: NodeTotals() for node in plan.nodes}

    def begin(self, started_unix_s: float) -> None:
        """Note the start of training, from which the first step is timed."""
        self._last_end_unix_s = started_unix_s

    # ---- what nodes report ------------------------------------------------------------------------

    def add_traffic(self, node: str, seq: int, target: str, payload: str, sent_bytes: int) -> None:
        """Count the bytes that ``node`` sent to ``target`` for one item."""
        link = f"{node}>{target}"
        self._sent[payload, link] += sent_bytes
        self.nodes[node].sent_bytes += sent_bytes
        if target in self.nodes:
            self.nodes[target].received_bytes += sent_bytes
        # a hand-over may be reported after its turn is closed; its bytes then show in the next line
        self._sent_of[max(seq, self._next_seq)][payload, link] += sent_bytes

    def add_spans(self, node: str, spans: Iterable[Span]) -> None:
        """Count compute actions of a node, and their seconds."""
        totals = self.nodes[node]
        for span in spans:
            if span.is_compute:
                totals.busy_s += (seconds := max(0.0, span.end_s - span.start_s))
                totals.fit_s += seconds if span.action.op is Op.FIT else 0.0
                totals.num_actions += 1

    def add_totals(self, node: str, totals: Mapping[str, Any]) -> None:
        """Take a node's totals at the end of a placement, or of the run (``totals.json``).

        Raises ``IntegrityError``: a figure is missing or no number.
        """
        entry = self.nodes[node]
        try:
            entry.device = printable(str(totals.get("device", "")), most=MAX_NAME)
            for together in (*_TOGETHER, *(technique.totals for technique in TECHNIQUES)):
                if together is _SURE or together.keys() & totals.keys():
                    for name, joined in together.items():
                        entry.figures[name] = joined(entry.figures.get(name, 0), round(total_of(totals, name), 6))
        except (KeyError, TypeError, ValueError) as error:
            raise IntegrityError(f"the totals of node {node} are not readable: {error}; use one version") from error

    # ---- what the state machine logs --------------------------------------------------------------

    def step_done(self, done: LogStep, ended_unix_s: float) -> None:
        """Note a finished item."""
        self._ends_unix_s[done.seq] = ended_unix_s
        if done.turn.kind is StepKind.TRAIN:
            self._lines[done.seq] = line = self._line_of(done)
            self._steps_done += 1
            self._last.take(line)

    def progress_of(self, done: LogStep | ShowStep) -> dict[str, Any]:
        """Make the progress event of a finished item."""
        return {"seq": done.seq, "num_steps": self._plan.course.num_steps, **self._line_of(done)}

    def _line_of(self, done: LogStep | ShowStep) -> dict[str, Any]:
        turn, seq, step, depth, _ = done
        values = dict(done.values)
        is_step, course = turn.kind is StepKind.TRAIN, self._plan.course
        line: dict[str, Any] = {
            "kind": turn.kind.value,
            "step": shown(step) if is_step else step,
            "round": shown(turn.round),
            "initiator": turn.owner,
            "depth": depth,
            "loss": mean(values, "loss_sum"),
            "count": int(values.get("count", 0.0)),
            **({"placement_number": self.placement_number} if self.placement_number is not None else {}),
        }
        if "correct" in values:
            line["accuracy"] = mean(values, "correct")
        if not is_step:
            return line | {"batch": shown(seq - turn.first_seq), "batches": turn.num_items}
        if course.method.full_parameters:
            line["trains"] = units_text(course.method.trained(course, step))
        return line | {"lr": learning_rate(self._job.train, *course.method.rate_at(course, step))}

    def decided(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Note a decision, with its ``kind`` and the ``step`` from which it holds; return it as progress event.

        Its line of metrics.jsonl precedes the lines of the turn that begins at that step.
        """
        self._decisions.append(entry)
        return entry

    def moved(self, command: LogMove, at_unix_s: float) -> dict[str, Any]:
        """Note a move, or why it failed; return its line, which without ``kind`` is an entry of the report."""
        self.placement_number, self._last_end_unix_s = command.part.placement.placement_number, at_unix_s
        entry: dict[str, Any] = {
            "step": command.step,
            "to": command.placement_number,
            "placement_number": self.placement_number,
        }
        entry |= {"seconds": round(command.seconds, 6), "fetched_bytes": dict(command.fetched_bytes)}
        if command.problem:
            entry["problem"] = command.problem
        self._moves.append(entry)
        return {"kind": "move", **entry}

    def node_failed(self, node: str, error: str, message: str) -> dict[str, Any]:
        """Note the error of a node without which the run continues; return its entry of the report."""
        self._node_errors.append(entry := {"step": self._steps_done, "node": node, "error": error, "message": message})
        return entry

    def recovered(self, plan: Plan, placement_number: int, at_unix_s: float) -> None:
        """Take the plan after a recovery; the time until ``at_unix_s`` belongs to no step."""
        self._known = self._known.without(self._plan.course, plan.course)
        self._plan, self.placement_number, self._last_end_unix_s = plan, placement_number, at_unix_s

    def replanned(self, plan: Plan) -> None:
        """Take a plan with one more placement; from now on entries have the placement number."""
        self._plan = plan
        if self.placement_number is None:
            self.placement_number = plan.placement.placement_number

    def turn_done(self, turn: Turn) -> list[dict[str, Any]]:
        """Close a turn that every node has done; return its lines of metrics.jsonl, in order.

        The lines of decisions that it is the first to follow precede those of its steps.
        """
        is_step = turn.kind is StepKind.TRAIN
        lines = [entry for entry in self._decisions if is_step and entry["step"] <= turn.first_step]
        self._decisions = self._decisions[len(lines) :]
        self._next_seq = turn.end_seq
        for seq in range(turn.first_seq, turn.end_seq):
            sent, line = self._sent_of.pop(seq, Sent()), self._lines.pop(seq, None)
            ended_unix_s = self._ends_unix_s.pop(seq, self._last_end_unix_s)
            if line is None:  # the time of an evaluation is none of the step after it
                self._last_end_unix_s = max(self._last_end_unix_s, ended_unix_s)
                continue
            # what nodes know of this clock may be some milliseconds off; a step never takes less than nothing
            seconds = max(0.0, ended_unix_s - self._last_end_unix_s)
            self._last_end_unix_s = ended_unix_s
            self._steps_s += seconds
            if (loss := line["loss"]) is not None:
                self._first_loss = loss if self._first_loss is None else self._first_loss
                self._losses = [*self._losses, loss][-self._plan.course.local_iterations :]
            lines.append(
                {
                    **line,
                    "seconds": round(seconds, 6),
                    "bytes": _by_link(sent),
                    "gradient_bytes": _by_link(sent, Payload.GRAD),
                    **_parcels(sent, "bytes"),
                }
            )
        return lines

    def evaluation_done(self, step: int, values: Mapping[str, float], *, is_best: bool | None = None) -> dict[str, Any]:
        """Note an evaluation with sums over all owners; return its line.

        Without ``kind`` the line is an entry of the report. ``is_best`` is None where no best result is kept. Tables of
        classes are in the line of the last step only; ``risen`` is a text if the loss rises.
        """
        rows = sum(owner.eval_rows for owner in self._plan.course.owners)
        entry: dict[str, Any] = {"step": step, "rows": rows, "count": int(values.get("count", 0.0))}
        entry |= figures(values, self._plan.course.labels, self._plan.course.max_length)
        entry |= {} if is_best is None else {"is_best": is_best}
        is_last = step >= self._plan.course.num_steps
        loss = entry["loss"]
        self._known = self._known.after(step, math.nan if loss is None else loss)
        if risen := rise_text(self._job, self._known, loss, is_last=is_last):
            entry["risen"] = risen
        self._final, self._best = entry, entry if is_best else self._best
        short = {name: value for name, value in entry.items() if is_last or name not in _TABLES}
        self._evaluations.append(short)
        return {"kind": "evaluation", **short}

    def stopped(self, step: int, evaluations: Evaluations) -> dict[str, Any]:
        """Note an early end; return its line, which without ``kind`` is in the report."""
        told = {name: value for name, value in dataclasses.asdict(evaluations).items() if name != "head_at"}
        self._stop = {"step": step, **{name: value for name, value in told.items() if name != "by" or value}}
        return {"kind": "stop", **self._stop}

    # ---- the end ----------------------------------------------------------------------------------

    def report(
        self,
        *,
        run_id: str,
        wall_s: float,
        phases_s: Mapping[str, float],
        predicted_bytes: Mapping[str, int],
        unfreeze_at: Sequence[int] = (),
        predicted_steps_s: float | None = None,
        best: Evaluations | None = None,
        rows: Mapping[str, Any] | None = None,
        measured: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the content of report.json.

        ``steps_s`` are the seconds of the steps alone, ``phases_s.training`` those with evaluations, checkpoints, moves
        and waits between them, and ``wall_s`` the whole run with joining, measuring, planning and collecting. ``eval``
        has the figures of the result and its step; where the best result is of an earlier part of the run, those of the
        last evaluation. ``best`` is None where no best result is kept, ``rows`` are those of ``rows_facts``, and
        ``measured`` is what the driver counted for techniques, by key.
        """
        judged = self._best if best is not None and self._best.get("step") == best.best_step else self._final
        left_out = {"is_best", "risen", *(() if self._plan.course.num_steps else ("step",))}
        last_step = int(self._last.line.get("step", 0))
        return {
            "schema": REPORT_SCHEMA,
            "run_id": run_id,
            "version": __version__,
            "method": self._plan.course.method.name,
            "plan_digest": self._plan.digest,
            "steps": self._steps_done,
            "unfreeze_at": list(unfreeze_at),
            "training": training_facts(self._plan.course) if self._plan.course.num_steps else None,
            "steps_s": round(self._steps_s, 6),
            "rows": dict(rows or {}),
            "predicted_steps_s": predicted_steps_s,
            **(measured or {}),
            **{key: item for each in TECHNIQUES for key, item in each.report(self._plan, last_step).items()},
            "wall_s": round(wall_s, 6),
            "phases_s": {phase: round(seconds, 6) for phase, seconds in phases_s.items()},
            "train": {
                "first_loss": self._first_loss,
                "last_loss": self._last.line.get("loss"),
                "mean_loss": mean({"loss_sum": sum(self._losses), "count": len(self._losses)}, "loss_sum"),
                "mean_steps": len(self._losses),
            },
            "eval": {key: value for key, value in judged.items() if key not in left_out},
            **({"best": {"step": best.best_step, best.by or "loss": best.best}} if best is not None else {}),
            **({"risen": self._final["risen"]} if self._final.get("risen") else {}),
            "evaluations": self._evaluations,
            **({"stopped": self._stop} if self._stop else {}),
            **({"moves": self._moves} if self.placement_number is not None else {}),
            **({"node_errors": self._node_errors} if self._node_errors else {}),
            **({"busy": busy} if (busy := self._busy()) else {}),
            "nodes": {node: self._node(node, predicted_bytes) for node in self._plan.nodes},
            "links": _by_link(self._sent),
            **_parcels(self._sent, "links"),
        }

    def _busy(self) -> str:
        """Say which machines were busy at the end beyond the load of the run's own nodes."""
        nodes = {node: self.nodes[node] for node in self._plan.nodes}
        load = len(nodes) / min(max(1, totals.figures.get("cores", 1)) for totals in nodes.values())
        return busy_text({node: totals.figures["load"] for node, totals in nodes.items()}, "at the end", own=load)

    def _node(self, node: str, predicted_bytes: Mapping[str, int]) -> dict[str, Any]:
        part = self._plan.at(
            self._plan.placement.placement_number if self.placement_number is None else self.placement_number
        )
        totals, piece = self.nodes[node], part.slice_of(node)
        return {
            "blocks": [piece.start, piece.stop],
            "activations": SlicePolicy.of(part, piece.start, piece.stop).to_json(),
            "busy_s": round(totals.busy_s, 6),
            **({"fit_s": round(totals.fit_s, 6)} if self._plan.placement.helped_by(node) else {}),
            "actions": totals.num_actions,
            "device": totals.device,
            **{name: value for name, value in totals.figures.items() if name != "cores"},
            "predicted_bytes": predicted_bytes.get(node, 0),
            "sent_bytes": totals.sent_bytes,
            "received_bytes": totals.received_bytes,
        }


_BLOCK_OPS = (Op.FORWARD, Op.FORWARD_FREE, Op.BACKWARD)
_BETWEEN_BLOCKS = (Payload.HIDDEN, Payload.GRAD)


class OperationsLedger:
    """Work done and saved by operations in one run; empty where everything is full.

    Args:
        profile: with which the run was planned, for the predicted shares.
    """

    def __init__(self, plan: Plan, profile: Profile) -> None:
        self._plan = plan
        self._is_kept = plan.course.may_skip
        self._costs = _costs(plan, profile) if self._is_kept else None
        self._busy_s: dict[int, float] = defaultdict(float)
        self._bytes: dict[int, int] = defaultdict(int)
        self._done = {node: NodeWork() for node in plan.nodes}
        self._steps: dict[tuple[Plan, str, int], int] = defaultdict(int)
        self._items: dict[tuple[Plan, str, int], Item] = {}
        self._busy_of: dict[StepKind, float] = defaultdict(float)
        self._sent_of, self._num_items = Counter[StepKind](), Counter[StepKind]()

    def joined(self, node: str) -> None:
        """Count the work of one more node."""
        self._done.setdefault(node, NodeWork())

    # ---- what nodes report ------------------------------------------------------------------------

    def add_spans(self, spans: Iterable[Span]) -> None:
        """Count seconds of forwards and backwards of blocks."""
        if self._is_kept:
            for span in spans:
                if span.action.op in _BLOCK_OPS:
                    self._busy_s[span.action.seq] += max(0.0, span.end_s - span.start_s)

    def add_traffic(self, seq: int, payload: str, sent_bytes: int) -> None:
        """Count bytes of hidden states and gradients."""
        if self._is_kept and payload in _BETWEEN_BLOCKS:
            self._bytes[seq] += sent_bytes

    def turn_done(self, turn: Turn) -> None:
        """Close a turn that every node has done; only train and score turns count."""
        if not self._is_kept:
            return
        plan = turn.settled(self._plan)
        for seq in range(turn.first_seq, turn.end_seq):
            self._busy_of[turn.kind] += self._busy_s.pop(seq, 0.0)
            self._sent_of[turn.kind] += self._bytes.pop(seq, 0)
        self._num_items[turn.kind] += turn.num_items
        if turn.kind is StepKind.TRAIN:
            for item in items(plan.course, turn):
                _add_done(self._done, done_of(plan, item, self._costs), 1)
                alike = (all_full(plan.plain), item.owner, plan.course.method.trained(plan.course, item.step).lowest)
                self._steps[alike] += 1
                self._items[alike] = item

    # ---- the end ----------------------------------------------------------------------------------

    def report(self, recorded: Profile) -> dict[str, Any] | None:
        """Return the done and saved work; None where everything was full, or nothing was trained.

        ``recorded`` has the times that the run recorded, for the measured shares.
        """
        if not self._steps:
            return None
        done = self._done
        full, full_recorded = (self._all_full(costs) for costs in (self._costs, _costs(self._plan, recorded)))
        all_done, everything, measured = total(done.values()), total(full.values()), total(full_recorded.values())
        busy_s, sent, score = self._busy_of[StepKind.TRAIN], self._sent_of[StepKind.TRAIN], StepKind.SCORE
        has_full_work = all(done[node].full > 0 for node, each in full.items() if each.full > 0)
        all_full_s = measured.work_s if has_full_work else None  # else the seconds of a node are not known
        return {
            "steps": sum(self._steps.values()),
            "nodes": {node: each.shares() for node, each in done.items()},
            "compute": {
                "busy_s": busy_s,
                "all_full_s": all_full_s,
                "measured": _share(busy_s, all_full_s or 0.0),
                "predicted": _share(all_done.work_s, everything.work_s),
                "paper": _share(all_done.paper_compute, everything.paper_compute),
            },
            "bytes": {
                "sent_bytes": sent,
                "all_full_bytes": measured.sent_bytes,
                "measured": _share(sent, measured.sent_bytes),
                "predicted": _share(all_done.sent_bytes, everything.sent_bytes),
                "paper": _share(all_done.paper_sent, everything.paper_sent),
            },
            "scores": {
                "batches": self._num_items[score],
                "busy_s": self._busy_of[score],
                "sent_bytes": self._sent_of[score],
            },
        }

    def _all_full(self, costs: CourseCosts | None) -> dict[str, NodeWork]:
        """Work of each node with everything full; items of an owner are alike at each depth."""
        sums = {node: NodeWork() for node in self._plan.nodes}
        for alike, times in self._steps.items():
            _add_done(sums, done_of(alike[0], self._items[alike], costs), times)
        return sums


def _add_done(sums: dict[str, NodeWork], more: Mapping[str, NodeWork], times: float) -> None:
    for node, each in more.items():
        sums[node] += each.times(times)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _costs(plan: Plan, profile: Profile) -> CourseCosts | None:
    try:
        return CourseCosts.of(plan, profile)
    except PlanError:  # an old plan on nodes that nobody measured
        return None
