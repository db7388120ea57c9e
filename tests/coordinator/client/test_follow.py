"""A submitter whose connection breaks or whose coordinator is away, and the end of a rehearsal."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from coordinator.client.follow import FollowerState, Outcome, RehearsalLimit, ShownEvents
from coordinator.client.run_folder import RunFolder
from coordinator.client.submit import Client, Interrupts, _hear
from coordinator.run.requests import RunRequest
from coordinator.screen.progress import PlainProgress, Progress
from coordinator.server.run_store import RunStore
from ringtune.costs.measurement import REHEARSAL_S
from ringtune.costs.profile import Profile
from ringtune.errors import (
    CapacityError,
    ConnectionFailedError,
    IntegrityError,
    InterruptedRunError,
    PeerLostError,
    RingTuneError,
)
from ringtune.v1 import control_pb2
from tests.coordinator.server.test_run_record import ONE, TWO, record
from tests.support.fake_agents import CALL_S, FakeAgent, FakeCluster, Notes, facts, job, steps_of
from tests.support.kept_runs import JOB, Gate, breaking_when_it_trains, content, ended, keeping
from tests.support.plans import make_plan
from tests.support.processes import RUN_S, source_environment
from tests.support.tap import Tap


@pytest.mark.parametrize(
    "event",
    [
        {"step_json": '{"kind": "evaluation"}'},
        {"step_json": '{"kind": 5}'},
        {"resumed_json": "{}"},
        {"resumed_json": '{"passed_over": 5}'},
        {"report_json": '{"nodes": 5, "steps": 1, "wall_s": "x"}'},
    ],
)
def test_event_that_is_not_readable_is_told(event: dict[str, str]) -> None:
    """By its name; the coordinator may be of another version, or lie."""
    outcome, events = Outcome(job()), [control_pb2.RunEvent(**event), control_pb2.RunEvent(done=True)]  # type: ignore[arg-type]
    with pytest.raises(
        IntegrityError, match=rf"sent ({next(iter(event))}|done) that is not readable .*; use one version"
    ):
        _hear(events, outcome, [ShownEvents(PlainProgress(io.StringIO()), outcome)])


@pytest.mark.parametrize(("step", "shown"), [(4, "c"), (3, "b")])
def test_run_that_is_resumed_on_other_nodes_is_shown_as_they_host_it(step: int, shown: str) -> None:
    """The plan of the whole run has its first nodes; before the move they are those of the run."""
    before, after, third = (make_plan([("a", 0, 2), (last, 2, 4)], ["a"]) for last in "bcd")
    plan = before.extended(after.placement, 2, placement_number=5)
    outcome, lines = Outcome(job()), io.StringIO()
    show = ShownEvents(PlainProgress(lines), outcome)
    resumed = {"step": step, "passed_over": []}
    for event in (
        control_pb2.RunEvent(plan_json=json.dumps(plan.to_json())),
        control_pb2.RunEvent(resumed_json=json.dumps(resumed)),
    ):
        outcome(event)
        show(event)

    def hosts() -> list[str]:
        return [line.split()[0] for line in lines.getvalue().splitlines() if "blocks [2, 4)" in line]

    assert hosts() == ["b", "c"][: 1 + (shown == "c")]
    assert (f"resuming after step {step}, in placement 5:" in lines.getvalue()) == (shown == "c")
    # The plan that a recovery of the same run makes is shown by its newest placement
    recovered = control_pb2.RunEvent(plan_json=json.dumps(plan.extended(third.placement, 3).to_json()))
    outcome(recovered)
    show(recovered)
    assert hosts()[-1] == "d"


def test_submitter_whose_connection_breaks_hears_the_rest(tmp_path: Path) -> None:
    """Twice, at a step and at a file: the folder is that of a run that was followed in one go, and so is its error."""
    with keeping(tmp_path / "kept") as cluster:
        with Client(cluster.server.address) as client, RunFolder(tmp_path / "whole") as folder:
            client.run(RunRequest(job=JOB, num_nodes=2), progress=Progress(), folder=folder)
        tap = Tap(int(cluster.server.address.rpartition(":")[2]))
        cuts = ["step_json", "file"]

        def cut(event: control_pb2.RunEvent) -> None:
            if cuts and event.WhichOneof("event") == cuts[0]:
                del cuts[0]
                tap.cut()

        with contextlib.closing(tap), Client(f"127.0.0.1:{tap.port}") as client, RunFolder(tmp_path / "out") as folder:
            outcome = client.run(
                RunRequest(job=JOB, num_nodes=2),
                progress=Progress(),
                folder=folder,
                sinks=(cut,),
                coordinator_wait_s=CALL_S,
            )
            assert outcome.is_done and not cuts
            assert [entry.is_fetched for entry in client.runs()] == [True, True]
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert [line["step"] for line in steps_of(tmp_path / "out/metrics.jsonl")] == list(range(1, 9))


@pytest.mark.promise("6 every wait ends")
def test_submitter_waits_for_a_bounded_time(tmp_path: Path) -> None:
    """Then the error says how to come back; the run does not end with the waiting."""
    gate, notes = Gate(), Notes()
    with keeping(tmp_path / "kept", gate) as cluster:
        address, cut = breaking_when_it_trains(cluster)
        with (
            Client(address) as client,
            RunFolder(tmp_path / "out") as folder,
            pytest.raises(ConnectionFailedError, match="has not answered for 1 s") as lost,
        ):
            client.run(
                RunRequest(job=JOB, num_nodes=2), progress=notes, folder=folder, sinks=(cut,), coordinator_wait_s=1.0
            )
        assert client.goes_on
        assert notes.texts[-1].endswith("does not answer; waiting up to 1 s until it does")
        gate.open.set()
        with Client(cluster.server.address) as again:
            (kept,) = again.runs()
            assert f"'ringtune fetch {kept.run_id} --coordinator {client.address}'" in str(lost.value)


def following(cluster: FakeCluster, client: Client) -> FollowerState:
    """A follower of which nothing has come yet."""
    return FollowerState(client, Outcome(JOB), None, submission="mine", say=lambda text: None)


def test_run_is_found_whose_id_has_not_come(tmp_path: Path) -> None:
    """By the number that the submitter drew; where it is not there, the run was not begun."""
    done = control_pb2.RunEvent(done=True)
    with keeping(tmp_path / "kept") as cluster, Client(cluster.server.address) as client:
        kept: RunStore = cluster.server.coordinator.kept  # type: ignore[assignment]
        kept.begin(record(TWO, submission="another's"), on_saved=print)(done)
        lost = following(cluster, client)
        assert lost.may_continue
        with pytest.raises(ConnectionFailedError, match="has not begun the run; submit it again"):
            lost.go_on(CALL_S, print)
        assert lost.is_left
        kept.begin(record(ONE, submission="mine"), on_saved=print)(done)
        outcome = Outcome(JOB)
        found = FollowerState(client, outcome, None, submission="mine", say=print)

        def hear(events: Iterable[control_pb2.RunEvent]) -> None:
            for event in events:
                outcome(event)

        found.go_on(CALL_S, hear)
        assert outcome.is_done


def test_interrupted_run_that_is_not_taken_up_is_an_error(tmp_path: Path) -> None:
    """The coordinator is back, and leaves the run to the user."""
    with keeping(tmp_path / "kept") as cluster, Client(cluster.server.address) as client:
        kept: RunStore = cluster.server.coordinator.kept  # type: ignore[assignment]
        kept.begin(record(ONE, submission="mine", state="interrupted"), on_saved=print).close()
        left = following(cluster, client)
        with pytest.raises(ConnectionFailedError, match=f"ended before run {ONE} did, and does not resume it"):
            left.go_on(CALL_S, list)
        assert left.is_left


def test_ctrl_c_ends_the_waiting_and_not_the_run(tmp_path: Path) -> None:
    """The run can't be told, and the error says so."""

    class Impatient(Progress):
        def note(self, text: str) -> None:
            if "does not answer" in text:
                raise KeyboardInterrupt

    gate = Gate()
    with keeping(tmp_path / "kept", gate) as cluster:
        address, cut = breaking_when_it_trains(cluster)
        with (
            Client(address) as client,
            RunFolder(tmp_path / "out") as folder,
            pytest.raises(InterruptedRunError, match="stopped here, but not at the coordinator"),
        ):
            client.run(
                RunRequest(job=JOB, num_nodes=2),
                progress=Impatient(),
                folder=folder,
                sinks=(cut,),
                coordinator_wait_s=CALL_S,
            )
        assert client.goes_on
        gate.open.set()
        with Client(cluster.server.address) as again:
            (kept,) = again.runs()
            assert ended(again, kept.run_id).state == "done"


