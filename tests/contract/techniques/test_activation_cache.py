"""When a batch comes again, by the order of turns and batches of the whole run."""

from __future__ import annotations

import random

from ringtune.schedule.turns import items, turn_sequence
from ringtune.techniques.activation_cache import is_cacheable, key_of, later_visits
from tests.support.plans import changed, random_plan


def test_later_visits_are_those_of_the_whole_run() -> None:
    """For any owners, rows and lengths of turns, against the run as it goes; turns equal and by rows."""
    for seed in range(30):
        rng = random.Random(seed)
        plan = changed(random_plan(rng), num_steps=rng.randint(1, 60))
        course = plan.course
        passes = [item for turn in turn_sequence(course) for item in items(course, turn) if is_cacheable(turn.kind)]
        for at, item in enumerate(passes):
            same = [later.step for later in passes[at + 1 :] if key_of(course, later) == key_of(course, item)]
            assert list(later_visits(course, item)) == same, (seed, item)
