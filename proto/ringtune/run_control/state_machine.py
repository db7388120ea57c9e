r"""The coordinator's state machine of one run: phases, requests to nodes and their deadlines. No clock, no socket.

A run goes through the phases ::

    inspecting -> planning -> preparing -> training -> collecting -> done
         \                                  |    ^                  /
          \                                 moving                 /
           \__________ any error: every node is released _________/ failed

In training the coordinator *grants* turns. It grants ahead, so that frozen blocks can work for the next initiator
already, but only so far that any later decision can still take effect at a turn boundary.

A run may keep its best result (``train.keep_best``)::

    evaluation is the best so far --> every node sends what it trained --> the next turns are granted
                                      (CollectBest, BestSent)              (LogBest)

The phase is "training" meanwhile: nodes may be lost, return or pause as at any other time. A run that goes back then
goes back to the end of the step that was evaluated, and the nodes are asked anew.

Source: RingAda, Algorithm 1 and section III-B (initialisation, training round).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

from ringtune.engine.events import CancelTimer, SetTimer, TimerFired
from ringtune.errors import DeadlineError, RingTuneError, needed
from ringtune.run_control import events as rd
from ringtune.run_control.events import (
    BestSent,
    CollectBest,
    FetchedAhead,
    LogBest,
    Moved,
    MoveFailed,
    Replanned,
    Rested,
)
from ringtune.run_control.migration import Moving
from ringtune.run_control.turns import EvaluationSums, Granting, OpenTurn
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import ITEMS_AHEAD, Evaluations, StartPoint, StepKind
from ringtune.schedule.versions import unfreezing_steps

TRAINING_PATIENCE: Final = 1.5
"""The coordinator's wait in training over a node's wait; the node reports first what it misses."""


def overdue(
    phase: str,
    waiting: Collection[str],
    oldest: OpenTurn | None,
    chooses_for: int | None,
    *,
    wait_s: float,
    plan_s: float,
) -> str:
    """Say what is overdue in a phase.

    Args:
        phase: of the run.
        waiting: nodes that have not answered in it.
        oldest: the oldest turn that is granted and not done.
        chooses_for: the step for which an operation table is being chosen.
        wait_s: longest time without progress, in seconds.
        plan_s: longest time that planning takes beyond it, in seconds.
    """
    if phase == "planning":
        return f"planning took more than {wait_s + plan_s:g} s; lower runtime.plan_s or ask for less"
    if phase != "training":
        return f"waited {wait_s:g} s in phase {phase} for node {', '.join(sorted(waiting))}"
    limit_s = TRAINING_PATIENCE * wait_s
    if oldest is None:
        took = f"took more than {limit_s + plan_s:g} s; raise runtime.plan_s"
        return f"choosing operations for step {chooses_for} {took}"
    turn, nodes = oldest.turn, ", ".join(oldest.waits_for) or oldest.turn.owner
    where = f"turn {turn.index} of node {turn.owner} (from step {turn.first_step})"
    return f"waited {limit_s:g} s for {where}: not done by {nodes}"


Planner = Callable[[Mapping[str, Any]], Plan | tuple[Plan, StartPoint]]
PHASE_TIMER = "phase"


class Rounds:
    """The coordinator's state machine of one run.

    Args:
        planner: facts by node -> plan, or that of an earlier run and where it continues; may raise errors of ours.
            None = the driver plans: ``MakePlan`` asks for it, and the answer may take time.
        plan_only: stop after planning.
        plan_s: longest time that the driver may plan beyond ``wait_s``, in seconds.
        wait_s: longest time without progress in a phase, in seconds; in training one half more: nodes speak first.
        start: where the run continues; by default the plan's very beginning.
        patience_evals: as for ``Granting``.
        items_ahead: grant until at least so many items are granted beyond the finished ones; at least a whole turn.
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
        patience_evals: int = 0,
    ) -> None:
        self.phase = "new"
        self.plan: Plan | None = None
        self._planner, self._plan_only = planner, plan_only
        self._wait_s, self._plan_s = wait_s, plan_s
        self._items_ahead = items_ahead
        self._start_point, self._patience_evals = start, patience_evals
        self._drain_reason = ""
        self._nodes: tuple[str, ...] = ()
        self._facts: dict[str, Any] = {}
        self._waiting: set[str] = set()
        self._granting: Granting | None = None
        self._moving: Moving | None = None
        self._evaluation = EvaluationSums()

    def handle(self, event: rd.Event, now_s: float) -> list[rd.Command]:
        """Take one event at time ``now_s`` (monotonic seconds), answer with commands in order."""
        if self.phase in ("done", "failed"):
            return []
        commands: list[rd.Command] = []
        try:
            self._dispatch(event, now_s, commands)
        except RingTuneError as error:
            self._fail(type(error).__name__, str(error), commands)
        return commands

    def _dispatch(self, event: rd.Event, now_s: float, commands: list[rd.Command]) -> None:
        match event:
            case rd.Started(nodes):
                self._nodes = nodes
                self._enter("inspecting", now_s, commands)
                commands += [rd.Inspect(node) for node in nodes]
            case rd.Inspected(node, facts):
                self._facts[node] = facts
                self._answered(node, "inspecting", now_s, commands)
            case rd.PlanMade(plan, start):
                self._on_plan(plan, start, now_s, commands)
            case rd.PlanFailed(error, message):
                self._fail(error, message, commands)
            case rd.Prepared(node):
                self._answered(node, "preparing", now_s, commands)
            case rd.Progressed(node):
                if self.phase in ("preparing", "collecting") and node in self._waiting:
                    self._set_deadline(now_s, commands)
            case rd.Collected(node):
                self._answered(node, "collecting", now_s, commands)
            case rd.StepReported():
                self._on_step(event, now_s, commands)
            case rd.TurnReported():
                self._on_turn_done(event, now_s, commands)
            case rd.TechniqueFailed(node, problem):
                commands += self._granting.technique_failed(node, problem) if self._granting else ()
            case rd.OperationsChosen():
                self._on_operations(event, now_s, commands)
            case rd.OperationsFailed(step, error, message):
                if self._chooses_for == step:
                    self._fail(error, message, commands)
            case Rested() | Moved() | MoveFailed():
                if self.phase == "moving":
                    self._on_moving(self._made_moving.take(event, now_s), now_s, commands)
            case Replanned() | FetchedAhead():
                self._on_replanned(event, now_s, commands)
            case rd.NodeFailed():
                self._on_node_failed(event, now_s, commands)
            case rd.DrainAsked(reason):
                self._drain(reason, now_s, commands)
            case rd.StopAsked(reason):
                self._fail("InterruptedRunError", reason, commands)
            case TimerFired():
                if self.phase == "moving":
                    self._on_moving(self._made_moving.late(now_s), now_s, commands)
                    return
                raise DeadlineError(self._overdue)

    # ---- phases -----------------------------------------------------------------------------------

    def _enter(self, phase: str, now_s: float, commands: list[rd.Command], nodes: Iterable[str] = ()) -> None:
        self.phase = phase
        self._waiting = set(nodes or self._nodes)
        commands.append(rd.EnterPhase(phase))
        self._set_deadline(now_s, commands)
        if phase == "training":
            commands += self._made_moving.look_ahead()

    def _set_deadline(self, now_s: float, commands: list[rd.Command]) -> None:
        factor = TRAINING_PATIENCE if self.phase == "training" else 1.0
        more_s = self._plan_s if self.phase == "planning" or self._chooses_for is not None else 0.0
        commands.append(SetTimer(PHASE_TIMER, now_s + factor * self._wait_s + more_s))

    def _answered(self, node: str, phase: str, now_s: float, commands: list[rd.Command]) -> None:
        if self.phase != phase:
            return
        self._waiting.discard(node)
        if self._waiting:
            return
        if phase == "inspecting":
            self._make_plan(now_s, commands)
        elif phase == "preparing":
            self._enter("training", now_s, commands)
            self._granting = self._new_granting()
            self._grant_ahead(now_s, commands)
            self._end_training(now_s, commands)
        else:
            commands += [rd.Release(name, "the run is done", is_finished=True) for name in self._nodes]
            self.phase = "done"
            commands += [CancelTimer(PHASE_TIMER), rd.EnterPhase("done"), rd.Finish("", "")]

    def _new_granting(self, **more: Any) -> Granting:
        moving, start = self._made_moving, self._start_point
        more |= {"items_ahead": self._items_ahead, "patience_evals": self._patience_evals}
        return Granting(self._made_plan, moving.part.nodes, start=start, moving=moving, **more)

    def _make_plan(self, now_s: float, commands: list[rd.Command]) -> None:
        self.phase = "planning"
        commands.append(rd.EnterPhase("planning"))
        facts = dict(sorted(self._facts.items()))
        if self._planner is None:
            self._set_deadline(now_s, commands)
            commands.append(rd.MakePlan(facts))
            return
        made = self._planner(facts)
        plan, start = made if isinstance(made, tuple) else (made, None)
        self._on_plan(plan, start, now_s, commands)

    def _on_plan(self, plan: Plan, start: StartPoint | None, now_s: float, commands: list[rd.Command]) -> None:
        if self.phase != "planning":
            return
        self.plan, self._start_point = plan, start or self._start_point
        if self._plan_only:
            self._release(commands, "only a plan was asked for")
            self.phase = "done"
            commands += [CancelTimer(PHASE_TIMER), rd.EnterPhase("done"), rd.Finish("", "")]
            return
        left_out = [node for node in self._nodes if node not in self.plan.nodes]
        commands += [rd.Release(node, "the plan does not need this node") for node in left_out]
        self._nodes = tuple(
            node for node in self.plan.nodes if node in self._nodes
        )  # those of past placements may lack
        self._moving = Moving(self.plan, self._start_point, wait_s=self._wait_s)
        part = self._moving.part
        self._enter("preparing", now_s, commands, part.nodes)
        commands += [rd.Prepare(node, part) for node in part.nodes]

    @property
    def _made_plan(self) -> Plan:
        return needed(self.plan, f"phase {self.phase} needs a plan and there is none")

    @property
    def _made_granting(self) -> Granting:
        return needed(self._granting, f"phase {self.phase} does not train yet")

    @property
    def _made_moving(self) -> Moving:
        return needed(self._moving, f"phase {self.phase} needs a plan and there is none")

    @property
    def _chooses_for(self) -> int | None:
        """The step for which an operation table is being chosen; None if none is."""
        return self._granting.chooses_for if self._granting is not None else None

    @property
    def unfreeze_at(self) -> tuple[int, ...]:
        """The steps at which one more block began to train, up to the last turn that was granted."""
        return unfreezing_steps(self._made_plan.course.decided(self._decided))

    @property
    def _decided(self) -> tuple[int, ...]:
        last = self._granting.last if self._granting else None
        return last.unfreeze_at if last else self._start_point.unfreezing.unfreeze_at if self._start_point else ()

    # ---- moving -----------------------------------------------------------------------------------

    def _move_if_due(self, now_s: float, commands: list[rd.Command]) -> None:
        """Begin to move, once every turn of the present placement is done."""
        granting = self._made_granting
        turn = granting.moves_before
        if turn is not None:
            self._enter("moving", now_s, commands)
            found = self._made_moving.begin(turn, granting.last, self._decided, now_s)
            self._on_moving(found, now_s, commands)

    def _on_moving(self, found: list[rd.Command], now_s: float, commands: list[rd.Command]) -> None:
        """Send the nodes the next stage of a move; once it is over, training continues."""
        commands += found
        moving, granting = self._made_moving, self._made_granting
        if moving.is_under_way:
            if found:
                self._set_deadline(now_s, commands)
            return
        granting.place(moving.part)
        self._enter("training", now_s, commands)
        if self._drain_reason:
            reason, self._drain_reason = self._drain_reason, ""
            self._drain(reason, now_s, commands)
        else:
            self._grant_ahead(now_s, commands)

    def _on_replanned(self, event: Replanned | FetchedAhead, now_s: float, commands: list[rd.Command]) -> None:
        """Take one more placement into the plan, for the turns that are not granted yet, once its nodes can have it."""
        if self.phase == "training" and not self._drain_reason:
            commands += self._made_moving.replanned(event, self._made_granting.last)
            self.plan = self._made_moving.plan
            self._move_if_due(now_s, commands)

    def _on_node_failed(self, event: rd.NodeFailed, now_s: float, commands: list[rd.Command]) -> None:
        """End the run, unless it can continue without this node: the present placement does not need it."""
        moving = self._moving
        if moving is None or event.node in moving.part.nodes:
            self._fail(event.error, event.message, commands)
            return
        if event.node in self._nodes:
            self._nodes = tuple(node for node in self._nodes if node != event.node)
            commands.append(rd.Release(event.node, event.message))
            found = moving.lose(event.node, event.message, now_s)
            if self.phase == "moving":
                self._on_moving(found, now_s, commands)

    # ---- training ---------------------------------------------------------------------------------

    def _grant_ahead(self, now_s: float, commands: list[rd.Command]) -> None:
        found = self._made_granting.ahead()
        if any(isinstance(command, rd.ChooseOperations) for command in found):
            self._set_deadline(now_s, commands)
        commands += found
        self._move_if_due(now_s, commands)

    def _on_step(self, event: rd.StepReported, now_s: float, commands: list[rd.Command]) -> None:
        granting = self._granting
        turn = granting.open.of_item(event.seq) if granting else None
        if granting is None or turn is None or not granting.open.item_done(turn, event):
            return
        self._set_deadline(now_s, commands)
        commands.append(rd.LogStep(turn, event.seq, event.step, granting.depth(turn, event.step), event.values))
        if turn.kind is StepKind.EVALUATE:
            self._evaluation.note(event.seq, event.values)
        granting.depths.note(turn, event.seq, event.values)
        self._grant_ahead(now_s, commands)
        self._close_turns(now_s, commands)  # a node's last word of a turn may come before the owner's last loss

    def _on_turn_done(self, event: rd.TurnReported, now_s: float, commands: list[rd.Command]) -> None:
        granting = self._granting
        turn = granting.open.get(event.turn) if granting else None
        if granting is None or turn is None:
            return
        granting.tables.note(event.node, turn, event.scores)
        granting.copies.note(event.node, turn, event.copies)
        self._set_deadline(now_s, commands)
        granting.open.node_done(event.node, turn)
        self._close_turns(now_s, commands)

    def _on_operations(self, event: rd.OperationsChosen, now_s: float, commands: list[rd.Command]) -> None:
        found = self._made_granting.chosen(event.step, event.operations)
        if found:
            self._set_deadline(now_s, commands)
            commands += found

    def _close_turns(self, now_s: float, commands: list[rd.Command]) -> None:
        """Close finished turns in order, so that whatever is logged is complete up to there."""
        granting = self._made_granting
        while (oldest := granting.open.oldest) is not None:
            turn = oldest.turn
            if oldest.waits_for or not granting.depths.is_complete(turn):
                break
            granting.close(turn)
            commands.append(rd.LogTurn(turn))
            unfreezing, evaluations = granting.depths.unfreezing, granting.stopping.settled
            if turn.kind is StepKind.TRAIN and self._made_moving.part.placement.copies:
                commands.append(rd.LogKept(turn.end_step, turn.owner, unfreezing, evaluations))
            if turn.kind is StepKind.CHECKPOINT:
                commands.append(rd.LogCheckpoint(turn.first_step, turn.owner, unfreezing, turn.operations, evaluations))
            self._grant_ahead(now_s, commands)
            if turn.kind is StepKind.EVALUATE:
                sums = self._evaluation.close(turn, self._made_plan.course.owners)
                commands += granting.judge(turn.end_step, sums) if sums is not None else []
                if sums is not None and self.phase == "training":
                    self._grant_ahead(now_s, commands)
        self._end_training(now_s, commands)

    def _end_training(self, now_s: float, commands: list[rd.Command]) -> None:
        """Collect, or end a run that was stopped, once every turn is closed; a resumed run may have none left."""
        granting = self._made_granting
        if granting.open or not granting.is_exhausted:
            return
        if self._drain_reason:
            self._fail("InterruptedRunError", self._drain_reason, commands)
        else:
            self._collect(now_s, commands)

    def _drain(self, reason: str, now_s: float, commands: list[rd.Command]) -> None:
        """Let the granted turns end, then save; turns that are not granted yet are left for a resumed run.

        Where no open turn trains or saves, nothing is waited for: a resumed run gathers scores and evaluates again.
        """
        last = self._granting.last if self._granting else None
        if self.phase == "moving" and last is not None and not self._drain_reason:
            self._drain_reason = reason  # once the move is over
            return
        if self.phase != "training" or last is None or self._drain_reason:
            self._fail("InterruptedRunError", reason, commands)
            return
        self._drain_reason = reason
        commands += self._made_granting.drain(last)
        if not self._made_granting.open.change_anything:
            self._fail("InterruptedRunError", reason, commands)
            return
        self._end_training(now_s, commands)  # no turn may be open while a table is chosen

    def _collect(self, now_s: float, commands: list[rd.Command]) -> None:
        plan = self._made_moving.part
        self._enter("collecting", now_s, commands, plan.nodes)
        has_private = plan.placement.private_blocks > 0
        commands += [
            rd.Collect(node, with_head=node == self._holder, with_private=node == self._holder and has_private)
            for node in plan.nodes
        ]

    @property
    def _holder(self) -> str:
        """The owner that has the head once every turn is done."""
        last = self._made_granting.last
        return last.owner if last else (self._start_point or StartPoint.of(self._made_plan.course)).holder

    # ---- the end ----------------------------------------------------------------------------------

    def _release(self, commands: list[rd.Command], reason: str) -> None:
        commands += [rd.Release(node, reason) for node in self._nodes]

    def _fail(self, error: str, message: str, commands: list[rd.Command]) -> None:
        if self.phase in ("done", "failed"):
            return
        commands.append(CancelTimer(PHASE_TIMER))
        self._release(commands, message)
        self.phase = "failed"
        commands += [rd.EnterPhase("failed"), rd.Finish(error, message)]

    @property
    def _overdue(self) -> str:
        oldest = self._granting.open.oldest if self._granting else None
        return overdue(self.phase, self._waiting, oldest, self._chooses_for, wait_s=self._wait_s, plan_s=self._plan_s)


