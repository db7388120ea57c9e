"""Neither timing nor recomputation changes a bit: the same seed and plan give the same result."""

from __future__ import annotations

import pytest

from ringtune.schedule.units import Range
from tests.features.catalog import ALL
from tests.features.feature import Feature, carry_out, each_technique, run_of
from tests.features.methods import DRAWN
from tests.support.plans import changed
from tests.support.torch_ring import same_bits


@pytest.mark.promise("1 partition invariance")
@pytest.mark.promise("5 timing changes nothing")
@each_technique(ALL)
def test_other_delays_and_recomputed_blocks_give_the_same_bits(feature: Feature) -> None:
    """All that trains, losses, evaluations, checkpoints and the number of versions of two runs with other delays.

    In one of them all blocks or two of them run again in backward, with the dropout, versions, vectors, pairs and
    tables of their first run.
    """
    first, lowest = run_of(feature, feature.split), feature.case.private_blocks
    some = (Range(lowest, lowest + 1), Range(lowest + 2, lowest + 3))
    recompute = some if feature.number % 2 else (Range(lowest, 4),)
    other = carry_out(feature, changed(first.plan, recompute=recompute), 1)
    assert first.result.wall_s != other.result.wall_s
    assert same_bits(first.tensors, other.tensors)
    assert (first.losses, first.evaluations) == (other.losses, other.evaluations)
    assert first.notes.shards == other.notes.shards
    assert first.figures == other.figures


def test_comparison_of_bits_can_fail() -> None:
    """Negative control: the same run on micro-batches of another size rounds otherwise."""
    feature = DRAWN
    other = carry_out(feature, changed(feature.plan_on(feature.split), microbatches=1))
    assert not same_bits(run_of(feature, feature.split).tensors, other.tensors)
