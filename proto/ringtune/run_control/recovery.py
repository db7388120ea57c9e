"""Recovery of a run on the coordinator: after a lost host, after a bad step, and the wait for a node.

These are the parts and rules; the state machine is ``state_machine.RunStateMachine``.

::

    training -- a host is lost --> halting -----------> moving -------> training, from the last committed turn on
                                  all others stop,     all load their
                                  a placement without  kept tensors
                                  it is found

A turn is *committed* when every node has done it and its trained tensors are kept at two places. At most two turns are
granted, so a node keeps three: the committed one, and those that it may have done since. A turn is logged when it is
committed, so that no repeated turn is logged twice; progress is shown at once, and once.

After a bad step, one with a loss, hidden state, gradient or weight that is not finite, all stop and go back in the same
way, in the same placement. A node does not apply an update that it sees to be bad; others may have applied theirs, so
every turn since the last committed one is repeated::

    turn        0          1          2  (bad)
    committed   yes        no         no        all go back to the end of turn 0
    again                  3          4         bad once more, in 3 or 4: the run ends

A transient fault, as of a memory chip, leaves no trace: the result is that of the undisturbed run. A bad step that is
bad again is a fault of the training and would repeat for ever. Once turn 4 is committed, another bad step has a second
try of its own.

Where the run can't continue without a node, an owner of rows or any node with room for the rest, it waits. The others
have stopped and keep the tensors of the last committed turn::

    halting -- an owner is lost, or nothing fits --> waiting -- it joins --> placing, moving, training
                                                        |
                                                        '-- time is up --> the run ends, resumable

A run that leaves out a lost owner takes it back, once it has joined: no train turn is granted any more, and when every
open turn is committed all go on from there, in the same placement, with the owner's turns (``migration.with_owner``).
Where all parameters train no turn is granted after the next checkpoint, the run ends with it, and another one continues
from there with the owner's turns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ringtune.errors import (
    CapacityError,
    DivergedError,
    InvalidInputError,
    PeerLostError,
    StorageError,
    error_from_name,
    needed,
)
from ringtune.run_control.events import (
    AwaitNodes,
    Command,
    FindPlacement,
    Finish,
    Halt,
    Halted,
    LogEvaluation,
    LogRecovery,
    LogStep,
    LogTurn,
    Move,
    Moved,
    NodeFailed,
    ShowStep,
)
from ringtune.schedule.course import Course
from ringtune.schedule.migration import CopyHolders, Source, rows_reason, without_owner
from ringtune.schedule.placement import Placement
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint, StepKind, Turn
from ringtune.techniques.replicas import CopyDigest

RESUME: Final = "start it again and --resume the run"
WITH_ROOM: Final = "start another node with room and --resume the run"
"""Remedy in place of ``RESUME`` where each lost node is one that computed otherwise."""
WITHOUT: Final = "remove it and train anew"
"""Remedy in place of ``RESUME`` where the lost node is one that computed otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryPolicy:
    """Settings of a run that recovers.

    Attributes:
        leaves_out: whether the run continues without a lost owner, and without its rows.
        awaits_s: time limit of the wait for an indispensable node, in seconds; 0 = the run ends at once.
        num_steps: gives the steps of a run by the rows of all its owners; None = an owner that was left out stays out.
    """

    leaves_out: bool = False
    awaits_s: float = 0.0
    num_steps: Callable[[Sequence[int]], int] | None = None


def _rows_reason(
    lost: str, course: Course, policy: RecoveryPolicy, step: int = 0, decided: tuple[int, ...] = ()
) -> str:
    """Say why the run ends with the loss of an owner of rows; empty if it waits for it, or leaves its rows out."""
    if course.owner(lost) is None or policy.awaits_s:
        return ""
    if not policy.leaves_out:
        return f"{lost} owns rows, which no other node has; {RESUME}, or set recovery.owners = 'skip'"
    why = rows_reason(course, lost, step, decided)
    return f"the run can't leave out the rows of {lost}: {why}; {RESUME}" if why else ""


