"""To the head and back travels only what it reads, and nothing of the result depends on that."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from edge.model.owner import OwnerParts
from ringtune.models.families import DESCRIBED
from ringtune.models.family import CAUSAL_LM, CLASSIFICATION, IMAGE_CLASSIFICATION, QUESTION_ANSWERING
from ringtune.run_control import events as rd
from ringtune.schedule.actions import Payload
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import turn_sequence
from tests.support import torch_ring
from tests.support.torch_ring import Case, TorchCarrier, make_carrier, write_family_inputs

SLICES = (("b", 0, 3), ("a", 3, 4))
"""The owner ``a`` has the last block in its own turns; for ``c`` the way to the head is over a link."""


def trained(case: Case, plan: Plan) -> TorchCarrier:
    """Train, and keep what travelled."""
    carrier = make_carrier(case, plan, keep_messages=True)
    assert torch_ring.run(plan, carrier, 1).finish == rd.Finish("", "")
    return carrier


@pytest.mark.promise("5 timing changes nothing")
@pytest.mark.parametrize(
    ("model_type", "task", "changes"),
    [
        ("bert", CLASSIFICATION, {"dropout": 0.1, "eval_every": 4}),
        ("bert", CLASSIFICATION, {"wire": "bfloat16", "dtype": "float32", "adapter": "full"}),
        ("electra", CLASSIFICATION, {"adapter": "lora[r=4]"}),
        ("distilbert", CLASSIFICATION, {}),
        ("vit", IMAGE_CLASSIFICATION, {"method": "hift", "adapter": "full"}),
    ],
)
@pytest.mark.sampled(1)
def test_head_gets_the_tokens_that_it_reads(
    tmp_path: Path, model_type: str, task: str, changes: dict[str, Any]
) -> None:
    """One of each row, there and back; all others have a gradient of zero. The bits are those of whole rows."""
    folder = write_family_inputs(tmp_path, model_type, task)
    values = {
        "method": "all",
        "num_steps": 4,
        "local_iterations": 2,
        "microbatches": 2,
        "owners": ("a", "c"),
        **changes,
    }
    case = Case(folder=folder, task=task, **values)
    plan = case.plan(SLICES)
    assert plan.course.head_tokens == 1
    plan = Plan(dataclasses.replace(plan.course, trims=False), plan.placements)
    whole = Plan(dataclasses.replace(plan.course, head_tokens=0), plan.placements)
    ours, theirs = trained(case, plan), trained(case, whole)
    holder = list(turn_sequence(plan.course))[-1].owner
    assert torch_ring.same_bits(ours.collected(plan, holder), theirs.collected(whole, holder))
    assert len(ours.messages) == len(theirs.messages)
    head, kinds = plan.course.head, set()
    for (source, payload, boundary, content), (*same, other) in zip(ours.messages, theirs.messages, strict=True):
        assert [source, payload, boundary] == same
        tokens, all_tokens = content[0].shape[1], other[0].shape[1]
        assert all_tokens > 1
        assert tokens == (1 if boundary == head else all_tokens)
        assert content[0].untyped_storage().nbytes() == content[0].nbytes or boundary < head
        kinds |= {payload} if boundary == head else set()
    assert kinds == {Payload.HIDDEN, Payload.GRAD}


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("trims", [False, True])
def test_tensor_that_reaches_a_head_is_the_same_at_home_and_off_the_wire(
    tmp_path: Path, trims: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense, of the tokens that travel: on CUDA the mask of dropout depends on how a tensor lies in memory."""
    seen: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []

    def watched(name: str) -> None:
        run = getattr(OwnerParts, name)

        def look(parts: OwnerParts, hidden: torch.Tensor, *others: Any, **more: Any) -> Any:
            seen.append((tuple(hidden.shape), hidden.stride(), hidden.untyped_storage().nbytes()))
            return run(parts, hidden, *others, **more)

        monkeypatch.setattr(OwnerParts, name, look)

    watched("train_step")
    watched("evaluate")
    folder = write_family_inputs(tmp_path, "bert", CLASSIFICATION)
    dropout = 0.0 if trims else 0.1
    case = Case(
        folder=folder,
        dtype="float32",
        trims=trims,
        dropout=dropout,
        method="all",
        num_steps=2,
        local_iterations=1,
        microbatches=2,
        eval_every=2,
    )
    ways = []
    for slices in ((("a", 0, 4),), (("a", 0, 2), ("b", 2, 4))):
        seen.clear()
        trained(case, case.plan(slices))
        ways.append(list(seen))
    at_home, off_the_wire = ways
    assert at_home == off_the_wire
    assert all(size == rows * tokens * width * 4 for (rows, tokens, width), _, size in at_home)
    assert {tokens for (_, tokens, _), _, _ in at_home} == {1}


def test_only_heads_that_read_the_first_token_are_known_to() -> None:
    """Decoders classify by the last token of a row, which is another one in each; other tasks read all tokens."""
    for name, family in DESCRIBED.items():
        encoder = name in {"bert", "roberta", "xlm-roberta", "electra", "distilbert"}
        assert family.head_tokens(CLASSIFICATION) == (1 if encoder else 0)
        assert family.head_tokens(IMAGE_CLASSIFICATION) == (1 if name == "vit" else 0)
        assert {family.head_tokens(task) for task in (QUESTION_ANSWERING, CAUSAL_LM)} == {0}
