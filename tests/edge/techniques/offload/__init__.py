"""Tests of edge.techniques.offload."""
