"""Events and commands of the coordinator's state machine, as values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from ringtune.engine.events import CancelTimer, SetTimer, TimerFired
from ringtune.errors import RingTuneError
from ringtune.schedule.migration import Source
from ringtune.schedule.operation_tables import BlockScores, Operations
from ringtune.schedule.placement import Placement
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import NONE_DONE, NOTHING_KNOWN, Evaluations, StartPoint, Turn, Unfreezing
from ringtune.techniques.replicas import CopyDigest

E = TypeVar("E")


class CollectBest(NamedTuple):
    """Ask a node for its tensors trained up to ``step``, that of the best evaluation; ``BestSent`` answers.

    Where all parameters train, the node keeps them on its disk. ``number`` counts the requests; all other fields are
    those of ``Collect``.
    """

    node: str
    step: int
    number: int
    with_head: bool
    with_private: bool


class BestSent(NamedTuple):
    """A node has sent the tensors of the ``CollectBest`` with this number."""

    node: str
    number: int


class LogBest(NamedTuple):
    """Log that every node has sent its part of the best result, that after ``step``."""

    step: int
    number: int


# ---- events: weights fetched ahead -----------------------------------------------------------------


class Replanned(NamedTuple):
    """The driver has found a better placement; the run moves to it after its nodes have the base weights.

    In the present placement the steps that are left take ``stays_s``, in the new one ``moves_s`` after a move of
    ``cost_s``, as predicted.
    """

    placement: Placement
    stays_s: float = 0.0
    moves_s: float = 0.0
    cost_s: float = 0.0


class FetchedAhead(NamedTuple):
    """A node has the base weights of its slice in the placement with this number, or ``problem`` says why not.

    ``num_bytes`` arrived from other nodes, in ``seconds``.
    """

    node: str
    placement_number: int
    num_bytes: int = 0
    seconds: float = 0.0
    problem: str = ""


# ---- commands: weights fetched ahead ---------------------------------------------------------------


class FetchAhead(NamedTuple):
    """Make a node fetch the base weights of its slice in this part of the plan; ``FetchedAhead`` answers."""

    node: str
    part: Plan


class LogFetched(NamedTuple):
    """Log the base weights that nodes have fetched in training for the placement with this number.

    The last node had all after ``seconds``. ``problems``: by node without its weights, which it fetches in the move.
    """

    placement_number: int
    fetched_bytes: tuple[tuple[str, int], ...]
    seconds: float
    problems: tuple[tuple[str, str], ...] = ()


# ---- events: moves ---------------------------------------------------------------------------------


class Rested(NamedTuple):
    """A node of the placement with this number keeps its trained tensors in memory and serves them to other nodes."""

    node: str
    placement_number: int


class Moved(NamedTuple):
    """A node has built its part of the placement; ``fetched_bytes`` are trained tensors from other nodes."""

    node: str
    placement_number: int
    fetched_bytes: int = 0


class MoveFailed(NamedTuple):
    """A node can't rest, stop, or move to the placement with this number; ``error`` is the class of the error.

    ``holder`` is the only node that keeps what this one needs, and has not given it as it was trained; empty = it is
    something else. ``lost`` is the node to which it can't open a link; empty = it is something else.
    """

    node: str
    placement_number: int
    error: str
    message: str
    holder: str = ""
    lost: str = ""


# ---- commands: moves -------------------------------------------------------------------------------


class Rest(NamedTuple):
    """Make a node keep its trained tensors and serve them to other nodes; ``Rested`` or ``MoveFailed`` answers."""

    node: str


class Move(NamedTuple):
    """Make a node move to another placement, or back to its former one; ``Moved`` or ``MoveFailed`` answers.

    Attributes:
        part: of the plan, with the placement; a node without a place in it only stops.
        start: where the run continues.
        from_placement_number: the placement to which ``sources`` refer.
        sources: the trained blocks that the node takes over, perhaps from itself.
        from_step: in a recovery: take blocks and head as kept after this step; None = as they are now.
        head_from: the node that serves the head as kept then; empty = no head is fetched.
        digests: of the blocks as kept then, and of the head at its holder.
        others: further nodes that keep the blocks, to be asked if a source keeps other ones.
        other_head: a further node that keeps the head; empty = none.
    """

    node: str
    part: Plan
    start: StartPoint
    from_placement_number: int
    sources: tuple[Source, ...]
    from_step: int | None = None
    head_from: str = ""
    digests: tuple[CopyDigest, ...] = ()
    others: tuple[Source, ...] = ()
    other_head: str = ""


class LogPlan(NamedTuple):
    """Log that the plan has a further placement, to which the run will move, and why."""

    plan: Plan
    why: Replanned


class LogMove(NamedTuple):
    """Log that the run has moved after ``step`` steps to a placement and its ``part`` of the plan, or why it has not.

    ``seconds``: from the last turn before to the first one after; ``fetched_bytes``: trained tensors from other nodes.
    """

    step: int
    placement_number: int
    part: Plan
    seconds: float
    fetched_bytes: tuple[tuple[str, int], ...]
    problem: str = ""


# ---- events: recovery ------------------------------------------------------------------------------


class Halted(NamedTuple):
    """A node has stopped for the recovery with this placement number; it still keeps the ends of committed turns."""

    node: str
    placement_number: int


class PlacementFound(NamedTuple):
    """Answer to ``FindPlacement``: a placement without the lost nodes, which will have this number."""

    placement_number: int
    placement: Placement


class NoPlacementFound(NamedTuple):
    """Answer to ``FindPlacement``: no placement without the lost nodes exists; ``error`` is the class of the error."""

    placement_number: int
    error: str
    message: str


class NodeJoined(NamedTuple):
    """A lost node has returned, or a new one has joined: later placements may contain it.

    The driver has checked that its model, and its rows if it is an owner, are those of the plan.
    """

    node: str


# ---- commands: recovery ----------------------------------------------------------------------------


class AwaitNodes(NamedTuple):
    """Show that the run waits for nodes until ``until_s``, on the clock of the state machine, and why."""

    nodes: tuple[str, ...]
    why: str
    until_s: float


class Halt(NamedTuple):
    """Make a node stop for the recovery with this placement number; ``Halted`` or ``MoveFailed`` answers."""

    node: str
    placement_number: int


class FindPlacement(NamedTuple):
    """Find a placement without the lost nodes from ``step`` on; ``PlacementFound`` or ``NoPlacementFound`` answers.

    ``doubted`` are living nodes that it does without, this once.
    """

    placement_number: int
    part: Plan
    lost: tuple[str, ...]
    step: int
    doubted: tuple[str, ...] = ()


class ShowStep(NamedTuple):
    """Show an item that is done for the first time; ``LogStep`` follows once its turn is committed."""

    turn: Turn
    seq: int
    step: int
    depth: int
    values: tuple[tuple[str, float], ...]


class LogRecovery(NamedTuple):
    """Log that the run continues from the end of ``step``, after a lost node, a bad step or a lost link.

    Or with an owner whose turns were left out.

    Attributes:
        part: of the plan that holds from here on.
        seconds: from the loss to the first turn that is granted again.
        fetched_bytes: by node, kept tensors from other nodes.
        bad_step: the value that was not finite; empty = no bad step.
        left_out: owners among ``lost`` without turns from here on.
        back: those of ``lost`` that have returned meanwhile.
        link: what a node said of the lost link to a living one; empty = there is none.
        returned: owners whose turns count again from here on.
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
    link: str = ""
    returned: tuple[str, ...] = ()


