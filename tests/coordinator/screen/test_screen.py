"""Texts for people and machines: progress of a run, tables, what a plan trains and how it is explained."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coordinator.planner.explain import explain
from coordinator.planner.make_plan import make_plan as make_plan_make_plan
from coordinator.run.run_text import rows_lines, training_facts
from coordinator.screen.live_tables import INTERVAL_S, LiveProgress, watch_nodes
from coordinator.screen.plan_text import plan_text, table_text
from coordinator.screen.progress import JsonProgress, PlainProgress, Progress, WaitNotice, helper_lines, training_lines
from coordinator.screen.tables import class_lines
from ringtune.costs.memory_terms import PART_WORDS, PARTS, MemoryEstimate
from ringtune.costs.profile import PackedRows
from ringtune.errors import InterruptedRunError
from ringtune.run_control.evaluation import class_figures
from ringtune.schedule.course import Course, HelperSettings
from ringtune.schedule.methods import Hift
from ringtune.schedule.operation_tables import BlockCapacity, Choice
from ringtune.schedule.plan import Plan
from ringtune.schedule.units import Units, units_text
from ringtune.techniques.base import Term
from ringtune.techniques.full_parameters import groups_lines
from ringtune.techniques.offload import helped, report
from ringtune.techniques.operations import choice_lines, operations_lines
from ringtune.v1 import control_pb2
from tests.support.fake_agents import NO_TIMES, facts, job
from tests.support.moves import moving, slices_of
from tests.support.plans import changed, make_plan

PLAN = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"])
EVALUATION = {"step": 8, "count": 10, "loss": 0.25, "accuracy": 0.9}
REPORT: dict[str, Any] = {
    "steps": 8,
    "wall_s": 2.5,
    "steps_s": 1.5,
    "predicted_steps_s": 1.2,
    "phases_s": {"planning": 0.4, "training": 2.0},
    "nodes": {"a": {"busy_s": 1.0, "peak_rss_bytes": 2**20, "sent_bytes": 10}},
    "eval": EVALUATION,
}


def step(number: int, *, loss: float | None = 0.5) -> dict[str, Any]:
    """Progress of one step."""
    return {
        "kind": "train",
        "seq": number,
        "step": number,
        "num_steps": 8,
        "round": 1,
        "initiator": "a",
        "depth": 2,
        "loss": loss,
    }


OPERATIONS = {"kind": "operations", "step": 6, "digest": "ab", "full": 12, "forward_only": 3, "shortcut": 5}


def show(progress: Progress) -> None:
    """A whole run."""
    with progress:
        progress.state("training")
        progress.plan(PLAN, {"a": 2**20, "b": 2**20})
        for number in range(1, 9):
            progress.step(step(number))
        progress.step({**step(8, loss=0.0012), "kind": "evaluate"})
        for line in ({"kind": "unfreeze", "step": 6, "depth": 3}, OPERATIONS, {"kind": "evaluation", **EVALUATION}):
            progress.item(line)
        progress.report(REPORT)
        progress.note("done")


def test_json_progress_is_an_object_a_line() -> None:
    """Every line parses, says what it is, and no step is left out."""
    stream = io.StringIO()
    show(JsonProgress(stream))
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [event["event"] for event in events] == [
        "state",
        "plan",
        *["step"] * 9,
        "unfreeze",
        "operations",
        "evaluation",
        "report",
        "note",
    ]
    assert events[-5] == {"event": "unfreeze", "step": 6, "depth": 3}
    assert events[-4] == {"event": "operations", **{key: OPERATIONS[key] for key in OPERATIONS if key != "kind"}}
    assert events[1]["slices"] == {"a": [0, 2], "b": [2, 4]}
    assert events[-2]["report"]["wall_s"] == 2.5


def test_plain_progress_is_terse() -> None:
    """Where output is no terminal, the first and the last step are shown, and some between."""
    stream = io.StringIO()
    show(PlainProgress(stream))
    lines = stream.getvalue().splitlines()
    assert "  a  blocks [0, 2), owns 10 rows, needs 1.0 MiB" in lines
    assert [line for line in lines if line.startswith("step")][-1] == "step 8/8: round 1, a, depth 2, loss 0.5000"
    assert "operations chosen after step 6: 60 % full, 15 % forward-only, 25 % skipped" in lines
    assert "evaluation after 8 steps: accuracy 0.9000, loss 0.2500 on 10 rows" in lines
    at = lines.index("8 steps in 1.5 s (predicted 1.2 s)")
    whole = "whole run with joining, measuring and collecting 2.5 s"
    assert lines[at + 1] == f"training with evaluations and checkpoints 2.0 s, {whole}"
    assert "0.0012" not in stream.getvalue(), "the loss of one evaluation batch is no loss of the run"
    assert "\x1b" not in stream.getvalue()


def test_plain_progress_shows_no_step_that_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of all parameters that goes back to a checkpoint trains its last steps again."""
    monkeypatch.setattr("coordinator.screen.progress._PLAIN_INTERVAL_S", 0.0)
    stream = io.StringIO()
    shown = PlainProgress(stream)
    for number in (1, 2, 3, 2, 3, 4):
        shown.step(step(number))
    assert [line.partition(":")[0] for line in stream.getvalue().splitlines()] == [f"step {n}/8" for n in (1, 2, 3, 4)]


