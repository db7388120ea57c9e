"""Tests of ringtune.storage."""
