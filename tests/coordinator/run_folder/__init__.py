"""Tests of ``coordinator.run_folder``."""
