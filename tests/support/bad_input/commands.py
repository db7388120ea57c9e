"""Command lines: options that contradict each other or do not exist, bad addresses, runs that do not end well."""

from __future__ import annotations

import os
import threading
import time

from tests.support.bad_input.case import PLAN, TRAIN, Case, Place, command_case
from tests.support.processes import agents_below

COMMANDS = (
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
)
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
JOB_ARGUMENTS = ("train", "job.toml", "--out", "out")


def cases() -> list[Case]:
    """All of them."""
    found = [
        command_case(f"{name}: an unknown option", name, "--no-such", code=2, says=("no such option", "--no-such"))
        for name in COMMANDS
    ]
    found += [
        command_case(
            f"nodes: address {address!r}",
            "nodes",
            "--coordinator",
            address,
            code=2,
            says=("--coordinator", "host:port"),
        )
        for address in NO_ADDRESSES
    ]
    found += [
        command_case(f"{name}: no arguments", name, code=2, says=("missing argument",))
        for name in ("eval", "export", "plan", "sim", "train", "what-if")
    ]
    found += _train() + _training() + _plan() + _others()
    return found


def _train() -> list[Case]:
    return [
        command_case("an unknown command", "trian", "job.toml", code=2, says=("no such command", "train")),
        command_case("train without --out", "train", "job.toml", "--local", "1", code=2, says=("--out",)),
        command_case("train nowhere", *JOB_ARGUMENTS, code=2, says=("--local",)),
        command_case(
            "train here and there",
            *JOB_ARGUMENTS,
            "--local",
            "1",
            "--coordinator",
            "127.0.0.1:9",
            code=2,
            says=("--local", "--coordinator"),
        ),
        command_case("train --local -1", *JOB_ARGUMENTS, "--local", "-1", code=2, says=("--local",)),
        command_case("train --local x", *JOB_ARGUMENTS, "--local", "x", code=2, says=("--local",)),
        command_case("train --local 100000", *JOB_ARGUMENTS, "--local", "100000", code=6, says=("--local",)),
        command_case("train --join-s -1", *JOB_ARGUMENTS, "--local", "1", "--join-s", "-1", code=2, says=("--join-s",)),
        command_case(
            "train --replace --resume",
            *JOB_ARGUMENTS,
            "--local",
            "1",
            "--replace",
            "--resume",
            code=2,
            says=("--replace", "--resume"),
        ),
        command_case(
            "train --set without =", *JOB_ARGUMENTS, "--local", "1", "--set", "train.seed", code=2, says=("=",)
        ),
        command_case(
            "train --set of no section", *JOB_ARGUMENTS, "--local", "1", "--set", "seed=1", code=2, says=("seed",)
        ),
        command_case("train --resume of nothing", *JOB_ARGUMENTS, "--local", "1", "--resume", code=2, says=("out",)),
        command_case(
            "train --profile of nothing",
            *JOB_ARGUMENTS,
            "--local",
            "1",
            "--profile",
            "no.json",
            code=5,
            says=("no.json", "ringtune measure"),
        ),
        command_case(
            "train --profile of rows",
            *JOB_ARGUMENTS,
            "--local",
            "1",
            "--profile",
            "train.csv",
            code=5,
            says=("train.csv", "ringtune measure"),
        ),
        command_case(
            "train at a node", *JOB_ARGUMENTS, "--coordinator", "{node}", code=3, says=("node", "coordinator")
        ),
        command_case("nodes beyond here", "nodes", "--coordinator", "192.0.2.1:7070", code=2, says=("--insecure",)),
        command_case("nodes where nobody is", "nodes", "--coordinator", "127.0.0.1:9", code=3, says=("127.0.0.1:9",)),
        command_case("nodes at a node", "nodes", "--coordinator", "{node}", code=3, says=("node", "coordinator")),
        command_case(
            "train where nobody is",
            *JOB_ARGUMENTS,
            "--coordinator",
            "127.0.0.1:9",
            code=3,
            says=("127.0.0.1:9", "ringtune coordinator"),
        ),
        command_case(
            "train without nodes",
            *JOB_ARGUMENTS,
            "--coordinator",
            "{coordinator}",
            "--nodes",
            "3",
            "--join-s",
            "0",
            code=4,
            says=("3 nodes", "0 have joined"),
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
        command_case("plan --assume -2", "plan", "job.toml", "--assume", "-2", code=2, says=("--assume",)),
        command_case("plan --assume 10^7", "plan", "job.toml", "--assume", "10000000", code=2, says=("--assume",)),
        command_case("plan --memory much", *PLAN, "--memory", "much", code=2, says=("much",)),
        command_case("plan --memory -1", *PLAN, "--memory", "-1", code=2, says=("'-1'", "size")),
        command_case("plan --memory 1KiB", *PLAN, "--memory", "1KiB", code=6, says=("KiB",)),
        command_case("plan --microbatches 0", *PLAN, "--microbatches", "0", code=2, says=("microbatches",)),
        command_case("plan --microbatches x", *PLAN, "--microbatches", "x", code=2, says=("microbatches",)),
        command_case("plan --wire float8", *PLAN, "--wire", "float8", code=2, says=("float8",)),
        command_case(
            "plan --profile and --assume",
            *PLAN,
            "--profile",
            "{run}/profile.json",
            code=2,
            says=("--assume", "profile"),
        ),
    ]


def _others() -> list[Case]:
    return [
        command_case("measure nowhere", "measure", "job.toml", "--save", "p.json", code=2, says=("--local",)),
        command_case(
            "measure --local 0", "measure", "job.toml", "--save", "p.json", "--local", "0", code=2, says=("--local",)
        ),
        command_case(
            "coordinator at another machine", "coordinator", "--bind", "0.0.0.0:0", code=2, says=("--insecure",)
        ),
        command_case("coordinator at a bad address", "coordinator", "--bind", "here", code=2, says=("--bind", "here")),
        command_case("coordinator at a taken port", "coordinator", "--bind", "{coordinator}", code=3, says=("port",)),
        command_case("coordinator --lease 0", "coordinator", "--lease", "0", code=2, says=("--lease", "0.1")),
        command_case("node of another machine", "node", "--coordinator", "10.0.0.1:7000", code=2, says=("--insecure",)),
        command_case(
            "node with a bad name", "node", "--coordinator", "{coordinator}", "--name", "A b", code=2, says=("A b",)
        ),
        command_case(
            "node with a bad share",
            "node",
            "--coordinator",
            "{coordinator}",
            "--share",
            "4/4",
            code=2,
            says=("--share", "4/4"),
        ),
        command_case(
            "node with bad memory",
            "node",
            "--coordinator",
            "{coordinator}",
            "--memory",
            "x",
            code=2,
            says=("'x'", "size"),
        ),
        command_case(
            "node with a bad device",
            "node",
            "--coordinator",
            "{coordinator}",
            "--device",
            "tpu",
            code=2,
            says=("--device", "tpu"),
        ),
        Case(
            name="node without a coordinator",
            arguments=("node", "--coordinator", "127.0.0.1:9", "--join-s", "0"),
            code=3,
            says=("127.0.0.1:9",),
            is_process=True,
        ),
        command_case(
            "node with no rows",
            "node",
            "--coordinator",
            "{coordinator}",
            "--data",
            "none.csv",
            code=5,
            says=("--data", "none.csv"),
        ),
        command_case(
            "node with no model",
            "node",
            "--coordinator",
            "{coordinator}",
            "--model",
            "none",
            code=5,
            says=("--model", "none"),
        ),
        command_case(
            "node with threads",
            "node",
            "--coordinator",
            "{coordinator}",
            "--threads",
            "-1",
            code=2,
            says=("--threads", "-1"),
        ),
    ]
