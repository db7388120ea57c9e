"""One target, in a process of its own: gives its readers input after input until the time is over.

``python -m tests.bench.fuzz.campaign TARGET FOLDER ENGINE SECONDS SEED``; ``tests.bench.fuzz`` starts it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import importlib
import importlib.util
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from tests.bench.fuzz.mutate import MOST_BYTES, mutated
from tests.bench.fuzz.reader import Reader, bound_memory, problem_of

TARGETS: Final = ("frames", "plan", "files", "calls")
ENGINES: Final = ("auto", "atheris", "hypothesis")
_SUMMARY: Final = "summary.json"
_OURS: Final = ["ringtune", "edge", "coordinator", "sim"]
_HANGS_S: Final = 60
_LOOKS: Final = 50
"""After so many inputs the watch begins anew that ends a campaign which hangs."""

_AT_ONCE: Final = 2000


def summary_of(folder: Path) -> dict[str, Any]:
    """The figures that a campaign has written."""
    found: dict[str, Any] = json.loads((folder / _SUMMARY).read_text(encoding="utf-8"))
    return found


class Campaign:
    """Counts inputs, and keeps one for every problem.

    Args:
        readers: of the target.
        folder: for the summary, and the inputs that got a wrong answer.
        engine: that chooses the inputs.
        seconds: how long.
        watch: is called now and then; without, nobody ends a reader that hangs.
    """

    def __init__(
        self,
        readers: Sequence[Reader],
        folder: Path,
        engine: str,
        seconds: float,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        self.readers = readers
        self._folder, self._engine, self._watch = folder, engine, watch
        self._began_s = time.monotonic()
        self._until_s = self._began_s + seconds
        self._inputs = dict.fromkeys((reader.name for reader in readers), 0)
        self._findings: dict[str, str] = {}
        self._number = -1

    @property
    def is_over(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self._until_s

    def give(self, reader: Reader, data: bytes) -> None:
        """Give one input to one reader."""
        self._inputs[reader.name] += 1
        self._number += 1
        if self._number % _LOOKS == 0:
            self._watch()
        problem = problem_of(reader, data)
        if problem and problem not in self._findings:
            name = f"{hashlib.sha256(data).hexdigest()[:16]}.bin"
            (self._folder / name).write_bytes(data)
            self._findings[problem] = name
            sys.stdout.write(f"{problem} ({name})\n")
            sys.stdout.flush()

    def give_numbered(self, data: bytes) -> None:
        """Give an input to the reader that its first byte names."""
        if data:
            self.give(self.readers[data[0] % len(self.readers)], data[1:])
        if self.is_over:
            self.write()
            os._exit(0)  # the library of the fuzzer never returns

    def write(self) -> None:
        """Write the figures."""
        figures = {
            "engine": self._engine,
            "seconds": round(time.monotonic() - self._began_s, 1),
            "inputs": sum(self._inputs.values()),
            "inputs_of_readers": self._inputs,
            "findings": self._findings,
        }
        (self._folder / _SUMMARY).write_text(json.dumps(figures, indent=1), encoding="utf-8")


def changed_numbered(readers: Sequence[Reader], data: bytes, rng: random.Random) -> bytes:
    """Change an input whose first byte names its reader; sometimes begin with a right one of any reader."""
    if not data or rng.random() < 0.1:
        at = rng.randrange(len(readers))
        data = bytes((at,)) + rng.choice(readers[at].seeds)
    reader = readers[data[0] % len(readers)]
    return data[:1] + mutated(reader, data[1:], rng)


def _end_if_it_hangs() -> None:
    """End this process, with its stacks, unless this is called again in time."""
    faulthandler.dump_traceback_later(_HANGS_S, exit=True)


def readers_of(target: str) -> tuple[Reader, ...]:
    """Make the readers of a target; what they read with is imported only now."""
    found: tuple[Reader, ...] = importlib.import_module(f"tests.bench.fuzz.{target}_readers").readers()
    return found


def _with_atheris(target: str, folder: Path, seconds: float, seed: int) -> None:
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=_OURS):
        readers = readers_of(target)
    campaign = Campaign(readers, folder, "atheris", seconds, _end_if_it_hangs)
    corpus = folder / "corpus"
    corpus.mkdir()
    for at, reader in enumerate(readers):
        for number, right in enumerate(reader.seeds):
            (corpus / f"{reader.name}-{number}").write_bytes(bytes((at,)) + right)

    def change(data: bytes, most: int, number: int) -> bytes:
        rng = random.Random(number)
        if rng.random() < 0.3:
            return bytes(atheris.Mutate(data, most))
        return changed_numbered(readers, data, rng)[:most]

    bound_memory()
    options = [f"-seed={seed + 1}", f"-max_len={MOST_BYTES + 1}", "-timeout=300", "-rss_limit_mb=0", "-verbosity=0"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], campaign.give_numbered, custom_mutator=change)
    atheris.Fuzz()


def _with_hypothesis(target: str, folder: Path, seconds: float, seed: int) -> None:
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded
    from hypothesis import strategies as st

    readers = readers_of(target)
    campaign = Campaign(readers, folder, "hypothesis", seconds, _end_if_it_hangs)
    bound_memory()
    while not campaign.is_over:

        @seeded(seed)
        @settings(
            max_examples=_AT_ONCE,
            deadline=None,
            database=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )
        @given(st.sampled_from(readers), st.integers(0, 1 << 62), st.binary(max_size=200))
        def attack(reader: Reader, number: int, any_bytes: bytes) -> None:
            if campaign.is_over:
                return
            rng = random.Random(number)
            data = rng.choice(reader.seeds)
            for _ in range(rng.randint(1, 3)):
                data = mutated(reader, data, rng)
            campaign.give(reader, any_bytes if rng.random() < 0.1 else data)

        attack()
        seed += 1
    campaign.write()


def main() -> int:
    """Fuzz one target."""
    target, given_folder, engine, seconds, seed = sys.argv[1:]
    folder = Path(given_folder)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    if engine == "auto":
        engine = "atheris" if importlib.util.find_spec("atheris") else "hypothesis"
    run = _with_atheris if engine == "atheris" else _with_hypothesis
    run(target, folder, float(seconds), int(seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
