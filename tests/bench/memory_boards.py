"""Part ``boards`` of ``make bench-memory``: is what the plan says what a board needs, to the end of the run?

Three models train on four boards of the testbed, each with a memory limit: loading, measuring, training, evaluation,
checkpoints and collecting. For each of them four times, with fresh agents:

============= ========================================================================== ================
free          the plan's estimate and the libraries, against what each board needed      within 10 %
limited       every board has 105 % of that: the run ends, and no board dies             exit 0, no kill
refused       every board has 80 % of it: refused before anything is measured            exit 6
found         the same, but boards are told nothing and read their own limit             exit 6
============= ========================================================================== ================

What a board *needs* is in ``tests.bench.board_memory``. Pages of the libraries are charged to whoever read them first.
So a limit is lowered by what a board has resident and is not charged with, and its agent is told (``--memory``) what it
would have found on a machine of its own: the kernel is as strict there as on a real board. In the last case nothing
runs, so the limit is the share itself, and the agent has to find it. Takes some twelve minutes.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from coordinator.cli.demo_files import demo_cache, prepare
from deploy.testbed.agents import AgentSetup
from deploy.testbed.boards import Board, Layout
from deploy.testbed.testbed import Testbed
from ringtune.errors import DeadlineError
from ringtune.job.job import load_job
from ringtune.machine.resources import LIBRARY_BYTES
from tests.bench.board_memory import BoardMemory, MemoryWatch, resident
from tests.bench.memory_models import write_images, write_llama, write_vit
from tests.support.tiny import write_rows

MAX_ERROR, ROOM, TOO_LITTLE = 0.10, 1.05, 0.80
MIB = 1 << 20
NUM_BOARDS, CORES, FREE_BYTES = 4, 0.45, 4 << 30
RUN_S, LOAD_S, POLL_S = 1500.0, 180.0, 0.2
ROOM_OF_IDLE = 16 << 20
SHORT = {"train.checkpoint_every": 8, "runtime.lease_s": 60.0, "runtime.wait_s": 900.0, "runtime.threads": 1}

Figures = dict[str, Any]


class Case(NamedTuple):
    """A job, and the rows of the boards: all of them own some, or the first one only."""

    job: Path
    train: Path
    evaluation: Path
    one_owner: bool = False


def minilm(folder: Path) -> Case:
    """The demo's job, with fewer steps; every block trains in the end."""
    workspace = prepare(folder / "demo", demo_cache())
    job = load_job(workspace.job).with_overrides(
        {**SHORT, "train.max_steps": 36, "train.local_iterations": 3, "unfreeze.every_steps": 3}
    )
    train_rows, held_out = (workspace.job.with_name(f"{name}.csv") for name in ("train", "held_out"))
    return Case(_written(folder, job.to_toml()), train_rows, held_out)


def llama(folder: Path) -> Case:
    """LoRA of a random Llama of 1.1 billion parameters, stored in bfloat16; one owner."""
    model = write_llama(folder / "model")
    text = f"""
[model]
path = "{model.resolve()}"
task = "causal-lm"
[adapter]
config = "lora"
[train]
max_steps = 8
batch_size = 4
microbatches = 2
max_length = 32
local_iterations = 2
checkpoint_every = 4
[unfreeze]
every_steps = 1
[runtime]
threads = 1
lease_s = 60
wait_s = 900
"""
    train_rows, held_out = (write_rows(folder / f"{count}.csv", count, seed=count) for count in (64, 8))
    return Case(_written(folder, text), train_rows, held_out, one_owner=True)


def vit(folder: Path) -> Case:
    """The image example's job and shapes, with random weights and images, which take as much room as real ones."""
    model = write_vit(folder / "model")
    train_rows, held_out = (write_images(folder / f"{count}.npz", count) for count in (6000, 5000))
    job = load_job(Path("docs/examples/fashion/job.toml")).with_overrides(
        {
            **SHORT,
            "model.path": str(model.resolve()),
            "train.max_steps": 36,
            "train.local_iterations": 3,
            "unfreeze.every_steps": 3,
        }
    )
    return Case(_written(folder, job.to_toml()), train_rows, held_out)


CASES: dict[str, Callable[[Path], Case]] = {"minilm": minilm, "vit": vit, "llama": llama}


def _written(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text, encoding="utf-8")
    return path


# ---- a run -------------------------------------------------------------------------------------------


@contextmanager
def boards(
    case: Case, folder: Path, sizes: Mapping[str, int] | None = None, *, are_told: bool = True
) -> Iterator[tuple[Testbed, MemoryWatch]]:
    """Boards with fresh, idle agents, which are watched.

    Args:
        case: whose rows the boards have.
        folder: for the testbed.
        sizes: bytes of each board in all; by default more than enough.
        are_told: whether agents are told what a run may use; otherwise they read their limits.
    """
    budgets = {name: max(MIB, size - LIBRARY_BYTES) for name, size in (sizes or {}).items()} if are_told else {}
    own = [case.one_owner and index == 0 for index in range(NUM_BOARDS)]
    layout = Layout(
        boards=tuple(
            Board(
                name=f"board-{index}",
                cpu_cores=CORES,
                memory_bytes=FREE_BYTES,
                up_bytes_per_s=125e6,
                down_bytes_per_s=125e6,
                data=case.train if own[index] else None,
                eval_data=case.evaluation if own[index] else None,
            )
            for index in range(NUM_BOARDS)
        ),
        name="rtmemory",
        cpu_period_s=0.02,
    )
    setup = AgentSetup(budgets=budgets)
    if not case.one_owner:
        setup = dataclasses.replace(setup, data=case.train, eval_data=case.evaluation)
    with Testbed(layout, folder=folder) as bed:
        bed.start_coordinator(lease_s=60.0)
        bed.start_agents(setup)
        _await_idle(bed)
        watch = MemoryWatch(bed)
        try:
            for name, size in (sizes or {}).items():
                found = watch.boards[name]  # an idle agent has to go on: where it fills the limit its budget refuses
                uncharged = found.uncharged if are_told else 0  # a reader takes off its libraries' files by itself
                bed.lower_memory(name, max(size, found.idle + ROOM_OF_IDLE) - uncharged)
            yield bed, watch
        finally:
            watch.close()


