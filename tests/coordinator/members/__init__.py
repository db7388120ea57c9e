"""Tests of ``coordinator.members``."""
