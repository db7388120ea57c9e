"""The ledgers of a run: lines for steps, totals for nodes and links, and what operations have saved."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from coordinator.run.report import OperationsLedger, RunLedger, mean
from coordinator.screen.training_text import saved_lines
from ringtune.engine.events import Span
from ringtune.errors import IntegrityError
from ringtune.quantities import format_seconds
from ringtune.schedule.actions import Action, Op, Payload, parse_action
from ringtune.schedule.methods import Hift
from ringtune.schedule.operation_tables import BatchOperations, Operations
from ringtune.schedule.placement import Helper
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StepKind, Turn, turn_sequence
from ringtune.schedule.versions import depth, ever_trained
from tests.support.fake_agents import job
from tests.support.plans import make_plan
from tests.support.profiles import TIMES, profile_of

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
    values = {"loss_sum": 4 * loss, "count": 4.0, "correct": 3.0}
    books.step_done(turn, turn.first_seq + offset, number, depth(PLAN.course, number), values, ended_unix_s)


def test_ledger_lines_have_bytes_and_seconds() -> None:
    """A line has the seconds since the last step, and what all nodes sent for it."""
    books, turn = ledger(), TURNS[0]
    books.add_traffic("a", turn.first_seq, "b", "h", 100)
    books.add_traffic("a", turn.first_seq, "b", "g", 40)
    books.add_traffic("b", turn.first_seq, "a", "h", 7)
    step(books, turn, 0, 0.5, 101.0)
    step(books, turn, 1, 0.25, 103.5)
    first, second = books.turn_done(turn)
    assert first["bytes"] == {"a>b": 140, "b>a": 7}
    assert first["gradient_bytes"] == {"a>b": 40}
    assert [first["seconds"], second["seconds"]] == [1.0, 2.5]
    assert [first["loss"], second["loss"]] == [0.5, 0.25]
    assert first["accuracy"] == 0.75
    assert second["bytes"] == {}


def test_seconds_of_steps_have_no_evaluation_in_them() -> None:
    """A step that begins after an evaluation is timed from its end, as the simulator does; the report adds them up."""
    books, turn = ledger(), TURNS[0]
    step(books, turn, 0, 0.5, 101.0)
    step(books, turn, 1, 0.5, 102.0)
    books.turn_done(turn)
    at = turn.end_seq
    judging = dataclasses.replace(turn, kind=StepKind.EVALUATE, index=1, first_seq=at, num_items=2)
    for index, ended_unix_s in enumerate((105.0, 112.0)):
        books.step_done(judging, at + index, turn.end_step, 1, {"loss_sum": 1.0, "count": 4.0}, ended_unix_s)
    assert books.turn_done(judging) == []
    after = dataclasses.replace(TURNS[1], first_seq=at + 2)
    step(books, after, 0, 0.5, 112.5)
    assert [line["seconds"] for line in books.turn_done(after)] == [0.5]
    assert books.report(run_id="r", wall_s=1.0, phases_s={}, predicted_bytes={})["steps_s"] == 2.5


def test_ledger_never_counts_negative_seconds() -> None:
    """Another owner's clock may be behind; its first step then takes no time."""
    books, turn = ledger(), TURNS[0]
    step(books, turn, 0, 0.5, 101.0)
    step(books, turn, 1, 0.5, 100.9)
    assert [line["seconds"] for line in books.turn_done(turn)] == [1.0, 0.0]


def test_ledger_shows_late_bytes_in_the_next_line() -> None:
    """A hand-over that is reported after its turn was closed is not lost."""
    books, first, second = ledger(), TURNS[0], TURNS[1]
    step(books, first, 0, 0.5, 101.0)
    books.turn_done(first)
    books.add_traffic("a", first.first_seq, "b", "t", 11)
    step(books, second, 0, 0.5, 102.0)
    assert books.turn_done(second)[0]["bytes"] == {"a>b": 11}


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
    assert books.unfrozen(TURNS[1].first_step, 2) == {"kind": "unfreeze", "step": 2, "depth": 2}
    step(books, TURNS[0], 0, 0.5, 101.0)
    assert [line["step"] for line in books.turn_done(TURNS[0])] == [1]
    step(books, TURNS[1], 0, 0.5, 102.0)
    assert [(line["kind"], line["step"]) for line in books.turn_done(TURNS[1])] == [("unfreeze", 2), ("train", 3)]
    assert books.turn_done(TURNS[2]) == []


