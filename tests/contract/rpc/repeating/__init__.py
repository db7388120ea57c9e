"""Tests of calls that are made again."""
