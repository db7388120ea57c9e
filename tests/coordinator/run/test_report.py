"""What a run's recorder makes of reports: ledgers, text of figures, the trace, and what operations have saved."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
from typing import Any

import pytest

from coordinator.run.recorder import RunRecorder
from coordinator.run.report import OperationsLedger, RunLedger, figures, judge_of
from coordinator.run.run_text import figures_text, owners_text, recovery_line, stop_text, training_facts
from coordinator.run.trace import MAX_SPANS, Activity, TraceText, step_begin, step_waits
from coordinator.screen.progress import PlainProgress
from coordinator.web.page_state import metrics_event
from ringtune.costs.links import MIN_SAMPLES
from ringtune.costs.profile import LinkFacts, Profile
from ringtune.engine.events import Span
from ringtune.errors import IntegrityError
from ringtune.job.job import Job
from ringtune.quantities import format_seconds
from ringtune.run_control import events as rd
from ringtune.run_control.evaluation import name_of
from ringtune.run_control.turns import EarlyStopping
from ringtune.schedule.actions import Action, Op, Payload, parse_action
from ringtune.schedule.methods import Hift
from ringtune.schedule.migration import with_owner, without_owner
from ringtune.schedule.operation_tables import BatchOperations, Operations
from ringtune.schedule.placement import Helper
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import NONE_DONE, Evaluations, StartPoint, StepKind, Turn, turn_sequence
from ringtune.schedule.versions import depth, ever_trained
from ringtune.techniques.operations import chosen_entry, saved_lines
from ringtune.v1 import control_pb2
from tests.support.fake_agents import facts, job
from tests.support.plans import make_plan
from tests.support.profiles import profile_of

PLAN = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"])
TURNS = list(turn_sequence(PLAN.course))
EVAL_ROWS = sum(owner.eval_rows for owner in PLAN.course.owners)


def ledger() -> RunLedger:
    """An empty ledger whose training began at 100 s."""
    books = RunLedger(PLAN, job())
    books.begin(100.0)
    return books


def step(books: RunLedger, turn: Turn, offset: int, loss: float, ended_unix_s: float) -> None:
    """One train step of a turn with four rows."""
    number = turn.first_step + offset
    values = (("loss_sum", 4 * loss), ("count", 4.0), ("correct", 3.0))
    books.step_done(rd.LogStep(turn, turn.first_seq + offset, number, depth(PLAN.course, number), values), ended_unix_s)


def test_seconds_of_steps_have_no_evaluation_in_them() -> None:
    """A step that begins after an evaluation is timed from its end, as the simulator does; the report adds them up."""
    books, turn = ledger(), TURNS[0]
    step(books, turn, 0, 0.5, 101.0)
    step(books, turn, 1, 0.5, 102.0)
    assert [line["accuracy"] for line in books.turn_done(turn)] == [0.75, 0.75]
    at = turn.end_seq
    judging = dataclasses.replace(turn, kind=StepKind.EVALUATE, index=1, first_seq=at, num_items=2)
    for index, ended_unix_s in enumerate((105.0, 112.0)):
        books.step_done(
            rd.LogStep(judging, at + index, turn.end_step, 1, (("loss_sum", 1.0), ("count", 4.0))), ended_unix_s
        )
    assert books.turn_done(judging) == []
    after = dataclasses.replace(TURNS[1], first_seq=at + 2)
    step(books, after, 0, 0.5, 112.5)
    assert [line["seconds"] for line in books.turn_done(after)] == [0.5]
    assert books.report(run_id="r", wall_s=1.0, phases_s={}, predicted_bytes={})["steps_s"] == 2.5


def test_ledger_lines_of_late_reports_and_of_other_turns() -> None:
    """Another owner's clock may be behind; its first step then takes no time."""
    books, turn = ledger(), TURNS[0]
    step(books, turn, 0, 0.5, 101.0)
    step(books, turn, 1, 0.5, 100.9)
    assert [line["seconds"] for line in books.turn_done(turn)] == [1.0, 0.0]
    # A hand-over that is reported after its turn was closed is not lost
    books, first, second = ledger(), TURNS[0], TURNS[1]
    step(books, first, 0, 0.5, 101.0)
    books.turn_done(first)
    books.add_traffic("a", first.first_seq, "b", "t", 11)
    step(books, second, 0, 0.5, 102.0)
    assert books.turn_done(second)[0]["bytes"] == {"a>b": 11}
    # So that one sees how far it has come
    score = dataclasses.replace(TURNS[1], kind=StepKind.SCORE)
    progress = ledger().progress_of(rd.ShowStep(score, score.first_seq + 1, 0, 0, ()))
    assert (progress["batch"], progress["batches"]) == (2, score.num_items)
    # Blocks that never train are full in each table, which says nothing; here the upper half trains
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_steps=2, every_steps=1)
    assert ever_trained(plan.course).blocks == (2, 3)
    table = Operations(batches=(BatchOperations(owner="a", batch_id=0, rows=("1132", "1133")),))
    line = chosen_entry(plan.course, 0, table)
    assert [line[name] for name in ("full", "forward_only", "shortcut")] == [0, 1, 3]


