"""Tests of ``edge.weights``."""
