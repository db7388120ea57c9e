"""Tests of ``contract.schedule.spreading``."""
