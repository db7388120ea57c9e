"""Tests of ``contract.weights``."""