def test_ledger_report_has_units_and_totals() -> None:
    """The report gives evaluation, losses, and for each node what it computed, sent, received and needed."""
    books, turn = ledger(), TURNS[0]
    step(books, turn, 0, 0.5, 101.0)
    books.turn_done(turn)
    books.add_traffic("a", 0, "b", "h", 100)
    forward, send = parse_action("f0.0[0,1)", 4), parse_action(">h0.0#2@b", 4)
    books.add_spans("a", [Span(forward, 1.0, 1.5), Span(send, 1.5, 9.0)])
    versions = {"peak_versions": 3, "peak_version_bytes": 40}
    card = {"device": "NVIDIA T4", "peak_device_bytes": 3000, "device_bytes": 8000}
    books.add_totals("a", {"peak_rss_bytes": 1000, "hosted_bytes": 500, "cpu_s": 2, **card, **versions})
    books.evaluation_done(4, {"loss_sum": 5.0, "count": 10.0, "correct": 6.0})
    books.evaluation_done(8, {"loss_sum": 2.0, "count": 10.0, "correct": 9.0})
    report = books.report(run_id="r", wall_s=12.5, phases_s={"training": 10.0}, predicted_bytes={"a": 900})
    assert report["eval"] == {"step": 8, "accuracy": 0.9, "loss": 0.2, "rows": EVAL_ROWS, "count": 10}
    assert [entry["step"] for entry in report["evaluations"]] == [4, 8]
    assert report["wall_s"] == 12.5
    assert report["links"] == {"a>b": 100}
    assert report["nodes"]["a"] == {
        "blocks": [0, 2],
        "activations": {"policy": "none", "recomputed": [], "projected": []},
        "busy_s": 0.5,
        "cpu_s": 2.0,
        "actions": 1,
        **card,
        "peak_rss_bytes": 1000,
        "hosted_bytes": 500,
        "peak_versions": 3,
        "peak_version_bytes": 40,
        "load": 0.0,
        "predicted_bytes": 900,
        "sent_bytes": 100,
        "received_bytes": 0,
    }
    assert report["nodes"]["b"]["received_bytes"] == 100
    assert "device_bytes" not in report["nodes"]["b"]


def test_ledger_writes_a_decision_before_the_steps_that_it_holds_for() -> None:
    """It is known while the turns before still train; a resumed run takes lines from its step on out."""
    books = ledger()
    books.decided({"kind": "unfreeze", "step": TURNS[1].first_step, "depth": 2})
    step(books, TURNS[0], 0, 0.5, 101.0)
    assert [line["step"] for line in books.turn_done(TURNS[0])] == [1]
    step(books, TURNS[1], 0, 0.5, 102.0)
    assert [(line["kind"], line["step"]) for line in books.turn_done(TURNS[1])] == [("unfreeze", 2), ("train", 3)]
    assert books.turn_done(TURNS[2]) == []
    # Its digest and how many operations of each kind; turns that only evaluate or score have no such line
    books = ledger()
    table = Operations(batches=(BatchOperations(owner="a", batch_id=0, rows=("1132", "1133")),))
    counts = {"full": 4, "forward_only": 1, "shortcut": 3}
    line = {"kind": "operations", "step": 2, "digest": table.digest, **counts}
    assert books.decided(chosen_entry(PLAN.course, 2, table)) == line
    score = dataclasses.replace(TURNS[1], kind=StepKind.SCORE)
    assert books.turn_done(TURNS[0]) == [] == books.turn_done(score)
    step(books, TURNS[1], 0, 0.5, 102.0)
    assert [entry["kind"] for entry in books.turn_done(TURNS[1])] == ["operations", "train"]


def test_ledger_mean_loss_is_that_of_one_turn_of_steps() -> None:
    """Losses 2, 1.25, 0.5 and 0.25: turns of 1, 2 and 4 steps end with a mean of 0.25, 0.375 and 1."""
    for local_iterations, expected in [(1, 0.25), (2, 0.375), (4, 1.0)]:
        plan = make_plan([("a", 0, 4)], ["a"], num_steps=4, local_iterations=local_iterations, eval_rows=0)
        books = RunLedger(plan, job())
        losses = iter([2.0, 1.25, 0.5, 0.25])
        for turn in turn_sequence(plan.course):
            for offset in range(turn.num_items):
                step(books, turn, offset, next(losses), 101.0)
            books.turn_done(turn)
        train = books.report(run_id="r", wall_s=1.0, phases_s={}, predicted_bytes={})["train"]
        assert (train["first_loss"], train["last_loss"]) == (2.0, 0.25)
        assert (train["mean_loss"], train["mean_steps"]) == (expected, local_iterations)


def test_ledger_gives_the_loss_of_the_last_step_also_of_a_diverged_run() -> None:
    """A loss that is no number becomes null: JSON has no NaN."""
    books, turn = ledger(), TURNS[0]
    step(books, turn, 0, math.nan, 101.0)
    step(books, turn, 1, math.inf, 102.0)
    lines = books.turn_done(turn)
    assert [line["loss"] for line in lines] == [None, None]
    json.dumps(lines, allow_nan=False)
    # Screen, status, metrics and report agree on it; a mean says over how many steps it is
    books, first, second = ledger(), TURNS[0], TURNS[1]
    step(books, first, 0, 0.8, 101.0)
    step(books, second, 0, 0.25, 103.0)
    step(books, first, 1, 0.6, 102.0)  # another owner's report came before
    lines = [*books.turn_done(first), *books.turn_done(second)]
    report = books.report(run_id="r", wall_s=1.0, phases_s={}, predicted_bytes={})
    assert report["train"]["last_loss"] == lines[-1]["loss"] == 0.25
    assert (report["train"]["mean_loss"], report["train"]["mean_steps"]) == (pytest.approx(0.425), 2)
    # Losses that an owner makes up may have no finite sum
    books, huge = ledger(), (("loss_sum", 1e300), ("count", 1e-8))
    for offset in range(turn.num_items):
        books.step_done(rd.LogStep(turn, turn.first_seq + offset, turn.first_step + offset, 1, huge), 101.0)
    assert [line["loss"] for line in books.turn_done(turn)] == [pytest.approx(1e308)] * 2
    report = books.report(run_id="r", wall_s=1.0, phases_s={}, predicted_bytes={})
    assert (report["train"]["mean_loss"], report["train"]["mean_steps"]) == (None, 2)


