"""``python -m deploy.smoke WHEEL``: install a wheel into empty environments, and train with it outside of any checkout.

::

    node/    torch first, as --torch says, then the wheel with [node]: version, doctor, a run of two nodes, its result
    core/    the wheel alone, without torch: help, plan, sim, what-if of that run
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
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


class Environment:
    """An empty environment, and what is run in it from a folder that is no checkout.

    Args:
        folder: gets the environment.
        work: current folder of what is run.
    """

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


def _call(words: list[str], folder: Path) -> None:
    """Run a command to its end; its variables are those of a user without a checkout.

    Raises:
        CalledProcessError: it failed; its own words are on the screen.
    """
    _say(f"$ {shlex.join(words)[:160]}")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "XDG_STATE_HOME": str(folder / "state")}
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL, cwd=folder, env=environment)  # noqa: S603 - ours


def node(folder: Path, work: Path, wheel: Path, torch: str) -> None:
    """Install a node, and train, evaluate and load what was trained."""
    made = Environment(folder, work)
    made.install(*shlex.split(torch))
    made.install(f"{wheel}[node]")
    made.ringtune("--version")
    made.python(str(_TINY_JOB), str(work))
    made.python("-c", _LOAD)  # for the first time from the disk, which takes long beside other work
    made.ringtune("doctor", "--model", "model", "--disk", str(work))
    made.ringtune("train", "job.toml", "--local", "2", "--out", "run")
    made.python("-c", _LOADS)


def core(folder: Path, work: Path, wheel: Path) -> None:
    """Install what a router has, and look at the run."""
    made = Environment(folder, work)
    made.install(str(wheel))
    for words in (("--version",), ("--help",), ("train", "--help"), ("plan", "job.toml", "--assume", "2")):
        made.ringtune(*words)
    made.ringtune("sim", "run")
    made.ringtune("what-if", "run", "--change", "node-1.compute=0.5")
    made.python("-c", _HAS_NO_TORCH)


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
            node(Path(name) / "node", work, wheel, given.torch)
            shutil.rmtree(Path(name) / "node")  # a gigabyte
            core(Path(name) / "core", work, wheel)
        except subprocess.CalledProcessError as error:
            _say(f"FAILED with exit code {error.returncode}: {shlex.join(error.cmd)[:160]}")
            return 1
    _say(f"{wheel.name} installs and trains, outside of a checkout")
    return 0


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - it is a command


if __name__ == "__main__":
    sys.exit(main())
