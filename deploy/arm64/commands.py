"""``python -m deploy.arm64``: doctor, measure and a few steps of a ring with an emulated arm64 node."""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Final

from deploy.arm64.emulated import REPOSITORY, TORCH, Board, MissingTool, require_tools
from deploy.arm64.ring import CLOSE, JOIN_S, Mixed, difference, losses, run_native, trained
from deploy.smoke.tiny_job import BLOCKS, STEPS, write_job
from ringtune.storage.durable import claim, remove_folder

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
