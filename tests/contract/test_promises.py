"""Each promise has tests that hold it, and their marks are what ``make promises`` prints."""

from __future__ import annotations

import pytest

from tests.support.cases import cases
from tests.support.promises import PROMISES, TESTS, held_promises


@pytest.fixture(scope="module")
def held() -> dict[str, list[str]]:
    """Promise -> tests, as the files say."""
    return held_promises()


@cases("promise", PROMISES)
def test_promise_is_held_by_a_test(held: dict[str, list[str]], promise: str) -> None:
    """None is without a test; the list says which."""
    assert held[promise], f"no test is marked with promise({promise!r})"


def test_promises_have_no_other_names(held: dict[str, list[str]]) -> None:
    """A misspelt mark would hold nothing."""
    assert set(held) == set(PROMISES)


def test_promises_are_those_that_pytest_sees(held: dict[str, list[str]], request: pytest.FixtureRequest) -> None:
    """What is read from the files is what is marked, for every test of this session."""
    seen: dict[str, list[str]] = {}
    for item in request.session.items:
        name = f"{item.path.relative_to(TESTS.parent).as_posix()}::{getattr(item, 'originalname', item.name)}"
        seen.setdefault(name, sorted(mark.args[0] for mark in item.iter_markers("promise")))
    read = {name: sorted(promise for promise, names in held.items() if name in names) for name in seen}
    assert read == seen
