"""Tests of edge.cli."""
