"""Tests of ``edge.doctor``."""
