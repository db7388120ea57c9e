"""Every case of wrong input: one error line, the stated exit code, nothing left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support.bad_input import around, commands, data, folders, jobs, models, runs, techniques
from tests.support.bad_input.answers import Answer, Workshop, problems
from tests.support.bad_input.case import Case
from tests.support.cluster import TEMPLATE

MIN_CASES = 300
PARTS = 24
SUBJECTS = (jobs, techniques, data, models, commands, runs, folders, around)
CASES = [case for subject in SUBJECTS for case in subject.cases()]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    """A model, rows, a finished run, a coordinator and a node."""
    with Workshop(tmp_path_factory.mktemp("bad-input"), TEMPLATE.get()) as made:
        yield made


def test_there_are_enough_cases() -> None:
    """Jobs, rows, models, command lines and folders; each name once."""
    assert len({case.name for case in CASES}) == len(CASES) >= MIN_CASES


def test_every_case_says_what_its_answer_is_about() -> None:
    """Otherwise any error of the same exit code would do: an option that has another name, a file that is not there."""
    assert not [case.name for case in CASES if not case.says]


def test_case_that_the_parser_refuses_is_a_problem() -> None:
    """Negative control: a misspelt option gets the right exit code, and is noticed all the same."""
    line = "error: No such option: --lease-s (did you mean --lease?); see 'ringtune coordinator --help'"
    case = Case(name="lease", arguments=("coordinator", "--lease-s", "0"), code=2, says=("--lease",))
    (found,) = problems(case, Answer(code=2, output="", errors=line))
    assert found.startswith("the parser refuses it")
    assert not problems(replace(case, says=("no such option",)), Answer(code=2, output="", errors=line))


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.sampled(5)
def test_wrong_input_gets_its_answer(workshop: Workshop, part: int) -> None:
    """One line that begins with ``error:``, its words and exit code; no traceback, no file, no process."""
    found = {}
    for case in CASES[part::PARTS]:
        answer = workshop.answer(case)
        if wrong := problems(case, answer):
            found[case.name] = (wrong, answer.code, answer.errors)
    assert found == {}


def test_right_job_is_no_bad_input(workshop: Workshop) -> None:
    """What all cases are a change of is itself planned without a complaint."""
    good = Case(name="right", arguments=("plan", "job.toml", "--assume", "2"), code=0, says=())
    answer = workshop.answer(good)
    said = [line for line in answer.errors.splitlines() if not line.endswith(" ...")]  # what takes 2 s is told
    assert (answer.code, said, answer.left) == (0, [], ())
