"""Attack a ring of real nodes with certificates while it trains: ``python -m tests.bench.attacks``.

In each trial a process of its own does one thing to a host or to the coordinator, with four threads, from the second
step of a run to its end. The run has to end by itself with the bits of the undisturbed run, the attacker may get
no answer but those that are stated, and the target may have 64 MiB more than before. The rows go to
``build/bench/trust.json``; the exit code is 1 if one is not so.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import torch

from coordinator.drive.requests import RunRequest
from coordinator.planner.given.given_plan import GivenPlan
from coordinator.trust.authority import Authority
from coordinator.trust.folder import make_token
from coordinator.trust.keeper import Keeper
from ringtune.rpc.joining import join
from ringtune.trust.identity import write_identity
from ringtune.trust.parties import Party, node_party
from tests.bench.attacks.hostile import ATTACKS, Orders
from tests.bench.trust_figures import write_part
from tests.integration.test_ring_encrypted import encrypted
from tests.support.cluster import START_S, TEMPLATE, Cluster, Follower, Outcome
from tests.support.processes import source_environment
from tests.support.results import trained
from tests.support.tap import Tap

HOST, COORDINATOR = "node-2", ""
STEPS: Final = 120
MOST_BYTES: Final = 64 << 20
END_S: Final = 60.0
_SHUT = "UNAVAILABLE|DEADLINE_EXCEEDED"
_OFTEN = "RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED|CANCELLED"

_DAMAGED = "DATA_LOSS|INVALID_ARGUMENT|FAILED_PRECONDITION"
_FULL = "ALREADY_EXISTS: .*results are sent here"
_LATE = "DEADLINE_EXCEEDED"
"""A link that comes when the run is over waits for the next one."""

STATED: Final[dict[str, tuple[str, str]]] = {
    "plain text": (_SHUT, _SHUT),
    "no certificate": (_SHUT, _SHUT),
    "certificate of another authority": (_SHUT, _SHUT),
    "expired certificate": (_SHUT, _SHUT),
    "another node's name": ("refused: .*speaks as|" + _LATE, "PERMISSION_DENIED.*speaks as"),
    "a user's certificate": ("PERMISSION_DENIED", "PERMISSION_DENIED"),
    "a link that the plan has not": ("refused: FrameError: the plan has no link|" + _LATE, ""),
    "orders of another role": ("PERMISSION_DENIED.*may not call", "PERMISSION_DENIED.*may not call"),
    "used and made-up tokens": ("", "PERMISSION_DENIED|UNAUTHENTICATED"),
    "a report to a run of others": ("", _DAMAGED),
    "a plan of another run": ("refused: FrameError: a frame of run|" + _LATE, ""),
    "bytes that are no frames": ("refused: FrameError", ""),
    "messages above the limit": ("RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED"),
    "a compressed bomb": ("RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED"),
    "metadata of a megabyte": ("RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED"),
    "names that are paths": (_DAMAGED, _DAMAGED + "|NOT_FOUND"),
    "snapshots that there are not": (_DAMAGED, ""),
    "calls without a pause": (_OFTEN + "|" + _DAMAGED, _OFTEN + "|answered: StatusReply"),
    "190 silent streams": (_OFTEN + "|refused|answered", _OFTEN + "|" + _FULL),
    "190 silent probes": (_OFTEN + "|answered", ""),
    "50 slow bodies": (_OFTEN + "|answered|refused", _OFTEN + "|INTERNAL: Exception deserializing|" + _FULL),
    "1,200 connections": ("connections are held", "connections are held"),
    "no handshakes": (".*", ".*"),
}
"""Attack -> the answers of a host and of the coordinator, as patterns; empty = it is not tried there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One attack on one target.

    Attributes:
        attack: what was done.
        target: to whom; ``coordinator`` or a node.
        tries: how often.
        answers: what came, with counts.
        unstated: answers that are none of the stated ones.
        ended: the error with which the run ended; empty = none.
        is_equal: the trained weights have the bits of the undisturbed run.
        rss_before_bytes: of the target, before the run.
        rss_after_bytes: after it.
        rss_peak_bytes: the most that was seen meanwhile.
        run_s: of the run; that of the undisturbed one is in the summary.
    """

    attack: str
    target: str
    tries: int
    answers: dict[str, int]
    unstated: list[str]
    ended: str
    is_equal: bool
    rss_before_bytes: int
    rss_after_bytes: int
    rss_peak_bytes: int
    run_s: float

    @property
    def grown_bytes(self) -> int:
        """How much more memory the target has."""
        return self.rss_after_bytes - self.rss_before_bytes

    @property
    def is_good(self) -> bool:
        """Whether all is as it has to be."""
        return (
            self.is_equal and not self.ended and not self.unstated and self.grown_bytes <= MOST_BYTES and self.tries > 0
        )


class AttackedRing:
    """A ring that trains one job again and again.

    Args:
        cluster: of it.
        folder: for the attackers' identities.
        trust: of the coordinator.
        tap: that keeps what goes to the first node, in the coordinator's process.
    """

    def __init__(self, cluster: Cluster, folder: Path, trust: Path, tap: Tap) -> None:
        self._cluster, self._folder, self._tap = cluster, folder, tap
        self._job = cluster.job(train__max_steps=STEPS, train__local_iterations=12, recovery__copies="none")
        asked = RunRequest(job=self._job, plan_only=True, num_nodes=len(cluster.names), join_s=START_S)
        plan = Follower(cluster.coordinator.run(asked)).wait().plan
        assert plan is not None
        self._plan = GivenPlan(plan=plan)
        self._secret = _identities(cluster, folder, trust)
        first = self._follow().wait()
        assert first.is_done, first.message
        self._wanted = trained(first)
        self._wait_idle()
        before = psutil.Process().memory_info().rss
        again = self._follow().wait()
        self._wait_idle()
        assert self._is_equal(again), "an undisturbed run has other bits than another one"
        self.undisturbed = {
            "run_s": round(again.wall_s, 2),
            "coordinator_grown_bytes": psutil.Process().memory_info().rss - before,
        }

    def _follow(self) -> Follower:
        self._wait_idle()
        return Follower(self._cluster.coordinator.run(RunRequest(job=self._job, join_s=START_S, plan=self._plan)))

    def _wait_idle(self) -> None:
        """Wait until the run is over everywhere, and forget what the tap has of it."""
        self._cluster.wait_idle(*self._cluster.names)
        for flow in self._tap.flows:
            flow.sent.clear()
            flow.received.clear()

    def _is_equal(self, outcome: Outcome) -> bool:
        if not outcome.is_done:
            return False
        found = trained(outcome)
        return found.keys() == self._wanted.keys() and all(torch.equal(found[at], self._wanted[at]) for at in found)

    def trial(self, attack: str, target: str) -> Row:
        """Train while somebody attacks."""
        process = psutil.Process(self._cluster.agents[target].pid) if target else psutil.Process()
        before = process.memory_info().rss
        hostile = _hostile()
        follower = self._follow()
        follower.wait_for_steps(2)
        assert follower.outcome.plan is not None
        is_joining = attack == "used and made-up tokens"
        address = f"127.0.0.1:{self._cluster.ports[target]}" if target else self._cluster.address
        orders = Orders(
            attack=attack,
            address=self._joining if is_joining else address,
            target=target,
            identities=str(self._folder),
            run_id=follower.driver.run_id,
            digest=follower.outcome.plan.digest,
            secret=self._secret,
        )
        peak = before
        with _attacking(hostile, orders) as answers:
            while follower.is_alive:
                peak = max(peak, process.memory_info().rss)
                time.sleep(0.05)
            outcome = follower.wait()
        self._wait_idle()
        pattern = re.compile(STATED[attack][0 if target else 1], re.DOTALL)
        return Row(
            attack=attack,
            target=target or "coordinator",
            tries=sum(answers.values()),
            answers=answers,
            unstated=[answer for answer in answers if not pattern.match(answer)],
            ended=f"{outcome.error}: {outcome.message}" if outcome.error else "",
            is_equal=self._is_equal(outcome),
            rss_before_bytes=before,
            rss_after_bytes=process.memory_info().rss,
            rss_peak_bytes=peak,
            run_s=round(outcome.wall_s, 2),
        )

    @property
    def _joining(self) -> str:
        joining: Any = self._cluster._server._joining
        return str(joining.address)


def _identities(cluster: Cluster, folder: Path, trust: Path) -> str:
    """Write the attackers' certificates; return the secret of a token that was used."""
    authority, now_s = Authority.read(trust), time.time()
    token = make_token(trust, node_party("node-9"), now_s + END_S)
    join(cluster.address, token, folder / "node-9")
    user = make_token(trust, Party("submitter", "alice"), now_s + END_S)
    join(cluster.address, user, folder / "alice")
    write_identity(folder / "stranger", Authority.make(now_s).identity(node_party("node-0"), now_s))
    write_identity(folder / "expired", authority.identity(node_party("node-0"), now_s - 40 * 86400))
    return token.secret


