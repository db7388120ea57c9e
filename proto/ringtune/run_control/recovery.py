"""Recovery of a run on the coordinator: after a lost host, after a bad step, and the wait for a node.

::

    training -- a host is lost --> halting -----------> moving -------> training, from the last committed turn on
                                  all others stop,     all load what
                                  a placement without  was kept then
                                  it is found

A turn is *committed* when every node has done it and keeps what it has trained, at two places. At most two turns are
granted, so a node needs to keep three: the committed one, and those that it may have done since. A turn is logged when
it is committed, so that no repeated turn is logged twice; progress is shown at once, and once.

After a bad step, one with a loss, hidden state, gradient or weight that is not finite, all stop and go back in the same
way, in the placement that they have. No node applies an update that it sees to be bad; others may have applied theirs
by then, so every turn since the last committed one is done once more::

    turn        0          1          2  (bad)
    committed   yes        no         no        all go back to the end of turn 0
    again                  3          4         bad once more, in 3 or 4: the run ends

A transient fault, as of a memory chip, leaves no trace: the result is that of the undisturbed run. A step that is bad
again is a fault of the training and would repeat for ever. Once turn 4 is committed, another bad step has a second try
of its own.

Where the run can't continue without a node, an owner of rows or any node with room for what is left, it waits. The
others have stopped and keep what they had at the end of the last committed turn::

    halting -- an owner is lost, or nothing fits --> waiting -- it joins --> placing, moving, training
                                                        |
                                                        '-- time is up --> the run ends, resumable
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from ringtune.engine.events import SetTimer, TimerFired
from ringtune.errors import (
    CapacityError,
    ConnectionFailedError,
    DeadlineError,
    DivergedError,
    PeerLostError,
    PlanError,
    StorageError,
    error_from_name,
    needed,
)
from ringtune.run_control import events as rd
from ringtune.run_control.events import (
    AwaitNodes,
    Command,
    Halt,
    Halted,
    LogRecovery,
    Move,
    Moved,
    MoveFailed,
    NodeFailed,
    NodeJoined,
    NotPlaced,
    PlaceAgain,
    Placed,
    Replanned,
    Rested,
    ShowStep,
)
from ringtune.run_control.state_machine import PHASE_TIMER, BestKeepingRounds, Planner
from ringtune.schedule.course import Course
from ringtune.schedule.migration import KeptCopies, Source, why_it_stays, why_it_waits, without_owner
from ringtune.schedule.placement import Placement
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint, StepKind, Turn

NOTHING_KEPT: Final = "it was not done once more, because the plan keeps no turns to go back to (recovery.copies)"


def is_bad_step(event: NodeFailed) -> bool:
    """Whether a node tells of numbers that are not finite."""
    return event.error == DivergedError.__name__ and not event.lost


class BadSteps:
    """The turns of one run that are repeated because of a bad step."""

    def __init__(self) -> None:
        self._is_going_back = False
        self._committed = self._last_again = -1

    def commit(self, index: int) -> None:
        """Note that every turn up to this one is committed."""
        self._committed = index

    def why_it_ends(self, step: int | None) -> str:
        """Why a run does not go back because of a bad step; empty if it does.

        Args:
            step: to whose end it would go back; None = to none.
        """
        if step is None:
            return "no turn has ended since the run was resumed or loaded, so there is nothing to go back to"
        if self._committed < self._last_again:
            return f"the steps after step {step} were done a second time because of it, and it came again"
        return ""

    def go_back(self) -> None:
        """All nodes go back because of a bad step."""
        self._is_going_back = True

    def went_back(self, last: int) -> None:
        """Note up to which turn everything is done again, of whatever reason all went back."""
        if self._is_going_back or self._committed < self._last_again:
            self._last_again = last
        self._is_going_back = False


RESUME: Final = "start it again and --resume the run"
_OF_ROOM: Final = (CapacityError.__name__, StorageError.__name__)


class Waiting:
    """The nodes that one recovery waits for, with deadlines; true while there is one.

    Args:
        wait_s: longest time to wait for a node, in seconds; 0 = for none.
    """

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        self._owners: dict[str, float] = {}
        self._lost: tuple[str, ...] = ()
        self._problem = self._error = ""
        self._room_until_s: float | None = None

    def __bool__(self) -> bool:
        """Whether any node is awaited."""
        return bool(self._owners or self._problem)

    @property
    def owners(self) -> tuple[str, ...]:
        """The owners that are awaited, sorted."""
        return tuple(sorted(self._owners))

    @property
    def needs_room(self) -> bool:
        """Whether any node is awaited that has room for what does not fit."""
        return bool(self._problem)

    @property
    def until_s(self) -> float:
        """The earliest deadline; on the clock of the state machine."""
        room = [self._room_until_s] if self._problem and self._room_until_s is not None else []
        return min([*self._owners.values(), *room])

    # ---- what happens -----------------------------------------------------------------------------

    def for_owner(self, node: str, now_s: float) -> None:
        """Wait for an owner that is lost just now."""
        self._owners[node] = now_s + self.wait_s

    def for_room(self, error: str, problem: str, lost: Iterable[str], now_s: float) -> bool:
        """Wait for any node because nothing fits; False if that was waited for long enough, or no node would help.

        Args:
            error: class of the error with which the run would end.
            problem: why nothing fits.
            lost: who is lost.
            now_s: the time.
        """
        if error not in _OF_ROOM:
            return False
        if self._room_until_s is None:
            self._room_until_s = now_s + self.wait_s
        if now_s >= self._room_until_s:
            return False
        self._error, self._problem, self._lost = error, problem, tuple(lost)
        return True

    def came(self, node: str) -> None:
        """Note that a node has joined: one owner less is awaited, and there may be room."""
        self._owners.pop(node, None)
        self._problem = ""

    def end(self) -> None:
        """Wait for no node any more: the run continues."""
        self._owners, self._problem, self._room_until_s = {}, "", None

    # ---- what is said -----------------------------------------------------------------------------

    @property
    def awaited(self) -> tuple[str, ...]:
        """The names of all that are awaited: owners, and hosts of blocks that there is no room for."""
        return tuple(dict.fromkeys((*self.owners, *(self._lost if self._problem else ()))))

    @property
    def why(self) -> str:
        """The reason why the run can't continue without them."""
        owns = "own" if len(self._owners) > 1 else "owns"
        parts = [f"{', '.join(self.owners)} {owns} rows, which no other node has"] if self._owners else []
        return "; ".join([*parts, self._problem] if self._problem else parts)

    def told(self) -> AwaitNodes:
        """The text for people."""
        others = "; another node with room does as well" if self._problem else ""
        return AwaitNodes(self.awaited, self.why + others, self.until_s)

    def late(self) -> tuple[str, str]:
        """The class and the message of the error with which the run ends when time is up."""
        waited = f"waited {self.wait_s:g} s (recovery.wait_s) for node {', '.join(self.awaited)}"
        error = PeerLostError.__name__ if self._owners else self._error
        return error, f"{waited}: {self.why}; {RESUME}"


