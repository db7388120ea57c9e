"""Keep what a node has trained at the end of each train turn, and send the next host in the ring a copy.

::

    compute thread   trained tensors -> a file, on the shelf of this node
    own thread       that file -> next host, and the head -> next owner, if the turn is of this one;
                     once they are there, the coordinator hears that the turn is done here
    checkpoint       what others gave this node of that step goes to its disk, before they hear that it is here
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from edge.agent.moving.fetch import push
from edge.agent.moving.kept import KeptTurns, Save
from edge.shards.block_files import metadata
from ringtune.errors import ConnectionFailedError, RingTuneError
from ringtune.rounds.going_back.kept_copies import trained_blocks
from ringtune.schedule.changing_hands.copy_holders import copy_holder
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.turns import StepKind, Turn
from ringtune.schedule.whose_rows.leaving_out import head_holder

_LOG = logging.getLogger(__name__)
_RETRY_S = 0.5


class _Copy(NamedTuple):
    """A file that goes to another node, and what follows once it is there."""

    step: int
    file: bytes
    holder: str
    is_head: bool
    then: Callable[[], None]


class TurnKeeper:
    """Keeps the ends of the turns of one run at one node, in one placement.

    Args:
        run_id: of the run.
        node: this node.
        plan: the part of the plan that holds.
        executor: of the node.
        kept: keeps the files here.
        make_file: copies what was trained of some blocks into a file.
        addresses: ``host:port`` by node.
        patience_s: so long the next host is tried again before it counts as lost.
        on_lost: told that the node of a copy can't be reached, and why.
        save: puts a file on this node's disk; None = it has none.
    """

    def __init__(
        self,
        run_id: str,
        node: str,
        plan: Plan,
        executor: Any,
        kept: KeptTurns,
        *,
        make_file: Callable[[Any, tuple[int, ...], Mapping[str, str]], bytes],
        addresses: Mapping[str, str],
        patience_s: float,
        on_lost: Callable[[str, str], None],
        save: Save | None = None,
    ) -> None:
        self._run_id, self._node, self._plan, self._executor = run_id, node, plan, executor
        self._kept, self._make_file, self._on_lost, self._save = kept, make_file, on_lost, save
        self._holder = copy_holder(plan.placement, node)
        self._head_holder = head_holder(plan.course, node)
        self._addresses, self._patience_s = addresses, patience_s
        self._heads: dict[int, bytes] = {}
        self._copies: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        kept.begin(run_id)
        if self._holder or self._head_holder:
            threading.Thread(target=self._send_all, name=f"copies-{node}", daemon=True).start()

    # ---- on the compute thread --------------------------------------------------------------------

    def head_goes(self, index: int, turns: Iterable[Turn]) -> None:
        """Copy the head, which goes to the owner of turn ``index``, if a train turn of this owner ends with it."""
        mine = [turn.index for turn in turns if turn.kind is StepKind.TRAIN and turn.owner == self._node]
        done = max((own for own in mine if own < index), default=None)
        if done is not None:
            self._heads[done] = bytes(self._executor.head_blob())

    def end(self, turn: Turn, then: Callable[[], None]) -> None:
        """Keep what was trained until the end of a turn; ``then`` follows once a copy is where it shall be."""
        if turn.kind is StepKind.CHECKPOINT and self._save is not None:
            self._kept.save_at(turn.first_step, self._save, with_head=turn.owner != self._node)
        if turn.kind is not StepKind.TRAIN:
            then()
            return
        blocks, step = trained_blocks(self._plan.course, self._plan.placement, self._node, turn), turn.end_step
        head = self._heads.pop(turn.index, None)
        if turn.owner == self._node and head is None:
            head = bytes(self._executor.head_blob())
        file = self._make_file(self._executor, blocks, metadata(self._run_id, step))
        self._kept.keep(self._run_id, step, self._node, file, head)
        copies: list[tuple[bytes, str, bool]] = []
        if self._head_holder and head is not None:
            copies.append((head, self._head_holder, True))
        if self._holder and blocks:
            copies.append((file, self._holder, False))
        for number, (content, holder, is_head) in enumerate(copies, start=1):
            self._copies.put(_Copy(step, content, holder, is_head, then if number == len(copies) else _nothing))
        if not copies:
            then()

    def close(self) -> None:
        """Send nothing more."""
        self._closed.set()
        self._copies.put(None)

    # ---- on its own thread ------------------------------------------------------------------------

    def _send_all(self) -> None:
        while (copy := self._copies.get()) is not None and not self._closed.is_set():
            try:
                self._send(copy)
            except RingTuneError as error:
                if not self._closed.is_set():
                    self._on_lost(copy.holder, f"it takes no copy of what was trained: {error}")
                return
            copy.then()

    def _send(self, copy: _Copy) -> None:
        """Send a copy; try again for a while where nobody answers."""
        deadline_s = time.monotonic() + self._patience_s
        while True:
            try:
                push(
                    self._run_id,
                    copy.step,
                    self._node,
                    copy.file,
                    copy.holder,
                    self._addresses.get(copy.holder, ""),
                    self._patience_s,
                    is_head=copy.is_head,
                    placement_number=self._plan.placement.placement_number,
                )
            except ConnectionFailedError as error:
                if self._closed.is_set() or time.monotonic() > deadline_s:
                    raise
                _LOG.info("node %s takes no copy yet: %s", copy.holder, error)
            else:
                return
            self._closed.wait(_RETRY_S)


def _nothing() -> None:
    """Follow up a copy after which another one goes."""
