"""The bench of attacks: what makes a row bad, and that every attack has its stated answers; nobody is attacked here."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tests.bench.attacks.__main__ import MOST_BYTES, STATED, Row
from tests.bench.attacks.hostile import ATTACKS

GOOD = Row(
    attack="plain text",
    target="node-2",
    tries=3,
    answers={"UNAVAILABLE: Socket closed": 3},
    unstated=[],
    ended="",
    is_equal=True,
    rss_before_bytes=100,
    rss_after_bytes=100 + MOST_BYTES,
    rss_peak_bytes=100,
    run_s=1.0,
)


def test_every_attack_has_its_answers() -> None:
    """Of a node, or of the coordinator, or of both; as patterns."""
    assert STATED.keys() == ATTACKS.keys()
    assert all(any(answers) for answers in STATED.values())
    assert all(re.compile(answer) for answers in STATED.values() for answer in answers)


@pytest.mark.parametrize(
    "changes",
    [
        {"tries": 0},
        {"unstated": ["OK"]},
        {"ended": "PeerLostError: node-2 is lost"},
        {"is_equal": False},
        {"rss_after_bytes": 101 + MOST_BYTES},
    ],
)
def test_row_is_bad_for_any_one_reason(changes: dict[str, object]) -> None:
    """No try, another answer, a run that ended, other bits, or more memory."""
    assert GOOD.is_good
    assert not dataclasses.replace(GOOD, **changes).is_good  # type: ignore[arg-type]
