"""Tests of ``contract.schedule``."""
