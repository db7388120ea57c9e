"""A ring of an emulated arm64 node and one of this machine, beside the same ring on this machine alone."""

from __future__ import annotations

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

from deploy.arm64.emulated import REPOSITORY, Board

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
    """Run ``ringtune`` on this machine to its end; return what it printed.

    Raises:
        CalledProcessError: it failed; its own words are on the screen.
    """
    done = subprocess.run(  # noqa: S603 - our own module
        native(*words), check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    return done.stdout


def trained(run: Path) -> dict[str, list[float]]:
    """Read the numbers that a run trained, adapter and head."""
    from safetensors.torch import load_file

    found: dict[str, list[float]] = {}
    for name in ("adapter.safetensors", "model_head.safetensors"):
        tensors = load_file(run / "adapter" / name)
        found.update({key: tensors[key].double().flatten().tolist() for key in sorted(tensors)})
    return found


def difference(one: dict[str, list[float]], other: dict[str, list[float]]) -> float:
    """Norm of the difference of all numbers, as a share of the norm of ``one``; not a number if names differ."""
    if one.keys() != other.keys():
        return math.nan
    pairs = [pair for name in one for pair in zip(one[name], other[name], strict=True)]
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
