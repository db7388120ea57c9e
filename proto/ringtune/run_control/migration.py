"""Migration on the coordinator: moves of a run to its next placement between two turns, with prefetch of base weights.

::

    every turn is done -> resting -> moving -> training in the next placement
                             |          |
                             '----------'--> going back -> training in the former placement; the log has the reason

*Resting* nodes keep their trained tensors in memory and serve them to one another. Then each builds its next slice,
fetches the trained blocks of it from other nodes, and opens its links. No node drops kept tensors before all have
moved: where one node fails or is late, all go back to the former placement.

Nodes fetch the base weights of the next placement while the present one trains. A placement of the plan holds from its
turn on; weights that are missing then are fetched in the move. A replanned placement, found during the run, has no turn
yet: the run moves to it once every node has its weights, and does not move if a node can't get them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from ringtune.errors import DeadlineError, error_from_name
from ringtune.run_control.events import (
    Command,
    FetchAhead,
    FetchedAhead,
    LogFetched,
    LogMove,
    LogPlan,
    Move,
    Moved,
    MoveFailed,
    Replanned,
    Rest,
    Rested,
)
from ringtune.schedule.migration import due, sources
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import NOTHING_KNOWN, StartPoint, StepKind, Turn


class WeightPrefetch:
    """Prefetch of base weights, for one placement at a time."""

    def __init__(self) -> None:
        self.placement_number = -1
        self._asked: set[int] = set()
        self._found: Replanned | None = None
        self._waiting: set[str] = set()
        self._answers: list[FetchedAhead] = []

    def prefetch_next(self, plan: Plan, tried: int, lost: Collection[str]) -> list[FetchAhead]:
        """Start the prefetch for the first planned placement after number ``tried``, unless it was asked for before."""
        following = next(
            (placement.placement_number for placement in plan.placements if placement.placement_number > tried), None
        )
        if following is None or following in self._asked:
            return []
        return self._ask(plan.at(following), lost)

    def find(self, replanned: Replanned, plan: Plan) -> list[FetchAhead]:
        """Start the prefetch for the last placement of ``plan``, which the driver has found."""
        commands = self._ask(plan.at(plan.placements[-1].placement_number))
        self._found = replanned
        return commands

    def take(self, event: FetchedAhead) -> LogFetched | None:
        """Take a node's answer; return the totals with the last answer, else None."""
        if event.placement_number != self.placement_number or event.node not in self._waiting:
            return None
        self._waiting.discard(event.node)
        self._answers.append(event)
        if self._waiting:
            return None
        return LogFetched(
            event.placement_number,
            tuple((answer.node, answer.num_bytes) for answer in self._answers if answer.num_bytes),
            max(answer.seconds for answer in self._answers),
            tuple((answer.node, answer.problem) for answer in self._answers if answer.problem),
        )

    def found(self) -> Replanned | None:
        """Return the replanned placement once every node has answered, and forget it; else None."""
        if self._waiting:
            return None
        replanned, self._found = self._found, None
        return replanned

    def lose(self, node: str) -> None:
        """Drop the prefetch if a lost node has not answered yet."""
        if node in self._waiting:
            self.forget()

    def forget(self) -> None:
        """Drop the replanned placement, and ignore all later answers."""
        self._found, self._waiting, self._answers = None, set(), []

    def _ask(self, part: Plan, lost: Collection[str] = ()) -> list[FetchAhead]:
        self.forget()
        self.placement_number = part.placement.placement_number
        self._asked.add(self.placement_number)
        self._waiting = {node for node in part.nodes if node not in lost}
        return [FetchAhead(node, part) for node in part.nodes if node not in lost]


_RESTING, _MOVING, _BACK = "to rest", "to move", "to go back"


