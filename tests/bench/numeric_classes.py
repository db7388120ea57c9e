"""Distances between results of numeric classes: of what an audit repeats, imitated on one machine.

A short audited run in one process, with one thread and this machine's vector instructions, hands in each of its cells
as to a checker; further processes repeat them as another class would: with other vector instructions, without oneDNN,
or with two threads. Printed is the largest relative distance of each kind of result, as ``edge.runtime.audit`` computes
it, and what ``ringtune.techniques.audit.tolerance`` permits.

``python -m tests.bench.numeric_classes``: the tests' smallest BERT, and all-MiniLM-L6-v2 of the demo's cache if it is
there. ``--record`` and ``--repeat`` are for the processes that it starts.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import turn_sequence
from ringtune.storage.pieces import Pieces
from ringtune.techniques.audit import Compared, checkers_of
from tests.edge.runtime.test_audit import AuditedCarrier, honest
from tests.features.memory import NATIVELY
from tests.suites.test_recovery_on_virtual_clock import ring_of
from tests.support import torch_ring
from tests.support.plans import changed
from tests.support.torch_ring import Case

MINI: Final = Path("~/.cache/ringtune/demo/all-MiniLM-L6-v2").expanduser()
CLASSES: Final[Mapping[str, dict[str, str]]] = {
    "the same again": {},
    "two threads": {"OMP_NUM_THREADS": "2"},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "SSE": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    "without oneDNN": {"RINGTUNE_BENCH_ONEDNN": "0"},
}
ROUNDED: Final = {"dtype": "float32", "compute": "bfloat16"}
RUNS: Final[tuple[dict[str, Any], ...]] = (
    {"dtype": "float64"},
    {"dtype": "float32"},
    {"dtype": "float32", "wire": "bfloat16"},
    {"dtype": "float32", "wire": "int8"},
    {"dtype": "float32", "adapter": "lora"},
    {"dtype": "float32", "adapter": "full"},
    {"dtype": "float32", "optimizer": "sgd"},
    {"dtype": "float32", "frozen": NATIVELY},
    *({**ROUNDED, "adapter": adapter} for adapter in ("seq_bn", "lora", "full")),
    {**ROUNDED, "wire": "bfloat16"},
    {**ROUNDED, "frozen": NATIVELY},
)


class Handing(AuditedCarrier):
    """Notes each cell with what is handed in for it, and repeats none."""

    noted: list[Any]

    def repeat(self, asked: Any, checker: str) -> Any:
        """Noted; what comes out is what was told."""
        file = bytes(self.audits[asked.cell.node].recorder.work_file(asked.place))
        exchanges = self.audits[checker].recorder.exchanges(asked.cell, asked.place.turn)
        files = [(one, bytes(self.audits[one.peer].recorder.tensor_file(one.key, one.peer))) for one in exchanges]
        self.noted.append((asked, checker, file, files))
        return {name: Compared(told) for name, told in asked.told.items()}


def setting(folder: Path, model: str, values: Mapping[str, Any]) -> tuple[Case, Plan]:
    """A run of two owners, on three hosts."""
    if not (folder / "train.csv").exists():
        torch_ring.write_inputs(folder, num_rows=61)
        if model == "MiniLM":
            (folder / "model").rename(folder / "tiny")
            (folder / "model").symlink_to(MINI)
    blocks = 6 if model == "MiniLM" else 4
    case = Case(
        folder=folder,
        owners=("a", "o"),
        method="all",
        microbatches=2,
        num_steps=4,
        local_iterations=2,
        num_blocks=blocks,
        **values,
    )
    plan = case.plan((("a", 0, 1), ("b", 1, 3), ("c", 3, blocks)))
    return case, changed(plan, hidden_size=384) if model == "MiniLM" else plan


def record(folder: Path, model: str, values: Mapping[str, Any]) -> None:
    """Run, and write what is handed in."""
    case, plan = setting(folder, model, values)
    carrier = Handing(case, plan, honest)
    carrier.noted = []
    ring_of(plan, random.Random(1), carrier=carrier).run()
    (folder / "cells").write_bytes(pickle.dumps(carrier.noted))


def repeat(folder: Path, model: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Repeat all cells; return the largest distance of each kind of result."""
    torch.backends.mkldnn.enabled = os.environ.get("RINGTUNE_BENCH_ONEDNN") != "0"  # type: ignore[assignment]
    case, plan = setting(folder, model, values)
    audits = AuditedCarrier(case, plan, honest).audits
    turns = {turn.index: turn for turn in turn_sequence(plan.course)}
    far = defaultdict[str, float](float)
    for asked, checker, file, files in pickle.loads((folder / "cells").read_bytes()):  # noqa: S301 - own file
        audit, cell, place = audits[checker], asked.cell, asked.place
        assert checker in checkers_of(plan.placement, cell.node)
        work = audit.read_work(Pieces.of(file), place, asked.given)
        tensors = {
            one.key: audit.read_tensor(Pieces.of(content), one.key, asked.given, is_own=one.peer == cell.node)
            for one, content in files
        }
        repeated = audit.repeater(cell.node).repeat(turns[place.turn], place, work, tensors, asked.given)
        for key in repeated.differing:
            repeated.compare(key, tensors[key])
        for name, found in repeated.results.items():
            if found.found != asked.told.get(name):
                kind = name.split()[0]
                far[kind] = max(far[kind], found.distance)
    return far


def main() -> int:
    """Read the command line; print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", nargs=2)
    parser.add_argument("--repeat", nargs=2)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if options.record or options.repeat:
        place, model = options.record or options.repeat
        work = record if options.record else repeat
        done = [work(Path(place) / str(at), model, values) for at, values in enumerate(RUNS)]
        sys.stdout.write(json.dumps(done) + "\n")
        return 0
    for model in ("MiniLM", "tiny") if MINI.exists() else ("tiny",):
        with tempfile.TemporaryDirectory(prefix="ringtune-classes-") as folder:
            call("--record", folder, model, {})
            for name, changes in CLASSES.items():
                for values, far in zip(RUNS, call("--repeat", folder, model, changes), strict=True):
                    found = ", ".join(f"{kind} {far.get(kind, 0.0):.1e}" for kind in ("h", "g", "sum", "state"))
                    sys.stdout.write(f"{model} {' '.join(map(str, values.values()))}, {name}: {found}\n")
                    sys.stdout.flush()
    return 0


def call(what: str, folder: str, model: str, changes: Mapping[str, str]) -> list[dict[str, float]]:
    """Run this program in a process of another numeric class; return what it prints last."""
    words = [sys.executable, "-m", "tests.bench.numeric_classes", what, folder, model]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **changes}
    run = subprocess.run(words, env=environment, check=True, capture_output=True, text=True, timeout=1200)  # noqa: S603
    found: list[dict[str, float]] = json.loads(run.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    sys.exit(main())
