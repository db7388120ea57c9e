"""The coordinator's state machine of a run that may keep its best result (``train.keep_best``).

::

    evaluation is the best so far --> every node sends what it trained --> the next turns are granted
                                      (CollectBest, BestSent)              (LogBest)

The run stays in the phase "training" meanwhile: a node may be lost, come back or pause as at any other time. Where the
run goes back, it goes back to the end of the very step that was evaluated, and the nodes are asked anew.
"""

from __future__ import annotations

from typing import Any

from ringtune.rounds.events import round_events as rd
from ringtune.rounds.events.best_events import BestSent, CollectBest, LogBest
from ringtune.rounds.granting import Granting
from ringtune.rounds.overdue import TRAINING_PATIENCE
from ringtune.rounds.state_machine import Planner, Rounds
from ringtune.schedule.turns.early_stop import Evaluations


class BestKeepingRounds(Rounds):
    """``Rounds`` for a run that may keep the result of its best evaluation; ``Rounds`` alone where it does not.

    Args:
        planner: as for ``Rounds``, as are the others.
        keeps_best: whether it does.
        rounds: further arguments of ``Rounds``.
    """

    def __init__(self, planner: Planner | None, *, keeps_best: bool = False, **rounds: Any) -> None:
        super().__init__(planner, **rounds)
        self._keeps_best = keeps_best

    @property
    def best(self) -> Evaluations | None:
        """What is known of the evaluations of a run that keeps the best result and has one; None otherwise."""
        found = self._granting.stopping.evaluations if self._granting and self._keeps_best else None
        return found if found and found.best is not None else None

    @property
    def last_step(self) -> int:
        """Steps that are done when every granted turn is."""
        last = self._granting.last if self._granting else None
        return last.end_step if last else self._start_point.step if self._start_point else 0

    def _new_granting(self, **more: Any) -> Granting:
        return super()._new_granting(keeps_best=self._keeps_best, **more)

    def _dispatch(self, event: rd.Event, now_s: float, commands: list[rd.Command]) -> None:
        match event:
            case BestSent(node, number):
                if self._granting is not None:
                    self._on_sent(self._granting, node, number, now_s, commands)
            case rd.Progressed(node) if self._granting and node in self._granting.stopping.best.asked:
                self._set_deadline(now_s, commands)
            case _:
                super()._dispatch(event, now_s, commands)

    @property
    def _overdue(self) -> str:
        asked = self._granting.stopping.best.asked if self._granting else ()
        if not asked or self.phase != "training":
            return super()._overdue
        limit_s = TRAINING_PATIENCE * self._wait_s
        return f"waited {limit_s:g} s for the result of the best evaluation from node {', '.join(sorted(asked))}"

    def _on_sent(self, granting: Granting, node: str, number: int, now_s: float, commands: list[rd.Command]) -> None:
        stopping = granting.stopping
        if node in stopping.best.asked:
            self._set_deadline(now_s, commands)
        if stopping.best.answered(node, number):
            stopping.sent()
            commands.append(LogBest(stopping.evaluations.best_step, number))
            self._grant_ahead(now_s, commands)

    def _grant_ahead(self, now_s: float, commands: list[rd.Command]) -> None:
        super()._grant_ahead(now_s, commands)
        granting = self._made_granting
        best = granting.stopping.best
        is_asked_for = best.wanted is not None and not granting.is_exhausted and not self._drain_reason
        if best.wanted is None or not is_asked_for or best.asked or granting.open or self.phase != "training":
            return
        nodes, has_private = self._made_moving.part.nodes, self._made_moving.part.placement.private_blocks > 0
        number = best.ask(nodes)
        for node in nodes:
            is_holder = node == self._holder
            with_private = is_holder and has_private
            commands.append(CollectBest(node, best.wanted, number, with_head=is_holder, with_private=with_private))
        self._set_deadline(now_s, commands)
