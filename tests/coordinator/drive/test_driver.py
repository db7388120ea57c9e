"""The base of a run and of a measurement, without either."""

from __future__ import annotations

import inspect

from coordinator.drive.driver import Driver
from coordinator.drive.measure_driver import MeasureDriver
from coordinator.drive.run_driver import RunDriver


def test_driver_is_made_only_as_one_that_says_what_is_done() -> None:
    """The base alone can't be made, a run and a measurement can."""
    assert [inspect.isabstract(one) for one in (Driver, RunDriver, MeasureDriver)] == [True, False, False]
