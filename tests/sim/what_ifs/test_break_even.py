"""From which rate on a helper pays: for adapters as large as their matrices; for low rank on a slow link never."""

from __future__ import annotations

import pytest

from ringtune.errors import PlanError
from ringtune.schedule.helped import helped
from sim.what_ifs.break_even import break_even_bytes_per_s, gained_s
from tests.support.offloading import LINEAR_PARAMS, LOW_RANK_PARAMS, MEGABIT, plan, profile


def test_break_even_of_linear_adapters_on_a_weak_host() -> None:
    """Below the rate the step waits for pairs, above it the host has less to compute."""
    found = break_even_bytes_per_s(plan(), profile(LINEAR_PARAMS))
    assert found is not None
    assert 1e6 < found < 1e9
    assert gained_s(plan(), profile(LINEAR_PARAMS), found / 1.1) <= 0
    assert gained_s(plan(), profile(LINEAR_PARAMS), found * 1.1) > 0


@pytest.mark.parametrize("rate", [MEGABIT / 10, MEGABIT])
def test_break_even_is_never_reached_by_low_rank_on_a_slow_link(rate: float) -> None:
    """Pairs are as large as those of full matrices, but there is next to nothing to compute."""
    assert gained_s(plan(), profile(LOW_RANK_PARAMS), rate) < 0


def test_break_even_needs_helpers() -> None:
    """A plan without helpers has no such rate."""
    with pytest.raises(PlanError, match="the plan has no helpers"):
        break_even_bytes_per_s(helped(plan(), {}), profile(LINEAR_PARAMS))
