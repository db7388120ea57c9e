"""Tests of ``contract.rpc``."""