class LogNodeError(NamedTuple):
    """Log the error for which a run continues without a node, of its class ``error``."""

    node: str
    error: str
    message: str


# ---- events: the run -------------------------------------------------------------------------------


class Started(NamedTuple):
    """Begin a run on these nodes, sorted by name.

    ``spare`` are those without rows that no given plan or checkpoint names, ``returning`` owners whose turns are left
    out until this run. It begins without them if they can't take part.
    """

    nodes: tuple[str, ...]
    spare: tuple[str, ...] = ()
    returning: tuple[str, ...] = ()


class Inspected(NamedTuple):
    """A node answered Inspect; ``facts`` go to the planner as they are."""

    node: str
    facts: Any


class PlanMade(NamedTuple):
    """The plan of the run; ``start`` is where a resumed run continues."""

    plan: Plan
    start: StartPoint | None = None


class PlanFailed(NamedTuple):
    """No plan can be made; ``error`` is the class of the error."""

    error: str
    message: str


class Prepared(NamedTuple):
    """A node has built its part of the plan."""

    node: str


class StepReported(NamedTuple):
    """An owner has finished one of its items (``events.ReportStep``)."""

    node: str
    seq: int
    step: int
    kind: str
    values: tuple[tuple[str, float], ...]


class TurnReported(NamedTuple):
    """A node has done all its actions of a turn.

    ``scores`` are of its slice after a score turn, ``copies`` the digests of its copies of embedding and head, ``kept``
    those of what it gave other nodes to keep.
    """

    node: str
    turn: int
    scores: tuple[BlockScores, ...] = ()
    copies: tuple[CopyDigest, ...] = ()
    kept: tuple[CopyDigest, ...] = ()


