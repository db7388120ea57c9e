"""Class names that were meant to be one."""

from __future__ import annotations

from ringtune.job.rows import look_alikes


def test_look_alikes_differ_in_spaces_and_capitals_only() -> None:
    """Each group once, in order; names that differ otherwise are in none."""
    assert look_alikes(["x", " x", "X", "y", "a b", "a  b", "ab"]) == ((" x", "X", "x"), ("a  b", "a b"))
    assert look_alikes(["neg", "pos"]) == ()
