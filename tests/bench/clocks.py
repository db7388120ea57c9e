"""A clock that is wrong at a node whose connections are encrypted: ``python -m tests.bench.clocks``.

A coordinator with certificates, an owner with the right time, and a host whose clock is off from its start, as real
processes on loopback. A clock that is two hours off changes nothing: certificates begin 48 hours before they are made.
One that is 400 days ahead is refused, and the node and ``ringtune doctor`` say whose clock says what. A part of
``build/bench/trust.json``; exit code 1 if anything came otherwise, 77 without the library that shifts clocks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from deploy.testbed.capabilities import SKIPPED_EXIT_CODE
from ringtune.trust.places import VARIABLE
from tests.bench.jobs import write_job
from tests.bench.trust_figures import write_part
from tests.support import tiny
from tests.support.killing import difference, trained
from tests.support.processes import RUN_S, source_environment
from tests.support.strikes import faketime, with_clock

ROWS = {"-2h": "", "+2h": "", "+400d": "set the clock"}
"""Offset of the host's clock, and what is said where it is refused; empty = the run is unharmed."""
PORT, EQUAL = 7191, 1e-9
Weights = dict[str, torch.Tensor]
_JOIN_S, _LOOK_S = 60.0, 0.1


class EncryptedRing:
    """A coordinator and an owner with certificates, in a folder.

    Args:
        folder: for everything.
        stack: ends the processes.
    """

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._environment = source_environment(XDG_STATE_HOME=str(folder / "user"), **{VARIABLE: ""})
        self.address = f"127.0.0.1:{PORT}"
        self.model = tiny.write_model(folder / "model")
        rows = tiny.write_rows(folder / "rows.csv", 40)
        more = {"placement.replan": "never", "train.dropout": 0.0, "model.dtype": "float64", "wire.dtype": "float64"}
        self.job = write_job(folder / "job.toml", model=self.model, train=rows, steps=8, tokens=16, more=more)
        assert self.ringtune("coordinator", "init").returncode == 0
        self.start("coordinator", "ringtune.cli", "coordinator", "--bind", self.address)
        self.start_node("owner", "--data", str(rows))

    def ringtune(self, *words: str, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        """Run a command of a user to its end."""
        command = [*prefix, sys.executable, "-m", "ringtune.cli", *words]
        return subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, env=self._environment, timeout=RUN_S, check=False
        )

    def start(self, name: str, module: str, *words: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        """Start a process in the background; what it prints goes to a file of its name."""
        log = self._stack.enter_context((self._folder / f"{name}.log").open("wb"))
        command = [*prefix, sys.executable, "-m", module, *words]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=self._environment)  # noqa: S603
        self._stack.callback(process.wait, RUN_S)
        self._stack.callback(process.terminate)
        return process

    def start_node(self, name: str, *words: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        """Start a node, which joins with a token."""
        token = self._folder / f"{name}.token"
        assert self.ringtune("coordinator", "token", name, "--save", str(token)).returncode == 0
        where = ("--coordinator", self.address, "--name", name, "--threads", "1", "--token-file", str(token))
        keeps = ("--state", str(self._folder / "state" / name), "--join-s", f"{_JOIN_S:g}")
        return self.start(name, "edge", *where, *keeps, *words, prefix=prefix)

    def joined(self, name: str, process: subprocess.Popen[bytes]) -> bool:
        """Wait until a node has joined, or ended."""
        deadline_s = time.monotonic() + 2 * _JOIN_S
        while f"node {name} joined from" not in self.words("coordinator"):
            if process.poll() is not None:
                return False
            assert time.monotonic() < deadline_s, self.words(name)
            time.sleep(_LOOK_S)
        return True

    def words(self, name: str) -> str:
        """What a process has printed."""
        return (self._folder / f"{name}.log").read_text(errors="replace")


@contextlib.contextmanager
def encrypted_ring() -> Iterator[EncryptedRing]:
    """A ring in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="ringtune-clocks-") as folder, contextlib.ExitStack() as stack:
        yield EncryptedRing(Path(folder), stack)


def outcome(offset: str, wanted: Weights | None) -> tuple[dict[str, object], Weights]:
    """Start a host whose clock is off; train where it joins, and tell what it says where it does not.

    Args:
        offset: of its clock.
        wanted: what an undisturbed run trained.

    Returns:
        What came of it, and what was trained.
    """
    with encrypted_ring() as ring:
        prefix = with_clock(offset)
        host = ring.start_node("host", "--model", str(ring.model), prefix=prefix)
        found: dict[str, object] = {"joined": ring.joined("host", host), "exit_code": host.poll()}
        doctor = ring.ringtune("doctor", "--coordinator", ring.address, prefix=prefix)
        found["doctor"] = [line for line in doctor.stdout.splitlines() if "clock" in line]
        found["doctor_exit_code"] = doctor.returncode
        if not found["joined"]:
            return found | {"says": ring.words("host").splitlines()[-1]}, {}
        out = ring.job.parent / "run"
        done = ring.ringtune("train", str(ring.job), "--coordinator", ring.address, "--nodes", "2", "--out", str(out))
        found["run_exit_code"] = done.returncode
        if done.returncode:
            return found | {"says": done.stderr.splitlines()[-1]}, {}
        return found | {"difference": difference(out, wanted) if wanted else 0.0}, trained(out)


def main() -> int:
    """Carry all rows out, write the figures."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if faketime() is None:
        sys.stderr.write("skipped: libfaketime is not there; pip install libfaketime\n")
        return SKIPPED_EXIT_CODE
    _, wanted = outcome("+0", None)
    rows: dict[str, dict[str, object]] = {}
    for offset, says in ROWS.items():
        found, _ = outcome(offset, wanted)
        if says:
            is_good = not found["joined"] and says in str(found["says"])
        else:
            is_good = float(str(found.get("difference", "inf"))) <= EQUAL
        rows[offset] = {"as_stated": is_good, "stated": says or "the run is unharmed", **found}
        sys.stdout.write(json.dumps({offset: rows[offset]}) + "\n")
        sys.stdout.flush()
    write_part("clocks_encrypted", rows)
    return 0 if all(row["as_stated"] for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