def test_ledger_without_evaluation_says_so() -> None:
    """No evaluation rows: count 0 and no accuracy, instead of a made-up one."""
    report = ledger().report(run_id="r", wall_s=1.0, phases_s={}, predicted_bytes={})
    assert report["eval"] == {"accuracy": None, "loss": None, "rows": 0, "count": 0}
    assert report["train"] == {"first_loss": None, "last_loss": None, "mean_loss": None, "mean_steps": 0}
    # Totals come from another machine and may miss a figure
    with pytest.raises(IntegrityError, match="totals of node a"):
        ledger().add_totals("a", {"peak_rss_bytes": 1})
    totals = dict.fromkeys(("peak_rss_bytes", "hosted_bytes", "cpu_s", "peak_versions", "peak_version_bytes"), 1)
    (books := ledger()).add_totals("a", {**totals, "device": "\x1b[2J" * 99_999})
    assert books.nodes["a"].device.isprintable() and len(books.nodes["a"].device) < 999


def test_sums_that_an_owner_leaves_out_or_makes_up_end_no_run() -> None:
    """They are 0; classes that are not there are not counted, and no figure is infinite."""
    counts = {"count": 2.0, "loss_sum": 1.0, name_of(7, 0): 3.0, name_of(0, 0): 0.25}
    nothing = {"loss": 0.5, "accuracy": None}
    assert figures(counts, ("x", "y")) == nothing
    assert figures({**counts, "generated": 1.0, "judged_texts": 5e-324}) == {**nothing, "generated": 1, "new_tokens": 0}
    written = figures({**counts, "new_tokens": 2.0, "generated": 1.0, "judged_texts": 1.0})
    assert (written["new_tokens"], written["rouge_l"]) == (2, 0.0)
    numbers = {"numbers": 1.0, "true_squares": 1e-300, "predicted_squares": 1e300}
    assert figures({**counts, "absolute_sum": 1.0, **numbers})["r2"] is None


def test_ledger_evaluates_by_task() -> None:
    """Sums over owners become what the task is judged by; windows of a question are not questions."""
    rows: list[tuple[dict[str, float], dict[str, object]]] = [
        (
            {"loss_sum": 4.0, "count": 2.0, "correct": 1.0, "tokens": 2.0},
            {"loss": 2.0, "accuracy": 0.5, "perplexity": pytest.approx(math.exp(2.0)), "max_length": 16, "count": 2},
        ),
        (
            {"loss_sum": 9.0, "count": 6.0, "questions": 4.0, "f1_sum": 3.0, "exact_sum": 2.0},
            {"loss": 1.5, "accuracy": None, "f1": 0.75, "exact_match": 0.5, "questions": 4, "count": 6},
        ),
        (
            {"loss_sum": 1e6, "count": 1.0, "correct": 0.0, "tokens": 1.0},
            {"loss": 1e6, "accuracy": 0.0, "perplexity": None, "max_length": 16, "count": 1},
        ),
    ]
    for values, expected in rows:
        books = ledger()
        books.evaluation_done(4, values)
        assert books.report(run_id="r", wall_s=1.0, phases_s={}, predicted_bytes={})["eval"] == {
            "step": 4,
            "rows": EVAL_ROWS,
            **expected,
        }


