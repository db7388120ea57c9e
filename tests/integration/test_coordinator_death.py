"""A coordinator that is killed at any moment of a run: it takes the run up, and whoever followed the run goes on."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from coordinator.client.detached_runs import fetch_run
from coordinator.client.run_folder import RunFolder
from coordinator.client.submit import Client
from coordinator.run.requests import RunRequest
from coordinator.screen.progress import Progress
from ringtune.job.job import Job
from ringtune.schedule.turns import Turn
from tests.support.dying_coordinator import DyingCoordinator, dying_coordinator
from tests.support.fake_agents import CALL_S, FakeAgent, job, steps_of
from tests.support.kept_runs import content
from tests.support.processes import RUN_S

LEASE_S = 60.0  # these agents send no heartbeats
JOB = job(train__checkpoint_every=2, train__eval_every=4)


def do_turns(agent: FakeAgent, turns: list[Turn]) -> None:
    """Do them at once; a coordinator that is killed meanwhile does not hear of it."""
    with contextlib.suppress(grpc.RpcError):
        agent.stub.Report(agent.report(turns), timeout=CALL_S)


class Notes(Progress):
    """Remembers what a user was told."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        """Remember it."""
        self.texts.append(text)


class Ring:
    """Two agents without torch, and a coordinator that comes back."""

    def __init__(self, coordinator: DyingCoordinator, agents: list[FakeAgent]) -> None:
        self.coordinator, self.agents = coordinator, agents

    def join(self) -> None:
        """Let the agents join, as nodes do that hear that nobody knows them."""
        for agent in self.agents:
            grpc.channel_ready_future(agent._channel).result(timeout=CALL_S)
            agent.join()

    def train(self, out: Path, wanted: Job = JOB, *, wait_s: float = RUN_S) -> list[str]:
        """Submit and follow; return what the user was told."""
        progress = Notes()
        with Client(self.coordinator.address) as client, RunFolder(out) as folder:
            request = RunRequest(job=wanted, num_nodes=2, join_s=CALL_S)
            client.run(request, progress=progress, folder=folder, coordinator_wait_s=wait_s)
        return [text for text in progress.texts if not text.startswith("predicted: ")]


@contextlib.contextmanager
def ringed(folder: Path, *more: str) -> Iterator[Ring]:
    """A ring whose agents join whenever its coordinator is back."""
    agents: list[FakeAgent] = []
    rings: list[Ring] = []
    try:
        with dying_coordinator(folder, lease_s=LEASE_S, more=more, on_back=lambda: rings[0].join()) as coordinator:
            agents += [FakeAgent(name, coordinator.address, on_grant=do_turns) for name in ("a", "b")]
            rings.append(Ring(coordinator, agents))
            rings[0].join()
            yield rings[0]
    finally:
        for agent in agents:
            agent.close()


@pytest.mark.promise("6 every wait ends")
@pytest.mark.thorough
def test_run_of_a_coordinator_that_is_killed_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    """At every moment: the same files, each step once, and the user is told; then the run is fetched as one."""
    with ringed(tmp_path) as ring:
        whole = tmp_path / "whole"
        assert ring.train(whole) == []
        moments = {
            "call Inspect 1 kill": "starts from the beginning",
            "call Prepare 2 kill": "starts from the beginning",
            "answer Report 1 kill": "starts from the beginning",
            "answered Report 5 kill": "",  # how many turns go with one grant is a matter of time
            "call Grant 5 kill": "",
            "call Release 1 kill": "resumes from the state that its nodes have saved",
            "write run.json 2 kill": "",
        }
        for number, (moment, told) in enumerate(moments.items(), 1):
            ring.coordinator.order(moment)
            out = tmp_path / f"out-{number}"
            notes = ring.train(out)
            assert ring.coordinator.num_deaths == number, moment
            away, back, *rest = notes
            assert "does not answer; waiting up to 200 s until it does" in away
            assert back == f"coordinator {ring.coordinator.address} answers again"
            assert told in " ".join(rest), moment
            assert content(out) == content(whole), moment
            assert [line["step"] for line in steps_of(out / "metrics.jsonl")] == list(range(1, 9)), moment
            with Client(ring.coordinator.address) as client:
                *_, before, record = client.runs()
                assert before.takes_up != record.run_id and before.is_fetched, "nothing is left to be fetched"
                assert (record.state, record.is_fetched) == ("done", True)
                fetch_run(client, record, tmp_path / f"fetched-{number}", replace=False)
            fetched = tmp_path / f"fetched-{number}"
            assert content(fetched) == content(whole)
            assert steps_of(fetched / "metrics.jsonl") == steps_of(out / "metrics.jsonl")
            assert json.loads((fetched / "report.json").read_text()) == json.loads((out / "report.json").read_text())
