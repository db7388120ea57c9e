"""Tests of ``contract.jobs``."""