def _hostile() -> subprocess.Popen[str]:
    """Start an attacker, who waits for orders."""
    command = [sys.executable, "-m", "tests.bench.attacks.hostile"]
    quiet = source_environment(GRPC_VERBOSITY="NONE")
    process = subprocess.Popen(  # noqa: S603
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=quiet
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@contextlib.contextmanager
def _attacking(process: subprocess.Popen[str], orders: Orders) -> Iterator[dict[str, int]]:
    """Let an attacker attack meanwhile; the answers are there afterwards."""
    answers: dict[str, int] = {}
    with process:
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(dataclasses.asdict(orders)) + "\n")
            process.stdin.flush()
            yield answers
            output, _ = process.communicate(timeout=END_S)
        finally:
            process.kill()
    answers.update(json.loads(output))


def main() -> int:
    """Read the command line, carry all out, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only the attacks with this text")
    options = parser.parse_args()
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="ringtune-attacks-") as name,
        encrypted(Path(name)) as (cluster, keeper, tap),
    ):
        ring = AttackedRing(cluster, Path(name) / "attackers", _folder_of(keeper), tap)
        for attack in ATTACKS:
            for target, stated in zip((HOST, COORDINATOR), STATED[attack], strict=True):
                if stated and options.only in attack:
                    row = ring.trial(attack, target)
                    rows.append(row)
                    line = {"good": row.is_good, "grown_mib": row.grown_bytes >> 20, **dataclasses.asdict(row)}
                    sys.stdout.write(json.dumps(line) + "\n")
                    sys.stdout.flush()
        undisturbed = ring.undisturbed
    TEMPLATE.close()
    figures = {
        "rows": [dataclasses.asdict(row) for row in rows],
        "good": sum(row.is_good for row in rows),
        "trials": len(rows),
        "largest_growth_bytes": max((row.grown_bytes for row in rows), default=0),
        "undisturbed": undisturbed,
    }
    if not options.only:
        write_part("attacks", figures)
    sys.stdout.write(json.dumps({key: value for key, value in figures.items() if key != "rows"}, indent=1) + "\n")
    return 0 if all(row.is_good for row in rows) else 1


def _folder_of(keeper: Keeper) -> Path:
    return keeper._folder


if __name__ == "__main__":
    sys.exit(main())
