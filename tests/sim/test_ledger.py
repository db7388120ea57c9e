"""Memory accounts: what each action and tensor takes, by hand."""

from __future__ import annotations

import dataclasses
import random

import pytest

from ringtune.costs.action_costs import CourseCosts
from ringtune.costs.memory_sizes import MemorySettings, Sizes
from ringtune.schedule.actions import Action, Op, Payload, TensorKey
from ringtune.schedule.methods import Hift
from ringtune.schedule.turns import StepKind, turn_sequence
from ringtune.schedule.units import Range, Units
from sim.ledger import ItemKind, Items, MemoryLedger, NodeAccount
from sim.meter import Meter, ProfileTimes
from tests.support.plans import changed, make_plan, random_plan
from tests.support.profiles import profile_of
from tests.support.recorded_ring import RecordedRing

PLAN = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], microbatches=2, batch_size=4)
FULL = 2.0 * PLAN.course.max_length
NO_UNITS = Units(PLAN.course.num_blocks)
HEAD_UNIT = PLAN.course.head
BLOCK, ADAPTER, HEAD, EMBEDDING, ACTIVATION = 50_000, 3_000, 4_000 + 2 * 100, 9_000, 20_000 * FULL
HOST = 2 * (BLOCK + ADAPTER)
OWNER = HOST + EMBEDDING + HEAD
TENSOR = round(FULL * PLAN.course.hidden_size * 4)


def ledger(*, optimizer: str = "sgd", dtype: str = "float32", embedding_bytes: float | None = None) -> MemoryLedger:
    """Accounts of the plan's nodes."""
    profile = profile_of(PLAN)
    items = Items(CourseCosts.of(PLAN, profile))
    items.granted(next(turn_sequence(PLAN.course)))
    return MemoryLedger(PLAN, profile.by_name, items, MemorySettings(optimizer, dtype), embedding_bytes=embedding_bytes)


def training(depth: int, *sizes: float) -> ItemKind:
    """A train item whose top ``depth`` blocks train, with these padded tokens of its micro-batches."""
    units = Units.top(PLAN.course.num_blocks, depth)
    return ItemKind(0, StepKind.TRAIN, units, (units.lowest,) * len(sizes), sizes)


TRAIN = training(2, FULL, FULL)
EVALUATE = ItemKind(1, StepKind.EVALUATE, NO_UNITS, (NO_UNITS.lowest,) * 2, (FULL, FULL))


def ran(found: MemoryLedger, node: str, action: Action, item: ItemKind) -> None:
    """An action of a node is done."""
    effect = found.effect(node, action, item)
    if effect is not None:
        effect.apply(action.seq, action.micro)


def test_ledger_begins_with_weights() -> None:
    """A host has blocks and adapters, an owner embedding and head too; a table may count as touched."""
    assert ledger().peak_bytes == {"a": OWNER, "b": HOST}
    assert ledger(embedding_bytes=10.0).peak_bytes["a"] == OWNER - EMBEDDING + 10


def came(found: MemoryLedger, node: str, payload: Payload, micro: int = 0) -> None:
    """A tensor of item 0 has come from the other node, and its micro-batch has taken it."""
    key = TensorKey(payload, 0, micro, 2)
    found.arrived(key, "b" if node == "a" else "a", node, 1.0)
    found.accepted(node, key)


def left(found: MemoryLedger, node: str, payload: Payload, micro: int = 0) -> None:
    """A tensor of item 0 was sent, and has arrived at the other node."""
    key, other = TensorKey(payload, 0, micro, 4), "b" if node == "a" else "a"
    found.sent(key, node, other, 0.0, 1.0)
    found.arrived(key, node, other, 1.0)


