"""Tests of edge.model.auxiliary."""
