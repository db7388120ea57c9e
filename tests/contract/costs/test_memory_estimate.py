"""Tests of ``ringtune.costs.memory_estimate``: estimate, kept turns, rows of data, and the words of its terms."""

from __future__ import annotations

import dataclasses
import random
import zipfile
from pathlib import Path

import pytest

from ringtune.config.optimizers import update_work_bytes
from ringtune.costs.memory_estimate import end_of_turn_bytes, memory_estimate, node_memory
from ringtune.costs.memory_sizes import (
    CONTEXT_BYTES,
    DTYPE_BYTES,
    MAX_LOGIT_BYTES,
    ROW_BYTES,
    TOKEN_BYTES,
    VOCABULARY_ENTRY_BYTES,
    MemorySettings,
    Sizes,
    data_bytes,
    held_bytes,
    logits_fit,
    logits_peak_bytes,
)
from ringtune.costs.memory_terms import PARTS, MemoryEstimate, Share, has_room_for_heap, passing_bytes
from ringtune.costs.model_facts import estimate_activation_token_bytes
from ringtune.costs.profile import ModelFacts
from ringtune.schedule.actions import Leg, Op, Payload
from ringtune.schedule.lowering import lower, route
from ringtune.schedule.migration import copied_from, copy_holders
from ringtune.schedule.plan import Plan
from ringtune.schedule.versions import in_flight
from ringtune.techniques.base import Term
from ringtune.techniques.offload import helped
from tests.support.cases import cases
from tests.support.fake_agents import MODEL as FAKE_MODEL
from tests.support.moves import slices_of
from tests.support.plans import changed, make_method, make_plan, random_plan
from tests.support.profiles import MINILM, small_model
from tests.support.profiles import node as node_facts

MODEL = small_model()
MIB = 2**20


def _plan(slices: list[tuple[str, int, int]], owners: list[str], **more: object) -> Plan:
    return make_plan(slices, owners, credits_per_channel=3, num_steps=8, every_steps=2, **more)  # type: ignore[arg-type]


def _memory(plan: Plan, node: str, optimizer: str = "adamw") -> MemoryEstimate:
    return node_memory(plan, node, MODEL, optimizer=optimizer, activation_token_bytes=7)


def test_memory_of_an_owner_has_its_rows_and_that_of_a_gpu_what_holds_no_tensor() -> None:
    """Of a GPU a context is gone before the first tensor; a processor's libraries are off its budget already."""
    plan = _plan([("a", 0, 2), ("b", 2, 4)], ["c"])
    for node, device, data, context in (("b", "cuda", 0, CONTEXT_BYTES), ("c", "cpu", 77, 0)):
        facts = dataclasses.replace(node_facts(plan, node), model=MODEL, device=device, data_bytes=77)
        sizes = Sizes.at(plan.course, facts, MemorySettings("adamw"))
        found = memory_estimate(plan.course, Share.of(plan, node), sizes).parts()
        assert (found["data"], found["device"]) == (data, context)


def test_memory_of_a_run_that_decides_is_that_of_the_deepest_it_can_reach() -> None:
    """Two owners, turns of two steps, a patience of two: a loss that never improves unfreezes at steps 8, 12, 16."""
    slices, owners = [("a", 0, 2), ("b", 2, 4)], ["c", "d"]
    for num_steps, steps in ((8, ()), (12, (8,)), (13, (8, 12)), (99, (8, 12, 16))):
        auto = make_plan(slices, owners, num_steps=num_steps, unfreeze="auto", patience_steps=2)
        at = make_plan(slices, owners, num_steps=num_steps, unfreeze="at", unfreeze_at=steps)
        assert [_memory(auto, node) for node in auto.nodes] == [_memory(at, node) for node in at.nodes]


@cases(("dropout", "measured_bytes"), [(0.0, 37.3 * MIB), (0.1, 75.2 * MIB)])
def test_activation_estimate_is_a_little_above_the_measurement(dropout: float, measured_bytes: float) -> None:
    """One MiniLM block with seq_bn at 16 x 128 tokens, as measured by saved-tensor hooks."""
    estimate = 16 * 128 * estimate_activation_token_bytes(MINILM, tokens=128, dropout=dropout)
    assert measured_bytes <= estimate <= 1.15 * measured_bytes


@pytest.mark.promise("7 bounded memory")
def test_memory_of_a_large_vocabulary_is_bounded_by_a_chunk() -> None:
    """More logits than the bound come in chunks; the estimate never falls when a micro-batch grows."""
    assert logits_fit(1, 10_000, 4) and not logits_fit(1000, 10_000, 4)
    peaks = [logits_peak_bytes(tokens, 32_000, 4) for tokens in range(0, 600, 7)]
    assert peaks == sorted(peaks)
    assert peaks[:2] == [0, 3 * 7 * 32_000 * 4]
    assert peaks[-1] == MAX_LOGIT_BYTES
    assert logits_peak_bytes(2, 8_000_000, 4) == 32_000_000, "at least one token at a time"


