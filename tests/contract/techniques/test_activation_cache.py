"""The cache of activations: frozen blocks, when a batch comes again, where it is kept, and how much a host keeps."""

from __future__ import annotations

import itertools
import random

import pytest

from ringtune.errors import PlanError
from ringtune.schedule.placement import ActivationCacheSettings, Passage
from ringtune.schedule.plan import Plan
from ringtune.schedule.table import build_table, format_table
from ringtune.schedule.turns import StepKind, Turn, items, turn_sequence
from ringtune.schedule.versions import trained, weight_version
from ringtune.techniques.activation_cache import (
    boundary_to_keep,
    entry_bytes,
    frozen_prefix,
    is_cacheable,
    key_of,
    later_visits,
    max_kept_bytes,
)
from tests.support.cases import cases
from tests.support.plans import changed, make_plan, random_operations, random_plan

AB = [("a", 0, 2), ("b", 2, 4)]
TRAIN, EVALUATE = StepKind.TRAIN, StepKind.EVALUATE


def test_frozen_prefix_is_what_no_unit_below_was_trained_before_or_now() -> None:
    """For any method and step, by asking every block."""
    for seed in range(60):
        course = random_plan(random.Random(seed)).course
        for step, kind in itertools.product(range(course.num_steps), (TRAIN, EVALUATE)):
            used = trained(course, kind, step)
            fresh = [
                block not in used and not weight_version(course, block, step) for block in range(course.num_blocks)
            ]
            below = next((block for block in range(course.num_blocks) if not fresh[block]), course.num_blocks)
            assert frozen_prefix(course, kind, step) == min(below, course.num_blocks - 1)


@cases(
    ("prefixes", "boundary"),
    [
        ([5], 0),  # it does not come again
        ([5, 5], 5),
        ([5, 4, 3, 3], 3),  # kept once for three visits: 9 blocks, against 4 + 3 where it is kept anew between
        ([11, 11, 11, 1], 11),  # the last visit is not worth it
        ([11, 10, 1, 1], 10),
        ([3, 0, 0], 0),
    ],
)
def test_batch_is_kept_where_all_visits_save_most(prefixes: list[int], boundary: int) -> None:
    """A later visit that trains below begins at the embedding again."""
    assert boundary_to_keep(tuple(prefixes)) == boundary


def best_saving(prefixes: tuple[int, ...]) -> int:
    """The most blocks that visits can save, by trying every set of visits that begin at the embedding."""
    found = 0
    for starts in itertools.product([False, True], repeat=len(prefixes) - 1):
        cuts = [0, *(at + 1 for at, is_whole in enumerate(starts) if is_whole), len(prefixes)]
        found = max(found, sum((stop - start - 1) * prefixes[stop - 1] for start, stop in itertools.pairwise(cuts)))
    return found


def saving(prefixes: tuple[int, ...]) -> int:
    """The blocks that visits save by the rule, where what is kept is read as long as it can be."""
    kept, found = 0, 0
    for at, prefix in enumerate(prefixes):
        if 0 < kept <= prefix:
            found += kept
        else:
            kept = boundary_to_keep(prefixes[at:])
    return found


def test_no_other_choice_of_boundaries_saves_more() -> None:
    """Random visits, at most nine."""
    rng = random.Random(0)
    for _ in range(200):
        prefixes = tuple(sorted((rng.randint(0, 11) for _ in range(rng.randint(1, 9))), reverse=True))
        assert saving(prefixes) == best_saving(prefixes)


def test_entry_in_bfloat16_has_half_of_the_hidden_state() -> None:
    """Four rows of 16 tokens, 32 wide."""
    plan = make_plan(AB, ["a"])
    exact, rounded = (
        entry_bytes(plan.course, changed(plan, cache=ActivationCacheSettings(dtype=dtype)).placement, "b", 4)
        for dtype in ("float32", "bfloat16")
    )
    assert exact - rounded == 4 * 16 * 32 * 2


