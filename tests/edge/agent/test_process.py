"""The process of an agent: rows that it counts, and a run that nobody drives any more."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from coordinator.server.certificate_authority import Authority
from edge.agent import process
from edge.agent.active_run import ActiveRun
from edge.agent.process import AgentServicer, CoordinatorCalls, count_rows, give_up, run_agent
from edge.checkpoint.snapshots import TurnSnapshots
from edge.options import AgentOptions
from edge.profiler.timing import TimingRequest
from ringtune.errors import DataError, DeadlineError, PlanError, RingTuneError
from ringtune.schedule.course import FrozenWeights
from ringtune.storage.pieces import Pieces
from ringtune.transport.credentials import Credentials, Removal, Removals, using_credentials
from ringtune.transport.identity import read_identity
from ringtune.transport.parties import node_party
from ringtune.transport.status import error_of_status
from ringtune.v1 import control_pb2
from tests.coordinator.server.test_certificate_authority import running
from tests.support.fakes import JOB, OTHER, RUN, FakeWorkshop, TwoAgents
from tests.support.trust_parts import DAY_S

WAIT_S = 20.0


def test_count_rows_of_a_table_is_that_of_its_share(tmp_path: Path) -> None:
    """Ten records, one over two lines, are shared by four nodes as 2, 3, 2 and 3."""
    table = tmp_path / "rows.csv"
    table.write_text("text,label\n" + "good,a\n" * 9 + '"two\nlines",b\n', encoding="utf-8")
    assert count_rows(table, (0, 1)) == 10
    assert [count_rows(table, (index, 4)) for index in range(4)] == [2, 3, 2, 3]
    lines = tmp_path / "rows.jsonl"
    lines.write_text('{"text": "a"}\n\n{"text": "b"}\n', encoding="utf-8")
    assert count_rows(lines, (0, 1)) == 2


def test_count_rows_leaves_other_forms_to_the_task(tmp_path: Path) -> None:
    """A plain text has as many rows as a job's length makes of it; no file has none; what nobody could read is told."""
    text, broken = tmp_path / "all.txt", tmp_path / "rows.jsonl"
    text.write_text("to be or not to be", encoding="utf-8")
    for path in (text, tmp_path, None):
        assert count_rows(path, (0, 1)) is None
    broken.write_text("not json\n", encoding="utf-8")
    with pytest.raises(DataError, match="line 1: it is not JSON"):
        count_rows(broken, (0, 1))


def test_calls_to_the_coordinator_take_a_renewed_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call is made with it, over a new connection; and whoever was removed is refused here from then on."""
    callers: list[str] = []
    trust, folder = tmp_path / "trust", tmp_path / "node"
    with running(trust) as (keeper, address), contextlib.ExitStack() as channels:
        monkeypatch.setattr(keeper, "heard", lambda caller, version: callers.append(caller.serial))
        authority = Authority.read(trust)
        who = Credentials(authority.identity(node_party("pi"), time.time() - 274 * DAY_S))
        beat = control_pb2.HeartbeatRequest(node="pi", instance="i")
        with using_credentials(who):
            calls = CoordinatorCalls(AgentOptions(coordinator=address, name="pi", trust=folder), channels)
            first, gone = who.identity, Removals([Removal("node b was removed", node_party("b"), 1)])
            calls.hear(gone)
            assert (who.removed, who.identity) == (gone, first)
            first = who.identity = authority.identity(node_party("pi"), time.time() - 276 * DAY_S)
            assert not calls.stub.Heartbeat(beat, timeout=WAIT_S).known
            keeper.credentials.removed = Removals([Removal("it was removed", node_party("pi"), 1)])
            with pytest.raises(grpc.RpcError, match="it was removed"):
                calls.stub.Heartbeat(beat, timeout=WAIT_S)
            keeper.credentials.removed = Removals()
            calls.hear(Removals())
        assert read_identity(folder, time.time()) == who.identity != first
        assert not calls.stub.Heartbeat(beat, timeout=WAIT_S).known
        assert callers == [first.facts.serial, who.identity.facts.serial]


class FakeAgent:
    """Writes down what is asked of it, in order."""

    def __init__(self, *, error: Exception | None = None) -> None:
        self.asked: list[str] = []
        self.active: Any = SimpleNamespace(run_id="run")
        self.moves = SimpleNamespace(kept=TurnSnapshots("b"), save=lambda: self.asked.append("save"))
        self.moves.kept.begin("run")
        self._error = error

    def current(self) -> Any:
        """The run that is under way."""
        return self.active

    def end(self, active: Any, reason: str) -> None:
        """Stop it."""
        self.asked.append(f"end {active.run_id}: {reason}")

    def on_compute_thread(self, work: Callable[[], None], what: str, *, timeout_s: float) -> None:
        """Carry it out at once, or fail."""
        if self._error is not None:
            raise self._error
        work()

    def await_end(self, timeout_s: float) -> None:
        """No other thread ends a run."""

    def release(self, run_id: str, reason: str) -> None:
        """Let go of what is kept."""
        self.asked.append(f"release {run_id or 'any'}")


def test_last_turns_are_saved_between_the_end_of_a_run_and_its_release(caplog: pytest.LogCaptureFixture) -> None:
    """The node's folder is free then, and what is kept in memory still there.

    A run that ended before by itself, as a peer closed its links, is saved too; of one that keeps nothing, or another
    one, nothing is written. Where the last action takes too long the log says that the last turns are lost.
    """
    slow = DeadlineError("waited 60 s")
    for run_id, keeps, is_active, error, asked in (
        ("", True, True, None, ["end run: gone", "save", "release any"]),
        ("", True, False, None, ["save", "release any"]),
        ("run", False, True, None, ["end run: gone", "release run"]),
        ("another", True, True, None, ["release another"]),
        ("", True, True, slow, ["end run: gone", "release any"]),
    ):
        agent: Any = FakeAgent(error=error)
        agent.active = agent.active if is_active else None
        if keeps:
            agent.moves.kept.keep("run", 8, "b", b"file")
        give_up(agent, run_id, "gone")
        assert agent.asked == asked
    assert caplog.text.count("the last turns of run run are not saved: waited 60 s") == 1


@pytest.mark.parametrize("then", ["save", "inspect"])
def test_end_that_another_thread_has_begun_is_awaited(then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links, whose peers are gone, take their time to close; only then does the run let go of the node's folder.

    So its last turns are saved, and another run begins, after that.
    """
    two, done, is_closing, may_close = TwoAgents(), list[str](), threading.Event(), threading.Event()
    agent: Any = two.agents["a"]
    two.prepare_all()
    agent.moves.kept.begin(RUN)
    agent.moves.kept.keep(RUN, 8, "a", b"file")

    def stop(run: ActiveRun, reason: str, stop: Any = ActiveRun.stop) -> None:
        stop(run, reason)
        is_closing.set()
        assert may_close.wait(WAIT_S)

    def drop(run: ActiveRun, drop: Any = ActiveRun.drop) -> None:
        done.append(f"drop {run.node}")
        drop(run)

    def await_end(timeout_s: float, await_end: Any = agent.await_end) -> None:
        may_close.set()
        await_end(timeout_s)

    def after(*_: Any, **__: Any) -> tuple[dict[str, Any], None]:
        done.append(then)
        may_close.set()
        return {}, None

    monkeypatch.setattr(ActiveRun, "stop", stop)
    monkeypatch.setattr(ActiveRun, "drop", drop)
    agent.await_end, agent.moves.save = await_end, after
    monkeypatch.setattr(FakeWorkshop, "inspect", after)
    ending = threading.Thread(target=agent.end, args=(agent.current(), "a peer is gone"))
    ending.start()
    try:
        assert is_closing.wait(WAIT_S)
        if then == "save":
            give_up(agent, "", "gone")
        else:
            agent.inspect(OTHER, JOB, None, timeout_s=WAIT_S)
    finally:
        may_close.set()
        ending.join(WAIT_S)
        two.close()
    assert done[:2] == ["drop a", then]


