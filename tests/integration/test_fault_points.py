"""Real processes that fail at chosen places: a sample of the matrix that ``make faults`` carries out whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ringtune.errors import PeerLostError
from tests.support.faulty_runs import COORDINATOR, Fault, FaultyRing, faulty_ring

pytestmark = pytest.mark.slow
SHORT: dict[str, Any] = {
    "train__max_steps": 12,
    "train__local_iterations": 2,
    "train__checkpoint_every": 4,
    "train__eval_every": 4,
}
"""Half of the steps of the matrix, in as many turns."""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyRing]:
    """Owners a and b, hosts c, d and e."""
    with faulty_ring(tmp_path_factory.mktemp("faults"), **SHORT) as made:
        yield made


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize(
    "order",
    [
        *("answer Prepare 1 kill", "after backward 4 kill", "rename step-8* 1 kill", "answer Keep 3 kill"),
        *("backward 4 error", "rename step-8* 1 error"),
    ],
)
@pytest.mark.sampled(1)
def test_run_goes_on_without_a_host_that_ends_or_reports_an_error(faulty: FaultyRing, order: str) -> None:
    """While it prepares, trains, saves, or takes a copy from its neighbour."""
    trial = faulty.trial(Fault("d", order))
    assert (trial.problems, trial.error, trial.figures["recoveries"]) == ((), "", 1), trial


@pytest.mark.thorough
def test_run_that_loses_two_neighbours_at_once_is_resumed_and_says_what_is_missing(faulty: FaultyRing) -> None:
    """Nobody else has what they trained."""
    trial = faulty.trial(Fault("c", "backward 6 kill"), Fault("d", "answer Rest 1 kill"))
    assert not trial.problems and trial.error.startswith(PeerLostError.__name__), trial
    assert "no living node has a copy of block" in trial.error and "--resume" in trial.error


def test_run_of_a_lost_owner_is_resumed(faulty: FaultyRing) -> None:
    """It holds the head, which it was about to hand over."""
    trial = faulty.trial(Fault("a", "send t 2 kill"))
    assert not trial.problems and trial.error.startswith(PeerLostError.__name__), trial
    assert "a owns rows, which no other node has; start it again and --resume the run" in trial.error


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("victim", ["d", "e"])
@pytest.mark.sampled(1)
def test_run_does_a_step_once_more_in_which_a_gradient_is_infinite(faulty: FaultyRing, victim: str) -> None:
    """Nodes above have done their updates by then; all go back, nobody is lost, and nothing of it is left."""
    trial = faulty.trial(Fault(victim, "after backward 4 spoil"))
    assert (trial.problems, trial.error, trial.figures["recoveries"]) == ((), "", 1), trial


@pytest.mark.promise("5 timing changes nothing")
@pytest.mark.parametrize(
    "fault",
    [
        Fault("c", "backward 4 stop"),
        Fault("d", "send h 9 delay 1"),
        Fault("d", "call Report 12 drop-reply"),
        Fault("e", "call Keep 2 drop-request"),
        Fault(COORDINATOR, "call Grant 9 drop-reply"),
        Fault(COORDINATOR, "call Prepare 2 drop-reply"),
        Fault(COORDINATOR, "call Inspect 3 drop-request"),
        Fault(COORDINATOR, "call Collect 2 drop-reply"),
    ],
    ids=lambda fault: fault.order,
)
@pytest.mark.sampled(1)
def test_short_trouble_loses_nobody(faulty: FaultyRing, fault: Fault) -> None:
    """A process that stands still for less than its lease, a message that is late, a call that is lost."""
    trial = faulty.trial(fault)
    assert (trial.problems, trial.error, trial.figures["recoveries"]) == ((), "", 0), trial


@pytest.mark.promise("5 timing changes nothing")
@pytest.mark.parametrize("call", ["Move 2 drop-reply", "Rest 1 drop-request", "Fetch 1 drop-reply"])
@pytest.mark.sampled(1)
def test_run_moves_though_a_call_is_lost(faulty: FaultyRing, call: str) -> None:
    """The node moves once, to the end of the very turn."""
    victim = "c" if call.startswith("Fetch") else COORDINATOR
    trial = faulty.trial(Fault(victim, f"call {call}"), moves=True)
    assert (trial.problems, trial.error, trial.figures["recoveries"]) == ((), "", 0), trial


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize(
    ("faults", "duplicate"),
    [
        *(pytest.param((Fault(name, "send h 5 garbage"),), "", id=f"garbage of {name}") for name in ("c", "d", "e")),
        *(pytest.param((), name, id=f"duplicate of {name}") for name in ("a", "c", "d")),
    ],
)
@pytest.mark.sampled(1)
def test_noise_of_a_hostile_host_or_a_second_process_of_a_node_changes_nothing(
    faulty: FaultyRing, faults: tuple[Fault, ...], duplicate: str
) -> None:
    """Random messages between good ones are refused; the second process ends, as its name is taken."""
    trial = faulty.trial(*faults, duplicate=duplicate)
    assert (trial.problems, trial.error, trial.figures["recoveries"]) == ((), "", 0), trial
    logs = "".join(map(faulty.cluster.log, faulty.cluster.names))
    assert all(f"refused a frame from {victim}: " in logs for victim, _ in faults)
