"""Part ``auto`` of ``make bench-memory``: rings with so little memory that the planner has to save activations.

Three rings of four boards train with ``memory.activations = "auto"``::

    seq_bn   adapters of a text model: some blocks run again
    full     a text model's own weights, with a section [velora]: projections, or both
    vit      LoRA in an image model: blocks run again

Each trains once with room, which gives a profile. From that the least memory is sought with which a plan fits. Every
board gets a little more, libraries included, as the limit of its control group. The run has to end without a board that
runs out of memory, at least one slice has to save something, and each board's highest need has to be within 10 % of
what the plan said.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from coordinator.cli.demo_files import demo_cache, prepare
from coordinator.planner.make_plan import make_plan
from coordinator.planner.planned import Planned
from ringtune.costs.profile import Profile
from ringtune.errors import CapacityError
from ringtune.job.job import Job, load_job
from ringtune.machine.resources import LIBRARY_BYTES
from ringtune.techniques.activation_checkpointing import NONE, SlicePolicy
from tests.bench.memory_boards import MAX_ERROR, MIB, Case, boards, predicted_bytes, train
from tests.bench.memory_models import write_images, write_vit

LESS: Final = 0.97
LEAST: Final = 0.55
ROOM: Final = 1.08
"""From one try to the next; least share of what keeping everything needs, for measuring; over the least that fits."""

SHORT: Final = {
    "train.method": "all",
    "train.max_steps": 4,
    "train.local_iterations": 1,
    "train.eval_every": 0,
    "train.checkpoint_every": 0,
    "train.batch_size": 32,
    "train.microbatches": 4,
    "runtime.lease_s": 60.0,
    "runtime.wait_s": 900.0,
    "runtime.threads": 1,
}
Figures = dict[str, Any]


def seq_bn(folder: Path) -> Case:
    """The demo's model with bottlenecks, on rows as long as its longest."""
    return _text(folder, {})


def full(folder: Path) -> Case:
    """The demo's model, whose own weights train; VeLoRA is allowed."""
    return _text(folder, {"adapter.config": "full", "memory.activations": "auto", "velora.parts": 32})


def vit(folder: Path) -> Case:
    """The image example's model with LoRA."""
    model = write_vit(folder / "model")
    rows, held_out = (write_images(folder / f"{count}.npz", count) for count in (400, 40))
    job = load_job(Path("docs/examples/fashion/job.toml"))
    changes = {**SHORT, "model.path": str(model.resolve()), "adapter.config": "lora", "train.batch_size": 256}
    return _case(folder, job.with_overrides(changes), rows, held_out)


def _text(folder: Path, changes: Mapping[str, object]) -> Case:
    workspace = prepare(folder / "demo", demo_cache())
    job = load_job(workspace.job).with_overrides({**SHORT, **changes})
    vocabulary = Path(job.model.path) / "tokenizer.json"
    rows, held_out = (_long_rows(folder / f"{count}.csv", count, vocabulary) for count in (300, 20))
    return _case(folder, job, rows, held_out)


def _long_rows(path: Path, count: int, vocabulary: Path) -> Path:
    """Rows of two hundred words each, so that every micro-batch is padded to the longest length.

    The words are drawn from the whole vocabulary: an owner has only those rows of the token table that it used.
    """
    rng = random.Random(count)
    known = json.loads(vocabulary.read_text(encoding="utf-8"))["model"]["vocab"]
    words = sorted(word for word in known if word.isalpha())
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows([" ".join(rng.choices(words, k=200)), ("pos", "neg")[row % 2]] for row in range(count))
    return path


def _case(folder: Path, job: Job, rows: Path, held_out: Path) -> Case:
    path = folder / "job.toml"
    job = job.with_overrides({"data.train": "", "data.eval": "", "data.labels": []})
    path.write_text(job.to_toml(), encoding="utf-8")
    return Case(path, rows, held_out)


RINGS: Final[dict[str, Callable[[Path], Case]]] = {"seq_bn": seq_bn, "full": full, "vit": vit}


def measure(folder: Path) -> Figures:
    """All three rings.

    Raises:
        MissingCapability: no testbed can be built here.
    """
    figures: Figures = {}
    for name in RINGS:
        with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=folder) as own:
            figures[name] = measure_ring(name, Path(own).resolve())
        say(name, figures[name])
    errors = [abs(board["error"]) for ring in figures.values() for board in ring.get("boards", {}).values()]
    return {**figures, "figures": {"auto_largest_error": max(errors, default=None)}}