@cases(("moved", "held"), [(0, 0), (1 << 20, 2 << 20), (100 << 20, 12 << 20), (1 << 40, 12 << 20)])
def test_memory_of_what_passes_is_some_pieces_whatever_the_size(moved: int, held: int) -> None:
    """Saving, loading and handing over hold all of something small twice, but only pieces of something large."""
    assert passing_bytes(moved) == held


# ---- against the plan itself -------------------------------------------------------------------------

# of what trains, in copies of it; the rows and columns of an adapter are not known, so that all of it counts
_MOMENTS = {"adamw": 2, "sgd": 0, "momentum": 1, "adagrad": 1, "adafactor": 1}


def _slow_parts(plan: Plan, node: str, model: ModelFacts, *, optimizer: str, token_bytes: int, dtype: str) -> list[int]:
    """The parts of a plan in which depth only grows, so that its last step has the maximum.

    What waits is counted from the messages of the lowering, link by link.
    """
    course, piece = plan.course, plan.slice_of(node)
    soonest = course.soonest()
    lowest = soonest.method.trained(soonest, course.num_steps - 1).lowest
    is_owner, item_bytes = plan.owner(node) is not None, DTYPE_BYTES[dtype]
    hosted = piece.num_blocks + (plan.placement.private_blocks if is_owner else 0)
    trained = max(0, piece.stop - max(piece.start, lowest)) if piece.num_blocks else 0
    items, state, micro = in_flight(course, piece.start), 1 + _MOMENTS[optimizer], course.microbatch_sizes()
    tokens = micro[0] * course.max_length
    tensor = tokens * course.hidden_size * item_bytes
    mask = micro[0] * course.max_length**2 * item_bytes
    head = model.head_bytes + model.head_class_bytes * len(course.labels)
    logits = logits_peak_bytes(tokens, model.head_token_logits, item_bytes)
    updated = [head] * is_owner + [model.adapter_block_bytes] * trained
    return [
        hosted * model.block_bytes + is_owner * model.embedding_bytes,
        (hosted + (items - 1) * trained) * model.adapter_block_bytes,
        trained * state * model.adapter_block_bytes,
        (items * trained * len(micro) + (1 if hosted else 0)) * tokens * token_bytes
        + (items * len(micro) * (tensor + mask) if trained else 0)
        + (plan.placement.credits * mask if hosted > trained else 0),
        is_owner * (head * (1 + state) + 2 * tensor + logits),
        0,
        _slowly_waiting(plan, node, lowest) * tensor,
        0,
        0,
        max(update_work_bytes(max(updated, default=0), optimizer), passing_bytes(state * sum(updated))),
    ]


def _slowly_waiting(plan: Plan, node: str, lowest: int) -> int:
    """Tensors of full size that can wait at a node, one being encoded or decoded, and what is embedded ahead."""
    legs = {leg for owner in plan.course.owners for leg in lower(plan, owner.node, lowest, "").get(node, ())}
    moved = sum(_bound(plan, leg) for leg in legs if leg.op in (Op.SEND, Op.RECEIVE))
    path = route(plan, node)
    embeds_ahead = (
        plan.owner(node) is not None and path[0].node == node and path[0].stop > plan.placement.private_blocks
    )
    ahead = plan.placement.credits * len(path) if embeds_ahead else 0
    if plan.owner(node) is not None and path[-1].node == node and not ahead:  # between its top slice and its head
        ahead += plan.placement.credits
    return moved + (1 if moved else 0) + ahead


def _bound(plan: Plan, leg: Leg) -> int:
    """Of a gradient no more than its receiver, which hosts the block below, has items that wait for it."""
    if leg.payload == Payload.HIDDEN:
        return plan.placement.credits
    return in_flight(plan.course, leg.start - 1) * len(plan.course.microbatch_sizes())


@cases("seed", range(60))
def test_memory_of_any_plan_is_what_its_lowering_shows(seed: int) -> None:
    """Every part of every node, where no operation table lets anything be passed by."""
    rng = random.Random(seed)
    plan = random_plan(rng)
    if plan.course.method.name == "ringada" and rng.random() < 0.3:
        plan = changed(plan, method=make_method(unfreeze="auto", patience_steps=rng.randint(1, 8)))
    model = dataclasses.replace(MODEL, head_token_logits=rng.choice([0, 100, 1_000_000]))
    optimizer, dtype, token_bytes = rng.choice(list(_MOMENTS)), rng.choice(list(DTYPE_BYTES)), rng.randint(0, 99)
    for node in plan.nodes:
        found = node_memory(
            plan, node, model, optimizer=optimizer, activation_token_bytes=token_bytes, dtype=dtype
        ).parts()
        slow = _slow_parts(plan, node, model, optimizer=optimizer, token_bytes=token_bytes, dtype=dtype)
        assert found == dict(zip(PARTS, slow, strict=True)), (seed, node)


