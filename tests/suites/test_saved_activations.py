"""Blocks that are run again keep their input only, and give the same scores; each graph has its own VeLoRA vectors.

That recomputed blocks give the very bits, and VeLoRA what the paper's formulas train, is among the laws.
"""

from __future__ import annotations

from typing import Any

import pytest

from ringtune.errors import IntegrityError
from ringtune.run_control import events as rd
from ringtune.schedule.actions import Action, Op
from ringtune.schedule.operation_tables import Score
from ringtune.schedule.saved_activations import INITS
from ringtune.schedule.units import Range
from tests.edge.techniques.test_operations import choice_of, make_ring, score, score_turn
from tests.features.feature import Feature, carry_out, planned
from tests.features.memory import literally
from tests.features.models import of_family, own_weights
from tests.support.hand_ring import HandRing
from tests.support.literal_velora import every_layer
from tests.support.operation_masks import SPLITS
from tests.support.operation_masks import run as run_plan
from tests.support.plans import changed
from tests.support.torch_ring import Case, TorchCarrier, distance, make_carrier, same_bits

ALL = (Range(0, 4),)
SOME = (Range(0, 1), Range(2, 3))


def case_of(adapter: str, **changes: Any) -> Case:
    """Two steps of one owner in float32."""
    values: dict[str, Any] = {"num_steps": 2, "eval_every": 0, "checkpoint_every": 0, "owners": ("a",), **changes}
    return own_weights("recomputed", "bert", adapter=adapter, dtype="float32", **values).case


@pytest.mark.parametrize("adapter", ["seq_bn", "full"])
@pytest.mark.sampled(1)
def test_scores_of_recomputed_blocks_are_those_of_kept_ones(adapter: str) -> None:
    """Weights are watched in the second run, whose graph the backward uses."""
    case = case_of(adapter)  # without dropout, which is not drawn for a part of the heads
    found = []
    for recompute in ((), ALL):
        hand = make_ring(case, SPLITS["two"], choice_of(Score.TAYLOR, Score.FISHER, 2))
        hand = HandRing(changed(hand.plan, recompute=recompute), hand.job, hand.model_folder, hand.datasets)
        found.append(score(hand, score_turn(hand.plan, "a")))
    assert found[0]
    assert found[0] == found[1]


def kept_bytes(case: Case, recompute: tuple[Range, ...]) -> tuple[int, int]:
    """The most bytes that the only host holds after any forward, and the largest hidden state."""
    held, hidden = [], []

    class Watching(TorchCarrier):
        def run(self, node: str, action: Action) -> tuple[tuple[str, float], ...]:
            values = super().run(node, action)
            if action.op is Op.FORWARD:
                held.append(self.executors[node].live_bytes())
                hidden.append(self.executors[node]._flows.of(action).hidden.nbytes)
            return values

    plan = changed(case.plan(SPLITS["one"]), recompute=recompute)
    run_plan(case, plan, carrier=Watching(make_carrier(case, plan).executors))
    return max(held), max(hidden)


@pytest.mark.parametrize("adapter", ["seq_bn", "full"])
@pytest.mark.sampled(1)
def test_recomputed_blocks_keep_their_input_only(adapter: str) -> None:
    """Four blocks and two micro-batches in flight: an input each, and what the owner has of the batch."""
    case = case_of(adapter, method="all", dropout=0.2)
    (none, hidden), (some, _), (every, _) = (kept_bytes(case, blocks) for blocks in ((), SOME, ALL))
    masks_and_batch = hidden
    assert every <= 2 * (4 * hidden + hidden) + masks_and_batch
    assert every < 0.2 * none
    assert every < some < 0.75 * none  # the lowest block keeps less than the others


@pytest.mark.promise("5 timing changes nothing")
@pytest.mark.parametrize("init", INITS)
@pytest.mark.sampled(1)
def test_velora_with_micro_batches_in_flight_equals_one_after_the_other(init: str) -> None:
    """A graph keeps the vector that it was made with, whatever comes before its backward."""
    feature = own_weights("velora", "bert", microbatches=4, num_steps=4, checkpoint_every=0)
    plan, case = changed(feature.plan_on("two"), velora=every_layer("bert", init=init)), feature.case
    hands = [
        HandRing(plan, case.job, case.folder / "model", case.datasets(), interleave=interleave)
        for interleave in (False, True)
    ]
    found = [hand.train().tensors() for hand in hands]
    assert same_bits(*found)
    assert same_bits(carry_out(feature, plan, 5).tensors, found[0])


def test_velora_in_a_shard_is_checked() -> None:
    """A shard without vectors is of another course: it is refused, and nothing is changed."""
    feature = own_weights("velora", "bert", num_steps=4, checkpoint_every=2)
    plan = feature.plan_on("two")
    run = carry_out(feature, plan)
    saved = run.logged(rd.LogCheckpoint)[0]
    with pytest.raises(IntegrityError, match="the shard has VeLoRA's vectors of other layers than this node's"):
        carry_out(feature, changed(plan, velora=every_layer("bert")), saved=saved, shards=run.notes.shards[saved.step])


def test_random_vectors_do_not_know_that_rows_are_packed() -> None:
    """The reference trains on each row of a sequence alone; vectors that are means would know its padding."""
    layers = every_layer("llama", parts=5, init="random")
    values: dict[str, Any] = {"adapter": "full", "packing": True, "max_length": 40, "owners": ("a", "b")}
    arguments = of_family("velora/packed", "llama", "causal-lm", **values)
    feature = Feature(**arguments, plan=planned(velora=layers), reference=literally)
    run = carry_out(feature, feature.plan_on(feature.split))
    assert distance(run.tensors, literally(feature.case, run).tensors) <= feature.bound
