"""Tests of ``coordinator.trust``."""