class Recovery:
    """A recovery that is under way.

    Args:
        placement_number: of the next placement; no recovery that was given up had it.
        lost: nodes that are lost since it began, or the one that it follows.
        nodes: all that live.
        began_s: when the first of them was lost.
        step: to whose end the run goes back.
        bad_step: what was not finite, if the run goes back because of that.
        course: of the run from then on, if owners are left out of it; None = it stays.
        back: those of ``lost`` that have returned.

    Attributes:
        start: where the nodes continue, once they are sent there.
        plan: with the placement that was found; None while it is searched.
        sources: the blocks that nodes take over.
        problem: why a node can't move, while it may be that another one is lost.
        is_old: whether a node has joined since the last search for a placement.
    """

    def __init__(
        self,
        *,
        placement_number: int,
        lost: tuple[str, ...],
        nodes: tuple[str, ...],
        began_s: float,
        step: int,
        bad_step: str = "",
        course: Course | None = None,
        back: tuple[str, ...] = (),
    ) -> None:
        self.back = back
        self.placement_number, self.lost, self.began_s, self.step, self.bad_step = (
            placement_number,
            lost,
            began_s,
            step,
            bad_step,
        )
        self.course = course
        self.plan: Plan | None = None
        self.start: StartPoint | None = None
        self.sources: dict[str, tuple[Source, ...]] = {}
        self.problem, self.is_old = "", False
        self._nodes, self._waiting = nodes, set(nodes)
        self._moves = False
        self._bytes: dict[str, int] = {}

    def halt(self) -> list[Command]:
        """Let every living node stop."""
        return [Halt(node, self.placement_number) for node in self._nodes]

    def look(self, part: Plan, gone: tuple[str, ...]) -> Command:
        """Look for a placement without all that are gone."""
        self.is_old = False
        asked = part if self.course is None else Plan(self.course, part.placements)
        return PlaceAgain(self.placement_number, asked, gone, self.step)

    def join(self, node: str) -> None:
        """Add a node that has joined: it is sent where all are sent, unless they are on their way already."""
        if not self._moves:
            self._nodes, self.is_old = (*self._nodes, node), True
        if node in self.lost:
            self.back = (*self.back, node)

    def answered(self, node: str, answer: Halted | Moved) -> None:
        """Note that a node has stopped, or moved; an answer to another question changes nothing."""
        if isinstance(answer, Moved) is not self._moves or node not in self._waiting:
            return
        self._waiting.discard(node)
        if isinstance(answer, Moved):
            self._bytes[node] = answer.fetched_bytes

    @property
    def may_move(self) -> bool:
        """Whether all have stopped, and there is a placement to which no node was sent yet."""
        return not self._moves and not self._waiting and self.plan is not None

    @property
    def has_moved(self) -> bool:
        """Whether all have moved."""
        return self._moves and not self._waiting

    @property
    def moved_to(self) -> Plan:
        """The plan with the placement that was found."""
        return needed(self.plan, "a recovery needs a placement and there is none")

    @property
    def moved_at(self) -> StartPoint:
        """The point where the nodes that were sent continue."""
        return needed(self.start, "a recovery sends its nodes somewhere and has sent nobody")

    def move(self, kept: KeptCopies, last: Turn | None, repeats: tuple[StepKind, ...]) -> list[Command]:
        """Send every living node to the placement; one without a place in it only stops.

        Args:
            kept: who keeps what.
            last: the turn that was granted last; None = there is none.
            repeats: kinds of turns that are repeated before the next train turn.
        """
        part = self.moved_to.parts[-1]
        if self.course is not None and self.course.checkpoint_every and self.step:
            repeats = tuple(dict.fromkeys((StepKind.CHECKPOINT, *repeats)))  # those before have an owner more
        owns = part.owner(kept.owner) is not None and kept.owner in self._nodes
        start = StartPoint(
            step=self.step,
            holder=kept.owner if owns else kept.holder,
            first_turn=last.index + 1 if last else 0,
            first_seq=last.end_seq if last else 0,
            placement_number=self.placement_number,
            repeats=repeats,
        )
        self._moves, self._waiting, self.start = True, set(part.nodes), start
        self.sources = {node: kept.sources(part.placement, node) for node in part.nodes}
        heads = {start.holder: kept.head_source(start.holder)}
        return [
            Move(node, part, start, self.placement_number, self.sources.get(node, ()), self.step, heads.get(node, ""))
            for node in self._nodes
        ]

    def log(self, plan: Plan, now_s: float) -> LogRecovery:
        """The log entry once all have moved."""
        fetched = tuple(sorted(self._bytes.items()))
        out = tuple(one.owner.node for one in plan.course.left_out if one.owner.node in self.lost)
        part, seconds = plan.parts[-1], now_s - self.began_s
        return LogRecovery(self.step, self.lost, plan, part, seconds, fetched, self.bad_step, out, self.back)

    def overdue(self, wait_s: float) -> str:
        """Say for what the coordinator has waited too long."""
        if self._waiting:
            what = "to move" if self._moves else "to stop"
            why = "a node was lost" if self.lost else "a bad step"
            text = f"waited {wait_s:g} s for node {', '.join(sorted(self._waiting))} {what} after {why}"
        else:
            text = f"waited {wait_s:g} s for a placement without node {', '.join(self.lost)}"
        return f"{text}: {self.problem}" if self.problem else text


