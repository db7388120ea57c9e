"""The figure that bounds what predictions can be held to."""

from __future__ import annotations

import pytest

from tests.bench import machine_drift
from tests.bench.machine_drift import Drift, measure_drift


def test_drift_is_told_against_the_median() -> None:
    """Extremes are shares of the median, not of each other."""
    assert Drift((120.0, 90.0, 100.0)).text.endswith("median 100.0 (-10 to +20 %)")


def test_drift_is_of_processor_time_that_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """One window at least, and a unit of work takes time."""
    monkeypatch.setattr(machine_drift, "_WINDOW_S", 0.01)
    assert min(measure_drift(0.01).unit_ms) > 0
