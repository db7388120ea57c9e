"""Kill -9 each process of a local run of three nodes at random moments; every ``--resume`` has to give its result.

Run ``python -m tests.bench.kill [--moments 20] [--seed 0]``; exit code 1 if a resumed run gave anything else.
"""

from __future__ import annotations

import random
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from operator import methodcaller
from pathlib import Path

from ringtune.errors import UsageError
from tests.bench.trust import Case, carry_out_part, read_options
from tests.support.killing import LAUNCHER, NODES, STEPS, LocalRun, steps_of_metrics, write_inputs
from tests.support.results import largest_difference, trained_in
from tests.support.trials import Trial, differences

VICTIMS = (LAUNCHER, *NODES)
LATE_S = 0.1
"""The longest time between a step and the kill after it."""


class LocalRuns:
    """A job with an undisturbed run behind it, which says how long a run starts and how many steps are seen."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._job = folder, write_inputs(folder)
        began_s = time.monotonic()
        whole = LocalRun(self._job, folder / "whole")
        whole.until_steps(1)
        self._start_s = time.monotonic() - began_s
        assert whole.wait() == 0, whole.errors()
        self._wanted = trained_in(folder / "whole")
        self._num_steps = sum(event["event"] == "step" for event in whole.events)

    def trial(self, victim: str, share: float, late_s: float) -> Trial:
        """Kill a process of a run and resume the run.

        Args:
            victim: the process; the launcher where the node is not there yet.
            share: of the steps that are seen before; 0 = it is killed while it starts.
            late_s: how long after these steps; of a start, the share of it.
        """
        steps = 1 + int(share * (self._num_steps - 1)) if share else 0
        after_s = late_s if share else late_s * self._start_s
        while True:
            began_s, out = time.monotonic(), self._folder / "out"
            shutil.rmtree(out, ignore_errors=True)
            run = LocalRun(self._job, out)
            run.until_steps(steps)
            time.sleep(after_s)
            run.kill(victim)
            if run.wait() != 0:
                break
            after_s, steps = after_s / 2, steps * 3 // 4  # the run was quicker: not a kill
        was_finished = (out / "report.json").is_file()  # killed before its exit: its resume has to be refused
        again = LocalRun(self._job, out, "--resume")  # at once: agents of a killed launcher may still be about to end
        code, wanted_code = again.wait(), UsageError.exit_code if was_finished else 0
        if code != wanted_code:
            problems, difference = [f"its resume ended with {code}, not {wanted_code}: {again.errors()}"], float("inf")
        else:
            difference = largest_difference(trained_in(out), self._wanted)
            problems = differences(difference, steps_of_metrics(out), list(range(1, STEPS + 1)))
        from_checkpoint = any(note.startswith("resuming after step ") for note in again.notes())
        return Trial(
            problems=tuple(problems),
            wall_s=time.monotonic() - began_s,
            figures={"difference": difference, "from_a_checkpoint": from_checkpoint, "was_finished": was_finished},
        )


def at_random(count: int, seed: int) -> Iterator[Case]:
    """Victims in turn; a fifth of the moments while the run starts, the others between its first and last step."""
    rng = random.Random(seed)
    for index in range(count):
        victim = VICTIMS[index % len(VICTIMS)]
        if index % (len(VICTIMS) + 1) == len(VICTIMS):
            moment, when = (0.0, rng.random()), "while it starts"
        else:
            moment = (rng.uniform(0.01, 1.0), rng.uniform(0.0, LATE_S))
            when = f"after {moment[0]:.0%} of its steps"
        yield Case("random", f"{index}: {victim}, {when}", methodcaller("trial", victim, *moment))


@contextmanager
def local_runs(folder: Path, _: str) -> Iterator[LocalRuns]:
    """They need nothing that has to be ended."""
    yield LocalRuns(folder)


def main() -> int:
    """Read the command line, carry the trials out."""
    options = read_options(__doc__, moments=(20, "how many kills"), seed=(0, "of the random moments"))
    return carry_out_part("kills", at_random(options.moments, options.seed), local_runs, options)


if __name__ == "__main__":
    sys.exit(main())
