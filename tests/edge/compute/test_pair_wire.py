"""What pairs become on the wire: the bytes that the rule counts, and the gradients that they still give."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from edge.compute.capturing.signs import pack, unpack
from edge.compute.capturing.wire import PairWire, from_file, to_file
from edge.compute.helping.auxiliary_models import AuxiliaryModels
from edge.compute.saving.projected import subtokens
from ringtune.costs.offload.pair_bytes import (
    LOSSY,
    WIRES,
    PairWidths,
    pair_token_bytes,
    pair_widths,
    vector_bytes,
    weight_bytes,
)
from ringtune.errors import IntegrityError, PlanError
from ringtune.models.families import family_named
from ringtune.models.folder import read_config
from tests.support import offload
from tests.support.offload import NUM_BLOCKS, helper_grads, inputs_of, plain_grads, task_of, trio
from tests.support.tiny_families import HIDDEN, MODEL_TYPES

PARTS = 8
MOST_BF16_ERROR = 1e-2


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tiny models are written."""
    return tmp_path_factory.mktemp("models")


def recorded(both: offload.Trio, x: torch.Tensor, grad: torch.Tensor, *, micro: int = 0) -> dict[str, torch.Tensor]:
    """The pairs of all blocks for one micro-batch."""
    pairs = both.host.capture.pairs()
    both.host.forward(x, micro, dropped=True, pairs=pairs).backward(grad)
    taken: dict[str, torch.Tensor] = pairs.take(0, NUM_BLOCKS)
    return taken


def wire_of(wire: str, models: AuxiliaryModels) -> PairWire:
    """One end of a wire."""
    return PairWire(wire, models.inputs, parts=PARTS, seed=3)


@pytest.mark.parametrize(("adapter", "dropout"), [*((kind, 0.0) for kind in offload.KINDS), (offload.FUSED_LORA, 0.1)])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.sampled(6)
def test_rule_counts_the_bytes_that_are_sent(root: Path, model_type: str, adapter: str, dropout: float) -> None:
    """Of pairs, of the vectors that go with the first ones, and of the weights that come back."""
    folder = offload.family_folder(root, model_type)
    facts: dict[str, Any] = {"hidden_size": HIDDEN, "widths": family_named(model_type).widths(read_config(folder))}
    found = [one for block in range(NUM_BLOCKS) for one in pair_widths(adapter, block, dropout=dropout, **facts)]
    both = trio(folder, adapter, with_signs=True, dropout=dropout, task=task_of(model_type))
    x, grad = inputs_of(model_type, 1)
    pairs = recorded(both, x, grad)
    for wire in WIRES:
        own = pairs if wire in LOSSY else {name: value for name, value in pairs.items() if not name.endswith(".signs")}
        sender = wire_of(wire, both.helper)
        first, second = (sum(value.nbytes for value in sender.encode(own).values()) for _ in range(2))
        assert second == pair_token_bytes(found, wire, value_bytes=8, parts=PARTS) * x.shape[0] * x.shape[1]
        assert first - second == vector_bytes(found, wire, value_bytes=8, parts=PARTS)
    returned = [weight_bytes(adapter, block, num_blocks=NUM_BLOCKS, value_bytes=8, **facts) for block in (0, 1)]
    assert returned == [sum(v.nbytes for v in both.helper.weights(block, block + 1).values()) for block in (0, 1)]


def test_rule_counts_nothing_of_a_block_that_is_left_out() -> None:
    """Neither pairs nor weights."""
    widths = family_named("bert").widths({"hidden_size": 8, "intermediate_size": 16})
    facts: dict[str, Any] = {"hidden_size": 8, "widths": widths}
    assert not pair_widths("seq_bn[leave_out=[0]]", 0, dropout=0.0, **facts)
    assert pair_widths("seq_bn[leave_out=[0]]", 1, dropout=0.0, **facts) == (PairWidths(8, 8, 1),)
    assert not weight_bytes("seq_bn[leave_out=[0]]", 0, num_blocks=2, value_bytes=4, **facts)


