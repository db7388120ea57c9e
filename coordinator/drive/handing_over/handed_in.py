"""What the nodes of a run hand in: at its end, and while it rests after the best evaluation (``train.keep_best``)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import NamedTuple

from coordinator.drive.agent_calls import AgentCalls
from coordinator.drive.answers import Files
from coordinator.drive.handing_over.results import Results
from coordinator.records.events import EventSink
from ringtune.costs.profile import ModelFacts
from ringtune.errors import PlanError
from ringtune.files.pieces import Pieces
from ringtune.jobs.job import Job
from ringtune.models.result_files import BEST_FOLDER
from ringtune.rounds import rounds
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.early_stop import Evaluations
from ringtune.v1 import control_pb2


class BestFiles(NamedTuple):
    """A node's part of the best result, by file name, as it was asked for with this number."""

    node: str
    number: int
    files: dict[str, Pieces]


class HandedIn:
    """What the nodes of one run hand in.

    Args:
        job: of the run.
        put: takes the answers of nodes, from other threads.
        emit: sends an event to the submitter.

    Attributes:
        last: what they hand in at the end.
    """

    def __init__(self, job: Job, put: Callable[[Files | BestFiles | rounds.Progressed], None], emit: EventSink) -> None:
        self._job, self._put, self._emit = job, put, emit
        self._model: ModelFacts | None = None
        self.last = Results()
        self._number, self._best = 0, Results()

    def expect(self, model: ModelFacts) -> None:
        """Note the sizes of the model, with which parts are compared."""
        self._model = model
        self.last.expect(model)

    def carry_out(
        self,
        command: rounds.Collect | rounds.CollectBest | rounds.LogBest,
        calls: Mapping[str, AgentCalls],
        part: Plan,
    ) -> None:
        """Ask a node for its part, or send the submitter what has come from all of the best result.

        Args:
            command: of the state machine.
            calls: to the nodes, by name.
            part: of the plan that holds.

        Raises:
            IntegrityError: what came is not as the plan has it.
            StorageError: no room.
        """
        if isinstance(command, rounds.Collect):
            self.last.ask(command, calls[command.node], self._job, part, self._put)
            return
        if isinstance(command, rounds.CollectBest):
            self._ask(command, calls[command.node], part)
            return
        if command.number != self._number:
            raise PlanError(f"the best result of step {command.step} is not the one that came; please report this")
        self._best.send(self._job, self._emit, part=part, below=f"{BEST_FOLDER}/{command.step}/")
        self._tell(command.step, is_result=False)
        self._best.drop()

    def _ask(self, command: rounds.CollectBest, calls: AgentCalls, part: Plan) -> None:
        node, number = command.node, command.number
        if number != self._number:
            self._best.drop()
            self._number, self._best = number, Results()
            if self._model is not None:
                self._best.expect(self._model)
        self._best.ask(
            rounds.Collect(node, command.with_head, command.with_private),
            calls,
            self._job,
            part,
            lambda answer: self._put(
                answer if isinstance(answer, rounds.Progressed) else BestFiles(node, number, answer.files)
            ),
            goes_on=True,
        )

    def take(self, came: Files | BestFiles) -> rounds.Collected | rounds.BestSent:
        """Take a node's part, unless it was asked anew meanwhile; return what the state machine has to know."""
        if isinstance(came, Files):
            self.last.take(came.node, came.files)
            return rounds.Collected(came.node)
        if came.number == self._number:
            self._best.take(came.node, came.files)
        return rounds.BestSent(came.node, came.number)

    def settle(self, best: Evaluations | None, last_step: int) -> bool:
        """Tell the submitter that the best result is that of the run; False if that is the one of the last step."""
        if best is None or best.best_step == last_step:
            return False
        self._tell(best.best_step, is_result=True)
        return True

    def drop(self) -> None:
        """Delete all files."""
        self.last.drop()
        self._best.drop()

    def _tell(self, step: int, *, is_result: bool) -> None:
        self._emit(control_pb2.RunEvent(best_json=json.dumps({"step": step, "is_result": is_result})))
