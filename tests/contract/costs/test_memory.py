"""The memory estimate, part by part, against sums written out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from ringtune.costs.memory import (
    MOST_LOGIT_BYTES,
    MemoryEstimate,
    estimate_activation_block_bytes,
    logits_fit,
    logits_peak_bytes,
    node_memory,
)
from ringtune.costs.profile import ModelFacts
from ringtune.schedule.plan import Plan
from tests.support.plans import make_plan

MODEL = ModelFacts(
    model_type="bert",
    num_blocks=4,
    hidden_size=32,
    intermediate_size=128,
    num_heads=4,
    vocab_size=100,
    block_bytes=1000,
    embedding_bytes=5000,
    head_bytes=300,
    adapter_block_bytes=10,
    digest="d",
    head_class_bytes=50,
)
MINILM = ModelFacts(
    model_type="bert",
    num_blocks=6,
    hidden_size=384,
    intermediate_size=1536,
    num_heads=12,
    vocab_size=30522,
    block_bytes=7_097_856,
    embedding_bytes=48_265_728,
    head_bytes=591_360,
    adapter_block_bytes=75_360,
    digest="d",
)
TENSOR = 2 * 16 * 32 * 4  # rows of a micro-batch x tokens x width x bytes
MIB = 2**20


def _plan(slices: list[tuple[str, int, int]], owners: list[str], **more: object) -> Plan:
    return make_plan(slices, owners, credits_per_channel=3, num_steps=8, every_steps=2, **more)  # type: ignore[arg-type]


def _memory(plan: Plan, node: str, optimizer: str = "adamw") -> MemoryEstimate:
    return node_memory(plan, node, MODEL, optimizer=optimizer, activation_block_bytes=7)


def test_memory_of_a_host_counts_its_slice() -> None:
    """A host in the middle of the ring: blocks, adapters, moments, graphs, and six boundaries' tensors."""
    plan = _plan([("a", 0, 2), ("b", 2, 4)], ["c"])
    assert _memory(plan, "b") == MemoryEstimate(
        weights_bytes=2 * 1000,
        adapters_bytes=2 * 10,
        optimizer_bytes=2 * 3 * 10,  # gradient and two moments
        activations_bytes=(2 * 2 + 1) * 7,  # two blocks x two micro-batches, and work space
        head_bytes=0,
        buffers_bytes=(3 + 3 + 2 + 2 + 1) * TENSOR,  # h in, h out, g in, g out, one being encoded
    )


def test_memory_of_an_owner_without_blocks_counts_embedding_and_head() -> None:
    """Embedding, head with its state, and the tensors of its two ends."""
    plan = _plan([("a", 0, 2), ("b", 2, 4)], ["c"])
    assert _memory(plan, "c") == MemoryEstimate(
        weights_bytes=5000,
        head_bytes=4 * (300 + 2 * 50) + 2 * TENSOR,  # weights, gradient, two moments; hidden and its gradient
        buffers_bytes=(3 + 3 + 2 + 1) * TENSOR,
    )


def test_memory_of_one_node_alone_counts_what_is_embedded_ahead() -> None:
    """Method single: no message, but the engine embeds ``credits`` micro-batches ahead."""
    plan = _plan([("a", 0, 4)], ["a"], method="single")
    estimate = _memory(plan, "a")
    assert estimate.weights_bytes == 4 * 1000 + 5000
    assert estimate.activations_bytes == (4 * 2 + 1) * 7
    assert estimate.buffers_bytes == 3 * TENSOR


def test_memory_of_an_owner_at_the_bottom_counts_what_is_embedded_ahead() -> None:
    """Its own first blocks need no credit before the embedding: up to ``credits`` per segment wait there."""
    bottom = _memory(_plan([("a", 0, 2), ("b", 2, 4)], ["a"]), "a").buffers_bytes
    assert bottom == (3 + 3 + 2 + 2 + 1 + 2 * 3) * TENSOR  # h out, h back, g out, g back, one encoded, ahead


