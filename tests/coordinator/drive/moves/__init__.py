"""Tests of ``coordinator.drive``."""
