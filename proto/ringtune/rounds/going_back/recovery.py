"""One recovery of a run: who has to stop, who has to move, and to what."""

from __future__ import annotations

from ringtune.errors import needed
from ringtune.rounds.events.move_events import Move, Moved
from ringtune.rounds.events.recovery_events import Halt, Halted, LogRecovery, PlaceAgain
from ringtune.rounds.events.round_events import Command
from ringtune.rounds.going_back.kept_copies import KeptCopies
from ringtune.schedule.changing_hands.placements import Source
from ringtune.schedule.course import Course
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.turns import StartPoint, StepKind, Turn


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
        back: those of ``lost`` that have come back.

    Attributes:
        start: where the nodes go on, once they are sent there.
        plan: with the placement that was found; None while it is looked for.
        sources: the blocks that nodes take over.
        problem: why a node can't move, while it may be that another one is lost.
        is_old: whether a node has come since a placement was last looked for.
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
        """A node has come: it is sent where all are sent, unless they are on their way already."""
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
        """Whether all have stopped, and there is a placement to which nobody was sent yet."""
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
        """Where the nodes that were sent go on."""
        return needed(self.start, "a recovery sends its nodes somewhere and has sent nobody")

    def move(self, kept: KeptCopies, last: Turn | None, repeats: tuple[StepKind, ...]) -> list[Command]:
        """Send every living node to the placement; who has no place in it only stops.

        Args:
            kept: who keeps what.
            last: the turn that was granted last; None = there is none.
            repeats: kinds of turns that come again before the next train turn.
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
        """What is logged once all have moved."""
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