PROFILE = Profile(nodes=(facts("a"), facts("b")))


def step(kind: str = "train") -> control_pb2.RunEvent:
    """An item that is through."""
    return control_pb2.RunEvent(step_json=json.dumps({"kind": kind, "step": 1}))


def test_rehearsal_ends_once_after_its_steps_or_its_time() -> None:
    """Training steps count, other items do not; the end is asked for once, by the run's id."""
    ended: list[str] = []
    sink = RehearsalLimit(2, ended.append, clock=lambda: 0.0)
    for event in (
        control_pb2.RunEvent(run_id="r-1"),
        control_pb2.RunEvent(state="training"),
        step(),
        step("evaluation"),
    ):
        sink(event)
    assert (ended, sink.is_enough) == ([], False)
    sink(step())
    sink(step())
    assert (ended, sink.is_enough) == (["r-1"], True)
    # Steps that take long are not waited for; the time runs from the first of them
    now_s, ended = [0.0], list[str]()
    sink = RehearsalLimit(100, ended.append, clock=lambda: now_s[0])
    sink(control_pb2.RunEvent(run_id="r-1"))
    now_s[0] = 1000.0
    sink(control_pb2.RunEvent(state="training"))
    now_s[0] += REHEARSAL_S
    sink(step())
    assert not ended
    now_s[0] += 0.1
    sink(step())
    assert ended == ["r-1"]