def test_plain_progress_names_the_units_of_a_group_and_a_diverged_loss() -> None:
    """What a step of HiFT trained is no depth: of embedding and head it would be 0."""
    stream = io.StringIO()
    PlainProgress(stream).step({**step(8), "depth": 0, "trains": "embedding"})
    assert stream.getvalue() == "step 8/8: round 1, a, trains embedding, loss 0.5000\n"
    # A loss that is no number does not end the program
    stream = io.StringIO()
    progress = PlainProgress(stream)
    progress.step(step(8, loss=None))
    progress.item({"kind": "evaluation", **EVALUATION, "loss": None})
    assert "loss -" in stream.getvalue()


def test_live_progress_ends_with_the_table_then_the_result() -> None:
    """What is below the last table is the result, and no other loss than the last step's is beside the bar."""
    stream = io.StringIO()
    progress = LiveProgress(Console(file=stream, force_terminal=True, width=120))
    with progress:
        progress.plan(PLAN, {})
        progress.step(step(8, loss=0.25))
        progress.step(step(7, loss=0.75))
        progress.step({**step(8, loss=0.0012), "kind": "evaluate"})
        progress.state("collecting")
        progress.report(REPORT)
        progress.note("the run's files are in out")
    text = stream.getvalue()
    result = text.index("8 steps in 1.5 s")
    assert "8/8" not in text[result:] and "[2, 4)" not in text[result:]
    assert text.rstrip().endswith("the run's files are in out")
    last = text[:result].rpartition("done")[2]
    assert "8/8" in last and "loss 0.2500" in last
    assert "0.0012" not in text and "0.7500" not in last


WAIT_S = 30.0


