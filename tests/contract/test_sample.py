"""The sample that ``make test`` draws: the same in every process, and never less than what was asked for by name."""

from __future__ import annotations

from typing import Any

import pytest

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


def test_thorough_cases_are_not_made_beside_others() -> None:
    """A test that has no other cases keeps them, so that it can be asked for by its name."""
    thorough = [pytest.param(case, marks=pytest.mark.thorough) for case in range(3)]
    cases: list[Any] = [*thorough, 3, pytest.param(4, marks=pytest.mark.promise("1 partition invariance"))]
    kept, alone = cases[3:], list(thorough)
    leave_thorough_out(cases)
    leave_thorough_out(alone)
    assert (cases, alone) == (kept, thorough)
