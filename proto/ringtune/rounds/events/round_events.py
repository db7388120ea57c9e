"""What the coordinator's state machine (``ringtune.rounds.rounds``) is told, and what it answers: values only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ringtune.engine.events import CancelTimer, SetTimer, TimerFired
from ringtune.rounds.copy_digests import CopyDigest
from ringtune.rounds.events.best_events import BestSent, CollectBest, LogBest
from ringtune.rounds.events.move_events import LogMove, LogPlan, Move, Moved, MoveFailed, Rest, Rested
from ringtune.rounds.events.recovery_events import (
    AwaitNodes,
    Halt,
    Halted,
    LogRecovery,
    NodeJoined,
    NotPlaced,
    PlaceAgain,
    Placed,
    ShowStep,
)
from ringtune.rounds.events.replanning_events import FetchAhead, FetchedAhead, LogFetched, Replanned
from ringtune.schedule.operations.scores import BlockScores
from ringtune.schedule.operations.table import Operations
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.early_stop import NONE_DONE, Evaluations
from ringtune.schedule.turns.turns import StartPoint, Turn
from ringtune.schedule.turns.unfreezing import NOTHING_KNOWN, Unfreezing

# ---- events --------------------------------------------------------------------------------------


class Started(NamedTuple):
    """Begin a run on these nodes, sorted by name."""

    nodes: tuple[str, ...]


class Inspected(NamedTuple):
    """A node answered Inspect; ``facts`` go to the planner as they are."""

    node: str
    facts: Any


class PlanMade(NamedTuple):
    """The plan is made; ``start`` is where a run goes on that began with it before."""

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


class CacheLost(NamedTuple):
    """A node keeps no hidden states any more, and says why; it comes before the end of the turn in which that was."""

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
    """Bytes of a result came from a node, or went to it: neither it nor the link has stopped."""

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


class StopAsked(NamedTuple):
    """The user stops the run at once."""

    reason: str


class DrainAsked(NamedTuple):
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
    | Placed
    | NotPlaced
    | NodeJoined
    | Replanned
    | FetchedAhead
    | StepReported
    | TurnReported
    | CacheLost
    | OperationsChosen
    | OperationsFailed
    | Progressed
    | Collected
    | BestSent
    | NodeFailed
    | StopAsked
    | DrainAsked
    | TimerFired
)

# ---- commands ------------------------------------------------------------------------------------


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


class LogCacheLost(NamedTuple):
    """Log that a node keeps no hidden states any more, and why."""

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
    | PlaceAgain
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
    | LogCacheLost
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
