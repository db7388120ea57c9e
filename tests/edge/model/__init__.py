"""Tests of ``edge.model``."""
