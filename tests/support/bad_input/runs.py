"""What is asked of a finished run: predictions, what-ifs, evaluation, export."""

from __future__ import annotations

from tests.support.bad_input.case import Case, command_case


def cases() -> list[Case]:
    """All of them."""
    return [
        command_case("sim of nothing", "sim none", 2, "none"),
        command_case("sim of a job", "sim job.toml", 2, "job.toml", "plan"),
        command_case("sim of rows", "sim train.csv", 2, "train.csv"),
        command_case("sim of a model", "sim model", 2, "model"),
        command_case("sim --trace of nothing", "sim {run} --trace none", 2, "none"),
        command_case("sim --seed x", "sim {run} --seed x", 2, "--seed"),
        command_case("what-if nothing changes", "what-if {run}", 2, "--change"),
        command_case("what-if of nothing", "what-if none --change *.compute=2", 2, "none"),
        command_case("what-if of an unknown node", "what-if {run} --change pi.compute=2", 5, "pi", "node-0"),
        command_case("what-if of an unknown key", "what-if {run} --change node-0.speed=2", 5, "speed"),
        command_case("what-if without a value", "what-if {run} --change node-0.compute", 2, "="),
        command_case("what-if of compute 0", "what-if {run} --change node-0.compute=0", 5, "compute"),
        command_case("what-if of compute nan", "what-if {run} --change node-0.compute=nan", 5, "compute"),
        command_case(
            "what-if of a link to nowhere", "what-if {run} --change link.node-0.pi.rate=1e6", 5, "pi", "node-1"
        ),
        command_case(
            "what-if of a link from nowhere", "what-if {run} --change link.pi.node-0.rate=1e6", 5, "pi", "node-1"
        ),
        command_case(
            "what-if of a link to itself", "what-if {run} --change link.node-0.node-0.rate=1e6", 5, "link.node-0.node-0"
        ),
        command_case("what-if of a negative rate", "what-if {run} --change link.*.*.rate=-1", 5, "rate"),
        command_case("what-if of a negative latency", "what-if {run} --change link.*.*.latency=-1", 5, "latency"),
        command_case("what-if --drop of an unknown node", "what-if {run} --drop pi", 5, "pi"),
        command_case(
            "what-if --drop of the only node", "what-if {run} --drop node-0 --drop node-1", 5, "--drop", "node-"
        ),
        command_case("what-if --add without --like", "what-if {run} --add pi", 2, "--like"),
        command_case(
            "what-if --like of an unknown node",
            "what-if {run} --add a --like b --replan job.toml",
            5,
            "--like",
            "node-0",
        ),
        command_case(
            "what-if --csv without --sweep", "what-if {run} --change *.compute=2 --csv a.csv", 2, "--csv", "--sweep"
        ),
        command_case("what-if of a huge sweep", "what-if {run} --sweep *.compute=1:2:10000000000", 2, "cells"),
        command_case(
            "what-if of a huge grid",
            "what-if {run} --sweep *.compute=1:2:100000 --sweep link.*.*.rate=1e6:2e6:100000",
            2,
            "cells",
        ),
        command_case("what-if of an empty sweep", "what-if {run} --sweep *.compute=", 2, "compute"),
        command_case("what-if of a sweep of words", "what-if {run} --sweep *.compute=a,b", 5, "compute"),
        Case(
            name="what-if --sweep without joblib",
            arguments=("what-if", "{run}", "--sweep", "*.compute=1,2"),
            code=2,
            says=("'joblib'", "pip install"),
            without=("joblib",),
        ),
        command_case("what-if --backend", "what-if {run} --sweep *.compute=1,2 --backend slurm", 2, "slurm"),
        command_case("what-if --plot as text", "what-if {run} --sweep *.compute=1,2 --plot a.txt", 2, ".txt"),
        command_case("what-if --replan of nothing", "what-if {run} --replan none.toml", 5, "none.toml"),
        command_case("eval of nothing", "eval none --data eval.csv", 2, "none"),
        command_case("eval of no rows", "eval {run} --data none.csv", 5, "none.csv"),
        command_case("eval of a folder of rows", "eval {run} --data model", 5, "model"),
        Case(
            name="eval of a new label",
            arguments=("eval", "{run}", "--data", "other.csv"),
            code=5,
            says=("neutral",),
            prepare=lambda place: place.write("other.csv", "text,label\nw1,neutral\n"),
        ),
        command_case("export of nothing", "export none --out given", 2, "none"),
        command_case("export of a model", "export model --out given", 2, "model"),
        command_case("export --base-model", "export {run} --out given --base-model a/b/c", 2, "a/b/c", "--base-model"),
    ]
