"""Tests of edge.profiler."""
