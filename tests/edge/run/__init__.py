"""Tests of ``edge.run``."""
