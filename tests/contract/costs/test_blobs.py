"""Heads, gradients of units and parcels of helpers that are larger than a link takes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ringtune.costs.blobs import MAX_BLOB_BYTES, check_blobs, check_parcels
from ringtune.costs.memory.sizes import Sizes
from ringtune.errors import CapacityError, PlanError
from ringtune.schedule.course import Course
from ringtune.schedule.helped import helped
from ringtune.schedule.helping.offload import Manner
from ringtune.schedule.placement import Slice
from tests.contract.costs.memory.by_method.test_full_parameters import plan
from tests.support.model_facts import ROUND as MODEL
from tests.support.plans import changed, make_plan

BOTH = ("a", "b")
TABLE = 2 * MAX_BLOB_BYTES
ADAPTERS = make_plan([("a", 0, 4)], BOTH, num_steps=8, hidden_size=2).course


def check(course: Course, optimizer: str = "adamw", **sizes: Any) -> None:
    """Check a course with a model of these sizes."""
    model = dataclasses.replace(MODEL, **sizes)
    check_blobs(course, Sizes(course, model, optimizer=optimizer, dtype="float32", activation_token_bytes=200))


def test_tied_table_that_no_link_takes_is_refused_by_name_with_both_numbers() -> None:
    """It travels whole; a smaller batch does not help."""
    table: dict[str, Any] = {"embedding_train_bytes": TABLE, "token_table_bytes": TABLE, "is_tied": True}
    with pytest.raises(PlanError) as refused:
        check(plan(BOTH).course, **table)
    assert str(refused.value) == (
        "the gradient of the embedding, a table tied to the head, has up to 2,048 MiB, a message between owners at "
        "most 1,024 MiB; give one node all rows (data.owners = 1, or --data at one node)"
    )
    check(plan(("b",)).course, **table)
    check(changed(plan(BOTH), num_steps=0).course, **table)


def test_rows_of_a_table_that_no_link_takes_are_refused() -> None:
    """64 tokens of a batch, of 100 rows of 20 MiB; half of them are sent."""
    table: dict[str, Any] = {"embedding_train_bytes": TABLE, "token_table_bytes": TABLE}
    with pytest.raises(PlanError, match=r"gradient of the embedding has up to 1,311 MiB.*; lower train\.batch_size or"):
        check(plan(BOTH).course, **table)
    check(changed(plan(BOTH), max_length=8).course, **table)


def test_head_that_no_link_takes_is_refused() -> None:
    """Its gradient where all trains; with adapters its optimizer state too, which plain steps have not."""
    with pytest.raises(
        PlanError, match=r"the gradient of the head has up to 2,048 MiB, .* at most 1,024 MiB; give one"
    ):
        check(plan(BOTH).course, head_bytes=TABLE)
    with pytest.raises(PlanError, match=r"the head with its optimizer state has up to 1,536 MiB, .*'sgd'"):
        check(ADAPTERS, head_bytes=MAX_BLOB_BYTES // 2)
    check(ADAPTERS, "sgd", head_bytes=MAX_BLOB_BYTES // 2)
    with pytest.raises(PlanError, match=r"has up to 2,048 MiB.* 1,024 MiB; give one node"):
        check(ADAPTERS, "sgd", head_bytes=TABLE)


def test_parcels_of_helpers_that_no_link_takes_are_refused() -> None:
    """A micro-batch's pairs of a block, and its adapters on their way back: host, helper, both numbers and the way."""

    def check_helped(manner: Manner, **sizes: Any) -> None:
        given = helped(make_plan([("a", 0, 4)], ["a"], num_steps=8, hidden_size=2, microbatches=2), {"a": "z"}, manner)
        model = dataclasses.replace(MODEL, **sizes)
        check_parcels(given, Sizes(given.course, model, optimizer="sgd", dtype="float32", activation_token_bytes=200))

    course = make_plan([("a", 0, 4)], ["a"], num_steps=8, hidden_size=2, microbatches=2).course
    most = MAX_BLOB_BYTES // (course.microbatch_sizes()[0] * course.max_length)
    check_helped(Manner(), pair_token_bytes=most)
    with pytest.raises(CapacityError) as refused:
        check_helped(Manner(), pair_token_bytes=2 * most)
    assert str(refused.value) == (
        "the pairs of a's blocks [0, 1) for helper z have up to 2,048 MiB, a message at most 1,024 MiB; raise "
        "train.microbatches, set offload.pairs = 'bfloat16', or leave a's blocks [0, 1) without helper (offload.mode)"
    )
    check_helped(Manner(pairs="bfloat16"), pair_token_bytes=2 * most, pair_rounded_token_bytes=most)
    with pytest.raises(CapacityError, match=r"adapters of a's blocks \[0, 1\) from helper z have up to 2,048 MiB"):
        check_helped(Manner(), adapter_block_bytes=TABLE)


def test_gradients_between_replicas_that_no_link_takes_are_refused() -> None:
    """Where the blocks' own weights train: hosts, blocks, both numbers; a ring of single hosts sends none."""
    ring = make_plan([("a", 0, 4)], ["o"], num_blocks=4, num_steps=8, microbatches=2, method="all")
    both = changed(ring, slices=(Slice(node="a", start=0, stop=4), Slice(node="b", start=0, stop=4)))
    for given, share, refused in ((ring, 2, False), (both, 4, False), (both, 2, True)):
        model = dataclasses.replace(MODEL, adapter_block_bytes=MAX_BLOB_BYTES // share)
        sizes = Sizes(given.course, model, optimizer="sgd", dtype="float32", activation_token_bytes=200)
        if not refused:
            check_parcels(given, sizes)
            continue
        with pytest.raises(CapacityError) as told:
            check_parcels(given, sizes)
        assert str(told.value) == (
            "the gradient of blocks [0, 4), which nodes a, b send each other, has up to 2,048 MiB, a message at most "
            "1,024 MiB; give each other blocks, or take smaller adapters"
        )
