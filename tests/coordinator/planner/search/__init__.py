"""Tests of ``coordinator.planner.search``."""
