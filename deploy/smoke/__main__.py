"""``python -m deploy.smoke WHEEL``: install a wheel into empty environments, and train with it outside of any checkout.

::

    node/    torch first, as --torch says, then the wheel with [node]: version, doctor, a run of two nodes, its result
    core/    the wheel alone, without torch: plan, sim, what-if of that run
    web/     the wheel with [web], without torch: the page of that run, and of a coordinator

In each of them every command shows its help, and a coordinator starts, which a node of node/ joins.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_TINY_JOB: Final = Path(__file__).with_name("tiny_job.py")
_LOAD: Final = "from edge.machine.libraries import load_libraries; load_libraries()"
_LOADS: Final = """
import sys
import torch
from adapters import AutoAdapterModel
from transformers import AutoTokenizer

model = AutoAdapterModel.from_pretrained("model")
model.load_adapter("run/adapter", use_safetensors=True, set_active=True)
given = AutoTokenizer.from_pretrained("model")(["w1 w3 w5"], return_tensors="pt")
with torch.no_grad():
    logits = model.eval()(**given).logits
assert logits.shape == (1, 2) and bool(logits.isfinite().all()), logits
assert not [name for name in sys.modules if name.partition(".")[0] in ("ringtune", "edge", "coordinator")]
print("the result loads in plain adapters:", logits.tolist())
"""
_HAS_NO_TORCH: Final = """
import importlib.util
assert importlib.util.find_spec("torch") is None
import ringtune
planned = ringtune.plan("job.toml", assume=2, memory="1GiB")
assert set(planned.memory_bytes) == {"node-0", "node-1"}
print("planned from Python, without torch:", planned.memory_bytes)
"""


_EVERY_HELP: Final = """
from ringtune import cli
from typer.testing import CliRunner

for words in cli.all_commands():
    done = CliRunner().invoke(cli.app, [*words.split(), "--help"])
    assert done.exit_code == 0 and "not installed" not in done.output, (words, done.output, done.exception)
print("every command has its help")
"""
_START_S: Final = 300.0
"""How long a coordinator or a node may take, in seconds: libraries are read from the disk for the first time."""


class Environment:
    """An empty environment, and what is run in it from a folder that is no checkout."""

    def __init__(self, folder: Path, work: Path) -> None:
        self._bin, self._work = folder / "bin", work
        _call([sys.executable, "-m", "venv", str(folder)], work)

    def install(self, *words: str) -> None:
        """Install packages with pip."""
        pip = [str(self._bin / "python"), "-m", "pip", "install", "--quiet", "--no-input"]
        _call([*pip, "--disable-pip-version-check", *words], self._work)

    def python(self, *words: str) -> None:
        """Run Python, without what the current folder would add to its path."""
        _call([str(self._bin / "python"), "-P", *words], self._work)

    def ringtune(self, *words: str) -> None:
        """Run the command as it was installed."""
        _call([str(self._bin / "ringtune"), *words], self._work)

    @contextlib.contextmanager
    def started(self, *words: str) -> Iterator[Started]:
        """Start the command, which is to go on; it is ended at the end."""
        line = [str(self._bin / "ringtune"), *words]
        _say(f"$ {shlex.join(line)[:160]} &")
        process = subprocess.Popen(  # noqa: S603 - ours
            line,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            cwd=self._work,
            env=_environment(self._work),
            text=True,
        )
        ending = threading.Timer(_START_S, process.kill)
        ending.start()
        try:
            yield Started(line, process)
        finally:
            ending.cancel()
            process.terminate()
            process.communicate()


class Started:
    """A command that continues, and prints what happens as JSON; one that is silent too long is killed."""

    def __init__(self, line: list[str], process: subprocess.Popen[str]) -> None:
        self._line, self._process = line, process

    def told(self, event: str) -> dict[str, str]:
        """Wait for an event; raises ``CalledProcessError``."""
        for line in self._process.stdout or ():
            told: dict[str, str] = json.loads(line)
            if told["event"] == event:
                return told
        raise subprocess.CalledProcessError(self._process.wait(), self._line)


def _environment(folder: Path) -> dict[str, str]:
    """The variables of a user without a checkout."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return environment | {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "XDG_STATE_HOME": str(folder / "state"),
    }


