"""Tests of ``contract.trust``."""
