"""Tests of ``contract.models``."""
