"""From what a job asks to capacities: counts, budgets, balance, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ringtune.errors import JobError, PlanError
from ringtune.schedule.operation_tables import BlockCapacity, Choice
from ringtune.schedule.placement import Slice
from ringtune.storage.strict import read_dataclass, to_table
from ringtune.techniques.operation_capacities import HostCost, balanced, choice_of
from ringtune.techniques.operations import OperationsSettings
from tests.support.cases import cases
from tests.support.plans import make_plan

HOSTS = (Slice(node="a", start=0, stop=2), Slice(node="b", start=2, stop=4), Slice(node="c", start=4, stop=4))
EQUAL = {"a": (0.4, 0.6), "b": (0.4, 0.6), "c": (9.0, 9.0)}


def choice(microbatches: int = 5, *, costs: dict[str, tuple[float, float]] = EQUAL, **settings: Any) -> Choice:
    """What a job's settings become, with two subnets a block and two rows a micro-batch."""
    course = make_plan(
        [("a", 0, 4)], ["a", "b"], batch_size=2 * microbatches, microbatches=microbatches, local_iterations=3
    ).course
    chosen = OperationsSettings(**{"policy": "two-stage", **settings})
    return choice_of(chosen, course, subnets=2, hosts=HOSTS, costs=costs)


def counts(capacity: BlockCapacity, size: int = 2) -> tuple[float, float]:
    """Full and forward-only operations that a capacity allows."""
    return (
        round(capacity.full / (capacity.forward + capacity.backward) / size, 6),
        round(capacity.forward_only / capacity.forward / size, 6),
    )


@cases(
    ("microbatches", "settings", "expected"),
    [
        (5, {"full": 3, "forward_only": 1}, (3, 1)),
        (5, {"full": 2}, (2, 0)),
        (5, {"compute": 0.6}, (3, 0)),
        (4, {"compute": 0.6}, (2, 1)),
        (8, {"compute": 0.6}, (4, 2)),
        (5, {"compute": 1.0}, (5, 0)),
        (10, {"compute": 0.5}, (5, 0)),
        (5, {"compute": 0.95}, (4, 1)),
    ],
)
def test_counts_of_a_budget(microbatches: int, settings: dict[str, Any], expected: tuple[int, int]) -> None:
    """A budget is as many whole full operations as fit, and forward-only ones of the rest."""
    found = choice(microbatches, **settings)
    assert [counts(capacity) for capacity in found.capacities] == [expected]
    assert found.capacities[0].forward == pytest.approx(0.2)  # of one of two subnets


def test_settings_travel_into_the_choice() -> None:
    """Scores, scale and policy are the job's; rounds become steps; only pruning chooses anew by itself."""
    found = choice(policy="joint", compute=0.6, score_scale=0.1, backward_score="fisher", refresh_rounds=2)
    assert (found.policy, found.score_scale, found.backward_score, found.refresh_steps) == ("joint", 0.1, "fisher", 12)
    assert [choice(policy=name, compute=0.6).refresh_steps for name in ("two-stage", "random", "magnitude")] == [
        0,
        0,
        16,
    ]


def test_slices_share_their_operations() -> None:
    """By slice, a block is one subnet, and each host with blocks is one group."""
    found = choice(4, full=2, by_slice=True)
    assert (found.subnets, found.groups) == (1, ((0, 2), (2, 4)))
    again = json.loads(json.dumps(to_table(found)))
    assert read_dataclass(Choice, again, where="choice", error=PlanError) == found


def test_pruning_has_one_budget_over_all_subnets() -> None:
    """Of pruning, the whole budget is for full operations, to the last part of one, and may be less than one."""
    assert counts(choice(4, policy="magnitude", compute=0.65).capacities[0]) == (2.6, 0)
    assert counts(choice(2, policy="magnitude", compute=0.4).capacities[0]) == (0.8, 0)


@cases("microbatches", [8, 10])
@cases("compute", [0.4, 0.5, 0.6, 0.7])
@cases("forward", [0.33, 0.4, 0.43, 0.5])
def test_boards_of_unequal_speed_are_busy_alike(microbatches: int, compute: float, forward: float) -> None:
    """A board twice as fast does more, so that busy seconds lie within 10 %, at no more than the compute asked for."""
    costs = {"a": (2 * forward, 2 * (1 - forward)), "b": (forward, 1 - forward)}
    found = choice(microbatches, compute=compute, balance=True, costs=costs)
    slow, fast = found.capacities[0], found.capacities[2]
    assert found.capacities == (slow, slow, fast, fast)
    busy = [each.full + each.forward_only for each in (slow, fast)]
    assert (max(busy) - min(busy)) / max(busy) <= 0.10
    done = sum(n_full + n_forward * forward for n_full, n_forward in map(counts, (slow, fast))) / (2 * microbatches)
    assert 0.9 * compute <= done <= compute + 1e-9


@cases(
    ("settings", "message"),
    [
        ({}, "needs to know how much is done"),
        ({"full": 4, "forward_only": 2}, "more than the 5 micro-batches"),
        ({"full": 0, "forward_only": 2}, "operations.full is 0"),
        ({"compute": 0.1}, "raise it to 0.2"),
        ({"compute": 0.6, "policy": "magnitude", "balance": True}, "balance has no meaning"),
    ],
)
def test_budgets_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    """What is more than a batch has, or leaves nothing full, is refused with its key."""
    with pytest.raises(JobError, match=message):
        choice(**settings)


def test_balance_that_starves_a_board_is_refused() -> None:
    """A board so slow that it could do nothing in full while the others work is refused."""
    boards = [
        HostCost(node="slow", blocks=1, full_s=100.0, forward_s=40.0),
        HostCost(node="fast", blocks=9, full_s=1.0, forward_s=0.4),
    ]
    with pytest.raises(JobError, match="one full micro-batch"):
        balanced(boards, 4, 12.0)