def _call(words: list[str], folder: Path) -> None:
    """Run a command to its end; its variables are those of a user without a checkout."""
    _say(f"$ {shlex.join(words)[:160]}")
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL, cwd=folder, env=_environment(folder))  # noqa: S603 - ours


def node(folder: Path, work: Path, wheel: Path, torch: str) -> Environment:
    """Install a node, and train, evaluate and load what was trained."""
    made = Environment(folder, work)
    made.install(*shlex.split(torch))
    made.install(f"{wheel}[node]")
    made.ringtune("--version")
    made.python(str(_TINY_JOB), str(work))
    made.python("-c", _LOAD)  # for the first time from the disk, which takes long beside other work
    made.ringtune("doctor", "--model", "model", "--disk", str(work))
    made.ringtune("train", "job.toml", "--local", "2", "--out", "run")
    made.ringtune("predict", "run", "--data", "train.csv")
    made.install("adapters==1.3.*")  # no node needs it; it loads the result
    made.python("-c", _LOADS)
    return made


def core(folder: Path, work: Path, wheel: Path) -> Environment:
    """Install what a router has, and look at the run."""
    made = Environment(folder, work)
    made.install(str(wheel))
    for words in (("--version",), ("plan", "job.toml", "--assume", "2")):
        made.ringtune(*words)
    made.ringtune("doctor", "--role", "coordinator", "--bind", "127.0.0.1:0")
    made.ringtune("sim", "run")
    made.ringtune("what-if", "run", "--change", "node-1.compute=0.5")
    made.python("-c", _HAS_NO_TORCH)
    return made


def web(folder: Path, work: Path, wheel: Path) -> Environment:
    """Install what shows pages."""
    made = Environment(folder, work)
    made.install(f"{wheel}[web]")
    return made


def commands(made: Environment) -> None:
    """Show the help of every command, and of those below one."""
    made.python("-c", _EVERY_HELP)


def joined(coordinator: Environment, node: Environment, *options: str) -> None:
    """Start a coordinator of one environment, let a node of another one join it, and end both.

    Raises:
        CalledProcessError: one of them did not do its part in time.
    """
    with coordinator.started("coordinator", "--bind", "127.0.0.1:0", "--json", *options) as server:
        address = server.told("listening")["address"]
        with node.started(
            "node", "--coordinator", address, "--name", "board", "--data", "train.csv", "--json"
        ) as board:
            board.told("joined")
            coordinator.ringtune("nodes", "--coordinator", address)


def main() -> int:
    """Read the command line, do both; 0 if all went well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="the file that is installed")
    parser.add_argument("--torch", default="torch", help="what to install torch from, as TORCH of the Makefile")
    given = parser.parse_args()
    wheel = given.wheel.resolve(strict=True)
    with tempfile.TemporaryDirectory(prefix="ringtune-smoke-") as name:
        work = Path(name) / "work"
        work.mkdir()
        try:
            board = node(Path(name) / "node", work, wheel, given.torch)
            for desk in (board, core(Path(name) / "core", work, wheel), web(Path(name) / "web", work, wheel)):
                commands(desk)
                joined(desk, board)
            joined(desk, board, "--web", "127.0.0.1:0")
        except subprocess.CalledProcessError as error:
            _say(f"FAILED with exit code {error.returncode}: {shlex.join(error.cmd)[:160]}")
            return 1
    _say(f"{wheel.name} installs and trains, outside of a checkout")
    return 0


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - it is a command


if __name__ == "__main__":
    sys.exit(main())