class Screen(io.StringIO):
    """A stream that knows when something was written, and may be a terminal."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal
        self.written = threading.Event()

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._is_terminal

    def write(self, text: str) -> int:
        """Take a text, and tell."""
        count = super().write(text)
        self.written.set()
        return count


def test_waiting_says_each_thing_once_and_leaves_a_terminal_as_it_was() -> None:
    """A line for each thing that takes long; the result of the work is not touched."""
    screen = Screen(is_terminal=False)
    with WaitNotice("reading train.csv", stream=screen, quiet_s=0.0) as waiting:
        assert screen.written.wait(WAIT_S)
        screen.written.clear()
        waiting.state("joining")
        assert screen.written.wait(WAIT_S)
    assert screen.getvalue() == "reading train.csv ...\nwaiting for nodes to join ...\n"
    # The line with the seconds is written over with blanks in the end
    screen = Screen(is_terminal=True)
    with WaitNotice("planning", stream=screen, quiet_s=0.0):
        assert screen.written.wait(WAIT_S)
    first, *_, blank, end = screen.getvalue().split("\r")[1:]
    assert first.startswith("planning ... ") and blank.isspace() and end == ""
    # Nothing is written before the quiet time is over, whatever ends it
    screen = Screen(is_terminal=True)
    with pytest.raises(ValueError, match="wrong"), WaitNotice("planning", stream=screen, quiet_s=WAIT_S):
        raise ValueError("wrong")
    assert screen.getvalue() == ""


def test_class_text_shows_figures_and_counts() -> None:
    """Titles name the predicted classes; a class that nobody has is no line."""
    found = {**class_figures(((3, 1, 0), (0, 4, 0), (0, 0, 0)), ("neg", "pos", "odd")), "count": 8}
    assert class_lines({**found, "count": 10})[-1].startswith("classes are counted on 8 of 10 rows")
    assert class_lines(found) == [
        "  class  rows  precision  recall      F1  as neg  as pos  as odd",
        "  neg       4     1.0000  0.7500  0.8571       3       1       0",
        "  pos       4     0.8000  1.0000  0.8889       0       4       0",
        "Matthews correlation of true and predicted classes: 0.7746",
    ]
    assert class_lines({"accuracy": 0.5}) == []


def test_class_text_shows_the_worst_of_many_classes() -> None:
    """Thirty lines at most, without counts, and a word about the others."""
    labels = [f"c{index}" for index in range(40)]
    table = tuple(tuple(index if index == other else 1 for other in range(40)) for index in range(40))
    lines = class_lines({**class_figures(table, labels), "count": sum(map(sum, table))})
    assert len(lines) == 33 and lines[0].endswith("F1") and lines[1].split()[0] == "c0"
    assert lines[-2] == "and 10 classes with a higher F1; report.json has them"


def entry(state: str) -> control_pb2.NodeEntry:
    """A member."""
    return control_pb2.NodeEntry(joined=control_pb2.JoinRequest(node="pi"), state=state)


def _sleeps(monkeypatch: pytest.MonkeyPatch, times: int) -> list[float]:
    """Let the watch sleep without waiting, and Ctrl-C come in the last sleep; return the seconds."""
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == times:
            raise KeyboardInterrupt

    monkeypatch.setattr("coordinator.screen.live_tables.time.sleep", sleep)
    return slept


def test_node_watch_draws_the_table_again(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest state stands there in the end, and between two looks it sleeps."""
    states, text, slept = iter(["idle", "running"]), io.StringIO(), _sleeps(monkeypatch, 2)
    console = Console(file=text, width=200, force_terminal=False)
    with pytest.raises(InterruptedRunError):
        watch_nodes(lambda: [entry(next(states))], "c:1", as_json=False, console=console)
    assert "running" in text.getvalue().splitlines()[-1]
    assert slept == [INTERVAL_S, INTERVAL_S]
    assert capsys.readouterr().out == ""


def test_live_phase_is_text() -> None:
    """Brackets in it are no markup, an unknown one of which would end the display; a terminal obeys nothing in it."""
    text = io.StringIO()
    with LiveProgress(Console(file=text, width=200, force_terminal=True)) as progress:
        progress.state("waiting [/soon] \x1b]0;owned\x07")
        shown = io.StringIO()
        Console(file=shown, width=200).print(progress._render())
    assert r"waiting [/soon] \x1b]0;owned\x07" in shown.getvalue() and "\x1b]0;" not in text.getvalue()


def test_node_watch_leaves_out_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: a table is not cut in its middle as a message is."""
    text, _ = io.StringIO(), _sleeps(monkeypatch, 1)
    with pytest.raises(InterruptedRunError):
        watch_nodes(lambda: [entry("idle")] * 90, "c:1", as_json=False, console=Console(file=text, width=200))
    assert text.getvalue().count("idle") == 90


def test_node_watch_prints_json_until_ctrl_c(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line for each member each time."""
    states = iter(["idle", "lost"])
    _sleeps(monkeypatch, 2)
    with pytest.raises(InterruptedRunError):
        watch_nodes(lambda: [entry(next(states))], "c:1", as_json=True)
    assert [json.loads(line)["state"] for line in capsys.readouterr().out.splitlines()] == ["idle", "lost"]


def course(*rows: int, **values: object) -> Course:
    """A course of owners with so many rows, in turns of two steps."""
    names = [f"node-{index}" for index in range(len(rows))]
    plan = make_plan([("node-0", 0, 4)], names, local_iterations=2, batch_size=4)
    owners = tuple(replace(owner, train_rows=own) for owner, own in zip(plan.course.owners, rows, strict=True))
    return changed(plan, **{"owners": owners, **values}).course


