"""Tests of ``coordinator.run``."""