def test_ledger_of_a_free_forward_holds_a_block_for_a_moment() -> None:
    """Besides the hidden state, which stays with its micro-batch; nothing adds up."""
    found = ledger()
    for micro in (0, 1):
        came(found, "b", Payload.HIDDEN, micro)
        for block in (2, 3):
            ran(found, "b", Action(Op.FORWARD_FREE, 0, micro, block, block + 1), TRAIN)
            assert found.now_bytes["b"] == HOST + TENSOR
        left(found, "b", Payload.HIDDEN, micro)
    assert (found.now_bytes["b"], found.peak_bytes["b"]) == (HOST, HOST + TENSOR + ACTIVATION)


def test_ledger_holds_a_hidden_state_from_its_arrival_until_it_is_sent() -> None:
    """Taken out of the inbox it is with its micro-batch: two of them may wait for the link at once."""
    found = ledger()
    for micro in (0, 1):
        came(found, "b", Payload.HIDDEN, micro)
        ran(found, "b", Action(Op.FORWARD_FREE, 0, micro, 2, 4), EVALUATE)
    assert found.now_bytes["b"] == HOST + 2 * TENSOR
    for micro in (0, 1):
        left(found, "b", Payload.HIDDEN, micro)
    assert found.now_bytes["b"] == HOST


def test_ledger_holds_gradients_of_another_host_of_the_stage_until_they_are_added_up() -> None:
    """Those of the adapters of all blocks of the slice from the boundary on; the other host gives a copy of its own."""
    found, key = ledger(), TensorKey(Payload.REPLICA_GRAD, 0, 1, 2)
    before = found.now_bytes
    found.arrived(key, "a", "b", 1.0)
    assert found.now_bytes == {**before, "b": HOST + 2 * ADAPTER}
    found.accepted("b", key)
    assert found.now_bytes == before and found.peak_bytes["b"] == HOST + 2 * ADAPTER


def test_ledger_keeps_graphs_with_their_input_until_their_backward() -> None:
    """Two micro-batches keep two graphs; each backward frees its own, and the gradients come once."""
    found, kept = ledger(), 2 * (2 * ACTIVATION + TENSOR)
    for _ in range(2):
        for micro in (0, 1):
            came(found, "b", Payload.HIDDEN, micro)
            ran(found, "b", Action(Op.FORWARD, 0, micro, 2, 4), TRAIN)
            left(found, "b", Payload.HIDDEN, micro)
        assert found.now_bytes["b"] == HOST + kept
        for micro in (0, 1):
            came(found, "b", Payload.GRAD, micro)
            ran(found, "b", Action(Op.BACKWARD, 0, micro, 2, 4), TRAIN)
        assert found.now_bytes["b"] == HOST + 2 * ADAPTER
        assert found.peak_bytes["b"] == HOST + kept + TENSOR + 2 * ADAPTER + ACTIVATION
        ran(found, "b", Action(Op.UPDATE, 0, -1, 2, 4), TRAIN)


def test_ledger_of_two_graphs_of_a_micro_batch_has_one_input() -> None:
    """The input of the second is the output of the first; below the lowest unit that trains no gradient is left."""
    found = ledger()
    came(found, "b", Payload.HIDDEN)
    for block in (2, 3):
        ran(found, "b", Action(Op.FORWARD, 0, 0, block, block + 1), TRAIN)
    left(found, "b", Payload.HIDDEN)
    assert found.now_bytes["b"] == HOST + 2 * ACTIVATION + TENSOR
    came(found, "b", Payload.GRAD)
    ran(found, "b", Action(Op.BACKWARD, 0, 0, 3, 4), TRAIN)
    assert found.now_bytes["b"] == HOST + ACTIVATION + 2 * TENSOR + ADAPTER
    ran(found, "b", Action(Op.BACKWARD, 0, 0, 2, 3), TRAIN)
    assert found.now_bytes["b"] == HOST + 2 * ADAPTER


def test_ledger_gives_gradients_to_trained_units_only() -> None:
    """A backward through two blocks of which one trains leaves one gradient."""
    found = ledger()
    ran(found, "b", Action(Op.FORWARD, 0, 0, 2, 4), training(1, 0.0))
    ran(found, "b", Action(Op.BACKWARD, 0, 0, 2, 4), training(1, 0.0))
    assert found.now_bytes["b"] == HOST + ADAPTER


