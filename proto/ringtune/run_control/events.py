"""Events and commands of the coordinator's state machine: values only.

Of the best result, of weights fetched ahead, of moves, of recovery, and of the run itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ringtune.engine.events import CancelTimer, SetTimer, TimerFired
from ringtune.schedule.migration import Source
from ringtune.schedule.operation_tables import BlockScores, Operations
from ringtune.schedule.placement import Placement
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import NONE_DONE, NOTHING_KNOWN, Evaluations, StartPoint, Turn, Unfreezing
from ringtune.techniques.replicas import CopyDigest


class CollectBest(NamedTuple):
    """Ask a node for what it trained up to ``step``, after the best evaluation so far; ``BestSent`` answers.

    ``number`` counts the requests; all other fields are those of ``Collect``.
    """

    node: str
    step: int
    number: int
    with_head: bool
    with_private: bool


class BestSent(NamedTuple):
    """A node has sent what it was asked for with this number."""

    node: str
    number: int


class LogBest(NamedTuple):
    """Log that every node has sent its part of the best result, which is that of ``step``."""

    step: int
    number: int


# ---- events: weights fetched ahead -----------------------------------------------------------------


class Replanned(NamedTuple):
    """The driver found another placement that the run shall move to, as soon as it may.

    Attributes:
        placement: the other one.
        stays_s: predicted seconds of the steps that are left, on the present placement.
        moves_s: on the other one.
        cost_s: of the move.
    """

    placement: Placement
    stays_s: float = 0.0
    moves_s: float = 0.0
    cost_s: float = 0.0


class FetchedAhead(NamedTuple):
    """A node has the base weights that the placement with this number wants from it; ``problem`` says why it has not.

    ``num_bytes`` arrived from other nodes, in ``seconds``.
    """

    node: str
    placement_number: int
    num_bytes: int = 0
    seconds: float = 0.0
    problem: str = ""


# ---- commands: weights fetched ahead ---------------------------------------------------------------


class FetchAhead(NamedTuple):
    """Let a node fetch the base weights of its slice in this part of the plan; ``FetchedAhead`` answers."""

    node: str
    part: Plan


class LogFetched(NamedTuple):
    """Log what nodes have fetched of base weights, while the run trained, for the placement with this number.

    Attributes:
        placement_number: to which the run is to move.
        fetched_bytes: by node.
        seconds: until the last one had all.
        problems: by node, why it has not; it fetches them in the move, if the run moves.
    """

    placement_number: int
    fetched_bytes: tuple[tuple[str, int], ...]
    seconds: float
    problems: tuple[tuple[str, str], ...] = ()


# ---- events: moves ---------------------------------------------------------------------------------


class Rested(NamedTuple):
    """A node of the placement with this number keeps what it has trained, and offers it to the others."""

    node: str
    placement_number: int


class Moved(NamedTuple):
    """A node has built what the placement with this number wants from it.

    ``fetched_bytes`` arrived from other nodes: what they have trained.
    """

    node: str
    placement_number: int
    fetched_bytes: int = 0


class MoveFailed(NamedTuple):
    """A node can't rest, or move to the placement with this number; the error's class and message say why."""

    node: str
    placement_number: int
    error: str
    message: str


# ---- commands: moves -------------------------------------------------------------------------------


class Rest(NamedTuple):
    """Let a node keep what it has trained and offer it to the others; ``Rested`` or ``MoveFailed`` answers."""

    node: str


class Move(NamedTuple):
    """Let a node move to another placement, or go back to the one it had; ``Moved`` or ``MoveFailed`` answers.

    Attributes:
        part: of the plan, with the placement; a node that is not in it only stops.
        start: where the run continues.
        from_placement_number: in which the trained blocks were hosted as ``sources`` says.
        sources: the trained blocks that the node takes over, perhaps from itself.
        from_step: the run recovers, and blocks and head are as they were kept after this step; None = as they are.
        head_from: from whom it fetches the head as it was kept then; empty = from no node.
    """

    node: str
    part: Plan
    start: StartPoint
    from_placement_number: int
    sources: tuple[Source, ...]
    from_step: int | None = None
    head_from: str = ""


class LogPlan(NamedTuple):
    """Log that the plan has another placement from now on, to which the run moves, and why."""

    plan: Plan
    why: Replanned


class LogMove(NamedTuple):
    """Log that the run has moved after ``step`` steps, or has stayed and why.

    Attributes:
        placement_number: to which it was to move.
        part: of the plan that holds from here on.
        seconds: from the last turn before to the first one after.
        fetched_bytes: by node, of what others had trained.
        problem: why it stays; empty = it has moved.
    """

    step: int
    placement_number: int
    part: Plan
    seconds: float
    fetched_bytes: tuple[tuple[str, int], ...]
    problem: str = ""


# ---- events: recovery ------------------------------------------------------------------------------


class Halted(NamedTuple):
    """A node has stopped, to recover in the placement with this number; it has what it kept of committed turns."""

    node: str
    placement_number: int


class PlacementFound(NamedTuple):
    """There is a placement without the lost nodes; it shall have this number."""

    placement_number: int
    placement: Placement


class NoPlacementFound(NamedTuple):
    """There is no placement without the lost nodes; the error's class and message say why."""

    placement_number: int
    error: str
    message: str


