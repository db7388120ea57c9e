"""Command lines: options that there are not, that contradict each other, addresses and folders that can't be."""

from __future__ import annotations

import os
import threading
import time

from tests.bench.bad_input.case import BASE_JOB, PLAN, TRAIN, Case, Place, command_case
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
HUGE_GRID = ("--sweep", "*.compute=1:2:100000", "--sweep", "link.*.*.rate=1e6:2e6:100000")
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
    found += _train() + _training() + _plan() + _others() + _folders()
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
    sim, what_if = ("sim", "{run}"), ("what-if", "{run}")
    return [
        command_case("sim of nothing", "sim", "none", code=2, says=("none",)),
        command_case("sim of a job", "sim", "job.toml", code=2, says=("job.toml", "plan")),
        command_case("sim of rows", "sim", "train.csv", code=2, says=("train.csv",)),
        command_case("sim of a model", "sim", "model", code=2, says=("model",)),
        command_case("sim --trace of nothing", *sim, "--trace", "none", code=2, says=("none",)),
        command_case("sim --seed x", *sim, "--seed", "x", code=2, says=("--seed",)),
        command_case("what-if nothing changes", *what_if, code=2, says=("--change",)),
        command_case("what-if of nothing", "what-if", "none", "--change", "*.compute=2", code=2, says=("none",)),
        command_case("what-if of an unknown node", *what_if, "--change", "pi.compute=2", code=5, says=("pi", "node-0")),
        command_case("what-if of an unknown key", *what_if, "--change", "node-0.speed=2", code=5, says=("speed",)),
        command_case("what-if without a value", *what_if, "--change", "node-0.compute", code=2, says=("=",)),
        command_case("what-if of compute 0", *what_if, "--change", "node-0.compute=0", code=5, says=("compute",)),
        command_case("what-if of compute nan", *what_if, "--change", "node-0.compute=nan", code=5, says=("compute",)),
        command_case(
            "what-if of a link to nowhere",
            *what_if,
            "--change",
            "link.node-0.pi.rate=1e6",
            code=5,
            says=("pi", "node-1"),
        ),
        command_case(
            "what-if of a link from nowhere",
            *what_if,
            "--change",
            "link.pi.node-0.rate=1e6",
            code=5,
            says=("pi", "node-1"),
        ),
        command_case(
            "what-if of a link to itself",
            *what_if,
            "--change",
            "link.node-0.node-0.rate=1e6",
            code=5,
            says=("link.node-0.node-0",),
        ),
        command_case("what-if of a negative rate", *what_if, "--change", "link.*.*.rate=-1", code=5, says=("rate",)),
        command_case(
            "what-if of a negative latency", *what_if, "--change", "link.*.*.latency=-1", code=5, says=("latency",)
        ),
        command_case("what-if --drop of an unknown node", *what_if, "--drop", "pi", code=5, says=("pi",)),
        command_case(
            "what-if --drop of the only node",
            *what_if,
            "--drop",
            "node-0",
            "--drop",
            "node-1",
            code=5,
            says=("--drop", "node-1"),
        ),
        command_case("what-if --add without --like", *what_if, "--add", "pi", code=2, says=("--like",)),
        command_case(
            "what-if --like of an unknown node",
            *what_if,
            "--add",
            "a",
            "--like",
            "b",
            "--replan",
            "job.toml",
            code=5,
            says=("--like", "node-0"),
        ),
        command_case(
            "what-if --csv without --sweep",
            *what_if,
            "--change",
            "*.compute=2",
            "--csv",
            "a.csv",
            code=2,
            says=("--csv", "--sweep"),
        ),
        command_case(
            "what-if of a huge sweep", *what_if, "--sweep", "*.compute=1:2:10000000000", code=2, says=("cells",)
        ),
        command_case("what-if of a huge grid", *what_if, *HUGE_GRID, code=2, says=("cells",)),
        command_case("what-if of an empty sweep", *what_if, "--sweep", "*.compute=", code=2, says=("compute",)),
        command_case("what-if of a sweep of words", *what_if, "--sweep", "*.compute=a,b", code=5, says=("compute",)),
        Case(
            name="what-if --sweep without joblib",
            arguments=(*what_if, "--sweep", "*.compute=1,2"),
            code=2,
            says=("'joblib'", "pip install"),
            without=("joblib",),
        ),
        command_case(
            "what-if --backend", *what_if, "--sweep", "*.compute=1,2", "--backend", "slurm", code=2, says=("slurm",)
        ),
        command_case(
            "what-if --plot as text", *what_if, "--sweep", "*.compute=1,2", "--plot", "a.txt", code=2, says=(".txt",)
        ),
        command_case("what-if --replan of nothing", *what_if, "--replan", "none.toml", code=5, says=("none.toml",)),
        command_case("eval of nothing", "eval", "none", "--data", "eval.csv", code=2, says=("none",)),
        command_case("eval of no rows", "eval", "{run}", "--data", "none.csv", code=5, says=("none.csv",)),
        command_case("eval of a folder of rows", "eval", "{run}", "--data", "model", code=5, says=("model",)),
        Case(
            name="eval of a new label",
            arguments=("eval", "{run}", "--data", "other.csv"),
            code=5,
            says=("neutral",),
            prepare=lambda place: place.write("other.csv", "text,label\nw1,neutral\n"),
        ),
        command_case("export of nothing", "export", "none", "--out", "given", code=2, says=("none",)),
        command_case("export of a model", "export", "model", "--out", "given", code=2, says=("model",)),
        command_case(
            "export --base-model",
            "export",
            "{run}",
            "--out",
            "given",
            "--base-model",
            "a/b/c",
            code=2,
            says=("a/b/c", "--base-model"),
        ),
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


def _unfinished(place: Place) -> None:
    place.write("taken", "a file")
    place.write("half/job.toml", BASE_JOB)
    for name in ("plan.json", "profile.json"):
        place.write(f"half/{name}", (place.run / name).read_bytes())


def _cut(name: str) -> Case:
    def prepare(place: Place) -> None:
        for path in place.run.rglob("*"):
            if path.is_file() and "logs" not in path.parts:
                place.write(f"copy/{path.relative_to(place.run)}", path.read_bytes())
        file = place.folder / "copy" / name
        content = file.read_bytes()
        end = content.index(b'"') + 2 if name == "job.toml" else len(content) // 2
        place.write(f"copy/{name}", content[:end])

    command: tuple[str, ...] = ("eval", "copy", "--data", "eval.csv")
    if name.endswith("json"):
        command = ("export", "copy", "--out", "given") if "adapter" in name else ("sim", "copy")
    code = 5 if name == "job.toml" else 7
    return Case(
        name=f"a run with half of {name}", arguments=command, code=code, says=(name.split("/")[-1],), prepare=prepare
    )


def _folders() -> list[Case]:
    sweep = ("what-if", "{run}", "--sweep", "*.compute=1,2")
    measure = ("measure", "job.toml", "--local", "1")
    halves = ("plan.json", "profile.json", "job.toml", "adapter/adapter.safetensors", "adapter/adapter_config.json")
    return [
        _folder("eval of an unfinished run", "half", 5, "eval", "half", "--data", "eval.csv"),
        _folder("export of an unfinished run", "half", 5, "export", "half", "--out", "given"),
        _folder("train --out is a file", "taken", 9, *_train_to("taken")),
        _folder("train --out below a file", "taken", 9, *_train_to("taken/run")),
        _folder("train --out where nobody writes", "/proc", 9, *_train_to("/proc/run")),
        _folder("train --out of a finished run", "--replace", 2, *_train_to("{run}")),
        _folder("export --out is a file", "taken", 2, "export", "{run}", "--out", "taken"),
        _folder("export --out where nobody writes", "/proc", 9, "export", "{run}", "--out", "/proc/given"),
        _folder("export --out is full", "model", 2, "export", "{run}", "--out", "model"),
        _folder("measure --save where nobody writes", "/proc", 9, *measure, "--save", "/proc/p.json"),
        _folder("measure --save is a folder", "model", 9, *measure, "--save", "model"),
        _folder("sim --out where nobody writes", "/proc", 9, "sim", "{run}", "--out", "/proc/sim"),
        _folder("sim --out is a file", "taken", 9, "sim", "{run}", "--out", "taken"),
        _folder("what-if --csv where nobody writes", "/proc", 9, *sweep, "--csv", "/proc/a.csv"),
        _folder("what-if --csv is a folder", "model", 9, *sweep, "--csv", "model"),
        _folder("what-if --plot where nobody writes", "/proc", 9, *sweep, "--plot", "/proc/a.svg"),
        *(_cut(name) for name in halves),
    ]


def _train_to(folder: str) -> tuple[str, ...]:
    return ("train", "job.toml", "--local", "1", "--out", folder)


def _folder(name: str, says: str, code: int, *arguments: str) -> Case:
    """A command and the folders ``half`` (a run that did not end) and ``taken`` (a file)."""
    return Case(name=name, arguments=arguments, code=code, says=(says,), prepare=_unfinished)
