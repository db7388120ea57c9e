"""A request on its way to the coordinator, and a run's events on their way back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.planner.given_plan import GivenPlan
from coordinator.planner.limits import Choices
from coordinator.run import events
from coordinator.run.events import Outbox
from coordinator.run.requests import (
    MAX_CHOICES,
    RunRequest,
    read_run_request,
    receive_run_request,
    run_request_from_proto,
    run_request_messages,
    run_request_to_proto,
    with_initial,
)
from coordinator.server.run_record import RunRecord
from coordinator.server.run_store import RunStore
from ringtune.costs.profile import Profile
from ringtune.errors import IntegrityError, InterruptedRunError, JobError, UsageError
from ringtune.ids import make_run_id
from ringtune.run_control.checkpoint import Resume
from ringtune.storage.pieces import Pieces
from ringtune.v1 import control_pb2
from tests.contract.run_control.test_checkpoint import manifest
from tests.support.fake_agents import facts, job
from tests.support.saved_runs import plan

FULL = RunRequest(
    job=job(train__seed=3),
    plan_only=True,
    num_nodes=2,
    join_s=7.5,
    resume=Resume(plan=plan(), manifests=(manifest(),), lengths=()),
    profile=Profile(nodes=(facts("a"), facts("b"))),
    plan=GivenPlan(plan=plan(), version="1.2.3", model_digest="ab" * 32),
    choices=Choices(microbatches=(1, 2), wire_dtypes=("float16",)),
    submitted_by="carol@desk",
    is_rehearsal=True,
    submission="0123456789abcdef",
    nodes=("a", "b"),
)


def test_run_request_arrives_as_it_was_sent() -> None:
    """Every part of it, and also that a part is not there."""
    plain = RunRequest(job=job())
    left_out = [name for name in RunRequest._fields if getattr(FULL, name) == getattr(plain, name)]
    assert left_out == ["evaluation", "initial"], "go by a call and by messages of their own"
    for request in (FULL, plain):
        message = control_pb2.RunRequest.FromString(run_request_to_proto(request).SerializeToString())
        assert run_request_from_proto(message) == request
    # What came from another program is read as strictly as a file
    with pytest.raises(JobError, match="the submitted job"):
        run_request_from_proto(control_pb2.RunRequest(job_toml="[model]\npaths = 1"))
    with pytest.raises(UsageError, match="not for nan seconds"):
        run_request_from_proto(control_pb2.RunRequest(join_s=float("nan")))
    # and what others are shown of it is short and on a line
    message = run_request_to_proto(FULL)
    message.submitted_by = "eve\x1b[2J\n" * 1000
    shown = run_request_from_proto(message).submitted_by
    assert shown.isprintable() and len(shown) < 400
    many = {"microbatches": range(1, MAX_CHOICES + 2)}
    for wrong in ({"submission": "x" * 65}, {"nodes": ["a"] * 5000}, {"nodes": ["../a"]}, many):
        with pytest.raises(UsageError, match=r"not allowed|nodes at most|among at most"):
            run_request_from_proto(control_pb2.RunRequest(job_toml=message.job_toml, **wrong))
    # What is named twice is one: each is a plan of its own, or a question to the node
    twice = control_pb2.RunRequest(
        job_toml=message.job_toml, nodes=["b", "a", "b"], microbatches=[2, 1, 2] * 99, wire_dtypes=["float32"] * 99
    )
    request = run_request_from_proto(twice)
    assert (request.nodes, request.choices) == (("b", "a"), Choices((2, 1), ("float32",)))


def test_file_of_initial_values_goes_behind_its_request(tmp_path: Path) -> None:
    """It arrives whole, or is refused with the digest; a request that only plans has none; a kept one is read again."""
    content = Pieces.of(bytes(range(256)) * 9000)
    keys = {"adapter.from": "may", "adapter.sha256": content.sha256()}
    sent = RunRequest(job=job().with_overrides(keys), initial=content)
    (tmp_path / "came").mkdir()
    came = receive_run_request(run_request_messages(sent), lambda: tmp_path / "came")
    assert came.initial is not None and bytes(came.initial) == bytes(content)
    assert came._replace(initial=None) == sent._replace(initial=None)
    plans = sent._replace(plan_only=True, initial=None)
    assert receive_run_request(run_request_messages(plans), lambda: tmp_path / "none") == plans
    for number, other in enumerate([None, Pieces.of(b"other values")]):
        (folder := tmp_path / str(number)).mkdir()
        with pytest.raises(IntegrityError, match=r"did not send initial\.safetensors|has not the digest .*submit the"):
            receive_run_request(run_request_messages(sent._replace(initial=other)), lambda folder=folder: folder)  # type: ignore[misc]
    with contextlib.closing(RunStore(tmp_path / "state")) as store:
        name = make_run_id(1e9, b"1234")
        record = RunRecord(run_id=name, first_run=name, model="", method="", submitted_by="", started_unix_s=1e9)
        store.begin(
            record, request=run_request_to_proto(sent).SerializeToString(), initial=content, on_saved=lambda step: None
        )
        kept = with_initial(read_run_request(store.request(record.run_id)), store.initial_file(record.run_id))
        assert kept.initial is not None and kept.initial.sha256() == content.sha256()


def state(name: str) -> control_pb2.RunEvent:
    """An event."""
    return control_pb2.RunEvent(state=name)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the most events and bytes of an outbox, which waits a moment for room."""
    monkeypatch.setattr(events, "_ROOM_S", 0.05)

    def limit(num_events: int = 9, num_bytes: int = 1 << 20) -> None:
        monkeypatch.setattr(events, "_MAX_EVENTS", num_events)
        monkeypatch.setattr(events, "_MAX_BYTES", num_bytes)

    return limit


