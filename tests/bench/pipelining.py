"""The ring beside torch's own pipeline and data parallelism: the same steps, four processes with one thread each.

A model of 12 blocks of width 384 with random weights and ``seq_bn``, all adapters and the head train, 16 rows of 128
tokens in 4 micro-batches, AdamW. The ring runs first, then the other side on its job and plan, and so on in pairs.
Seconds of a step are from the end of step ``FIRST`` to the end of the last one, so that no start-up counts; a step ends
with its last process, update included. Both sides have to have the same losses.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.bench.jobs import write_job
from tests.bench.mbert import write_model, write_rows
from tests.bench.rings import RingRun, run, run_ring

NODES: Final = 4
PAIRS: Final = 4
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


@dataclass(kw_only=True, slots=True)
class Pairs:
    """What was measured of pairs.

    Attributes:
        ring_s: seconds of a step of the ring.
        other_s: of the other side.
        losses: of the first steps of either side, in the last pair.
    """

    ring_s: list[float] = field(default_factory=list)
    other_s: list[float] = field(default_factory=list)
    losses: tuple[list[float], list[float]] = ([], [])

    @property
    def ratios(self) -> list[float]:
        """The ring over the other side, pair by pair."""
        return [ring_s / other_s for ring_s, other_s in zip(self.ring_s, self.other_s, strict=True)]

    def figures(self, name: str) -> dict[str, Any]:
        """The median ratio as ``<name>_ratio``, and what it is made of."""
        samples = {f"{name}_ratio": self.ratios, f"{name}_ring_step_s": self.ring_s, f"{name}_step_s": self.other_s}
        return {
            f"{name}_ratio": statistics.median(self.ratios),
            "samples": samples | {f"{name}_losses": list(self.losses)},
        }


def measure_pairs(out: Path, kind: str, *, pairs: int = PAIRS) -> Pairs:
    """Run the ring and a kind of ``tests.bench.torch_steps`` in turns.

    Args:
        out: folder for model, rows, job and run.
        kind: ``pipelining`` or ``ddp``.
        pairs: how often.

    Raises:
        RuntimeError: the losses differ, so that the two did not do the same.
    """
    model = write_model(out / "model-12x384", **_SHAPE)
    rows = write_rows(out / "rows-12x384.csv")
    more = {"data.owners": 1}  # the very same batches, whoever hosts what
    job = write_job(out / "steps-12x384.toml", model=model, train=rows, steps=LAST, method="all", tokens=128, more=more)
    found = Pairs()
    for _ in range(pairs):
        ring = run_ring(job, out / "beside-torch", nodes=NODES)
        command = [sys.executable, "-m", "tests.bench.torch_steps", str(ring.folder), "--as", kind]
        other = json.loads(run(command).splitlines()[-1])
        found.losses = losses_of(ring)[:SAME_LOSSES], other["losses"][:SAME_LOSSES]
        require_same(*found.losses, kind)
        found.ring_s.append(ring.wall_s(FIRST, LAST) / (LAST - FIRST))
        found.other_s.append((other["ends_s"][LAST - 1] - other["ends_s"][FIRST - 1]) / (LAST - FIRST))
    return found


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