def test_report_counts_gradients_of_units_by_link() -> None:
    """What owners send each other of embedding and head has figures of its own, in the step's line and in the end."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], method=Hift(), num_steps=2, local_iterations=2)
    ledger = RunLedger(plan, job())
    turn = next(iter(turn_sequence(plan.course)))
    ledger.begin(0.0)
    ledger.add_traffic("a", 0, "b", Payload.UNIT_GRAD, 700)
    ledger.add_traffic("a", 0, "b", Payload.HIDDEN, 100)
    for seq in (0, 1):
        ledger.step_done(rd.LogStep(turn, seq, seq, 0, (("count", 1.0), ("loss_sum", 1.0))), float(seq))
    first, second = ledger.turn_done(turn)
    assert (first["bytes"], first["unit_gradient_bytes"]) == ({"a>b": 800}, {"a>b": 700})
    assert "unit_gradient_bytes" not in second
    report = ledger.report(run_id="r", wall_s=1.0, phases_s={}, predicted_bytes={})
    assert report["unit_gradient_links"] == {"a>b": 700}


def test_ledger_names_the_units_that_a_step_of_hift_trained() -> None:
    """A group of units has no depth; the line says which units it was. Methods with a depth have no such key."""
    plan = make_plan([("a", 0, 4)], ["a"], method=Hift(group_size=2), num_steps=2, local_iterations=2)
    books = RunLedger(plan, job())
    turn = next(iter(turn_sequence(plan.course)))
    for offset in (0, 1):
        step(books, turn, offset, 1.0, 1.0)
    assert [line["trains"] for line in books.turn_done(turn)] == ["embedding, block 0", "blocks 1 to 2"]
    others = ledger()
    step(others, TURNS[0], 0, 1.0, 1.0)
    assert "trains" not in others.turn_done(TURNS[0])[0]


def test_report_counts_pairs_and_weights_by_link_and_seconds_of_fitting() -> None:
    """Of a run with a helper; a run without one has no such figures."""
    placement = dataclasses.replace(PLAN.placement, helpers=(Helper(node="z", start=0, stop=2),))
    plan = Plan.of(PLAN.course, placement)
    ledger = RunLedger(plan, job())
    turn = next(iter(turn_sequence(plan.course)))
    ledger.begin(0.0)
    for payload, source, target, size in (
        (Payload.PAIRS, "a", "z", 700),
        (Payload.WEIGHTS, "z", "a", 30),
        (Payload.HIDDEN, "a", "b", 100),
    ):
        ledger.add_traffic(source, 0, target, payload, size)
    ledger.add_spans("z", [Span(parse_action(text, 4), 1.0, 1.5) for text in ("A0.0[0,2)", "U0[0,2)")])
    ledger.step_done(rd.LogStep(turn, 0, 0, 0, (("count", 1.0), ("loss_sum", 1.0))), 1.0)
    line = ledger.turn_done(turn)[0]
    assert (line["pair_bytes"], line["helper_weight_bytes"]) == ({"a>z": 700}, {"z>a": 30})
    assert line["bytes"] == {"a>z": 700, "z>a": 30, "a>b": 100}
    report = ledger.report(run_id="r", wall_s=1.0, phases_s={}, predicted_bytes={})
    assert (report["pair_links"], report["helper_weight_links"]) == ({"a>z": 700}, {"z>a": 30})
    assert (report["nodes"]["z"]["fit_s"], report["nodes"]["z"]["busy_s"]) == (0.5, 1.0)
    assert report["offload"] == {
        "helpers": [{"node": "z", "host": "a", "blocks": [0, 2]}],
        "interval": 1,
        "pairs": "float32",
        "merged": False,
        "overlap": False,
        "users": "joint",
        "staleness": "none",
    }
    bare = RunLedger(PLAN, job()).report(run_id="r", wall_s=1.0, phases_s={}, predicted_bytes={})
    assert not {"offload", "pair_links"} & bare.keys() and "fit_s" not in bare["nodes"]["a"]


def test_report_of_a_run_that_moves_has_the_most_of_all_placements() -> None:
    """What was held at once is not the sum, nor that of the last placement; reads are counted together."""
    books = ledger()
    for versions, reads, kept in ((3, 5, 700), (2, 1, 400)):
        totals = {"peak_rss_bytes": 9, "hosted_bytes": 8, "cpu_s": 2, "peak_versions": versions}
        cache = {"cache_reads": reads, "cache_read_bytes": 10 * reads, "cache_most_kept_bytes": kept}
        books.add_totals("a", {**totals, "peak_version_bytes": 100 * versions, **cache})
    own = {"peak_rss_bytes": 9, "hosted_bytes": 8, "cpu_s": 2, "load": 0, "peak_versions": 3, "peak_version_bytes": 300}
    cache = {"cache_reads": 6, "cache_read_bytes": 60, "cache_most_kept_bytes": 700}
    assert books.nodes["a"].figures == own | cache


SLICES = [("a", 0, 2), ("b", 2, 4)]


def planned(*rows: str) -> tuple[Plan, list[Turn]]:
    """A plan whose batches all have these operations, and its train turns."""
    operations = None
    if rows:
        batches = tuple(BatchOperations(owner="a", batch_id=at, rows=rows) for at in range(3))
        operations = Operations(batches=batches)
    plan = make_plan(SLICES, ["a"], method="all", train_rows=12, microbatches=2, operations=operations)
    return plan, [turn for turn in turn_sequence(plan.course) if turn.kind.has_update]


def span(op: Op, seq: int, seconds: float) -> Span:
    """An action on blocks 0 and 1."""
    return Span(Action(op, seq, 0, 0, 2), 5.0, 5.0 + seconds)


def test_report_has_shares_of_each_node_and_what_was_saved() -> None:
    """Node b is passed by for one of two micro-batches: it is half full, and half of its messages travel."""
    plan, turns = planned("1111", "1133")
    profile = profile_of(plan)
    ledger = OperationsLedger(plan, profile)
    for turn in turns:
        for seq in range(turn.first_seq, turn.end_seq):
            ledger.add_spans([span(Op.FORWARD, seq, 0.25), span(Op.BACKWARD, seq, 0.5), span(Op.EMBED, seq, 9.0)])
            ledger.add_traffic(seq, Payload.HIDDEN, 100)
            ledger.add_traffic(seq, Payload.HEAD, 1_000_000)
        ledger.turn_done(turn)
    found = ledger.report(profile)
    assert found is not None
    steps = plan.course.num_steps
    assert found["steps"] == steps
    assert found["nodes"]["a"] == {"full": 1.0, "forward_only": 0.0, "skipped": 0.0}
    assert found["nodes"]["b"] == {"full": 0.5, "forward_only": 0.0, "skipped": 0.5}
    compute, sent = found["compute"], found["bytes"]
    assert compute["busy_s"] == pytest.approx(0.75 * steps)
    assert compute["measured"] == pytest.approx(compute["busy_s"] / compute["all_full_s"])
    assert compute["predicted"] == pytest.approx(0.75, rel=0.1)
    assert compute["paper"] == pytest.approx(0.75)
    assert sent["sent_bytes"] == 100 * steps
    assert sent["measured"] == pytest.approx(100 * steps / sent["all_full_bytes"])
    assert sent["predicted"] == pytest.approx(0.5, rel=0.02)
    assert sent["paper"] == pytest.approx(0.75)


def test_what_scores_took_stands_beside_what_steps_saved() -> None:
    """Seconds and bytes of blocks, counted apart from those of steps; without scores no line tells of any."""
    plan, turns = planned("1111", "1133")
    ledger = OperationsLedger(plan, profile_of(plan))
    score, train = dataclasses.replace(turns[0], kind=StepKind.SCORE), turns[1]
    for turn, seconds in ((score, 2.0), (train, 0.25)):
        for seq in range(turn.first_seq, turn.end_seq):
            ledger.add_spans([span(Op.BACKWARD, seq, seconds), span(Op.EMBED, seq, 9.0)])
            ledger.add_traffic(seq, Payload.GRAD, 100)
    ledger.turn_done(train)
    before = ledger.report(profile_of(plan))
    assert before is not None
    assert not [line for line in saved_lines(before) if "scores" in line]
    ledger.turn_done(score)
    found = ledger.report(profile_of(plan))
    assert found is not None
    count = score.num_items
    assert found["scores"] == {"batches": count, "busy_s": 2.0 * count, "sent_bytes": 100 * count}
    assert {**found, "scores": before["scores"]} == before
    assert f"{format_seconds(2.0 * count)} and {100 * count} B on top, measured" in saved_lines(found)[-1]


def test_seconds_of_all_full_are_not_measured_where_nothing_was_full() -> None:
    """Such a run never saw how long a full operation takes."""
    for rows in (("2222", "3333"), ("1122", "1133")):
        plan, turns = planned(*rows)
        ledger = OperationsLedger(plan, profile_of(plan))
        for turn in turns:
            ledger.turn_done(turn)
        found = ledger.report(profile_of(plan))
        assert found is not None
        assert (found["compute"]["all_full_s"], found["compute"]["measured"]) == (None, None)
        (line,) = [line for line in saved_lines(found) if line.startswith("  compute")]
        assert line.split(maxsplit=1)[1].startswith("not measured, ")


PROFILE = Profile(nodes=tuple(facts(node) for node in ("a", "b")))


def counted(rows: int) -> dict[str, float]:
    """Sums of an evaluation over 29 rows, of which so many are counted by class; all of class 0 are right."""
    right = 2 * rows // 3
    found = {"count": 29.0, "loss_sum": 29 * 0.5, "correct": 18.0}
    return found | ({name_of(0, 0): float(right), name_of(1, 0): float(rows - right)} if rows else {})


def test_a_figure_has_the_same_rows_wherever_it_stands() -> None:
    """Line of an evaluation, end of a run and list of the page: a macro F1 of 20 of 29 rows says so on each of them."""
    for rows in [0, 20, 29]:
        books = ledger()
        entry = books.evaluation_done(PLAN.course.num_steps, counted(rows))
        words = f"accuracy 0.6207, loss 0.5000 on 29 rows; macro f1 0.3939 on {rows} of 29 rows"
        if rows == 29:
            words = "accuracy 0.6207, macro f1 0.3958, loss 0.5000 on 29 rows"
        if not rows:
            words = "accuracy 0.6207, loss 0.5000 on 29 rows"
        stream = io.StringIO()
        screen = PlainProgress(stream)
        screen.decision({"kind": "evaluation", **entry})
        screen.report(books.report(run_id="r", wall_s=1.0, phases_s={}, predicted_bytes={}))
        told = metrics_event(entry)
        assert told is not None
        assert [words in line for line in stream.getvalue().splitlines() if "accuracy" in line] == [True, True]
        assert words in told.text


def test_figures_of_any_task_stand_once_with_their_rows() -> None:
    """Whatever an evaluation counts, no figure is without rows, and those of fewer rows are apart."""
    parts: list[dict[str, float]] = [
        {"count": 9.0, "loss_sum": 4.5},
        {"correct": 3.0},
        {"tokens": 9.0},
        {"questions": 4.0, "f1_sum": 2.0, "exact_sum": 1.0},
        {"words": 9.0, "cut_words": 2.0},
        {name_of(0, 0): 5.0},
    ]
    for chosen in itertools.product((False, True), repeat=len(parts) - 1):
        values = {**parts[0]}
        for part, is_in in zip(parts[1:], chosen, strict=True):
            values |= part if is_in else {}
        entry: dict[str, Any] = {"count": 9, **figures(values, ("x", "y"))}
        text = figures_text(entry)
        groups = text.split("; ")
        assert all(" on " in group for group in groups), text
        for name in ("accuracy", "macro_f1", "f1", "exact_match", "perplexity", "loss"):
            if entry.get(name) is not None:
                word = f"{name.replace('_', ' ')} {entry[name]:.4f}"
                assert sum(part.strip().startswith(word) for group in groups for part in group.split(",")) == 1, text


def test_error_of_a_node_that_is_left_out_is_said_and_stands_in_metrics_report_and_page() -> None:
    """Nothing of it is hidden, though the run goes on."""
    events: list[control_pb2.RunEvent] = []
    books = RunRecorder(PLAN, job(), PROFILE, events.append)
    books.log(rd.LogNodeError("b", "StorageError", "node b: its disk is full"))
    (said,) = (one.note for one in events if one.note)
    (line,) = (one.metrics_json for one in events if one.metrics_json)
    assert said == "node b: its disk is full; the run goes on without node b"
    entry = {"step": 0, "node": "b", "error": "StorageError", "message": "node b: its disk is full"}
    assert json.loads(line) == {"kind": "node_error", **entry}
    assert books.ledger.report(run_id="r", wall_s=1.0, phases_s={}, predicted_bytes={})["node_errors"] == [entry]
    told = metrics_event(json.loads(line))
    assert told is not None and (told.kind, told.text) == ("lost", "node b: its disk is full")


def heard(losses: list[float | None], wanted: Job) -> tuple[list[str], dict[str, Any]]:
    """The notes of a run with these evaluations, one after each two steps, and its report."""
    events: list[control_pb2.RunEvent] = []
    books = RunRecorder(PLAN, wanted, PROFILE, events.append)
    for index, loss in enumerate(losses):
        values = (("count", 2.0), ("loss_sum", float("nan") if loss is None else 2 * loss))
        step = PLAN.course.num_steps - 2 * (len(losses) - 1 - index)
        books.log(rd.LogEvaluation(step, values))
    report = books.ledger.report(run_id="r", wall_s=1.0, phases_s={}, predicted_bytes={})
    lines = [json.loads(event.metrics_json) for event in events if event.metrics_json]
    assert lines[-1].get("risen") == report.get("risen")
    return [event.note for event in events if event.note], report


def test_a_loss_that_rises_is_told_once_on_the_way_and_at_the_end() -> None:
    """5 % above the best after two evaluations that were no better, or with the last one."""
    rows: list[tuple[list[float | None], int, bool]] = [
        ([0.7, 0.6, 0.5, 0.4], 0, False),
        ([0.7, 0.5, 0.51, 0.52], 0, False),  # less than 5 %
        ([0.5, 0.7, 0.4, 0.41], 0, False),
        ([0.7, 0.6, 0.5, 0.9], 0, True),  # told at the end
        ([0.5, 0.8, 0.9, 1.2], 1, True),  # told once on the way
        ([0.5, 0.8, 0.9, 0.4], 1, False),
        ([0.5, None, None, 0.6], 0, True),
        ([None, None, None, None], 0, False),
    ]
    for losses, notes, at_end in rows:
        told, report = heard(losses, job(train__eval_every=2))
        assert len(told) == notes and ("risen" in report) == at_end
        if told:
            assert told == [
                "evaluation loss has risen since step 2 (0.5 -> 0.9): the result of step 2 was better; "
                "train.keep_best = true keeps it"
            ]


def test_stopped_run_names_the_best_evaluation_and_has_the_decision() -> None:
    """The result is that of the last step, not of the best evaluation, and the sentence says so."""
    known = Evaluations(step=40, best=0.5, best_step=20, waited=2)
    assert stop_text(40, known) == (
        "the run ends with step 40: the loss of 2 evaluations was not below 0.5000, that after step 20; the result is "
        "that of step 40"
    )
    judge = judge_of("accuracy")
    assert judge is not None and judge_of(True) is None and judge_of(False) is None
    stopping = EarlyStopping(2, None, keeps_best=True, judge=judge)
    for step, correct in ((10, 2.0), (20, 3.0), (30, 3.0), (40, 1.0)):
        stopping.judge(step, (("loss_sum", float(step)), ("correct", correct), ("count", 4.0)))
    assert stopping.evaluations == Evaluations(step=40, best=0.75, best_step=20, waited=2, by="accuracy")
    assert "the accuracy of 2 evaluations was not above 0.7500" in stop_text(40, stopping.evaluations)
    assert ledger().stopped(40, stopping.evaluations)["by"] == "accuracy"
    assert math.isnan(judge.value({"loss_sum": 1.0, "count": 0.0}, ()))
    resumed = StartPoint.of(make_plan([("a", 0, 4)], ["a"]).course, evaluations=Evaluations(step=8, best=0.5))
    assert EarlyStopping(0, resumed, judge=judge).evaluations == Evaluations(step=8, by="accuracy")
    assert "1 evaluation was not below that of any" in stop_text(10, NONE_DONE.after(10, float("nan")))
    for value in (math.nan, math.inf, -math.inf):
        assert (stopping.evaluations.after(50, value).best, NONE_DONE.after(5, 0.5).after(9, value).best) == (0.75, 0.5)
    # One line, and the same in the report; a run with all its steps has none
    books = ledger()
    assert "stopped" not in books.report(run_id="r", wall_s=1.0, phases_s={}, predicted_bytes={})
    line = books.stopped(40, Evaluations(step=40, best=0.5, best_step=20, waited=2))
    assert line == {"kind": "stop", "step": 40, "best": 0.5, "best_step": 20, "waited": 2}
    found = books.report(run_id="r", wall_s=1.0, phases_s={}, predicted_bytes={})["stopped"]
    assert found == {name: value for name, value in line.items() if name != "kind"}


def test_owner_that_is_left_out_is_told_with_its_turns_and_compared_with_nobody() -> None:
    """Its rows count among all; that others had more turns is no advice to change the job."""
    course = make_plan([("a", 0, 4)], ["a", "b", "c"], num_steps=60, local_iterations=2).course
    found = training_facts(without_owner(course, "b", 4))
    assert found["left_out"] == ["b"]
    assert found["rows"] == 30 and found["rounds"] == 10
    assert {name: own["steps"] for name, own in found["owners"].items()} == {"a": 20, "c": 20, "b": 2}
    assert found["steps"] == 42
    assert "b is lost, and its rows are left out after 1 of its turns" in found["notes"]
    assert not any("times as often" in note for note in found["notes"])
    assert training_facts(course)["left_out"] == []
    by_rows = dataclasses.replace(course, turns="rows")
    assert training_facts(without_owner(by_rows, "b", 4))["steps"] == 42


def test_owner_that_is_back_is_told_with_the_turns_that_it_has_missed() -> None:
    """In the report, in the line of the recovery and in the sentence; lost again it is one that is left out."""
    plan = make_plan([("a", 0, 4)], ["a", "b", "c"], num_steps=60, local_iterations=2)
    lost = without_owner(plan.course, "b", 4)
    back = with_owner(lost, "b", 8, 60)
    found = training_facts(back)
    assert (found["left_out"], found["missed_turns"], found["steps"]) == ([], {"b": 2}, 56)
    assert {name: own["steps"] for name, own in found["owners"].items()} == {"a": 20, "b": 16, "c": 20}
    assert "b was lost and came back, and has missed 2 turns" in found["notes"]
    part = Plan(back, plan.placements)
    line = recovery_line(rd.LogRecovery(16, (), part, part, 1.0, (), returned=("b",)))
    assert (line["returned"], line["missed_turns"], line["num_steps"]) == (["b"], {"b": 2}, 56)
    assert line["lost"] == [] and "left_out" not in line
    keeps = job(train__keep_best=True, train__eval_every=4)
    assert owners_text(keeps, lost, back) == (
        "; the rows of b are trained again (b has missed 2 turns), so that the run ends with step 56; the best of the "
        "evaluations from here on, which are with them, is kept"
    )
    again = training_facts(without_owner(back, "b", 12))
    assert (again["left_out"], again["missed_turns"]) == (["b"], {"b": 2})
    assert "b is lost, and its rows are left out after 3 of its turns" in again["notes"]


def word_span(word: str, start_s: float = 1001.0, end_s: float = 1002.0) -> Span:
    """A printed action with its times."""
    return Span(parse_action(word, 4), start_s, end_s)


def trace(*spans: Span) -> list[dict[str, Any]]:
    """The complete events of a trace in which node b did these."""
    text = TraceText(["a", "b"], num_blocks=4, started_unix_s=1000.0)
    whole = text.begin() + text.spans("b", spans[:1]) + text.spans("b", spans[1:]) + text.end()
    return [event for event in json.loads(whole)["traceEvents"] if event["ph"] == "X"]


def test_trace_events_have_microseconds_and_places() -> None:
    """A run that fails at once leaves a trace that opens."""
    text = TraceText(["a"], num_blocks=4, started_unix_s=0.0)
    assert json.loads(text.begin() + text.end())["displayTimeUnit"] == "ms"
    # A node's clock may be set back while an action runs
    (event,) = trace(word_span("K1", 1001.0, 1000.0))
    assert (event["name"], event["cat"], event["dur"]) == ("save", "save", 0.0)
    # Waiting for the wire keeps no processor busy
    assert word_span("f0.0[0,1)").is_compute
    assert not word_span(">h0.0#1@a").is_compute
    assert not word_span("<t1@a").is_compute
    # Times are microseconds since the start; a node is a process, sends are a thread of their own
    compute, send = trace(word_span("F3.1[2,4)", 1000.5, 1000.75), word_span(">h3.1#4@a", 1000.75, 1000.8))
    assert (compute["ts"], compute["dur"]) == (500000.0, 250000.0)
    assert compute["pid"] == send["pid"] == 2
    assert compute["tid"] != send["tid"]
    assert (compute["name"], send["name"]) == ("forward with graph [2,4)", "send hidden state to a")
    assert compute["cat"] == "forward with graph"
    assert compute["args"] == {"action": "F3.1[2,4)", "item": 3, "microbatch": 1}
    # Sends to two nodes may overlap, which one thread can't show; each name stands once, before its first event
    text = TraceText(["a", "b", "c"], num_blocks=4, started_unix_s=1000.0)
    words = [">h0.0#2@a", ">g0.0#4@c", ">h0.1#2@a"]
    events = json.loads(text.begin() + text.spans("b", map(word_span, words)) + text.end())["traceEvents"]
    named = [event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 2]
    assert named == ["compute", "wire a", "wire c"]
    sends = [event["tid"] for event in events if event["ph"] == "X"]
    assert sends[0] == sends[2] != sends[1]


def test_books_leave_out_what_is_no_action(caplog: pytest.LogCaptureFixture) -> None:
    """A word that nobody knows ends no run: node and word are logged, the spans beside it count."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"])
    written: list[Any] = []
    books = RunRecorder(plan, job(), profile_of(plan), written.append)
    books.granted([turn(0)])
    report = control_pb2.ReportRequest(run_id="r", node="b", number=1)
    for action in ("Q1", "f0.0[2,3)"):
        report.spans.add(action=action, start_unix_s=1000.0, end_unix_s=1001.0)
    books.add_report(report)
    assert "node b reports an invalid action, which is left out: 'Q1' is not an action" in caplog.text
    assert books.ledger.nodes["b"].busy_s == 1.0


