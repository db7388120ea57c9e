"""Tests of ringtune.job."""
