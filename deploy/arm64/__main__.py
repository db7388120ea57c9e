"""``python -m deploy.arm64``: doctor, measure and a few steps of a ring with an emulated arm64 node."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from deploy.arm64.emulated import REPOSITORY, TORCH, Board, MissingTool, require_tools
from deploy.smoke.tiny_job import BLOCKS, STEPS, write_job
from ringtune.storage.durable import claim, remove_folder

JOIN_S: Final = 1800.0
"""How long an emulated agent may take to load its libraries, in seconds."""

CLOSE: Final = 1e-4
"""How far the trained numbers may be apart, as a share of their norm: fp32 on two instruction sets."""

_LISTENS_S: Final = 60.0
_NODES: Final = ("node-0", "node-1")


class Mixed:
    """A coordinator with one emulated and one ordinary node, while in its context.

    Args:
        folder: with ``model``, ``train.csv`` and ``eval.csv``; gets logs.
    """

    def __init__(self, board: Board, folder: Path) -> None:
        self._board, self._folder = board, folder
        self.address = f"127.0.0.1:{_free_port()}"

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Start all three; yield the coordinator's address; end them."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                self._started("coordinator", native("coordinator", "--bind", self.address, "--lease", JOIN_S))
            )
            _await_port(self.address)
            first, second = (self._node(name, index) for index, name in enumerate(_NODES))
            stack.enter_context(self._started(_NODES[0], native(*first)))
            stack.enter_context(self._started(_NODES[1], self._board.command(*second), on_board=True))
            yield self.address

    def _node(self, name: str, index: int) -> tuple[object, ...]:
        rows = ("--data", self._folder / "train.csv", "--eval-data", self._folder / "eval.csv")
        share = ("--share", f"{index}/{len(_NODES)}")
        state = ("--state", self._folder / "states" / name, "--cache", self._folder / "cache" / name)
        size = ("--threads", 1, "--memory", "1GiB", "--join-s", JOIN_S)
        return ("node", "--coordinator", self.address, "--name", name, *rows, *share, *state, *size)

    @contextlib.contextmanager
    def _started(self, name: str, words: list[str], *, on_board: bool = False) -> Iterator[None]:
        environment = self._board.environment() if on_board else None
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(  # noqa: S603 - our own commands
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=REPOSITORY
            )
            try:
                yield
            finally:
                process.terminate()
                try:
                    process.wait(30.0)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def native(*words: object) -> list[str]:
    """Write a command of ``ringtune`` for this machine."""
    return [sys.executable, "-P", "-m", "ringtune.cli", *map(str, words)]


def run_native(*words: object) -> str:
    """Run ``ringtune`` on this machine to its end; return what it printed; raises ``CalledProcessError``."""
    done = subprocess.run(  # noqa: S603 - our own module
        native(*words), check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    return done.stdout


def trained(run: Path) -> dict[str, list[float]]:
    """Read the numbers that a run trained, adapter and head."""
    from safetensors.torch import load_file

    numbers: dict[str, list[float]] = {}
    for name in ("adapter.safetensors", "model_head.safetensors"):
        tensors = load_file(run / "adapter" / name)
        numbers.update({key: tensors[key].double().flatten().tolist() for key in sorted(tensors)})
    return numbers


def difference(first: dict[str, list[float]], second: dict[str, list[float]]) -> float:
    """Norm of the difference of all numbers, as a share of the norm of ``one``; not a number if names differ."""
    if first.keys() != second.keys():
        return math.nan
    pairs = [pair for name in first for pair in zip(first[name], second[name], strict=True)]
    return math.sqrt(sum((a - b) ** 2 for a, b in pairs) / sum(a * a for a, _ in pairs))


def losses(run: Path) -> list[float]:
    """Read the loss of each step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _await_port(address: str) -> None:
    """Wait until somebody listens."""
    host, _, port = address.rpartition(":")
    deadline_s = time.monotonic() + _LISTENS_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0):
            return
        time.sleep(0.2)
    raise TimeoutError(f"the coordinator does not listen at {address} after {_LISTENS_S:g} s; see its log")


SKIPPED_EXIT_CODE: Final = 77
"""What automake, meson and others take for "skipped"."""


def main() -> int:
    """Read the command line, do all of it; 0 = the rings are equal, 1 = they are not, 77 = skipped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("build/arm64"), help="for the board and the rings")
    parser.add_argument("--check", action="store_true", help="only say whether this machine can do it")
    given = parser.parse_args()
    try:
        require_tools()
        if given.check:
            _say("this machine can emulate a board")
            return 0
        board = Board.within(given.folder.resolve())
        board.make()
    except MissingTool as error:
        _say(f"skipped: {error}")
        return SKIPPED_EXIT_CODE
    return _rings(board, given.folder.resolve() / "rings")


def _rings(board: Board, folder: Path) -> int:
    claim(folder, "rings")
    remove_folder(folder)
    claim(folder, "rings")
    job = write_job(folder)
    _say(f"doctor on the board, {TORCH} ({board.python.name}):")
    doctor = _on_board(board, "doctor", "--model", folder / "model", "--disk", folder)
    _say(doctor)
    if "FAIL" in doctor:
        return 1
    plan = folder / "plan.json"
    patient = ("--set", f"runtime.lease_s={JOIN_S}", "--set", f"runtime.wait_s={JOIN_S}")
    run_native("plan", job, *patient, "--assume", "2", "--memory", "1GiB", "--save", plan)
    run_native("train", job, *patient, "--local", "2", "--plan", plan, "--out", folder / "native")
    began_s = time.monotonic()
    with Mixed(board, folder).running() as address:
        coordinator = (*patient, "--coordinator", address, "--nodes", 2, "--join-s", JOIN_S)
        run_native("measure", job, *coordinator, "--no-rehearsal", "--save", folder / "profile.json")
        members = run_native("nodes", "--coordinator", address, "--json")
        run_native("train", job, *coordinator, "--plan", plan, "--out", folder / "mixed")
    return _compare(folder, members, time.monotonic() - began_s)


def _compare(folder: Path, members: str, took_s: float) -> int:
    """Print what was measured and how far the rings are apart; 1 if that is too far."""
    for line in filter(None, members.splitlines()):
        member = json.loads(line)
        _say(f"{member['node']}: {member['system']}, {member['cores']} cores")
    for node in json.loads((folder / "profile.json").read_text(encoding="utf-8"))["nodes"]:
        _say(f"{node['node']}: a block of {BLOCKS} takes {node['block_forward_s'] * 1e3:.1f} ms forward, measured")
    slices = json.loads((folder / "mixed/plan.json").read_text(encoding="utf-8"))["placements"][0]["slices"]
    _say(f"slices: {slices}")
    apart = difference(trained(folder / "native"), trained(folder / "mixed"))
    pairs = list(zip(losses(folder / "native"), losses(folder / "mixed"), strict=True))
    _say(f"losses, native and mixed: {pairs}")
    is_equal = apart <= CLOSE and len(pairs) == STEPS
    word = "equal" if is_equal else "NOT equal"
    _say(f"adapter and head after {STEPS} steps are {word}: {apart:.2e} apart, at most {CLOSE:.0e} ({took_s:.0f} s)")
    return 0 if is_equal else 1


def _on_board(board: Board, *words: object) -> str:
    """Run ``ringtune`` on the board; return what it printed, whatever its exit code."""
    done = subprocess.run(  # noqa: S603 - our own command
        board.command(*words),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env=board.environment(),
        cwd=REPOSITORY,
    )
    return done.stdout


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - it is a command


if __name__ == "__main__":
    sys.exit(main())