def test_recording_is_whole_from_its_header_on_and_bounded() -> None:
    """A node writes the header while it is prepared; 64 MB of one granted step is more than it has done."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"])
    sent: list[control_pb2.RunEvent] = []
    books = RunRecorder(plan, job(runtime__record=True), profile_of(plan), sent.append)
    books.add_report(control_pb2.ReportRequest(node="b", number=1, recording="header\n"))
    books.granted([turn(0)])
    for text in ("first\n", "x" * (64 << 20), "later\n"):
        books.add_report(control_pb2.ReportRequest(node="b", number=1, recording=text))
    books.close()
    assert b"".join(event.file.chunk for event in sent if event.WhichOneof("event") == "file") == b"header\nfirst\n"


def turn(index: int, *, steps: int = 2, kind: StepKind = StepKind.TRAIN) -> Turn:
    """A turn of some steps, behind others of as many."""
    first = index * steps
    return Turn(
        index=index, kind=kind, owner="a", round=0, first_seq=first, num_items=steps, first_step=first, first_batch=0
    )


def turn_span(seq: int, start_s: float, end_s: float, op: Op = Op.BACKWARD) -> Span:
    """An action of an item."""
    return Span(Action(op, seq, 0, 0, 2), start_s, end_s)


def test_activity_shares_add_up() -> None:
    """The docstring's picture: 3 s of work, 2 s of waiting inside an item, the rest idle."""
    kept = Activity()
    kept.granted([turn(0)])
    kept.add("a", [turn_span(0, 0, 1), turn_span(0, 1, 2), turn_span(0, 4, 5), turn_span(1, 8, 10)])
    kept.add("b", [turn_span(1, 0, 10)])
    found = kept.turn_done(turn(0), ["a", "b", "c"])
    assert found is not None
    assert found["nodes"] == {"a": [0.5, 0.2, 0.3], "b": [1.0, 0.0, 0.0], "c": [0.0, 0.0, 1.0]}
    assert (found["step"], found["seconds"]) == (2, 10.0)
    # Work for the next turn that is done early is busy time of this one, and is not counted again
    kept = Activity()
    kept.granted([turn(0), turn(1)])
    kept.add("a", [turn_span(0, 0, 4), turn_span(2, 4, 6), turn_span(1, 9, 10)])
    assert kept.turn_done(turn(0), ["a"])["nodes"] == {"a": [0.7, 0.3, 0.0]}  # type: ignore[index]
    kept.add("a", [turn_span(2, 10, 12), turn_span(3, 18, 20)])
    assert kept.turn_done(turn(1), ["a"])["nodes"] == {"a": [0.4, 0.0, 0.6]}  # type: ignore[index]


