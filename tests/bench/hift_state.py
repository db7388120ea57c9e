"""``python -m tests.bench.memory --only hift``: what HiFT holds and how long it takes, with state on the disk.

A random model of BERT-base's shape (12 blocks of width 768, 30,522 words) trains on one node in batches of 8 rows of
128 tokens, one unit a step, with AdamW without multi-tensor buffers. Every run is a process of its own with the agent's
allocator and threads; it trains two sweeps.

====================== =======================================================================================  ======
hift_state_over_group  most bytes of gradients + state + state that is read ahead, over the largest group's
                       gradients + state and the next group's state                                              1.05
hift_rss_over_full     highest resident memory above the idle process with its libraries, state on the disk,
                       over that of full training (one group of all units)                                       0.50
hift_step_time_ratio   mean step of the second sweep, state on the disk over state in memory                     1.10
====================== =======================================================================================  ======

The two timed kinds take turns. Figures come with the lowest and the highest of the repeats.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from tests.bench.rings import write_model, write_rows

TARGETS: Final = {"hift_state_over_group": 1.05, "hift_rss_over_full": 0.50, "hift_step_time_ratio": 1.10}
MIB: Final = 1 << 20
VOCABULARY, TOKENS, ROWS, BATCH = 30_522, 128, 64, 8
NUM_UNITS: Final = 14
KINDS: Final = ("disk", "memory", "full")
RUN_S: Final = 1800.0
REPEATS, SWEEPS = 3, 2

Figures = dict[str, Any]


def run(kind: str, folder: Path) -> Figures:
    """Train, and count what is held; see ``KINDS``."""
    from edge.machine.libraries import limit_libraries
    from edge.machine.resources import keep_freed_memory
    from ringtune.machine.resources import usable_cores

    keep_freed_memory()
    limit_libraries(usable_cores())
    from edge.agent.torch_backend import preload
    from edge.machine.resources import peak_rss_bytes, reset_peak, rss_bytes

    preload()
    from tests.support.hand_ring import HandRing, make_plan

    job = _job(kind, folder)
    dataset = _dataset(job, folder)
    idle_bytes = rss_bytes()
    reset_peak()
    ring = HandRing(
        make_plan(job, {"a": dataset}, {"a": (0, 12)}, num_blocks=12, hidden_size=768),
        job,
        folder / "model",
        {"a": dataset},
    )
    built_bytes = rss_bytes()
    node = ring.nodes["a"]
    if kind == "disk":
        node.inactive_state.keep_on_disk(folder / "moments", {"run": "bench", "node": "a"})
    held = Held(node)
    steps_s, peaks = [], []
    for turn in _turns(ring):
        ring.start_turn(turn)
        for item in _items(ring, turn):
            start_s = time.perf_counter()
            ring.run_item(item)
            steps_s.append(time.perf_counter() - start_s)
            peaks.append(peak_rss_bytes() - idle_bytes)
        node.forget_turn(turn.index)
    node.inactive_state.close()
    return {
        "idle_bytes": idle_bytes,
        "built_bytes": built_bytes - idle_bytes,
        "peak_bytes": peaks[-1],
        "peaks_bytes": peaks,
        "steps_s": steps_s,
        "held_bytes": held.peak_bytes,
        "group_bytes": held.group_bytes(),
        "losses": ring.losses,
    }


def _job(kind: str, folder: Path) -> Any:
    from ringtune.job.job import parse_job

    size = NUM_UNITS if kind == "full" else 1
    return parse_job(
        f"""
        [model]
        path = "{folder / "model"}"
        [train]
        method = "hift"
        learning_rate = 1e-5
        batch_size = {BATCH}
        microbatches = 1
        max_length = {TOKENS}
        local_iterations = {NUM_UNITS}
        max_steps = {NUM_UNITS * SWEEPS}
        [hift]
        group_size = {size}
        state = "{"disk" if kind == "disk" else "memory"}"
        """,
        source="bench",
    )


def _dataset(job: Any, folder: Path) -> Any:
    from edge.data.dataset import OwnerDataset

    rows = OwnerDataset.load(job, folder / "rows.csv", None, share=0, num_owners=1, tokenizer_folder=folder / "model")
    rows.set_labels(("bad", "good"))
    return rows


def _turns(ring: Any) -> Any:
    from ringtune.schedule.turns import StepKind, turn_sequence

    return [turn for turn in turn_sequence(ring.plan.course) if turn.kind is StepKind.TRAIN]


def _items(ring: Any, turn: Any) -> Any:
    from ringtune.schedule.turns import items

    return items(ring.plan.course, turn)


class Held:
    """Counts gradients and state, before and after each optimizer step, where most is held."""

    def __init__(self, node: Any) -> None:
        from edge.model import optimizers as optimizers_module

        module: Any = optimizers_module
        self._node, self._optimizers = node, node._hosted.all_optimizers()
        self.peak_bytes = 0
        update = module.apply_update

        def counted(optimizer: Any, learning_rate: float) -> None:
            self._count()
            update(optimizer, learning_rate)
            self._count()

        module.apply_update = counted

    def _count(self) -> None:
        gradients = sum(
            (parameter.nbytes if not parameter.grad.is_sparse else parameter.grad._values().nbytes)
            for each in self._optimizers
            for parameters in each.units.values()
            for parameter in parameters.values()
            if parameter.grad is not None
        )
        held = sum(each.held_bytes for each in self._optimizers)
        keepers = [each._keeper for each in self._optimizers]
        ahead = sum(keeper._files[unit].size_bytes for keeper in keepers for unit in getattr(keeper, "_ahead", ()))
        self.peak_bytes = max(self.peak_bytes, gradients + held + ahead)

    def group_bytes(self) -> int:
        """Gradients and state of the largest unit, and state of the one after it."""
        sizes: dict[int, int] = {
            unit: sum(parameter.nbytes for parameter in parameters.values())
            for each in self._optimizers
            for unit, parameters in each.units.items()
        }
        order = sorted(sizes)
        largest = max(order, key=lambda unit: sizes[unit])
        following = order[(order.index(largest) + 1) % len(order)]
        return 3 * sizes[largest] + 2 * sizes[following]


def measure(folder: Path) -> Figures:
    """Run every kind in turn, ``REPEATS`` times; what is under ``figures`` has the names of ``TARGETS``."""
    write_model(folder / "model", vocabulary=VOCABULARY)
    write_rows(folder / "rows.csv", rows=ROWS, tokens=TOKENS)
    runs: dict[str, list[Figures]] = {kind: [] for kind in KINDS}
    for repeat in range(REPEATS):
        for kind in KINDS if repeat % 2 == 0 else KINDS[::-1]:
            runs[kind].append(_in_process(kind, folder))
            _say(kind, runs[kind][-1])
    return {"runs": runs, **figures_of(runs)}


def figures_of(runs: dict[str, list[Figures]]) -> Figures:
    """The ratios, each with what it is of and its spread over the repeats."""
    disk, memory, full = (runs.get(kind, []) for kind in KINDS)
    ratios = {
        "hift_state_over_group": [one["held_bytes"] / one["group_bytes"] for one in disk],
        "hift_rss_over_full": [one["peak_bytes"] / other["peak_bytes"] for one, other in zip(disk, full, strict=False)],
        "hift_step_time_ratio": [_step_s(one) / _step_s(other) for one, other in zip(disk, memory, strict=False)],
    }
    ratios = {name: found for name, found in ratios.items() if found}
    return {
        "figures": {name: statistics.median(found) for name, found in ratios.items()},
        "spread": {name: [min(found), max(found)] for name, found in ratios.items()},
        "same_losses": all(one["losses"] == other["losses"] for one, other in zip(disk, memory, strict=False)),
    }


def missed(figures: Figures) -> list[str]:
    """What is above its target; empty if nothing is."""
    found = [
        f"{name} is {figures['figures'][name]:.3f}, at most {most} was wanted"
        for name, most in TARGETS.items()
        if figures["figures"].get(name, most) > most
    ]
    return found + ([] if figures["same_losses"] else ["losses differ with the place of the state"])


def _step_s(one: Figures) -> float:
    """Mean step of the last sweep, in which all state is there already; steps differ, so all of them count."""
    return statistics.fmean(one["steps_s"][-NUM_UNITS:])


def _in_process(kind: str, folder: Path) -> Figures:
    command = [sys.executable, "-P", "-m", "tests.bench.hift_state", kind, str(folder)]
    found = subprocess.run(command, timeout=RUN_S, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603
    figures: Figures = json.loads(found.stdout.splitlines()[-1])
    return figures


def _say(kind: str, one: Figures) -> None:
    sizes = " ".join(f"{name} {one[f'{name}_bytes'] / MIB:.0f}" for name in ("built", "peak", "held", "group"))
    print(f"hift {kind}: {sizes} MiB, {_step_s(one):.3f} s a step", flush=True)  # noqa: T201


def main() -> None:
    """Run one kind, for ``measure``, and print its figures."""
    parser = argparse.ArgumentParser(description="Train with one place of the optimizer's state; print what it took.")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folder", type=Path, help="of model and rows")
    options = parser.parse_args()
    print(json.dumps(run(options.kind, options.folder.resolve())))  # noqa: T201


if __name__ == "__main__":
    main()
