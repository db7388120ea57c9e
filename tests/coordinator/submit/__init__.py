"""Tests of ``coordinator.submit``."""
