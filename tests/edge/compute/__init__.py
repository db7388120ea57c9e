"""Tests of ``edge.compute``."""
