"""Tests of edge.runtime."""
