"""Tests of ``edge.measuring``."""
