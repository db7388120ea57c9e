"""What frozen weights take where they are held small, by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

from ringtune.costs.memory_estimate import memory_estimate
from ringtune.costs.memory_sizes import Sizes
from ringtune.costs.memory_terms import Share
from ringtune.schedule.course import FrozenWeights
from ringtune.techniques.frozen_weights import MAX_WIDENED_BYTES, frozen_bytes, widened_bytes
from tests.support.cases import cases
from tests.support.plans import make_plan
from tests.support.profiles import node

PLAN = make_plan([("a", 0, 4)], ["a"], batch_size=4, method="all", num_steps=8)
BF16, INT8 = FrozenWeights(dtype="bfloat16"), FrozenWeights(dtype="int8")
MATRICES: dict[str, Any] = {
    "block_bytes": 4 * 1_000 + 4 * 50,
    "block_matrix_params": 1_000,
    "block_matrix_rows": 10,
    "embedding_bytes": 4 * 8_000 + 4 * 30,
    "embedding_matrix_params": 8_000,
    "embedding_matrix_rows": 100,
    "largest_matrix_params": 600,
}


@cases(("frozen", "wanted"), [(None, 4_200), (BF16, 2 * 1_000 + 200), (INT8, 1_000 + 4 * 10 + 200)])
def test_frozen_bytes_are_those_of_small_matrices_and_whole_vectors(frozen: FrozenWeights | None, wanted: int) -> None:
    """1,000 numbers in 10 rows, and 50 numbers in vectors, which stay as they are."""
    assert frozen_bytes(4_200, params=1_000, rows=10, item_bytes=4, frozen=frozen) == wanted


@cases(
    ("frozen", "wanted"),
    [
        (None, 0),
        (BF16, 4 * 600),
        (INT8, 4 * 600),
        (dataclasses.replace(BF16, native=True), 0),
        (dataclasses.replace(INT8, native=True), 2 * 600),
    ],
)
def test_frozen_weights_are_widened_one_matrix_at_a_time(frozen: FrozenWeights | None, wanted: int) -> None:
    """The room is that of the largest matrix; bfloat16 that is multiplied as it is needs none."""
    assert widened_bytes(600, item_bytes=4, frozen=frozen) == wanted


def test_frozen_weights_of_a_huge_matrix_are_widened_in_parts() -> None:
    """A decoder of 262 MB in float32 does not ask for that much at once."""
    assert widened_bytes(32_000 * 2_048, item_bytes=4, frozen=BF16) == MAX_WIDENED_BYTES


@cases("is_owner", [False, True])
def test_frozen_weights_are_terms_of_a_node(is_owner: bool) -> None:
    """Blocks, the owner's embedding, and one room to widen in; an owner with a decoder widens that too."""
    facts = node(PLAN, "a")
    model = dataclasses.replace(facts.model, **MATRICES, head_token_logits=100, hidden_size=32)
    course = dataclasses.replace(PLAN.course, frozen=INT8)
    sizes = Sizes.at(course, dataclasses.replace(facts, model=model), optimizer="sgd", dtype="float32")
    found = memory_estimate(course, Share(is_owner=is_owner, start=0, stop=3, above=1), sizes)
    weights = {term.what: term.total_bytes for term in found.terms if term.part == "weights"}
    assert weights == {
        "frozen block": 3 * (1_000 + 40 + 200),
        "room for a widened matrix": 4 * (3_200 if is_owner else 600),
        **({"embedding": 8_000 + 400 + 120} if is_owner else {}),
    }
