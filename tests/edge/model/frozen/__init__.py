"""Tests of edge.model.frozen."""
