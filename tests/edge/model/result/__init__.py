"""Tests of what a run leaves behind."""
