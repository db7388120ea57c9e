"""Keep the ledger of a run: a line of metrics for each step, and the report's totals at the end.

Pure bookkeeping, without a clock. A step is known in two stages. When its owner reports it, its loss is shown as
progress. When every node has done its turn, its bytes are complete and its line of ``metrics.jsonl`` is written; the
bytes of finished turns are forgotten, so that memory does not grow with the run.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coordinator.records.evaluation_text import rise_text
from coordinator.records.figures import figures, mean
from coordinator.records.offload_facts import ParcelBytes, offload_facts
from coordinator.records.step_lines import LastStep, shown
from coordinator.records.training_facts import training_facts
from ringtune import __version__
from ringtune.engine.spans import Span
from ringtune.errors import IntegrityError
from ringtune.jobs.job import Job
from ringtune.jobs.parts.learning_rate import learning_rate
from ringtune.machine.cores import busy_text
from ringtune.rounds.events.move_events import LogMove
from ringtune.rpc.codecs.report_checks import total_of
from ringtune.schedule.actions import Op, Payload
from ringtune.schedule.operations.codes import FORWARD_ONLY, FULL, SHORTCUT, pattern_of
from ringtune.schedule.operations.table import Operations
from ringtune.schedule.plan import Plan
from ringtune.schedule.slice_policy import SlicePolicy
from ringtune.schedule.turns.early_stop import NONE_DONE, Evaluations
from ringtune.schedule.turns.turns import StepKind, Turn
from ringtune.schedule.turns.versions import ever_trained
from ringtune.schedule.units import units_text

REPORT_SCHEMA = 1
_CACHE_COUNTS = ("cache_reads", "cache_read_bytes")
_TABLES = ("classes", "confusion", "entity_types")
_CACHE_MOST = "cache_most_kept_bytes"


@dataclass(slots=True)
class NodeTotals:
    """The totals of one node over the whole run.

    Attributes:
        busy_s: seconds of compute actions.
        fit_s: of these, seconds in which it fitted adapters as a helper.
        cpu_s: processor seconds of its process.
        num_actions: compute actions.
        sent_bytes: payload bytes to each other node.
        received_bytes: payload bytes from the other nodes.
        hosted_bytes: weights that it materialised.
        peak_rss_bytes: highest resident memory that it reported.
        device: that it computed on: ``cpu``, or the name of an accelerator; empty = not told.
        peak_device_bytes: most memory of an accelerator that it had for tensors.
        device_bytes: all memory of that accelerator; 0 on a processor.
        peak_versions: most versions of its trained tensors that it stored at once, the newest included.
        peak_version_bytes: of those besides the newest.
        load: threads for each core of its machine that wanted to compute at the end; 0 = not known.
        cores: of its machine.
        cache: figures of hidden states that it read, summed over placements, and most bytes that it kept in one of
            them; none without a cache.
    """

    busy_s: float = 0.0
    fit_s: float = 0.0
    cpu_s: float = 0.0
    num_actions: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    hosted_bytes: int = 0
    peak_rss_bytes: int = 0
    device: str = ""
    peak_device_bytes: int = 0
    device_bytes: int = 0
    peak_versions: int = 0
    peak_version_bytes: int = 0
    load: float = 0.0
    cores: int = 1
    cache: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Step:
    """A step that is done, in a turn that is not."""

    line: dict[str, Any]
    ended_unix_s: float


@dataclass(slots=True)
class _LinkBytes:
    """Bytes of one item by link: all of them, those of gradients, and those of each kind of parcel."""

    all: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    gradients: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    parcels: ParcelBytes = field(default_factory=ParcelBytes)


class RunLedger:
    """The ledger of one run: steps, evaluations, bytes by link, and totals of each node.

    Args:
        plan: of the run.
        job: of the run.
        placement_number: of the placement with which it begins; None = it stays on one.

    Attributes:
        placement_number: of the placement that holds; None = the run stays on one.
    """

    def __init__(self, plan: Plan, job: Job, *, placement_number: int | None = None) -> None:
        self._plan = plan
        self.placement_number = placement_number
        self._moves: list[dict[str, Any]] = []
        self._job = job
        self._last_end_unix_s = 0.0
        self._steps: dict[int, _Step] = {}
        self._other_ends_unix_s: dict[int, float] = {}
        self._steps_s = 0.0
        self._decisions: list[dict[str, Any]] = []
        self._traffic: dict[int, _LinkBytes] = defaultdict(_LinkBytes)
        self._links: dict[str, int] = defaultdict(int)
        self._parcels = ParcelBytes()
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
        """Note when training begins, from which the first step is timed."""
        self._last_end_unix_s = started_unix_s

    # ---- what nodes report ------------------------------------------------------------------------

    def add_traffic(self, node: str, seq: int, target: str, payload: str, sent_bytes: int) -> None:
        """Count the bytes that ``node`` sent to ``target`` for one item."""
        link = f"{node}>{target}"
        self._links[link] += sent_bytes
        self.nodes[node].sent_bytes += sent_bytes
        if target in self.nodes:
            self.nodes[target].received_bytes += sent_bytes
        # a hand-over may be reported after its turn is closed; its bytes then show in the next line
        traffic = self._traffic[max(seq, self._next_seq)]
        traffic.all[link] += sent_bytes
        if payload == Payload.GRAD:
            traffic.gradients[link] += sent_bytes
        traffic.parcels.add(payload, link, sent_bytes)
        self._parcels.add(payload, link, sent_bytes)

    def add_spans(self, node: str, spans: Iterable[Span]) -> None:
        """Count the actions that ``node`` computed, and their seconds."""
        totals = self.nodes[node]
        for span in spans:
            if span.is_compute:
                totals.busy_s += (seconds := max(0.0, span.end_s - span.start_s))
                totals.fit_s += seconds if span.action.op is Op.FIT else 0.0
                totals.num_actions += 1

    def add_totals(self, node: str, totals: Mapping[str, Any]) -> None:
        """Note the totals that a node reports at the end of a placement, or of the run (``totals.json``).

        Raises:
            IntegrityError: a figure is missing or no number.
        """
        entry = self.nodes[node]
        try:
            entry.peak_rss_bytes = max(entry.peak_rss_bytes, int(total_of(totals, "peak_rss_bytes")))
            entry.device = str(totals.get("device", ""))
            if "device_bytes" in totals:
                entry.device_bytes = int(total_of(totals, "device_bytes"))
                entry.peak_device_bytes = max(entry.peak_device_bytes, int(total_of(totals, "peak_device_bytes")))
            entry.hosted_bytes = int(total_of(totals, "hosted_bytes"))
            entry.cpu_s = total_of(totals, "cpu_s")
            entry.peak_versions = max(entry.peak_versions, int(total_of(totals, "peak_versions")))
            entry.peak_version_bytes = max(entry.peak_version_bytes, int(total_of(totals, "peak_version_bytes")))
            if "load" in totals:
                entry.load, entry.cores = total_of(totals, "load"), max(1, int(total_of(totals, "cores")))
            if _CACHE_MOST in totals:
                counts = {name: entry.cache.get(name, 0) + int(total_of(totals, name)) for name in _CACHE_COUNTS}
                most = int(total_of(totals, _CACHE_MOST))
                entry.cache = {**counts, _CACHE_MOST: max(entry.cache.get(_CACHE_MOST, 0), most)}
        except (KeyError, TypeError, ValueError) as error:
            raise IntegrityError(f"the totals of node {node} are not readable: {error}; use one version") from error

    # ---- what the state machine logs --------------------------------------------------------------

    def step_done(
        self, turn: Turn, seq: int, step: int, depth: int, values: Mapping[str, float], ended_unix_s: float
    ) -> dict[str, Any]:
        """Note an item that is done; return what to show as progress at once."""
        line = self.line_of(turn, seq, step, depth, values)
        if turn.kind is StepKind.TRAIN:
            self._steps[seq] = _Step(line, ended_unix_s)
            self._steps_done += 1
            self._last.take(line)
        else:
            self._other_ends_unix_s[seq] = ended_unix_s
        return {"seq": seq, "num_steps": self._plan.course.num_steps, **line}

    def line_of(self, turn: Turn, seq: int, step: int, depth: int, values: Mapping[str, float]) -> dict[str, Any]:
        """Write what an item was; nothing is noted."""
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

    def unfrozen(self, step: int, depth: int) -> dict[str, Any]:
        """Note that the run has decided to train ``depth`` blocks from ``step`` on.

        The line of metrics.jsonl for it comes before the lines of the turn that begins at ``step``.

        Returns:
            What to show as progress at once.
        """
        entry = {"kind": "unfreeze", "step": step, "depth": depth}
        self._decisions.append(entry)
        return entry

    def operations_chosen(self, step: int, operations: Operations) -> dict[str, Any]:
        """Note that the run has chosen the operation table that holds from ``step`` on; its line is placed likewise.

        Returns:
            What to show as progress at once: the table's digest, and how many operations of each kind it has for
            blocks that train at some step.
        """
        blocks, subnets = ever_trained(self._plan.course).blocks, operations.subnets
        rows = [row for batch in operations.batches for row in batch.rows]
        codes = "".join(pattern_of(row, block, subnets) for row in rows for block in blocks)
        kinds = {"full": FULL, "forward_only": FORWARD_ONLY, "shortcut": SHORTCUT}
        counts = {name: codes.count(code) for name, code in kinds.items()}
        entry = {"kind": "operations", "step": step, "digest": operations.digest, **counts}
        self._decisions.append(entry)
        return entry

    def moved(self, command: LogMove, at_unix_s: float) -> dict[str, Any]:
        """Note that the run has moved, or why it stays; its line, without ``kind``, is an entry of the report."""
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

    def recovered(self, plan: Plan, placement_number: int, at_unix_s: float) -> None:
        """Go by a plan whose last placement has no lost node; the seconds until now are those of no step."""
        self._plan, self.placement_number, self._last_end_unix_s = plan, placement_number, at_unix_s

    def replanned(self, plan: Plan) -> None:
        """Go by a plan with one more placement; from now on entries say on which one the run is."""
        self._plan, self.placement_number = (
            plan,
            plan.placement.placement_number if self.placement_number is None else self.placement_number,
        )

    def turn_done(self, turn: Turn) -> list[dict[str, Any]]:
        """Close a turn that every node has done.

        Returns:
            The lines of metrics.jsonl for its steps, in order; before them those of decisions that it is the first of.
        """
        is_step = turn.kind is StepKind.TRAIN
        lines = [entry for entry in self._decisions if is_step and entry["step"] <= turn.first_step]
        self._decisions = self._decisions[len(lines) :]
        self._next_seq = turn.end_seq
        for seq in range(turn.first_seq, turn.end_seq):
            traffic = self._traffic.pop(seq, _LinkBytes())
            step = self._steps.pop(seq, None)
            if step is None:  # the time of an evaluation is none of the step after it
                ended_unix_s = self._other_ends_unix_s.pop(seq, self._last_end_unix_s)
                self._last_end_unix_s = max(self._last_end_unix_s, ended_unix_s)
                continue
            # what nodes know of this clock may be some milliseconds off; a step never takes less than nothing
            seconds = max(0.0, step.ended_unix_s - self._last_end_unix_s)
            self._last_end_unix_s = step.ended_unix_s
            self._steps_s += seconds
            self._note_loss(step.line["loss"])
            lines.append(
                {
                    **step.line,
                    "seconds": round(seconds, 6),
                    "bytes": dict(sorted(traffic.all.items())),
                    "gradient_bytes": dict(sorted(traffic.gradients.items())),
                    **traffic.parcels.to_json("bytes"),
                }
            )
        return lines

    def _note_loss(self, loss: float | None) -> None:
        if loss is None:
            return
        self._first_loss = loss if self._first_loss is None else self._first_loss
        self._losses = [*self._losses, loss][-self._plan.course.local_iterations :]

    def evaluation_done(self, step: int, values: Mapping[str, float], *, is_best: bool | None = None) -> dict[str, Any]:
        """Note an evaluation, whose sums are over all owners; and whether it is the best one, where that is kept.

        Returns:
            Its line of metrics.jsonl; without ``kind`` it is its entry in the report. Tables of classes are in that of
            the last step only; ``risen`` says that the loss rises.
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
        """Note that the run ends early; its line of metrics.jsonl, without ``kind``, stands in the report."""
        self._stop = {"step": step, **dataclasses.asdict(evaluations)}
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
        operations: Mapping[str, Any] | None = None,
        best: Evaluations | None = None,
        rows: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the content of report.json.

        Args:
            run_id: of the run.
            wall_s: from the start of the run to its last result.
            phases_s: seconds of each phase.
            predicted_bytes: what the planner expected each node to need.
            unfreeze_at: the steps at which one more block began to train.
            predicted_steps_s: what the planner expected all steps of the run to take; None = it did not say.
            operations: what they left to be done, and what they saved; None where everything was full.
            best: what is known of the evaluations of a run whose result is that of the best one; else None.
            rows: of the owners' files that were left out or cut.

        Returns:
            ``steps_s`` are the seconds of the steps alone, ``phases_s.training`` those with evaluations, checkpoints,
            moves and waits between them, and ``wall_s`` the whole run with joining, measuring, planning and
            collecting. ``eval`` has the figures of the result and its step; where an earlier part of the run had the
            best result, those of the last evaluation.
        """
        judged = self._best if best is not None and self._best.get("step") == best.best_step else self._final
        left_out = {"is_best", "risen", *(() if self._plan.course.num_steps else ("step",))}
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
            "operations": operations,
            **offload_facts(self._plan, steps=int(self._last.line.get("step", 0))),
            "wall_s": round(wall_s, 6),
            "phases_s": {phase: round(seconds, 6) for phase, seconds in phases_s.items()},
            "train": {
                "first_loss": self._first_loss,
                "last_loss": self._last.line.get("loss"),
                "mean_loss": sum(self._losses) / len(self._losses) if self._losses else None,
                "mean_steps": len(self._losses),
            },
            "eval": {key: value for key, value in judged.items() if key not in left_out},
            **({"best": {"step": best.best_step, "loss": best.best}} if best is not None else {}),
            **({"risen": self._final["risen"]} if self._final.get("risen") else {}),
            "evaluations": self._evaluations,
            **({"stopped": self._stop} if self._stop else {}),
            **({"moves": self._moves} if self.placement_number is not None else {}),
            **({"busy": busy} if (busy := self._busy()) else {}),
            "nodes": {node: self._node(node, predicted_bytes) for node in self._plan.nodes},
            "links": dict(sorted(self._links.items())),
            **self._parcels.to_json("links"),
        }

    def _busy(self) -> str:
        """Say which machines were busy at the end with more than all nodes of the run, if they shared one machine."""
        nodes = {node: self.nodes[node] for node in self._plan.nodes}
        own = len(nodes) / min(one.cores for one in nodes.values())
        return busy_text({node: one.load for node, one in nodes.items()}, "at the end", own=own)

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
            "cpu_s": round(totals.cpu_s, 6),
            "actions": totals.num_actions,
            "device": totals.device,
            **(
                {"peak_device_bytes": totals.peak_device_bytes, "device_bytes": totals.device_bytes}
                if totals.device_bytes
                else {}
            ),
            "peak_rss_bytes": totals.peak_rss_bytes,
            "hosted_bytes": totals.hosted_bytes,
            "peak_versions": totals.peak_versions,
            "peak_version_bytes": totals.peak_version_bytes,
            "load": round(totals.load, 3),
            **totals.cache,
            "predicted_bytes": predicted_bytes.get(node, 0),
            "sent_bytes": totals.sent_bytes,
            "received_bytes": totals.received_bytes,
        }