def rehearse(
    *,
    agents: dict[str, dict[str, Any]] | None = None,
    at_the_end: Callable[[FakeCluster], None] | None = None,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Profile, str]:
    """Rehearse on two fake nodes; return the profile and what was said."""
    said = io.StringIO()
    with FakeCluster("a", "b", agents=agents) as cluster, Client(cluster.server.address) as client:
        if at_the_end is not None:
            monkeypatch.setattr(client, "stop_run", lambda *_args, **_options: at_the_end(cluster))
        found = client.rehearse(job(), PROFILE, progress=PlainProgress(said), num_nodes=2, join_s=5.0)
    return found, said.getvalue()


def slow(agent: FakeAgent, turns: list[Any]) -> None:
    """Report steps, never a whole grant, so that the rehearsal does not end by itself."""
    report = agent.report(turns)
    del report.turns_done[:]
    agent.stub.Report(report, timeout=CALL_S)


def test_rehearsal_that_ends_as_it_asked_for_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own end is no failure."""
    found, said = rehearse(monkeypatch=monkeypatch)
    assert [node.node for node in found.nodes] == ["a", "b"]
    assert "failed" not in said


def test_rehearsal_is_interrupted_by_the_user_after_its_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C counts at any time: what measures ends with exit code 130, not as if all were well."""

    def interrupt(_cluster: FakeCluster) -> None:
        raise KeyboardInterrupt

    with pytest.raises(InterruptedRunError):
        rehearse(at_the_end=interrupt, monkeypatch=monkeypatch)


def test_rehearsal_that_loses_a_node_after_its_last_step_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that it did not ask for is told, and corrects nothing."""

    def lose(cluster: FakeCluster) -> None:
        cluster.server.coordinator.node_failed("b", PeerLostError("node b was ended by SIGKILL"))

    found, said = rehearse(agents={name: {"on_grant": slow} for name in "ab"}, at_the_end=lose, monkeypatch=monkeypatch)
    assert found == PROFILE
    assert said.count("the rehearsal failed") == 1 and "node b was ended by SIGKILL" in said


@pytest.mark.parametrize("error", [CapacityError("needs 3 GiB, has 1 GiB"), PeerLostError("gone")])
def test_rehearsal_that_fails_keeps_what_was_measured(error: RingTuneError, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes of measuring are not lost because the ring does not train; the reason is one line."""
    found, said = rehearse(agents={"b": {"fails_at": {"prepare": error}}}, monkeypatch=monkeypatch)
    assert found == PROFILE
    (line,) = [line for line in said.splitlines() if "failed" in line]
    assert "as they were measured before it" in line and str(error) in line


def test_interrupts_ask_at_the_first_signal_and_raise_at_the_second() -> None:
    """The first one leaves the main thread alone."""
    rows: list[signal.Signals] = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    for number in rows:
        asked = threading.Event()
        with Interrupts() as interrupts, interrupts.asking(asked.set):
            os.kill(os.getpid(), number)
            assert asked.wait(30.0)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)


def test_interrupts_raise_where_nothing_can_be_asked() -> None:
    """Before a run and after it Ctrl-C is what it always is; the handlers are given back."""
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts() as interrupts:
        with interrupts.asking(lambda: None):
            pass
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
    # A hang-up that was ignored before is ignored still
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts, interrupts.asking(lambda: pytest.fail("nobody stops it")):
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


_PRINTS = """
import sys
from pathlib import Path
from coordinator.client.submit import Interrupts

with Interrupts(log=Path(sys.argv[1])) as interrupts:
    with interrupts.asking(lambda: None):
        print("open", flush=True)
        sys.stdin.readline()  # until the terminal is closed
        print("closed, on the standard output", flush=True)
    print("closed, on the standard error", file=sys.stderr, flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the way to a controlling terminal is Linux's")
def test_terminal_that_is_closed_is_followed_by_a_file(tmp_path: Path) -> None:
    """Both outputs go there after SIGHUP; before it, to the terminal."""
    ours, theirs = pty.openpty()
    log = tmp_path / "run.log"
    command = [sys.executable, "-c", f"import fcntl, termios; fcntl.ioctl(1, termios.TIOCSCTTY, 0)\n{_PRINTS}"]
    with subprocess.Popen(  # noqa: S603 - our own module
        [*command, str(log)],
        stdin=subprocess.PIPE,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env=source_environment(),
    ) as process:
        os.close(theirs)
        shown = b""
        while b"\n" not in shown:
            shown += os.read(ours, 100)
        assert b"open" in shown
        os.close(ours)
        process.communicate(b"now\n", timeout=RUN_S)
    assert process.returncode == 0
    assert log.read_text().splitlines() == ["closed, on the standard output", "closed, on the standard error"]
