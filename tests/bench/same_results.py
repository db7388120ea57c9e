"""Whether two versions of the code give the same bits: digests of what a fixed set of jobs trains and reports.

Run ``python -m tests.bench.same_results write FOLDER`` with one version and ``compare FOLDER`` with the other, on one
machine: kernels may round otherwise on another. FOLDER keeps the digests and the profiles that the runs are planned
with, so that both get the same slices. Exit code 1 if anything differs.

The jobs are run as a user runs them (``ringtune train --local N``): 4 methods x 2 families x 3 splits, a run that was
interrupted and resumed, unfreezing by the loss, private blocks, and a bfloat16 wire.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from coordinator.run.run_text import is_step
from ringtune.job.job import parse_job
from tests.support import tiny
from tests.support.tiny_families import write_family

REPOSITORY = Path(__file__).parents[2]
RUN_S = 300.0
METHODS = ("ringada", "all", "pipeadapter", "single")
FAMILIES = ("bert", "llama")
SPLITS = {1: 1, 2: 2, 3: 2}  # nodes -> how many of them own rows
_NOT_COMPARED = frozenset({"seconds", "kind", "round"})  # the last two differ from those of version 0.1
_JOB = """
[model]
path = "{model}"
[data]
train = "train.csv"
eval = "eval.csv"
owners = {owners}
[train]
batch_size = 8
microbatches = 2
max_length = 16
local_iterations = 3
max_steps = 18
eval_every = 9
checkpoint_every = 6
learning_rate = 1e-2
[runtime]
threads = 1
"""
_UNFREEZE = {"unfreeze.every_steps": 4}


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One run.

    Attributes:
        family: of the model.
        nodes: of the ring.
        more: keys of the job besides those of all, dotted.
        stops: whether it is interrupted once and resumed.
    """

    family: str = "bert"
    nodes: int = 3
    more: Mapping[str, object] = field(default_factory=dict)
    stops: bool = False


def cases() -> dict[str, ComparedRun]:
    """Every case by its name."""
    found = {
        f"{method}-{family}-{nodes}": ComparedRun(family=family, nodes=nodes, more={"train.method": method})
        for method in METHODS
        for family in FAMILIES
        for nodes in SPLITS
    }
    auto = {"unfreeze.at": "auto", "unfreeze.patience_steps": 3, "unfreeze.min_improvement": 0.5}
    return found | {
        "resumed": ComparedRun(more={"train.dropout": 0.1}, stops=True),
        "auto": ComparedRun(more=auto),
        "auto-resumed": ComparedRun(more=auto, stops=True),
        "private": ComparedRun(more={"privacy.private_blocks": 1}),
        "bfloat16": ComparedRun(more={"wire.dtype": "bfloat16"}),
        "int8": ComparedRun(family="llama", more={"wire.dtype": "int8", "train.method": "all"}),
        "sgd-lora": ComparedRun(family="llama", more={"adapter.config": "lora", "train.optimizer": "sgd"}),
    }


def write_inputs(folder: Path) -> None:
    """Models and rows."""
    for family in FAMILIES:
        write_family(folder / family, family, num_blocks=4)
    tiny.write_rows(folder / "train.csv", 61, seed=1)
    tiny.write_rows(folder / "eval.csv", 21, seed=2)


def write_job(folder: Path, name: str, case: ComparedRun) -> Path:
    """The job of a case."""
    text = _JOB.format(model=folder / case.family, owners=SPLITS[case.nodes])
    more = dict(case.more)
    if more.get("train.method", "ringada") == "ringada" and "unfreeze.at" not in more:
        more |= _UNFREEZE
    job = parse_job(text, source=name).with_overrides(more)
    path = folder / f"{name}.toml"
    path.write_text(job.to_toml())
    return path


def command(*arguments: str) -> list[str]:
    """``ringtune`` of this checkout."""
    return [sys.executable, "-m", "ringtune.cli", *arguments]


