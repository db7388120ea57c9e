"""Command lines: options that contradict each other or do not exist, bad addresses, runs that do not end well."""

from __future__ import annotations

import os
import threading
import time

from tests.support.bad_input.case import TRAIN, Case, Place, command_case
from tests.support.processes import agents_below

COMMANDS = [
    "coordinator",
    "eval",
    "export",
    "measure",
    "node",
    "nodes",
    "plan",
    "sim",
    "status",
    "train",
    "what-if",
    "doctor",
]
NO_ADDRESSES = (
    "http://127.0.0.1:7070",
    "127.0.0.1",
    "127.0.0.1:",
    "127.0.0.1:x",
    "127.0.0.1:99999",
    "127.0.0.1:-1",
    ":7070",
    "",
    "no such host:7070",
)
DIVERGING = tuple(
    word
    for setting in ("train.learning_rate=1000", "train.weight_decay=10", "train.rounds=20")
    for word in ("--set", setting)
)
KILL_S = 30.0


def cases() -> list[Case]:
    """All of them."""
    found = [command_case(f"{name} --no-such", 2, "no such option", "--no-such") for name in COMMANDS]
    found += [
        command_case(f"nodes --coordinator {address!r}", 2, "--coordinator", "host:port") for address in NO_ADDRESSES
    ]
    found += [
        command_case(name, 2, "missing argument") for name in ("eval", "export", "plan", "sim", "train", "what-if")
    ]
    found += _train() + _training() + _plan() + _others()
    return found


def _train() -> list[Case]:
    return [
        command_case("trian job.toml", 2, "no such command", "train"),
        command_case("train job.toml --local 1", 2, "--out"),
        command_case("train job.toml --out out", 2, "--local"),
        command_case("train job.toml --out out --local 1 --coordinator 127.0.0.1:9", 2, "--local", "--coordinator"),
        command_case("train job.toml --out out --local -1", 2, "--local"),
        command_case("train job.toml --out out --local x", 2, "--local"),
        command_case("train job.toml --out out --local 100000", 6, "--local"),
        command_case("train job.toml --out out --local 1 --join-s -1", 2, "--join-s"),
        command_case("train job.toml --out out --local 1 --replace --resume", 2, "--replace", "--resume"),
        command_case("train job.toml --out out --local 1 --set train.seed", 2, "="),
        command_case("train job.toml --out out --local 1 --set seed=1", 2, "seed"),
        command_case("train job.toml --out out --local 1 --resume", 2, "out"),
        command_case("train job.toml --out out --local 1 --profile no.json", 5, "no.json", "ringtune measure"),
        command_case("train job.toml --out out --local 1 --profile train.csv", 5, "train.csv", "ringtune measure"),
        command_case("train job.toml --out out --coordinator {node}", 3, "node", "coordinator"),
        command_case("nodes --coordinator 192.0.2.1:7070", 2, "--insecure"),
        command_case("nodes --coordinator 127.0.0.1:9", 3, "127.0.0.1:9"),
        command_case("nodes --coordinator {node}", 3, "node", "coordinator"),
        command_case("train job.toml --out out --coordinator 127.0.0.1:9", 3, "127.0.0.1:9", "ringtune coordinator"),
        command_case(
            "train job.toml --out out --coordinator {coordinator} --nodes 3 --join-s 0", 4, "3 nodes", "0 have joined"
        ),
    ]


def _training() -> list[Case]:
    """Runs that begin well, and do not end so."""
    return [
        Case(
            name="a training that diverges",
            arguments=(*TRAIN, *DIVERGING),
            code=1,
            says=("diverged at step", "train.learning_rate"),
            leaves=("out",),
        ),
        Case(
            name="a node that is killed",
            arguments=(*TRAIN, "--set", "train.rounds=10000"),
            code=4,
            says=("node-0", "sigkill", "--resume"),
            prepare=_kill_soon,
            leaves=("out",),
        ),
    ]


def _kill_soon(place: Place) -> None:
    """Kill the node of a run of this process as soon as the run has a step."""

    def kill() -> None:
        deadline_s, metrics = time.monotonic() + KILL_S, place.folder / "out" / "metrics.jsonl"
        while not (metrics.is_file() and metrics.stat().st_size) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        agents_below(os.getpid())["node-0"].kill()

    threading.Thread(target=kill, name="kill-soon").start()


def _plan() -> list[Case]:
    return [
        command_case("plan job.toml --assume -2", 2, "--assume"),
        command_case("plan job.toml --assume 10000000", 2, "--assume"),
        command_case("plan job.toml --assume 2 --memory much", 2, "much"),
        command_case("plan job.toml --assume 2 --memory -1", 2, "'-1'", "size"),
        command_case("plan job.toml --assume 2 --memory 1KiB", 6, "KiB"),
        command_case("plan job.toml --assume 2 --microbatches 0", 2, "microbatches"),
        command_case("plan job.toml --assume 2 --microbatches x", 2, "microbatches"),
        command_case("plan job.toml --assume 2 --wire float8", 2, "float8"),
        command_case("plan job.toml --assume 2 --profile {run}/profile.json", 2, "--assume", "profile"),
    ]


def _others() -> list[Case]:
    return [
        command_case("measure job.toml --save p.json", 2, "--local"),
        command_case("measure job.toml --save p.json --local 0", 2, "--local"),
        command_case("coordinator --bind 0.0.0.0:0", 2, "--insecure"),
        command_case("coordinator --bind here", 2, "--bind", "here"),
        command_case("coordinator --bind {coordinator}", 3, "port"),
        command_case("coordinator --lease 0", 2, "--lease", "0.1"),
        command_case("node --coordinator 10.0.0.1:7000", 2, "--insecure"),
        command_case("node --coordinator {coordinator} --name 'A b'", 2, "A b"),
        command_case("node --coordinator {coordinator} --share 4/4", 2, "--share", "4/4"),
        command_case("node --coordinator {coordinator} --memory x", 2, "'x'", "size"),
        command_case("node --coordinator {coordinator} --device tpu", 2, "--device", "tpu"),
        Case(
            name="node without a coordinator",
            arguments=("node", "--coordinator", "127.0.0.1:9", "--join-s", "0"),
            code=3,
            says=("127.0.0.1:9",),
            is_process=True,
        ),
        command_case("node --coordinator {coordinator} --data none.csv", 5, "--data", "none.csv"),
        command_case("node --coordinator {coordinator} --model none", 5, "--model", "none"),
        command_case("node --coordinator {coordinator} --threads -1", 2, "--threads", "-1"),
    ]
