"""What is asked of a finished run: predictions, what-ifs, evaluation, export."""

from __future__ import annotations

from tests.support.bad_input.case import Case, command_case


def cases() -> list[Case]:
    """All of them."""
    return [
        command_case("sim none", 2, "none"),
        command_case("sim job.toml", 2, "job.toml", "plan"),
        command_case("sim train.csv", 2, "train.csv"),
        command_case("sim model", 2, "model"),
        command_case("sim {run} --trace none", 2, "none"),
        command_case("sim {run} --seed x", 2, "--seed"),
        command_case("what-if {run}", 2, "--change"),
        command_case("what-if none --change *.compute=2", 2, "none"),
        command_case("what-if {run} --change pi.compute=2", 5, "pi", "node-0"),
        command_case("what-if {run} --change node-0.speed=2", 5, "speed"),
        command_case("what-if {run} --change node-0.compute", 2, "="),
        command_case("what-if {run} --change node-0.compute=0", 5, "compute"),
        command_case("what-if {run} --change node-0.compute=nan", 5, "compute"),
        command_case("what-if {run} --change link.node-0.pi.rate=1e6", 5, "pi", "node-1"),
        command_case("what-if {run} --change link.pi.node-0.rate=1e6", 5, "pi", "node-1"),
        command_case("what-if {run} --change link.node-0.node-0.rate=1e6", 5, "link.node-0.node-0"),
        command_case("what-if {run} --change link.*.*.rate=-1", 5, "rate"),
        command_case("what-if {run} --change link.*.*.latency=-1", 5, "latency"),
        command_case("what-if {run} --drop pi", 5, "pi"),
        command_case("what-if {run} --drop node-0 --drop node-1", 5, "--drop", "node-"),
        command_case("what-if {run} --add pi", 2, "--like"),
        command_case("what-if {run} --add a --like b --replan job.toml", 5, "--like", "node-0"),
        command_case("what-if {run} --change *.compute=2 --csv a.csv", 2, "--csv", "--sweep"),
        command_case("what-if {run} --sweep *.compute=1:2:10000000000", 2, "cells"),
        command_case("what-if {run} --sweep *.compute=1:2:100000 --sweep link.*.*.rate=1e6:2e6:100000", 2, "cells"),
        command_case("what-if {run} --sweep *.compute=", 2, "compute"),
        command_case("what-if {run} --sweep *.compute=a,b", 5, "compute"),
        Case(
            name="what-if --sweep without joblib",
            arguments=("what-if", "{run}", "--sweep", "*.compute=1,2"),
            code=2,
            says=("'joblib'", "pip install"),
            without=("joblib",),
        ),
        command_case("what-if {run} --sweep *.compute=1,2 --backend slurm", 2, "slurm"),
        command_case("what-if {run} --sweep *.compute=1,2 --plot a.txt", 2, ".txt"),
        command_case("what-if {run} --replan none.toml", 5, "none.toml"),
        command_case("eval none --data eval.csv", 2, "none"),
        command_case("eval {run} --data none.csv", 5, "none.csv"),
        command_case("eval {run} --data model", 5, "model"),
        Case(
            name="eval of a new label",
            arguments=("eval", "{run}", "--data", "other.csv"),
            code=5,
            says=("neutral",),
            prepare=lambda place: place.write("other.csv", "text,label\nw1,neutral\n"),
        ),
        command_case("export none --out given", 2, "none"),
        command_case("export model --out given", 2, "model"),
        command_case("export {run} --out given --base-model a/b/c", 2, "a/b/c", "--base-model"),
    ]