def test_ledger_makes_moments_at_the_first_update_only() -> None:
    """Two for each trained number under AdamW; the gradients stay until the update is done."""
    found = ledger(optimizer="adamw")
    for _ in range(3):
        ran(found, "b", Action(Op.BACKWARD, 0, 0, 3, 4), training(1, 0.0))
        ran(found, "b", Action(Op.UPDATE, 0, -1, 3, 4), TRAIN)
    assert found.peak_bytes["b"] == HOST + 3 * ADAPTER
    ran(found, "b", Action(Op.BACKWARD, 0, 0, 2, 4), training(2, 0.0))
    ran(found, "b", Action(Op.UPDATE, 0, -1, 2, 4), TRAIN)
    assert found.peak_bytes["b"] == HOST + 2 * 3 * ADAPTER


def test_ledger_of_state_on_disk_has_it_for_a_moment_a_tensor_at_a_time() -> None:
    """Both gradients are there meanwhile, and nothing of either unit afterwards; a tensor has at most 64 bytes."""
    sizes = Sizes.at(PLAN.course, profile_of(PLAN).by_name["a"], MemorySettings("adamw"))
    sizes.gradient_bytes = 64
    held = NodeAccount(sizes, rests=frozenset({0, 1}), on_disk=True)
    held.give([0, 1])
    held.free_grads([0, 1])
    assert (held.now_bytes, held.peak_bytes) == (0, 2 * ADAPTER + 2 * 64)


def test_ledger_of_a_head_swaps_the_hidden_state_for_its_gradient() -> None:
    """A head's forward and backward hold both; moments come with its update, and an evaluation leaves nothing."""
    found, head = ledger(optimizer="adamw"), Action(Op.HEAD, 0, 0, HEAD_UNIT, HEAD_UNIT + 1)
    came(found, "a", Payload.HIDDEN)
    ran(found, "a", head, EVALUATE)
    assert (found.now_bytes["a"], found.peak_bytes["a"]) == (OWNER, OWNER + 2 * TENSOR)
    came(found, "a", Payload.HIDDEN)
    ran(found, "a", head, TRAIN)
    assert found.now_bytes["a"] == OWNER + HEAD + TENSOR
    left(found, "a", Payload.GRAD)
    ran(found, "a", Action(Op.UPDATE, 0, -1, HEAD_UNIT, HEAD_UNIT + 1), TRAIN)
    assert found.now_bytes["a"] == OWNER + 2 * HEAD
    came(found, "a", Payload.HIDDEN)
    ran(found, "a", head, EVALUATE)
    assert found.peak_bytes["a"] == OWNER + 2 * HEAD + 2 * TENSOR


def test_ledger_counts_a_tensor_that_leaves_a_graph_twice() -> None:
    """It is on its way, and the output that the graph keeps; a head that travels is counted with its owner."""
    found, key = ledger(), TensorKey(Payload.HIDDEN, 0, 0, 4)
    came(found, "b", Payload.HIDDEN)
    ran(found, "b", Action(Op.FORWARD, 0, 0, 2, 4), TRAIN)
    before = found.now_bytes["b"]
    found.sent(key, "b", "a", 0.0, 1.0)
    assert found.now_bytes["b"] == before + TENSOR
    found.arrived(key, "b", "a", 1.0)
    assert found.now_bytes["b"] == before
    head = TensorKey(Payload.HEAD, 7, -1, 0)
    found.sent(head, "b", "a", 0.0, 1.0)
    found.arrived(head, "b", "a", 1.0)
    assert found.now_bytes["b"] == before