def test_activity_shows_the_last_step_of_a_turn() -> None:
    """Its actions in the order of their starts, in milliseconds from the first one."""
    kept = Activity()
    kept.granted([turn(0)])
    kept.add("b", [turn_span(1, 5.5, 6.0)])
    kept.add("a", [turn_span(0, 0, 1), turn_span(1, 5.0, 5.25, Op.FORWARD)])
    found = kept.turn_done(turn(0), ["a", "b"])
    assert found is not None
    assert found["spans"] == [["a", "F", 0, 0, 2, 0.0, 250.0], ["b", "B", 0, 0, 2, 500.0, 500.0]]
    # An embedding that ran ahead lies before it; what needs the update of the step before does not, however early
    for ends_s, forward_s, begin_s in ((5.0, 5.5, 5.0), (5.0, 4.5, 4.5), (0.5, 5.5, 1.0), (-math.inf, 5.5, 1.0)):
        spans = [("a", turn_span(1, 1.0, 2.0, Op.EMBED)), ("a", turn_span(1, forward_s, 6.0, Op.FORWARD))]
        assert step_begin(spans, ends_s) == begin_s
    kept = Activity()
    kept.granted([turn(0)])
    kept.add("a", [turn_span(0, 0, 5), turn_span(1, 1.0, 1.5, Op.EMBED), turn_span(1, 5.5, 6.0, Op.FORWARD)])
    found = kept.turn_done(turn(0), ["a"])
    assert found is not None
    assert [(letter, at) for _, letter, _, _, _, at, _ in found["spans"]] == [("E", -4000.0), ("F", 500.0)]