def test_ledger_writes_a_table_before_the_first_step_that_has_it() -> None:
    """Its digest and how many operations of each kind; turns that only evaluate or score have no such line."""
    books = ledger()
    table = Operations(batches=(BatchOperations(owner="a", batch_id=0, rows=("1132", "1133")),))
    counts = {"full": 4, "forward_only": 1, "shortcut": 3}
    line = {"kind": "operations", "step": 2, "digest": table.digest, **counts}
    assert books.operations_chosen(2, table) == line
    score = dataclasses.replace(TURNS[1], kind=StepKind.SCORE)
    assert books.turn_done(TURNS[0]) == [] == books.turn_done(score)
    step(books, TURNS[1], 0, 0.5, 102.0)
    assert [entry["kind"] for entry in books.turn_done(TURNS[1])] == ["operations", "train"]


def test_ledger_counts_operations_of_blocks_that_train_only() -> None:
    """Blocks that never train are full in each table, which says nothing; here the upper half trains."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_steps=2, every_steps=1)
    assert ever_trained(plan.course).blocks == (2, 3)
    table = Operations(batches=(BatchOperations(owner="a", batch_id=0, rows=("1132", "1133")),))
    line = RunLedger(plan, job()).operations_chosen(0, table)
    assert [line[name] for name in ("full", "forward_only", "shortcut")] == [0, 1, 3]


def test_ledger_numbers_the_batches_of_a_turn_that_trains_nothing() -> None:
    """So that one sees how far it has come."""
    score = dataclasses.replace(TURNS[1], kind=StepKind.SCORE)
    progress = ledger().step_done(score, score.first_seq + 1, 0, 0, {}, 101.0)
    assert (progress["batch"], progress["batches"]) == (2, score.num_items)


@pytest.mark.parametrize(("local_iterations", "expected"), [(1, 0.25), (2, 0.375), (4, 1.0)])
def test_ledger_mean_loss_is_that_of_one_turn_of_steps(local_iterations: int, expected: float) -> None:
    """Losses 2, 1.25, 0.5 and 0.25: turns of 1, 2 and 4 steps end with a mean of 0.25, 0.375 and 1."""
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


def test_ledger_of_a_diverged_run_is_still_json() -> None:
    """A loss that is no number becomes null: JSON has no NaN."""
    books, turn = ledger(), TURNS[0]
    step(books, turn, 0, math.nan, 101.0)
    step(books, turn, 1, math.inf, 102.0)
    lines = books.turn_done(turn)
    assert [line["loss"] for line in lines] == [None, None]
    json.dumps(lines, allow_nan=False)


def test_ledger_gives_the_loss_of_the_last_step_whoever_reports_first() -> None:
    """Screen, status, metrics and report agree on it; a mean says over how many steps it is."""
    books, first, second = ledger(), TURNS[0], TURNS[1]
    step(books, first, 0, 0.8, 101.0)
    step(books, second, 0, 0.25, 103.0)
    step(books, first, 1, 0.6, 102.0)  # another owner's report came before
    lines = [*books.turn_done(first), *books.turn_done(second)]
    report = books.report(run_id="r", wall_s=1.0, phases_s={}, predicted_bytes={})
    assert report["train"]["last_loss"] == lines[-1]["loss"] == 0.25
    assert (report["train"]["mean_loss"], report["train"]["mean_steps"]) == (pytest.approx(0.425), 2)


def test_ledger_without_evaluation_says_so() -> None:
    """No evaluation rows: count 0 and no accuracy, instead of a made-up one."""
    report = ledger().report(run_id="r", wall_s=1.0, phases_s={}, predicted_bytes={})
    assert report["eval"] == {"accuracy": None, "loss": None, "rows": 0, "count": 0}
    assert report["train"] == {"first_loss": None, "last_loss": None, "mean_loss": None, "mean_steps": 0}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
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
    ],
    ids=["language", "questions", "diverged"],
)
def test_ledger_evaluates_by_task(values: dict[str, float], expected: dict[str, object]) -> None:
    """Sums over owners become what the task is judged by; windows of a question are not questions."""
    books = ledger()
    books.evaluation_done(4, values)
    assert books.report(run_id="r", wall_s=1.0, phases_s={}, predicted_bytes={})["eval"] == {
        "step": 4,
        "rows": EVAL_ROWS,
        **expected,
    }


def test_ledger_refuses_totals_without_figures() -> None:
    """Totals come from another machine and may miss a figure."""
    with pytest.raises(IntegrityError, match="totals of node a"):
        ledger().add_totals("a", {"peak_rss_bytes": 1})


def test_mean_of_nothing_is_none() -> None:
    """No rows, no mean."""
    assert mean({}, "loss_sum") is None
    assert mean({"count": 2.0, "loss_sum": 3.0}, "loss_sum") == 1.5


def test_report_counts_gradients_of_units_by_link() -> None:
    """What owners send each other of embedding and head has figures of its own, in the step's line and in the end."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], method=Hift(), num_steps=2, local_iterations=2)
    ledger = RunLedger(plan, job())
    turn = next(iter(turn_sequence(plan.course)))
    ledger.begin(0.0)
    ledger.add_traffic("a", 0, "b", Payload.UNIT_GRAD, 700)
    ledger.add_traffic("a", 0, "b", Payload.HIDDEN, 100)
    for seq in (0, 1):
        ledger.step_done(turn, seq, seq, 0, {"count": 1.0, "loss_sum": 1.0}, float(seq))
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
    ledger.step_done(turn, 0, 0, 0, {"count": 1.0, "loss_sum": 1.0}, 1.0)
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
    entry = books.nodes["a"]
    assert (entry.peak_versions, entry.peak_version_bytes) == (3, 300)
    assert entry.figures == {"cache_reads": 6, "cache_read_bytes": 60, "cache_most_kept_bytes": 700}


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
            ledger.add_spans("a", [span(Op.FORWARD, seq, 0.25), span(Op.BACKWARD, seq, 0.5), span(Op.EMBED, seq, 9.0)])
            ledger.add_traffic("a", seq, Payload.HIDDEN, 100)
            ledger.add_traffic("a", seq, Payload.HEAD, 1_000_000)
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
            ledger.add_spans("a", [span(Op.BACKWARD, seq, seconds), span(Op.EMBED, seq, 9.0)])
            ledger.add_traffic("a", seq, Payload.GRAD, 100)
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


