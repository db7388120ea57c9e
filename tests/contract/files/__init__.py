"""Tests of ``contract.files``."""
