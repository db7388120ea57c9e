"""Cost of the access list, the digests of copies, and the limits of calls: pairs of turns of one run, with and without.

The ring of ``tests.bench.audit`` (all-MiniLM-L6-v2 on four nodes that own rows, turns of 10 steps of 16 rows, copies at
the next host), encrypted. Every process has the checks replaced by functions that look at one byte of a file: 1 = the
check, 0 = nothing. The byte changes after each turn; a pair is one turn with and one without, in alternating order.
Compared are the processor seconds of all processes, which a busy machine disturbs less, and the wall time.

``python -m tests.bench.checks [--pairs 20]``. Exit code 1 if the median is over 2 %.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from edge.checkpoint import turn_snapshots
from edge.transport.access import RunAccess
from ringtune.storage.pieces import Pieces
from ringtune.transport.channels import Guard, caller_of
from ringtune.transport.open_calls import OpenCalls
from ringtune.transport.speaker import speaking_as
from tests.bench.audit import NODES, SLICES, TURN, job_of, reviews, say
from tests.support import cluster as clusters
from tests.support import quick_template
from tests.support.trust_parts import token_option, trusted, write_tokens

SWITCH = "RINGTUNE_BENCH_CHECKS"
CPU = 2  # of another process: clock_getcpuclockid(3)


def switch() -> None:
    """Replace the checks of this process."""
    byte = mmap.mmap(os.open(os.environ[SWITCH], os.O_RDWR), 1)
    known: dict[Any, Any] = {}

    def replace(owner: Any, name: str, otherwise: Any) -> None:
        check = getattr(owner, name)
        setattr(owner, name, lambda *given, **named: (check if byte[0] else otherwise)(*given, **named))

    def admit(calls: Any, call: Any, most: int) -> bool:
        call.has_spoken = True  # so that it is not looked for where it is not counted
        return False

    require = RunAccess.require

    def remembered(access: Any, asked: Any, caller: Any) -> Any:
        key = (id(access), asked.call, asked.node, asked.is_head)
        if key not in known:
            known[key] = require(access, asked, caller)
        return known[key]

    replace(turn_snapshots, "block_digests", lambda file: {})
    replace(turn_snapshots, "head_digest", lambda head: "0" * 64)
    replace(Pieces, "sha256", lambda pieces: "0" * 64)
    replace(RunAccess, "require", remembered)
    for name in ("require_member", "require_only"):
        replace(RunAccess, name, lambda *_: None)
    replace(Guard, "_permitted", lambda guard, method, context, refusal: caller_of(context))
    replace(Guard, "_check_sender", lambda *_: None)
    replace(OpenCalls, "admit", admit)


def cpu_s(cluster: clusters.Cluster) -> float:
    """Processor seconds of this process and all agents."""
    agents = (time.clock_gettime(~agent.pid << 3 | CPU) for agent in cluster.agents.values())
    return time.process_time() + sum(agents)


def measure(folder: Path, pairs: int) -> list[tuple[float, float]]:
    """Train; return the ratios of processor seconds and of wall seconds, with over without, of each pair of turns."""
    byte = mmap.mmap(os.open(folder / "switch", os.O_RDWR), 1)
    keeper = trusted(folder)
    with speaking_as(keeper.speaker):
        tokens = {name: token_option(folder, name) for name in NODES}
        cluster = clusters.Cluster(folder, owners=NODES, more=tokens, keeper=keeper)
        write_tokens(folder, NODES, ttl_s=600.0)
        reviews(cluster, folder)
        with cluster.listening():
            job = job_of(cluster, steps=(2 * pairs + 2) * TURN, max_length=32)
            follower = cluster.follow(job, plan=cluster.plan_on(job, SLICES))
            found: list[tuple[float, float]] = []
            follower.wait_for_steps(TURN)
            for pair in range(pairs):
                cost = {}
                for half in (0, 1):
                    byte[0] = is_on = (pair + half) % 2
                    began = cpu_s(cluster), time.monotonic()
                    follower.wait_for_steps((2 * pair + half + 2) * TURN)
                    cost[is_on] = cpu_s(cluster) - began[0], time.monotonic() - began[1]
                found.append((cost[1][0] / cost[0][0], cost[1][1] / cost[0][1]))
                say(f"pair {pair}: processor {cost[1][0]:.2f} s and {cost[0][0]:.2f} s, ratio {found[-1][0]:.3f}")
            assert follower.wait().is_done, follower.outcome.message
    return found


def main() -> int:
    """Read the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="of turns")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ringtune-checks-") as folder:
        os.environ[SWITCH] = str(Path(folder) / "switch")
        Path(os.environ[SWITCH]).write_bytes(b"\1")
        switch()
        vars(clusters)["COMMAND"] = (sys.executable, "-P", "-m", "tests.bench.checks", "_" * 100)
        found = measure(Path(folder), options.pairs)
    medians = [statistics.median(values) for values in zip(*found, strict=True)]
    for what, values, median in zip(("processor", "wall"), zip(*found, strict=True), medians, strict=True):
        low, _, high = statistics.quantiles(values, n=4)
        say(f"{what} seconds with / without: {median:.3f} (median of {len(values)}), quartiles {low:.3f}, {high:.3f}")
    return int(medians[0] > 1.02)


if __name__ == "__main__":
    if sys.argv[1:] == ["_" * 100]:
        switch()
        sys.exit(quick_template.main())
    sys.exit(main())
