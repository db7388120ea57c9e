"""Tests of ``contract.schedule.operations``."""
