"""Tests of ringtune.run_control."""