def test_step_waits_are_for_whoever_works_on_what_is_needed() -> None:
    """A step of two nodes; every second of a gap is somebody's, and a node that works all the time waits for nobody.

    ::

        seconds   0  1  2  3  4  5  6  7  8  9
        a         E  F  F  .  .  H  .  .  .  B
        b         .  .  .  .  F  .  .  B  B  .
    """
    step = [
        ("a", Span(Action(Op.EMBED, 0, 0, -1, 0), 0, 1)),
        ("a", Span(Action(Op.FORWARD, 0, 0, 0, 2), 1, 3)),
        ("b", Span(Action(Op.FORWARD, 0, 0, 2, 4), 4, 5)),
        ("a", Span(Action(Op.HEAD, 0, 0, 4, 5), 5, 6)),
        ("b", Span(Action(Op.BACKWARD, 0, 0, 2, 4), 7, 9)),
        ("a", Span(Action(Op.BACKWARD, 0, 0, 0, 2), 9, 10)),
    ]
    assert step_waits(step, 0.0) == {"a": {"a>": 2.0, "b": 3.0}, "b": {"a": 4.0, "a>": 2.0}}
    assert step_waits([one for one in step if one[0] == "a"], 0.0) == {"a": {}}


def test_activity_is_bounded() -> None:
    """Of a step with very many actions some are left out, and counted; of long turns items are put together."""
    kept = Activity()
    kept.granted([turn(0, steps=2000)])
    kept.add("a", (turn_span(seq, seq, seq + 0.5) for seq in range(1999)))
    kept.add("a", (turn_span(1999, 1999 + at / 10_000, 1999 + (at + 0.5) / 10_000) for at in range(MAX_SPANS + 5)))
    found = kept.turn_done(turn(0, steps=2000), ["a"])
    assert found is not None
    assert (len(found["spans"]), found["left_out"]) == (MAX_SPANS, 5)
    assert found["nodes"]["a"][0] == pytest.approx(0.5, abs=0.01)


