"""Tests of ringtune.config."""