FILES = 4  # three turns, and one that is being made or is coming
BLOCK, HEAD = 3 * 10, 3 * (300 + 2 * 50)  # weights and two moments


def kept(plan: Plan, node: str) -> int:
    """Bytes."""
    return node_memory(plan, node, MODEL, optimizer="adamw", activation_token_bytes=7).parts()["kept"]


def ring(**more: object) -> Plan:
    """Three hosts of which a owns rows; the lowest block does not train in so few steps."""
    plan = make_plan(
        [("a", 0, 1), ("b", 1, 3), ("c", 3, 4)],
        ["a"],
        **{"num_steps": 6, "every_steps": 2, **more},  # type: ignore[arg-type]
    )
    return changed(plan, copies=True)


def test_hosts_keep_what_they_train_and_copies_of_the_host_before_them() -> None:
    """Block 0 does not train, and a keeps its head. A host of all blocks has nobody to keep a copy, only its turns."""
    alone = changed(ring(every_steps=1), slices=slices_of((("b", 0, 4),)))
    for plan, found in (
        (ring(), [FILES * (0 + 1) * BLOCK + FILES * HEAD, FILES * (2 + 0) * BLOCK, FILES * (1 + 2) * BLOCK]),
        (alone, [FILES * 4 * BLOCK, FILES * HEAD]),
        (changed(ring(), copies=False), [0, 0, 0]),
        (changed(ring(), num_steps=0), [0, 0, 0]),
    ):
        assert [kept(plan, node) for node in plan.nodes] == found


def test_bytes_of_a_turn_are_those_of_the_blocks_that_a_node_fits() -> None:
    """Block 3 and those of b are fitted for their hosts; block 0 does not train, and a has the head."""
    plan = helped(ring(), {"b": "z", "c": "a"})
    sizes = Sizes.at(plan.course, dataclasses.replace(node_facts(plan, "a"), model=MODEL), MemorySettings("adamw"))
    found = [end_of_turn_bytes(plan.course, Share.of(plan, node), sizes) for node in "abcz"]
    assert found == [1 * BLOCK + HEAD, 0, 0, 2 * BLOCK]


def test_replicas_are_copies_of_one_another() -> None:
    """Nobody keeps b for d; a has c's."""
    plan = changed(ring(), slices=slices_of((("a", 0, 1), ("b", 1, 3, 1), ("d", 1, 3, 1), ("c", 3, 4))))
    assert [copy_holders(plan.placement, node) for node in "abcd"] == [("b",), (), ("a",), ()]
    assert copied_from(plan.placement, "a") == {"c": (3,)}
    assert kept(plan, "d") == FILES * 2 * BLOCK


TEXT_BYTES, NUM_ROWS, TOKENS = 10_000, 100, 16


def test_texts_count_their_share_of_the_file_their_rows_and_the_vocabulary(tmp_path: Path) -> None:
    """Four owners share a file; each has the whole tokenizer."""
    path = tmp_path / "rows.csv"
    path.write_bytes(bytes(TEXT_BYTES))
    found = data_bytes(FAKE_MODEL, (path,), num_owners=4, rows=NUM_ROWS // 4, max_length=TOKENS)
    own = TEXT_BYTES // 4 + NUM_ROWS // 4 * (ROW_BYTES + TOKENS * TOKEN_BYTES)
    assert found == own + FAKE_MODEL.vocab_size * VOCABULARY_ENTRY_BYTES


def test_images_have_no_tokens_and_count_as_they_are_unpacked(tmp_path: Path) -> None:
    """A file that is small because it is compressed is large in memory; images of a folder stay on the disk."""
    path = tmp_path / "rows.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("image.npy", bytes(TEXT_BYTES))
    images = dataclasses.replace(FAKE_MODEL, fixed_tokens=50)
    assert path.stat().st_size < TEXT_BYTES / 10
    assert data_bytes(images, (path,), num_owners=1, rows=7, max_length=50) == TEXT_BYTES + 7 * ROW_BYTES
    assert held_bytes(tmp_path) == 0


@cases(("budget", "has_room"), [(60 + 40 + 2 * 40, True), (60 + 40 + 2 * 40 - 1, False)])
def test_heap_of_pieces_needs_twice_what_comes_and_goes_besides(budget: int, has_room: bool) -> None:
    """Graphs and logits; weights stay where they are and leave no pieces, as those of an owner without blocks."""
    terms = (Term("weights", "block", 6, 10), Term("activations", "graph", 3, 10), Term("head", "work space", 1, 10))
    needs = MemoryEstimate(terms)
    assert has_room_for_heap(needs, budget) == has_room
    assert has_room_for_heap(MemoryEstimate((Term("weights", "embedding", 1, 10),)), 10)