def test_replicas_keep_their_own_micro_batches() -> None:
    """Of rows 2, 1 and 1 in three micro-batches b has the first and the last, c the one between."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4), ("c", 2, 4)], ["a"], microbatches=3)
    placement = changed(plan, cache=ActivationCacheSettings()).placement
    row_bytes = 16 * (32 * 4 + 1)
    found = {host: entry_bytes(plan.course, placement, host, 4) for host in "abc"}
    assert found == {"a": 4 * row_bytes + 3 * 4096, "b": 3 * row_bytes + 2 * 4096, "c": row_bytes + 4096}


def test_host_keeps_no_more_than_all_batches_and_the_limit() -> None:
    """Ten rows are three batches of training; three rows of evaluation are one."""
    plan = changed(make_plan(AB, ["a"]), cache=ActivationCacheSettings())
    course = plan.course
    each = [entry_bytes(course, plan.placement, "b", rows) for rows in (4, 4, 4, 3)]
    assert max_kept_bytes(course, plan.placement, "b") == sum(each)
    assert max_kept_bytes(course, changed(plan, cache=ActivationCacheSettings(max_bytes=100)).placement, "b") == 100
    assert max_kept_bytes(course, changed(plan, cache=None).placement, "b") == 0


def cached(passage: Passage, plan: Plan) -> str:
    """The table of one train item with a passage."""
    turn = Turn(
        index=0,
        kind=TRAIN,
        owner="a",
        round=0,
        first_seq=0,
        num_items=1,
        first_step=0,
        first_batch=0,
        passages=(passage,),
    )
    return format_table(build_table(plan, [turn]), plan.course.num_blocks)


def test_table_of_a_batch_that_is_kept_or_read() -> None:
    """It is kept on its way up; read, it passes nobody below."""
    plan = make_plan(AB, ["a"], microbatches=1, num_steps=1)
    kept, read = cached(Passage(keeps=3), plan), cached(Passage(enters=3), plan)
    words = [line.split()[1:] for line in kept.splitlines()[2:]]
    assert [word for _, word in words if word != "."] == [
        "<h0.0#2@a", "f0.0[2,3)", "W0.0[3,4)", "F0.0[3,4)", ">h0.0#4@a", "<g0.0#4@a", "B0.0[3,4)", "U0[3,4)",
    ]  # fmt: skip
    words = [line.split()[1:] for line in read.splitlines()[2:]]
    assert [word for word, _ in words if word != "."] == ["<h0.0#4@b", "H0.0", ">g0.0#4@b", "U0[head]"]
    assert [word for _, word in words if word != "."][:3] == ["R0.0[3,4)", "F0.0[3,4)", ">h0.0#4@a"]


@cases("passage", [Passage(enters=4), Passage(keeps=4), Passage(enters=2, keeps=3)])
def test_passage_that_no_coordinator_decides_is_refused(passage: Passage) -> None:
    """A batch can't enter above a block that trains, nor be kept where it does not pass."""
    with pytest.raises(PlanError, match=f"enters at block {passage.enters} and is kept at block {passage.keeps}"):
        cached(passage, make_plan(AB, ["a"], microbatches=1, num_steps=1))


def test_cache_is_refused_where_it_can_not_work() -> None:
    """Full-parameter methods, tables, and helpers are each named."""
    plan = make_plan(AB, ["a"], num_steps=4)
    table = random_operations(random.Random(0), plan.course)
    with pytest.raises(PlanError, match="can't keep hidden states: operation tables"):
        changed(plan, cache=ActivationCacheSettings(), operations=table)


def test_later_visits_are_those_of_the_whole_run() -> None:
    """For any owners, rows and lengths of turns, against the run as it goes; turns equal and by rows."""
    for seed in range(30):
        rng = random.Random(seed)
        plan = changed(random_plan(rng), num_steps=rng.randint(1, 60))
        course = plan.course
        passes = [item for turn in turn_sequence(course) for item in items(course, turn) if is_cacheable(turn.kind)]
        for at, item in enumerate(passes):
            same = [later.step for later in passes[at + 1 :] if key_of(course, later) == key_of(course, item)]
            assert list(later_visits(course, item)) == same, (seed, item)
