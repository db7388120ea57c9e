"""Tests of ``coordinator.commands``."""