def test_memory_of_a_slice_that_never_trains_has_no_optimizer_and_no_gradients() -> None:
    """A short run unfreezes two blocks: the lower slice is frozen to the end, and cheaper."""
    plan = _plan([("a", 0, 2), ("b", 2, 4)], ["c"])
    short = make_plan([("a", 0, 2), ("b", 2, 4)], ["c"], credits_per_channel=3, num_steps=4, every_steps=2)
    frozen = _memory(short, "a")
    assert (frozen.optimizer_bytes, frozen.activations_bytes) == (0, 7)
    assert frozen.buffers_bytes == (3 + 3 + 1) * TENSOR
    assert frozen.total_bytes < _memory(plan, "a").total_bytes


def test_memory_of_a_run_that_decides_is_that_of_the_deepest_it_can_reach() -> None:
    """Two owners, turns of two steps, a patience of two: a loss that never improves unfreezes at steps 8, 12, 16."""
    slices, owners = [("a", 0, 2), ("b", 2, 4)], ["c", "d"]
    for num_steps, steps in ((8, ()), (12, (8,)), (13, (8, 12)), (99, (8, 12, 16))):
        auto = make_plan(slices, owners, num_steps=num_steps, unfreeze="auto", patience_steps=2)
        at = make_plan(slices, owners, num_steps=num_steps, unfreeze="at", unfreeze_at=steps)
        assert [_memory(auto, node) for node in auto.nodes] == [_memory(at, node) for node in at.nodes]


def test_memory_of_plain_sgd_has_no_moments() -> None:
    """Only the gradient."""
    plan = _plan([("a", 0, 2), ("b", 2, 4)], ["c"])
    assert _memory(plan, "b", optimizer="sgd").optimizer_bytes == 2 * 10


def test_memory_of_private_blocks_is_paid_by_every_owner() -> None:
    """Each owner holds the private blocks; no host does, and they have no state."""
    plan = _plan([("a", 1, 2), ("b", 2, 4)], ["c", "b"], private_blocks=1)
    assert _memory(plan, "c").weights_bytes == 5000 + 1000
    assert _memory(plan, "b").weights_bytes == 5000 + 3 * 1000
    assert _memory(plan, "b").optimizer_bytes == 2 * 3 * 10
    assert _memory(plan, "a").weights_bytes == 1000


def test_memory_grows_with_each_owner_that_sends_here() -> None:
    """Credits are per link: a second owner doubles what may wait at the first host."""
    one = _memory(_plan([("a", 0, 2), ("b", 2, 4)], ["c"]), "a").buffers_bytes
    two = _memory(_plan([("a", 0, 2), ("b", 2, 4)], ["c", "d"]), "a").buffers_bytes
    assert two - one == 3 * TENSOR


def test_memory_in_float64_doubles_the_buffers() -> None:
    """Checks in double precision need twice the room."""
    plan = _plan([("a", 0, 2), ("b", 2, 4)], ["c"])
    single = node_memory(plan, "b", MODEL, optimizer="sgd", activation_block_bytes=0)
    double = node_memory(plan, "b", MODEL, optimizer="sgd", activation_block_bytes=0, dtype="float64")
    assert double.buffers_bytes == 2 * single.buffers_bytes


def test_memory_total_is_the_sum_and_prints_its_parts() -> None:
    """A capacity error shows where the bytes are."""
    estimate = MemoryEstimate(weights_bytes=3 * MIB, head_bytes=MIB)
    assert estimate.total_bytes == 4 * MIB
    assert str(estimate) == "4.0 MiB (weights 3.0 MiB, head 1.0 MiB)"


@pytest.mark.parametrize(
    ("dropout", "measured_bytes"), [(0.0, 37.3 * MIB), (0.1, 75.2 * MIB)], ids=["without dropout", "with dropout"]
)
def test_activation_estimate_is_a_little_above_the_measurement(dropout: float, measured_bytes: float) -> None:
    """One MiniLM block with seq_bn at 16 x 128 tokens, as measured by saved-tensor hooks."""
    estimate = estimate_activation_block_bytes(MINILM, rows=16, tokens=128, dropout=dropout)
    assert measured_bytes <= estimate <= 1.15 * measured_bytes