def test_packed_rows_are_told_with_their_sequences() -> None:
    """Rows of a file, sequences of a batch, and the share of both that is no padding."""
    packed = changed(make_plan([("node-0", 0, 4)], ["node-0"], batch_size=4, num_steps=12), packed=True)
    assert training_lines(course(10, 21, num_steps=12, packed=True))[:2] == [
        "trains 12 steps in 3 rounds (turns of 2 steps, equal): 31 of 31 sequences (100%), 1.55 epochs",
        "  node-0  6 steps of 4 sequences: 10 of its 10 sequences, each 2 to 4 times",
    ]
    head, *lines = plan_text(packed, {}, measured=False)
    assert "12 steps of 4 sequences in" in head
    assert any(re.match(r"node +blocks +sequences", line) for line in lines)
    nodes = [
        facts(f"node-{index}", rows=count, packed=PackedRows(rows=rows, tokens=tokens, row_tokens=width))
        for index, (count, rows, tokens, width) in enumerate([(10, 70, 4800, 160), (21, 142, 10120, 180)])
    ]
    assert rows_lines([*nodes, facts("host", rows=0)], 512) == [
        "212 rows in 31 sequences of 512 tokens, 94% full (unpacked 41%)"
    ]


def test_training_lines_name_rows_that_are_used_more_often_than_others() -> None:
    """Equal turns of owners with unequal rows: how unequal, and the key that mends it; not with that key."""
    equal, by_rows = (training_lines(course(120, 40, num_steps=40, turns=turns)) for turns in ("equal", "rows"))
    assert [line for line in equal if "as often" in line] == [
        "note: rows of node-1 are used 3.0 times as often as those of node-0, because every owner has as many steps; "
        "train.turns = 'rows' gives steps by rows"
    ]
    assert not [line for line in by_rows if "as often" in line]
    assert by_rows[1:3] == [
        "  node-0  30 steps of 4 rows: 120 of its 120 rows, each once",
        "  node-1  10 steps of 4 rows: 40 of its 40 rows, each once",
    ]


def test_training_lines_name_owners_and_classes() -> None:
    """An owner with fewer rows than a batch, and one that has no turn at all."""
    small = training_lines(course(40, 3, num_steps=20))
    assert "note: fewer rows than a batch of 4, so smaller batches: node-1 3" in small
    idle = training_lines(course(40, 40, num_steps=2))
    assert idle[-1].startswith("note: no turn in 2 steps, so no row is used: node-1; train longer")
    # A space before a name makes another class: that is seen, and quoted
    lines = training_lines(course(16, labels=(" pos", "Neg", "neg", "pos")))
    assert "4 classes: ' pos', Neg, neg, pos" in lines
    assert [line for line in lines if "different classes" in line] == [
        f"note: {names} are different classes, though they differ in spaces or capitals only; correct the rows?"
        for names in ("' pos' and 'pos'", "'Neg' and 'neg'")
    ]
    # Eight of each, and how many more
    labels = tuple(f"class-{index:02}" for index in range(30))
    lines = training_lines(course(*[40] * 20, num_steps=400, labels=labels))
    assert len(lines) == 1 + 8 + 1 + 1
    assert lines[9] == "  and 12 more owners, 2 to 2 epochs each"
    assert lines[10].endswith("class-07 and 22 more")
    # Nothing is trained: no lines, and no row is used
    evaluation = course(16, num_steps=0)
    assert training_lines(evaluation) == []
    assert training_facts(evaluation)["used_rows"] == 0


def test_training_lines_warn_of_turns_that_keep_step_with_sweeps() -> None:
    """Six groups, two owners, turns of three steps: each owner's rows would train one half of the model."""
    plan = make_plan([("a", 0, 4)], ["a", "b"], method=Hift(), local_iterations=3, num_steps=60)
    lines = training_lines(plan.course)
    note = "note: turns of 3 steps and sweeps of 6 have a common period, so that rows of a, b train"
    assert f"{note} some of the groups only; train.local_iterations = 4 would mix them" in lines
    mixed = make_plan([("a", 0, 4)], ["a", "b"], method=Hift(), local_iterations=4, num_steps=60)
    assert not any("common period" in line for line in training_lines(mixed.course))


MEMORY = {"a": MemoryEstimate((Term("buffers", "gradient of the embedding on its way", 2, 3 << 20),))}


def plan(owners: tuple[str, ...] = ("a", "b"), **settings: Any) -> Plan:
    """Four blocks on two nodes, ten steps."""
    return make_plan([("a", 0, 2), ("b", 2, 4)], owners, method=Hift(**settings), num_steps=10)


