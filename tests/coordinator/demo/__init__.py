"""Tests of ``coordinator.demo``."""
