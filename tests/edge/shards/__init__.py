"""Tests of ``edge.shards``."""
