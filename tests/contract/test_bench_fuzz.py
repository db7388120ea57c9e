"""The fuzzing bench: what it takes for a wrong answer, and that right inputs get a right one."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from ringtune.errors import IntegrityError
from tests.bench.fuzz import reader as judging
from tests.bench.fuzz.campaign import TARGETS, Campaign, changed_numbered, readers_of, summary_of
from tests.bench.fuzz.mutate import MOST_BYTES, mutated
from tests.bench.fuzz.reader import Reader, problem_of


def _refuse(data: bytes) -> None:
    raise IntegrityError("it is damaged")


def _fail(data: bytes) -> None:
    raise KeyError("x")


def _long(data: bytes) -> None:
    error = IntegrityError("x")
    error.args = ("x" * 20_000,)  # a text that nobody has cut
    raise error


@pytest.mark.parametrize(
    ("read", "wrong"), [(_refuse, ""), (len, ""), (_fail, "KeyError at"), (_long, "an error text of 20,000")]
)
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


def test_campaign_keeps_one_input_for_each_problem(tmp_path: Path) -> None:
    """And writes how many inputs each reader got."""
    bad = Reader(name="bad", seeds=(b"x",), read=_fail)
    campaign = Campaign([bad], tmp_path, "none", 1.0)
    for data in (b"first", b"second"):
        campaign.give(bad, data)
    campaign.write()
    summary = summary_of(tmp_path)
    (kept,) = summary["findings"].values()
    assert (tmp_path / kept).read_bytes() == b"first"
    assert summary["inputs_of_readers"] == {"bad": 2}


def test_campaign_ends_no_process_that_has_not_asked_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch that is left behind would end the process of the tests a minute later, without a word."""
    begun: list[object] = []
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda *_, **__: begun.append(1))
    Campaign([Reader(name="r", seeds=(b"x",), read=len)], tmp_path, "none", 1.0).give_numbered(b"xx")
    assert not begun
    watched: list[int] = []
    reader = Reader(name="r", seeds=(b"x",), read=len)
    Campaign([reader], tmp_path, "none", 1.0, lambda: watched.append(1)).give(reader, b"x")
    assert watched


@pytest.mark.parametrize("target", TARGETS)
def test_right_and_changed_inputs_get_a_right_answer(target: str) -> None:
    """Some hundred changed ones of each target: the start of a campaign."""
    readers = readers_of(target)
    rng = random.Random(target)
    for reader in readers:
        assert not [problem for seed in reader.seeds if (problem := problem_of(reader, seed))]
        for _ in range(15):
            data = mutated(reader, rng.choice(reader.seeds), rng)
            assert len(data) <= MOST_BYTES
            assert not problem_of(reader, data), data[:1000]
    assert changed_numbered(readers, b"", rng)[0] < len(readers)
