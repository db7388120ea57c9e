"""Blocks that are run again in backward give the very bits of blocks whose graph was kept."""

from __future__ import annotations

import pytest

from ringtune.schedule.units import Range
from tests.features.catalog import ALL
from tests.features.feature import Feature, carry_out, each_technique, run_of
from tests.support.plans import changed
from tests.support.resumed import same_bits


@pytest.mark.promise("1 partition invariance")
@each_technique(ALL)
def test_recomputed_blocks_give_the_bits_of_kept_ones(feature: Feature) -> None:
    """All blocks, or two of them; dropout, versions, vectors, pairs and tables are those of the first run."""
    run, lowest = run_of(feature, feature.split), feature.case.private_blocks
    some = (Range(lowest, lowest + 1), Range(lowest + 2, lowest + 3))
    recompute = some if feature.number % 2 else (Range(lowest, 4),)
    again = carry_out(feature, changed(run.plan, recompute=recompute), 1)
    assert same_bits(again.tensors, run.tensors)
    assert again.losses == run.losses
