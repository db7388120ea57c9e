"""What the loop of a run needs from its partners: the executor, links to peers, reports, and shards.

The loop itself needs neither torch nor gRPC; its partners do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol

from edge.run import reporter as rp
from ringtune.files.pieces import Pieces
from ringtune.rounds.checkpoint import Shard
from ringtune.schedule.actions import Action, TensorKey
from ringtune.schedule.operations.scores import BlockScores
from ringtune.schedule.turns.turns import Turn


class Executor(Protocol):
    """What the loop needs from ``edge.compute.executor.NodeExecutor``."""

    def grant(self, turn: Turn) -> None:
        """Learn the items of a turn."""

    def forget_turn(self, index: int) -> str:
        """Drop the items and tensors of a turn; return why no hidden states are kept any more, once."""

    def run(self, action: Action) -> tuple[tuple[str, float], ...]:
        """Carry a compute action out."""

    def take_scores(self, turn: int) -> tuple[BlockScores, ...]:
        """Return what this node gathered in a score turn, in any order, and forget it."""

    def copy_digest(self, start: int, stop: int) -> str:
        """Return the digest of this owner's embedding or head, or of a replica's blocks, as they are now."""

    def put_tensor(self, key: TensorKey, tensor: Any, mask: Any) -> None:
        """Give a micro-batch the tensor that arrived for it."""

    def take_tensor(self, key: TensorKey) -> tuple[Any, Any]:
        """Take a micro-batch's tensor and mask to send them."""

    def head_blob(self) -> Pieces:
        """Return the head with its optimizer state; it must not change before that was gone through."""

    def load_head_blob(self, data: Pieces) -> None:
        """Replace the head and its optimizer state by those of ``head_blob``, and let go of ``data`` on the way."""

    def drop_head_state(self) -> None:
        """Free the optimizer state of a head that was handed over."""

    def take_parcel(self, key: TensorKey) -> Pieces:
        """Return a parcel for sending; what it was made of may change before it was gone through."""

    def put_parcel(self, key: TensorKey, data: Pieces) -> None:
        """Take what ``take_parcel`` of another node gave."""

    def shard(self, metadata: Mapping[str, str], *, with_head: bool) -> Pieces:
        """Return this node's part of a checkpoint."""


class Link(Protocol):
    """What the loop needs from a link to a peer; a send only queues, and returns the payload's bytes."""

    def send_tensor(self, key: TensorKey, tensor: Any, mask: Any) -> int:
        """Queue a tensor for the peer."""

    def send_blob(self, kind: str, seq: int, data: Pieces) -> int:
        """Queue a head for a peer; ``seq`` is the index of the turn."""

    def send_parcel(self, key: TensorKey, data: Pieces) -> int:
        """Queue a parcel."""

    def close(self) -> None:
        """End the link."""


class ReportSink(Protocol):
    """What the loop needs from ``edge.run.reporter.Reporter``."""

    def put(self, entry: rp.Entry) -> None:
        """Queue an entry."""


class ShardSink(Protocol):
    """What the loop needs from ``edge.shards.saver.Saver``."""

    def save(self, step: int, executor: Executor, *, with_head: bool) -> Shard:
        """Write this node's shard of the checkpoint at ``step`` to the disk."""

    def keep_from(self, step: int) -> None:
        """Delete the shards of steps before ``step``."""


class Keeper(Protocol):
    """What the loop needs from ``edge.agent.moving.keeping.TurnKeeper``."""

    def head_goes(self, index: int, turns: Iterable[Turn]) -> None:
        """Hear that the head goes to the owner of turn ``index``, and which turns are open here."""

    def end(self, turn: Turn, then: Callable[[], None]) -> None:
        """Keep what was trained until the end of a turn, and call ``then`` once that is done."""

    def close(self) -> None:
        """Keep no more."""


class NoKeeper:
    """Keeps nothing."""

    def head_goes(self, index: int, turns: Iterable[Turn]) -> None:
        """Let it go."""

    def end(self, turn: Turn, then: Callable[[], None]) -> None:
        """Go on at once."""
        then()

    def close(self) -> None:
        """There is nothing to end."""


NO_KEEPER: Final = NoKeeper()
