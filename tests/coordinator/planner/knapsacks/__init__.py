"""Tests of ``coordinator.planner.knapsacks``."""
