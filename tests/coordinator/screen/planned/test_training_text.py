"""What a run says before it starts: how much of the rows is used, by whom, in which classes."""

from __future__ import annotations

from dataclasses import replace

from coordinator.records.training_facts import training_facts
from coordinator.screen.planned.training_text import training_lines
from ringtune.schedule.course import Course
from ringtune.schedule.methods import Hift
from tests.support.plans import changed, make_plan


def course(*rows: int, **values: object) -> Course:
    """A course of owners with so many rows, in turns of two steps."""
    names = [f"node-{index}" for index in range(len(rows))]
    plan = make_plan([("node-0", 0, 4)], names, local_iterations=2, batch_size=4)
    owners = tuple(replace(owner, train_rows=own) for owner, own in zip(plan.course.owners, rows, strict=True))
    return changed(plan, **{"owners": owners, **values}).course


def test_training_lines_say_which_part_of_the_rows_is_used() -> None:
    """Twelve steps of four rows are 14 % of 343 rows, and that is said, with what would use them all."""
    assert training_lines(course(172, 171, num_steps=12)) == [
        "trains 12 steps in 3 rounds (turns of 2 steps, equal): 48 of 343 rows (14%), 0.14 epochs",
        "  node-0  6 steps of 4 rows: 24 of its 172 rows, each once",
        "  node-1  6 steps of 4 rows: 24 of its 171 rows, each once",
        "2 classes: neg, pos",
        "note: not every row is used; train.epochs = 1 would use each about once",
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


def test_training_lines_name_owners_with_few_rows_and_with_none_used() -> None:
    """An owner with fewer rows than a batch, and one that has no turn at all."""
    small = training_lines(course(40, 3, num_steps=20))
    assert "note: fewer rows than a batch of 4, so smaller batches: node-1 3" in small
    idle = training_lines(course(40, 40, num_steps=2))
    assert idle[-1].startswith("note: no turn in 2 steps, so no row is used: node-1; train longer")


def test_training_lines_name_classes_that_look_alike() -> None:
    """A space before a name makes another class: that is seen, and quoted."""
    lines = training_lines(course(16, labels=(" pos", "Neg", "neg", "pos")))
    assert "4 classes: ' pos', Neg, neg, pos" in lines
    assert [line for line in lines if "different classes" in line] == [
        f"note: {names} are different classes, though they differ in spaces or capitals only; correct the rows?"
        for names in ("' pos' and 'pos'", "'Neg' and 'neg'")
    ]


def test_training_lines_of_many_owners_and_classes_stay_short() -> None:
    """Eight of each, and how many more."""
    labels = tuple(f"class-{index:02}" for index in range(30))
    lines = training_lines(course(*[40] * 20, num_steps=400, labels=labels))
    assert len(lines) == 1 + 8 + 1 + 1
    assert lines[9] == "  and 12 more owners, 2 to 2 epochs each"
    assert lines[10].endswith("class-07 and 22 more")


def test_training_facts_are_those_of_an_evaluation_too() -> None:
    """Nothing is trained: no lines, and no row is used."""
    evaluation = course(16, num_steps=0)
    assert training_lines(evaluation) == []
    assert training_facts(evaluation)["used_rows"] == 0


def test_training_lines_warn_of_turns_that_keep_step_with_sweeps() -> None:
    """Six groups, two owners, turns of three steps: each owner's rows would train one half of the model."""
    plan = make_plan([("a", 0, 4)], ["a", "b"], method=Hift(), local_iterations=3, num_steps=60)
    lines = training_lines(plan.course)
    note = "note: turns of 3 steps keep step with sweeps of 6, so that rows of a, b train some of the groups only; "
    assert note + "train.local_iterations = 4 would mix them" in lines
    mixed = make_plan([("a", 0, 4)], ["a", "b"], method=Hift(), local_iterations=4, num_steps=60)
    assert not any("keep step" in line for line in training_lines(mixed.course))
