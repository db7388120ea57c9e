"""Tests of ``coordinator.planner.predict``."""
