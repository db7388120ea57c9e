"""``python -m tests.bench.machine_drift``: how steady is this machine? The same products again and again, on one core.

Nothing of RingTune runs here. What this prints bounds what any prediction of a run on this machine can be held to: the
processor time that a unit of the same work takes, in windows of two seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

OUT = Path("build/bench")
_ROWS, _WIDTH, _INNER = 512, 384, 1536
_WINDOW_S = 2.0


class Drift(NamedTuple):
    """Processor milliseconds of one unit of work, one figure for each window.

    Attributes:
        unit_ms: in the order of the windows.
    """

    unit_ms: tuple[float, ...]

    @property
    def text(self) -> str:
        """The figures in a line: lowest, median and highest, and how far the extremes are from the median."""
        low, middle, high = min(self.unit_ms), statistics.median(self.unit_ms), max(self.unit_ms)
        spread = f"{100 * (low / middle - 1):+.0f} to {100 * (high / middle - 1):+.0f} %"
        return f"{low:.1f} to {high:.1f} ms of processor time for the same work, median {middle:.1f} ({spread})"


def measure_drift(seconds: float) -> Drift:
    """Time the same work for so many seconds.

    A unit is six feed-forward networks of MiniLM's width (384 to 1536 and back) over 512 tokens in float32.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(_ROWS, _WIDTH, generator=generator)
        up, down = torch.randn(_WIDTH, _INNER, generator=generator), torch.randn(_INNER, _WIDTH, generator=generator)
        _unit(x, up, down)
        found, end = [], time.monotonic() + seconds
        while time.monotonic() < end:
            found.append(_window_ms(x, up, down))
        return Drift(tuple(found))
    finally:
        torch.set_num_threads(threads)


def _window_ms(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> float:
    end, began, count = time.monotonic() + _WINDOW_S, time.thread_time(), 0
    while time.monotonic() < end:
        _unit(x, up, down)
        count += 1
    return (time.thread_time() - began) / count * 1e3


def _unit(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
    for _ in range(6):
        torch.nn.functional.gelu(x @ up) @ down


def main() -> int:
    """Measure, print, and write ``build/bench/machine_drift.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long to look")
    drift = measure_drift(parser.parse_args().seconds)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "machine_drift.json").write_text(json.dumps(drift._asdict(), indent=1) + "\n", encoding="utf-8")
    print(drift.text)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