def measure_ring(name: str, folder: Path) -> Figures:
    """Train one ring with room, then with as little memory as needs saving."""
    case = RINGS[name](folder)
    job = load_job(case.job)
    roomy = _with_policy(case, job, NONE)
    with boards(roomy, folder / "free") as (bed, _):
        code = train(bed, roomy, folder / "roomy")
    if code:
        return {"exit_code": code, "kills": 0}
    profile = Profile.from_json(json.loads((folder / "roomy" / "profile.json").read_text(encoding="utf-8")))
    tight = _with_policy(case, job, "auto")
    budget, plan = tight_budget(load_job(tight.job), profile)
    sizes = {node.node: LIBRARY_BYTES + budget for node in profile.nodes}
    with boards(tight, folder / "bed", sizes) as (bed, watch):
        code = train(bed, tight, folder / "run")
        kills = sum(bed.times_out_of_memory(board) for board in sizes)
    figures: Figures = {
        "exit_code": code,
        "kills": kills,
        "budget_bytes": budget,
        "keeping_everything_bytes": max(everything(job, profile).memory_bytes.values()),
        "planned": {
            piece.node: SlicePolicy.of(plan.plan, piece.start, piece.stop).name for piece in plan.plan.placement.hosts
        },
    }
    if code == 0:
        report = json.loads((folder / "run" / "report.json").read_text(encoding="utf-8"))
        predicted = predicted_bytes(folder / "run")
        figures["boards"] = {
            board: {
                "policy": report["nodes"][board]["activations"]["policy"],
                "predicted_bytes": predicted[board],
                "needed_bytes": watch.boards[board].needed,
                "limit_bytes": sizes[board],
                "error": predicted[board] / watch.boards[board].needed - 1,
            }
            for board in predicted
        }
    return figures


def policies(made: Planned) -> dict[str, str]:
    """The policy of each host of a plan."""
    hosts = made.plan.placement.hosts
    return {piece.node: SlicePolicy.of(made.plan, piece.start, piece.stop).name for piece in hosts}


def _with_policy(case: Case, job: Job, activations: str) -> Case:
    path = case.job.with_name(f"{activations}.toml")
    path.write_text(job.with_overrides({"memory.activations": activations}).to_toml(), encoding="utf-8")
    return case._replace(job=path)


def everything(job: Job, profile: Profile, budget: int = 1 << 40) -> Planned:
    """The plan that keeps everything on nodes with so much memory each."""
    return planned(job.with_overrides({"memory.activations": NONE}), profile, budget)


def planned(job: Job, profile: Profile, budget: int) -> Planned:
    """The plan of a job on the nodes of a profile with so much memory each."""
    facts = {name: dataclasses.replace(node, memory_bytes=budget) for name, node in profile.by_name.items()}
    return make_plan(job, facts, links=profile.links)


def tight_budget(job: Job, profile: Profile) -> tuple[int, Planned]:
    """Seek the least memory of each node with which ``auto`` fits, and the plan with ``ROOM`` times that.

    Raises:
        CapacityError: ``auto`` does not fit with what keeping everything needs.
    """
    most = budget = max(everything(job, profile).memory_bytes.values())
    planned(job, profile, budget)
    while True:
        try:
            if budget < LEAST * most:
                raise CapacityError("a node that is measured keeps a whole block")
            planned(job, profile, round(LESS * budget))
        except CapacityError:
            budget = round(ROOM * budget)
            return budget, planned(job, profile, budget)
        budget = round(LESS * budget)


def missed(figures: Figures) -> list[str]:
    """What does not hold; empty if all does."""
    found = []
    for name in RINGS:
        ring = figures[name]
        if ring["exit_code"] or ring["kills"]:
            found.append(f"{name}: exit code {ring['exit_code']}, {ring['kills']} kills")
        each = ring.get("boards", {})
        if each and all(board["policy"] == NONE for board in each.values()):
            found.append(f"{name}: no slice saves activations")
        found += [
            f"{name}: {board} is {one['error']:+.1%} off"
            for board, one in each.items()
            if abs(one["error"]) > MAX_ERROR
        ]
    return found


def say(name: str, ring: Figures) -> None:
    """Print one ring's figures."""
    print(f"{name}: exit code {ring['exit_code']}, {ring['kills']} kills", flush=True)  # noqa: T201
    for board, one in ring.get("boards", {}).items():
        sizes = ", ".join(f"{key} {one[f'{key}_bytes'] / MIB:.0f}" for key in ("predicted", "needed", "limit"))
        print(f"  {board}: {one['policy']}, {sizes} MiB, error {one['error']:+.1%}", flush=True)  # noqa: T201
