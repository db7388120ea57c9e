"""Memory where all parameters train: terms that can be added up by hand."""

from __future__ import annotations

import dataclasses

from ringtune.config.optimizers import TABLE_GIVEN_BACK_BYTES
from ringtune.costs.memory_estimate import node_memory
from ringtune.costs.memory_sizes import embedding_grad_bytes, logits_peak_bytes
from ringtune.costs.memory_terms import MemoryEstimate
from ringtune.costs.profile import ModelFacts
from ringtune.schedule.methods import Hift
from ringtune.schedule.plan import Plan
from ringtune.schedule.units import Range
from tests.support.cases import cases
from tests.support.plans import changed, make_plan
from tests.support.profiles import ROUND as MODEL

TOKENS = 2 * 16
MATRIX = 8 * 2 * 4  # of a block's largest tensor
KEPT, TENSOR, INPUTS = 200 * TOKENS, 2 * 4 * TOKENS, (3 * 2 + 8) * 4 * TOKENS


def plan(owners: tuple[str, ...] = ("b",), **settings: object) -> Plan:
    """Two hosts of two blocks; four rows in two micro-batches of 16 tokens a row."""
    method = Hift(**settings)  # type: ignore[arg-type]
    return make_plan([("a", 0, 2), ("b", 2, 4)], owners, method=method, num_steps=30, hidden_size=2)


def memory(
    of: Plan, node: str, optimizer: str = "adamw", model: ModelFacts = MODEL, token_bytes: float = 200
) -> MemoryEstimate:
    """What a node holds at most."""
    return node_memory(of, node, model, optimizer=optimizer, activation_token_bytes=token_bytes)


def moment_bytes(
    of: Plan, node: str, optimizer: str = "adamw", model: ModelFacts = MODEL, token_bytes: float = 200
) -> int:
    """Gradients, state, graphs of blocks and work space at the fullest moment of a step."""
    terms = memory(of, node, optimizer, model, token_bytes).terms
    named = ("graph of a block", "graph of the block", "input of", "work space of a block", "work space of the head")
    return sum(term.total_bytes for term in terms if term.part == "optimizer" or term.what.startswith(named))


def optimizer_bytes(of: Plan, node: str, optimizer: str = "adamw") -> int:
    """Gradients and state, where graphs keep nothing but their inputs."""
    terms = memory(of, node, optimizer, token_bytes=0).terms
    named = ("input of", "work space of the head")
    inputs = sum(term.total_bytes for term in terms if term.what.startswith(named))
    return sum(term.total_bytes for term in terms if term.part == "optimizer") + inputs


def test_memory_of_weights_counts_each_unit_once() -> None:
    """A host has its blocks, an owner embedding and head too; nothing is there as master copy."""
    assert memory(plan(), "a").parts()["weights"] == 2 * 10_000
    assert memory(plan(), "b").parts()["weights"] == 2 * 10_000 + 60_000
    assert memory(plan(), "b").parts()["head"] >= 3_000
    assert memory(plan(), "b").parts()["adapters"] == 0


def test_memory_of_state_in_memory_is_that_of_all_units_and_one_groups_gradients() -> None:
    """AdamW keeps two numbers for each weight; the embedding is the largest group of the owner."""
    assert optimizer_bytes(plan(), "a") == 10_000 + 2 * 2 * 10_000 + 2 * TENSOR
    assert optimizer_bytes(plan(), "b") == 60_000 + 2 * (2 * 10_000 + 60_000 + 3_000)
    assert optimizer_bytes(plan(), "b", "sgd") == 60_000
    assert optimizer_bytes(plan(drops_state=True), "a") == 3 * 10_000, "of dropped state that of one group"


def test_memory_of_graphs_is_that_of_the_fullest_step() -> None:
    """At the step of the embedding all blocks only pass gradients on; at its own step a block keeps its inputs too."""
    passed = KEPT - INPUTS
    graphs = 2 * (KEPT + passed) + 2 * TENSOR  # two micro-batches of a block that trains and one that does not
    parts = {term.what: term.total_bytes for term in memory(plan(), "a").terms if term.part == "activations"}
    assert sum(size for what, size in parts.items() if "graph" in what) == graphs
    whole = {term.what: term.total_bytes for term in memory(plan(group_size=6), "a").terms}
    assert whole["graph of a block that trains"] == 2 * 2 * KEPT


def test_memory_of_an_owner_has_gradients_that_go_around() -> None:
    """With another owner one gradient of embedding and head each comes in, and one leaves; alone there are none."""

    def under_way(owners: tuple[str, ...], model: ModelFacts = MODEL) -> int:
        return sum(
            term.total_bytes for term in memory(plan(owners), "b", model=model).terms if term.what.endswith("its way")
        )

    rows = 60_000 - 50_000 + 4 * 16 * (500 + 8)  # all but the table, and as many rows as a batch has tokens
    assert under_way(("b",)) == 0
    assert under_way(("b", "a")) == 2 * (rows + 3_000)
    assert under_way(("b", "a"), dataclasses.replace(MODEL, is_tied=True)) == 2 * (60_000 + 3_000)


