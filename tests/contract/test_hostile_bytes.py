"""Whatever reads bytes of others answers right and changed ones with a value or an error of ours."""

from __future__ import annotations

import importlib
import random

from tests.support.cases import cases
from tests.support.fuzz.mutate import MAX_BYTES, mutated
from tests.support.fuzz.reader import Reader, problem_of

TARGETS = ("frames", "plan", "files", "calls")


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
