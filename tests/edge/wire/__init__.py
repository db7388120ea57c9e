"""Tests of ``edge.wire``."""