@cases(("tokens", "expected"), [(0, 10_000), (10, 10_000 + 10 * 508), (1000, 60_000)])
def test_the_gradient_of_a_table_has_the_rows_of_a_batch(tokens: int, expected: int) -> None:
    """Each with its number; it is never larger than the table."""
    assert embedding_grad_bytes(MODEL, tokens) == expected


def test_a_short_run_needs_no_room_for_what_never_trains() -> None:
    """Three steps of the order top2down train head and two blocks."""
    short = changed(plan(order="top2down"), num_steps=3)
    assert optimizer_bytes(short, "a") == 0
    work = 2 * TENSOR  # of the head
    assert optimizer_bytes(short, "b") == 10_000 + 2 * (20_000 + 3_000) + 2 * TENSOR + work


def test_an_owner_with_others_may_have_the_heads_gradient_beside_graphs_of_any_step() -> None:
    """It is updated beside them too, with state that rests on disk."""
    model = dataclasses.replace(MODEL, embedding_train_bytes=1_000, token_table_bytes=500, head_bytes=30_000)
    kept = 2 * (KEPT + KEPT - INPUTS) + 2 * TENSOR
    on_disk = changed(plan(("b", "a")), state_on_disk=True)
    assert moment_bytes(on_disk, "b", model=model) == kept + 10_000 + 3 * 30_000


SMALL = dataclasses.replace(MODEL, embedding_train_bytes=1_000, token_table_bytes=500)


def test_a_small_state_is_mapped_while_what_the_graphs_took_is_resident() -> None:
    """Before a large table's gradient becomes whole that is given back, work space and graphs that run again too."""
    on_disk = changed(plan(("b", "a")), state_on_disk=True, recompute=(Range(0, 4),))
    running = 2 * 2 * TENSOR + 2 * 2_000 * TOKENS + 10_000 + 3_000
    assert moment_bytes(on_disk, "b", model=SMALL, token_bytes=2_000) == running + 2 * MATRIX
    large = TABLE_GIVEN_BACK_BYTES
    of_large = dataclasses.replace(MODEL, embedding_train_bytes=large, token_table_bytes=large)
    assert moment_bytes(on_disk, "b", model=of_large, token_bytes=2_000) == 3 * large


@cases(("microbatches", "table_bytes", "rows"), [(1, 50_000, 64), (4, 50_000, 64), (4, 80, 10 + 16)])
def test_rows_of_an_embeddings_gradient_are_of_all_micro_batches(
    microbatches: int, table_bytes: int, rows: int
) -> None:
    """Alone too; they are added up where they are more than the table has."""
    alone = make_plan([("b", 0, 4)], ["b"], method=Hift(), num_steps=30, hidden_size=2, microbatches=microbatches)
    model = dataclasses.replace(MODEL, token_table_bytes=table_bytes)
    sizes = {term.what: term.total_bytes for term in memory(alone, "b", model=model).terms}
    assert sizes["rows of the embedding's gradient"] == rows * (2 * 4 + 8)


@cases("is_tied", [True, False])
@cases("microbatches", [1, 2])
def test_a_decoder_that_trains_has_two_gradients_from_the_second_micro_batch_on(
    microbatches: int, is_tied: bool
) -> None:
    """That of a micro-batch is whole before it is added to that of those before; both are as large as the decoder."""
    decoder_bytes = 25_000 * 2 * 4
    model = dataclasses.replace(
        MODEL, is_tied=is_tied, head_token_logits=25_000, embedding_train_bytes=decoder_bytes, head_bytes=decoder_bytes
    )
    of = changed(plan(order="top2down"), microbatches=microbatches, batch_size=2 * microbatches, num_steps=1)
    of = of if not is_tied else changed(of, method=Hift())  # the step of the head, or of the embedding
    graphs = microbatches * (2 * (KEPT - INPUTS) + TENSOR) if is_tied else 0
    work = 2 * TENSOR + logits_peak_bytes(TOKENS, 25_000, 4)
    assert moment_bytes(of, "b", "sgd", model) == graphs + decoder_bytes + work + (microbatches - 1) * decoder_bytes


def test_a_node_alone_keeps_the_graphs_of_one_micro_batch() -> None:
    """Head and backward of a micro-batch come before the next one's forward."""
    alone = make_plan([("b", 0, 4)], ["b"], method=Hift(), num_steps=30, hidden_size=2)
    graphs = KEPT + 3 * (KEPT - INPUTS) + TENSOR + KEPT
    assert moment_bytes(alone, "b", "sgd", SMALL) == graphs + 10_000