class NodeJoined(NamedTuple):
    """A lost node has returned, or a new one has joined: it may have a place from now on.

    The driver has seen that its model, and its rows if it owns some, are those of the plan.
    """

    node: str


# ---- commands: recovery ----------------------------------------------------------------------------


class AwaitNodes(NamedTuple):
    """Tell people that the run waits for nodes, why, and until when.

    Attributes:
        nodes: with whose return the run continues, as far as they have names.
        why: it can't continue without them.
        until_s: on the clock of the state machine.
    """

    nodes: tuple[str, ...]
    why: str
    until_s: float


class Halt(NamedTuple):
    """Let a node stop, to recover in the placement with this number; ``Halted`` or ``MoveFailed`` answers."""

    node: str
    placement_number: int


class FindPlacement(NamedTuple):
    """Find a placement without the lost nodes, after ``step``: ``PlacementFound`` or ``NoPlacementFound``."""

    placement_number: int
    part: Plan
    lost: tuple[str, ...]
    step: int


class ShowStep(NamedTuple):
    """Show people an item that is done for the first time; its line is logged once its turn is committed.

    Fields are those of ``LogStep``.
    """

    turn: Turn
    seq: int
    step: int
    depth: int
    values: tuple[tuple[str, float], ...]


class LogRecovery(NamedTuple):
    """Log that the run continues without a lost node, or after a bad step, from the end of ``step`` on.

    Attributes:
        step: the last one of the turn to which all went back.
        lost: nodes that were lost in this recovery.
        plan: of the run from now on.
        part: of the plan that holds from here on.
        seconds: from the loss to the first turn that is granted again.
        fetched_bytes: by node, of what others had kept.
        bad_step: what was not finite, where all since ``step`` is repeated; else empty.
        left_out: those of ``lost`` that owned rows, and whose turns are left out from here on.
        back: those of ``lost`` that have returned meanwhile.
    """

    step: int
    lost: tuple[str, ...]
    plan: Plan
    part: Plan
    seconds: float
    fetched_bytes: tuple[tuple[str, int], ...]
    bad_step: str = ""
    left_out: tuple[str, ...] = ()
    back: tuple[str, ...] = ()


# ---- events: the run -------------------------------------------------------------------------------


class Started(NamedTuple):
    """Begin a run on these nodes, sorted by name."""

    nodes: tuple[str, ...]


class Inspected(NamedTuple):
    """A node answered Inspect; ``facts`` go to the planner as they are."""

    node: str
    facts: Any


class PlanMade(NamedTuple):
    """The plan is made; ``start`` is the point where a run continues that began with it before."""

    plan: Plan
    start: StartPoint | None = None


class PlanFailed(NamedTuple):
    """There is no plan; the error's class and message say why."""

    error: str
    message: str


class Prepared(NamedTuple):
    """A node has built what the plan wants from it."""

    node: str


class StepReported(NamedTuple):
    """An owner reports a finished item of its own (``events.ReportStep``)."""

    node: str
    seq: int
    step: int
    kind: str
    values: tuple[tuple[str, float], ...]


class TurnReported(NamedTuple):
    """A node has done all its actions of a turn.

    ``scores`` are those of its slice if it is a score turn, ``copies`` the digests of its copies of embedding and head.
    """

    node: str
    turn: int
    scores: tuple[BlockScores, ...] = ()
    copies: tuple[CopyDigest, ...] = ()


class TechniqueFailed(NamedTuple):
    """A node goes on without a technique, with the reason; sent before the end of the turn in which that was."""

    node: str
    problem: str


class OperationsChosen(NamedTuple):
    """The operation table is chosen that holds from the train turn on that begins at ``step``."""

    step: int
    operations: Operations


class OperationsFailed(NamedTuple):
    """There is no operation table for ``step``; the error's class and message say why."""

    step: int
    error: str
    message: str


class Progressed(NamedTuple):
    """Bytes of a result arrived from a node, or went to it: neither it nor the link has stopped."""

    node: str


class Collected(NamedTuple):
    """A node has sent its results."""

    node: str


