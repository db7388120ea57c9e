"""Command lines of RingTune's own processes in a testbed."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deploy.testbed.boards import Board, Layout
from deploy.testbed.network import HUB_ADDRESS, Command, address

REPOSITORY = Path(__file__).parents[2]
AGENT_PORT = 7071
PLACEHOLDER = "{coordinator}"


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSetup:
    """What the agents of all boards are started with.

    Attributes:
        data: rows that the boards without rows of their own share; None = those own nothing.
        budgets: bytes that a run may use, by board; those that are not in it find their limit themselves.
    """

    data: Path | None = None
    eval_data: Path | None = None
    model: Path | None = None
    models: Mapping[str, Path] = field(default_factory=dict)
    threads: int = 1
    options: tuple[str, ...] = ()
    budgets: Mapping[str, int] = field(default_factory=dict)


def agent_command(
    layout: Layout, board: Board, setup: AgentSetup, *, coordinator: str, folder: Path, join_s: float
) -> Command:
    """A board's agent. It finds its memory limit itself, as in any container.

    Boards of ``layout`` that share ``setup.data`` get equal parts. ``folder`` has the states and caches of all
    boards; the agent tries for ``join_s`` seconds to reach the coordinator.
    """
    # as a module: its end leaves out what would take a slow board seconds
    command = [sys.executable, "-P", "-m", "edge", "--coordinator", coordinator, "--name", board.name]
    command += ["--bind", f"{address(layout, board)}:{AGENT_PORT}", "--insecure", "--join-s", f"{join_s:g}"]
    command += ["--threads", f"{setup.threads}", "--state", str(folder / "state" / board.name)]
    command += ["--cache", str(folder / "cache" / board.name)]
    if board.name in setup.budgets:
        command += ["--memory", f"{setup.budgets[board.name]}"]
    if (model := setup.models.get(board.name, setup.model)) is not None:
        command += ["--model", str(model)]
    if board.data is not None:
        command += ["--data", str(board.data)]
    elif setup.data is not None:
        sharing = [other.name for other in layout.boards if other.data is None]
        command += ["--data", str(setup.data), "--share", f"{sharing.index(board.name)}/{len(sharing)}"]
    eval_data = board.eval_data or (setup.eval_data if setup.data is not None and board.data is None else None)
    if eval_data is not None:
        command += ["--eval-data", str(eval_data)]
    return (*command, *setup.options)


def coordinator_command(*, lease_s: float) -> Command:
    """The coordinator, at any free port of the hub; prints JSON lines."""
    options = ("--bind", f"{HUB_ADDRESS}:0", "--lease", f"{lease_s:g}", "--insecure", "--json")
    return (sys.executable, "-P", "-m", "ringtune.cli", "coordinator", *options)


def nodes_command(coordinator: str) -> Command:
    """Lists the nodes as JSON lines."""
    options = ("--coordinator", coordinator, "--insecure", "--json")
    return (sys.executable, "-P", "-m", "ringtune.cli", "nodes", *options)


def fill_in(command: Sequence[str], coordinator: str) -> Command:
    """The command under test with the coordinator's address in its place."""
    return tuple(word.replace(PLACEHOLDER, coordinator) for word in command)


def environment(base: Mapping[str, str] | None = None, *, threads: int = 1, coordinator: str = "") -> dict[str, str]:
    """What processes of the testbed find: this interpreter's commands, this checkout, one address."""
    variables = dict(os.environ if base is None else base)
    variables["PATH"] = os.pathsep.join(filter(None, (str(Path(sys.executable).parent), variables.get("PATH", ""))))
    roots = (str(REPOSITORY / "proto"), str(REPOSITORY), variables.get("PYTHONPATH", ""))
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, roots))
    variables |= {"OMP_NUM_THREADS": f"{threads}", "MKL_NUM_THREADS": f"{threads}"}
    if coordinator:
        variables["RINGTUNE_COORDINATOR"] = coordinator
    return variables
