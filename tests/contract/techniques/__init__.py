"""Tests of ringtune.techniques."""
