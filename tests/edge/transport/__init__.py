"""Tests of edge.transport."""