def checkpoint_reason(lost: str, plan: Plan, saved_step: int, policy: RecoveryPolicy) -> str:
    """Say why a run of all parameters does not go back to its last checkpoint when it loses a node; empty if it does.

    ``saved_step`` is the step of that checkpoint; -1 = there is none.
    """
    if saved_step < 0:
        return "there is no checkpoint yet to go back to; start it again and train anew"
    if not plan.placement.copies and plan.slice_of(lost).num_blocks:
        return f"no other disk has copies of its checkpoints (recovery.copies = 'next' keeps them); {RESUME}"
    return _rows_reason(lost, plan.course, policy)


def end_reason(lost: str, course: Course, kept: CopyHolders, policy: RecoveryPolicy) -> str:
    """Say why the run ends with the loss of a node; empty if it can continue.

    ``kept`` must already be without the tensors of the lost node.
    """
    if why := _rows_reason(lost, course, policy, kept.step or 0, kept.decided):
        return why
    if kept.step is None:
        return f"no turn has ended since the run was resumed or loaded, so nothing is kept yet; {RESUME}"
    if missing := kept.missing:
        blocks = f"block{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        return f"no living node has a copy of {blocks}; {RESUME}"
    if kept.step and not kept.holder:
        return f"no living node has a copy of the head after step {kept.step}; {RESUME}"
    return ""


class LossOutcome(NamedTuple):
    """Why the run ends with the loss of some nodes at once, empty = it continues: after owners that it awaits are back.

    ``course`` is without the owners that it leaves out.
    """

    ends: str
    awaited: tuple[str, ...]
    course: Course