def test_activation_estimate_is_linear_in_rows() -> None:
    """Twice the rows, twice the bytes; twice the bytes per number as well."""
    one = estimate_activation_block_bytes(MINILM, rows=4, tokens=64, dropout=0.1)
    assert estimate_activation_block_bytes(MINILM, rows=8, tokens=64, dropout=0.1) == 2 * one
    assert estimate_activation_block_bytes(MINILM, rows=4, tokens=64, dropout=0.1, dtype="float64") == 2 * one


def test_memory_of_a_language_models_owner_counts_logits() -> None:
    """Logits of every token of a micro-batch are there three times; other heads look at one token of a row."""
    plan = _plan([("a", 0, 4)], ["a"])
    speaking = dataclasses.replace(MODEL, head_bytes=0, head_class_bytes=0, head_token_logits=100)
    silent = dataclasses.replace(speaking, head_token_logits=0)
    heads = [
        node_memory(plan, "a", model, optimizer="adamw", activation_block_bytes=7).head_bytes
        for model in (speaking, silent)
    ]
    assert heads == [2 * TENSOR + 3 * 2 * 16 * 100 * 4, 2 * TENSOR]


@pytest.mark.promise("7 bounded memory")
def test_memory_of_a_large_vocabulary_is_bounded_by_a_chunk() -> None:
    """More logits than the bound come in chunks; the estimate never falls when a micro-batch grows."""
    assert logits_fit(1, 10_000, 4) and not logits_fit(1000, 10_000, 4)
    peaks = [logits_peak_bytes(tokens, 32_000, 4) for tokens in range(0, 600, 7)]
    assert peaks == sorted(peaks)
    assert peaks[:2] == [0, 3 * 7 * 32_000 * 4]
    assert peaks[-1] == MOST_LOGIT_BYTES
    assert logits_peak_bytes(2, 8_000_000, 4) == 32_000_000, "at least one token at a time"


def test_estimate_of_a_gated_block_keeps_more_of_the_inner_width() -> None:
    """Gate, its activation, up and their product instead of one tensor."""
    gated = dataclasses.replace(MINILM, inner_kept=4)
    plain, more = (estimate_activation_block_bytes(model, rows=2, tokens=8, dropout=0.0) for model in (MINILM, gated))
    assert more - plain == 3 * 2 * 8 * 1536 * 4


def test_memory_of_pipeadapter_counts_items_in_flight() -> None:
    """The lowest of three hosts has graphs of three items and two more versions; the top one is as under "all"."""
    slices = [("a", 0, 2), ("b", 2, 3), ("c", 3, 4)]
    plan = _plan(slices, ["d"], method="pipeadapter", local_iterations=4)
    fresh = _plan(slices, ["d"], method="all", local_iterations=4)
    lowest, plain = _memory(plan, "a"), _memory(fresh, "a")
    assert lowest.adapters_bytes == (1 + 2) * 2 * 10
    assert lowest.activations_bytes == (3 * 2 * 2 + 1) * 7  # items x blocks x micro-batches, and work space
    assert lowest.buffers_bytes - plain.buffers_bytes == (3 - 1) * 2 * TENSOR  # gradients that come back
    assert (lowest.weights_bytes, lowest.optimizer_bytes) == (plain.weights_bytes, plain.optimizer_bytes)
    assert _memory(plan, "b").adapters_bytes == 2 * 10
    assert _memory(plan, "c").activations_bytes == _memory(fresh, "c").activations_bytes
    assert _memory(plan, "d") == _memory(fresh, "d")


def test_memory_of_pipeadapter_is_bounded_by_the_steps_of_a_turn() -> None:
    """A turn of one step is never stale."""
    slices = [("a", 0, 2), ("b", 2, 3), ("c", 3, 4)]
    short = _plan(slices, ["d"], method="pipeadapter", local_iterations=1)
    assert _memory(short, "a") == _memory(_plan(slices, ["d"], method="all", local_iterations=1), "a")
