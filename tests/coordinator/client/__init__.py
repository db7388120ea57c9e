"""Tests of ``coordinator.client``."""
