"""What a plan of HiFT says of its groups, its sweeps, and of what owners tell each other."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.screen.planned.groups_text import groups_lines
from coordinator.screen.planned.plan_text import plan_text
from ringtune.costs.memory.terms import MemoryEstimate, Term
from ringtune.schedule.methods import Hift
from ringtune.schedule.plan import Plan
from ringtune.schedule.units import Units, units_text
from tests.support.plans import make_plan

MEMORY = {"a": MemoryEstimate((Term("buffers", "gradient of the embedding on its way", 2, 3 << 20),))}


def plan(owners: tuple[str, ...] = ("a", "b"), **settings: Any) -> Plan:
    """Four blocks on two nodes, ten steps."""
    return make_plan([("a", 0, 2), ("b", 2, 4)], owners, method=Hift(**settings), num_steps=10)


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        ([-1], "embedding"),
        ([-1, 0], "embedding, block 0"),
        ([0, 1, 2], "blocks 0 to 2"),
        ([3, 4], "block 3, head"),
        ([-1, 0, 1, 2, 3, 4], "embedding, blocks 0 to 3, head"),
        ([-1, 1, 4], "embedding, block 1, head"),
        ([4], "head"),
    ],
)
def test_units_have_names(units: list[int], expected: str) -> None:
    """Neighbouring blocks are a range."""
    assert units_text(Units.of(4, units)) == expected


def test_a_plan_of_hift_says_groups_sweeps_and_what_owners_send() -> None:
    """Groups in the order of a sweep, the sweeps of the run, and plainly what the rows of a gradient tell."""
    lines = groups_lines(plan(group_size=2, order="top2down").course, MEMORY)
    assert lines == [
        "trains all parameters, one group a step: block 3, head | blocks 1 to 2 | embedding, block 0",
        "a sweep over all groups is 3 steps; the run has 4 sweeps, and the learning rate advances once a sweep",
        "every owner has a copy of embedding and head; a step that trains one sends its gradient to the other owners: "
        "embedding (at most 3.0 MiB), head",
        "note: these gradients tell the other owners much of a batch: with texts, the embedding's which tokens it had "
        "and, of learned positions, where they stood; the head's about how many rows of each class",
    ]


def test_a_plan_with_one_owner_sends_no_gradients_of_units() -> None:
    """Nobody else has a copy."""
    assert len(groups_lines(plan(("a",)).course, {})) == 2


def test_a_plan_with_adapters_says_nothing_of_groups() -> None:
    """Methods whose blocks have adapters train the head and some blocks."""
    assert groups_lines(make_plan([("a", 0, 4)], ["a"]).course, {}) == []


def test_the_table_of_a_plan_of_hift_names_the_units_of_its_step() -> None:
    """Step 1 of groups of one trains block 0."""
    text = plan_text(plan(), {}, at_step=1, measured=False)
    assert "actions from step 1, which trains block 0:" in text
