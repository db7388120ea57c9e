"""Real nodes whose coordinator or submitter is killed: the run ends with what the undisturbed one trains.

``python -m tests.bench.coordinator_death`` does the same at more places, and at random ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.dying_ring import DyingRing, dying_ring
from tests.support.trials import Trial

pytestmark = pytest.mark.slow
LATE = "backward 14"  # of c, which trains from step 4 on: in the turn of steps 9 and 10, so step 6 is committed
SHORT: dict[str, Any] = {
    "train__max_steps": 12,
    "train__local_iterations": 2,
    "train__checkpoint_every": 4,
    "train__eval_every": 4,
}
"""Half of the steps of the matrix, in as many turns."""
CHOICE: dict[str, Any] = {"operations__policy": "two-stage", "operations__full": 1, "operations__refresh_rounds": 1}


@pytest.fixture(scope="module")
def dying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DyingRing]:
    """A run of six turns on one placement, with checkpoints after 4, 8 and 12 steps."""
    with dying_ring(tmp_path_factory.mktemp("death"), **SHORT) as made:
        yield made


def assert_one_death(trial: Trial, from_steps: set[int]) -> None:
    """The coordinator died once, the run went on after one of these steps, and it is the undisturbed one."""
    assert trial.figures["deaths_of_the_coordinator"] == 1 and trial.figures["from_step"] in from_steps, trial
    assert trial.problems == (), trial


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize(
    ("node", "order", "from_steps"),
    [("", "call Prepare 2", {-1}), ("c", LATE, {6, 8}), ("c", "write step-8.safetensors 1", {6, 8})],
)
@pytest.mark.sampled(1)
def test_run_goes_on_after_the_death_of_its_coordinator(
    dying: DyingRing, node: str, order: str, from_steps: set[int]
) -> None:
    """While nodes load, in a backward, while a checkpoint is written: equal tensors, and each step once.

    The checkpoint is of step 4; it goes on from the last turn that all had done.
    """
    trial = dying.trial(order, node=node)
    assert_one_death(trial, from_steps)
    assert trial.figures["is_told"], trial


@pytest.mark.parametrize(("event", "with_coordinator"), [('"preparing"', False), ('"step": 5', True)])
@pytest.mark.sampled(1)
def test_run_is_fetched_whose_submitter_was_killed(dying: DyingRing, event: str, with_coordinator: bool) -> None:
    """Alone while nodes load; with the coordinator while they train: the first id gets the whole run."""
    trial = dying.submitter_trial(event, with_coordinator=with_coordinator)
    assert (trial.figures["deaths_of_the_coordinator"], trial.problems) == (with_coordinator, ()), trial


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("changes", "moment", "from_steps"),
    [
        (SHORT | {"train__checkpoint_every": 0}, {"order": LATE, "node": "c"}, {6, 8}),
        (SHORT | {"recovery__copies": "none"}, {"order": "backward 8", "node": "c"}, {4}),
        (SHORT | CHOICE | {"train__checkpoint_every": 0}, {"order": "update 6", "node": "c"}, {6, 8}),
    ],
    ids=[
        "no checkpoints",
        "no ends of turns",
        "with a table that was chosen at a refresh",
    ],
)
def test_run_of_another_kind_goes_on_after_the_death_of_its_coordinator(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any], moment: dict[str, str], from_steps: set[int]
) -> None:
    """From its last turn, or from the checkpoint where nodes keep no ends of turns; it does not begin anew."""
    with dying_ring(tmp_path_factory.mktemp("death"), **changes) as ring:
        trial = ring.trial(**moment)
    assert_one_death(trial, from_steps)


@pytest.mark.thorough
def test_run_that_keeps_its_best_result_is_taken_up(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The best evaluation was before the death: what nodes sent then is the result, as in the undisturbed run."""
    more: dict[str, Any] = {"train__keep_best": True, "train__eval_every": 4, "train__learning_rate": 0.03}
    folder = tmp_path_factory.mktemp("death")
    with dying_ring(folder, **more) as ring:
        trial = ring.trial("backward 34", node="c")  # in the turn of steps 17 to 20
    assert_one_death(trial, {12, 16})
    reports = [json.loads(path.read_text()) for path in folder.glob("*/report.json")]
    assert [report["best"]["step"] for report in reports] == [8, 8]


@pytest.mark.thorough
def test_run_without_checkpoints_begins_anew_where_its_last_turns_are_lost(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """From step 0, in the books of the run that takes it up."""
    with dying_ring(tmp_path_factory.mktemp("death"), **SHORT | {"train__checkpoint_every": 0}) as ring:
        ring.coordinator.on_death = ring.forget_turns
        trial = ring.trial(LATE, node="c")
    assert_one_death(trial, {0})


@pytest.mark.thorough
def test_nodes_that_have_given_their_run_up_come_back_for_it(dying: DyingRing) -> None:
    """The coordinator is away for longer than 12 leases."""
    dying.coordinator.on_death = dying.wait_given_up
    try:
        trial = dying.trial(LATE, node="c")
    finally:
        dying.coordinator.on_death = lambda: None
    assert_one_death(trial, {6, 8})
