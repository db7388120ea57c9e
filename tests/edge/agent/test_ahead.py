"""A node gets the base weights of another placement while its run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edge.agent.active_run import ActiveRun
from edge.agent.moving.ahead import fetch_ahead, read_ahead
from edge.agent_options import AgentOptions
from edge.weights.borrow import Borrower
from ringtune.errors import FrameError, InterruptedRunError, ModelError, PlanError
from ringtune.jobs.job import Job, Model
from ringtune.models.tensors import read_headers
from ringtune.schedule.plan import Plan
from tests.support.moves import moving
from tests.support.plans import make_plan
from tests.support.weights_parts import RUN, TIMEOUT_S, serving, write_bert

PLAN = moving(make_plan([("a", 0, 3), ("b", 3, 4)], ["a"], num_steps=4), (1, (("a", 0, 1), ("b", 1, 4))))
JOB = Job(model=Model(path="elsewhere/all-MiniLM-L6-v2")).with_overrides({"train.max_length": 16})


class Host:
    """The parts of an agent that know its run and where base weights are."""

    def __init__(self, cache: Path, port: int, *, path: Path | None = None) -> None:
        settings = AgentOptions(coordinator=f"127.0.0.1:{port}", name="b", cache=cache)
        self.models: Any = Borrower(settings, list)
        self.active: ActiveRun | None = ActiveRun(RUN, "b", 0, PLAN.at(0))
        self._job = JOB if path is None else JOB.with_overrides({"model.path": str(path)})

    def current(self) -> ActiveRun | None:
        """Return the run that is under way."""
        return self.active

    def job_of(self, run_id: str, job_toml: str) -> Job:
        """Return the job of all runs."""
        return self._job


def ask(host: Host, plan: Plan, *, run_id: str = RUN) -> int:
    """Let node b fetch ahead for a part of the plan."""
    return fetch_ahead(host, "b", run_id, json.dumps(plan.to_json()), "", timeout_s=TIMEOUT_S)


def test_node_fetches_the_tensors_of_its_next_slice_and_no_others(tmp_path: Path) -> None:
    """Those of its present slice are there already; the move finds all, and needs nobody for it."""
    folder = write_bert(tmp_path / "m")
    blocks = [
        sum(one.info.nbytes for name, one in read_headers(folder).items() if f".{at}." in name) for at in range(4)
    ]
    with serving(folder) as server:
        host = Host(tmp_path / "cache", server.port)
        host.models.for_run(RUN, JOB, PLAN.at(0), timeout_s=TIMEOUT_S)
        assert ask(host, PLAN.at(1)) == sum(blocks[1:3])
        assert ask(host, PLAN.at(1)) == 0
        host.active = None  # a node of the next placement alone
        assert ask(host, PLAN.at(1)) == 0
    found = Path(host.models.for_run(RUN, JOB, PLAN.at(1), timeout_s=TIMEOUT_S).model.path)
    assert {name.split(".")[2] for name in read_headers(found)} == {"1", "2", "3"}


def test_node_with_a_copy_only_asks_for_the_next_slice_to_be_read(tmp_path: Path) -> None:
    """Nothing has to come."""
    folder = write_bert(tmp_path / "m", prefix="bert.", num_files=3)
    assert ask(Host(tmp_path / "cache", 1, path=folder), PLAN.at(1)) == 0
    block = sum(one.info.nbytes for name, one in read_headers(folder).items() if ".2." in name)
    assert read_ahead(folder, range(2, 3)) == block > 0
    assert read_ahead(folder, range(0)) == 0


def test_node_fetches_nothing_for_another_run(tmp_path: Path) -> None:
    """The run under way keeps what it has, and a plan that is none is refused."""
    host = Host(tmp_path / "cache", 1)
    with pytest.raises(FrameError, match="prepare it first"):
        ask(host, PLAN.at(1), run_id="r20260101-000000-11111111")
    with pytest.raises(PlanError):
        fetch_ahead(host, "b", RUN, "{}", "", timeout_s=TIMEOUT_S)


def test_node_that_nobody_gives_weights_says_so(tmp_path: Path) -> None:
    """The run goes on where it is."""
    with serving(None) as server:
        host = Host(tmp_path / "cache", server.port)
        with pytest.raises(ModelError, match="has no model folder"):
            ask(host, PLAN.at(1))


def test_release_of_the_run_ends_the_fetching(tmp_path: Path) -> None:
    """Whoever waits for the tensors hears that the run is over."""
    folder = write_bert(tmp_path / "m")
    with serving(folder) as server:
        host = Host(tmp_path / "cache", server.port)
        peers = host.models._sources
        host.models._sources = lambda: [host.models.release(RUN)] and peers()
        with pytest.raises(InterruptedRunError, match="was released"):
            ask(host, PLAN.at(1))
