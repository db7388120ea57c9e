"""The access list of the run at this node: asked by every servicer that other nodes call.

::

    Inspect   the nodes of the run may measure links, and fetch what is on this disk of the run that is resumed
    Prepare   and Move: the nodes of the placement may open links, and send copies
    Move      the nodes of the next placement may fetch what they take over

The coordinator calls all nodes at once, so that a node may fetch before this one has its ``Move``: such a call waits
until it has, for ``WAIT_S`` at most.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Final

from ringtune.errors import FrameError, TrustError
from ringtune.schedule.access import (
    NOT_PLANNED,
    AccessRight,
    CopyBytes,
    NodeCall,
    RequestedCall,
    State,
    audit_rights,
    copy_rights,
    fetch_rights,
    inspected_rights,
    link_rights,
    require_right,
)
from ringtune.schedule.course import Course
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint, StepKind, Turn, checkpoint_is_due
from ringtune.texts import RepeatCounter, times
from ringtune.transport.parties import Party, require_sender

_LOG = logging.getLogger(__name__)
WAIT_S: Final = 120.0
"""A call of the coordinator is made again for a lease, so that it reaches nodes at times so far apart."""
_MAX_WAITING: Final = 2
"""Most calls of one node that wait for a row of one placement; each holds a thread of the server."""


_MAX_DIGESTS: Final = 4096
"""Most copies that are compared with later ones, those of the newest steps."""


_MAX_NOT_DUE: Final = 2
"""Most steps between checkpoints with copies on the disk: where the user stops, and after a recovery."""


class RunAccess:
    """The rows of the run at one node; thread-safe."""

    def __init__(self, node: str, *, wait_s: float = WAIT_S) -> None:
        self._node, self._wait_s = node, wait_s
        self._changed = threading.Condition()
        self._run_id = ""
        self._inspected: tuple[AccessRight, ...] = ()
        self._placed: tuple[AccessRight, ...] = ()
        self._fetches: tuple[AccessRight, ...] = ()
        self._moves = False
        self._granted_step = 0
        self._course: Course | None = None
        self._owners: dict[int, str] = {}  # step -> owner of the granted train turn that ends with it
        self._digests: dict[tuple[int, str, bool], str] = {}  # step, node, is_head -> digest
        self._waiting = Counter[tuple[str, int]]()
        self._awaits: dict[str, int] = {}  # by node, the newest placement with a row that a call waits for
        self._refused = RepeatCounter()

    # ---- what the coordinator says ----------------------------------------------------------------

    def inspect(self, run_id: str, nodes: Collection[str], *, shards_run: str = "") -> None:
        """Add the rows of the nodes of a run that has no plan yet, in place of those of other runs."""
        with self._changed:
            self._begin(run_id)
            self._inspected = inspected_rights(run_id, nodes, shards_run=shards_run)
            self._changed.notify_all()

    def place(self, run_id: str, plan: Plan, start: StartPoint | None, sizes: CopyBytes = NOT_PLANNED) -> None:
        """Replace the rows of a placement, when this node prepares or moves to it.

        Of the resumed run a node without a part in the plan fetches nothing any more.
        """
        with self._changed:
            self._begin(run_id)
            self._inspected = tuple(
                right for right in self._inspected if right.call is NodeCall.PROBE or right.node in plan.nodes
            )
            self._placed = (
                *link_rights(run_id, plan, self._node, start),
                *copy_rights(run_id, plan, self._node, start, sizes),
            )
            self._granted_step, self._digests, self._moves = start.step if start else 0, {}, False
            self._owners, self._course = {}, plan.course
            self._changed.notify_all()

    def audit(self, run_id: str, plan: Plan) -> None:
        """Add the rows of an audited run in the placement that this node prepares or moves to."""
        with self._changed:
            if run_id == self._run_id:
                self._placed = (*self._placed, *audit_rights(run_id, plan, self._node))

    def move(
        self, run_id: str, plan: Plan, start: StartPoint, from_placement_number: int, from_step: int | None
    ) -> None:
        """Replace the rows of a move or recovery, when this node is told of it."""
        with self._changed:
            self._begin(run_id)
            self._placed, self._moves = (), True
            self._fetches = fetch_rights(run_id, plan, start, from_placement_number, from_step)
            self._changed.notify_all()

    def granted(self, turns: Iterable[Turn]) -> None:
        """Permit copies of these turns."""
        with self._changed:
            ends = {turn.end_step: turn.owner for turn in turns if turn.kind is StepKind.TRAIN}
            self._granted_step = max((self._granted_step, *ends))
            self._owners |= ends
            while len(self._owners) > _MAX_DIGESTS:
                del self._owners[min(self._owners)]

    def release(self, run_id: str, *, is_finished: bool = False) -> None:
        """Drop the rows of a run, an empty id is any run.

        What is on this disk may be fetched until the next run, unless this one ``is_finished``.
        """
        with self._changed:
            if run_id in ("", self._run_id):
                self._placed = self._fetches = ()
                kept = [] if is_finished else [right for right in self._inspected if right.state is State.DISK]
                self._inspected = tuple(kept)

    def _begin(self, run_id: str) -> None:
        if run_id != self._run_id:
            self._run_id, self._inspected, self._placed, self._fetches, self._awaits = run_id, (), (), (), {}

    # ---- what other nodes ask ---------------------------------------------------------------------

    def require(self, request: RequestedCall, caller: Party | None) -> AccessRight:
        """Return the row that permits a call; a fetch waits for its row; raises ``TrustError`` or ``FrameError``.

        Args:
            request: the call, in the words of the caller.
            caller: of its certificate; None = plain text, where nodes are trusted with their names.
        """
        try:
            if caller is not None:
                require_sender(caller, request.node)
            with self._changed:
                if request.call is NodeCall.FETCH and request.state is not State.AUDIT:
                    self._wait_for(request)
                if request.call is NodeCall.LINK and self._moves:  # another node may have gone back already
                    raise FrameError(f"node {self._node} moves and takes no links yet; try again")
                self._check_owner(request)
                return self._row(request)
        except TrustError as error:
            count = self._refused.told((request.call, request.node))
            if count:
                _LOG.warning("%s%s", error, times(count))
            raise

    def _check_owner(self, request: RequestedCall) -> None:
        """Refuse the copy of a head by another owner than that of the turn; the lock is held."""
        owner = self._owners.get(request.step, request.node)
        if request.call is NodeCall.KEEP and request.is_head and owner != request.node:
            raise TrustError(
                f"node {self._node} takes no copy of {request.text} of node {request.node}: the turn is that of node "
                f"{owner}; remove a node that does this unasked ('ringtune nodes remove NAME')"
            )

    def _row(self, request: RequestedCall) -> AccessRight:
        rights = (*self._placed, *self._fetches, *self._inspected)
        return require_right(rights, request, node=self._node, granted_step=self._granted_step)

    def _wait_for(self, request: RequestedCall) -> None:
        """Wait until a row permits a fetch of the run; return at once where calls of its node wait already.

        A call waits no longer once its node asks for a later placement: of a recovery that took the place of its own.
        """
        node, number = key = request.node, request.placement_number
        if request.run_id != self._run_id or self._waiting[key] >= _MAX_WAITING:
            return

        def is_over() -> bool:
            has_row = any(right.node == node and not right.problem(request) for right in self._fetches)
            return has_row or number < self._awaits.get(node, number)

        if number > self._awaits.get(node, -1):
            self._awaits[node] = number
            self._changed.notify_all()
        self._waiting[key] += 1
        try:
            self._changed.wait_for(is_over, self._wait_s)
        finally:
            self._waiting[key] -= 1
            self._waiting += Counter()  # drops those without a waiting call

    def require_member(self, call: NodeCall, caller: Party | None) -> None:
        """Refuse a call that names neither caller nor run, unless its certificate is of a node of this run."""
        if caller is not None:
            self.require(RequestedCall(call, caller.name, self._run_id), caller)

    def _check_checkpoint(self, request: RequestedCall) -> None:
        """Refuse copies for the disk of more than ``_MAX_NOT_DUE`` steps without a checkpoint; the lock is held."""
        course = self._course
        if request.state is not State.DISK or course is None or checkpoint_is_due(course, request.step):
            return
        others = {step for step, node, _ in self._digests if node == request.node and step != request.step}
        if sum(not checkpoint_is_due(course, step) for step in others) >= _MAX_NOT_DUE:
            raise TrustError(
                f"node {self._node} takes no copy of {request.text} of node {request.node}: no checkpoint is due "
                "there; remove a node that does this unasked ('ringtune nodes remove NAME')"
            )

    def require_only(self, request: RequestedCall, sha256: str) -> None:
        """Refuse a second, different copy of one state; the same one may arrive again; raises ``TrustError``."""
        with self._changed:
            self._check_checkpoint(request)
            if self._digests.setdefault((request.step, request.node, request.is_head), sha256) == sha256:
                if len(self._digests) > _MAX_DIGESTS:
                    del self._digests[min(self._digests)]
                return
        error = TrustError(
            f"node {self._node} has another copy of {request.text} of node {request.node} already, and keeps that; "
            "train from the newest checkpoint with --resume"
        )
        _LOG.warning("%s", error)
        raise error
