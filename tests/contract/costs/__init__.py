"""Tests of ``contract.costs``."""
