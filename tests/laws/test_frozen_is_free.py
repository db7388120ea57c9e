"""Frozen means free: below the lowest unit that trains nothing is kept, and no gradient is sent."""

from __future__ import annotations

import pytest

from ringtune.schedule.actions import Action, Payload
from tests.features.catalog import ALL, COUNTS
from tests.features.feature import Feature, each, run_of
from tests.support.recorded_ring import RecordedRing
from tests.support.torch_ring import make_carrier


@pytest.mark.promise("3 frozen means free")
@each(ALL, COUNTS)
def test_nothing_is_kept_or_sent_below_what_trains(feature: Feature) -> None:
    """No graph and no gradient of a unit that does not train; at the end no node holds anything."""
    run = run_of(feature, feature.split)
    units = run.notes.units
    sent = {
        (message.key.seq, message.key.boundary) for message in run.result.messages if message.payload == Payload.GRAD
    }
    assert {(seq, boundary) for seq, boundary in sent if boundary <= units[seq].lowest} == set()
    assert run.notes.too_low == set()
    assert set(run.live_bytes.values()) == {0}
    if run.plan.course.method.name != "pipeadapter":  # the others store one version
        assert {figures["peak_versions"] for figures in run.figures.values()} <= {0, 1}
        assert {figures["peak_version_bytes"] for figures in run.figures.values()} == {0}


@pytest.mark.promise("3 frozen means free")
@pytest.mark.parametrize("num_steps", [2, 6])
def test_live_bytes_do_not_grow_with_batches(num_steps: int) -> None:
    """What a frozen host holds at once is bounded by credits, however many batches pass."""
    changes = {"every_steps": 1000, "microbatches": 4, "num_steps": num_steps, "local_iterations": num_steps}
    feature = Feature(
        name="frozen/all-but-the-top", changes=changes | {"owners": ("a",), "eval_every": 0, "checkpoint_every": 0}
    )
    plan = feature.plan_on("four")
    carrier = make_carrier(feature.case, plan)
    peaks = dict.fromkeys(plan.nodes, 0)
    original = carrier.run

    def watched(node: str, action: Action) -> tuple[tuple[str, float], ...]:
        values = original(node, action)
        peaks[node] = max(peaks[node], carrier.executors[node].live_bytes())
        return values

    carrier.run = watched  # type: ignore[method-assign]
    assert RecordedRing(plan, carrier=carrier).run().finish is not None
    hidden_bytes = 2 * 16 * 32 * 8
    # at most the credits of its outgoing link and one under way, each a micro-batch of 2 x 16 x 32 in float64
    for node in ("d", "c", "b"):
        assert 0 < peaks[node] <= (plan.placement.credits + 1) * (hidden_bytes + 2 * 16 * 8)
