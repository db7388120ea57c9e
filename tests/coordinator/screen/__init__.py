"""Tests of ``coordinator.screen``."""