def test_inspection_is_asked_to_measure_as_the_request_says() -> None:
    """With the seconds, the machine's other nodes, whether anew, and how frozen weights are held; or not at all."""
    told = list[TimingRequest | None]()
    context: Any = SimpleNamespace(time_remaining=lambda: 5.0)
    agent: Any = SimpleNamespace(inspect=lambda run_id, job, timing, **_: told.append(timing))
    values: dict[str, Any] = {"measure_s": 2.0, "neighbours": 3, "fresh": True, "frozen_dtype": "int8"}
    for measure in (True, False):
        AgentServicer(agent).Inspect(control_pb2.InspectRequest(measure=measure, **values), context)
    assert told == [TimingRequest(2.0, 3, is_fresh=True, frozen=FrozenWeights(dtype="int8", native=False)), None]


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (PlanError("no such tensor"), PlanError, "no such tensor"),
        (OSError("gone"), RingTuneError, r"OSError at \S+: gone"),
    ],
)
def test_collect_keeps_the_form_of_an_error_while_it_streams(
    error: Exception, kind: type[RingTuneError], message: str
) -> None:
    """Files are read while they are sent: what fails then is told as any other error of this node."""

    def content() -> Iterator[bytes]:
        yield b"begin"
        raise error

    def abort(code: grpc.StatusCode, details: str) -> None:
        raise error_of_status(code.name, details, peer="node a")

    agent: Any = SimpleNamespace(collect=lambda run_id, **_: {"adapter.safetensors": Pieces(10, content)})
    context: Any = SimpleNamespace(time_remaining=lambda: 5.0, abort=abort)
    with pytest.raises(kind, match=message):
        list(AgentServicer(agent).Collect(control_pb2.CollectRequest(run_id="r"), context))


def test_signal_is_taken_while_the_main_thread_holds_the_lock_of_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does so for a moment before and after it sleeps; a handler that waits for the lock would never return."""

    def serve(_options: object, _calls: object, ending: Any, _on_joined: object) -> int:
        with ending.wanted._cond:
            signal.raise_signal(signal.SIGTERM)
        assert ending.wanted.wait(WAIT_S)
        return int(ending.code)

    for name in ("keep_files_private", "keep_freed_memory", "limit_libraries", "CoordinatorCalls"):
        monkeypatch.setattr(process, name, lambda *_: None)
    monkeypatch.setattr(process, "_serve", serve)
    assert run_agent(AgentOptions(coordinator="127.0.0.1:9", name="pi")) == 128 + signal.SIGTERM