class TurnRepeated(NamedTuple):
    """Work of a turn is repeated by these hosts, of which one was asked or has answered just now."""

    turn: int
    nodes: tuple[str, ...]


class TurnChecked(NamedTuple):
    """The check of a turn is over: nothing is wrong, or ``problem`` is, with one node or with one of two."""

    turn: int
    nodes: tuple[str, ...] = ()
    problem: str = ""


class TechniqueFailed(NamedTuple):
    """A node continues without a technique; sent before the end of the turn in which the technique failed."""

    node: str
    problem: str


class OperationsChosen(NamedTuple):
    """The operation table for the train turns from ``step`` on."""

    step: int
    operations: Operations


class OperationsFailed(NamedTuple):
    """No operation table for ``step`` can be chosen; ``error`` is the class of the error."""

    step: int
    error: str
    message: str


class Progressed(NamedTuple):
    """Bytes of a result arrived from a node or at it: neither the node nor its link has stopped."""

    node: str


class Collected(NamedTuple):
    """A node has sent its results."""

    node: str


class NodeFailed(NamedTuple):
    """A call to a node failed, it reported an error or a ``lost`` peer that it can't reach, or its lease ran out."""

    node: str
    error: str
    message: str
    lost: str = ""


class LinkFailed(NamedTuple):
    """A node has reported another one as lost, and the coordinator has asked that one.

    Attributes:
        failed: the report.
        placement_number: of the placement that held when it came.
        answers: whether the accused node has answered.
        suspect: the end of the link with more broken ones; empty = the node that reports.
    """

    failed: NodeFailed
    placement_number: int
    answers: bool = True
    suspect: str = ""

    @property
    def ends(self) -> tuple[str, str]:
        """Both ends of the link, the suspect first."""
        is_accused = self.suspect == self.failed.lost
        return (self.failed.lost, self.failed.node) if is_accused else (self.failed.node, self.failed.lost)


class RunStopRequested(NamedTuple):
    """The user stops the run at once."""

    reason: str


class DrainRequested(NamedTuple):
    """The user stops the run after the granted turns, with a checkpoint."""

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
    | LinkFailed
    | Replanned
    | FetchedAhead
    | TurnRepeated
    | TurnChecked
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


def without_stop(entry: E) -> E:
    """Return an entry with an ordinary error in place of a node's ``InterruptedRunError``: only a user stops a run."""
    match entry:
        case LinkFailed(failed):
            return entry._replace(failed=without_stop(failed))
        case NodeFailed(_, "InterruptedRunError"):
            return entry._replace(error=RingTuneError.__name__)
        case MoveFailed(_, _, "InterruptedRunError"):
            return entry._replace(error=RingTuneError.__name__)
    return entry