def sent_and_read(sender: PairWire, reader: PairWire, pairs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a helper gets of pairs, by way of a file."""
    file = to_file(sender.encode(pairs), {"seq": "12"})
    return reader.decode(from_file(file, {"seq": "12"}, where="pairs of item 12"), torch.float64)


@pytest.mark.parametrize("adapter", offload.KINDS)
def test_wire_as_it_is_loses_nothing(root: Path, adapter: str) -> None:
    """The very bits, in the type of the run."""
    both = trio(offload.family_folder(root, "bert"), adapter, dropout=0.1)
    pairs = recorded(both, *inputs_of("bert", 1))
    got = sent_and_read(wire_of("float32", both.helper), wire_of("float32", both.helper), pairs)
    assert got.keys() == pairs.keys() and all(torch.equal(got[name], pairs[name]) for name in pairs)


@pytest.mark.parametrize("model_type", ["bert", "gpt2"])
@pytest.mark.parametrize("adapter", offload.KINDS)
@pytest.mark.sampled(4)
def test_bfloat16_wire_changes_an_update_by_less_than_a_hundredth(root: Path, model_type: str, adapter: str) -> None:
    """``bf16_gradient_error``: of all gradients of an update as one vector, against autograd's; and it is not zero."""
    both = trio(offload.family_folder(root, model_type), adapter, with_signs=True)
    tensors = inputs_of(model_type, 4)
    xs, grads = tensors[:4], tensors[4:]
    sender, reader = wire_of("bfloat16", both.helper), wire_of("bfloat16", both.helper)
    for x, grad in zip(xs, grads, strict=True):
        pairs = both.host.capture.pairs()
        both.host.forward(x, 0, dropped=False, pairs=pairs).backward(grad)
        both.helper.fit(sent_and_read(sender, reader, pairs.take(0, NUM_BLOCKS)))
    list(plain_grads(both, xs, grads, dropped=False))
    ours, plain = helper_grads(both.helper), both.plain.grads()
    vectors = [torch.cat([found[name].flatten() for name in sorted(plain)]) for found in (ours, plain)]
    bf16_gradient_error = float((vectors[0] - vectors[1]).norm() / vectors[1].norm())
    assert 1e-6 < bf16_gradient_error <= MOST_BF16_ERROR


def test_velora_wire_rebuilds_what_lies_along_its_vector(root: Path) -> None:
    """The vector is the mean sub-token of the first micro-batch, is sent once, and stays for the second."""
    both = trio(offload.family_folder(root, "bert"), "seq_bn")
    tensors = inputs_of("bert", 2)
    first, second = (recorded(both, x, grad) for x, grad in zip(tensors[:2], tensors[2:], strict=True))
    sender, reader = wire_of("velora", both.helper), wire_of("velora", both.helper)
    name = "0.output.adapters.ringtune"
    mean = subtokens(first[f"{name}.x"], HIDDEN // PARTS).mean(0)
    vector = mean / mean.norm()
    for pairs in (first, second):
        got = sent_and_read(sender, reader, pairs)
        wanted = torch.stack([(row @ vector) * vector for row in subtokens(pairs[f"{name}.x"], len(vector))])
        assert torch.allclose(got[f"{name}.x"], wanted.view_as(pairs[f"{name}.x"]), rtol=1e-12)
        assert torch.equal(got[f"{name}.grad"], pairs[f"{name}.grad"])
        both.helper.fit(got)
    assert not [key for key in sender.encode(second) if key.endswith(".v")]
    sender.show_again()
    assert len([key for key in sender.encode(second) if key.endswith(".v")]) == NUM_BLOCKS


def test_velora_wire_refuses_a_projection_that_it_has_no_vector_for(root: Path) -> None:
    """A helper that came later, or a projection of another size."""
    both = trio(offload.family_folder(root, "bert"), "seq_bn")
    pairs = recorded(both, *inputs_of("bert", 1))
    sender = wire_of("velora", both.helper)
    with_vectors, without = sender.encode(pairs), sender.encode(pairs)
    with pytest.raises(IntegrityError, match="not the vector"):
        wire_of("velora", both.helper).decode(without, torch.float64)
    name = next(key for key in with_vectors if key.endswith(".z"))
    with pytest.raises(IntegrityError, match="in sub-tokens of 4"):
        wire_of("velora", both.helper).decode({**with_vectors, name: without[name][..., :3]}, torch.float64)


def test_velora_wire_goes_on_from_a_checkpoint(root: Path) -> None:
    """The vectors of the first part of a run are those of the second."""
    both = trio(offload.family_folder(root, "bert"), "seq_bn")
    tensors = inputs_of("bert", 2)
    first, second = (recorded(both, x, grad) for x, grad in zip(tensors[:2], tensors[2:], strict=True))
    before, after = wire_of("velora", both.helper), wire_of("velora", both.helper)
    before.encode(first)
    assert before.vectors is not None and after.vectors is not None
    after.vectors.load(before.vectors.tensors())
    whole, resumed = before.encode(second), after.encode(second)
    assert resumed.keys() - whole.keys() == {key for key in resumed if key.endswith(".v")}
    assert all(torch.equal(value, resumed[key]) for key, value in whole.items())


def test_unknown_wire_is_refused() -> None:
    """With those that there are."""
    with pytest.raises(PlanError, match="float32, bfloat16, velora"):
        PairWire("int8", {})


def test_file_of_another_version_is_refused(root: Path) -> None:
    """Weights of the update before, or after, are no weights of this one."""
    file = to_file({"0.a": torch.ones(2)}, {"version": "3"})
    assert torch.equal(from_file(file, {"version": "3"}, where="the weights")["0.a"], torch.ones(2))
    with pytest.raises(IntegrityError, match="the weights are of version '3', not '4'"):
        from_file(file, {"version": "4"}, where="the weights")


@pytest.mark.parametrize("model_type", ["bert", "gpt2"])
@pytest.mark.parametrize("adapter", ["seq_bn[reduction_factor=4,ln_before=True]", offload.KINDS[-1]])
@pytest.mark.sampled(1)
def test_signs_make_up_for_units_that_rounding_turns(root: Path, model_type: str, adapter: str) -> None:
    """With the host's bits the update keeps the bound, with the helper's own it does not; exact pairs need none."""
    found = {}
    for with_signs in (True, False):
        both = trio(offload.family_folder(root, model_type), adapter, with_signs=with_signs)
        tensors = inputs_of(model_type, 20)
        exact = offload.helper(*both.made_of)
        offload.moved(exact)
        for x, grad in zip(tensors[:20], tensors[20:], strict=True):
            pairs = recorded(both, x, grad)
            exact.fit(pairs)
            both.helper.fit(sent_and_read(wire_of("bfloat16", exact), wire_of("bfloat16", exact), pairs))
        ours, plain = helper_grads(both.helper), helper_grads(exact)
        vectors = [torch.cat([grads[name].flatten() for name in sorted(plain)]) for grads in (ours, plain)]
        found[with_signs] = float((vectors[0] - vectors[1]).norm() / vectors[1].norm())
    assert found[True] <= MOST_BF16_ERROR < found[False]


def test_signs_that_do_not_fit_are_refused(root: Path) -> None:
    """Of another size, or for an adapter without a ReLU."""
    both = trio(offload.family_folder(root, "bert"), "seq_bn", with_signs=True)
    pairs = recorded(both, *inputs_of("bert", 1))
    name = next(key for key in pairs if key.endswith(".signs"))
    for bad in (pairs[name][:1], pairs[name].float(), torch.cat([pairs[name]] * 2, dim=-1)):
        with pytest.raises(IntegrityError, match="signs"):
            both.helper.fit({**pairs, name: bad})
    lora = trio(offload.family_folder(root, "bert"), "lora", with_signs=True)
    more = recorded(lora, *inputs_of("bert", 1))
    with pytest.raises(IntegrityError, match="signs"):
        lora.helper.fit({**more, next(iter(more)).replace(".x", ".signs"): pairs[name]})


def test_packed_signs_are_a_bit_each() -> None:
    """Nine units are two bytes; the first one is the lowest bit."""
    is_on = torch.rand(2, 3, 9, generator=torch.Generator().manual_seed(1)) > 0.5
    assert pack(is_on).shape == (2, 3, 2) and torch.equal(unpack(pack(is_on), 9), is_on)
    assert pack(torch.tensor([[[True, False, True]]])).tolist() == [[[5]]]
