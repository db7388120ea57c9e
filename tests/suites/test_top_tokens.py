"""The last block computes only what the head reads, where that changes nothing; and its share of the time is known."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from edge.model import skeleton
from edge.model.families import FamilyForward, family_of
from ringtune.models.adapter_support import may_trim
from ringtune.models.families import FAMILIES
from ringtune.models.family import CLASSIFICATION
from ringtune.run_control import events as rd
from ringtune.schedule.plan import Plan
from ringtune.schedule.saved_activations import Velora
from ringtune.schedule.turns import turn_sequence
from ringtune.schedule.units import Range
from tests.support import torch_ring
from tests.support.torch_ring import Case, make_carrier, write_family_inputs

SLICES = (("b", 0, 3), ("a", 3, 4))
ENCODERS = ("bert", "roberta", "xlm-roberta", "electra", "distilbert")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that entered the block, of each time that only some were asked for."""
    found: list[int] = []

    def spied(model_type: str) -> FamilyForward:
        forward = family_of(model_type)

        def spy(block: Any, hidden: torch.Tensor, context: Any, count: int) -> torch.Tensor:
            found.append(hidden.shape[1])
            assert forward.first_tokens is not None
            return forward.first_tokens(block, hidden, context, count)

        return forward._replace(first_tokens=spy)

    monkeypatch.setattr(skeleton, "family_of", spied)
    return found


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        *((name, {}) for name in ENCODERS),
        *(("bert", {"adapter": adapter}) for adapter in ("lora[r=4]", "double_seq_bn", "par_bn", "ia3", "dora[r=4]")),
        ("bert", {"adapter": "full"}),
        ("distilbert", {"adapter": "lora[r=4]|double_seq_bn"}),
        ("electra", {"method": "hift", "adapter": "full"}),
        ("roberta", {"method": "pipeadapter"}),
        ("bert", {"method": "ringada", "every_steps": 3}),
    ],
)
@pytest.mark.sampled(1)
def test_last_block_of_one_token_trains_what_that_of_all_does(
    tmp_path: Path, asked: list[int], model_type: str, changes: dict[str, Any]
) -> None:
    """Texts of several lengths, so that there is padding; also in evaluation."""
    folder = write_family_inputs(tmp_path, model_type, CLASSIFICATION)
    values = {"method": "all", "num_steps": 4, "local_iterations": 2, "microbatches": 2, "owners": ("a", "c")}
    case = Case(folder=folder, task=CLASSIFICATION, eval_every=4, **{**values, **changes})
    plan = case.plan(SLICES)
    assert plan.course.top_tokens == 1
    whole = Plan(dataclasses.replace(plan.course, trims=False), plan.placements)
    found = []
    for each in (plan, whole):
        carrier = make_carrier(case, each)
        assert torch_ring.run(each, carrier, 1).finish == rd.Finish("", "")
        found.append(carrier.collected(each, list(turn_sequence(each.course))[-1].owner))
        assert min(asked) > 1
        assert len(asked) >= 8 + 4 and not len(asked) % 2
    ours, theirs = found
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-9
    assert all(tensor.dtype is torch.float64 for tensor in ours.values())


def test_last_block_computes_all_where_it_would_be_another_result() -> None:
    """Dropout, gates and ReFT look at more than one token, or draw for each; so do families of other blocks."""
    bert = FAMILIES["bert"]
    assert may_trim(bert, ["lora", "seq_bn"], dropout=0.0)
    assert not may_trim(bert, ["lora"], dropout=0.1)
    for config in ("loreft", "noreft", "lora[use_gating=True]", "seq_bn[use_gating=True]", "lora[dropout=0.1]"):
        assert not may_trim(bert, ["lora", config], dropout=0.0), config
    assert {name for name, family in FAMILIES.items() if may_trim(family, ["lora"], dropout=0.0)} == set(ENCODERS)


def test_last_block_computes_all_where_blocks_run_in_other_ways(tmp_path: Path) -> None:
    """With VeLoRA, or a head that reads everything."""
    case = Case(folder=write_family_inputs(tmp_path, "bert", CLASSIFICATION), task=CLASSIFICATION, owners=("a",))
    course = case.plan((("a", 0, 4),)).course
    assert course.top_tokens == 1
    velora = Velora(blocks=(Range(1, 3),), layers=("down",))
    for changes in ({"velora": velora}, {"head_tokens": 0}, {"trims": False}):
        assert dataclasses.replace(course, **changes).top_tokens == 0, changes
