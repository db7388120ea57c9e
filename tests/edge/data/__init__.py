"""Tests of ``edge.data``."""
