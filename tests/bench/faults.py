"""``python -m tests.bench.faults``: how soon a run fails after one of its nodes does, on real processes.

======= ==========================================================================================================
killed  SIGKILL: its links break at once
frozen  SIGSTOP: nothing is closed; its lease of 6 s ends, or its connections are found silent before
told    SIGTERM: it says so itself; seconds until its process has ended, in order
======= ==========================================================================================================

Prints JSON: for each fault the median seconds by the clock, and the longest. An idle machine is asked for.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import tempfile
import time
from pathlib import Path

from tests.support.cluster import TEMPLATE, Cluster, running

LONG = {"train__max_steps": 4000, "train__local_iterations": 50}
VICTIM = "node-2"


def fail_once(cluster: Cluster, number: signal.Signals) -> float:
    """Seconds from the signal to the end of the run, or of the process that was told to end."""
    follower = cluster.follow(cluster.job(**LONG))
    follower.wait_for_steps(5)
    began_s = time.monotonic()
    cluster.signal(VICTIM, number)
    if number is signal.SIGTERM:
        cluster.wait_exit(VICTIM)
    else:
        follower.wait()
    took_s = time.monotonic() - began_s
    follower.wait()
    if number is signal.SIGSTOP:
        cluster.signal(VICTIM, signal.SIGCONT)
    else:
        if number is signal.SIGKILL:
            cluster.wait_exit(VICTIM)
        cluster.start(VICTIM)
    cluster.wait_idle(*cluster.names)
    return took_s


def measure(repeats: int) -> dict[str, dict[str, float]]:
    """Every fault ``repeats`` times."""
    faults = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP, "told": signal.SIGTERM}
    taken: dict[str, list[float]] = {name: [] for name in faults}
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder), owners=["node-0", "node-1"], hosts=[VICTIM]) as cluster,
    ):
        for _ in range(repeats):
            for name, number in faults.items():
                taken[name].append(fail_once(cluster, number))
    TEMPLATE.close()
    return {
        name: {"seconds": round(statistics.median(found), 2), "longest_s": round(max(found), 2)}
        for name, found in taken.items()
    }


def main() -> None:
    """Read the command line, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    print(json.dumps(measure(parser.parse_args().repeats), indent=1))  # noqa: T201


if __name__ == "__main__":
    main()