_RECOVERS_IN = ("preparing", "training", "moving", "waiting", "collecting")
_UNREACHED = (PeerLostError.__name__, ConnectionFailedError.__name__, DeadlineError.__name__, "FrameError")


class RecoveringRounds(BestKeepingRounds):
    """``BestKeepingRounds`` with recovery where nodes keep copies of what they have trained; that alone where not.

    Args:
        planner: as for ``Rounds``, as are the others.
        begins_anew: whether the weights at step 0 are those that every node makes by itself.
        leaves_out: whether the run continues without a lost owner, and without its rows.
        awaits_s: longest time to wait for a node that the run can't continue without, in seconds; 0 = it ends at once.
        rounds: further arguments of ``Rounds``.
    """

    def __init__(
        self,
        planner: Planner | None,
        *,
        begins_anew: bool = True,
        leaves_out: bool = False,
        awaits_s: float = 0.0,
        **rounds: Any,
    ) -> None:
        super().__init__(planner, **rounds)
        self._begins_anew, self._leaves_out = begins_anew, leaves_out
        self.awaited = Waiting(awaits_s)
        self._kept = KeptCopies()
        self._held: list[rd.Command] = []
        self._shown: set[tuple[StepKind, str, int, int]] = set()
        self._recovery: Recovery | None = None
        self._bad = BadSteps()
        self._gone: set[str] = set()
        self._newest_placement_number = 0
        self._before: Turn | None = None  # the last turn that was granted before the last recovery

    def handle(self, event: rd.Event, now_s: float) -> list[rd.Command]:
        """Take one event; log entries of turns follow when they are committed."""
        commands = super().handle(event, now_s)
        if not self._keeps_copies:
            return commands
        passed: list[rd.Command] = []
        for command in commands:
            self._pass_on(command, passed)
        return passed

    @property
    def _keeps_copies(self) -> bool:
        return self.plan is not None and self.plan.placement.copies

    # ---- what is logged when ----------------------------------------------------------------------

    def _pass_on(self, command: rd.Command, passed: list[rd.Command]) -> None:
        match command:
            case rd.LogStep(turn, seq):
                self._held.append(command)
                item = _item_of(turn, seq)
                if item not in self._shown:
                    self._shown.add(item)
                    passed.append(ShowStep(*command))
            case rd.LogTurn():
                self._held.append(command)
                if command.turn.kind is not StepKind.EVALUATE:
                    self._commit(command, passed)
            case rd.LogEvaluation():
                ended = [each for each in self._held if isinstance(each, rd.LogTurn)]
                if ended:
                    self._commit(ended[-1], passed)
                passed.append(command)
            case rd.Finish():
                passed += [*self._held, command]
                self._held = []
            case _:
                passed.append(command)

    def _commit(self, ended: rd.LogTurn, passed: list[rd.Command]) -> None:
        """Log the held entries of the turns up to this one, and never go back to them."""
        index = ended.turn.index
        committed = [each for each in self._held if _turn_of(each) <= index]
        self._shown.difference_update(
            _item_of(each.turn, each.seq) for each in committed if isinstance(each, rd.LogStep)
        )
        passed += committed
        self._held = [each for each in self._held if _turn_of(each) > index]
        self._made_granting.commit(index)
        self._bad.commit(index)
        if ended.turn.kind is StepKind.TRAIN:
            self._kept.commit(self._made_plan.course, self._made_moving.part.placement, ended.turn)

    # ---- events -----------------------------------------------------------------------------------

    def _dispatch(self, event: rd.Event, now_s: float, commands: list[rd.Command]) -> None:
        recovery = self._recovery
        match event:
            case Halted() | Placed() | NotPlaced() | Rested() | Moved() | MoveFailed() if recovery:
                self._on_answer(recovery, event, now_s, commands)
            case Halted() | Placed() | NotPlaced():
                return
            case NodeJoined(node):
                self._on_joined(node, now_s, commands)
            case Replanned(placement) if any(piece.node in self._gone for piece in placement.slices):
                return
            case TimerFired() if self.awaited:
                self._fail(*self.awaited.late(), commands)
            case TimerFired() if recovery is not None:
                raise DeadlineError(f"{recovery.overdue(self._wait_s)}; {RESUME}")
            case _:
                super()._dispatch(event, now_s, commands)

    def _on_plan(self, plan: Plan, start: StartPoint | None, now_s: float, commands: list[rd.Command]) -> None:
        """Refuse a plan in which nodes keep copies and that can't move to another placement."""
        if not plan.placement.copies:
            super()._on_plan(plan, start, now_s, commands)
            return
        if why := why_it_stays(plan.course, plan.placements):
            raise PlanError(f"the run can't go on without a lost node: {why}; set recovery.copies = 'none'")
        self._items_ahead = 0
        super()._on_plan(plan, start, now_s, commands)
        if self.phase == "preparing" and self._start_point is None and self._begins_anew:
            self._kept.begin(StartPoint.of(plan.course).holder)  # the first turn to which the run can go back

    def _on_node_failed(self, event: rd.NodeFailed, now_s: float, commands: list[rd.Command]) -> None:
        """Continue without a lost host, if another node keeps what it has trained; go back after a bad step."""
        if is_bad_step(event):
            self._on_bad_step(event, now_s, commands)
            return
        lost = event.lost or event.node
        if lost in self._gone or (event.lost and self._recovery is not None):
            return  # nodes that stop are missed by others; who is really lost does not answer
        moving, is_lost = self._moving, event.error == PeerLostError.__name__
        if moving is None or not is_lost or not self._keeps_copies or self.phase not in _RECOVERS_IN:
            super()._on_node_failed(event, now_s, commands)
            return
        if self._recovery is None and lost not in moving.part.nodes:
            self._gone.add(lost)
            self._kept.lose(lost)
            super()._on_node_failed(rd.NodeFailed(lost, event.error, event.message), now_s, commands)
            return
        problem = self._why_it_ends(lost)
        if problem:
            self._fail(event.error, f"{event.message}; {problem}", commands)
            return
        self._recover(lost, event.message, now_s, commands)

    def _why_it_ends(self, lost: str) -> str:
        """The reason why the run can't continue without a node; empty if it can."""
        if self._course.owner(lost) is not None and not self.awaited.wait_s:
            if not self._leaves_out:
                return f"{lost} owns rows, which no other node has; {RESUME}, or set recovery.owners = 'skip'"
            if why := why_it_waits(self._course, lost):
                return f"the run can't leave out the rows of {lost}: {why}; {RESUME}"
        self._kept.lose(lost)
        if self._kept.step is None:
            return f"no turn has ended since the run was resumed or loaded, so nothing is kept yet; {RESUME}"
        if missing := self._kept.missing:
            return f"no living node keeps what was trained of {_blocks(missing)}; {RESUME}"
        if self._kept.step and not self._kept.holder:
            return f"no living node keeps the head as it was after step {self._kept.step}; {RESUME}"
        return ""

    @property
    def _course(self) -> Course:
        """The course of the run, or the one with which it continues after the recovery under way."""
        found = self._recovery.course if self._recovery else None
        return found or self._made_plan.course

    def _on_bad_step(self, event: rd.NodeFailed, now_s: float, commands: list[rd.Command]) -> None:
        """Do the turns that are not committed once more, unless they are done for the second time already."""
        if self._recovery is not None:
            return  # all go back anyway
        if self.phase != "training":
            super()._on_node_failed(event, now_s, commands)
            return
        problem = self._bad.why_it_ends(self._kept.step) if self._keeps_copies else NOTHING_KEPT
        if problem:
            self._held = []  # what came since the committed turn may be of the bad step
            self._fail(event.error, f"{event.message}; {problem}", commands)
            return
        self._bad.go_back()
        recovery, placement = self._go_back((), event.message, now_s, commands), self._made_moving.part.placement
        recovery.plan = self._made_plan.extended(
            placement, self._turns_kept(recovery.step), placement_number=recovery.placement_number
        )
        commands += recovery.halt()

    # ---- recovery ---------------------------------------------------------------------------------

    def _recover(self, lost: str, message: str, now_s: float, commands: list[rd.Command]) -> None:
        """Let all other nodes stop, and search a placement without the one that is lost."""
        self._gone.add(lost)
        self._nodes = tuple(node for node in self._nodes if node != lost)
        commands.append(rd.Release(lost, message))
        course = self._recovery.course if self._recovery else None
        if self._course.owner(lost) is not None:
            if self._leaves_out and not why_it_waits(self._course, lost):
                course = without_owner(self._course, lost, self._turns_kept(self._kept.step or 0))
            else:
                self.awaited.for_owner(lost, now_s)
        recovery = self._go_back((lost,), "", now_s, commands, course)
        commands += recovery.halt()
        self._look(recovery, now_s, commands)

    def _look(self, recovery: Recovery, now_s: float, commands: list[rd.Command]) -> None:
        """Search a placement on the present nodes, once no other is awaited."""
        if self.awaited:
            if self._drain_reason:
                self._fail("InterruptedRunError", self._drain_reason, commands)
                return
            if self.phase != "waiting":
                self._enter("waiting", now_s, commands, self._nodes)
            commands.append(self.awaited.told())
            self._set_deadline(now_s, commands)
            return
        if self.phase == "waiting":
            self._enter("moving", now_s, commands, self._nodes)
        if not self._kept.step:
            self._kept.begin(StartPoint.of(self._course).holder)
        part = self._made_moving.part
        if recovery.back and recovery.course is None and set(part.nodes) <= set(self._nodes):
            self._placed(recovery, part.placement)  # as it was: nobody is missing
            self._move_on(recovery, now_s, commands)
        else:
            commands.append(recovery.look(part, tuple(sorted(self._gone))))

    def _on_joined(self, node: str, now_s: float, commands: list[rd.Command]) -> None:
        """Let placements have a node; continue a run that waited for it, or for any node with room."""
        if self._moving is None or self.phase not in _RECOVERS_IN or node in self._nodes:
            return
        self._gone.discard(node)
        self._nodes = (*self._nodes, node)
        self._moving.join(node)
        if self._recovery is None:
            return
        self._recovery.join(node)
        if self.awaited:
            self.awaited.came(node)
            self._look(self._recovery, now_s, commands)

    def _set_deadline(self, now_s: float, commands: list[rd.Command]) -> None:
        if self.awaited:
            commands.append(SetTimer(PHASE_TIMER, self.awaited.until_s))
        else:
            super()._set_deadline(now_s, commands)

    def _go_back(
        self,
        lost: tuple[str, ...],
        bad_step: str,
        now_s: float,
        commands: list[rd.Command],
        course: Course | None = None,
    ) -> Recovery:
        """Begin to bring all living nodes back to the end of the committed turn, in a placement of its own."""
        before = self._recovery
        self._granting = self._granting or self._new_granting()
        self._newest_placement_number = (
            max(self._newest_placement_number, *(one.placement_number for one in self._made_plan.placements)) + 1
        )
        self._held = []
        self._evaluation.forget()
        self._made_moving.recover(None, 0, ())
        self._made_granting.halt()
        self._recovery = Recovery(
            placement_number=self._newest_placement_number,
            lost=tuple(dict.fromkeys((*(before.lost if before else ()), *lost))),
            nodes=self._nodes,
            began_s=before.began_s if before else now_s,
            step=self._kept.step or 0,
            bad_step=bad_step or (before.bad_step if before else ""),
            course=course,
            back=tuple(node for node in before.back if node not in lost) if before else (),
        )
        self._enter("waiting" if self.awaited else "moving", now_s, commands, self._nodes)
        return self._recovery

    def _turns_kept(self, step: int) -> int:
        """How many train turns the first so many steps are."""
        return -(-step // self._made_plan.course.local_iterations)

    def _on_answer(self, recovery: Recovery, event: rd.Event, now_s: float, commands: list[rd.Command]) -> None:
        """Take a node's answer, or the placement; move once all have stopped, and train once all have moved."""
        match event:
            case MoveFailed(_, placement_number, error, message) if placement_number == recovery.placement_number:
                if error not in _UNREACHED:
                    raise error_from_name(error, message)
                recovery.problem = message  # the node that it misses will be missed by all, or time runs out
            case NotPlaced(placement_number, error, message) if placement_number == recovery.placement_number:
                self._not_placed(recovery, error, message, now_s)
                self._look(recovery, now_s, commands)
                return
            case Placed(placement_number, placement) if placement_number == recovery.placement_number:
                self._placed(recovery, placement)
            case Halted(node, placement_number) | Moved(node, placement_number) if (
                placement_number == recovery.placement_number
            ):
                recovery.answered(node, event)
            case _:
                return
        self._move_on(recovery, now_s, commands)

    def _placed(self, recovery: Recovery, placement: Placement) -> None:
        plan = Plan(self._course, self._made_plan.placements)
        plan = plan.extended(placement, self._turns_kept(recovery.step), placement_number=recovery.placement_number)
        if any(node in self._gone for node in plan.parts[-1].nodes):
            raise CapacityError(f"the placement that was found has a lost node; {RESUME}")
        recovery.plan = plan

    def _not_placed(self, recovery: Recovery, error: str, message: str, now_s: float) -> None:
        """Wait for a node with room, or search again where one has joined meanwhile."""
        lost = [node for node in recovery.lost if node in self._gone]
        problem = f"node {', '.join(recovery.lost)} is lost, and {message}"
        if not recovery.is_old and not self.awaited.for_room(error, problem, lost, now_s):
            raise error_from_name(error, f"{problem}; {RESUME}")

    def _move_on(self, recovery: Recovery, now_s: float, commands: list[rd.Command]) -> None:
        """Send all to the placement once they have stopped; train once they have moved."""
        self._set_deadline(now_s, commands)
        if recovery.may_move:
            commands += recovery.move(self._kept, self._made_granting.last, self._made_granting.repeats)
        elif recovery.has_moved:
            self._go_on(recovery, now_s, commands)

    def _go_on(self, recovery: Recovery, now_s: float, commands: list[rd.Command]) -> None:
        """Train on from the committed turn, in the placement that all have moved to."""
        plan, moving, granting = recovery.moved_to, self._made_moving, self._made_granting
        self._recovery, self.plan = None, plan
        self.awaited.end()
        for node, sources in recovery.sources.items():
            self._kept.fetched(node, sources)
        if recovery.step:
            self._kept.fetched_head(recovery.moved_at.holder)
        moving.recover(plan, recovery.step, self._kept.decided)
        commands.append(recovery.log(plan, now_s))
        self._before = granting.last
        if recovery.course is None:
            commands += granting.go_back(moving.part)
        else:
            self._shown.clear()  # steps have other numbers
            granting.leave_out(plan, moving.part, recovery.moved_at)
        if granting.last is not None:
            self._bad.went_back(granting.last.index)
        self._enter("training", now_s, commands)
        if self._drain_reason:
            reason, self._drain_reason = self._drain_reason, ""
            self._drain(reason, now_s, commands)
        else:
            self._grant_ahead(now_s, commands)
            self._end_training(now_s, commands)

    @property
    def _holder(self) -> str:
        """The owner that has the head: the one that had it at the turn to which the run went back, if none follows."""
        last = self._made_granting.last
        return self._kept.holder if last is not None and last is self._before else super()._holder


def _item_of(turn: Turn, seq: int) -> tuple[StepKind, str, int, int]:
    """By what a step is known that is done again with another number."""
    return turn.kind, turn.owner, turn.first_step, seq - turn.first_seq


def _turn_of(command: rd.Command) -> int:
    return command.turn.index if isinstance(command, rd.LogStep | rd.LogTurn) else -1


def _blocks(blocks: tuple[int, ...]) -> str:
    return f"block{'s' if len(blocks) > 1 else ''} {', '.join(map(str, blocks))}"
