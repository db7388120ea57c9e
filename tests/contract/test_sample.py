"""The tests themselves: their sample is the same in every process, tables are carried out whole, promises are held."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import cases
from tests.support.promises import PROMISES, TESTS, held_promises
from tests.support.sample import in_sample, leave_thorough_out


class _Item:
    def __init__(self, nodeid: str, **marks: tuple[int, ...]) -> None:
        self.nodeid, self._marks = nodeid, marks

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return pytest.Mark(name, self._marks[name], {}, _ispytest=True) if name in self._marks else None


def _cases(count: int, of: int) -> list[Any]:
    return [_Item(f"a.py::test_x[{case}]", sampled=(count,)) for case in range(of)]


def test_sample_has_so_many_cases_whatever_their_order() -> None:
    """Processes that collect in another order draw the same; more cases than there are is all of them."""
    cases = _cases(3, of=20)
    kept = in_sample(cases)
    assert len(kept) == 3
    assert in_sample(reversed(cases)) == kept
    assert len(in_sample(_cases(9, of=4))) == 4


def test_sample_of_two_tests_is_drawn_from_each() -> None:
    """A test does not take the places of another one."""
    others: list[Any] = [_Item(f"a.py::test_y[{case}]", sampled=(2,)) for case in range(20)]
    kept = in_sample([*_cases(3, of=20), *others])
    assert len([nodeid for nodeid in kept if "test_y" in nodeid]) == 2
    assert len(kept) == 5


def test_sample_leaves_out_what_is_thorough_unless_it_is_asked_for_alone() -> None:
    """By its name it is carried out, and so is any case."""
    plain: Any = _Item("a.py::test_plain")
    thorough: Any = _Item("a.py::test_long", thorough=())
    assert in_sample([plain, thorough]) == {plain.nodeid}
    assert in_sample([thorough]) == {thorough.nodeid}
    for case in _cases(3, of=20):
        assert in_sample([case]) == {case.nodeid}


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


def test_thorough_cases_are_not_made_beside_others() -> None:
    """A test that has no other cases keeps them, so that it can be asked for by its name."""
    thorough = [pytest.param(case, marks=pytest.mark.thorough) for case in range(3)]
    mixed: list[Any] = [*thorough, 3, pytest.param(4, marks=pytest.mark.promise("1 partition invariance"))]
    kept, alone = mixed[3:], list(thorough)
    leave_thorough_out(mixed)
    leave_thorough_out(alone)
    assert (mixed, alone) == (kept, thorough)