def _await_idle(bed: Testbed) -> None:
    """Wait until every agent has loaded its libraries: until they grow no more."""
    deadline_s, before = time.monotonic() + LOAD_S, -1
    while True:
        now = sum(resident(bed.process_id(board.name))["VmRSS"] for board in bed.layout.boards)
        if now > len(bed.layout.boards) * 300 * MIB and now == before:
            return
        if time.monotonic() > deadline_s:
            raise DeadlineError(f"the agents did not load their libraries within {LOAD_S:g} s")
        before = now
        time.sleep(10 * POLL_S)


def train(bed: Testbed, case: Case, out: Path) -> int:
    """Train; the exit code."""
    command = [sys.executable, "-P", "-m", "ringtune.cli", "train", str(case.job), "--out", str(out), "--replace"]
    return bed.run([*command, "--coordinator", "{coordinator}", "--insecure"], timeout_s=RUN_S)


def report_of(run: Path) -> Figures:
    """The report of a run; nothing of one that did not end."""
    path = run / "report.json"
    found: Figures = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def compared_boards(run: Path, found: Mapping[str, BoardMemory]) -> dict[str, Figures]:
    """What each board of a run needed, and what the plan said; nothing of a run that did not end."""
    if not report_of(run):
        return {}
    return {name: _compared(found[name], size) for name, size in predicted_bytes(run).items()}


def predicted_bytes(run: Path) -> dict[str, int]:
    """What the plan said that each node needs, with its libraries."""
    return {name: LIBRARY_BYTES + int(node["predicted_bytes"]) for name, node in report_of(run)["nodes"].items()}


def free(case: Case, folder: Path) -> Figures:
    """Train with room, and compare what each board needed with the plan."""
    with boards(case, folder / "bed") as (bed, watch):
        code = train(bed, case, folder / "run")
    if code:
        return {"exit_code": code}
    return {"exit_code": code, "boards": compared_boards(folder / "run", watch.boards)}


def _compared(found: BoardMemory, predicted: int) -> Figures:
    return {
        "predicted_bytes": predicted,
        "needed_bytes": found.needed,
        "kernel_bytes": found.kernel,
        "idle_bytes": found.idle,
        "error": predicted / found.needed - 1,
    }


def within(case: Case, folder: Path, predicted: dict[str, int], share: float, *, are_told: bool = True) -> Figures:
    """Train on boards that have a share of what the plan said."""
    sizes = {name: round(share * size) for name, size in predicted.items()}
    with boards(case, folder / "bed", sizes, are_told=are_told) as (bed, _):
        code = train(bed, case, folder / "run")
        return {"exit_code": code, "kills": sum(bed.times_out_of_memory(name) for name in predicted)}


def measure_model(name: str, folder: Path) -> Figures:
    """All runs of one model."""
    case = CASES[name](folder)
    figures: Figures = {"free": free(case, folder)}
    say(name, "free", figures["free"])
    if "boards" not in figures["free"]:
        return figures
    predicted = {board: int(found["predicted_bytes"]) for board, found in figures["free"]["boards"].items()}
    for what, share, are_told in (("limited", ROOM, True), ("refused", TOO_LITTLE, True), ("found", TOO_LITTLE, False)):
        figures[what] = within(case, folder, predicted, share, are_told=are_told)
        say(name, what, figures[what])
    return figures


def measure(folder: Path) -> Figures:
    """All models, in folders below ``folder``.

    Raises:
        MissingCapability: no testbed can be built here.
    """
    figures: Figures = {"library_bytes": LIBRARY_BYTES, "models": {}}
    for name in sorted(CASES):
        with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=folder) as own:
            figures["models"][name] = measure_model(name, Path(own).resolve())
    return figures


def missed(figures: Figures) -> list[str]:
    """What does not hold; empty if all does."""
    return [f"{name}: {miss}" for name, found in figures["models"].items() for miss in _missed_of(found)]


def _missed_of(figures: Figures) -> list[str]:
    found = [
        f"{board} is {one['error']:+.1%} off"
        for board, one in figures["free"].get("boards", {}).items()
        if abs(one["error"]) > MAX_ERROR
    ]
    wanted = {"free": (0, 0), "limited": (0, 0), "refused": (6, 0), "found": (6, 0)}
    for what, (code, kills) in wanted.items():
        one = figures.get(what, {"exit_code": None})
        if one["exit_code"] != code or one.get("kills", 0) != kills:
            found.append(f"{what}: exit code {one['exit_code']}, {one.get('kills', 0)} kills")
    return found


def say(name: str, what: str, figures: Figures) -> None:
    """Print one run's figures."""
    print(f"{name} {what}: exit code {figures['exit_code']}, {figures.get('kills', 0)} kills", flush=True)  # noqa: T201
    for board, one in figures.get("boards", {}).items():
        sizes = " ".join(f"{key.removesuffix('_bytes')} {one[key] / MIB:.0f}" for key in one if key != "error")
        print(f"  {board}: {sizes} MiB, error {one['error']:+.1%}", flush=True)  # noqa: T201