def loss_outcome(part: Plan, lost: Collection[str], policy: RecoveryPolicy) -> LossOutcome:
    """Tell what follows if nodes are lost at once near the end of a run, whichever owner had the last turn.

    ``part`` is the plan with the placement that holds then. As many blocks are trained as can be.
    """
    course, placement = part.course.soonest(), part.placement
    if not part.goes_back:
        return LossOutcome(f"the plan keeps no copies of turns (recovery.copies); {RESUME}", (), part.course)
    length = course.local_iterations
    done = max(1, course.num_steps // length - 1) * length
    left, awaited = part.course, list[str]()
    for owner in course.owners:
        kept, left, awaited = CopyHolders(), part.course, []
        turn = Turn(
            index=0,
            kind=StepKind.TRAIN,
            owner=owner.node,
            round=0,
            first_seq=0,
            num_items=length,
            first_step=done - length,
            first_batch=0,
        )
        kept.commit(course, placement, turn)
        for node in lost:
            kept.lose(node)
        for node in lost:
            if why := end_reason(node, left, kept, policy):
                return LossOutcome(why, (), part.course)
            if left.owner(node) is not None and policy.leaves_out and not rows_reason(left, node, done):
                left = without_owner(left, node, left.turns_of(done))
            elif left.owner(node) is not None:
                awaited.append(node)
    return LossOutcome("", tuple(awaited), left)


class UncommittedLog:
    """Log entries of turns that are not committed; each is passed on with the commit of its turn.

    An item is shown as soon as it is done, and once, however often it is repeated.
    """

    def __init__(self) -> None:
        self._held: list[LogStep | LogTurn] = []
        self._shown: set[tuple[StepKind, str, int, int]] = set()

    def pass_on(self, command: Command, passed: list[Command]) -> Turn | None:
        """Append to ``passed`` the commands that replace ``command``; return the turn that it commits, or None."""
        match command:
            case LogStep(turn, seq):
                self._held.append(command)
                item = _item_of(turn, seq)
                if item not in self._shown:
                    self._shown.add(item)
                    passed.append(ShowStep(*command))
            case LogTurn(turn):
                self._held.append(command)
                if not turn.kind.evaluates and turn.kind is not StepKind.SCORE:  # these count with all of their kind
                    return self._commit(turn, passed)
            case LogEvaluation():
                ended = [each.turn for each in self._held if isinstance(each, LogTurn)]
                committed = self._commit(ended[-1], passed) if ended else None
                passed.append(command)
                return committed
            case Finish():
                passed += [*self._held, command]
                self._held = []
            case _:
                passed.append(command)
        return None

    def _commit(self, ended: Turn, passed: list[Command]) -> Turn:
        committed = [each for each in self._held if each.turn.index <= ended.index]
        self._shown.difference_update(_item_of(each.turn, each.seq) for each in committed if isinstance(each, LogStep))
        passed += committed
        self._held = [each for each in self._held if each.turn.index > ended.index]
        return ended

    def forget_held(self) -> None:
        """Drop the entries of uncommitted turns: these are repeated, or may be of a bad step."""
        self._held = []

    def forget_shown(self) -> None:
        """Show every item again: from now on steps have other numbers."""
        self._shown.clear()


def _item_of(turn: Turn, seq: int) -> tuple[StepKind, str, int, int]:
    """Identify an item across repetitions, which change turn index and ``seq``."""
    return turn.kind, turn.owner, turn.first_step, seq - turn.first_seq


NOTHING_KEPT: Final = "it was not repeated, because the plan keeps no copies of turns (recovery.copies)"


def is_bad_step(event: NodeFailed) -> bool:
    """Whether a node reports a value that is not finite."""
    return event.error == DivergedError.__name__ and not event.lost


MAX_BAD_STEPS: Final = 5
"""Bad steps of a node without rows within ``OPENINGS_TURNS`` train turns before the run does without the node."""


class BadSteps:
    """The limit of one repetition for turns with a bad step, and of ``MAX_BAD_STEPS`` for bad steps of one node.

    Else a host that reports one in each turn, and none in its repetition, would make the run repeat every turn.

    A host whose step is bad again leaves. Its neighbour may be at fault, with finite numbers so large that they
    overflow at the next node; then its next neighbour finds such a step too, and the one beside both leaves::

        a > c > e     bad again at c, which leaves
        a > d > e     bad again at d within OPENINGS_TURNS turns: e leaves
        a > d         bad again at d, which was believed once: d leaves
    """

    def __init__(self) -> None:
        self._is_going_back = False
        self._committed = self._last_again = -1
        self._num_turns, self._at = 0, dict[str, list[int]]()
        self._beside: dict[str, tuple[int, frozenset[str]]] = {}  # neighbours of nodes with steps that were bad again

    def end_turn(self) -> None:
        """Note that a train turn is committed."""
        self._num_turns += 1

    def are_too_many(self, node: str) -> bool:
        """Note a bad step at a node; whether there were ``MAX_BAD_STEPS`` before within ``OPENINGS_TURNS`` turns."""
        before = [at for at in self._at.get(node, ()) if self._num_turns - at < OPENINGS_TURNS]
        self._at[node] = [*before, self._num_turns]
        return len(before) >= MAX_BAD_STEPS

    def leaving(self, node: str, beside: Iterable[str]) -> str:
        """Return which node leaves as a step is bad again at ``node``: itself, or one of its neighbours ``beside``."""
        ends = frozenset(beside)
        recent = {name: each for name, (at, each) in self._beside.items() if self._num_turns - at < OPENINGS_TURNS}
        self._beside[node] = self._num_turns, ends
        return node if node in recent else min(ends & frozenset().union(*recent.values()), default=node)

    def commit(self, index: int) -> None:
        """Note that all turns up to ``index`` are committed."""
        self._committed = index

    def end_reason(self, step: int | None) -> str:
        """Say why the run ends with a bad step; empty if it goes back to ``step`` (None: no turn is kept)."""
        if step is None:
            return "no turn has ended since the run was resumed or loaded, so there is no turn to go back to"
        if self._committed < self._last_again:
            return f"the steps after step {step} were repeated because of it, and it happened again"
        return ""

    def rewind(self) -> None:
        """Note that all nodes go back because of a bad step."""
        self._is_going_back = True

    def note_rewind(self, last: int) -> None:
        """Note that all turns up to ``last`` are repeated, after a bad step or a loss."""
        if self._is_going_back or self._committed < self._last_again:
            self._last_again = last
        self._is_going_back = False


class OwnErrors:
    """Errors that nodes report of themselves: the run continues without such a node, as without a lost one.

    A full disk, memory that is too small, weights that are missing, a fault in the program at this node. What a node
    says is believed of itself only. An error of the same class before the steps are trained again that were granted
    then, at another node, is that of the job::

        turn        0          1          2  (node c has no memory left)
        committed   yes        no         no        all but c go back to the end of turn 0
        again                  3          4         no memory at node d, in 3 or 4: the run ends with that error

    Not a node's own: what is wrong with the rows of an owner, and its losses that are not finite. A step that is bad
    again (``BadSteps``) is the node's own if that one has no rows, until another node finds one too.
    """

    def __init__(self) -> None:
        self._open: dict[str, tuple[NodeFailed, int]] = {}

    def take(self, event: NodeFailed, step: int, *, owns_rows: bool) -> bool:
        """Whether an error is a node's own, and note it; ``step`` is the end of the granted turns."""
        error = error_from_name(event.error, "")
        if owns_rows and isinstance(error, InvalidInputError | DivergedError):
            return False
        return self._open.setdefault(event.error, (event, step))[0].node == event.node

    def commit(self, step: int) -> None:
        """Note that all turns up to ``step`` are committed."""
        self._open = {error: (event, until) for error, (event, until) in self._open.items() if until > step}

    def of(self, nodes: Iterable[str]) -> NodeFailed | None:
        """Return the last such error of one of these nodes; None if there is none."""
        return next((event for event, _ in reversed(self._open.values()) if event.node in nodes), None)


class DisputedCopies:
    """What nodes say of copies of trained state: a mover says that the only holder has not given one as it was trained.

    One of both is wrong. The mover leaves, as with any error of its own, and the holder hosts nothing in the placement
    that is searched then, so that a third node fetches the copy and compares its digest::

        mover says    the third says               leaves
        it differs    nothing: it has moved        the mover
        it differs    it differs                   the mover, and the holder in place of the third

    So a single node that lies costs the run itself and, where it is the holder, one other node, once. What a mover has
    said counts in later recoveries too, also where the third has moved: a holder may give it a right copy. It counts
    against one holder, until another node says the same of that one: else who accuses each holder, and comes back each
    time, would let any single word make any of them leave.
    """

    def __init__(self) -> None:
        self._movers: dict[str, list[str]] = {}  # by holder, whose word counts
        self.doubted: tuple[str, ...] = ()

    def take(self, mover: str, holder: str) -> str:
        """Note what a mover says; return another one that has said the same of the holder, empty = none has."""
        counts = all(movers != [mover] for other, movers in self._movers.items() if other != holder)
        movers = self._movers.setdefault(holder, [])
        if counts and mover not in movers:
            movers.append(mover)
        first = next((node for node in movers if node != mover), "") if counts else ""
        self.doubted = () if first else (holder,)
        return first

    def trust(self) -> None:
        """Let the holder host again: all have moved, or nothing fits without it."""
        self.doubted = ()


MAX_OPENINGS: Final = 5
"""How often links of a node are opened anew within ``OPENINGS_TURNS`` train turns before the run does without it."""
OPENINGS_TURNS: Final = 50


class LinkOpenings:
    """How often a run has gone back to open links anew, by the nodes at both ends.

    Each time one turn at most is repeated. A node that reports links which nobody else misses, or whose network is bad,
    would make the run repeat every turn; so it costs a tenth of the turns at most.
    """

    def __init__(self) -> None:
        self._num_turns = 0
        self._at: list[tuple[int, frozenset[str]]] = []
        self._cost: dict[str, dict[str, int]] = {}  # by owner, nodes that have left for a link with it, and when

    def commit(self) -> None:
        """Note that a train turn is committed."""
        self._num_turns += 1

    def note(self, ends: Iterable[str]) -> None:
        """Note that all go back because of the link of these two nodes."""
        self._at = [*((at, both) for at, both in self._at if self._is_late(at)), (self._num_turns, frozenset(ends))]

    def lose(self, node: str, others: Collection[str]) -> None:
        """Note that the run does without a node: what was opened with it counts no more for these others."""
        self._at = [(at, ends.difference(others) if node in ends else ends) for at, ends in self._at]

    def note_cost(self, nodes: Iterable[str], lost: str) -> None:
        """Note that the node ``lost`` leaves the run for a link with one of these owners, which stay."""
        for node in nodes:
            self._cost.setdefault(node, {})[lost] = self._num_turns

    def has_cost(self, ends: Iterable[str], lost: str) -> bool:
        """Whether another node than ``lost`` has left within the last turns for a link with one of these nodes.

        So an owner that lies about its links makes one host leave in ``OPENINGS_TURNS`` turns at most, and a host that
        has left, and joins again to lie once more, leaves again.
        """
        costs = [each for node in ends for each in self._cost.get(node, {}).items()]
        return any(self._is_late(at) for node, at in costs if node != lost)

    def are_too_many(self, node: str, ends: Iterable[str]) -> bool:
        """Whether a node was an end of ``MAX_OPENINGS`` such links within the last turns, and no end of this one more.

        So an owner that the run needs, and whose links to all break, makes no host leave after the other.
        """
        return self._count(node) >= max(MAX_OPENINGS, *map(self._count, ends))

    def _count(self, node: str) -> int:
        return sum(node in ends and self._is_late(at) for at, ends in self._at)

    def _is_late(self, at: int) -> bool:
        return self._num_turns - at < OPENINGS_TURNS


class UnopenedLinks:
    """Links of living nodes that could not be opened to move or to go back, of which one end leaves.

    Nobody knows which end is at fault. The one with such links to more nodes in this run leaves, of equal ones the one
    that says so. So a host that takes no links, and says that it has moved, costs one other host at most.
    """

    def __init__(self) -> None:
        self._peers: dict[str, set[str]] = {}

    def note(self, node: str, peer: str) -> None:
        """Note that a node can't open its link to another one."""
        for end, other in ((node, peer), (peer, node)):
            self._peers.setdefault(end, set()).add(other)

    def ranked(self, stuck: Mapping[str, str]) -> list[str]:
        """Return the nodes that can't move, and those that they can't reach, in the order in which they leave."""
        ends = dict.fromkeys(filter(None, (*stuck, *stuck.values())))
        return sorted(ends, key=lambda node: -len(self._peers.get(node, ())))


MAX_JOINS: Final = 5
"""How often a node may join a run under way within ``OPENINGS_TURNS`` train turns."""


class Joins:
    """How often nodes have joined a run under way, new ones or again.

    A node that is lost may cost a recovery, which repeats a turn and has to begin anew if the node is lost once more
    meanwhile. So one that comes and goes would keep the run from training at all.
    """

    def __init__(self) -> None:
        self._num_turns = 0
        self._at: dict[str, tuple[int, ...]] = {}

    def end_turn(self) -> None:
        """Note that a train turn has ended."""
        self._num_turns += 1

    def note(self, node: str) -> None:
        """Note that a node has joined."""
        self._at[node] = (*self._at.get(node, ()), self._num_turns)[-MAX_JOINS - 1 :]

    def refusal_reason(self, node: str, *, is_awaited: bool) -> str:
        """Say why a node that has joined is not taken in; empty if it may be.

        Of a node that the run waits for, joins count until the next turn has ended.
        """
        turns = 1 if is_awaited else OPENINGS_TURNS
        num_joins = sum(self._num_turns - at < turns for at in self._at.get(node, ()))
        if num_joins <= MAX_JOINS:
            return ""
        if is_awaited:
            return (
                f"it has joined more than {MAX_JOINS} times without the end of a turn; resume the run when it stays up"
            )
        return f"it has joined more than {MAX_JOINS} times in {turns} turns; start it again later"


_OF_ROOM: Final = (CapacityError.__name__, StorageError.__name__)


class AwaitedNodes:
    """The nodes that one recovery waits for, with deadlines."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        self._owners: dict[str, float] = {}
        self._lost: tuple[str, ...] = ()
        self._problem = self._error = ""
        self._room_until_s: float | None = None

    def __bool__(self) -> bool:
        return bool(self._owners or self._problem)

    @property
    def owners(self) -> tuple[str, ...]:
        """The awaited owners, sorted."""
        return tuple(sorted(self._owners))

    @property
    def needs_room(self) -> bool:
        """Whether any node with enough memory or disk is awaited."""
        return bool(self._problem)

    @property
    def until_s(self) -> float:
        """The earliest deadline, on the clock of the state machine."""
        room = [self._room_until_s] if self._problem and self._room_until_s is not None else []
        return min([*self._owners.values(), *room])

    # ---- changes ----------------------------------------------------------------------------------

    def for_owner(self, node: str, now_s: float) -> None:
        """Wait for an owner that was just lost."""
        self._owners[node] = now_s + self.wait_s

    def for_room(self, error: str, problem: str, lost: Iterable[str], now_s: float) -> bool:
        """Wait for any node with room; False after the time limit, or where more room would not help.

        ``error`` is the class of the error with which the run would end, ``problem`` why nothing fits.
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
        """Remove a node that has joined from the awaited owners, and assume that there is room now."""
        self._owners.pop(node, None)
        self._problem = ""

    def end(self) -> None:
        """Wait for no node any more."""
        self._owners, self._problem, self._room_until_s = {}, "", None

    # ---- texts ------------------------------------------------------------------------------------

    @property
    def awaited(self) -> tuple[str, ...]:
        """Names of the awaited owners, and of the lost hosts if room is awaited."""
        return tuple(dict.fromkeys((*self.owners, *(self._lost if self._problem else ()))))

    @property
    def why(self) -> str:
        """The reason why the run can't continue without them."""
        owns = "own" if len(self._owners) > 1 else "owns"
        parts = [f"{', '.join(self.owners)} {owns} rows, which no other node has"] if self._owners else []
        return "; ".join([*parts, self._problem] if self._problem else parts)

    def told(self) -> AwaitNodes:
        """Make the command that shows the wait."""
        others = "; another node with room can take its place" if self._problem else ""
        return AwaitNodes(self.awaited, self.why + others, self.until_s)

    def late(self) -> tuple[str, str]:
        """The class and the message of the error with which the run ends after the deadline."""
        nodes = f"node {', '.join(self.awaited)}" if self.awaited else "a node with room"
        error = PeerLostError.__name__ if self._owners else self._error
        remedy = RESUME if self.awaited else WITH_ROOM
        return error, f"waited {self.wait_s:g} s (recovery.wait_s) for {nodes}: {self.why}; {remedy}"


class Recovery:
    """One recovery under way.

    Args:
        placement_number: of the next placement; unique among all recoveries of the run.
        step: the end of the committed turn to which the run goes back.
        bad_step: the value that was not finite; empty = no bad step.
        link: what was said of a lost link between living nodes; empty = there is none.
        course: the course without lost owners, or with owners that are taken back; None = unchanged.
        returned: these owners.
        before: the recovery that it replaces: it inherits the losses and the bad step.

    Attributes:
        back: those of ``lost`` that have returned.
        problem: why a node can't move; another loss may be the cause.
        stuck: nodes that can't move for such a reason, each with the node that it can't reach, empty = it names none.
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
        link: str = "",
        course: Course | None = None,
        returned: tuple[str, ...] = (),
        before: Recovery | None = None,
    ) -> None:
        self.placement_number, self.step, self.course = placement_number, step, course
        self.lost: tuple[str, ...] = tuple(dict.fromkeys((*(before.lost if before else ()), *lost)))
        self.back: tuple[str, ...] = tuple(node for node in before.back if node not in lost) if before else ()
        returned = before.returned if before else returned
        self.returned: tuple[str, ...] = tuple(node for node in returned if node not in lost)
        self.began_s: float = before.began_s if before else began_s
        self.bad_step: str = bad_step or (before.bad_step if before else "")
        self.link = link
        self.plan: Plan | None = None
        self.start: StartPoint | None = None
        self.sources: dict[str, tuple[Source, ...]] = {}
        self.problem, self.is_old = "", False
        self.stuck: dict[str, str] = {}
        self._nodes, self._waiting = nodes, set(nodes)
        self._moves = False
        self._bytes: dict[str, int] = {}

    def halt(self) -> list[Command]:
        """Make every living node stop."""
        return [Halt(node, self.placement_number) for node in self._nodes]

    def find_placement(self, part: Plan, gone: tuple[str, ...], doubted: tuple[str, ...] = ()) -> Command:
        """Ask for a placement without the nodes ``gone``, and this once without the ``doubted`` ones."""
        self.is_old = False
        plan = part if self.course is None else Plan(self.course, part.placements)
        return FindPlacement(self.placement_number, plan, gone, self.step, doubted)

    def place(self, before: Plan, placement: Placement, gone: Collection[str] = ()) -> None:
        """Take the placement in which the run continues; raises ``CapacityError`` or ``PlanError``."""
        course = self.course or before.course
        plan = Plan(course, before.placements).extended(
            placement, course.turns_of(self.step), placement_number=self.placement_number
        )
        if any(node in gone for node in plan.parts[-1].nodes):
            raise CapacityError(f"the placement that was found has a lost node; {RESUME}")
        self.plan = plan

    def join(self, node: str) -> None:
        """Add a node that has joined; once the others have been sent ``Move``, it has no part in this recovery."""
        if not self._moves:
            self._nodes, self.is_old = (*self._nodes, node), True
        if node in self.lost:
            self.back = (*self.back, node)

    def answered(self, node: str, answer: Halted | Moved) -> None:
        """Note that a node has stopped or moved; a stale answer changes nothing."""
        if isinstance(answer, Moved) is not self._moves or node not in self._waiting:
            return
        self._waiting.discard(node)
        if isinstance(answer, Moved):
            self._bytes[node] = answer.fetched_bytes

    @property
    def may_move(self) -> bool:
        """Whether all have stopped and the placement is found, and no node has been sent yet."""
        return not self._moves and not self._waiting and self.plan is not None

    @property
    def has_moved(self) -> bool:
        """Whether all nodes of the placement have moved."""
        return self._moves and not self._waiting

    @property
    def moved_to(self) -> Plan:
        """The plan with the placement that was found."""
        return needed(self.plan, "a recovery needs a placement and there is none")

    @property
    def moved_at(self) -> StartPoint:
        """The point where the nodes continue."""
        return needed(self.start, "a recovery has no placement to move to")

    def move(self, kept: CopyHolders, last: Turn | None, repeats: tuple[StepKind, ...]) -> list[Command]:
        """Send every living node to the placement; one without a place in it only stops.

        ``last`` is the turn that was granted last, ``repeats`` the kinds of turns that are repeated before the next
        train turn.
        """
        part = self.moved_to.parts[-1]
        if self.course is not None and self.course.checkpoint_every and self.step:
            repeats = tuple(dict.fromkeys((StepKind.CHECKPOINT, *repeats)))  # those before have an owner more
        start = StartPoint(
            step=self.step,
            holder=kept.head_owner([owner.node for owner in part.course.owners if owner.node in self._nodes]),
            first_turn=last.index + 1 if last else 0,
            first_seq=last.end_seq if last else 0,
            placement_number=self.placement_number,
            repeats=repeats,
        )
        self._moves, self._waiting, self.start = True, set(part.nodes), start
        self.sources = {node: kept.sources(part.placement, node) for node in part.nodes}
        return [self._move(node, part, start, kept) for node in self._nodes]

    def _move(self, node: str, part: Plan, start: StartPoint, kept: CopyHolders) -> Move:
        sources, has_head = self.sources.get(node, ()), node == start.holder
        blocks = [block for source in sources for block in range(source.start, source.stop)]
        units = [*blocks, *([part.course.head] if has_head else [])]
        return Move(
            node,
            part,
            start,
            self.placement_number,
            sources,
            self.step,
            kept.head_source(node) if has_head else "",
            tuple(CopyDigest(unit, kept.digests[unit]) for unit in units if unit in kept.digests),
            kept.other_sources(sources),
            kept.other_head(node) if has_head else "",
        )

    def has_one_source(self, node: str, holder: str, kept: CopyHolders) -> bool:
        """Whether a node was sent to fetch a block, or the head, that nobody but ``holder`` keeps."""
        sources = [source for source in self.sources.get(node, ()) if source.node == holder != node]
        others = {other.start for other in kept.other_sources(sources)}
        if any(block not in others for source in sources for block in range(source.start, source.stop)):
            return True
        has_head = self.start is not None and node == self.start.holder
        return has_head and kept.head_source(node) == holder and not kept.other_head(node)

    def log(self, before: Course, plan: Plan, now_s: float) -> LogRecovery:
        """Make the log entry after all have moved; ``before`` is the course until then."""
        fetched = tuple(sorted(self._bytes.items()))
        out = tuple(owner.node for owner in before.owners if plan.course.owner(owner.node) is None)
        return LogRecovery(
            self.step,
            self.lost,
            plan,
            plan.parts[-1],
            now_s - self.began_s,
            fetched,
            self.bad_step,
            out,
            self.back,
            self.link,
            self.returned,
        )

    def overdue(self, wait_s: float) -> str:
        """Describe the missing answers, or the missing placement, after ``wait_s``."""
        if self._waiting:
            what = "to move" if self._moves else "to stop"
            why = "a node was lost" if self.lost else "a link was lost" if self.link else "a bad step"
            why = f"node {', '.join(self.returned)} came back" if self.returned and not self.lost else why
            text = f"waited {wait_s:g} s for node {', '.join(sorted(self._waiting))} {what} after {why}"
        else:
            text = f"waited {wait_s:g} s for a placement without node {', '.join(self.lost)}"
        return f"{text}: {self.problem}" if self.problem else text
