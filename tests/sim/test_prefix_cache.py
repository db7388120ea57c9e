"""The simulator replays what a prefix cache gains, and what reading and keeping cost."""

from __future__ import annotations

import pytest

from ringtune.costs.work_times import Work
from ringtune.rounds.turns.expected_prefixes import expect_prefixes
from ringtune.schedule.actions import Op
from ringtune.schedule.passage import PrefixCache
from ringtune.schedule.plan import Plan
from sim.prediction import Prediction, predict
from tests.support.plans import changed, make_plan
from tests.support.profiles import TIMES, profile_of

AB = [("a", 0, 6), ("b", 6, 12)]


def plan_of() -> Plan:
    """Twelve blocks, one of which trains; 40 batches, each three times; one micro-batch a batch."""
    return make_plan(
        AB, ["a"], num_blocks=12, num_steps=120, local_iterations=10, every_steps=1000, microbatches=1, train_rows=160
    )


def predicted(plan: Plan, **times: float) -> Prediction:
    """With the times of each work, whatever the size."""
    each = {**TIMES, **{Work(name): seconds for name, seconds in times.items()}}
    return predict(plan, profile_of(plan, times=each))


def test_prediction_leaves_out_what_a_cache_spares() -> None:
    """Batches that enter at block 11 are not embedded, and pass no frozen block; the rest takes what it took."""
    plan = plan_of()
    cached = changed(plan, cache=PrefixCache())
    expected = expect_prefixes(cached)
    enters = expected.entering
    assert (expected.items, expected.blocks) == (121, enters * 11)
    assert 60 < enters <= 80 and 30 < expected.kept["b"] <= 40  # some come again before they may be read
    without, found = predicted(plan), predicted(cached)
    spared = {entry.node: entry.busy_s - other.busy_s for entry, other in zip(without.nodes, found.nodes, strict=True)}
    assert spared["a"] == pytest.approx(enters * (TIMES[Work.EMBED] + 6 * TIMES[Work.FORWARD]))
    assert spared["b"] == pytest.approx(enters * 5 * TIMES[Work.FORWARD])
    assert found.wall_s < 0.75 * without.wall_s


def test_prediction_counts_the_reading_as_decoding_and_the_keeping_as_encoding() -> None:
    """Both as they were measured."""
    cached = changed(plan_of(), cache=PrefixCache())
    expected = expect_prefixes(cached)
    found = {entry.node: entry.busy_by_op_s for entry in predicted(cached, decode=0.25, encode=0.5).nodes}
    assert found["b"][str(Op.READ)] == pytest.approx(expected.entering * 0.25)
    assert found["b"][str(Op.KEEP)] == pytest.approx(expected.kept["b"] * 0.5)
    assert str(Op.READ) not in found["a"]
