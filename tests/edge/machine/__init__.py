"""Tests of ``edge.machine``."""
