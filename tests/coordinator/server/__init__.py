"""Tests of ``coordinator.server``."""
