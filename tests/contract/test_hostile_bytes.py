"""Whatever reads bytes of others answers right and changed ones with a value or an error of ours."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable

import pytest

from ringtune.errors import IntegrityError
from tests.support.cases import cases
from tests.support.fuzz import reader as judging
from tests.support.fuzz.mutate import MAX_BYTES, mutated
from tests.support.fuzz.reader import Reader, problem_of

TARGETS = ("frames", "plan", "files", "calls")


def _refuse(data: bytes) -> None:
    raise IntegrityError("it is damaged")


def _fail(data: bytes) -> None:
    raise KeyError("x")


def _long(data: bytes) -> None:
    error = IntegrityError("x")
    error.args = ("x" * 20_000,)  # a text that nobody has cut
    raise error


@cases(("read", "wrong"), [(_refuse, ""), (len, ""), (_fail, "KeyError at"), (_long, "an error text of 20,000")])
def test_answers_of_ours_are_right_and_others_wrong(read: Callable[[bytes], object], wrong: str) -> None:
    """An error of Python's, or one without an end."""
    problem = problem_of(Reader(name="r", seeds=(b"x",), read=read), b"x")
    assert wrong in problem if wrong else not problem


def test_answers_that_take_much_memory_or_time_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a little input."""
    peaks, times = iter([0, 65 << 20]), iter([0.0, 0.9, 0.0, 1.1])
    monkeypatch.setattr(judging, "_peak_bytes", lambda: next(peaks))
    monkeypatch.setattr("time.thread_time", lambda: next(times))
    good = Reader(name="r", seeds=(b"x",), read=len)
    assert problem_of(good, b"x") == "r: more than 64 MiB"
    monkeypatch.setattr(judging, "_peak_bytes", lambda: 0)
    assert problem_of(good, b"x") == "r: more than 1 s of a processor"


@cases("target", TARGETS)
def test_right_and_changed_inputs_get_a_right_answer(target: str) -> None:
    """Some hundred changed ones of each target."""
    readers: tuple[Reader, ...] = importlib.import_module(f"tests.support.fuzz.{target}_readers").readers()
    rng = random.Random(target)
    for reader in readers:
        assert not [problem for seed in reader.seeds if (problem := problem_of(reader, seed))]
        for _ in range(15):
            data = mutated(reader, rng.choice(reader.seeds), rng)
            assert len(data) <= MAX_BYTES
            assert not problem_of(reader, data), data[:1000]
