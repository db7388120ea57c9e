"""Memory accounts: what each action and tensor takes, by hand."""

from __future__ import annotations

from ringtune.costs.seconds import CourseCosts
from ringtune.schedule.actions import Action, Op, Payload, TensorKey
from ringtune.schedule.turns import StepKind, turn_sequence
from ringtune.schedule.units import Units
from sim.items import ItemKind, Items
from sim.memory_ledger import MemoryLedger
from tests.support.plans import make_plan
from tests.support.profiles import profile_of

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
    items = Items(CourseCosts(PLAN.course, profile))
    items.granted(next(turn_sequence(PLAN.course)))
    return MemoryLedger(PLAN, profile.by_name, items, optimizer=optimizer, dtype=dtype, embedding_bytes=embedding_bytes)


def training(depth: int, *sizes: float) -> ItemKind:
    """A train item whose top ``depth`` blocks train, with these padded tokens of its micro-batches."""
    units = Units.top(PLAN.course.num_blocks, depth)
    return ItemKind(0, StepKind.TRAIN, units, (units.lowest,) * len(sizes), sizes)


TRAIN = training(2, FULL, FULL / 2)
EVALUATE = ItemKind(1, StepKind.EVALUATE, NO_UNITS, (NO_UNITS.lowest,), (FULL,))


def ran(found: MemoryLedger, node: str, action: Action, item: ItemKind) -> None:
    """An action of a node is done."""
    effect = found.effect(node, action, item)
    if effect is not None:
        effect.apply()


def test_ledger_begins_with_weights() -> None:
    """A host has blocks and adapters, an owner embedding and head too; a table may count as touched."""
    assert ledger().peak_bytes == {"a": OWNER, "b": HOST}
    assert ledger(embedding_bytes=10.0).peak_bytes["a"] == OWNER - EMBEDDING + 10


def test_ledger_of_a_free_forward_holds_a_block_for_a_moment() -> None:
    """In proportion to the size, and gone afterwards."""
    found = ledger()
    ran(found, "b", Action(Op.FORWARD_FREE, 0, 1, 2, 3), TRAIN)
    assert found.peak_bytes["b"] == HOST + ACTIVATION / 2
    ran(found, "b", Action(Op.FORWARD_FREE, 0, 0, 2, 3), TRAIN)
    ran(found, "b", Action(Op.FORWARD_FREE, 0, 0, 2, 3), TRAIN)
    assert found.peak_bytes["b"] == HOST + ACTIVATION


def test_ledger_keeps_graphs_until_their_backward() -> None:
    """Two micro-batches keep two graphs; each backward frees its own, and the gradients come once."""
    found = ledger()
    for micro in (0, 1):
        ran(found, "b", Action(Op.FORWARD, 0, micro, 2, 4), TRAIN)
    kept = 2 * ACTIVATION + 2 * ACTIVATION / 2
    assert found.peak_bytes["b"] == HOST + kept + ACTIVATION / 2
    for micro in (0, 1):
        ran(found, "b", Action(Op.BACKWARD, 0, micro, 2, 4), TRAIN)
    assert found.peak_bytes["b"] == HOST + kept + 2 * ADAPTER + ACTIVATION
    ran(found, "b", Action(Op.UPDATE, 0, -1, 2, 4), TRAIN)
    before = found.peak_bytes["b"]
    for micro in (0, 1):
        ran(found, "b", Action(Op.FORWARD, 0, micro, 2, 4), TRAIN)
    assert found.peak_bytes["b"] == before


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


def test_ledger_of_a_head_has_gradients_in_training_only() -> None:
    """A head's forward and backward hold hidden state and gradient; moments come with its update."""
    found = ledger(optimizer="adamw")
    ran(found, "a", Action(Op.HEAD, 0, 0, HEAD_UNIT, HEAD_UNIT + 1), EVALUATE)
    assert found.peak_bytes["a"] == OWNER + 2 * TENSOR
    ran(found, "a", Action(Op.HEAD, 0, 0, HEAD_UNIT, HEAD_UNIT + 1), TRAIN)
    assert found.peak_bytes["a"] == OWNER + HEAD + 2 * TENSOR
    ran(found, "a", Action(Op.UPDATE, 0, -1, HEAD_UNIT, HEAD_UNIT + 1), TRAIN)
    ran(found, "a", Action(Op.HEAD, 0, 0, HEAD_UNIT, HEAD_UNIT + 1), EVALUATE)
    assert found.peak_bytes["a"] == OWNER + 2 * HEAD + 2 * TENSOR


def test_ledger_counts_tensors_on_their_way() -> None:
    """Two lie there at once, then none."""
    found = ledger()
    keys = [TensorKey(Payload.HIDDEN, 0, micro, 2) for micro in (0, 1)]
    for key in keys:
        found.sent(key, "b", "a", 0.0, 1.0)
    for _ in range(5):
        found.accepted("b", keys[0])
        found.sent(keys[0], "b", "a", 0.0, 1.0)
    assert found.peak_bytes["b"] == HOST + 2 * TENSOR
    for key in keys:
        found.arrived(key, "b", "a", 1.0)
    head = TensorKey(Payload.HEAD, 7, -1, 0)
    found.sent(head, "b", "a", 0.0, 1.0)
    found.arrived(head, "b", "a", 1.0)
    assert found.peak_bytes == {"a": OWNER + 2 * TENSOR, "b": HOST + 2 * TENSOR}
    assert ledger(dtype="float64").peak_bytes["b"] == HOST


def test_ledger_holds_nothing_more_for_embeddings_and_checkpoints() -> None:
    """What they make is counted where it lies."""
    found = ledger()
    ran(found, "a", Action(Op.EMBED, 0, 0, -1, 0), TRAIN)
    ran(found, "a", Action(Op.SAVE, 3), ItemKind(2, StepKind.CHECKPOINT, NO_UNITS, (), ()))
    assert found.peak_bytes["a"] == OWNER
