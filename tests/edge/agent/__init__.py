"""Tests of ``edge.agent``."""
