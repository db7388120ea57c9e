"""All cases of wrong input."""

from __future__ import annotations

from tests.support.bad_input import (
    around,
    commands,
    data,
    folders,
    jobs,
    models,
    runs,
    techniques,
)
from tests.support.bad_input.case import Case


def all_cases() -> list[Case]:
    """Every case, in the order of its subject; names are unique."""
    subjects = (jobs, techniques, data, models, commands, runs, folders, around)
    found = [case for subject in subjects for case in subject.cases()]
    names = [case.name for case in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"cases with one name: {twice}")
    return found