class Migration:
    """Moves of one run, and the placement that holds.

    Args:
        wait_s: time limit for all nodes together to rest, to move, or to go back.

    Attributes:
        part: of the plan that is carried out now.
        plan: of the run, with the replanned placements.
        stage: ``to rest``, ``to move`` or ``to go back``; empty between moves.
    """

    def __init__(self, plan: Plan, start: StartPoint | None, *, wait_s: float) -> None:
        self.part = plan.at(start.placement_number if start else plan.placement.placement_number)
        self._ahead = WeightPrefetch()
        self.plan, self._wait_s = plan, wait_s
        self._tried = self.part.placement.placement_number
        self._lost: set[str] = set()
        self.stage = ""
        self._waiting: set[str] = set()
        self._target, self._start = self.part, start or StartPoint.of(plan.course)
        self._decided: tuple[int, ...] = ()
        self._began_s = 0.0
        self._bytes: dict[str, int] = {}
        self._problem = ""

    def is_due(self, turn: Turn) -> bool:
        """Whether a turn belongs to a later placement that the run has not tried yet."""
        return due(self.plan.course, self.plan.placements, turn) > self._tried

    # ---- next placements --------------------------------------------------------------------------

    def prefetch_next(self) -> list[Command]:
        """Start the prefetch for the plan's next placement."""
        return [*self._ahead.prefetch_next(self.plan, self._tried, self._lost)]

    def replanned(self, event: Replanned | FetchedAhead, last: Turn | None) -> list[Command]:
        """Prefetch a replanned placement; add it to the plan from the turn after ``last``, once its nodes have it.

        It is dropped where no turn is left, a node of it is lost, or it equals the placement that holds by then.
        """
        if isinstance(event, Replanned):
            plan = self._extended(event, last)
            return [*self._ahead.find(event, plan)] if plan is not None else []
        fetched = self._ahead.take(event)
        commands: list[Command] = [fetched] if fetched is not None else []
        replanned = self._ahead.found() if fetched is not None else None
        if fetched is None or replanned is None:
            return commands
        if fetched.problems:
            said = "; ".join(problem for _, problem in fetched.problems)
            return [*commands, LogMove(last.end_step if last else 0, event.placement_number, self.part, 0.0, (), said)]
        plan = self._extended(replanned, last)
        if plan is None:
            return commands
        self.plan = plan
        return [*commands, LogPlan(plan, replanned)]

    def _extended(self, replanned: Replanned, last: Turn | None) -> Plan | None:
        course = self.plan.course
        if self._lost.intersection(replanned.placement.members):
            return None
        turn = course.turns_of(last.end_step) if last is not None else 0
        turn += last is not None and last.kind is StepKind.SCORE  # all hosts score for one table
        if not turn or turn * course.local_iterations >= course.num_steps:
            return None
        plan = self.plan.extended(replanned.placement, turn)
        before, after = plan.placements[-2:]
        if before.placement_number <= self._tried:  # the run is there, or has stayed where it was
            before = self.part.placement
        is_there = (
            dataclasses.replace(after, placement_number=before.placement_number, first_turn=before.first_turn) == before
        )
        return None if is_there else plan

    # ---- one move ---------------------------------------------------------------------------------

    def begin(self, turn: Turn, last: Turn | None, decided: tuple[int, ...], now_s: float) -> list[Command]:
        """Begin the move to the placement of ``turn``; every turn before it must be done.

        ``last`` is the turn before it; None = a resumed run continues with ``turn``. ``decided`` are the unfreezing
        decisions so far (``Turn.unfreeze_at``).
        """
        self._ahead.forget()
        self._tried = due(self.plan.course, self.plan.placements, turn)
        self._target, self._decided = self.plan.at(self._tried), decided
        if last is not None:
            self._start = dataclasses.replace(
                self._start,
                step=last.end_step,
                holder=last.owner,
                first_turn=last.index + 1,
                first_seq=last.end_seq,
                unfreezing=NOTHING_KNOWN,
                operations=None,
            )
        self._began_s, self._bytes, self._problem = now_s, {}, ""
        gone = [node for node in self._target.nodes if node in self._lost]
        if gone:
            return self._end(f"node {gone[0]} is lost", now_s)
        self.stage, self._waiting = _RESTING, set(self.part.nodes)
        return [Rest(node) for node in self.part.nodes]

    def fails_to_go_back(self, event: MoveFailed) -> bool:
        """Whether a node does not come back to the placement before the move, for which ``take`` raises its error."""
        number = self.part.placement.placement_number
        return self.stage == _BACK and event.node in self._waiting and event.placement_number == number

    def take(self, event: Rested | Moved | MoveFailed, now_s: float) -> list[Command]:
        """Take a node's answer; stale and repeated answers change nothing; raises ``RingTuneError``."""
        part = self._target if self.stage == _MOVING else self.part
        is_awaited = bool(self.stage) and event.node in self._waiting
        if not is_awaited or event.placement_number != part.placement.placement_number:
            return []
        if isinstance(event, MoveFailed):
            if self.stage == _BACK:
                raise error_from_name(event.error, event.message)
            return self.give_up(event.message, now_s)
        self._waiting.discard(event.node)
        if isinstance(event, Moved) and self.stage == _MOVING:
            self._bytes[event.node] = event.fetched_bytes
        if self._waiting:
            return []
        if self.stage == _RESTING:
            return self._tell_all(_MOVING, self._target)
        if self.stage == _MOVING:
            self.part = self._target
        return self._end(self._problem, now_s)

    def lose(self, node: str, message: str, now_s: float) -> list[Command]:
        """Continue without a node that the present placement does not need; a move that needs it goes back."""
        self._lost.add(node)
        self._ahead.lose(node)
        self._waiting.discard(node)
        if self.stage and self.stage != _BACK and node in self._target.nodes:
            return self.give_up(message, now_s)
        if self.stage and not self._waiting:
            return self._end(self._problem, now_s)
        return []

    def join(self, node: str) -> None:
        """Permit a node that has joined or returned in later placements."""
        self._lost.discard(node)

    def late(self, now_s: float) -> list[Command]:
        """Go back after the time limit; raises ``DeadlineError``."""
        overdue = f"waited {self._wait_s:g} s for node {', '.join(sorted(self._waiting))} {self.stage}"
        if self.stage == _BACK:
            raise DeadlineError(f"{overdue}; start the run again with --resume")
        return self.give_up(overdue, now_s)

    def give_up(self, problem: str, now_s: float) -> list[Command]:
        """Go back to the placement before the move."""
        self._problem = problem
        if self.stage == _RESTING:  # nothing was let go of yet
            return self._end(problem, now_s)
        return self._tell_all(_BACK, self.part)

    def recover(self, plan: Plan | None, step: int, decided: tuple[int, ...]) -> None:
        """Drop a move under way; adopt a plan with its last placement after ``step`` steps.

        ``plan`` None: the placement is not known yet.
        """
        self._ahead.forget()
        self.stage, self._waiting = "", set()
        if plan is not None:
            self.plan, self._decided = plan, decided
            self.part = self._target = plan.parts[-1]
            self._tried = self.part.placement.placement_number
            self._start = dataclasses.replace(self._start, step=step, placement_number=self._tried)

    # ---- parts ------------------------------------------------------------------------------------

    def _tell_all(self, stage: str, part: Plan) -> list[Command]:
        """Send every node of both placements to ``part``; nodes outside ``part`` only stop and are not waited for."""
        nodes = [node for node in dict.fromkeys((*self.part.nodes, *self._target.nodes)) if node not in self._lost]
        self.stage, self._waiting = stage, set(part.nodes)
        course = self.plan.course.decided(self._decided)
        before, after = self.part.placement, part.placement
        start = dataclasses.replace(self._start, placement_number=after.placement_number)
        return [
            Move(node, part, start, before.placement_number, sources(course, before, after, node, self._start.step))
            for node in nodes
        ]

    def _end(self, problem: str, now_s: float) -> list[Command]:
        self.stage, self._waiting = "", set()
        fetched = tuple(sorted(self._bytes.items())) if not problem else ()
        return [LogMove(self._start.step, self._tried, self.part, now_s - self._began_s, fetched, problem)]
