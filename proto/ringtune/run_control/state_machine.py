r"""The coordinator's state machine of one run: phases, requests to nodes, deadlines. No clock, no socket.

A run goes through the phases ::

    inspecting -> planning -> preparing -> training -> collecting -> done
         \                                  |    ^                  /
          \                                 moving                 /
           \__________ any error: every node is released _________/ failed

In training the coordinator *grants* turns ahead, so that frozen blocks can already work for the next initiator, but
only so many that every decision can still take effect at a turn boundary.

A run may keep its best result (``train.keep_best``)::

    evaluation is the best so far --> every node sends its tensors   --> the next turns are granted
                                      (CollectBest, BestSent)              (LogBest)

The phase is still "training": nodes may be lost or return as at any other time. A recovery then goes back to the
evaluated step, and asks the nodes again. Where all parameters train, nodes store their tensors on their own disks
instead, and the last ``Collect`` asks for those of the best step.

A run that recovers, with copies in its plan, goes through "moving" after a loss or a bad step as well, and through
"waiting" where it can't continue without a node: ``run_control.recovery``.

Source: RingAda, Algorithm 1 and section III-B (initialisation, training round).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

from ringtune.engine.events import CancelTimer, SetTimer, TimerFired
from ringtune.errors import (
    ConnectionFailedError,
    DeadlineError,
    DivergedError,
    IntegrityError,
    InterruptedRunError,
    PeerLostError,
    PlanError,
    RingTuneError,
    error_from_name,
    needed,
)
from ringtune.run_control import events as rd
from ringtune.run_control.migration import Migration
from ringtune.run_control.recovery import (
    MAX_BAD_STEPS,
    MAX_OPENINGS,
    NOTHING_KEPT,
    OPENINGS_TURNS,
    RESUME,
    WITH_ROOM,
    WITHOUT,
    AwaitedNodes,
    BadSteps,
    DisputedCopies,
    Joins,
    LinkOpenings,
    OwnErrors,
    Recovery,
    RecoveryPolicy,
    UncommittedLog,
    UnopenedLinks,
    end_reason,
    is_bad_step,
)
from ringtune.run_control.turns import EvaluationSums, Judge, TurnGrants
from ringtune.schedule.course import Course
from ringtune.schedule.lowering import neighbours
from ringtune.schedule.migration import CopyHolders, return_reason, rows_reason, stay_reason, with_owner, without_owner
from ringtune.schedule.plan import Plan
from ringtune.schedule.stages import collected_blocks
from ringtune.schedule.turns import ITEMS_AHEAD, Evaluations, StartPoint, StepKind, Turn, next_checkpoint
from ringtune.schedule.versions import unfreezing_steps
from ringtune.techniques.replicas import CopyDigest

PATIENCE: Final = 1.5
"""The coordinator's time limit of a phase, as a multiple of that of calls and nodes: they say first what they miss."""


Planner = Callable[[Mapping[str, Any]], Plan | tuple[Plan, StartPoint]]
PHASE_TIMER = "phase"
_RECOVERS_IN = ("preparing", "training", "moving", "waiting", "collecting")
_LOST = (PeerLostError.__name__, ConnectionFailedError.__name__, DeadlineError.__name__)
_UNREACHED = (*_LOST, "FrameError")


