"""Tests of ringtune.transport."""