def test_units_have_names() -> None:
    """Neighbouring blocks are a range."""
    rows: list[tuple[list[int], str]] = [
        ([-1], "embedding"),
        ([-1, 0], "embedding, block 0"),
        ([0, 1, 2], "blocks 0 to 2"),
        ([3, 4], "block 3, head"),
        ([-1, 0, 1, 2, 3, 4], "embedding, blocks 0 to 3, head"),
        ([-1, 1, 4], "embedding, block 1, head"),
        ([4], "head"),
    ]
    for units, expected in rows:
        assert units_text(Units.of(4, units)) == expected


def test_a_plan_of_hift_says_groups_sweeps_and_what_owners_send() -> None:
    """Sizes of a sweep, and what owners send each other of embedding and head."""
    lines = groups_lines(plan(group_size=2, order="top2down").course, MEMORY)
    assert lines == [
        "trains all parameters, one group a step: block 3, head | blocks 1 to 2 | embedding, block 0",
        "a sweep over all groups is 3 steps; the run has 4 sweeps, and the learning rate advances once a sweep",
        "every owner has a copy of embedding and head; a step that trains one sends its gradient to the other owners: "
        "embedding (at most 3.0 MiB), head",
        "note: these gradients tell the other owners much of a batch: with texts, the embedding's which tokens it had "
        "and, of learned positions, where they stood; the head's about how many rows of each class",
    ]
    # Nobody else has a copy
    assert len(groups_lines(plan(("a",)).course, {})) == 2
    # Methods whose blocks have adapters train the head and some blocks
    assert groups_lines(make_plan([("a", 0, 4)], ["a"]).course, {}) == []
    # Step 1 of groups of one trains block 0
    text = plan_text(plan(), {}, at_step=1, measured=False)
    assert "actions from step 1, which trains block 0:" in text


OF_ALL = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_blocks=4, method="all")


def test_helpers_in_step_leave_the_result_as_it_is() -> None:
    """The placement alone knows them."""
    lines = helper_lines(helped(OF_ALL, {"a": "z"}))
    assert lines[0] == "z fits the adapters of a's blocks [0, 2)"
    assert lines[1].endswith("the result is that of a run without helpers")
    assert helper_lines(OF_ALL) == []
    # As hosts and owners are
    shown = io.StringIO()
    PlainProgress(shown).plan(helped(OF_ALL, {"a": "b"}), {"a": 1, "b": 1})
    assert "b fits the adapters of a's blocks [0, 2)" in shown.getvalue()


def test_helpers_in_another_manner_say_what_they_change() -> None:
    """Each word of the job has a sentence, and the report its fact."""
    rows: list[tuple[dict[str, Any], str]] = [
        ({"interval": 3}, "add up 3 steps for one update"),
        ({"pairs": "bfloat16"}, "rounded to 16 bits"),
        ({"merged": True}, "inside matrices"),
        ({"overlap": True}, "one step behind within a turn"),
    ]
    for manner, words in rows:
        plan = helped(OF_ALL, {"a": "z"}, HelperSettings(**manner))
        assert words in helper_lines(plan)[-1]
        assert helper_lines(plan)[-1].endswith("the result is not that of a run without helpers")
        facts = report(plan, 0)["offload"]
        assert {name: facts[name] for name in manner} == manner
        assert (facts["staleness"] == "none") is not ("overlap" in manner)


def test_plan_says_what_helpers_see() -> None:
    """They count among those that see hidden states, but never those of private blocks; of block 0 tokens are told."""
    for private in [0, 1]:
        plan = make_plan([("a", private, 2), ("b", 2, 4)], ["a"], method="all", private_blocks=private)
        words = "; helpers see the hidden states inside the blocks that they help with: z of "
        tells = "" if private else "; z can tell the tokens from those of block 0"
        found = [line for line in plan_text(helped(plan, {"a": "z"}), {}, measured=True, num_steps=0) if words in line]
        assert len(found) == 1 and found[0].endswith(f"{words}[{private}, 2){tells}")
        assert not any(words in line for line in plan_text(plan, {}, measured=True, num_steps=0))


EACH = BlockCapacity(full=2.0, forward_only=1.0, forward=1.0, backward=1.0)
SLICES = [("a", 0, 1), ("b", 1, 2)]


