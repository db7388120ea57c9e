"""``make bench-memory``: is what the plan says what a board needs, to the end of the run?

Three models train on four boards of the testbed, each with a memory limit: loading, measuring, training, evaluation,
checkpoints and collecting. For each of them four times, with fresh agents:

============= ========================================================================== ================
free          the plan's estimate and the libraries, against what each board needed      within 10 %
limited       every board has 105 % of that: the run ends, and no board dies             exit 0, no kill
refused       every board has 80 % of it: refused before anything is measured            exit 6
found         the same, but boards are told nothing and read their own limit             exit 6
============= ========================================================================== ================

*Needed* is what would have to be there if the board were a machine of its own: the highest resident memory of the
agent's process (``VmHWM``, the kernel's own peak; an agent that begins a run resets it, and the highest of all samples
counts) and the highest that the kernel kept for it (page tables, stacks, sockets). Page cache that no process has
mapped is not needed: the kernel drops it. Models and images have random content: memory depends on shapes alone.

Pages of the libraries are charged to whoever read them first. So a limit is lowered by what a board has resident and is
not charged with, and its agent is told (``--memory``) what it would have found on a machine of its own: the kernel is
as strict there as on a real board. In the last case nothing runs, so the limit is the share itself, and the agent has
to find it. Takes some twelve minutes. Writes ``build/bench/memory.json``; exits with 1 where a figure misses its bound,
with 77 where no testbed can be built.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from coordinator.cli.demo_files import demo_cache, prepare
from deploy.testbed.agents import AgentSetup
from deploy.testbed.boards import Board, Layout
from deploy.testbed.capabilities import SKIPPED_EXIT_CODE, MissingCapability
from deploy.testbed.testbed import Testbed
from docs.examples.fashion.prepare import CLASS_NAMES, OTHER_CLASSES
from docs.examples.fashion.pretrain import Recipe, config_of
from ringtune.errors import DeadlineError
from ringtune.job.job import load_job
from ringtune.machine.resources import LIBRARY_BYTES
from tests.bench.rings import Figures, conclude
from tests.support.tiny import write_rows
from tests.support.tiny_families import write_tokenizer

_POLL_S = 0.05


@dataclass(slots=True)
class BoardMemory:
    """The highest figures of one board, in bytes.

    Attributes:
        idle: resident before anything was asked of the agent.
        uncharged: resident then, but charged to whoever read the files first.
        resident: highest.
        kernel: highest.
    """

    idle: int = 0
    uncharged: int = 0
    resident: int = 0
    kernel: int = 0

    @property
    def needed(self) -> int:
        """What the board needs in all."""
        return self.resident + self.kernel


class MemoryWatch:
    """Samples all boards from its making, when all agents are idle, until it is closed.

    Args:
        bed: with agents that have joined and loaded their libraries.
    """

    def __init__(self, bed: Testbed) -> None:
        self._bed = bed
        self.boards = {board.name: _first(bed, board.name) for board in bed.layout.boards}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="watch-memory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the sampling."""
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(_POLL_S):
            for name, found in self.boards.items():
                try:
                    found.resident = max(found.resident, resident(self._bed.process_id(name))["VmHWM"])
                    found.kernel = max(found.kernel, self._bed.memory_use(name).kernel_bytes)
                except (OSError, KeyError):  # the board's agent has ended
                    continue


def resident(process_id: int) -> dict[str, int]:
    """Bytes of ``VmRSS``, ``VmHWM``, ``RssAnon`` and ``RssFile`` of a process.

    Raises:
        OSError: it has ended.
    """
    lines = (line.split() for line in Path(f"/proc/{process_id}/status").read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) << 10 for line in lines if len(line) == 3 and line[2] == "kB"}


def _first(bed: Testbed, name: str) -> BoardMemory:
    found, use = resident(bed.process_id(name)), bed.memory_use(name)
    return BoardMemory(
        idle=found["VmRSS"] + use.kernel_bytes,
        uncharged=max(0, found["RssFile"] - use.mapped_bytes),
        resident=found["VmHWM"],
        kernel=use.kernel_bytes,
    )


class LlamaShape(NamedTuple):
    """Sizes of a Llama."""

    blocks: int
    width: int
    inner: int
    words: int
    heads: int
    key_heads: int


ONE_BILLION = LlamaShape(blocks=22, width=2048, inner=5632, words=32_000, heads=32, key_heads=4)
EIGHT_BILLION = LlamaShape(blocks=32, width=4096, inner=14_336, words=128_256, heads=32, key_heads=8)


def write_vit(folder: Path) -> Path:
    """Write the model of the image example with random weights."""
    from transformers import ViTForImageClassification

    config = config_of(Recipe(), num_labels=len(OTHER_CLASSES))
    ViTForImageClassification(config).save_pretrained(folder)
    return folder


