"""Tests of ``coordinator.cli``."""
