"""Tests of ``coordinator.planner``."""
