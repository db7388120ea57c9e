"""Tests of ``contract.engine``."""