def test_outbox_keeps_the_order_and_drops_what_nobody_reads(limits: Callable[..., None]) -> None:
    """Events come out as they went in, and end when it is closed."""
    outbox = Outbox()
    for name in ("one", "two"):
        outbox.emit(state(name))
    outbox.close()
    assert [event.state for event in outbox.events()] == ["one", "two"]
    # After the submitter is gone, the run still ends in order
    limits(num_events=1)
    outbox = Outbox()
    outbox.emit(state("one"))
    reader = outbox.events()
    next(reader)
    reader.close()
    for _ in range(5):
        outbox.emit(state("more"))


@pytest.mark.promise("6 every wait ends")
def test_outbox_does_not_wait_for_ever_for_a_slow_reader(limits: Callable[..., None]) -> None:
    """A submitter that is there but does not read ends the run instead of filling the memory."""
    limits(num_events=2)
    outbox = Outbox()
    outbox.emit(state("one"))
    outbox.emit(state("two"))
    with pytest.raises(InterruptedRunError, match=r"did not take events for 0\.05 s"):
        outbox.emit(state("three"))


@pytest.mark.promise("7 bounded memory")
def test_outbox_bounds_the_bytes_that_it_holds(limits: Callable[..., None]) -> None:
    """Events may be chunks of files: a slow submitter of a large result must not fill the coordinator's memory."""
    limits(num_bytes=2000)
    outbox = Outbox()
    outbox.emit(state("x" * 5000))  # a single one may be larger
    with pytest.raises(InterruptedRunError, match="did not take events"):
        outbox.emit(state("y"))
    reader = outbox.events()
    assert len(next(reader).state) == 5000
    outbox.emit(state("z" * 1500))
    with pytest.raises(InterruptedRunError):
        outbox.emit(state("z" * 1500))


def test_outbox_ends_for_a_reader_that_was_slow(limits: Callable[..., None]) -> None:
    """A submitter that comes back after the run gave it up reads what there is, and then the end."""
    limits(num_events=1)
    outbox = Outbox()
    outbox.emit(state("one"))
    with pytest.raises(InterruptedRunError):
        outbox.emit(state("two"))
    outbox.close()
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.extend(event.state for event in outbox.events()), daemon=True)
    reader.start()
    reader.join(30.0)
    assert not reader.is_alive()
    assert read == ["one"]
