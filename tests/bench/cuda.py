"""``python -m tests.bench.cuda``: what a GPU has to hold, a line each; 77 where torch sees none (``make cuda``).

First each promise that a GPU once broke is tried by itself, then the executors' tests run on the device with the plugin
``tests.support.on_cuda``, and the integration tests, whose agents take the device by themselves. Ends with 1 if a check
fails. ``--only NAME...`` runs some; ``--device cpu`` tries the checks themselves where there is no GPU.

=========== ==========================================================================================
dropout     one node and three nodes: equal in every bit, with dropout
hift        the same job twice: equal in every bit, with sparse gradients of tables
optimizers  every optimizer trains, and ends where the processor's run ends
scores      seconds in which the scores of a batch are gathered
memory      ``--local`` on a nearly full card is refused with both numbers (exit 6), as torch's own error is
report      ``--local 2`` trains, the report names device and memory; and what the plan said beside it
copies      owners on CPU and GPU are refused with HiFT before training (exit 5), with both classes
exec        a template that has used the GPU forks no node: they start as processes of their own
doctor      ``ringtune doctor`` names the device
tests       tests of executors, data and timings on the device
ring        integration tests
=========== ==========================================================================================
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from deploy.smoke import tiny_job
from ringtune.config.optimizers import OPTIMIZERS
from ringtune.costs.memory_sizes import CONTEXT_BYTES
from ringtune.errors import CapacityError
from ringtune.quantities import format_bytes
from ringtune.schedule.turns import turn_sequence
from tests.support import on_cuda, torch_ring
from tests.support.processes import REPOSITORY, run_ringtune, start_ringtune
from tests.support.torch_ring import Case, distance, make_carrier, write_family_inputs, write_inputs

ONE: Final = (("a", 0, 4),)
THREE: Final = (("b", 0, 1), ("c", 1, 3), ("a", 3, 4))
_TESTS: Final = (
    "tests/edge/runtime",
    "tests/edge/techniques",
    "tests/edge/data",
    "tests/edge/profiler/test_benchmark.py",
    "tests/suites/test_head_tokens.py",
)
_RING: Final = ("tests/integration",)
_TESTS_S: Final = 150.0
_JOIN_S: Final = 60.0


class Checks:
    """The checks, each a method that returns what it found or raises what is wrong."""

    def __init__(self, folder: Path, device: str) -> None:
        self._folder, self._device = folder, device
        self._inputs = write_inputs(self._under("inputs"))
        self._job = tiny_job.write_job(self._under("job"))

    def _under(self, name: str) -> Path:
        made = self._folder / name
        made.mkdir(parents=True, exist_ok=True)
        return made

    def _trained(self, case: Case, slices: tuple[tuple[str, int, int], ...]) -> dict[str, torch.Tensor]:
        """All that a run trains, from its executors in this process."""
        plan = case.plan(slices)
        carrier = make_carrier(case, plan)
        torch_ring.run(plan, carrier, 1)
        return carrier.collected(plan, list(turn_sequence(plan.course))[-1].owner)

    # ---- promises ---------------------------------------------------------------------------------

    def dropout(self) -> str:
        """Partition invariance, with the masks of the device."""
        case = Case(
            folder=self._inputs, method="all", dtype="float32", dropout=0.1, num_steps=8, microbatches=2, trims=False
        )
        one, three = self._trained(case, ONE), self._trained(case, THREE)
        assert torch_ring.same_bits(one, three), f"1 node and 3 nodes differ, relative {distance(one, three):.1e}"
        return f"1 node = 3 nodes in every bit of {len(one)} tensors after 8 steps"

    def hift(self) -> str:
        """Equal to itself: what resuming and recomputation rest on."""
        found = []
        for model_type, task in (("bert", "sequence-classification"), ("gpt2", "causal-lm")):
            inputs = write_family_inputs(self._under(model_type), model_type, task)
            case = Case(
                folder=inputs, task=task, method="hift", adapter="full", dtype="float32", num_steps=24, microbatches=2
            )
            runs = [self._trained(case, slices) for slices in (ONE, ONE, THREE)]
            assert torch_ring.same_bits(runs[0], runs[1]), f"{model_type}: two runs differ, {distance(*runs[:2]):.1e}"
            assert torch_ring.same_bits(runs[0], runs[2]), (
                f"{model_type}: 1 and 3 nodes differ, {distance(*runs[::2]):.1e}"
            )
            found.append(model_type)
        return f"two runs and 3 nodes are equal in every bit: {', '.join(found)}"

    def optimizers(self) -> str:
        """None asks for a kernel that the device lacks."""
        found = []
        for name in OPTIMIZERS:
            case = Case(folder=self._inputs, method="all", dtype="float32", optimizer=name, num_steps=6)
            on_device = self._trained(case, ONE)
            on_cuda.use("cpu")
            try:
                away = distance(on_device, self._trained(case, ONE))
            finally:
                on_cuda.use(self._device)
            assert away < 1e-5, f"{name}: {away:.1e} from the processor's result"
            found.append(f"{name} {away:.0e}")
        return ", ".join(found)

    def scores(self) -> str:
        """D2FT's scores, which once waited for the device at every part of every weight."""
        from ringtune.schedule.operation_tables import Score
        from tests.edge.techniques.test_operations import choice_of, make_ring, score, score_turn

        case = Case(folder=self._inputs, dtype="float32", microbatches=2)
        hand = make_ring(case, THREE, choice_of(Score.TAYLOR, Score.FISHER, 4))
        score(hand, score_turn(hand.plan, "a", index=500))
        start_s = time.monotonic()
        rows = score(hand, score_turn(hand.plan, "a", index=501))
        batches = len({row.batch_id for row in rows})
        return f"{(time.monotonic() - start_s) / batches:.3f} s a batch, over {batches}"

    def memory(self) -> str:
        """A full card is a matter of capacity, before training and in it."""
        from edge.machine.accelerator import capacity_errors, device_memory

        try:
            with capacity_errors("node-0", "cuda", "a test"):
                torch.empty(1 << 48, dtype=torch.uint8, device="cuda")
        except CapacityError as error:
            said = str(error)
        assert "more, and" in said and "some more" not in said, said
        memory = device_memory("cuda")
        assert memory is not None
        filler = torch.empty(memory.free - 2 * CONTEXT_BYTES - (256 << 20), dtype=torch.uint8, device="cuda")
        done = self._train("full", "--local", 2)
        del filler
        torch.cuda.empty_cache()
        assert done.returncode == 6, f"exit {done.returncode}: {done.stderr[-600:]}"
        return f"exit 6: {done.stderr.strip().splitlines()[-1][:160]}"

    def report(self) -> str:
        """The plan's needs stand beside what torch had of the card, not beside the host's memory."""
        done = self._train("two", "--local", 2)
        assert done.returncode == 0, done.stderr[-600:]
        node = json.loads((self._folder / "two/report.json").read_text())["nodes"]["node-0"]
        assert node["device"] not in {"", "cpu"}, node
        needs, peak, total = (
            format_bytes(node[key]) for key in ("predicted_bytes", "peak_device_bytes", "device_bytes")
        )
        assert node["predicted_bytes"] > node["peak_device_bytes"], f"needs {needs}, had {peak}"
        return f"{node['device']}: needs {needs} with the context, tensors {peak} of {total}"

    def copies(self) -> str:
        """HiFT's owners on unlike devices end before the first step."""
        with self._mixed_ring() as address:
            done = self._train("mixed", "--coordinator", address, "--nodes", 2, "--set", "train.method=hift", hift=True)
        said = (done.stderr.strip().splitlines() or [""])[-1]
        is_told = all(part in said for part in ("(cpu ", "(cuda ", "torch "))
        assert done.returncode == 5 and is_told, f"exit {done.returncode}: {done.stderr[-600:]}"
        return f"exit 5: {said[:200]}"

    def exec(self) -> str:
        """A template that has used the device forks no node."""
        use = "torch.cuda.init()" if self._device == "cuda" else "torch.cuda.is_initialized = lambda: True"
        log = self._spoiled_train(f"import torch; {use}; import edge.template; edge.template.main()")
        assert "nodes load the libraries each for itself" in log, log[-600:]
        return log.strip().splitlines()[0][:160]

    def _spoiled_train(self, begin: str) -> str:
        """Train with a template that has used the device; return its log."""
        script = (
            "import sys\n"
            "from coordinator.client import local_nodes as agent_template\n"
            f"command = (sys.executable, '-c', {begin!r}, '_' * 100)\n"
            "agent_template.AgentTemplate.__init__.__kwdefaults__['command'] = command\n"
            "from ringtune.cli import main\n"
            "sys.argv[0] = 'ringtune'\n"
            "sys.exit(main())\n"
        )
        out = self._folder / "exec"
        arguments = ["train", str(self._job), "--out", str(out), "--local", "2"]
        done = subprocess.run(  # noqa: S603 - our own command
            [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=_TESTS_S, check=False
        )
        assert done.returncode == 0, done.stderr[-600:]
        return "\n".join(path.read_text() for path in out.rglob("template.log"))

    def doctor(self) -> str:
        """One line names the card."""
        done = run_ringtune("doctor", "--role", "node")
        line = next(line for line in done.stdout.splitlines() if " device " in line)
        assert "cuda " in line and "free" in line, line
        return line

    # ---- tests ------------------------------------------------------------------------------------

    def tests(self) -> str:
        """With executors and benches on the device."""
        return _pytest("-p", "tests.support.on_cuda", *_TESTS)

    def ring(self) -> str:
        """Whole commands; their agents take the device by themselves."""
        return _pytest(*_RING)

    # ---- commands ---------------------------------------------------------------------------------

    def _train(self, out: str, *options: object, hift: bool = False) -> subprocess.CompletedProcess[str]:
        job = self._job
        if hift:
            job = self._job.with_name("hift.toml")
            job.write_text(self._job.read_text().partition("[unfreeze]")[0])
        return run_ringtune("train", job, "--out", self._folder / out, *options)

    @contextmanager
    def _mixed_ring(self) -> Iterator[str]:
        """A coordinator with two owners: one on the processor, one on the GPU."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        started = [start_ringtune("coordinator", "--bind", address, "--state", self._under("coordinator"))]
        folder = self._job.parent
        try:
            for index, device in enumerate(("cpu", self._device)):
                options = ["--coordinator", address, "--name", f"node-{index}", "--device", device, "--join-s", _JOIN_S]
                options += ["--data", folder / "train.csv", "--eval-data", folder / "eval.csv", "--share", f"{index}/2"]
                started.append(start_ringtune("node", *options, "--state", self._under(f"state-{index}")))
            yield address
        finally:
            for process in reversed(started):
                process.terminate()
            for process in started:
                process.communicate(timeout=_JOIN_S)


def _pytest(*arguments: str) -> str:
    """Run tests on as many processes as the card has room for; return counts, and what failed."""
    workers = min(12, os.cpu_count() or 1)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:benchmark",
        "-n",
        str(workers),
        "--dist",
        "loadfile",
        "--no-loadscope-reorder",
    ]
    try:
        done = subprocess.run(  # noqa: S603 - our own tests
            [*command, *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=_TESTS_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode(errors="replace").splitlines()[-1:]
        raise AssertionError(f"not done after {_TESTS_S:g} s: {said}") from None
    lines = done.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    assert done.returncode == 0, "\n    ".join([*(lines or [done.stderr[-600:]])[-1:], *(one[:220] for one in failed)])
    return lines[-1]


NAMES: Final = (
    "dropout",
    "hift",
    "optimizers",
    "scores",
    "doctor",
    "report",
    "exec",
    "copies",
    "memory",
    "tests",
    "ring",
)


def main() -> int:
    """Run the checks; return 0, 1 if one failed, or 77 without a device."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.cuda", description=(__doc__ or "").partition(";")[0])
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        print(f"SKIP torch {torch.__version__} sees no CUDA device here", flush=True)  # noqa: T201
        return on_cuda.SKIPPED
    on_cuda.use(given.device)
    torch.set_num_threads(1)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="ringtune-cuda-") as folder:
        checks = Checks(Path(folder), given.device)
        for name in given.only:
            failed += not _told(name, getattr(checks, name))
    print(f"{len(given.only) - failed} of {len(given.only)} checks hold", flush=True)  # noqa: T201
    return int(failed > 0)


def _told(name: str, check: Callable[[], Any]) -> bool:
    """Run one check and print its line; whatever it raises counts as failed."""
    start_s = time.monotonic()
    try:
        level, said = "PASS", check()
    except Exception as error:  # the next check says something of its own
        level, said = "FAIL", f"{type(error).__name__}: {error}"
    print(f"{level} {name} ({time.monotonic() - start_s:.0f} s): {said}", flush=True)  # noqa: T201
    return level == "PASS"


if __name__ == "__main__":
    sys.exit(main())
