"""Tests of training methods."""
