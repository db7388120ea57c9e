r"""The coordinator's state machine of one run: who is asked what, and when. No clock, no socket.

A run goes through the phases ::

    inspecting -> planning -> preparing -> training -> collecting -> done
         \____________ any error: every node is released ___________/ failed

In training the coordinator *grants* turns. It grants ahead, so that frozen blocks can work for the next
initiator already, but only so far that any later decision can still take effect at a turn boundary.

Source: RingAda, Algorithm 1 and section III-B (initialisation, training round).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ringtune.engine.events import CancelTimer, SetTimer, TimerFired
from ringtune.errors import DeadlineError, PlanError, RingTuneError
from ringtune.rounds.evaluation_sums import EvaluationSums
from ringtune.rounds.granting import Granting
from ringtune.rounds.round_events import (
    ChooseOperations,
    Collect,
    Collected,
    Command,
    DrainAsked,
    EnterPhase,
    Event,
    Finish,
    Grant,
    Inspect,
    Inspected,
    LogCheckpoint,
    LogEvaluation,
    LogOperations,
    LogStep,
    LogTurn,
    LogUnfreeze,
    MakePlan,
    NodeFailed,
    OperationsChosen,
    OperationsFailed,
    PlanFailed,
    PlanMade,
    Prepare,
    Prepared,
    Progressed,
    Release,
    Started,
    StepReported,
    StopAsked,
    TurnReported,
)
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import ITEMS_AHEAD, StartPoint, StepKind
from ringtune.schedule.versions import unfreezing_steps

__all__ = [
    "ChooseOperations",
    "Collect",
    "Collected",
    "Command",
    "DrainAsked",
    "EnterPhase",
    "Event",
    "Finish",
    "Grant",
    "Inspect",
    "Inspected",
    "LogCheckpoint",
    "LogEvaluation",
    "LogOperations",
    "LogStep",
    "LogTurn",
    "LogUnfreeze",
    "MakePlan",
    "NodeFailed",
    "OperationsChosen",
    "OperationsFailed",
    "PlanFailed",
    "PlanMade",
    "Planner",
    "Prepare",
    "Prepared",
    "Progressed",
    "Release",
    "Rounds",
    "Started",
    "StepReported",
    "StopAsked",
    "TurnReported",
]

Planner = Callable[[Mapping[str, Any]], Plan | tuple[Plan, StartPoint]]
_PHASE_TIMER = "phase"
_TRAINING_PATIENCE = 1.5


class Rounds:
    """The coordinator's state machine of one run.

    Args:
        planner: facts by node name -> plan, or the plan of an earlier run with where it goes on; may raise any
            ``RingTuneError``. None = the driver plans: it is told to with ``MakePlan`` and answers in its time.
        plan_only: stop after planning.
        plan_s: longest time that the driver may plan beyond ``wait_s``, in seconds.
        wait_s: longest time without progress in each phase, in seconds; in training one half more, so that
            the node that misses a message speaks first.
        start: where the run goes on; by default the plan's very beginning.
        items_ahead: grant turns until at least so many items are granted beyond the finished ones; at
            least one whole turn ahead.
    """

    def __init__(
        self,
        planner: Planner | None,
        *,
        plan_only: bool = False,
        plan_s: float = 0.0,
        wait_s: float = 300.0,
        items_ahead: int = ITEMS_AHEAD,
        start: StartPoint | None = None,
    ) -> None:
        self.phase = "new"
        self.plan: Plan | None = None
        self._planner = planner
        self._plan_only = plan_only
        self._wait_s = wait_s
        self._plan_s = plan_s
        self._items_ahead = items_ahead
        self._start_point = start
        self._drain_reason = ""
        self._nodes: tuple[str, ...] = ()
        self._facts: dict[str, Any] = {}
        self._waiting: set[str] = set()
        self._granting: Granting | None = None
        self._evaluation = EvaluationSums()

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Take one event at time ``now_s`` (monotonic seconds), answer with commands in order."""
        if self.phase in ("done", "failed"):
            return []
        commands: list[Command] = []
        try:
            self._dispatch(event, now_s, commands)
        except RingTuneError as error:
            self._fail(type(error).__name__, str(error), commands)
        return commands

    def _dispatch(self, event: Event, now_s: float, commands: list[Command]) -> None:
        match event:
            case Started(nodes):
                self._nodes = nodes
                self._enter("inspecting", now_s, commands)
                commands += [Inspect(node) for node in nodes]
            case Inspected(node, facts):
                self._facts[node] = facts
                self._answered(node, "inspecting", now_s, commands)
            case PlanMade(plan, start):
                self._on_plan(plan, start, now_s, commands)
            case PlanFailed(error, message):
                self._fail(error, message, commands)
            case Prepared(node):
                self._answered(node, "preparing", now_s, commands)
            case Progressed(node):
                if self.phase in ("preparing", "collecting") and node in self._waiting:
                    self._set_deadline(now_s, commands)
            case Collected(node):
                self._answered(node, "collecting", now_s, commands)
            case StepReported():
                self._on_step(event, now_s, commands)
            case TurnReported():
                self._on_turn_done(event, now_s, commands)
            case OperationsChosen():
                self._on_operations(event, now_s, commands)
            case OperationsFailed(step, error, message):
                if self._chooses_for == step:
                    self._fail(error, message, commands)
            case NodeFailed(_, error, message):
                self._fail(error, message, commands)
            case DrainAsked(reason):
                self._drain(reason, now_s, commands)
            case StopAsked(reason):
                self._fail("InterruptedRunError", reason, commands)
            case TimerFired():
                raise DeadlineError(self._overdue())

    # ---- phases -----------------------------------------------------------------------------------

    def _enter(self, phase: str, now_s: float, commands: list[Command]) -> None:
        self.phase = phase
        self._waiting = set(self._nodes)
        commands.append(EnterPhase(phase))
        self._set_deadline(now_s, commands)

    def _set_deadline(self, now_s: float, commands: list[Command]) -> None:
        factor = _TRAINING_PATIENCE if self.phase == "training" else 1.0
        more_s = self._plan_s if self.phase == "planning" or self._chooses_for is not None else 0.0
        commands.append(SetTimer(_PHASE_TIMER, now_s + factor * self._wait_s + more_s))

    def _answered(self, node: str, phase: str, now_s: float, commands: list[Command]) -> None:
        if self.phase != phase:
            return
        self._waiting.discard(node)
        if self._waiting:
            return
        if phase == "inspecting":
            self._make_plan(now_s, commands)
        elif phase == "preparing":
            self._enter("training", now_s, commands)
            self._granting = Granting(
                self._made_plan, self._nodes, items_ahead=self._items_ahead, start=self._start_point
            )
            self._grant_ahead(now_s, commands)
            self._end_training(now_s, commands)
        else:
            commands += [Release(name, "the run is done", is_finished=True) for name in self._nodes]
            self.phase = "done"
            commands += [CancelTimer(_PHASE_TIMER), EnterPhase("done"), Finish("", "")]

    def _make_plan(self, now_s: float, commands: list[Command]) -> None:
        self.phase = "planning"
        commands.append(EnterPhase("planning"))
        facts = dict(sorted(self._facts.items()))
        if self._planner is None:
            self._set_deadline(now_s, commands)
            commands.append(MakePlan(facts))
            return
        made = self._planner(facts)
        plan, start = made if isinstance(made, tuple) else (made, None)
        self._on_plan(plan, start, now_s, commands)

    def _on_plan(self, plan: Plan, start: StartPoint | None, now_s: float, commands: list[Command]) -> None:
        if self.phase != "planning":
            return
        self.plan, self._start_point = plan, start or self._start_point
        if self._plan_only:
            self._release(commands, "only a plan was asked for")
            self.phase = "done"
            commands += [CancelTimer(_PHASE_TIMER), EnterPhase("done"), Finish("", "")]
            return
        left_out = [node for node in self._nodes if node not in self.plan.nodes]
        commands += [Release(node, "the plan does not need this node") for node in left_out]
        self._nodes = self.plan.nodes
        self._enter("preparing", now_s, commands)
        commands += [Prepare(node, self.plan) for node in self._nodes]

    @property
    def _made_plan(self) -> Plan:
        if self.plan is None:
            raise PlanError(f"phase {self.phase} needs a plan and there is none")
        return self.plan

    @property
    def _made_granting(self) -> Granting:
        if self._granting is None:
            raise PlanError(f"phase {self.phase} does not train yet")
        return self._granting

    @property
    def _chooses_for(self) -> int | None:
        """The step for which an operation table is being chosen; None if none is."""
        return self._granting.chooses_for if self._granting is not None else None

    @property
    def unfreeze_at(self) -> tuple[int, ...]:
        """The steps at which one more block began to train, up to the last turn that was granted."""
        plan, last = self._made_plan, self._granting.last if self._granting else None
        decided = last.unfreeze_at if last else self._start_point.unfreezing.unfreeze_at if self._start_point else ()
        return unfreezing_steps(plan.course.decided(decided))

    # ---- training ---------------------------------------------------------------------------------

    def _grant_ahead(self, now_s: float, commands: list[Command]) -> None:
        found = self._made_granting.ahead()
        if any(isinstance(command, ChooseOperations) for command in found):
            self._set_deadline(now_s, commands)
        commands += found

    def _on_step(self, event: StepReported, now_s: float, commands: list[Command]) -> None:
        granting = self._granting
        turn = granting.open.of_item(event.seq) if granting else None
        if granting is None or turn is None:
            return
        self._set_deadline(now_s, commands)
        granting.open.item_done(turn)
        commands.append(LogStep(turn, event.seq, event.step, granting.depth(turn, event.step), event.values))
        if turn.kind is StepKind.EVALUATE:
            self._evaluation.note(event.seq, event.values)
        granting.depths.note(turn, event.seq, event.values)
        self._grant_ahead(now_s, commands)
        self._close_turns(now_s, commands)  # a node's last word of a turn may come before the owner's last loss

    def _on_turn_done(self, event: TurnReported, now_s: float, commands: list[Command]) -> None:
        granting = self._granting
        turn = granting.open.get(event.turn) if granting else None
        if granting is None or turn is None:
            return
        granting.tables.note(event.node, turn, event.scores)
        granting.copies.note(event.node, turn, event.copies)
        self._set_deadline(now_s, commands)
        granting.open.node_done(event.node, turn)
        self._close_turns(now_s, commands)

    def _on_operations(self, event: OperationsChosen, now_s: float, commands: list[Command]) -> None:
        found = self._made_granting.chosen(event.step, event.operations)
        if found:
            self._set_deadline(now_s, commands)
            commands += found

    def _close_turns(self, now_s: float, commands: list[Command]) -> None:
        """Close finished turns in order, so that whatever is logged is complete up to there."""
        granting = self._made_granting
        while (oldest := granting.open.oldest) is not None:
            turn = oldest.turn
            if oldest.waits_for or not granting.depths.is_complete(turn):
                break
            granting.close(turn)
            commands.append(LogTurn(turn))
            if turn.kind is StepKind.CHECKPOINT:
                unfreezing = granting.depths.unfreezing
                commands.append(LogCheckpoint(turn.first_step, turn.owner, unfreezing, turn.operations))
            self._grant_ahead(now_s, commands)
            if turn.kind is StepKind.EVALUATE:
                sums = self._evaluation.close(turn, self._made_plan.course.owners)
                commands += [LogEvaluation(turn.end_step, sums)] if sums is not None else []
        self._end_training(now_s, commands)

    def _end_training(self, now_s: float, commands: list[Command]) -> None:
        """Collect, or end a run that was stopped, once every turn is closed.

        A resumed run may have no turns left.
        """
        granting = self._made_granting
        if granting.open or not granting.is_exhausted:
            return
        if self._drain_reason:
            self._fail("InterruptedRunError", self._drain_reason, commands)
        else:
            self._collect(now_s, commands)

    def _drain(self, reason: str, now_s: float, commands: list[Command]) -> None:
        """Let the granted turns end, then save; what was not granted yet is left for a resumed run.

        Where no open turn trains or saves, nothing is waited for: a resumed run gathers scores and evaluates again.
        """
        last = self._granting.last if self._granting else None
        if self.phase != "training" or last is None or self._drain_reason:
            self._fail("InterruptedRunError", reason, commands)
            return
        self._drain_reason = reason
        commands += self._made_granting.drain(last)
        if not self._made_granting.open.change_anything:
            self._fail("InterruptedRunError", reason, commands)
            return
        self._end_training(now_s, commands)  # no turn may be open while a table is chosen

    def _collect(self, now_s: float, commands: list[Command]) -> None:
        self._enter("collecting", now_s, commands)
        plan = self._made_plan
        last = self._made_granting.last
        holder = last.owner if last else (self._start_point or StartPoint.of(plan.course)).holder
        commands += [
            Collect(node, with_head=node == holder, with_private=node == holder and plan.placement.private_blocks > 0)
            for node in self._nodes
        ]

    # ---- the end ----------------------------------------------------------------------------------

    def _release(self, commands: list[Command], reason: str) -> None:
        commands += [Release(node, reason) for node in self._nodes]

    def _fail(self, error: str, message: str, commands: list[Command]) -> None:
        if self.phase in ("done", "failed"):
            return
        commands.append(CancelTimer(_PHASE_TIMER))
        self._release(commands, message)
        self.phase = "failed"
        commands += [EnterPhase("failed"), Finish(error, message)]

    def _overdue(self) -> str:
        if self.phase == "planning":
            return f"planning took more than {self._wait_s + self._plan_s:g} s; lower runtime.plan_s or ask for less"
        if self.phase != "training":
            waited = f"waited {self._wait_s:g} s"
            return f"{waited} in phase {self.phase} for node {', '.join(sorted(self._waiting))}"
        limit_s, oldest = _TRAINING_PATIENCE * self._wait_s, self._made_granting.open.oldest
        if oldest is None:
            took = f"took more than {limit_s + self._plan_s:g} s; raise runtime.plan_s"
            return f"choosing operations for step {self._chooses_for} {took}"
        turn, nodes = oldest.turn, ", ".join(oldest.waits_for) or oldest.turn.owner
        where = f"turn {turn.index} of node {turn.owner} (from step {turn.first_step})"
        return f"waited {limit_s:g} s for {where}: not done by {nodes}"
