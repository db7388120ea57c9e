"""Tests of ``ringtune.config.sections``: learning rate, recovery settings."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtune.config.sections import LR_SCHEDULES, learning_rate
from ringtune.job.job import Train
from tests.support.cases import cases

# Ten steps, peak 1, as transformers 4.57 get_scheduler gives them.
TABLES = {
    ("constant", 0): [1.0] * 10,
    ("constant", 4): [0, 0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1],
    ("linear", 0): [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1],
    ("linear", 5): [0, 0.2, 0.4, 0.6, 0.8, 1, 0.8, 0.6, 0.4, 0.2],
    ("cosine", 0): [1, 0.975528, 0.904508, 0.793893, 0.654508, 0.5, 0.345492, 0.206107, 0.095492, 0.024472],
    ("cosine", 6): [0, 1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1, 0.853553, 0.5, 0.146447],
}


@cases(("schedule", "warmup"), TABLES)
def test_learning_rate_follows_its_table(schedule: str, warmup: int) -> None:
    """Each schedule, with and without warm-up, step by step."""
    train = Train(learning_rate=1.0, lr_schedule=schedule, warmup_steps=warmup)
    found = [learning_rate(train, step, 10) for step in range(10)]
    assert found == pytest.approx(TABLES[schedule, warmup], abs=1e-6)
    share = Train(learning_rate=1.0, lr_schedule=schedule, warmup_share=max(0.0, warmup / 10 - 0.05))
    assert [learning_rate(share, step, 10) for step in range(10)] == found  # rounded up


@settings(max_examples=40)
@given(
    schedule=st.sampled_from(LR_SCHEDULES),
    peak=st.floats(0, 10),
    warmup=st.integers(0, 50),
    num_steps=st.integers(1, 50),
    step=st.integers(0, 100),
)
def test_learning_rate_is_between_zero_and_the_peak(
    schedule: str, peak: float, warmup: int, num_steps: int, step: int
) -> None:
    """Whatever the step, also past the end and with a warm-up longer than the run."""
    train = Train(learning_rate=peak, lr_schedule=schedule, warmup_steps=warmup)
    assert 0 <= learning_rate(train, step, num_steps) <= peak


def test_learning_rate_ends_at_zero_for_decaying_schedules() -> None:
    """After the last step nothing is left; a run that is continued does not go below."""
    for schedule in ("linear", "cosine"):
        assert learning_rate(Train(lr_schedule=schedule), 20, 10) == pytest.approx(0)
