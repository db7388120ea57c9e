"""Tests of ``coordinator.export``."""
