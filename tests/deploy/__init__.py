"""Tests of ``deploy``."""
