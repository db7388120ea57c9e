"""Tests of ``coordinator.api``."""
