"""The solvers equal a literal reference and an independent solver, on instances drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from ringtune.techniques.knapsacks import Codes, Knapsacks, joint, two_stage
from tests.contract.techniques.knapsack_reference import knapsack_scheduling

INSTANCES = 1000


def _scores(rng: random.Random, count: int) -> list[float]:
    kind = rng.randrange(4)
    return [(rng.random(), float(rng.randint(0, 3)), 1.5, rng.random() * 1e-12)[kind] for _ in range(count)]


class Instance:
    """One knapsack of one subnet: scores with ties and zeros, equal or unequal costs."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.count = rng.randint(1, 8)
        self.backward = _scores(rng, self.count)
        self.forward = [100 * each for each in _scores(rng, self.count)]
        cost = rng.randint(1, 5)
        equal = rng.random() < 0.3
        self.forward_costs = [cost if equal else rng.randint(1, 5) for _ in range(self.count)]
        more = rng.randint(0, 5)
        self.full_costs = [each + (more if equal else rng.randint(0, 5)) for each in self.forward_costs]
        self.capacities = (rng.randint(0, sum(self.full_costs)), rng.randint(0, sum(self.forward_costs)))
        start = rng.randrange(self.count)
        self.order = [(start + at) % self.count for at in range(self.count)]

    def knapsacks(self) -> Knapsacks:
        """As arrays of one knapsack."""
        return Knapsacks(
            full_costs=np.array([self.full_costs]),
            forward_costs=np.array([self.forward_costs]),
            full_capacity=np.array([self.capacities[0]]),
            forward_capacity=np.array([self.capacities[1]]),
            order=np.array([self.order]),
        )

    def codes(self, solver: Callable[..., Codes], *more: float) -> str:
        """What a solver makes of it."""
        found = solver(self.knapsacks(), np.array([self.backward]), np.array([self.forward]), *more)
        return bytes(found[0].tolist()).decode()

    def reference(self, *, independent: bool = False) -> str:
        """What Algorithm 1 makes of it."""
        codes = knapsack_scheduling(
            [Fraction(self.backward[at]) for at in self.order],
            [Fraction(self.forward[at]) for at in self.order],
            ([self.full_costs[at] for at in self.order], [self.forward_costs[at] for at in self.order]),
            self.capacities,
            independent=independent,
        )
        return "".join(codes[self.order.index(at)] for at in range(self.count))

    def worth(self, codes: str, scale: float) -> float:
        """The joint objective of some codes."""
        return sum(
            {"1": self.backward[at], "2": scale * self.forward[at], "3": 0.0}[code] for at, code in enumerate(codes)
        )

    def cost(self, codes: str) -> int:
        """The cost of some codes."""
        costs = {"1": self.full_costs, "2": self.forward_costs, "3": [0] * self.count}
        return sum(costs[code][at] for at, code in enumerate(codes))

    def best(self, scale: float) -> float:
        """The joint optimum by mixed-integer programming."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        one = np.hstack([np.eye(self.count), np.eye(self.count)])
        values = np.array([*self.backward, *(scale * each for each in self.forward)])
        unit = values.max() or 1.0
        found = milp(
            -values / unit,
            constraints=[
                LinearConstraint(np.array([[*self.full_costs, *self.forward_costs]]), ub=sum(self.capacities)),
                LinearConstraint(one, ub=1),
            ],
            integrality=1,
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": 0},
        )
        return float(-found.fun * unit)


def test_two_stage_equals_literal_reference() -> None:
    """On 300 instances the codes are those of Algorithm 1, ties and zeros included."""
    for seed in range(300):
        instance = Instance(seed)
        assert instance.codes(two_stage) == instance.reference(), seed


@pytest.mark.parametrize("first", range(0, INSTANCES, 100))
@pytest.mark.sampled(1)
def test_joint_equals_integer_programming(first: int) -> None:
    """On 1,000 instances the joint objective is that of an independent exact solver, within capacity."""
    for seed in range(first, first + 100):
        instance, scale = Instance(seed), random.Random(seed).choice([0.01, 0.1, 1.0])
        codes = instance.codes(joint, scale)
        assert instance.cost(codes) <= sum(instance.capacities)
        best = instance.best(scale)
        largest = max(*instance.backward, *(scale * each for each in instance.forward))
        assert instance.worth(codes, scale) == pytest.approx(best, abs=1e-6 * largest), seed


def test_many_knapsacks_at_once_are_as_each_alone() -> None:
    """Solving 200 knapsacks of five items together gives what each gives alone."""
    some = [instance for instance in map(Instance, range(3000)) if instance.count == 5][:200]
    together = Knapsacks(*(np.concatenate(arrays) for arrays in zip(*(each.knapsacks() for each in some), strict=True)))
    backward, forward = np.array([each.backward for each in some]), np.array([each.forward for each in some])
    for solver in (two_stage, joint):
        found = solver(together, backward, forward)
        assert [bytes(row.tolist()).decode() for row in found] == [each.codes(solver) for each in some]


def test_independent_stages_waste_forward_only_operations() -> None:
    """Read literally, both stages may take the same micro-batch, and a forward-only operation is lost."""
    instance = Instance(0)
    instance.count, instance.order = 5, [0, 1, 2, 3, 4]
    instance.backward, instance.forward = [5.0, 4.0, 3.0, 2.0, 1.0], [5.0, 4.0, 3.0, 2.0, 1.0]
    instance.full_costs, instance.forward_costs, instance.capacities = [5] * 5, [2] * 5, (15, 2)
    assert instance.reference(independent=True) == "11133"
    assert instance.reference() == instance.codes(two_stage) == "11123"


def test_nothing_fits_or_is_given() -> None:
    """No capacity gives shortcuts only; no knapsacks give no codes."""
    instance = Instance(1)
    instance.capacities = (0, 0)
    assert set(instance.codes(two_stage)) | set(instance.codes(joint)) == {"3"}
    none = Knapsacks(*(np.zeros(shape, dtype=np.int64) for shape in ((0, 5), (0, 5), 0, 0, (0, 5))))
    for solver in (two_stage, joint):
        assert solver(none, np.zeros((0, 5)), np.zeros((0, 5))).shape == (0, 5)


def test_scores_far_apart_are_told_apart() -> None:
    """Forward scores a trillion times as small as backward ones still choose among themselves."""
    ones = np.ones((1, 4), dtype=np.int64)
    knapsacks = Knapsacks(ones, ones, ones[:, 0], ones[:, 0], np.arange(4)[None])
    backward, forward = np.array([[1.0, 0.0, 0.0, 0.0]]), np.array([[1e-13, 1e-13, 2e-13, 3e-13]])
    assert joint(knapsacks, backward, forward).tobytes().decode() == "1332"
