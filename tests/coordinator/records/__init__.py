"""Tests of ``coordinator.records``."""
