"""A run on the virtual clock whose nodes keep copies of what they have trained, and some of whose nodes are lost.

Lost ones may come back, with nothing of what they had, and new ones may come. Steps may be bad too: a node tells of it,
and does nothing more until all go back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ringtune.engine import events as ev
from ringtune.errors import DivergedError
from ringtune.run_control import events as rd
from ringtune.run_control.recovery import RecoveryPolicy
from ringtune.run_control.state_machine import RunStateMachine
from ringtune.schedule.actions import Action, TensorKey
from ringtune.schedule.lowering import links
from ringtune.schedule.placement import Placement
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StepKind, Turn, turn_sequence
from sim.ring import VirtualNode
from tests.support.recorded_ring import RecordedRing


class KeepingCarrier(Protocol):
    """What a carrier of real tensors does besides where copies are kept."""

    def keep(self, node: str, part: Plan, turn: Turn) -> None:
        """Keep what ``node`` has trained at the end of a turn, here and at its copy's holder."""

    def lose(self, node: str) -> None:
        """Forget all that a node had."""

    def sent(self, node: str, *, with_head: bool, with_private: bool) -> dict[str, Any]:
        """What a node sends of its result, by name of the tensor."""


def _place(turn: Turn) -> tuple[int, str, str, int, int, int]:
    """All by which a node tells whether a frame is of a turn."""
    return turn.index, str(turn.kind), turn.owner, turn.first_seq, turn.num_items, turn.first_step


