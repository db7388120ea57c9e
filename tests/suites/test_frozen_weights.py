"""Frozen weights that are held small: how near results are where sums come in another order, and logits in chunks.

That a run equals one whose frozen weights were rounded once is among the laws.
"""

from __future__ import annotations

import dataclasses

import pytest

from ringtune.schedule.course import FrozenWeights
from tests.features.feature import Feature, carry_out, run_of, wanted_of
from tests.features.memory import EXACT, FROZEN, frozen
from tests.support.rounded import WAYS
from tests.support.torch_ring import distance

DECODERS = [feature for feature in FROZEN if "decoder" in feature.name]


@pytest.mark.parametrize("feature", DECODERS, ids=lambda feature: feature.name)
@pytest.mark.sampled(1)
def test_frozen_decoder_gives_its_logits_in_chunks(monkeypatch: pytest.MonkeyPatch, feature: Feature) -> None:
    """As it gives them at once, in one with the token table or not."""
    monkeypatch.setattr("edge.model.heads.logits_fit", lambda *sizes: False)
    monkeypatch.setattr("edge.model.heads.MAX_LOGIT_BYTES", 16 << 10)
    run = carry_out(feature, feature.plan_on(feature.split))
    assert distance(run.tensors, wanted_of(feature, feature.split).tensors) < 10 * EXACT


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.sampled(1)
def test_frozen_weights_with_other_microbatches_are_near(way: FrozenWeights) -> None:
    """Sums come in another order, and products in bfloat16 are of other shapes; nothing else differs."""
    feature = frozen("/near", "bert", way)
    one, four = (
        run_of(dataclasses.replace(feature, changes={**feature.changes, "microbatches": number}), "two").tensors
        for number in (1, 4)
    )
    assert distance(four, one) < (1e-2 if way.native else 1e-5)
