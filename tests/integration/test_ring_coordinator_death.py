"""Real nodes whose coordinator or submitter is killed: the run ends with what the undisturbed one trains.

``python -m tests.bench.coordinator_death`` does the same at more places, and at random ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.dying_ring import DyingRing, dying_ring

pytestmark = pytest.mark.slow
LATE = "backward 34"  # of c, which trains from step 4 on: in the turn of steps 17 to 20, so step 12 is committed


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DyingRing]:
    """A run of six turns on one placement, with checkpoints after 8, 16 and 24 steps."""
    with dying_ring(tmp_path_factory.mktemp("death")) as made:
        yield made


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize(
    ("node", "order", "from_steps"),
    [("", "call Prepare 2", {-1}), ("c", LATE, {12, 16}), ("c", "write step-16.safetensors 1", {12, 16})],
)
@pytest.mark.sampled(1)
def test_run_goes_on_after_the_death_of_its_coordinator(
    ring: DyingRing, node: str, order: str, from_steps: set[int]
) -> None:
    """While nodes load, in a backward, while a checkpoint is written: equal tensors, and each step once.

    The checkpoint is of step 8; it goes on from the last turn that all had done.
    """
    trial = ring.trial(order, node=node)
    assert trial.deaths == 1 and trial.from_step in from_steps, trial
    assert trial.is_good, trial


@pytest.mark.thorough
def test_run_without_checkpoints_goes_on_from_its_last_turn(tmp_path_factory: pytest.TempPathFactory) -> None:
    """It does not begin anew."""
    with dying_ring(tmp_path_factory.mktemp("death"), train__checkpoint_every=0) as ring:
        trial = ring.trial(LATE, node="c")
    assert trial.from_step in {12, 16} and trial.is_good, trial


@pytest.mark.thorough
def test_run_that_keeps_its_best_result_is_taken_up(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The best evaluation was before the death: what nodes sent then is the result, as in the undisturbed run."""
    more: dict[str, Any] = {"train__keep_best": True, "train__eval_every": 4, "train__learning_rate": 0.03}
    folder = tmp_path_factory.mktemp("death")
    with dying_ring(folder, **more) as ring:
        trial = ring.trial(LATE, node="c")
    assert trial.deaths == 1 and trial.from_step in {12, 16} and trial.is_good, trial
    reports = [json.loads(path.read_text()) for path in folder.glob("*/report.json")]
    assert [report["best"]["step"] for report in reports] == [8, 8]


@pytest.mark.thorough
def test_run_without_checkpoints_begins_anew_where_its_last_turns_are_lost(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """From step 0, in the books of the run that takes it up."""
    with dying_ring(tmp_path_factory.mktemp("death"), train__checkpoint_every=0) as ring:
        ring.coordinator.on_death = ring.forget_turns
        trial = ring.trial(LATE, node="c")
    assert (trial.from_step, trial.is_good) == (0, True), trial


@pytest.mark.thorough
def test_run_that_keeps_no_copies_goes_on_from_its_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nodes keep no ends of turns then."""
    with dying_ring(tmp_path_factory.mktemp("death"), recovery__copies="none") as ring:
        trial = ring.trial("backward 24", node="c")
    assert (trial.from_step, trial.is_good) == (8, True), trial


@pytest.mark.thorough
def test_nodes_that_have_given_their_run_up_come_back_for_it(ring: DyingRing) -> None:
    """The coordinator is away for longer than 12 leases."""
    ring.coordinator.on_death = ring.wait_given_up
    try:
        trial = ring.trial(LATE, node="c")
    finally:
        ring.coordinator.on_death = lambda: None
    assert trial.deaths == 1 and trial.from_step in {12, 16} and trial.is_good, trial


@pytest.mark.parametrize(("event", "with_coordinator"), [('"preparing"', False), ('"step": 10', True)])
@pytest.mark.sampled(1)
def test_run_is_fetched_whose_submitter_was_killed(ring: DyingRing, event: str, with_coordinator: bool) -> None:
    """Alone while nodes load; with the coordinator while they train: the first id gets the whole run."""
    trial = ring.submitter_trial(event, with_coordinator=with_coordinator)
    assert (trial.deaths, trial.is_good) == (with_coordinator, True), trial


@pytest.mark.thorough
def test_run_that_moves_goes_on_after_the_death_of_its_coordinator(tmp_path_factory: pytest.TempPathFactory) -> None:
    """In the middle of the move, which is done again."""
    with dying_ring(tmp_path_factory.mktemp("death"), moves=True) as ring:
        trial = ring.trial("call Move 3")
    assert (trial.deaths, trial.from_step, trial.is_good) == (1, 12, True), trial


@pytest.mark.thorough
def test_run_that_has_lost_a_host_goes_on_after_the_death_of_its_coordinator(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """In the middle of the recovery: the host that comes back takes its blocks from the copies of the next one."""
    with dying_ring(tmp_path_factory.mktemp("death"), recovery__copies="next") as ring:
        trial = ring.trial("call Move 1", loses="c")
    assert trial.deaths == 1 and trial.from_step in {8, 12, 16} and trial.is_good, trial
