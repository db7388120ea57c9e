"""Tests of ``contract.rounds``."""