class RunStateMachine:
    """The phases of one run; ``handle`` is the only way in.

    Args:
        planner: facts by node -> plan, or (plan, start) of a run that continues; may raise errors of
            ``ringtune.errors``. None = the driver plans, as ``MakePlan`` asks.
        plan_s: planning time of the driver beyond that limit, in seconds.
        wait_s: time limit of calls to nodes, in seconds; a phase may be ``PATIENCE`` times as long without progress.
        judge: as for ``TurnGrants``.
        items_ahead: as for ``TurnGrants``. Where the run can go back, at most two turns are granted instead.
        recovery: settings for losses, bad steps and nodes that join, where nodes keep copies; None = the run ends with
            the loss of a node that it needs, and no node can join.
        audits: whether each train turn is checked before it is closed, so that the run goes back to the end of the last
            turn that was agreed on, without a node that computed otherwise.

    Attributes:
        excluded: nodes that computed otherwise; they take no part in this run any more.
        joins: of nodes during the run; who tells of a join notes it there.
        continues_with: owners that are back, where all parameters train: the run has ended with a checkpoint, and
            another one continues from there with their turns.
        lost: the node that has ended the run, by its loss or its own error, where nodes keep no turn in memory, so that
            another one may continue from the disks without it; empty = none.
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
        keeps_best: bool = False,
        judge: Judge | None = None,
        recovery: RecoveryPolicy | None = None,
        audits: bool = False,
    ) -> None:
        self.phase = "new"
        self._planner, self._plan_only = planner, plan_only
        self._wait_s, self._plan_s = wait_s, plan_s
        self._items_ahead = items_ahead
        self._start_point, self._patience_evals, self._keeps_best = start, patience_evals, keeps_best
        self._judge = judge
        self._drain_reason = ""
        self._now_s = 0.0
        self._commands: list[rd.Command] = []  # of the event under way
        self._nodes: tuple[str, ...] = ()
        self._spare: tuple[str, ...] = ()
        self._facts: dict[str, Any] = {}
        self._waiting: set[str] = set()
        self._grants: TurnGrants | None = None
        self._migration: Migration | None = None
        self._evaluation = EvaluationSums()
        self._recovers, self._policy = recovery is not None, recovery or RecoveryPolicy()
        self.awaited = AwaitedNodes(self._policy.awaits_s)
        self._kept, self._log, self._bad, self._own = CopyHolders(), UncommittedLog(), BadSteps(), OwnErrors()
        self._recovery: Recovery | None = None
        self._gone: set[str] = set()
        self._newest_placement_number = 0
        self._audits, self.excluded = audits, set[str]()
        self._checking = self._checked = -1  # index of a turn
        self._checkers: tuple[str, ...] = ()  # that repeat work of the turn that is checked
        self._opened_at: int | None = None  # step to which the run has gone back last because of a lost link
        self._opened_s = 0.0  # when it did so first
        self._openings, self._disputed, self.joins = LinkOpenings(), DisputedCopies(), Joins()
        self._unopened = UnopenedLinks()
        self._broken_link: rd.LinkFailed | None = None  # the last one between living nodes
        self._before: Turn | None = None  # the last turn that was granted before the last recovery
        self._returned = list[str]()  # left-out owners that are back, to be taken in at the next turn boundary
        self._returning: tuple[str, ...] = ()  # those that are there when the run is resumed
        self.continues_with: tuple[str, ...] = ()
        self.lost = ""

    def handle(self, event: rd.Event, now_s: float) -> list[rd.Command]:
        """Take one event at time ``now_s`` (monotonic seconds); return the commands in order.

        Where the run can go back, log entries of a turn are returned once it is committed.
        """
        if self.phase in ("done", "failed"):
            return []
        self._now_s = now_s
        passed = self._handled(lambda: self._dispatch(rd.without_stop(event)))
        held = self._grants.held if self._grants is not None else None
        if self.phase == "training" and held is not None and self._may_take_back_before(held):
            passed += self._handled(self._take_back)
        return passed

    def _handled(self, act: Callable[[], None]) -> list[rd.Command]:
        self._commands = []
        try:
            act()
        except RingTuneError as error:
            self._fail(type(error).__name__, str(error))
        if not self._goes_back:
            return self._commands
        passed: list[rd.Command] = []
        for command in self._commands:
            if isinstance(command, rd.LogKept | rd.LogCheckpoint) and command.step == self._kept.step:  # of this commit
                told = tuple(itertools.starmap(CopyDigest, sorted(self._kept.digests.items())))
                command = command._replace(digests=told)
            committed = self._log.pass_on(command, passed)
            if committed is not None:
                self._commit(committed)
        return passed

    def _dispatch(self, event: rd.Event) -> None:
        match event:
            case rd.Started(nodes, spare, returning):
                self._nodes, self._spare, self._returning = nodes, spare, returning
                self._enter("inspecting")
                self._commands += [rd.Inspect(node) for node in nodes]
            case rd.Inspected(node, facts):
                self._facts[node] = facts
                self._answered(node, "inspecting")
            case rd.PlanMade(plan, start):
                self._on_plan(plan, start)
            case rd.PlanFailed(error, message):
                self._fail(error, message)
            case rd.Prepared(node):
                self._answered(node, "preparing")
            case rd.Progressed(node):
                is_waited_for = self.phase in ("preparing", "collecting") and node in self._waiting
                if is_waited_for or node in self._asked_for_best:
                    self._set_deadline()
            case rd.Collected(node):
                self._answered(node, "collecting")
            case rd.BestSent():
                self._on_best_sent(event)
            case rd.StepReported():
                self._on_step(event)
            case rd.TurnReported():
                self._on_turn_done(event)
            case rd.TurnRepeated(turn, nodes):
                if turn == self._checking and self.phase == "training":
                    self._checkers = nodes
                    self._set_deadline()
            case rd.TurnChecked():
                self._on_checked(event)
            case rd.TechniqueFailed(node, problem):
                self._commands += self._grants.technique_failed(node, problem) if self._grants else ()
            case rd.OperationsChosen():
                self._on_operations(event)
            case rd.OperationsFailed(step, error, message):
                if self._chooses_for == step:
                    self._fail(error, message)
            case (
                rd.Halted() | rd.PlacementFound() | rd.NoPlacementFound() | rd.Rested() | rd.Moved() | rd.MoveFailed()
            ) if self._recovery:
                self._on_answer(self._recovery, event)
            case rd.MoveFailed() if self._goes_back and self._required_migration.fails_to_go_back(event):
                is_lost = event.error in _UNREACHED and self._dispensable([event.node])
                if is_lost:
                    self._unreached_by(event)
                error = PeerLostError.__name__ if is_lost else event.error
                self._go_on_without(rd.NodeFailed(event.node, error, event.message))
            case rd.Rested() | rd.Moved() | rd.MoveFailed():
                if self.phase == "moving":
                    self._on_moving(self._required_migration.take(event, self._now_s))
            case rd.Replanned() | rd.FetchedAhead():
                self._on_replanned(event)
            case rd.NodeJoined(node):
                self._on_joined(node)
            case rd.NodeFailed():
                self._on_node_failed(event)
            case rd.LinkFailed():
                self._on_link_failed(event)
            case rd.DrainRequested(reason):
                self._drain(reason)
            case rd.RunStopRequested(reason):
                self._fail("InterruptedRunError", reason)
            case TimerFired():
                self._on_deadline()

    def _on_deadline(self) -> None:
        if self.awaited:
            self._fail(*self.awaited.late())
        elif self._recovery is not None:
            late, stuck = self._recovery.overdue(PATIENCE * self._wait_s), self._recovery.stuck
            ends = self._dispensable(self._unopened.ranked(stuck))
            lost = next(itertools.chain(self._recovery.returned, ends), "")
            if not lost:
                raise DeadlineError(f"{late}; {RESUME}")
            accusers = [node for node, peer in stuck.items() if peer == lost]
            if all(self._course.owner(node) for node in accusers):  # no host says so too
                self._openings.note_cost(accusers, lost)
            self._on_node_failed(rd.NodeFailed(lost, PeerLostError.__name__, late))
        elif self.phase == "moving":
            self._on_moving(self._required_migration.late(self._now_s))
        elif self._migration is not None and (silent := self._silent_host()):
            self._go_on_without(rd.NodeFailed(silent, DeadlineError.__name__, self._overdue))
        else:
            raise DeadlineError(self._overdue)

    def _silent_host(self) -> str:
        """Return the only node for which a phase waits, if it has no rows; empty = it is another one, or several.

        For an owner without blocks, that says nothing while its turn waits for it, it is the last host, from which it
        may await its first tensor: one host for an owner within ``OPENINGS_TURNS`` turns.
        """
        node = self._late[0] if len(self._late) == 1 else ""
        if not node or self._course.owner(node) is None:
            return node
        pieces = self._required_migration.part.placement.slices
        last = [piece.node for piece in pieces if piece.stop == self._course.head]
        hosts_some = any(piece.node == node and piece.num_blocks for piece in pieces)
        if self.phase != "training" or hosts_some or len(last) != 1 or last != self._dispensable(last):
            return ""
        if self._openings.has_cost([node], *last):
            return ""
        self._openings.note_cost([node], *last)
        return last[0]

    # ---- phases -----------------------------------------------------------------------------------

    def _enter(self, phase: str, nodes: Iterable[str] = ()) -> None:
        self.phase = phase
        self._waiting = set(nodes or self._nodes)
        self._commands.append(rd.EnterPhase(phase))
        self._set_deadline()
        if phase == "training":
            self._commands += self._required_migration.prefetch_next()

    def _set_deadline(self) -> None:
        if self.awaited:
            self._commands.append(SetTimer(PHASE_TIMER, self.awaited.until_s))
            return
        more_s = self._plan_s if self.phase == "planning" or self._chooses_for is not None else 0.0
        self._commands.append(SetTimer(PHASE_TIMER, self._now_s + PATIENCE * self._wait_s + more_s))

    def _answered(self, node: str, phase: str) -> None:
        if self.phase != phase:
            return
        self._waiting.discard(node)
        if self._waiting:
            return
        if phase == "inspecting":
            self._make_plan()
        elif phase == "preparing":
            self._enter("training")
            self._grants = self._new_granting()
            self._grant_ahead()
            self._end_training()
        else:
            self._commands += [rd.Release(name, "the run is done", is_finished=True) for name in self._nodes]
            self._end("done")

    def _new_granting(self) -> TurnGrants:
        return TurnGrants(
            self._required_migration,
            items_ahead=self._items_ahead,
            start=self._start_point,
            patience_evals=self._patience_evals,
            keeps_best=self._keeps_best,
            judge=self._judge,
        )

    def _make_plan(self) -> None:
        self.phase = "planning"
        self._commands.append(rd.EnterPhase("planning"))
        facts = dict(sorted(self._facts.items()))
        if self._planner is None:
            self._set_deadline()
            self._commands.append(rd.MakePlan(facts))
            return
        made = self._planner(facts)
        plan, start = made if isinstance(made, tuple) else (made, None)
        self._on_plan(plan, start)

    def _on_plan(self, plan: Plan, start: StartPoint | None) -> None:
        if self.phase != "planning":
            return
        if self._recovers and plan.goes_back:
            if why := stay_reason(plan.course):
                raise PlanError(f"the run can't continue without a lost node: {why}; set recovery.copies = 'none'")
            self._items_ahead = 0
        if self._audits and not plan.goes_back:
            why = stay_reason(plan.course) or "this plan keeps no copies of turns (recovery.copies)"
            raise PlanError(
                f"[audit] goes back to the last turn that was agreed on, which can't be: {why}; leave [audit] out"
            )
        self._start_point = start or self._start_point
        self._migration = Migration(plan, self._start_point, wait_s=PATIENCE * self._wait_s)
        if self._plan_only:
            self._release("only a plan was asked for")
            self._end("done")
            return
        left_out = [node for node in self._nodes if node not in plan.nodes]
        self._commands += [rd.Release(node, "the plan does not need this node") for node in left_out]
        self._nodes = tuple(node for node in plan.nodes if node in self._nodes)  # those of past placements may lack
        part = self._migration.part
        if plan.placements[-1] != part.placement and (why := stay_reason(plan.course)):
            raise PlanError(f"a run can't move to another placement: {why}; give the plan one placement")
        self._enter("preparing", part.nodes)
        self._commands += [rd.Prepare(node, part) for node in part.nodes]
        if self._goes_back and self._start_point is None:
            self._kept.begin(StartPoint.of(plan.course).holder)  # the first turn to which the run can go back

    @property
    def plan(self) -> Plan | None:
        """The plan of the run, with the placements that were found on the way; None before it is made."""
        return self._migration.plan if self._migration is not None else None

    @property
    def _goes_back(self) -> bool:
        return self._recovers and self.plan is not None and self.plan.goes_back

    @property
    def _required_grants(self) -> TurnGrants:
        return needed(self._grants, f"phase {self.phase} does not train yet")

    @property
    def _required_migration(self) -> Migration:
        return needed(self._migration, f"phase {self.phase} needs a plan and there is none")

    @property
    def _chooses_for(self) -> int | None:
        return self._grants.chooses_for if self._grants is not None else None

    @property
    def unfreeze_at(self) -> tuple[int, ...]:
        """The steps at which one more block began to train, up to the last granted turn."""
        return unfreezing_steps(self._required_migration.plan.course.decided(self._decided))

    @property
    def _decided(self) -> tuple[int, ...]:
        last = self._grants.last if self._grants else None
        return last.unfreeze_at if last else self._start_point.unfreezing.unfreeze_at if self._start_point else ()

    # ---- moving -----------------------------------------------------------------------------------

    def _move_if_due(self) -> None:
        """Begin a move, once every turn of the present placement is done."""
        grants = self._required_grants
        turn = grants.moves_before
        if turn is not None:
            self._enter("moving")
            commands = self._required_migration.begin(turn, grants.last, self._decided, self._now_s)
            self._on_moving(commands)

    def _on_moving(self, commands: list[rd.Command]) -> None:
        """Append the commands of the move; train once it is over."""
        self._commands += commands
        moving = self._required_migration
        if not moving.stage:
            self._required_grants.place(moving.part)
            self._train_on()
        elif commands:
            self._set_deadline()

    def _train_on(self) -> None:
        """Grant turns in the present placement, or drain the run if the user has stopped it meanwhile."""
        self._enter("training")
        if self._drain_reason:
            reason, self._drain_reason = self._drain_reason, ""
            self._drain(reason)
        else:
            self._grant_ahead()
            self._end_training()

    def _on_replanned(self, event: rd.Replanned | rd.FetchedAhead) -> None:
        """Prefetch a replanned placement, and take it into the plan for turns that are not granted yet."""
        if isinstance(event, rd.Replanned) and self._gone.intersection(event.placement.members):
            return
        if self.phase == "training" and not self._drain_reason:
            self._commands += self._required_migration.replanned(event, self._required_grants.last)
            self._move_if_due()

    # ---- losses -----------------------------------------------------------------------------------

    def _on_node_failed(self, event: rd.NodeFailed) -> None:
        """Go back after a bad step, or go on without a node."""
        is_at_work = self.phase == "training" and event.node in self._required_migration.part.nodes
        if self._recovers and is_bad_step(event) and (is_at_work or self._recovery is not None):
            why = self._on_bad_step(event) if self._recovery is None else ""  # else all go back anyway
            if not why:
                return
            event = event._replace(message=f"{event.message}; {why}")
        self._go_on_without(event)

    def _go_on_without(self, event: rd.NodeFailed) -> None:
        """Recover from the loss of a node, or from an error of its own; else end the run if it needs the node."""
        lost = event.lost or event.node
        can_begin_without = event.error == IntegrityError.__name__ or event.node in self._returning
        if self.phase in ("inspecting", "planning") and self._recovers and can_begin_without:
            self._begin_without(event)
            return
        if lost in self._gone or (event.lost and self._recovery is not None):
            return  # nodes that stop are missed by others; who is really lost does not answer
        moving, is_lost = self._migration, bool(event.lost) or event.error == PeerLostError.__name__
        can_go_back = moving is not None and self._goes_back and self.phase in _RECOVERS_IN
        if moving is None or not can_go_back or not (is_lost or self._is_own(event)):
            self._continue_without(event.node, event)
            return
        if is_bad_step(event):
            lost = self._bad.leaving(event.node, self._dispensable(neighbours(moving.part, event.node)))
            if lost != event.node:
                text = f"{event.message}; node {lost} leaves, beside which another host has found such steps too"
                event = event._replace(message=text)
        self._gone.add(lost)
        self._openings.lose(lost, {*self._dispensable(self._nodes)} - {lost})
        self._kept.lose(lost)
        if self._recovery is None and lost not in moving.part.nodes:
            self._continue_without(lost, event)
        elif problem := end_reason(lost, self._course, self._kept, self._policy):
            self.lost = self._blamed(event, is_lost=lost not in self.excluded)
            remedy = WITHOUT if lost in self.excluded else RESUME
            self._fail(event.error, f"{event.message}; {problem.replace(RESUME, remedy)}")
        else:
            if not is_lost:
                self._commands.append(rd.LogNodeError(lost, event.error, event.message))
            self._recover(lost, event.message)

    def _begin_without(self, event: rd.NodeFailed) -> None:
        """Plan without a node that sent impossible facts; end the run if it needs the node."""
        node = event.node
        if node not in self._nodes:
            return
        if node not in (*self._spare, *self._returning) or self._nodes == (node,):
            self._fail(event.error, event.message)
            return
        self._nodes = tuple(other for other in self._nodes if other != node)
        self._facts.pop(node, None)
        self._commands += [rd.LogNodeError(node, event.error, event.message), rd.Release(node, event.message)]
        if self.phase == "planning":
            self._make_plan()
        else:
            self._answered(node, "inspecting")

    def _is_own(self, event: rd.NodeFailed) -> bool:
        """Return whether a reported error is the node's own and the run continues without the node."""
        owns_rows = self._course.owner(event.node) is not None
        may_go = event.node in self._dispensable([event.node])
        return may_go and self._own.take(event, self.last_step, owns_rows=owns_rows)

    def _continue_without(self, lost: str, event: rd.NodeFailed) -> None:
        """End the run, unless the present placement does not need this node."""
        moving = self._migration
        if moving is None or lost in moving.part.nodes:
            self.lost = self._blamed(event, is_lost=event.error in _LOST)
            self._fail(event.error, event.message)
            return
        if lost in self._nodes:
            self._nodes = tuple(node for node in self._nodes if node != lost)
            self._commands.append(rd.Release(lost, event.message))
            commands = moving.lose(lost, event.message, self._now_s)
            if self.phase == "moving":
                self._on_moving(commands)

    def _blamed(self, event: rd.NodeFailed, *, is_lost: bool) -> str:
        """Return the node that ends the run, as ``lost``; an owner that comes back and is not fit goes first."""
        if self._kept.step is not None:
            return ""
        ends = [node for node in (event.lost, event.node) if node]
        unfit = [node for node in ends if self.phase == "preparing" and node in self._returning]
        return next(iter([*unfit, *ends * is_lost]), "")

    def _on_link_failed(self, event: rd.LinkFailed) -> None:
        """Open all links anew: all nodes go back in the same placement.

        The run continues without the accused node if that node did not answer; without one end of the link if a link
        is lost again before another turn is committed, or can't be opened; without a node with too many lost links.
        """
        step = self._kept.step
        if event.placement_number != self._required_migration.part.placement.placement_number:
            return  # all links were opened since
        can_go_back = self._goes_back and self.phase in _RECOVERS_IN and self._recovery is None
        if not (event.answers and can_go_back) or step is None or self._kept.missing:
            self._on_node_failed(event.failed)
            if self.lost and event.answers:
                self.lost = next((node for node in event.ends if self._course.owner(node) is None), self.lost)
            return
        self._broken_link = event
        if step == self._opened_at:
            self._lose_an_end(event)
            return
        for node in self._dispensable(event.ends):
            stays = [end for end in event.ends if end != node]
            if not self._openings.are_too_many(node, event.ends) or self._openings.has_cost(stays, node):
                continue
            why = f"{event.failed.message}; its links were opened anew {MAX_OPENINGS} times in {OPENINGS_TURNS} turns"
            self._leave_out(node, event, why)
            return
        self._openings.note(event.ends)
        self._opened_at, self._opened_s = step, self._now_s
        self._rewind(link=event.failed.message)

    def _lose_an_end(self, event: rd.LinkFailed) -> None:
        """Continue without one end of a link that stays broken: the suspect, or the other if the run needs the suspect.

        Both nodes answer. If the run needs the rows of both, or if it has just lost a node for a link of the end that
        would stay, all links are opened again for as long as the run would wait for a lost node. After that time the
        run continues without that end, or fails if it needs the rows of that end.
        """
        link, free = event.failed, self._dispensable(event.ends)
        needed = [node for node in event.ends if node not in free]
        if free and not self._openings.has_cost(needed or free[1:], free[0]):
            self._leave_out(free[0], event, link.message)
        elif self._now_s < self._opened_s + self._policy.awaits_s:
            self._rewind(link=link.message)
        elif free and not needed:
            self._leave_out(free[1], event, link.message)
        else:
            tried = f" for {self._policy.awaits_s:g} s (recovery.wait_s)" if self._policy.awaits_s else " in vain"
            why = f"node {needed[0]}, for a link with which a node has left the run, owns" if free else "both own"
            text = f"the link between {' and '.join(event.ends)} was opened anew{tried}; {why} rows, which no other"
            self._fail(link.error, f"{link.message}; {text} node has; mend the network, {RESUME}")

    def _leave_out(self, lost: str, event: rd.LinkFailed, why: str) -> None:
        """Continue without an end of a broken link; note an owner that stays."""
        stay = [node for node in event.ends if node != lost and self._course.owner(node) is not None]
        self._openings.note_cost(stay, lost)
        self._on_node_failed(rd.NodeFailed(lost, PeerLostError.__name__, why))

    def _dispensable(self, nodes: Iterable[str]) -> list[str]:
        """Return the nodes that the run can continue without, nodes without rows first."""
        step, without_rows, left_out = self._kept.step or 0, list[str](), list[str]()
        for node in nodes:
            if self._course.owner(node) is None:
                without_rows.append(node)
            elif self._policy.leaves_out and not rows_reason(self._course, node, step, self._kept.decided):
                left_out.append(node)
        return [*without_rows, *left_out]

    def _on_bad_step(self, event: rd.NodeFailed) -> str:
        """Repeat the uncommitted turns; return why that makes no sense as they are a repetition themselves."""
        missing = end_reason("", self._course, self._kept, self._policy) if self._goes_back else NOTHING_KEPT
        again = self._bad.end_reason(self._kept.step)
        if not again and self._course.owner(event.node) is None and self._bad.are_too_many(event.node):
            again = f"it is one of more than {MAX_BAD_STEPS} at node {event.node} within {OPENINGS_TURNS} turns"
        if again or missing:
            self._log.forget_held()  # what came since the committed turn may be of the bad step
        if missing:
            self._fail(event.error, f"{event.message}; {again * self._goes_back or missing}")
        elif not again:
            self._bad.rewind()
            self._rewind(bad_step=event.message)
        return "" if missing else again

    def _on_joined(self, node: str) -> None:
        """Permit a node in later placements; continue a run that waited for this node, or for any node with memory."""
        is_known = node in self._nodes or node in self.excluded
        if not self._recovers or self._migration is None or self.phase not in _RECOVERS_IN or is_known:
            return
        self._gone.discard(node)
        self._nodes = (*self._nodes, node)
        self._migration.join(node)
        if node in self.left_out and not self.return_reason(node):
            self._returned.append(node)
        if self._recovery is None:
            return
        self._recovery.join(node)
        if self.awaited:
            self.awaited.came(node)
            self._find_placement(self._recovery)

    # ---- owners that are back ---------------------------------------------------------------------

    @property
    def left_out(self) -> tuple[str, ...]:
        """The owners whose turns are left out."""
        return tuple(absent.owner.node for absent in self._course.absent) if self.plan is not None else ()

    def return_reason(self, node: str) -> str:
        """Say why an owner whose turns are left out is not taken back; empty if it is, at the next turn boundary.

        Where all parameters train it is at the next checkpoint, with which the run ends for another one to continue.
        """
        grants = self._grants
        if not self._policy.leaves_out or self._policy.num_steps is None:
            return "recovery.owners is not 'skip'"
        is_full = self._course.method.full_parameters
        if not (self._goes_back or is_full):
            return "this plan keeps no copies of the ends of turns (recovery.copies)"
        step, is_over = self.last_step, grants is not None and grants.is_exhausted
        if self._recovery is not None:
            step, is_over = self._recovery.step, is_over and self._recovery.course is None
        if self._drain_reason or is_over or step >= self._course.num_steps:
            return "the last turns of this run are granted already"
        if is_full:
            saved = next_checkpoint(self._course, step, after=self._start_point.step if self._start_point else 0)
            if saved is None:
                return "the run takes owners back at a checkpoint, and none is left before its end"
            step = saved
        return return_reason(self._course, node, step, self._whole_num_steps)

    @property
    def _whole_num_steps(self) -> int:
        num_steps = needed(self._policy.num_steps, "owners come back to a run whose whole length is not known")
        return num_steps([owner.train_rows for owner in self._course.all_owners])

    def _may_take_back_before(self, held: Turn) -> bool:
        """Whether all that was done before a turn is kept: in memory, or in a checkpoint where all parameters train."""
        return self._course.method.full_parameters or held.first_step == self._kept.step

    def _take_back(self) -> None:
        """Make all nodes go on from the committed turn in a course with the owners that are back.

        Where all parameters train the run ends, and another one continues from the checkpoint.
        """
        course, step = self._course, self._kept.step or 0
        owners = [node for node in dict.fromkeys(self._returned) if node in self._nodes]
        self._returned = []
        if owners and course.method.full_parameters:
            self.continues_with = tuple(owners)
            self._fail(InterruptedRunError.__name__, f"node {', '.join(owners)} is back")
            return
        for node in owners:
            if not return_reason(course, node, step, self._whole_num_steps):
                course = with_owner(course, node, course.turns_of(step), self._whole_num_steps)
        returned = tuple(node for node in owners if course.owner(node) is not None)
        if returned:
            self._rewind(course, returned=returned)
        else:
            self._grant_ahead()

    # ---- recovery ---------------------------------------------------------------------------------

    @property
    def _course(self) -> Course:
        course = self._recovery.course if self._recovery else None
        return course or self._required_migration.plan.course

    def _commit(self, turn: Turn) -> None:
        self._required_grants.commit(turn.index)
        self._bad.commit(turn.index)
        if turn.kind is StepKind.TRAIN:
            self._openings.commit()
            self._bad.end_turn()
            self._own.commit(turn.end_step)
            self._kept.commit(self._required_migration.plan.course, self._required_migration.part.placement, turn)

    def _recover(self, lost: str, message: str) -> None:
        self._nodes = tuple(node for node in self._nodes if node != lost)
        self._commands.append(rd.Release(lost, message))
        course = self._recovery.course if self._recovery else None
        if self._course.owner(lost) is not None:
            step = self._kept.step or 0
            if self._policy.leaves_out and not rows_reason(self._course, lost, step, self._kept.decided):
                course = without_owner(self._course, lost, self._course.turns_of(step))
            else:
                self.awaited.for_owner(lost, self._now_s)
        self._find_placement(self._rewind(course, lost=lost))

    def _rewind(
        self,
        course: Course | None = None,
        *,
        lost: str = "",
        bad_step: str = "",
        link: str = "",
        returned: tuple[str, ...] = (),
    ) -> Recovery:
        """Begin to bring all living nodes back to the end of the committed turn, with a new placement number.

        In the same placement, unless a node is lost. Arguments as for ``Recovery``.
        """
        self._grants = self._grants or self._new_granting()
        numbers = (placement.placement_number for placement in self._required_migration.plan.placements)
        self._newest_placement_number = max(self._newest_placement_number, *numbers) + 1
        self._log.forget_held()
        self._evaluation.forget()
        self._required_migration.recover(None, 0, ())
        self._required_grants.halt()
        self._recovery = Recovery(
            placement_number=self._newest_placement_number,
            lost=(lost,) if lost else (),
            nodes=self._nodes,
            began_s=self._now_s,
            step=self._kept.step or 0,
            bad_step=bad_step,
            link=link,
            course=course,
            returned=returned,
            before=self._recovery,
        )
        self._enter("waiting" if self.awaited else "moving", self._nodes)
        self._commands += self._recovery.halt()
        if not lost:
            self._recovery.place(self._required_migration.plan, self._required_migration.part.placement)
        return self._recovery

    def _find_placement(self, recovery: Recovery) -> None:
        """Search a placement on the present nodes, unless a node is awaited."""
        if self.awaited:
            if self._drain_reason:
                self._fail("InterruptedRunError", self._drain_reason)
                return
            if self.phase != "waiting":
                self._enter("waiting", self._nodes)
            self._commands.append(self.awaited.told())
            self._set_deadline()
            return
        if self.phase == "waiting":
            self._enter("moving", self._nodes)
        if not self._kept.step:
            self._kept.begin(StartPoint.of(self._course).holder)
        part = self._required_migration.part
        if recovery.back and recovery.course is None and set(part.nodes) <= set(self._nodes):
            recovery.place(self._required_migration.plan, part.placement, self._gone)  # as it was: nobody is missing
            self._next_stage(recovery)
        else:
            doubted = tuple(node for node in self._disputed.doubted if self._course.owner(node) is None)
            self._commands.append(recovery.find_placement(part, tuple(sorted(self._gone)), doubted))

    def _on_answer(self, recovery: Recovery, event: rd.Event) -> None:
        """Take a node's answer or the placement; move after all have stopped, train after all have moved."""
        match event:
            case rd.MoveFailed(node, placement_number, error, message) if placement_number == recovery.placement_number:
                holder = event.holder
                is_disputed = holder in self._nodes and recovery.has_one_source(node, holder, self._kept)
                if is_disputed and (first := self._disputed.take(node, holder)):
                    problem = f"{message}; node {first} has said so of node {holder} too"
                    self._go_on_without(rd.NodeFailed(holder, PeerLostError.__name__, problem))
                    return
                if error not in _UNREACHED and node in recovery.returned:  # the others go on without it
                    self._on_node_failed(rd.NodeFailed(node, PeerLostError.__name__, message))
                    return
                if error not in _UNREACHED:
                    self._go_on_without(rd.NodeFailed(node, error, message))
                    return
                is_there = error != PeerLostError.__name__  # else its lease says soon that it is lost
                broken = self._broken_link if recovery.link and is_there else None
                if broken is not None and node in broken.ends:
                    self._lose_an_end(broken)
                    return
                recovery.problem = message  # the node that it misses will be missed by all, or time runs out
                recovery.stuck[node] = self._unreached_by(event)
            case rd.NoPlacementFound(placement_number, error, message) if placement_number == recovery.placement_number:
                if self._disputed.doubted:
                    self._disputed.trust()
                    self._find_placement(recovery)
                    return
                lost = [node for node in recovery.lost if node not in self.excluded]  # others are not waited for
                remedy = RESUME if lost else WITH_ROOM
                problem = f"node {', '.join(recovery.lost)} is {'lost' if lost else 'left out'}, and {message}"
                lost = [node for node in lost if node in self._gone]
                if not recovery.is_old and (failed := self._own.of(lost)) is not None:  # not awaited: it is there
                    raise error_from_name(failed.error, f"{failed.message}; {problem}; {RESUME}")
                if not recovery.is_old and not self.awaited.for_room(error, problem, lost, self._now_s):
                    raise error_from_name(error, f"{problem}; {remedy}")
                self._find_placement(recovery)
                return
            case rd.PlacementFound(placement_number, placement) if placement_number == recovery.placement_number:
                recovery.place(self._required_migration.plan, placement, self._gone)
            case rd.Halted(node, placement_number) | rd.Moved(node, placement_number) if (
                placement_number == recovery.placement_number
            ):
                recovery.answered(node, event)
            case _:
                return
        self._next_stage(recovery)

    def _unreached_by(self, event: rd.MoveFailed) -> str:
        """Note and return the node to which one can't open a link; empty = it names none, or has cost a node before."""
        node, peer = event.node, event.lost
        if peer not in self._nodes or peer == node or self._openings.has_cost([node], peer):
            return ""
        self._unopened.note(node, peer)
        return peer

    def _next_stage(self, recovery: Recovery) -> None:
        """Send all to the placement once they have stopped; train once they have moved."""
        self._set_deadline()
        if recovery.may_move:
            self._commands += recovery.move(self._kept, self._required_grants.last, self._required_grants.repeats)
        elif recovery.has_moved:
            self._end_recovery(recovery)

    def _end_recovery(self, recovery: Recovery) -> None:
        """Train from the committed turn, in the placement to which all have moved."""
        plan, moving, grants = recovery.moved_to, self._required_migration, self._required_grants
        before = self._required_migration.plan.course
        self._recovery = None
        self.awaited.end()
        self._disputed.trust()
        for node, sources in recovery.sources.items():
            self._kept.fetched(node, sources)
        if recovery.step:
            self._kept.fetched_head(recovery.moved_at.holder)
        moving.recover(plan, recovery.step, self._kept.decided)
        self._commands.append(recovery.log(before, plan, self._now_s))
        self._before = grants.last
        if recovery.course is None:
            self._commands += grants.rewind(moving.part)
        else:
            self._log.forget_shown()
            grants.change_owners(plan, moving.part, recovery.moved_at)
        if grants.last is not None:
            self._bad.note_rewind(grants.last.index)
        self._train_on()

    # ---- training ---------------------------------------------------------------------------------

    def _grant_ahead(self) -> None:
        grants = self._required_grants
        can_go_back = self._kept.step is not None and not self._kept.missing
        takes_back = can_go_back or self._course.method.full_parameters
        grants.holds = takes_back and any(node in self._nodes for node in self._returned)
        commands = grants.ahead()
        if any(isinstance(command, rd.ChooseOperations) for command in commands):
            self._set_deadline()
        self._commands += commands
        self._move_if_due()
        self._collect_best()

    def _on_step(self, event: rd.StepReported) -> None:
        grants = self._grants
        turn = grants.open.of_item(event.seq) if grants else None
        if grants is None or turn is None:
            return
        try:
            is_new = grants.open.item_done(turn, event)
        except IntegrityError as error:
            self._go_on_without(rd.NodeFailed(event.node, type(error).__name__, str(error)))
            return
        if not is_new:
            return
        self._set_deadline()
        self._commands.append(rd.LogStep(turn, event.seq, event.step, grants.depth(turn, event.step), event.values))
        if turn.kind.evaluates:
            self._evaluation.note(event.seq, event.values)
        grants.depths.note(turn, event.seq, event.values)
        self._grant_ahead()
        self._close_turns()  # a node's last word of a turn may come before the owner's last loss

    def _on_turn_done(self, event: rd.TurnReported) -> None:
        grants = self._grants
        turn = grants.open.get(event.turn) if grants else None
        if grants is None or turn is None or not grants.open.waits_for(event.node, turn):
            return
        try:
            grants.copies.check(event.node, turn, event.copies)
            grants.tables.note(event.node, turn, event.scores)
        except (IntegrityError, DivergedError) as error:
            self._on_node_failed(rd.NodeFailed(event.node, type(error).__name__, str(error)))
            return
        grants.copies.note(event.node, turn, event.copies)
        if self._goes_back:
            self._kept.note(event.node, turn.index, event.kept)
        self._set_deadline()
        grants.open.node_done(event.node, turn)
        self._close_turns()

    def _on_operations(self, event: rd.OperationsChosen) -> None:
        commands = self._required_grants.chosen(event.step, event.operations)
        self._commands += commands
        if commands and self.phase == "training":
            self._set_deadline()
            self._grant_ahead()

    def _close_turns(self) -> None:
        """Close done turns in order, so that the log is complete up to each."""
        grants = self._required_grants
        while (oldest := grants.open.oldest) is not None:
            turn = oldest.turn
            if oldest.waits_for or not grants.depths.is_complete(turn):
                break
            if self._audits and turn.kind is StepKind.TRAIN and self._checked != turn.index:
                if self._checking != turn.index:
                    self._checking, self._checkers = turn.index, ()
                    self._commands.append(rd.CheckTurn(turn))
                break
            grants.close(turn)
            self._commands.append(rd.LogTurn(turn))
            unfreezing, evaluations = grants.depths.unfreezing, grants.stopping.settled
            if turn.kind is StepKind.TRAIN:
                self.joins.end_turn()
            if turn.kind is StepKind.TRAIN and self._required_migration.part.goes_back:
                self._commands.append(rd.LogKept(turn.end_step, turn.owner, unfreezing, evaluations))
            if turn.kind is StepKind.CHECKPOINT:
                self._commands.append(
                    rd.LogCheckpoint(turn.first_step, turn.owner, unfreezing, turn.operations, evaluations)
                )
            self._grant_ahead()
            if turn.kind.evaluates:
                sums = self._evaluation.close(turn, self._required_migration.plan.course)
                self._commands += grants.judge(turn.end_step, sums) if sums is not None else []
                if sums is not None and self.phase == "training":
                    self._grant_ahead()
        self._end_training()

    def _on_checked(self, event: rd.TurnChecked) -> None:
        """Close a turn that was checked; or go on from the turn before it, without the node that computed otherwise."""
        if self._grants is None or self._grants.open.get(event.turn) is None:
            return  # the run goes back anyway
        self._set_deadline()
        if not event.nodes:
            self._checked = event.turn
            self._close_turns()
            return
        self._log.forget_held()
        lost = event.nodes[0]
        if len(event.nodes) > 1:
            remedy = "one of both is wrong: train on with --resume without the one that you trust less"
            self._fail(IntegrityError.__name__, f"{event.problem}; {remedy}")
        elif self._course.owner(lost) is not None and not self._policy.leaves_out:
            remedy = "it owns rows: remove it and train anew, or set recovery.owners = 'skip'"
            self._fail(IntegrityError.__name__, f"{event.problem}; {remedy}")
        else:
            self.excluded.add(lost)
            self._on_node_failed(rd.NodeFailed(lost, PeerLostError.__name__, event.problem))

    def _end_training(self) -> None:
        """Collect, or end a drained run, once every turn is closed; a resumed run may have none."""
        grants = self._required_grants
        if grants.open or not grants.is_exhausted:
            return
        if self._drain_reason:
            self._fail("InterruptedRunError", self._drain_reason)
        else:
            self._collect()

    def _drain(self, reason: str) -> None:
        """Let the granted turns end, then save; a resumed run does the rest.

        Where no open turn trains or saves, the run ends at once: a resumed run repeats scores and evaluations.
        """
        last = self._grants.last if self._grants else None
        if self.phase == "moving" and last is not None and not self._drain_reason:
            self._drain_reason = reason  # once the move is over
            return
        if self.phase != "training" or last is None or self._drain_reason:
            self._fail("InterruptedRunError", reason)
            return
        self._drain_reason = reason
        self._commands += self._required_grants.drain(last)
        if not self._required_grants.open.change_anything:
            self._fail("InterruptedRunError", reason)
            return
        self._end_training()  # no turn may be open while a table is chosen

    def _collect(self) -> None:
        self._enter("collecting", self._required_migration.part.nodes)
        best = self.best if self._required_migration.plan.course.method.full_parameters else None
        step = best.best_step if best and best.best_step != self.last_step else 0
        placement = self._required_migration.part.placement
        for node, with_head, with_private in self._senders(is_best=step > 0):
            keeps = with_head or collected_blocks(placement, node)  # who has nothing to send may not have kept it
            self._commands.append(rd.Collect(node, with_head, with_private, best_step=step if keeps else 0))

    def _senders(self, *, is_best: bool) -> list[tuple[str, bool, bool]]:
        """(node, sends the head, sends private blocks) of every node; the owner with the head sends both.

        Where all parameters train, every owner has the head, and the one that keeps that of a best result sends it.
        """
        part, holder = self._required_migration.part, self._holder
        if is_best and part.course.method.full_parameters:
            holder = self._required_grants.stopping.evaluations.head_at or part.course.owners[0].node
        has_private = part.placement.private_blocks > 0
        return [(node, node == holder, node == holder and has_private) for node in part.nodes]

    @property
    def _holder(self) -> str:
        """The owner with the head after the last turn, or after the committed turn if a recovery ended the training."""
        last = self._required_grants.last
        if last is not None and last is self._before:
            return self._kept.holder
        return last.owner if last else (self._start_point or StartPoint.of(self._required_migration.plan.course)).holder

    # ---- best result ------------------------------------------------------------------------------

    @property
    def best(self) -> Evaluations | None:
        """State of the evaluations; None where no best result is kept or none exists."""
        evaluations = self._grants.stopping.evaluations if self._grants and self._keeps_best else None
        return evaluations if evaluations and evaluations.best is not None else None

    @property
    def last_step(self) -> int:
        """Number of steps after the last granted turn."""
        last = self._grants.last if self._grants else None
        return last.end_step if last else self._start_point.step if self._start_point else 0

    @property
    def _asked_for_best(self) -> Collection[str]:
        return self._grants.stopping.asked if self._grants else ()

    def _collect_best(self) -> None:
        """Ask every node for the best result, once no turn is open; the last turn is collected anyway."""
        grants = self._required_grants
        stopping = grants.stopping
        if stopping.wanted is None or grants.is_exhausted or self._drain_reason:
            return
        if stopping.asked or grants.open or self.phase != "training":
            return
        senders = self._senders(is_best=True)
        number = stopping.ask(node for node, _, _ in senders)
        for node, with_head, with_private in senders:
            self._commands.append(rd.CollectBest(node, stopping.wanted, number, with_head, with_private))
        self._set_deadline()

    def _on_best_sent(self, event: rd.BestSent) -> None:
        if event.node in self._asked_for_best:
            self._set_deadline()
        stopping = self._grants.stopping if self._grants else None
        if stopping is not None and stopping.sent(event.node, event.number):
            self._commands.append(rd.LogBest(stopping.evaluations.best_step, event.number))
            self._grant_ahead()

    # ---- the end ----------------------------------------------------------------------------------

    def _release(self, reason: str) -> None:
        self._commands += [rd.Release(node, reason) for node in self._nodes]

    def _fail(self, error: str, message: str) -> None:
        if self.phase in ("done", "failed"):
            return
        self._release(message)
        self._end("failed", error, message)

    def _end(self, phase: str, error: str = "", message: str = "") -> None:
        self.phase = phase
        self._commands += [CancelTimer(PHASE_TIMER), rd.EnterPhase(phase), rd.Finish(error, message)]

    @property
    def _late(self) -> list[str]:
        """The nodes for which a phase waits, sorted.

        Neighbours of a node that sends nothing complain before the deadline: a host alone has not said that it is done.
        An owner without blocks may wait for the first tensor of its turn, and does not complain.
        """
        if self.phase != "training":
            return sorted(self._waiting)
        grants = self._required_grants
        oldest = grants.open.oldest
        if self._asked_for_best or oldest is None:
            return sorted(self._asked_for_best)
        if oldest.turn.index == self._checking:  # nobody is late with the turn itself
            return sorted(self._checkers)
        return sorted(oldest.waits_for) or [oldest.turn.owner] * (not grants.depths.is_complete(oldest.turn))

    @property
    def _overdue(self) -> str:
        limit_s = PATIENCE * self._wait_s
        if self.phase == "planning":
            return f"planning took more than {limit_s + self._plan_s:g} s; lower runtime.plan_s or ask for less"
        if self.phase != "training":
            return f"waited {limit_s:g} s in phase {self.phase} for node {', '.join(self._late)}"
        if self._asked_for_best:
            return f"waited {limit_s:g} s for the result of the best evaluation from node {', '.join(self._late)}"
        oldest = self._grants.open.oldest if self._grants else None
        if oldest is None:
            took = f"took more than {limit_s + self._plan_s:g} s; raise runtime.plan_s"
            return f"choosing operations for step {self._chooses_for} {took}"
        turn, nodes = oldest.turn, ", ".join(self._late) or oldest.turn.owner
        where = f"turn {turn.index} of node {turn.owner} (from step {turn.first_step})"
        verb = "checked" if turn.index == self._checking else "done"
        return f"waited {limit_s:g} s for {where}: not {verb} by {nodes}"
