"""What runs of a benchmark are made of: a job, a model and rows for timings, and the ring itself, as a user runs it.

The model of ``write_model`` has mBERT's shape and random weights, and its rows one length; what it says means nothing.
12 blocks of width 768, feed-forward 3072, 12 heads, 119,547 words: 178 million parameters, 0.7 GB on the disk.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ringtune.job.job import METHOD_SECTIONS, Job, Model
from ringtune.schedule.methods import method_class
from ringtune.storage.durable import write_durably

Figures = dict[str, Any]

LEARNING_RATE = 1e-3
BATCH_SIZE = 16


def write_job(
    path: Path,
    *,
    model: Path,
    train: Path,
    steps: int,
    method: str = "ringada",
    microbatches: int = 4,
    tokens: int = 64,
    more: Mapping[str, object] | None = None,
) -> Path:
    """Write a job with one compute thread a node, no checkpoints and no copies.

    Args:
        path: of the file.
        model: folder.
        train: rows.
        steps: how many.
        method: ``train.method``.
        microbatches: of each batch.
        tokens: of the longest row.
        more: further keys with a dot, e.g. ``{"train.seed": 1}``; settings of another method are left out, so that
            methods can be compared.

    Returns:
        The whole path of the file.

    Raises:
        JobError: a key is unknown, or its value can't be.
    """
    values: dict[str, object] = {
        "data.train": str(train.resolve()),
        "train.method": method,
        "train.learning_rate": LEARNING_RATE,
        "train.batch_size": BATCH_SIZE,
        "train.microbatches": microbatches,
        "train.max_length": tokens,
        "train.max_steps": steps,
        "train.checkpoint_every": 0,
        "runtime.threads": 1,
        "recovery.copies": "none",
    }
    foreign = METHOD_SECTIONS.keys() - {method_class(method).section}
    values |= {key: value for key, value in (more or {}).items() if key.partition(".")[0] not in foreign}
    job = Job(model=Model(path=str(model.resolve()))).with_overrides(values)
    write_durably(path, job.to_toml().encode())
    return path.resolve()


TOKENS = 128
ROWS = 640
_VOCABULARY = 119_547
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_WORDS = 4000


def write_model(folder: Path, *, vocabulary: int = _VOCABULARY) -> Path:
    """Write config, random weights and a tokenizer of so many words, unless they are there."""
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    from safetensors.torch import save_file
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    config = BertConfig(vocab_size=vocabulary, architectures=["BertModel"])
    torch.manual_seed(0)
    model = BertModel(config)
    words = [*_SPECIAL, *(f"w{index}" for index in range(vocabulary - len(_SPECIAL)))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    BertTokenizerFast.from_pretrained(str(folder), model_max_length=512).save_pretrained(folder)
    config.save_pretrained(folder)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_rows(path: Path, *, rows: int = ROWS, tokens: int = TOKENS) -> Path:
    """Write labelled rows that are all longer than ``tokens``: every batch has the full length."""
    lines = ["text,label"]
    for row in range(rows):
        words = " ".join(f"w{(row * 31 + place * 7) % _WORDS}" for place in range(tokens))
        lines.append(f"{words},{'good' if row % 2 else 'bad'}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


RUN_DEADLINE_S = 1800.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RingRun:
    """One finished run, in its folder."""

    folder: Path

    @property
    def accuracy(self) -> float:
        """On the held-out sentences."""
        return float(self.report["eval"]["accuracy"])

    @property
    def cpu_s(self) -> float:
        """Processor seconds of all nodes together, every thread of them, since the run was prepared there."""
        return sum(float(totals["cpu_s"]) for totals in self.report["nodes"].values())

    def wall_s(self, first_step: int, last_step: int) -> float:
        """Seconds of the steps ``[first_step, last_step)``: from the end of the step before to the end of the last.

        A step ends with the last action that any node did for it, backward and updates included.
        """
        ends_s = self._step_ends_s()
        return ends_s[last_step - 1] - ends_s[first_step - 1]

    @property
    def report(self) -> dict[str, Any]:
        """What the run amounts to."""
        return dict(json.loads((self.folder / "report.json").read_text(encoding="utf-8")))

    def _step_ends_s(self) -> dict[int, float]:
        trace = json.loads((self.folder / "trace.json").read_text(encoding="utf-8"))
        ends_s: dict[int, float] = {}
        for event in trace["traceEvents"]:
            if event["ph"] == "X" and "item" in event["args"]:
                item = int(event["args"]["item"])
                ends_s[item] = max(ends_s.get(item, 0.0), (event["ts"] + event["dur"]) / 1e6)
        return ends_s


def run_ring(job: Path, out: Path, *, nodes: int) -> RingRun:
    """Run ``ringtune train JOB --local N``.

    Raises:
        RuntimeError: the run failed; has the end of its output.
    """
    command = [sys.executable, "-m", "ringtune.cli", "train", str(job), "--local", str(nodes), "--out", str(out)]
    text = run([*command, "--replace"])
    if not (out / "report.json").exists():
        raise RuntimeError(f"the run wrote no report:\n{text[-2000:]}")
    return RingRun(folder=out)


def run_plain(run_folder: Path, *, first_step: int = 0, method: str = "", seed: int | None = None) -> dict[str, Any]:
    """Run ``tests.bench.plain`` on the job and plan of a run, in a process of its own."""
    command = [sys.executable, "-m", "tests.bench.plain", str(run_folder), "--first-step", str(first_step)]
    command += ["--method", method] if method else []
    command += ["--seed", str(seed)] if seed is not None else []
    return dict(json.loads(run(command).splitlines()[-1]))


def run(command: list[str]) -> str:
    """Run a command to its end, in a session of its own: the scheduler shares the cores out by session.

    Returns:
        Its standard output.

    Raises:
        RuntimeError: it failed; has the end of what it said.
    """
    done = subprocess.run(  # noqa: S603
        command,
        capture_output=True,
        text=True,
        timeout=RUN_DEADLINE_S,
        check=False,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command[1:4])} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}"
        )
    return done.stdout


def missed(figures: Figures, targets: Mapping[str, tuple[str, float]]) -> list[str]:
    """The targets (``<=`` or ``>=``, and a bound) that figures do not reach, in words.

    A text in the place of a figure, which says why it was not measured, reaches none; a figure that was not asked for
    is left out.
    """
    lines = []
    for name, (sign, bound) in targets.items():
        value = figures.get(name, bound)
        if not isinstance(value, int | float):
            lines.append(f"{name} is {value}, the target is {sign} {bound:g}")
        elif not (value <= bound if sign == "<=" else value >= bound):
            lines.append(f"{name} is {value:.4f}, the target is {sign} {bound:g}")
    return lines


def machine() -> Figures:
    """What figures were measured on."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "load_1_min": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "adapters", "grpcio", "protobuf")},
    }


def say(text: str) -> None:
    """Print a line of progress at once, beside the figures."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def conclude(path: Path, figures: Mapping[str, Any], misses: Sequence[str] = ()) -> int:
    """Write and print figures with the targets that they missed; return the exit code of the bench."""
    text = json.dumps({**figures, "missed": [*misses]}, indent=1)
    write_durably(path, f"{text}\n".encode())
    print(text)  # noqa: T201
    for line in misses:
        say(f"MISSED {line}")
    return 1 if misses else 0