def test_ledger_holds_embeddings_until_they_leave_and_nothing_for_checkpoints() -> None:
    """An embedding is a hidden state like any other; a checkpoint is written from where its tensors are."""
    found = ledger()
    ran(found, "a", Action(Op.EMBED, 0, 0, -1, 0), TRAIN)
    assert found.now_bytes["a"] == OWNER + TENSOR
    left(found, "a", Payload.HIDDEN)
    ran(found, "a", Action(Op.SAVE, 3), ItemKind(2, StepKind.CHECKPOINT, NO_UNITS, (), ()))
    assert (found.now_bytes["a"], found.peak_bytes["a"]) == (OWNER, OWNER + TENSOR)


@pytest.mark.promise("7 bounded memory")
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.sampled(10)
def test_ledger_of_a_whole_run_ends_where_it_began(seed: int) -> None:
    """Nothing is left of any micro-batch, for any plan and timing."""
    rng = random.Random(seed)
    plan = random_plan(rng, with_operations=seed % 2 == 1)
    profile = profile_of(plan)
    costs = CourseCosts.of(plan, profile)
    items = Items(costs)
    found = MemoryLedger(plan, profile.by_name, items, MemorySettings("sgd"))
    before, times = found.now_bytes, ProfileTimes(items, found.effect)
    RecordedRing(plan, action_s=times, observer=Meter(plan.nodes, items, times, found, keep_spans=False)).run()
    assert found.now_bytes == before
    assert max(found.peak_bytes[node] - before[node] for node in plan.nodes) > 0


def test_ledger_keeps_the_active_part_of_a_graph() -> None:
    """Two of four subnets have a graph: all but half of what subnets keep, until the backward frees just that."""
    found = ledger()
    rows = ("1111" * 3 + "1123",)
    item = dataclasses.replace(training(1, FULL), rows=rows, subnets=4)
    of_subnets = (4 * 32 + 4 * 32) * 4 * FULL
    came(found, "b", Payload.HIDDEN)
    before = found.now_bytes["b"]
    ran(found, "b", Action(Op.FORWARD, 0, 0, 3, 4), item)
    assert found.now_bytes["b"] - before == ACTIVATION - of_subnets / 2
    ran(found, "b", Action(Op.BACKWARD, 0, 0, 3, 4), item)
    whole = ledger()
    came(whole, "b", Payload.HIDDEN)
    ran(whole, "b", Action(Op.FORWARD, 0, 0, 3, 4), training(1, FULL))
    assert whole.now_bytes["b"] - before == ACTIVATION
    ran(whole, "b", Action(Op.BACKWARD, 0, 0, 3, 4), training(1, FULL))
    assert whole.now_bytes["b"] == found.now_bytes["b"]


def test_ledger_of_scores_leaves_no_gradient() -> None:
    """Nothing is updated after them, so no gradient of an adapter or head waits for that."""
    found = ledger()
    item = dataclasses.replace(training(1, FULL), kind=StepKind.SCORE)
    before = found.now_bytes["b"]
    came(found, "b", Payload.HIDDEN)
    ran(found, "b", Action(Op.FORWARD, 0, 0, 3, 4), item)
    ran(found, "b", Action(Op.BACKWARD, 0, 0, 3, 4), item)
    assert found.now_bytes["b"] <= before + TENSOR


def test_ledger_counts_a_block_that_passes_gradients_on_and_is_run_again_by_its_input() -> None:
    """Of two blocks above the group the upper is run again: it keeps its input, the lower all but those of layers."""
    plan = changed(make_plan([("a", 0, 4)], ["a"], method=Hift(), microbatches=2), recompute=(Range(3, 4),))
    profile = profile_of(plan)
    items = Items(CourseCosts(plan.course, profile))
    found = MemoryLedger(plan, profile.by_name, items, MemorySettings("sgd"))
    item = ItemKind(0, StepKind.TRAIN, Units.of(4, [1]), (1, 1), (FULL, FULL))
    effect = found.effect("a", Action(Op.FORWARD, 0, 0, 1, 4), item)
    width = plan.course.hidden_size
    inputs = (3 * width + 4 * width) * 4 * FULL
    assert effect is not None
    assert effect.takes == ACTIVATION + (ACTIVATION - inputs) + TENSOR
