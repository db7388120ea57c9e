"""Whatever reads bytes of others answers right and changed ones with a value or an error of ours."""

from __future__ import annotations

import random

from tests.support.cases import cases
from tests.support.hostile_bytes import MAX_BYTES, READERS, mutated, problem_of


@cases("target", READERS)
def test_right_and_changed_inputs_get_a_right_answer(target: str) -> None:
    """Some hundred changed ones of each target."""
    rng = random.Random(target)
    for reader in READERS[target]():
        assert not [problem for seed in reader.seeds if (problem := problem_of(reader, seed))]
        for _ in range(15):
            data = mutated(reader, rng.choice(reader.seeds), rng)
            assert len(data) <= MAX_BYTES
            assert not problem_of(reader, data), data[:1000]