def test_operations_to_be_chosen_are_marked_as_assumed() -> None:
    """Nobody takes the expected table for that of the run."""
    choice = Choice(policy="two-stage", subnets=2, capacities=(EACH,), refresh_steps=12)
    even = make_plan(SLICES, ["a"], num_blocks=2, microbatches=2)
    plan = Plan(dataclasses.replace(even.course, choice=choice), even.placements)
    assert operations_lines(plan)[0].startswith("operations, assumed until the run has chosen: 1 full")
    assert choice_lines(plan) == [
        "operations of 2 subnets a block are chosen by the policy two-stage by weight-magnitude and fisher before "
        "training, and anew every 12 steps"
    ]
    # Whoever asks for none sees none
    plan = make_plan(SLICES, ["a"], num_blocks=2)
    assert operations_lines(plan) == choice_lines(plan) == []
    assert "operations" not in "\n".join(plan_text(plan, {}, measured=False))


ONE = make_plan([("a", 0, 2), ("b", 2, 4)], ["c"], num_blocks=4, num_steps=20, local_iterations=2, method="all")
READS = "can reconstruct the input text from the embeddings it receives; set privacy.private_blocks to make that harder"


def test_plan_names_all_who_can_tell_the_tokens() -> None:
    """Every host of the lowest blocks gets embeddings, in any placement of the run."""
    both = changed(ONE, slices=slices_of([("a", 0, 2), ("d", 0, 2), ("b", 2, 4)]))
    for plan, hosts in (
        (ONE, "node a"),
        (both, "each of the nodes a, d"),
        (moving(both, (3, [("b", 0, 4)])), "each of the nodes a, d, b"),
        (moving(ONE, (3, [("a", 0, 3), ("b", 3, 4)])), "node a"),
    ):
        assert f"privacy: {hosts} {READS}" in plan_text(plan, {}, num_steps=0, measured=True)


def test_plan_names_all_who_get_inputs_of_blocks() -> None:
    """Those of Gemma 4 E2B are made of one token each, so private blocks hide nothing; shared keys alone have none."""
    widths = (32,) * 5
    for private in (0, 1):
        slices = slices_of([("a", private, 2), ("b", 2, 4)])
        plan = changed(ONE, slices=slices, private_blocks=private, frozen_blocks=private)
        inputs = changed(plan, entering=(40, 38, 36, 34, 32), returning=widths)
        reads = "each of the nodes a, b can reconstruct the input text from the inputs of blocks that it receives"
        assert reads in "\n".join(plan_text(inputs, {}, num_steps=0, measured=True))
        alone = changed(plan, entering=widths, returning=widths)
        assert "inputs of blocks" not in "\n".join(plan_text(alone, {}, num_steps=0, measured=True))


def test_table_is_that_of_the_placement_that_holds_at_its_step() -> None:
    """The run moves after step 6: from there on b hosts all blocks."""
    plan = moving(ONE, (3, [("b", 0, 4)]))
    before, after = (table_text(plan, at_step=step, num_steps=1) for step in (5, 6))
    assert "F5.0[0,2)" in before and "F6.0[0,4)" in after


GLOSSARY = Path(__file__).parents[3] / "docs" / "glossary.md"


def test_explanation_has_a_legend_of_the_parts_that_it_prints() -> None:
    """Each part that a node has is explained once, and no other part."""
    made = make_plan_make_plan(job(), {name: facts(name, **NO_TIMES) for name in "ab"})
    why = explain(made, relative=True)
    lines = plan_text(made.plan, made.memory, measured=False, num_steps=0, why=why)
    printed = {part for node, _ in made.memory.items() for part, size in made.memory[node].parts().items() if size}
    assert [line for line in lines if line.startswith("    ") and line.strip().partition(":")[0] in PARTS] == [
        f"    {part}: {words}" for part, words in PART_WORDS.items() if part in printed
    ]
    assert {"optimizer", "adapters", "buffers", "passing"} <= printed


def test_glossary_names_the_parts() -> None:
    """In their order, and no others."""
    entry = GLOSSARY.read_text(encoding="utf-8").partition("- **part** (of a node's memory):")[2].partition("\n- ")[0]
    assert tuple(re.findall(r"\*(\w+)\*", entry)) == PARTS
