"""Blocks that are run again in backward give the very bits of blocks whose graph was kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ringtune.schedule.actions import Action, Op
from ringtune.schedule.operation_tables import Score
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import turn_sequence
from ringtune.schedule.units import Range
from tests.edge.techniques.test_operations import choice_of, make_ring, score, score_turn
from tests.support.family_inputs import TASKS, family_writer
from tests.support.hand_ring import HandRing
from tests.support.operation_masks import SPLITS, Slices, mixed_table
from tests.support.operation_masks import run as run_plan
from tests.support.plans import changed
from tests.support.tiny_families import MODEL_TYPES
from tests.support.torch_ring import Case, TorchCarrier, make_carrier

ALL = (Range(0, 4),)
SOME = (Range(0, 1), Range(2, 3))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that writes the inputs of a family once."""
    return family_writer(tmp_path_factory.mktemp("inputs"))


def case_of(inputs: Any, model_type: str = "bert", **changes: Any) -> Case:
    """A short run with dropout in float32, where another computation is seen in the bits."""
    values: dict[str, Any] = {"dropout": 0.2, "microbatches": 2, "num_steps": 4, "every_steps": 1, "dtype": "float32"}
    return Case(folder=inputs(model_type), task=TASKS[model_type], **{**values, **changes})


def trained(case: Case, slices: Slices, recompute: tuple[Range, ...] = ()) -> dict[str, torch.Tensor]:
    """What trained, at the end of a run in which these blocks are run again."""
    plan = changed(case.plan(slices), recompute=recompute)
    carrier = run_plan(case, plan)[1]
    assert {executor.live_bytes() for executor in carrier.executors.values()} == {0}
    return collected(plan, carrier)


def collected(plan: Plan, carrier: TorchCarrier) -> dict[str, torch.Tensor]:
    """What trained, at the end."""
    return carrier.collected(plan, list(turn_sequence(plan.course))[-1].owner)


def check_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Two sets of tensors are equal in every bit."""
    assert ours.keys() == theirs.keys()
    assert [name for name, value in ours.items() if not torch.equal(value, theirs[name])] == []


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize(
    ("model_type", "adapter"),
    [(name, adapter) for name in MODEL_TYPES for adapter in ("seq_bn", "full")]
    + [(name, "lora[r=4]") for name in ("bert", "gpt2", "llama")]
    + [("bert", "linear[output_lora=True]"), ("gpt2", "mlp[hidden=8,attn_matrices=['q']]|lora[attn_matrices=['v']]")],
)
@pytest.mark.sampled(2)
def test_recomputed_blocks_give_the_bits_of_kept_ones(inputs: Any, model_type: str, adapter: str) -> None:
    """Every family with dropout, adapters and own weights, blocks that unfreeze, and other slices."""
    case = case_of(inputs, model_type, adapter=adapter)
    wanted = trained(case, SPLITS["two"])
    check_bits(trained(case, SPLITS["one"], ALL), wanted)


@pytest.mark.parametrize(
    "changes",
    [
        {"adapter": "loreft"},
        {"adapter": "double_seq_bn|lora[r=2]"},
        {"method": "all", "optimizer": "sgd"},
        {"private_blocks": 1},
        {"method": "pipeadapter", "num_steps": 7, "local_iterations": 4},
        {"method": "pipeadapter", "adapter": "full", "num_steps": 7, "local_iterations": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("recompute", [ALL, SOME], ids=["all", "some"])
@pytest.mark.sampled(2)
def test_recomputed_blocks_with_other_settings(inputs: Any, changes: dict[str, Any], recompute: Any) -> None:
    """Adapters, methods and private blocks; a stale forward is run again with the weights that it saw."""
    case = case_of(inputs, **changes)
    slices = (("b", case.private_blocks, 2), ("c", 2, 3), ("a", 3, 4))
    check_bits(trained(case, slices, recompute), trained(case, slices))


@pytest.mark.parametrize("adapter", ["seq_bn", "full"])
@pytest.mark.parametrize("subnets", [1, 2])
def test_recomputed_blocks_with_operation_tables(inputs: Any, subnets: int, adapter: str) -> None:
    """Forward-only and skipped subnets, and blocks without any full one."""
    operations = mixed_table(3, ("a",), subnets)
    case = case_of(inputs, operations=operations, microbatches=4, dropout=0.0, adapter=adapter, method="all")
    check_bits(trained(case, SPLITS["two"], ALL), trained(case, SPLITS["two"]))


@pytest.mark.parametrize("adapter", ["seq_bn", "full"])
def test_scores_of_recomputed_blocks_are_those_of_kept_ones(inputs: Any, adapter: str) -> None:
    """Weights are watched in the second run, whose graph the backward uses."""
    case = case_of(inputs, adapter=adapter, dropout=0.0)  # which is not drawn for a part of the heads
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
def test_recomputed_blocks_keep_their_input_only(inputs: Any, adapter: str) -> None:
    """Four blocks and two micro-batches in flight: an input each, and what the owner has of the batch."""
    case = case_of(inputs, adapter=adapter, method="all")
    (none, hidden), (some, _), (every, _) = (kept_bytes(case, blocks) for blocks in ((), SOME, ALL))
    masks_and_batch = hidden
    assert every <= 2 * (4 * hidden + hidden) + masks_and_batch
    assert every < 0.2 * none
    assert every < some < 0.75 * none  # the lowest block keeps less than the others