def test_books_tell_an_onlooker_and_nobody_else() -> None:
    """What nodes did is neither sent to the submitter nor kept; without an onlooker it is not even counted."""
    sent: list[control_pb2.RunEvent] = []
    seen: list[control_pb2.RunEvent] = []
    books = RunRecorder(
        make_plan([("a", 0, 2), ("b", 2, 4)], ["a"]), job(), Profile(nodes=(facts("a"), facts("b"))), sent.append
    )
    books.onlooker = seen.append
    books.granted([turn(0)])
    report = control_pb2.ReportRequest(node="a")
    report.spans.add(action="F1.0[0,2)", start_unix_s=10.0, end_unix_s=11.0)
    books.add_report(report)
    books.log(rd.LogTurn(turn(0)))
    assert [event.WhichOneof("event") for event in seen] == ["activity_json"]
    assert "activity_json" not in {event.WhichOneof("event") for event in sent}


LINK = LinkFacts(source="a", target="b", rate_bytes_per_s=12e6, latency_s=0.002)
UNUSED = LinkFacts(source="b", target="a", rate_bytes_per_s=12e6, latency_s=0.002)


def books() -> RunRecorder:
    """Books of a run on two nodes whose links carry 12 MB/s."""
    profile = Profile(nodes=(facts("a"), facts("b")), links=(LINK, UNUSED))
    return RunRecorder(make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"]), job(), profile, lambda event: None)


def test_books_correct_a_link_by_the_transfers_that_its_receiver_reports() -> None:
    """Eight messages of 200 kB from a took 40 ms at b: the link from a to b carries 5 MB/s, the other one is left."""
    kept = books()
    request = control_pb2.ReportRequest(node="b")
    for index in range(MIN_SAMPLES):
        request.transfers.add(source="a", bytes=200_000, seconds=LINK.latency_s + 0.04, at_unix_s=100.0 + index)
    kept.add_report(request)
    slower, same = kept.profile().links
    assert (slower.source, slower.target) == ("a", "b")
    assert slower.rate_bytes_per_s == pytest.approx(5e6)
    assert same == UNUSED
    assert kept.shown_links() == (slower,)
