"""Sharing blocks out in proportion to speed, within memory."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.planner.even import split_blocks


@pytest.mark.parametrize(
    ("costs", "blocks", "counts"),
    [
        ([1.0], 12, (12,)),
        ([1.0, 1.0, 1.0, 1.0], 6, (2, 2, 1, 1)),
        ([1.0, 2.0], 12, (8, 4)),
        ([2.0, 1.0, 1.0], 10, (2, 4, 4)),
        ([1.0, 1.0, 1.0], 2, (1, 1, 0)),
        ([1.0, 100.0], 6, (6, 0)),
    ],
)
def test_split_is_proportional_to_speed(costs: list[float], blocks: int, counts: tuple[int, ...]) -> None:
    """Twice as fast means twice as many blocks; what is left over goes to the lower blocks."""
    assert split_blocks(costs, start=0, stop=blocks) == counts


def test_split_ignores_noise_of_measurement() -> None:
    """Equal nodes whose times differ by a tenth get equal slices."""
    assert split_blocks([1.0, 1.1, 0.95, 1.05], start=0, stop=12) == (3, 3, 3, 3)


def test_split_starts_after_private_blocks() -> None:
    """Only the shared blocks are counted."""
    assert split_blocks([1.0, 1.0], start=2, stop=6) == (2, 2)


def test_split_moves_blocks_to_who_has_room() -> None:
    """A node with room for one block gets one, however fast it is."""
    assert split_blocks([1.0, 1.0], start=0, stop=6, longest=lambda index, first: first + (1 if index == 0 else 6)) == (
        1,
        5,
    )


def test_split_is_none_if_nothing_fits() -> None:
    """Two nodes with room for two blocks each can't host six; an owner without room for its head hosts nothing."""
    assert split_blocks([1.0, 1.0], start=0, stop=6, longest=lambda index, first: first + 2) is None
    assert split_blocks([1.0, 1.0], start=0, stop=6, longest=lambda index, first: 6 if index else -1) is None


@settings(max_examples=60, deadline=None)
@given(
    costs=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    blocks=st.integers(1, 7),
    room=st.lists(st.integers(0, 7), min_size=4, max_size=4),
)
def test_split_is_as_good_as_trying_everything(costs: list[int], blocks: int, room: list[int]) -> None:
    """The slowest slice is within the tolerance of the best of all splits, and a split is found if there is one."""
    found = split_blocks(costs, start=0, stop=blocks, longest=lambda index, first: first + room[index])
    everything = [
        counts
        for counts in itertools.product(*(range(room[index] + 1) for index in range(len(costs))))
        if sum(counts) == blocks
    ]
    if not everything:
        assert found is None
        return
    assert found in everything
    slowest = [max(cost * count for cost, count in zip(costs, counts, strict=True)) for counts in everything]
    assert max(cost * count for cost, count in zip(costs, found, strict=True)) <= min(slowest) * 1.15 + 1e-9
