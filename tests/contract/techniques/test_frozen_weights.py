"""``runtime.frozen``: what it goes with, which types a planner may take, and what they take, by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ringtune.costs.memory_estimate import memory_estimate
from ringtune.costs.memory_sizes import KEPT_KERNELS, KERNEL_BYTES, MemorySettings, Sizes
from ringtune.costs.memory_terms import Share
from ringtune.job.job import Job, parse_job
from ringtune.schedule.course import FROZEN_DTYPES, FrozenWeights
from ringtune.techniques.frozen_weights import MAX_WIDENED_BYTES, frozen_bytes, frozen_choices, widened_bytes
from ringtune.techniques.operations import operations_of
from tests.support.cases import cases
from tests.support.plans import make_plan
from tests.support.profiles import node

BF16, INT8, NF4 = (FrozenWeights(dtype=dtype) for dtype in FROZEN_DTYPES)
CHOSEN = '[operations]\npolicy = "{policy}"\nfull = 2\n{more}\n'


def job(text: str = "", *, frozen: str = "float32") -> Job:
    """A job with more lines after ``[model]``."""
    return parse_job(f'[model]\npath = "x"\n{text}\n[runtime]\nfrozen = "{frozen}"\n', source="job.toml")


def choices(one: Job, *, is_native: bool = False) -> tuple[FrozenWeights | None, ...]:
    """What a planner may take for a job."""
    return frozen_choices(one, is_native=is_native)


@cases(
    ("frozen", "wanted"),
    [
        ("float32", (None,)),
        ("bfloat16", (BF16,)),
        ("int8", (INT8,)),
        ("nf4", (NF4,)),
        ("auto", (None, BF16, INT8, NF4)),
    ],
)
def test_frozen_choices_are_the_given_one_or_from_exact_to_small(
    frozen: str, wanted: tuple[FrozenWeights | None, ...]
) -> None:
    """A given type is the only choice; ``auto`` rounds no more than it has to."""
    assert choices(job(frozen=frozen)) == wanted


def test_frozen_choices_multiply_natively_where_every_node_can() -> None:
    """All nodes compute alike, so that the result does not depend on who hosts what."""
    found = choices(job(frozen="auto"), is_native=True)
    assert found == (None, *(FrozenWeights(dtype=dtype, native=True) for dtype in ("bfloat16", "int8", "nf4")))


def test_frozen_weights_stay_as_they_are_in_a_check_and_where_all_train() -> None:
    """``auto`` chooses nothing in float64, which has no rounded weights, and where nothing is frozen."""
    for text in ('dtype = "float64"', '[train]\nmethod = "hift"'):
        assert choices(job(text, frozen="auto")) == (None,)


@cases(
    ("policy", "more", "after", "scores"),
    [
        ("two-stage", "forward_only = 1", "", "adapter"),
        ("two-stage", 'backward_score = "taylor"', "", "adapter"),
        ("joint", "", "", "adapter"),
        ("magnitude-gradient", "", "", "adapter"),
        # weight magnitudes and lots take no backward, and are of the base weights
        ("two-stage", "", "", "base"),
        ("joint", 'forward_score = "weight-magnitude"', "", "base"),
        ("random", "forward_only = 1", "", "base"),
        ("magnitude", "", "", "base"),
        # the scored weights are no frozen ones
        ("joint", "", '[adapter]\nconfig = "full"\n', "base"),
        ("joint", 'scores = "adapter"', "", "adapter"),
    ],
)
def test_operations_are_scored_by_adapters_where_frozen_weights_have_no_gradients(
    policy: str, more: str, after: str, scores: str
) -> None:
    """A job with a small type has the scores that are left; ``auto`` takes float32 then, with what the job says."""
    text = CHOSEN.format(policy=policy, more=more) + after
    small = job(text, frozen="int8")
    assert choices(small) == (INT8,) and operations_of(small).scores == scores
    if scores == "adapter" and "scores" not in more:
        assert choices(job(text, frozen="auto")) == (None,)
        assert [operations_of(job(text, frozen=frozen)).scores for frozen in ("auto", "float32")] == ["base", "base"]


PLAN = make_plan([("a", 0, 4)], ["a"], batch_size=4, method="all", num_steps=8)


@cases(
    ("frozen", "in_blocks", "wanted"),
    [
        (None, True, 4_200),
        (BF16, True, 2 * 1_000 + 200),
        (INT8, True, 1_000 + 4 * 10 + 200),
        (NF4, True, 16 * (32 + 1) + 4 + 200),
        # tables and decoder: a byte a number, and a scale for each row
        (NF4, False, 1_000 + 4 * 10 + 200),
        (INT8, False, 1_000 + 4 * 10 + 200),
    ],
)
def test_frozen_bytes_are_those_of_small_matrices_and_whole_vectors(
    frozen: FrozenWeights | None, in_blocks: bool, wanted: int
) -> None:
    """1,000 numbers in 10 rows, and 50 numbers in vectors, which stay as they are."""
    assert frozen_bytes(4_200, params=1_000, rows=10, item_bytes=4, frozen=frozen, in_blocks=in_blocks) == wanted


@cases(
    ("frozen", "wanted"),
    [
        (None, 0),
        (BF16, 4 * 600),
        (INT8, 4 * 600),
        (dataclasses.replace(BF16, native=True), 0),
        (dataclasses.replace(INT8, native=True), 2 * 600),
        (NF4, (4 + 2) * 600),
        (dataclasses.replace(NF4, native=True), (2 + 2 + 4) * 600),
    ],
)
def test_frozen_weights_are_widened_one_matrix_at_a_time(frozen: FrozenWeights | None, wanted: int) -> None:
    """The room is that of the largest matrix; bfloat16 that is multiplied as it is needs none."""
    assert widened_bytes(600, item_bytes=4, frozen=frozen) == wanted
    assert widened_bytes(32_000 * 2_048, item_bytes=4, frozen=BF16) == MAX_WIDENED_BYTES  # of 262 MB, in parts


@cases("is_owner", [False, True])
def test_frozen_weights_are_terms_of_a_node(is_owner: bool) -> None:
    """Blocks, the owner's embedding, and one room to widen in; an owner with a decoder widens that too."""
    model = dataclasses.replace(
        node(PLAN, "a").model,
        block_bytes=4 * 1_050,
        block_matrix_params=1_000,
        block_matrix_rows=10,
        embedding_bytes=4 * 8_030,
        embedding_matrix_params=8_000,
        embedding_matrix_rows=100,
        largest_matrix_params=600,
        head_token_logits=100,
        hidden_size=32,
    )
    course = dataclasses.replace(PLAN.course, frozen=INT8)
    sizes = Sizes.at(course, dataclasses.replace(node(PLAN, "a"), model=model), MemorySettings("sgd"))
    found = memory_estimate(course, Share(is_owner=is_owner, start=0, stop=3, above=1), sizes)
    assert {term.what: term.total_bytes for term in found.terms if term.part == "weights"} == {
        "frozen block": 3 * (1_000 + 40 + 200),
        "room for a widened matrix": 4 * (3_200 if is_owner else 600),
        **({"embedding": 8_000 + 400 + 120} if is_owner else {}),
    }


@pytest.mark.parametrize(
    ("values", "device", "kernels"),
    [
        ({"frozen": INT8}, "cpu", 0),
        ({"frozen": dataclasses.replace(INT8, native=True)}, "cpu", KEPT_KERNELS),
        ({"compute": "bfloat16"}, "cpu", KEPT_KERNELS),
        ({"compute": "bfloat16"}, "cuda", 0),
    ],
)
def test_products_in_bfloat16_have_room_for_their_kernels(values: dict[str, Any], device: str, kernels: int) -> None:
    """A processor compiles one for each shape; an accelerator's are in the bytes of its context."""
    course, facts = dataclasses.replace(PLAN.course, **values), dataclasses.replace(node(PLAN, "a"), device=device)
    sizes = Sizes.at(course, facts, MemorySettings("sgd"))
    found = memory_estimate(course, Share(is_owner=False, start=0, stop=3, above=1), sizes)
    assert sum(term.total_bytes for term in found.terms if "compiled" in term.what) == kernels * KERNEL_BYTES