class NodeFailed(NamedTuple):
    """A call to a node failed, it reported an error, or its lease ran out; ``lost`` is a peer that it can't reach."""

    node: str
    error: str
    message: str
    lost: str = ""


class RunStopRequested(NamedTuple):
    """The user stops the run at once."""

    reason: str


class DrainRequested(NamedTuple):
    """The user stops the run after the turns that were granted, with a checkpoint."""

    reason: str


Event = (
    Started
    | Inspected
    | PlanMade
    | PlanFailed
    | Prepared
    | Rested
    | Moved
    | MoveFailed
    | Halted
    | PlacementFound
    | NoPlacementFound
    | NodeJoined
    | Replanned
    | FetchedAhead
    | StepReported
    | TurnReported
    | TechniqueFailed
    | OperationsChosen
    | OperationsFailed
    | Progressed
    | Collected
    | BestSent
    | NodeFailed
    | RunStopRequested
    | DrainRequested
    | TimerFired
)

# ---- commands: the run -----------------------------------------------------------------------------


class EnterPhase(NamedTuple):
    """Enter this phase of the run."""

    phase: str


class Inspect(NamedTuple):
    """Ask a node for its facts."""

    node: str


class MakePlan(NamedTuple):
    """Make the plan from the nodes' facts, by name; answered by ``PlanMade`` or ``PlanFailed``."""

    facts: Mapping[str, Any]


class Prepare(NamedTuple):
    """Hand a node the plan."""

    node: str
    plan: Plan


class Grant(NamedTuple):
    """Tell every node that these consecutive turns may be worked on."""

    turns: tuple[Turn, ...]


class LogStep(NamedTuple):
    """Log a finished item: its numbers, with its turn, step and depth."""

    turn: Turn
    seq: int
    step: int
    depth: int
    values: tuple[tuple[str, float], ...]


class LogTurn(NamedTuple):
    """Log a turn that every node has done; its bytes and times are complete."""

    turn: Turn


class LogUnfreeze(NamedTuple):
    """Log the decision, when its turn is granted, that from ``step`` on ``depth`` blocks train."""

    step: int
    depth: int


class ChooseOperations(NamedTuple):
    """Choose the operation table that holds from ``step`` on; ``OperationsChosen`` or ``OperationsFailed`` answers.

    ``scores`` are all that were gathered, in order; none where the choice needs none.
    """

    step: int
    scores: tuple[BlockScores, ...]


class LogOperations(NamedTuple):
    """Log the decision that from ``step`` on this operation table holds."""

    step: int
    operations: Operations


class LogTechniqueFailed(NamedTuple):
    """Log that a node goes on without a technique, and why."""

    node: str
    problem: str


class LogCheckpoint(NamedTuple):
    """Log a checkpoint: every node saved what it trained up to ``step``, and ``holder`` the head."""

    step: int
    holder: str
    unfreezing: Unfreezing = NOTHING_KNOWN
    operations: Operations | None = None
    evaluations: Evaluations = NONE_DONE


class LogStop(NamedTuple):
    """Log the decision that the run ends with ``step``, because its evaluations did not get better."""

    step: int
    evaluations: Evaluations


class LogKept(NamedTuple):
    """Log that every node keeps in memory what it has trained up to ``step``, and ``holder`` the head."""

    step: int
    holder: str
    unfreezing: Unfreezing = NOTHING_KNOWN
    evaluations: Evaluations = NONE_DONE


class LogEvaluation(NamedTuple):
    """Log a complete evaluation: counts summed over the owners; and whether it is the best, where that is kept."""

    step: int
    values: tuple[tuple[str, float], ...]
    is_best: bool | None = None


class Collect(NamedTuple):
    """Ask a node for its trained tensors."""

    node: str
    with_head: bool
    with_private: bool


class Release(NamedTuple):
    """Tell a node that the run is over for it; ``is_finished`` if it ended well and every result is collected."""

    node: str
    reason: str
    is_finished: bool = False


class Finish(NamedTuple):
    """The run is over; ``error`` is empty if it was good."""

    error: str
    message: str


Command = (
    EnterPhase
    | Inspect
    | MakePlan
    | Prepare
    | Rest
    | Move
    | FetchAhead
    | Halt
    | FindPlacement
    | AwaitNodes
    | LogRecovery
    | ShowStep
    | LogMove
    | LogPlan
    | LogFetched
    | Grant
    | LogStep
    | LogTurn
    | LogUnfreeze
    | ChooseOperations
    | LogOperations
    | LogTechniqueFailed
    | LogCheckpoint
    | LogKept
    | LogEvaluation
    | LogStop
    | Collect
    | CollectBest
    | LogBest
    | Release
    | Finish
    | SetTimer
    | CancelTimer
)
