"""The tests themselves: their sample is the same in every process, tables are carried out whole, promises are held."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from tests.support.cases import cases
from tests.support.promises import PROMISES, TESTS, held_promises


def test_cases_are_all_carried_out_and_the_one_that_fails_is_named(tmp_path: Path) -> None:
    """One test has the rows of a table; each has a folder of its own, and no table is empty."""
    seen: list[Path] = []

    @cases(("wanted", "size"), [(1, 1), (2, 2), (3, 4)])
    def check(tmp_path: Path, wanted: int, size: int) -> None:
        seen.append(tmp_path)
        assert wanted == size

    assert list(inspect.signature(check).parameters) == ["tmp_path"]
    with pytest.raises(AssertionError) as caught:
        check(tmp_path=tmp_path)
    assert caught.value.__notes__ == ["case 2 of 3: {'wanted': 3, 'size': 4}"]
    assert len(set(seen)) == 3 and all(folder.is_dir() for folder in seen)
    with pytest.raises(ValueError, match="there is no case of x"):
        cases("x", [])


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
