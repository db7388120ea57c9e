"""Drive the moves of a run: ask nodes to rest and to move, and know which placement they have.

::

    FetchAhead, Rest, Move of the state machine --> calls to nodes --> their answers back through the run's queue
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from coordinator.drive.agent_calls import AgentCalls
from coordinator.drive.answers import NodeMoved, NodePrepared, NodeRested
from coordinator.drive.checkpointing import Checkpointing
from coordinator.records.report import RunLedger
from ringtune.errors import PeerLostError, RingTuneError
from ringtune.files.pieces import Pieces
from ringtune.files.strict import read_object
from ringtune.jobs.job import Job
from ringtune.quantities import format_bytes, format_seconds
from ringtune.rounds import rounds
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.turns import Turn
from ringtune.v1 import control_pb2


class MoveDriving:
    """The moves of one run.

    Args:
        part: of the plan that holds when nodes are prepared.
        job: of the run; its nodes wait as long for each other as calls may take.
        checkpoints: know under which run nodes keep shards.
        addresses: of the nodes.
        calls: to the nodes.
        put: takes a node's answer, from any thread.

    Attributes:
        part: of the plan that holds now.
    """

    def __init__(
        self,
        part: Plan,
        job: Job,
        checkpoints: Checkpointing,
        addresses: Mapping[str, str],
        calls: Mapping[str, AgentCalls],
        put: Callable[[NodePrepared | NodeRested | NodeMoved | rounds.Event], None],
    ) -> None:
        self.part = part
        self._job_toml, self._checkpoints, self._addresses = job.to_toml(), checkpoints, addresses
        self._calls, self._put = calls, put
        self._wait_s, self._recovers = job.runtime.wait_s, part.placement.copies
        self._place()

    def prepare(self, command: rounds.Prepare, saved: Mapping[str, Pieces] | None) -> None:
        """Hand a node the plan, with files of a saved result to begin with."""
        node, plan = command
        self._calls[node].prepare(
            plan.to_wire(),
            self._job_toml,
            {name: self._addresses[name] for name in plan.nodes},
            timeout_s=self._wait_s,
            on_result=lambda hosted: self._put(NodePrepared(node, hosted)),
            on_progress=lambda: self._put(rounds.Progressed(node)),
            saved=saved,
            extend=lambda request: self._checkpoints.go_on(node, request),
        )

    def grant(self, turns: Sequence[Turn]) -> None:
        """Grant turns to all nodes that work on them, and let shards go that are not needed any more."""
        for node in self.part.nodes:
            self._calls[node].grant(turns, keep_from_step=self._checkpoints.keep_from_step)

    def tell(self, command: rounds.FetchAhead | rounds.Rest | rounds.Move | rounds.Halt) -> None:
        """Let a node fetch what it will need, rest, move, or stop as another one is lost, which gives its move up."""
        if isinstance(command, rounds.FetchAhead):
            self._fetch_ahead(command)
        elif isinstance(command, rounds.Rest):
            self._rest(command)
        elif isinstance(command, rounds.Halt):
            self._halt(*command)
        else:
            self._move(command)

    def _fetch_ahead(self, command: rounds.FetchAhead) -> None:
        node, part = command
        placement_number, began_s = part.placement.placement_number, time.monotonic()

        def answer(num_bytes: int, problem: str = "") -> None:
            self._put(rounds.FetchedAhead(node, placement_number, num_bytes, time.monotonic() - began_s, problem))

        self._calls[node].fetch_ahead(
            self._prepare_request(part),
            timeout_s=self._wait_s,
            on_result=answer,
            on_failed=lambda error: answer(0, str(error)),
        )

    def _prepare_request(self, part: Plan) -> control_pb2.PrepareRequest:
        return control_pb2.PrepareRequest(
            placement_number=part.placement.placement_number,
            plan_json=part.to_wire(),
            job_toml=self._job_toml,
            addresses=dict(self._addresses),
            checkpoint_run=self._checkpoints.shards_run,
        )

    def _rest(self, command: rounds.Rest) -> None:
        node, placement_number = command.node, self.part.placement.placement_number
        self._calls[node].rest(
            placement_number,
            timeout_s=self._wait_s,
            on_result=lambda reply: self._put(NodeRested(rounds.Rested(node, placement_number), reply.totals_json)),
            on_failed=self._failed(node, placement_number),
        )

    def _move(self, command: rounds.Move) -> None:
        node, part, start, from_placement_number, sources, from_step, head_from = command
        placement_number = part.placement.placement_number
        request = control_pb2.MoveRequest(
            prepare=self._prepare_request(part),
            step=start.step,
            holder=start.holder,
            first_turn=start.first_turn,
            first_seq=start.first_seq,
            from_placement_number=from_placement_number,
            recovers=from_step is not None,
            repeats=start.repeats,
            head_from=head_from,
        )
        for source in sources:
            request.sources.add(node=source.node, start=source.start, stop=source.stop)
        self._calls[node].move(
            request,
            timeout_s=self._wait_s,
            on_result=lambda reply: self._put(
                NodeMoved(rounds.Moved(node, placement_number, reply.fetched_bytes), reply.hosted_bytes)
            ),
            on_failed=self._failed(node, placement_number),
        )

    def _halt(self, node: str, placement_number: int) -> None:
        self._calls[node].halt(
            timeout_s=self._wait_s,
            on_result=lambda: self._put(rounds.Halted(node, placement_number)),
            on_failed=self._failed(node, placement_number),
        )

    def recovered(self, command: rounds.LogRecovery) -> str:
        """Grant in the placement of a recovery from now on; return a sentence for the user."""
        self.part = command.part
        self._place()
        if not command.lost:
            return (
                f"a bad step: {command.bad_step}; all nodes went back to the end of step {command.step} in"
                f" {format_seconds(command.seconds)} and do what came after it once more"
            )
        came = format_bytes(sum(count for _, count in command.fetched_bytes))
        out, num_steps = ", ".join(command.left_out), self.part.course.num_steps
        shorter = f"; the rows of {out} are left out, so that the run ends with step {num_steps}" if out else ""
        gone = [node for node in command.lost if node not in command.back]
        who = [f"node {', '.join(gone)} is lost"] if gone else []
        who += [f"node {', '.join(command.back)} is back"] if command.back else []
        return (
            f"{' and '.join(who)}; the run goes on from step {command.step}, in placement"
            f" {self.part.placement.placement_number}, after {format_seconds(command.seconds)}; {came} of copies "
            "were fetched"
        ) + shorter

    def log(self, command: rounds.LogMove) -> str:
        """Grant in the placement that holds from now on; return a sentence for the user."""
        self.part = command.part
        self._place()
        where = f"after step {command.step}"
        if command.problem:
            return f"the run stays on placement {self.part.placement.placement_number} {where}: {command.problem}"
        came = format_bytes(sum(count for _, count in command.fetched_bytes))
        return (
            f"the run moved to placement {command.placement_number} {where} in {format_seconds(command.seconds)}; "
            f"{came} of what was trained went from node to node"
        )

    def _place(self) -> None:
        for node in self.part.nodes:
            self._calls[node].place(self.part.placement.placement_number)

    def _failed(self, node: str, placement_number: int) -> Callable[[RingTuneError], None]:
        def failed(error: RingTuneError) -> None:
            name = type(error).__name__
            if self._recovers and isinstance(error, PeerLostError):  # it does not answer, which is more than a failure
                self._put(rounds.NodeFailed(node, name, str(error)))
            else:
                self._put(rounds.MoveFailed(node, placement_number, name, str(error)))

        return failed


def note_figures(answer: NodeRested | NodeMoved, ledger: RunLedger) -> rounds.Event:
    """Write the figures of a node's answer down; return what the state machine is told.

    Raises:
        IntegrityError: its totals are not readable.
    """
    if isinstance(answer, NodeRested):
        node = answer.rested.node
        ledger.add_totals(node, read_object(answer.totals_json, f"totals.json of node {node}"))
        return answer.rested
    ledger.nodes[answer.moved.node].hosted_bytes = answer.hosted_bytes
    return answer.moved
