"""Tests of edge.checkpoint."""