def write_images(path: Path, num_rows: int) -> Path:
    """Write random images of the example's size and classes."""
    drawn, side = np.random.default_rng(num_rows), Recipe().side
    labels = np.array(CLASS_NAMES)[np.array(OTHER_CLASSES)[np.arange(num_rows) % len(OTHER_CLASSES)]]
    np.savez(path, image=drawn.integers(0, 256, (num_rows, side, side), dtype=np.uint8), label=labels)
    return path


def _llama_tensors(shape: LlamaShape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a Llama with a decoder of its own."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.words, shape.width)}
    keys = shape.width // shape.heads * shape.key_heads
    inside = {
        **{f"self_attn.{name}_proj.weight": (shape.width, shape.width) for name in "qo"},
        **{f"self_attn.{name}_proj.weight": (keys, shape.width) for name in "kv"},
        **{f"mlp.{name}_proj.weight": (shape.inner, shape.width) for name in ("gate", "up")},
        "mlp.down_proj.weight": (shape.width, shape.inner),
        "input_layernorm.weight": (shape.width,),
        "post_attention_layernorm.weight": (shape.width,),
    }
    for block in range(shape.blocks):
        found |= {f"model.layers.{block}.{name}": size for name, size in inside.items()}
    return found | {"model.norm.weight": (shape.width,), "lm_head.weight": (shape.words, shape.width)}


def write_llama(folder: Path, shape: LlamaShape = ONE_BILLION) -> Path:
    """Write a random Llama (bfloat16) in several files, one shard in memory at a time.

    Tensors of one shape have the same numbers: to draw eight billion would take longer than to train.
    """
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    folder.mkdir(parents=True, exist_ok=True)
    LlamaConfig(
        vocab_size=shape.words,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.blocks,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=2,
        eos_token_id=3,
        pad_token_id=0,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    drawn: dict[tuple[int, ...], torch.Tensor] = {}
    files: list[dict[str, torch.Tensor]] = [{}]
    places: dict[str, str] = {}
    for name, size in _llama_tensors(shape).items():
        if sum(tensor.nbytes for tensor in files[-1].values()) > SHARD_BYTES:
            save_file(files[-1], folder / f"model-{len(files):05}.safetensors", metadata={"format": "pt"})
            files[-1].clear()
            files.append({})
        if size not in drawn:
            numbers = torch.randn(size, generator=generator, dtype=torch.float32)
            drawn[size] = (1 + 0.1 * numbers if len(size) == 1 else numbers * 0.02).to(torch.bfloat16)
        files[-1][name] = drawn[size].clone()  # a file holds no tensor twice
        places[name] = f"model-{len(files):05}.safetensors"
    save_file(files[-1], folder / f"model-{len(files):05}.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    write_tokenizer(folder, padding_side="right", with_types=False)
    return folder


OUT = Path("build/bench/memory.json")
SHARD_BYTES = 400 << 20
MAX_ERROR, ROOM, TOO_LITTLE = 0.10, 1.05, 0.80
MIB = 1 << 20
NUM_BOARDS, CORES, FREE_BYTES = 4, 0.45, 4 << 30
RUN_S, LOAD_S, POLL_S = 1500.0, 180.0, 0.2
ROOM_OF_IDLE = 16 << 20
SHORT = {"train.checkpoint_every": 8, "runtime.lease_s": 60.0, "runtime.wait_s": 900.0, "runtime.threads": 1}


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


def llama(folder: Path, shape: LlamaShape = ONE_BILLION) -> Case:
    """LoRA of a random Llama, stored in bfloat16; one owner."""
    model = write_llama(folder / "model", shape)
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
    train_rows, held_out = (write_rows(folder / f"{count}.csv", count, seed=count, longest=60) for count in (64, 8))
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
    case: Case, folder: Path, sizes: Mapping[str, int] | None = None, *, are_told: bool = True, count: int = NUM_BOARDS
) -> Iterator[tuple[Testbed, MemoryWatch]]:
    """Boards with fresh, idle agents, which are watched.

    Args:
        case: whose rows the boards have.
        folder: for the testbed.
        sizes: bytes of each board in all; by default more than enough.
        are_told: whether agents are told what a run may use; otherwise they read their limits.
        count: number of boards.
    """
    budgets = {name: max(MIB, size - LIBRARY_BYTES) for name, size in (sizes or {}).items()} if are_told else {}
    own = [case.one_owner and index == 0 for index in range(count)]
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
            for index in range(count)
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


def main() -> int:
    """Measure, write the figures, and say what was missed."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    OUT.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="memory-", dir=OUT.parent) as folder:
            figures = measure(Path(folder).resolve())
    except MissingCapability as missing:
        sys.stderr.write(f"skipped: this machine can't: {missing}\n")
        return SKIPPED_EXIT_CODE
    return conclude(OUT, figures, missed(figures))


if __name__ == "__main__":
    sys.exit(main())