def test_measured_seconds_are_compared_with_recorded_ones() -> None:
    """A run on boards that turned out half as fast has not done more."""
    plan, turns = planned("1111", "1133")
    ledger = OperationsLedger(plan, profile_of(plan))
    for turn in turns:
        ledger.turn_done(turn)
    slow = profile_of(plan, times={work: 2 * seconds for work, seconds in TIMES.items()})
    first, second = (ledger.report(recorded) for recorded in (profile_of(plan), slow))
    assert first is not None
    assert second is not None
    assert second["compute"]["all_full_s"] == pytest.approx(2 * first["compute"]["all_full_s"])
    assert second["compute"]["predicted"] == first["compute"]["predicted"]


@pytest.mark.parametrize("rows", [("2222", "3333"), ("1122", "1133")], ids=["nowhere", "not at node b"])
def test_seconds_of_all_full_are_not_measured_where_nothing_was_full(rows: tuple[str, str]) -> None:
    """Such a run never saw how long a full operation takes."""
    plan, turns = planned(*rows)
    ledger = OperationsLedger(plan, profile_of(plan))
    for turn in turns:
        ledger.turn_done(turn)
    found = ledger.report(profile_of(plan))
    assert found is not None
    assert (found["compute"]["all_full_s"], found["compute"]["measured"]) == (None, None)
    (line,) = [line for line in saved_lines(found) if line.startswith("  compute")]
    assert line.split(maxsplit=1)[1].startswith("not measured, ")


def test_run_in_which_everything_is_full_has_no_such_report() -> None:
    """Nothing is counted for it either."""
    plan, turns = planned()
    ledger = OperationsLedger(plan, profile_of(plan))
    ledger.turn_done(turns[0])
    assert ledger.report(profile_of(plan)) is None
