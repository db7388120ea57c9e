"""Tests of edge.techniques."""
