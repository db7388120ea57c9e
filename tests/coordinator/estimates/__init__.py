"""Tests of ``coordinator.estimates``."""
