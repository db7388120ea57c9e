"""Tests of ``edge.joining``."""
