"""What is asked of a finished run: predictions, what-ifs, evaluation, export."""

from __future__ import annotations

from tests.support.bad_input.case import Case, command_case

HUGE_GRID = ("--sweep", "*.compute=1:2:100000", "--sweep", "link.*.*.rate=1e6:2e6:100000")


def cases() -> list[Case]:
    """All of them."""
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
    ]
