"""Kill -9 each process of a local run of three nodes at random moments; every ``--resume`` has to give its result.

Run ``python -m tests.bench.kill [--moments 20] [--seed 0]``; exit code 1 if a resumed run gave anything else.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.trust import say
from tests.support.killing import LocalRun, kill_and_resume, random_moments, trained, write_inputs


def main() -> int:
    """Run all trials, print a JSON line for each and one for all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ringtune-kill-") as name:
        folder = Path(name)
        job = write_inputs(folder)
        started_s = time.monotonic()
        whole = LocalRun(job, folder / "whole")
        whole.until_steps(1)
        start_s = time.monotonic() - started_s
        if whole.wait() != 0:
            sys.stderr.write(whole.errors())
            return 1
        wall_s = time.monotonic() - started_s
        wanted = trained(folder / "whole")
        trials = []
        num_items = sum(event["event"] == "step" for event in whole.events)
        moments = random_moments(options.moments, start_s=start_s, num_items=num_items, seed=options.seed)
        for index, moment in enumerate(moments):
            trial = kill_and_resume(job, folder / f"run-{index}", wanted, moment)
            while trial.code == 0:  # the run was quicker than the moment: not a kill
                moment = moment._replace(after_s=moment.after_s / 2, steps=moment.steps * 3 // 4)
                shutil.rmtree(folder / f"run-{index}")
                trial = kill_and_resume(job, folder / f"run-{index}", wanted, moment)
            trials.append(trial)
            say(json.dumps(dataclasses.asdict(trial)))
    good = sum(trial.is_good for trial in trials)
    summary = {
        "moments": len(trials),
        "good": good,
        "largest_difference": max(trial.difference for trial in trials),
        "from_a_checkpoint": sum(trial.resumed_at >= 0 for trial in trials),
        "uninterrupted_s": round(wall_s, 1),
    }
    say(json.dumps(summary))
    return 0 if good == len(trials) else 1


if __name__ == "__main__":
    sys.exit(main())
