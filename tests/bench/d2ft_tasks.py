"""What the accuracy of operations is measured on: sentences of film reviews, and images of clothes."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coordinator.cli.demo_files import demo_cache, prepare
from ringtune.job.job import Job, Model
from ringtune.storage.durable import write_durably

FOLDER = Path("build/bench/d2ft_accuracy/data")
BATCH_SIZE = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Data, model and length of the runs of a task."""

    title: str
    kind: str
    steps: int
    tokens: int
    heads: tuple[int, ...]
    learning_rates: Mapping[tuple[str, str], tuple[float, ...]]
    files: Callable[[], tuple[Path, Path, Path]]

    def write_job(
        self,
        path: Path,
        *,
        adapter: str,
        learning_rate: float,
        seed: int,
        steps: int,
        microbatches: int,
        more: Mapping[str, object],
    ) -> Path:
        """Write the job of one run: everything trains from the first step on, on one thread."""
        model, train, evaluate = self.files()
        values: dict[str, object] = {
            "model.task": self.kind,
            "data.train": str(train.resolve()),
            "data.eval": str(evaluate.resolve()),
            "adapter.config": adapter,
            "train.method": "all",
            "train.learning_rate": learning_rate,
            "train.lr_schedule": "linear",
            "train.batch_size": BATCH_SIZE,
            "train.microbatches": microbatches,
            "train.max_length": self.tokens,
            "train.local_iterations": 4,
            "train.max_steps": steps,
            "train.checkpoint_every": 0,
            "train.seed": seed,
            "runtime.threads": 1,
        }
        job = Job(model=Model(path=str(model.resolve()))).with_overrides({**values, **more})
        write_durably(path, job.to_toml().encode())
        return path.resolve()


def sentences() -> tuple[Path, Path, Path]:
    """The demo's model; its first sentences, 600 to train on and 1,000 held out."""
    workspace = prepare(FOLDER / "demo", demo_cache())
    folder = workspace.job.parent
    for name, rows in (("train", 600), ("held_out", 1000)):
        if (FOLDER / f"{name}.csv").exists():  # another part of the bench may read it just now
            continue
        with (folder / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            lines = list(csv.reader(file))
        with (FOLDER / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows(lines[: rows + 1])
    return workspace.model, FOLDER / "train.csv", FOLDER / "held_out.csv"


def clothes() -> tuple[Path, Path, Path]:
    """The model of the example of operations; 200 images of each class to train on and 400 held out."""
    from docs.examples.fashion import prepare as fashion

    example = Path("build/examples/operations")
    made = [example / "model", example / "train.npz", example / "held_out.npz"]
    if not (made[0] / "recipe.json").exists() or not all(path.exists() for path in made[1:]):
        fashion.prepare(example)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, most in ((made[1], 200), (made[2], 400)):
        if not (FOLDER / path.name).exists():
            _fewer(path, FOLDER / path.name, most)
    return made[0], FOLDER / "train.npz", FOLDER / "held_out.npz"


def _fewer(path: Path, to: Path, most: int) -> None:
    """Keep the first images of each class."""
    with np.load(path) as arrays:
        images, labels = arrays["image"], arrays["label"]
    kept = np.sort(np.concatenate([np.flatnonzero(labels == label)[:most] for label in np.unique(labels)]))
    np.savez(to, image=images[kept], label=labels[kept])


def _both(**rates: tuple[float, ...]) -> dict[tuple[str, str], tuple[float, ...]]:
    """The rates of both kinds of adapters, by optimizer."""
    return {(optimizer, adapter): each for optimizer, each in rates.items() for adapter in ("seq_bn", "lora")}


TASKS = {
    "text": Task(
        title="Text: MiniLM, film reviews, 600 sentences, 1,000 held out",
        kind="sequence-classification",
        steps=120,
        tokens=48,
        heads=(1, 2, 3),
        learning_rates={
            ("adamw", "full"): (3e-5, 1e-4, 3e-4),
            ("momentum", "full"): (1e-3, 3e-3, 1e-2),
            **_both(adamw=(3e-4, 1e-3, 3e-3), momentum=(1e-2, 3e-2, 1e-1)),
        },
        files=sentences,
    ),
    "images": Task(
        title="Images: a small vision transformer, five classes of clothes, 1,000 images, 2,000 held out",
        kind="image-classification",
        steps=300,
        tokens=64,
        heads=(1, 2, 4),
        learning_rates={
            ("adamw", "full"): (3e-4, 1e-3, 3e-3),
            ("momentum", "full"): (1e-2, 3e-2, 1e-1),
            **_both(adamw=(1e-3, 3e-3, 1e-2), momentum=(3e-2, 1e-1, 3e-1)),
        },
        files=clothes,
    ),
}
"""By name."""