class BestKeepingRounds(Rounds):
    """``Rounds`` for a run that may keep the result of its best evaluation; ``Rounds`` alone where it does not.

    Args:
        planner: as for ``Rounds``, as are the others.
        keeps_best: whether it does.
        rounds: further arguments of ``Rounds``.
    """

    def __init__(self, planner: Planner | None, *, keeps_best: bool = False, **rounds: Any) -> None:
        super().__init__(planner, **rounds)
        self._keeps_best = keeps_best

    @property
    def best(self) -> Evaluations | None:
        """The state of the evaluations of a run that keeps the best result and has one; None otherwise."""
        found = self._granting.stopping.evaluations if self._granting and self._keeps_best else None
        return found if found and found.best is not None else None

    @property
    def last_step(self) -> int:
        """Steps that are done when every granted turn is."""
        last = self._granting.last if self._granting else None
        return last.end_step if last else self._start_point.step if self._start_point else 0

    def _new_granting(self, **more: Any) -> Granting:
        return super()._new_granting(keeps_best=self._keeps_best, **more)

    def _dispatch(self, event: rd.Event, now_s: float, commands: list[rd.Command]) -> None:
        match event:
            case BestSent(node, number):
                if self._granting is not None:
                    self._on_sent(self._granting, node, number, now_s, commands)
            case rd.Progressed(node) if self._granting and node in self._granting.stopping.best.asked:
                self._set_deadline(now_s, commands)
            case _:
                super()._dispatch(event, now_s, commands)

    @property
    def _overdue(self) -> str:
        asked = self._granting.stopping.best.asked if self._granting else ()
        if not asked or self.phase != "training":
            return super()._overdue
        limit_s = TRAINING_PATIENCE * self._wait_s
        return f"waited {limit_s:g} s for the result of the best evaluation from node {', '.join(sorted(asked))}"

    def _on_sent(self, granting: Granting, node: str, number: int, now_s: float, commands: list[rd.Command]) -> None:
        stopping = granting.stopping
        if node in stopping.best.asked:
            self._set_deadline(now_s, commands)
        if stopping.best.answered(node, number):
            stopping.sent()
            commands.append(LogBest(stopping.evaluations.best_step, number))
            self._grant_ahead(now_s, commands)

    def _grant_ahead(self, now_s: float, commands: list[rd.Command]) -> None:
        super()._grant_ahead(now_s, commands)
        granting = self._made_granting
        best = granting.stopping.best
        is_asked_for = best.wanted is not None and not granting.is_exhausted and not self._drain_reason
        if best.wanted is None or not is_asked_for or best.asked or granting.open or self.phase != "training":
            return
        nodes, has_private = self._made_moving.part.nodes, self._made_moving.part.placement.private_blocks > 0
        number = best.ask(nodes)
        for node in nodes:
            is_holder = node == self._holder
            with_private = is_holder and has_private
            commands.append(CollectBest(node, best.wanted, number, with_head=is_holder, with_private=with_private))
        self._set_deadline(now_s, commands)