class RecoveringRing(RecordedRing):
    """A ``RecordedRing`` that goes on when nodes are lost.

    Args:
        plan: of the run.
        place: finds a placement without lost nodes; None = there is none.
        notice_s: seconds until the coordinator knows that a node is lost.
        back_s: seconds from then on until it is back; None = it stays away.
        copy_s: seconds until a copy has come to its holder.
        copies: whether nodes keep copies.
        num_copies: as in the placement.
        keeper: keeps real tensors.
        recovery: how the run recovers.
        rounds: further arguments of ``RunStateMachine``.
        values: arguments of ``RecordedRing``.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        place: Callable[[rd.FindPlacement], Placement | None],
        notice_s: Callable[[], float] = lambda: 1.0,
        back_s: Callable[[str], float | None] = lambda node: None,
        copy_s: Callable[[], float] = lambda: 0.0,
        copies: bool = True,
        num_copies: int = 0,
        keeper: KeepingCarrier | None = None,
        wait_s: float = 1e6,
        recovery: RecoveryPolicy = RecoveryPolicy(),  # noqa: B008 - it is frozen
        rounds: dict[str, Any] | None = None,
        **values: Any,
    ) -> None:
        plan = plan.with_copies(copies, num_copies, plan.placement.racks)
        super().__init__(plan, wait_s=wait_s, **values)
        self._rounds = RunStateMachine(
            lambda facts: plan, wait_s=wait_s, start=values.get("start"), recovery=recovery, **(rounds or {})
        )
        self._place, self._notice_s, self._copy_s, self._keeper = place, notice_s, copy_s, keeper
        self._back_s = back_s
        self._turns: dict[int, Turn] = {}
        self._derived = turn_sequence(plan.course, start=values.get("start"))
        self.lost: list[str] = []
        self.came: list[str] = []
        self.holder = ""
        self.best: tuple[int, dict[str, Any]] = (-1, {})
        self.collected_best: set[int] = set()
        self._sent: dict[int, dict[str, Any]] = {}
        self.surprises: list[Turn] = []
        self.moments: list[tuple[str, str]] = []
        self.error: Callable[[], str] = lambda: "PeerLostError"  # of the next node that is lost
        self.when: Callable[[str, str], str | None] = lambda what, node: None
        self.is_bad: Callable[[str, Action], bool] = lambda node, action: False
        self.cut = ("", "")  # source and target of a link that can't be opened any more
        self.before_event: Callable[[rd.Event], object] = lambda event: None  # of those that the state machine gets
        self.after_event: Callable[[rd.Event], object] = lambda event: None

    @property
    def num_kept(self) -> int:
        """How many turns are committed."""
        return sum(isinstance(entry, rd.LogKept) for entry in self.result.logged)

    def turn_of(self, action: Action) -> Turn:
        """The granted turn of an action."""
        return next(turn for turn in self._turns.values() if turn.first_seq <= action.seq < turn.end_seq)

    def lose(self, node: str) -> None:
        """Lose a node now; the coordinator hears of it later."""
        if node in self.lost or self.result.finish is not None:
            return
        self.lost.append(node)
        self._stop(node)
        if self._keeper is not None:
            self._keeper.lose(node)
        failed = rd.NodeFailed(node, error := self.error(), f"node {node} is lost, {error}")
        self.clock.at(self.clock.now_s + self._notice_s(), self._notice, failed)

    def _notice(self, failed: rd.NodeFailed) -> None:
        """The coordinator hears of a loss; some time later the node is there again."""
        self._tell_rounds(failed)
        back_s = self._back_s(failed.node)
        if back_s is not None:
            self.clock.at(self.clock.now_s + back_s, self.come, failed.node)

    def lose_link(self, node: str, peer: str) -> rd.LinkFailed:
        """Lose the link of two living nodes: the one reports the other, which answers the coordinator."""
        failed = rd.NodeFailed(node, "PeerLostError", f"node {node} has lost node {peer}", peer)
        told = rd.LinkFailed(failed, self._part.placement.placement_number)
        self.clock.at(self.clock.now_s, self._tell_rounds, told)
        return told

    def come(self, node: str) -> None:
        """A node is there that was lost, or a new one; the coordinator knows all of it."""
        if self.result.finish is not None:
            return
        if node in self.lost:
            self.lost.remove(node)
            self._stop(node)  # whatever was under way is of its former process
        self._nodes.setdefault(node, VirtualNode(node, None))
        self.came.append(node)
        self._tell_rounds(rd.NodeJoined(node))

    def _spoil(self, node: VirtualNode, what: str) -> None:
        """Something is not finite at a node, which tells it; whatever it says comes before it has stopped."""
        if not self._is_old(node):
            self._stop(node.name)
            failed = rd.NodeFailed(node.name, DivergedError.__name__, f"node {node.name}: {what}")
            self.clock.at(self.clock.now_s, self._tell_rounds, failed)

    def _note(self, what: str, node: str) -> None:
        """Something begins at a node: one may be lost just now."""
        self.moments.append((what, node))
        who = self.when(what, node)
        if who is not None:
            self.lose(who)

    def _stop(self, node: str) -> None:
        before = self._nodes[node]
        self._nodes[node] = before.moved(None)
        before.handle = lambda event, now_s: []

    def _is_old(self, node: VirtualNode) -> bool:
        return node.name in self.lost or self._nodes[node.name] is not node

    def _is_derived(self, turn: Turn) -> bool:
        """Whether a node that has not heard of the grant would know this turn, of which a frame may come to it."""
        derived = next(self._derived, None)
        return derived is not None and _place(derived) == _place(turn)

    # ---- what is done otherwise -------------------------------------------------------------------

    def _obey_rounds(self, command: rd.Command) -> None:
        match command:
            case rd.Halt(node, placement_number):
                self._note("halt", node)
                if node not in self.lost:
                    self._stop(node)
                self._answer_rounds(node, rd.Halted(node, placement_number))
            case rd.FindPlacement(placement_number, _, _, _):
                found = self._place(command)
                answer = (
                    rd.PlacementFound(placement_number, found)
                    if found
                    else rd.NoPlacementFound(placement_number, "CapacityError", "nothing fits any more")
                )
                self.clock.at(self.clock.now_s + self._notice_s(), self._tell_rounds, answer)
            case rd.Move(node, part) if node == self.cut[0] and self.cut in links(part, command.start):
                problem = f"node {self.cut[1]} can't be reached"
                failed = rd.MoveFailed(node, part.placement.placement_number, "ConnectionFailedError", problem)
                self._answer_rounds(node, failed)
            case rd.Move(node):
                self._note("move", node)
                self._derived = turn_sequence(command.part.course, start=command.start)
                if node not in self.lost:
                    super()._obey_rounds(command)
            case rd.Rest(node) if node in self.lost:
                return
            case rd.Prepare(node, _):
                who = self.when("prepare", node)  # no moment to count from: nothing happens yet
                if who is not None:
                    self.lose(who)
                super()._obey_rounds(command)
            case rd.Collect(node, with_head):
                self._note("collect", node)
                self.collected_best.add(command.best_step)
                if with_head:
                    self.holder = node
                self._answer_rounds(node, rd.Collected(node))
            case rd.CollectBest(node, _, number, with_head, with_private):
                self._note("collect best", node)
                if node not in self.lost and self._keeper is not None:
                    sent = self._keeper.sent(node, with_head=with_head, with_private=with_private)
                    self._sent.setdefault(number, {}).update(sent)
                self._answer_rounds(node, rd.BestSent(node, number))
            case rd.LogBest(step, number):
                self.best = (step, self._sent.get(number, {}))
                self.result.logged.append(command)
            case rd.Grant(turns):
                self._turns |= {turn.index: turn for turn in turns}
                self.surprises += [turn for turn in turns if not self._is_derived(turn)]
                super()._obey_rounds(command)
            case rd.LogRecovery():
                self._part = command.part
                self.result.logged.append(command)
            case _:
                super()._obey_rounds(command)

    def _tell_rounds(self, event: rd.Event) -> None:
        self.before_event(event)
        super()._tell_rounds(event)
        self.after_event(event)

    def _answer_rounds(self, node: str, event: rd.Event, *, after_s: float = 0.0) -> None:
        if node not in self.lost:
            super()._answer_rounds(node, event, after_s=after_s)

    def _grant(self, node: VirtualNode, turns: tuple[Turn, ...]) -> None:
        if not self._is_old(node):
            super()._grant(node, turns)

    def _done(self, node: VirtualNode, action: Action, start_s: float) -> None:
        if self._is_old(node):
            return
        if self.is_bad(node.name, action):
            self._spoil(node, f"{action} is not finite")
            return
        try:
            super()._done(node, action, start_s)
        except DivergedError as error:
            self._spoil(node, str(error))

    def _tell(self, node: VirtualNode, event: ev.Event) -> None:
        try:
            super()._tell(node, event)
        except DivergedError as error:
            self._spoil(node, str(error))

    def _run(self, node: VirtualNode, command: ev.RunAction) -> None:
        self._note(command.action.op.name.lower(), node.name)
        if not self._is_old(node):
            super()._run(node, command)

    def _send_head(self, node: VirtualNode, command: ev.SendHead) -> None:
        self._note("hand-over", node.name)
        if not self._is_old(node):
            super()._send_head(node, command)

    def _send_tensor(self, node: VirtualNode, command: ev.SendTensor | ev.SendParcel) -> None:
        if not self._is_old(node):
            super()._send_tensor(node, command)

    def _accept(self, node: VirtualNode, command: ev.Accept | ev.AcceptParcel) -> None:
        if not self._is_old(node):
            super()._accept(node, command)

    def _deliver(self, key: TensorKey, source: str, node: VirtualNode) -> None:
        if not self._is_old(node):
            super()._deliver(key, source, node)

    def _on_report_turn(self, node: VirtualNode, command: ev.ReportTurn) -> None:
        if self._is_old(node):
            return
        turn = self._turns[command.turn]
        if turn.kind is not StepKind.TRAIN:
            super()._on_report_turn(node, command)
            return
        self._note("copy", node.name)
        if self._is_old(node):
            return
        # what was trained is kept at once, and its copy comes later: the turn is done when it is there
        self.clock.at(self.clock.now_s + self._copy_s(), self._copied, node, command, self._part)
        if self._keeper is not None:
            self._keeper.keep(node.name, self._part, turn)

    def _copied(self, node: VirtualNode, command: ev.ReportTurn, part: Plan) -> None:
        if not self._is_old(node):
            super()._on_report_turn(node, command)
