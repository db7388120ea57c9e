"""The ring beside torch's own pipeline and data parallelism: the same steps, four processes with one thread each.

A model of 12 blocks of width 384 with random weights and ``seq_bn``, all adapters and the head train, 16 rows of 128
tokens in 4 micro-batches, AdamW. The ring runs first, then the other side on its job and plan, and so on in pairs.
Seconds of a step are from the end of step ``FIRST`` to the end of the last one, so that no start-up counts; a step ends
with its last process, update included. Both sides have to have the same losses.

Other work on the machine slows whoever happens to run then. So a pair beside which others had more than ``QUIET_SHARE``
of the processors is measured again, ``MAX_PAIRS`` at most; if that does not help, the quietest pairs count.
"""

from __future__ import annotations

import json
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from tests.bench.rings import RingRun, run, run_ring, write_job, write_model, write_rows

NODES: Final = 4
PAIRS: Final = 4
MAX_PAIRS: Final = 8
QUIET_SHARE: Final = 0.05
FIRST, LAST = 3, 15
SAME_LOSSES: Final = 5
"""Steps whose losses are compared; later ones may differ by what rounding became."""

LOSS_TOLERANCE: Final = 1e-4
_SHAPE: Final = {
    "vocabulary": 30_522,
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A run of either side, next to each other.

    Attributes:
        ring_s: seconds of a step of the ring.
        other_s: of the other side.
        others_share: of the processors that went to other work meanwhile.
    """

    ring_s: float
    other_s: float
    others_share: float

    @property
    def ratio(self) -> float:
        """The ring over the other side."""
        return self.ring_s / self.other_s


def measure_pairs(out: Path, kind: str, *, pairs: int = PAIRS, most: int = MAX_PAIRS) -> list[Pair]:
    """Run the ring and a kind of ``tests.bench.torch_steps`` in turns.

    Args:
        out: folder for model, rows, job and run.
        kind: ``pipelining`` or ``ddp``.
        pairs: that are wanted.
        most: that are measured.

    Returns:
        The quiet ones, or the quietest.

    Raises:
        RuntimeError: the losses differ, so that the two did not do the same.
    """
    model = write_model(out / "model-12x384", **_SHAPE)
    rows = write_rows(out / "rows-12x384.csv")
    more = {"data.owners": 1}  # the very same batches, whoever hosts what
    job = write_job(out / "steps-12x384.toml", model=model, train=rows, steps=LAST, method="all", tokens=128, more=more)
    found: list[Pair] = []
    while len(found) < most and sum(pair.others_share <= QUIET_SHARE for pair in found) < pairs:
        found.append(measure_pair(out, job, kind))
    return quietest(found, pairs)


def measure_pair(out: Path, job: Path, kind: str) -> Pair:
    """Run the ring, then the other side on its job and plan; see ``measure_pairs``."""
    command = [sys.executable, "-m", "tests.bench.torch_steps", str(out / "beside-torch"), "--as", kind]
    with others_share() as shares:
        ring = run_ring(job, out / "beside-torch", nodes=NODES)
        other = json.loads(run(command).splitlines()[-1])
    require_same(losses_of(ring)[:SAME_LOSSES], other["losses"][:SAME_LOSSES], kind)
    other_s = other["ends_s"][LAST - 1] - other["ends_s"][FIRST - 1]
    steps = LAST - FIRST
    return Pair(ring_s=ring.wall_s(FIRST, LAST) / steps, other_s=other_s / steps, others_share=shares[0])


def quietest(found: list[Pair], pairs: int) -> list[Pair]:
    """The pairs with the least other work beside them, in the order of measurement."""
    kept = sorted(range(len(found)), key=lambda index: found[index].others_share)[:pairs]
    return [found[index] for index in sorted(kept)]


def figures_of(name: str, found: list[Pair]) -> dict[str, Any]:
    """The median ratio as ``<name>_ratio``, and the pairs that it is of."""
    return {
        f"{name}_ratio": statistics.median(pair.ratio for pair in found),
        "samples": {name: [{**asdict(pair), "ratio": pair.ratio} for pair in found]},
    }


@contextmanager
def others_share() -> Iterator[list[float]]:
    """Measure which share of all processors others had while the context was open; it is in the list at the end.

    What this process and its children took, which have to have ended by then, is not counted; 0 where the system does
    not tell.
    """
    shares: list[float] = []
    began_s, busy_s, own_s = time.monotonic(), _busy_s(), _own_s()
    yield shares
    all_s = (time.monotonic() - began_s) * (os.cpu_count() or 1)
    shares.append(max(0.0, (_busy_s() - busy_s) - (_own_s() - own_s)) / all_s)


def _busy_s() -> float:
    """Processor seconds of the whole machine but idle ones.

    Source: Linux, proc(5), ``/proc/stat``: user, nice, system, idle, iowait, irq, softirq, steal.
    """
    try:
        ticks = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return 0.0
    return (sum(ticks) - sum(ticks[3:5])) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    each = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in each)


def losses_of(ring: RingRun) -> list[float]:
    """The loss of each train step."""
    lines = (ring.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [float(line["loss"]) for line in map(json.loads, lines) if line["kind"] == "train"]


def require_same(ring: list[float], other: list[float], kind: str) -> None:
    """Refuse to compare the seconds of steps that were not the same.

    Raises:
        RuntimeError: a loss differs by more than ``LOSS_TOLERANCE`` of itself.
    """
    pairs = zip(ring, other, strict=True)
    if not all(math.isclose(mine, theirs, rel_tol=LOSS_TOLERANCE) for mine, theirs in pairs):
        raise RuntimeError(f"the ring and torch's {kind} did not do the same steps: losses {ring} and {other}")
