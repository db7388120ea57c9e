"""A request on its way to the coordinator, and a run's events on their way back."""

from __future__ import annotations

import threading

import pytest

from coordinator.planner.given_plan import GivenPlan
from coordinator.planner.limits import Choices
from coordinator.run.events import Outbox
from coordinator.run.requests import RunRequest, run_request_from_proto, run_request_to_proto
from ringtune.costs.profile import Profile
from ringtune.errors import InterruptedRunError, JobError
from ringtune.run_control.checkpoint import Resume
from ringtune.v1 import control_pb2
from tests.support.fake_agents import facts, job
from tests.support.saved_runs import plan

FULL = RunRequest(
    job=job(train__seed=3),
    plan_only=True,
    num_nodes=2,
    join_s=7.5,
    resume=Resume(plan=plan(), manifests=(), lengths=()),
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
    assert left_out == ["evaluation"], "goes by a call of its own"
    for request in (FULL, plain):
        message = control_pb2.RunRequest.FromString(run_request_to_proto(request).SerializeToString())
        assert run_request_from_proto(message) == request
    # What came from another program is read as strictly as a file
    with pytest.raises(JobError, match="the submitted job"):
        run_request_from_proto(control_pb2.RunRequest(job_toml="[model]\npaths = 1"))


def state(name: str) -> control_pb2.RunEvent:
    """An event."""
    return control_pb2.RunEvent(state=name)


def test_outbox_keeps_the_order_and_drops_what_nobody_reads() -> None:
    """Events come out as they went in, and end when it is closed."""
    outbox = Outbox()
    for name in ("one", "two"):
        outbox.emit(state(name))
    outbox.close()
    assert [event.state for event in outbox.events()] == ["one", "two"]
    # After the submitter is gone, the run still ends in order
    outbox = Outbox(wait_s=0.05, max_events=1)
    outbox.emit(state("one"))
    reader = outbox.events()
    next(reader)
    reader.close()
    for _ in range(5):
        outbox.emit(state("more"))


@pytest.mark.promise("6 every wait ends")
def test_outbox_does_not_wait_for_ever_for_a_slow_reader() -> None:
    """A submitter that is there but does not read ends the run instead of filling the memory."""
    outbox = Outbox(wait_s=0.05, max_events=2)
    outbox.emit(state("one"))
    outbox.emit(state("two"))
    with pytest.raises(InterruptedRunError, match=r"did not take events for 0\.05 s"):
        outbox.emit(state("three"))


@pytest.mark.promise("7 bounded memory")
def test_outbox_bounds_the_bytes_that_it_holds() -> None:
    """Events may be chunks of files: a slow submitter of a large result must not fill the coordinator's memory."""
    outbox = Outbox(wait_s=0.05, max_bytes=2000)
    outbox.emit(state("x" * 5000))  # a single one may be larger
    with pytest.raises(InterruptedRunError, match="did not take events"):
        outbox.emit(state("y"))
    reader = outbox.events()
    assert len(next(reader).state) == 5000
    outbox.emit(state("z" * 1500))
    with pytest.raises(InterruptedRunError):
        outbox.emit(state("z" * 1500))


def test_outbox_ends_for_a_reader_that_was_slow() -> None:
    """A submitter that comes back after the run gave it up reads what there is, and then the end."""
    outbox = Outbox(wait_s=0.05, max_events=1)
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
