"""What HiFT trains is not mapped from the files, what it sends has the planned size, and its state is where it is due.

That it trains what one process trains is among the laws.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from ringtune.costs.memory_sizes import embedding_grad_bytes
from ringtune.costs.model_facts import model_facts
from ringtune.errors import DivergedError, StorageError
from ringtune.run_control import events as rd
from ringtune.schedule.actions import Payload, TensorKey
from ringtune.schedule.units import EMBEDDING
from tests.features.feature import run_of
from tests.features.full_parameters import HIFT, hift, on_disk
from tests.support import hift_reference, reference
from tests.support.torch_ring import make_carrier, run


def test_hift_trains_tensors_of_its_own_and_not_the_files() -> None:
    """In the type of the files too, in which a frozen table would be mapped: what trains is private and writable."""
    case = hift("/files", "gpt2", "group_size = 6", dtype="float32", num_steps=2, eval_every=0, owners=("a",)).case
    before = (case.folder / "model" / "model.safetensors").read_bytes()
    carrier = make_carrier(case, case.plan((("a", 0, 4),)))
    assert run(case.plan((("a", 0, 4),)), carrier, 0).finish == rd.Finish("", "")
    assert (case.folder / "model" / "model.safetensors").read_bytes() == before
    owner = carrier.executors["a"]._hosted.owner
    assert owner is not None
    stored = load(before)
    for name, value in owner.units[EMBEDDING].items():
        assert not torch.equal(value, stored[f"transformer.{name}"]), f"{name} did not train"
    mapped = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if str(case.folder) in line]
    ranges = [tuple(int(end, 16) for end in line.split("-")) for line in mapped]
    for name, value in owner.parameters.items():
        assert not any(start <= value.data_ptr() < stop for start, stop in ranges), f"{name} is mapped"


@pytest.mark.parametrize(("model_type", "tied"), [("bert", None), ("gpt2", True), ("llama", False), ("vit", None)])
@pytest.mark.sampled(2)
def test_hift_sends_gradients_of_the_planned_size(model_type: str, tied: bool | None) -> None:
    """All of the head, of a tied table and of patches; of other tables at most the rows of a batch's padded tokens."""
    config = {} if tied is None else {"tie_word_embeddings": tied}
    case = hift(f"/sizes-{tied}", model_type, "", config, num_steps=6, eval_every=0).case
    plan = case.plan((("b", 0, 1), ("a", 1, 4)))
    carrier = make_carrier(case, plan)
    take, sizes = carrier.take_parcel, {EMBEDDING: 0, 4: 0}

    def weighed(node: str, key: TensorKey) -> Any:
        content = take(node, key)
        sizes[key.boundary] = content.size_bytes
        return content

    carrier.take_parcel = weighed  # type: ignore[method-assign]
    assert run(plan, carrier, 0).finish == rd.Finish("", "")
    facts, header_bytes = model_facts(case.folder / "model", case.job), 2048
    planned = embedding_grad_bytes(facts, 8 * 16)
    assert facts.head_bytes <= sizes[4] <= facts.head_bytes + header_bytes
    assert sizes[EMBEDDING] <= planned + header_bytes
    if facts.is_tied or model_type == "vit":
        assert sizes[EMBEDDING] >= (facts.token_table_bytes or planned)
    else:
        assert sizes[EMBEDDING] < facts.embedding_train_bytes


@pytest.mark.parametrize(("unit", "name"), [(EMBEDDING, "embedding"), (4, "head")])
def test_hift_refuses_a_gradient_that_is_not_finite_where_it_is_computed(unit: int, name: str) -> None:
    """Its initiator says so before it sends: else the owner that it goes to would report it, and the link be blamed."""
    case = hift("/finite", "bert", num_steps=6, eval_every=0).case
    plan = case.plan((("b", 0, 1), ("a", 1, 4)))
    carrier = make_carrier(case, plan)
    take, wrong = carrier.take_parcel, list[TensorKey]()

    def spoiled(node: str, key: TensorKey) -> Any:
        if key.boundary == unit:
            owner, wrong[:] = carrier.executors[node]._owner(key)[0], [key]
            for parameter in owner.units[unit].values():
                if parameter.grad is not None:
                    parameter.grad.mul_(float("nan"))
        return take(node, key)

    carrier.take_parcel = spoiled  # type: ignore[method-assign]
    told = f"a batch of owner a: the gradient of the {name} is not finite, first that of "
    with pytest.raises(DivergedError, match=told):
        run(plan, carrier, 0)
    assert [key.payload for key in wrong] == [Payload.UNIT_GRAD]


@pytest.mark.parametrize("tied", [True, False])
def test_tied_table_is_of_the_embedding(tied: bool) -> None:
    """It collects both gradients; one of its own is of the head."""
    feature = next(one for one in HIFT if one.name == f"hift-groups/gpt2-{tied}")
    model = reference.whole_model(feature.case.job, feature.plan_on(feature.split), feature.case.folder / "model")
    assert ("lm_head.weight" in hift_reference.tensors_of(model)) is not tied


def test_state_on_disk_is_not_in_memory_and_goes_with_the_run(tmp_path: Path) -> None:
    """After a run nothing of the groups' state is in memory, and no file is left when it is closed."""
    feature = hift("/disk", "bert", num_steps=2, eval_every=0)
    plan = feature.plan_on("two")
    carrier = make_carrier(feature.case, plan)
    on_disk(carrier, tmp_path, None)
    assert run(plan, carrier, 0).finish == rd.Finish("", "")
    executors = carrier.executors.values()
    assert {each.held_bytes for one in executors for each in one._hosted.all_optimizers()} == {0}
    assert list(tmp_path.rglob("*.safetensors")) != []
    for executor in executors:
        executor.inactive_state.close()
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_hift_without_room_for_its_state_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node took the room after it was counted: the second of two files does not fit, and the first one goes."""
    case = hift("/room", "bert", owners=("a",)).case
    carrier, allocate = make_carrier(case, case.plan((("a", 0, 4),))), os.posix_fallocate

    def once(descriptor: int, offset: int, size: int) -> None:
        if len(list(tmp_path.iterdir())) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", once)
    state = carrier.executors["a"].inactive_state
    with pytest.raises(StorageError, match="No space left on device; make room"):
        state.keep_on_disk(tmp_path, {"run": "r", "node": "a"})
    state.close()
    assert list(tmp_path.iterdir()) == []


def test_dropped_state_is_in_no_shard() -> None:
    """The head stays active and keeps its state; that of groups is dropped."""
    lines = 'always_active = ["head"]\nstate = "{}"'
    for word in ("memory", "drop"):
        feature = hift(f"/{word}", "bert", lines.format(word), num_steps=2, owners=("a",), eval_every=0)
        assert (b"moments/" in run_of(feature, "one").notes.shards[2]["a"]) is (word == "memory")
