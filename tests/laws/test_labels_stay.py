"""Labels stay: no message of the ring has labels or token ids."""

from __future__ import annotations

import pytest

from ringtune.schedule.actions import Payload
from tests.features.catalog import ALL, COUNTS
from tests.features.feature import Feature, each, run_of


@pytest.mark.promise("4 labels stay")
@each(ALL, COUNTS)
def test_messages_hold_neither_token_ids_nor_labels(feature: Feature) -> None:
    """What travels is floating point, except the mask of a hidden state below the head: 0 and 1, of packed rows 2."""
    run = run_of(feature, feature.split)
    assert run.notes.dtypes or len(run.plan.nodes) == 1
    assert all(dtype.is_floating_point for dtype in run.notes.dtypes)
    for payload, boundary, values in run.notes.masks:
        assert payload == Payload.HIDDEN and boundary < run.plan.course.num_blocks
        assert set(values) <= ({0, 1, 2} if run.plan.course.packed else {0, 1})
