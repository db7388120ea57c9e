"""Tests of ``contract.rpc.codecs``."""