def environment() -> dict[str, str]:
    """Whose modules are those of this checkout."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(REPOSITORY / "proto"), str(REPOSITORY)))}


def run(*arguments: str) -> None:
    """Run a command to its end.

    Raises:
        RuntimeError: it failed; with what it wrote.
    """
    done = subprocess.run(command(*arguments), env=environment(), capture_output=True, text=True, timeout=RUN_S)  # noqa: S603 - our own module
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}: {done.stderr}")


def make_profile(folder: Path, job: Path, case: ComparedRun, path: Path) -> None:
    """Times of the job on so many nodes, without links: alike nodes get even slices."""
    run("measure", str(job), "--local", str(case.nodes), "--save", str(folder / "profile.json"))
    profile = json.loads((folder / "profile.json").read_text())
    path.write_text(json.dumps({**profile, "links": []}))


def train(job: Path, case: ComparedRun, profile: Path, out: Path) -> None:
    """Train; a case that stops is interrupted in its eighth step."""
    arguments = ["train", str(job), "--local", str(case.nodes), "--out", str(out), "--profile", str(profile), "--json"]
    if case.stops:
        process = subprocess.Popen(command(*arguments), env=environment(), stdout=subprocess.PIPE, text=True)  # noqa: S603 - our own module
        assert process.stdout is not None
        steps = 0
        for line in process.stdout:
            steps += json.loads(line)["event"] == "step"
            if steps == 8:
                process.send_signal(signal.SIGINT)
                break
        process.communicate(timeout=RUN_S)
        arguments.append("--resume")
    run(*arguments)


def digest(out: Path) -> dict[str, str]:
    """What is compared: trained tensors, one digest a file, and what every step and the end reported."""
    found = {}
    for path in sorted((out / "adapter").glob("*.safetensors")):
        hashed = hashlib.sha256()
        for name, tensor in sorted(load_file(path).items()):
            hashed.update(f"{name}/{tensor.dtype}/{list(tensor.shape)}".encode())
            hashed.update(tensor.contiguous().numpy().tobytes())
        found[path.name] = hashed.hexdigest()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: value for key, value in line.items() if key not in _NOT_COMPARED} for line in lines if is_step(line)]
    found["metrics"] = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
    report = json.loads((out / "report.json").read_text())
    found["slices"] = json.dumps(_slices(json.loads((out / "plan.json").read_text())))
    found["eval"] = json.dumps({key: value for key, value in report["eval"].items() if key != "wall_s"}, sort_keys=True)
    return found


def _slices(plan: Mapping[str, Any]) -> list[list[object]]:
    part = (plan.get("placements") or plan["phases"])[0]
    return [[piece["node"], piece["start"], piece["stop"]] for piece in part["slices"]]


@contextlib.contextmanager
def _inputs() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ringtune-same-") as name:
        write_inputs(Path(name))
        yield Path(name)


def main() -> int:
    """Write or compare; a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("write", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=())
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    kept = options.folder / "digests.json"
    known: dict[str, dict[str, str]] = json.loads(kept.read_text()) if kept.exists() else {}
    different = []
    with _inputs() as folder:
        for name, case in cases().items():
            if options.only and name not in options.only:
                continue
            job = write_job(folder, name, case)
            profile = options.folder / f"{name}.profile.json"
            if options.what == "write" and not profile.exists():
                make_profile(folder, job, case, profile)
            train(job, case, profile, folder / name)
            found = digest(folder / name)
            if options.what == "write":
                known[name] = found
                kept.write_text(json.dumps(known, indent=1, sort_keys=True))
            changed = sorted(key for key in found.keys() | known[name].keys() if found.get(key) != known[name].get(key))
            different += [name] if changed else []
            sys.stdout.write(f"{name}: {'differs in ' + ', '.join(changed) if changed else 'same'}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{len(different)} different\n")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