# ---- commands: the run -----------------------------------------------------------------------------


class EnterPhase(NamedTuple):
    """Enter this phase of the run."""

    phase: str


class Inspect(NamedTuple):
    """Ask a node for its facts."""

    node: str


class MakePlan(NamedTuple):
    """Make the plan from the facts of each node; ``PlanMade`` or ``PlanFailed`` answers."""

    facts: Mapping[str, Any]


class Prepare(NamedTuple):
    """Send a node its part of the plan; ``Prepared`` answers."""

    node: str
    plan: Plan


class Grant(NamedTuple):
    """Permit every node to work on these consecutive turns."""

    turns: tuple[Turn, ...]


class LogStep(NamedTuple):
    """Log the values of a finished item."""

    turn: Turn
    seq: int
    step: int
    depth: int
    values: tuple[tuple[str, float], ...]


class LogTurn(NamedTuple):
    """Log a turn that every node has done: its bytes and spans are complete."""

    turn: Turn


class CheckTurn(NamedTuple):
    """Check a train turn that every node has done, before it is closed; ``TurnChecked`` answers."""

    turn: Turn


class LogUnfreeze(NamedTuple):
    """Log, as the turn of ``step`` is granted, that ``depth`` blocks train from ``step`` on."""

    step: int
    depth: int


class ChooseOperations(NamedTuple):
    """Choose the operation table from ``step`` on; ``OperationsChosen`` or ``OperationsFailed`` answers.

    ``scores`` are all scores so far, in order; empty where the choice needs none.
    """

    step: int
    scores: tuple[BlockScores, ...]


class LogOperations(NamedTuple):
    """Log that this operation table holds from ``step`` on."""

    step: int
    operations: Operations


class LogTechniqueFailed(NamedTuple):
    """Log that a node continues without a technique, and why."""

    node: str
    problem: str


class LogCheckpoint(NamedTuple):
    """Log a checkpoint: every node saved its tensors trained up to ``step``, and ``holder`` the head.

    ``digests`` are of trained blocks and of the head, as those who trained them said; without copies those who saved
    them say so.
    """

    step: int
    holder: str
    unfreezing: Unfreezing = NOTHING_KNOWN
    operations: Operations | None = None
    evaluations: Evaluations = NONE_DONE
    digests: tuple[CopyDigest, ...] = ()


class LogStop(NamedTuple):
    """Log that the run ends early, with ``step``: its evaluations did not improve."""

    step: int
    evaluations: Evaluations


class LogKept(NamedTuple):
    """Log that every node keeps in memory its tensors trained up to ``step``, and ``holder`` the head.

    ``digests`` as in ``LogCheckpoint``.
    """

    step: int
    holder: str
    unfreezing: Unfreezing = NOTHING_KNOWN
    evaluations: Evaluations = NONE_DONE
    digests: tuple[CopyDigest, ...] = ()


class LogEvaluation(NamedTuple):
    """Log a complete evaluation: values summed over the owners.

    ``is_best`` says whether it is the best so far; None where no best result is kept.
    """

    step: int
    values: tuple[tuple[str, float], ...]
    is_best: bool | None = None


class Collect(NamedTuple):
    """Ask a node for its trained tensors, or for those that it kept at the evaluation of ``best_step``; 0 = none."""

    node: str
    with_head: bool
    with_private: bool
    best_step: int = 0


class Release(NamedTuple):
    """End the run on a node; ``is_finished`` if it ended well and every result is collected."""

    node: str
    reason: str
    is_finished: bool = False


class Finish(NamedTuple):
    """End the run; ``error`` is the class of the error, empty if there was none."""

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
    | CheckTurn
    | LogRecovery
    | LogNodeError
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
