"""Pairs give a helper the gradients that autograd gives, also from blocks that run again, and on the wire."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from edge.model.auxiliary import FusedDelta, LinearDelta
from edge.techniques.activation_checkpointing import BlockForward, run_saving, saved_tensors, storage_bytes
from edge.techniques.offload.helper import AuxiliaryModels
from edge.techniques.offload.pairs import Capture, Pairs, PairVectors, PairWire, from_file, to_file
from edge.techniques.offload.sites import AuxiliarySite, adapter_weights, install
from edge.techniques.velora import subtokens
from ringtune.costs.offload_costs import pair_token_bytes, pair_widths
from ringtune.errors import DivergedError, IntegrityError, JobError, PlanError
from ringtune.models.adapter_config import block_params, parse_adapter_config
from ringtune.models.adapter_support import offload_refusal
from ringtune.models.families import family_named
from ringtune.models.folder import read_config
from ringtune.schedule.course import ALL_INPUTS, PAIRS, WIDE
from ringtune.schedule.placement import Placement
from ringtune.schedule.saved_activations import subtoken_size
from ringtune.schedule.units import Range, Units
from ringtune.techniques.offload import LOSSY
from tests.support import offload
from tests.support.offload import NUM_BLOCKS, Trio, apart, helper_grads, inputs_of, mask_of, plain_grads, task_of, trio
from tests.support.tiny_families import HIDDEN, MODEL_TYPES

OTHERS = (
    "par_bn[reduction_factor=4]",
    "scaled_par_bn[reduction_factor=4]",
    "seq_bn[reduction_factor=4,scaling='channel',ln_before=True]",
    "lora[r=2,alpha=3]|seq_bn[reduction_factor=8]",
    "lora[r=2,attn_matrices=['q','k','v']]",
    "seq_bn[leave_out=[0]]",
)
WITHOUT_DROPOUT = (
    "seq_bn[use_gating=True]",
    "seq_bn[ln_after=True]",
    "seq_bn[adapter_residual_before_ln=True]",
    "seq_bn[residual_before_ln=False]",
    "seq_bn[residual_before_ln='post_add']",
    "lora[use_gating=True]",
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tiny models are written."""
    return tmp_path_factory.mktemp("models")


def check_gradients(both: Trio, model_type: str, order: str, *, dropped: bool = True) -> None:
    """Run two micro-batches in an order such as ``F0 F1 B1 B0``: gradients of weights and inputs are autograd's."""
    *xs, first, second = inputs_of(model_type, 2)
    outs: dict[int, Any] = {}
    for word in order.split():
        micro = int(word[1])
        if word[0] == "F":
            leaf, pairs = xs[micro].clone().requires_grad_(), both.host.capture.pairs()
            outs[micro] = (leaf, pairs, both.host.forward(leaf, micro, dropped=dropped, pairs=pairs))
        else:
            leaf, pairs, y = outs[micro]
            y.backward((first, second)[micro])
            both.helper.fit(pairs.take(0, NUM_BLOCKS))
            assert not list(pairs.tensors())
    wanted = list(plain_grads(both, xs, [first, second], dropped=dropped))
    given = {str(micro): outs[micro][0].grad for micro in outs}
    assert not both.host.grads()
    assert apart(helper_grads(both.helper), both.plain.grads()) < 1e-9
    assert apart(given, {str(micro): grad for micro, grad in enumerate(wanted)}) < 1e-12


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("adapter", offload.KINDS)
@pytest.mark.sampled(3)
def test_pairs_give_the_gradients_of_autograd(root: Path, model_type: str, adapter: str) -> None:
    """With dropout, alpha other than 1, and two micro-batches under way that come back in the other order."""
    both = trio(offload.family_folder(root, model_type), adapter, dropout=0.2, task=task_of(model_type))
    check_gradients(both, model_type, "F0 F1 B1 B0")


@pytest.mark.parametrize(
    ("model_type", "adapter"),
    [*((model_type, adapter) for model_type in ("bert", "gpt2") for adapter in OTHERS)]
    + [("qwen3", adapter) for adapter in ("seq_bn|lora[r=2,output_lora=True]", "seq_bn|linear[output_lora=True]")],
)
@pytest.mark.sampled(3)
def test_pairs_of_other_adapters_give_the_gradients_of_autograd(root: Path, model_type: str, adapter: str) -> None:
    """Parallel ones, learned scaling, norms, several methods at once, blocks left out.

    A bottleneck that is plugged in hangs on the matrix itself; the gradient beside that is of what enters it.
    """
    both = trio(offload.family_folder(root, model_type), adapter, dropout=0.2, task=task_of(model_type))
    check_gradients(both, model_type, "F0 B0 F1 B1")


@pytest.mark.parametrize("adapter", WITHOUT_DROPOUT)
@pytest.mark.sampled(1)
def test_pairs_of_gates_and_norms_give_the_gradients_of_autograd(root: Path, adapter: str) -> None:
    """What has weights behind the dropout, and every place of the residual."""
    both = trio(offload.family_folder(root, "bert"), adapter)
    check_gradients(both, "bert", "F0 F1 B0 B1", dropped=False)


def test_adapters_that_pairs_are_not_enough_for_are_refused() -> None:
    """With the reason and a remedy, before anything is built."""
    for adapter, dropout, word in (
        ("ia3", 0.0, "scales"),
        ("dora", 0.0, "norms of the base"),
        ("mtl_lora", 0.0, "several copies"),
        ("loreft", 0.0, "chosen tokens"),
        ("seq_bn[use_gating=True]", 0.1, "mask stays"),
        ("seq_bn[ln_after=True]", 0.1, "mask stays"),
        ("seq_bn[ln_after=True,adapter_residual_before_ln=True]", 0.0, "residual"),
        ("lora[use_gating=True]", 0.1, "before dropout"),
        ("full", 0.0, "no adapter"),
    ):
        assert word in offload_refusal(adapter, dropout=dropout), adapter
    # a gate for each of query, key and value in one matrix is none of a plain LoRA
    assert "one matrix" in offload_refusal("lora[use_gating=True]", dropout=0.0, fused=True)
    assert not offload_refusal("lora[use_gating=True]", dropout=0.0)


@pytest.mark.parametrize("adapter", ["ia3", "dora", "mtl_lora", "loreft"])
@pytest.mark.sampled(1)
def test_capture_refuses_modules_it_does_not_know(root: Path, adapter: str) -> None:
    """Also where nobody asked the rule."""
    folder = offload.family_folder(root, "bert")
    side = offload.side(folder, offload.job_of(folder, adapter, dtype="float32"), offloads=False)
    with pytest.raises(JobError, match="no helper can fit"):
        Capture(side.skeleton, range(NUM_BLOCKS))


# ---- what is kept ----------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", offload.KINDS)
@pytest.mark.sampled(1)
def test_host_keeps_no_more_than_frozen_adapters_and_inputs(root: Path, adapter: str) -> None:
    """The graph has what the gradient of the hidden state needs, and x; nothing for weights."""
    both = trio(offload.family_folder(root, "bert"), adapter)
    x = inputs_of("bert", 1)[0]
    with both.host.capture.recording() as pairs:
        captured = both.host.forward(x.clone().requires_grad_(), 0, dropped=False, pairs=pairs)
    for parameter in both.plain.runner.parameters(0, NUM_BLOCKS).values():
        parameter.requires_grad_(False)
    frozen = both.plain.forward(x.clone().requires_grad_(), 0, dropped=False)
    kept, bare = (sum(storage_bytes(saved_tensors(y)).values()) for y in (captured, frozen))
    captured.backward(torch.ones_like(captured))
    taken = pairs.take(0, NUM_BLOCKS)
    inputs = sum(storage_bytes([value for name, value in taken.items() if name.endswith(".x")]).values())
    assert kept <= bare + inputs


def test_graph_begins_at_the_lowest_site(root: Path) -> None:
    """Below it nothing is kept where nothing below trains, as with weights that train here."""
    both = trio(offload.family_folder(root, "bert"), "seq_bn[leave_out=[0]]")
    x = inputs_of("bert", 1)[0]
    ours = both.host.forward(x, 0, dropped=False)
    plain = both.plain.forward(x, 0, dropped=False)
    assert ours.requires_grad
    held = [sum(storage_bytes(saved_tensors(y)).values()) for y in (ours, plain)]
    assert held[0] <= held[1]


def test_a_pair_is_recorded_once_and_only_while_it_is_asked_for(root: Path) -> None:
    """An evaluation, a forward without a graph, and a second recording leave others alone; a pair is added up once.

    The backward of a forward that used the weights of before fails, and is not silently wrong.
    """
    both = trio(offload.family_folder(root, "bert"), "seq_bn")
    capture: Any = both.host.capture
    x, grad = inputs_of("bert", 1)
    with capture.recording() as pairs, torch.no_grad():
        both.host.runner.run(x, offload.mask_of(x), None, 0, NUM_BLOCKS)
    with pytest.raises(PlanError, match="gave no pair"):
        pairs.take(0, 1)
    both.host.forward(x, 0, dropped=False, pairs=pairs).backward(grad)
    assert set(pairs.take(0, 1)) == {f"0.output.adapters.ringtune.{end}" for end in ("x", "grad")}
    assert len(pairs.take(1, 2)) == 2
    twice, stale = (both.host.forward(x.clone().requires_grad_(), 0, dropped=False) for _ in range(2))
    twice.backward(grad, retain_graph=True)
    with pytest.raises(PlanError, match="two pairs"):
        twice.backward(grad)
    install(adapter_weights(both.host.skeleton, range(1)), both.helper.weights(0, 1), where="the test")
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        stale.backward(grad)


# ---- the helper ------------------------------------------------------------------------------------


def test_helper_holds_no_base_weights(root: Path) -> None:
    """Its bytes are those of its adapters, and some for shapes; a wide model changes nothing."""
    folder = offload.family_folder(root, "gpt2")
    models = offload.helper(folder, offload.job_of(folder, "lora", dtype="float64"), range(1))
    adapters = sum(value.nbytes for value in models.weights(0, 1).values())
    host = offload.side(folder, offload.job_of(folder, "lora", dtype="float64"), offloads=False)
    base = sum(p.nbytes for p in host.skeleton.blocks[0].parameters()) - adapters
    assert adapters <= models.held_bytes < adapters + base / 10


def test_pairs_and_weights_that_do_not_fit_are_refused(root: Path) -> None:
    """A name, shape, type or number that does not fit is one clear error, and nothing is added or replaced.

    Each number counts, not their sum, which may be none; infinite ones are refused even where they make no sum.
    """
    both = trio(offload.family_folder(root, "bert"), "seq_bn")
    x, grad = inputs_of("bert", 1)
    pairs: Any = both.host.capture.pairs()
    both.host.forward(x, 0, dropped=False, pairs=pairs).backward(grad)
    good = pairs.take(0, 1)
    name = next(iter(good))
    for bad in (
        {key: value for key, value in good.items() if key != name},
        {**good, "7.x": x},
        {**good, name: good[name][:1]},
        {**good, name: good[name][..., :5]},
    ):
        with pytest.raises(IntegrityError):
            both.helper.fit(bad)
    assert not helper_grads(both.helper)

    def held() -> dict[str, torch.Tensor]:
        found = {f"0.{key}": value for key, value in both.host.skeleton.blocks[0].named_parameters()}
        return {key: found[key].detach().clone() for key in weights}

    weights = both.helper.weights(0, 1)
    before, name = held(), next(iter(weights))
    zeros, large = ({key: torch.full_like(value, at) for key, value in weights.items()} for at in (0.0, 1e308))
    infinite = {key: value.clone() for key, value in large.items()}
    for value in infinite.values():
        value[..., :2] = torch.tensor([torch.inf, -torch.inf])
    for bad in (
        {key: value for key, value in zeros.items() if key != name},
        {**zeros, "7.x": zeros[name]},
        {**zeros, name: zeros[name][:1]},
        {**zeros, name: zeros[name].float()},
        {**zeros, name: zeros[name] + torch.nan},
        infinite,
    ):
        with pytest.raises((IntegrityError, DivergedError), match="the weights of step 4"):
            install(adapter_weights(both.host.skeleton, range(1)), bad, where="the weights of step 4")
    assert all(torch.equal(value, before[key]) for key, value in held().items())
    install(adapter_weights(both.host.skeleton, range(1)), large, where="the test")
    assert all(torch.equal(value, large[key]) for key, value in held().items())


@pytest.mark.parametrize(("inputs", "outputs", "rows"), [(64, 64, 2), (64, 256, 4), (7, 5, 1)])
def test_gradient_of_a_matrix_alone_has_the_bits_of_autograd(inputs: int, outputs: int, rows: int) -> None:
    """Without g(x); of several micro-batches too, and of query, key and value in one matrix."""
    torch.manual_seed(0)
    parts = FusedDelta({part: LinearDelta(inputs, outputs) for part in ("query", "value")}, outputs)
    for delta in (LinearDelta(inputs, outputs), parts):
        for module in delta.modules():
            if isinstance(module, LinearDelta):
                module.weight = torch.nn.Parameter(torch.randn(outputs, inputs))
        site = AuxiliarySite("0.x", torch.nn.Identity(), delta, 1.0)
        plain = copy.deepcopy(delta)
        other = AuxiliarySite("0.x", torch.nn.Identity(), plain, 1.0)
        for _ in range(2):
            x, grad = torch.randn(rows, 9, inputs), torch.randn(rows, 9, site.outputs)
            site.add_gradients(x, grad)
            torch.autograd.backward([other.delta(x)], [grad])
        for name, weight in plain.named_parameters():
            own, found = weight.grad, delta.get_parameter(name).grad
            assert own is not None and found is not None and torch.equal(own, found), name


POLICIES = ((Range(0, 2),), (Range(0, 1),), (Range(1, 2),))


@contextlib.contextmanager
def watched(both: offload.Trio, pairs: Pairs, start: int, stop: int) -> Iterator[None]:
    """What is open while the graph is made that the backward uses."""
    with both.host.capture.recording(pairs):
        yield


def taken(both: offload.Trio, recompute: tuple[Range, ...], order: tuple[int, ...]) -> list[dict[str, torch.Tensor]]:
    """The pairs of two micro-batches whose backwards come in an order, with the gradients of their inputs."""
    *xs, first, second = inputs_of(both.host.skeleton.layout.model_type, 2)
    placement = Placement(slices=(), private_blocks=NUM_BLOCKS, recompute=recompute)
    flows: list[Any] = []
    for micro, x in enumerate(xs):
        pairs = both.host.capture.pairs()
        with torch.no_grad():
            context = both.host.runner.context(x, mask_of(x))
        forward = BlockForward(
            blocks=both.host.runner,
            mask=mask_of(x),
            context=context,
            trained=Units.of(NUM_BLOCKS, range(NUM_BLOCKS)),
            lowest=-1,
            train_at=(4, micro),
            patterns={},
            watched=functools.partial(watched, both, pairs),
            version=contextlib.nullcontext,
        )
        flows.append((run_saving(forward, x, 0, NUM_BLOCKS, placement)[0], pairs))
    found: dict[int, dict[str, torch.Tensor]] = {}
    for micro in order:
        saved, pairs = flows[micro]
        below = saved.backward((first, second)[micro])
        found[micro] = {**pairs.take(0, NUM_BLOCKS), "below": below}
        assert not list(pairs.tensors())
    return [found[micro] for micro in sorted(found)]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("recompute", POLICIES, ids=str)
@pytest.mark.sampled(1)
def test_blocks_that_run_again_give_the_same_pairs(root: Path, model_type: str, recompute: tuple[Range, ...]) -> None:
    """With dropout, and two micro-batches that come back in the other order; a pair that came twice is an error."""
    both = trio(
        offload.family_folder(root, model_type),
        "lora[r=2,alpha=6]|seq_bn[reduction_factor=8]",
        dropout=0.2,
        task=task_of(model_type),
    )
    kept, again = taken(both, (), (0, 1)), taken(both, recompute, (1, 0))
    for plain, other in zip(kept, again, strict=True):
        assert plain.keys() == other.keys()
        assert all(torch.equal(plain[name], other[name]) for name in plain)


PARTS = 8
MAX_BF16_ERROR = 1e-2
MICROBATCHES = 20  # with fewer, rounding turns too few units for the bound to tell


def recorded(both: offload.Trio, x: torch.Tensor, grad: torch.Tensor, *, micro: int = 0) -> dict[str, torch.Tensor]:
    """The pairs of all blocks for one micro-batch."""
    pairs = both.host.capture.pairs()
    both.host.forward(x, micro, dropped=True, pairs=pairs).backward(grad)
    taken: dict[str, torch.Tensor] = pairs.take(0, NUM_BLOCKS)
    return taken


def wire_of(wire: str, models: AuxiliaryModels, projected: str = ALL_INPUTS) -> PairWire:
    """One end of a wire."""
    return PairWire(wire, models.inputs(projected), parts=PARTS, seed=3)


@pytest.mark.parametrize(("adapter", "dropout"), [*((kind, 0.0) for kind in offload.KINDS), (offload.FUSED_LORA, 0.1)])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.sampled(2)
def test_rule_counts_the_bytes_that_are_sent(root: Path, model_type: str, adapter: str, dropout: float) -> None:
    """Of pairs, of the vectors that go with the first ones, and of the weights that come back.

    The wire that sends them as they are loses no bit of them, in the type of the run.
    """
    folder = offload.family_folder(root, model_type)
    facts: dict[str, Any] = {"hidden_size": HIDDEN, "widths": family_named(model_type).widths(read_config(folder))}
    found = [one for block in range(NUM_BLOCKS) for one in pair_widths(adapter, block, dropout=dropout, **facts)]
    both = trio(folder, adapter, with_signs=True, dropout=dropout, task=task_of(model_type))
    x, grad = inputs_of(model_type, 1)
    pairs = recorded(both, x, grad)
    for wire, projected in (*((wire, ALL_INPUTS) for wire in PAIRS), ("velora", WIDE)):
        own = pairs if wire in LOSSY else {name: value for name, value in pairs.items() if not name.endswith(".signs")}
        sender = wire_of(wire, both.helper, projected)
        sent = sum(value.nbytes for value in sender.encode(own).values())
        counted = pair_token_bytes(found, wire, value_bytes=8, parts=PARTS, projected=projected)
        chosen = [one for one in found if one.inputs and (projected == ALL_INPUTS or one.is_wide)]
        sizes = [subtoken_size(one.inputs, PARTS) for one in chosen]
        vectors = 8 * sum(sizes) if wire == "velora" else 0
        assert sent == counted * x.shape[0] * x.shape[1] + vectors
    got = sent_and_read(wire_of("float32", both.helper), wire_of("float32", both.helper), pairs)
    assert got.keys() == pairs.keys() and all(torch.equal(got[name], pairs[name]) for name in pairs)
    per_block = functools.partial(block_params, parse_adapter_config(adapter))
    returned = [8 * per_block(block, HIDDEN, facts["widths"], NUM_BLOCKS) for block in (0, 1)]
    assert returned == [sum(v.nbytes for v in both.helper.weights(block, block + 1).values()) for block in (0, 1)]


def sent_and_read(sender: PairWire, reader: PairWire, pairs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a helper gets of pairs, by way of a file."""
    file = to_file(sender.encode(pairs), {"seq": "12"})
    return reader.decode(from_file(file, {"seq": "12"}, where="pairs of item 12"), torch.float64)


@pytest.mark.parametrize("model_type", ["bert", "gpt2"])
@pytest.mark.parametrize("adapter", offload.KINDS)
@pytest.mark.sampled(1)
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
    assert 1e-6 < bf16_gradient_error <= MAX_BF16_ERROR


def test_velora_wire_of_wide_inputs_sends_the_others_as_they_are(root: Path) -> None:
    """Beside ``down`` an input has 4 values for each of its gradient; query and value read as many as they give."""
    both = trio(offload.family_folder(root, "bert"), "linear[attn_matrices=['q','v'],output_lora=True]")
    pairs = recorded(both, *inputs_of("bert", 1))
    ends = [wire_of("velora", both.helper, WIDE) for _ in range(2)]
    got = sent_and_read(ends[0], ends[1], pairs)
    assert got.keys() == pairs.keys()
    changed = {name for name in pairs if not torch.equal(got[name], pairs[name])}
    assert changed == {f"{block}.output.dense.ringtune.x" for block in range(NUM_BLOCKS)}
    vectors = ends[0].vectors
    assert vectors is not None
    assert {f"{name}.x" for name in vectors.tensors()} == changed


def test_velora_wire_rebuilds_what_lies_along_its_vector(root: Path) -> None:
    """The vector is the mean sub-token of the first micro-batch, is sent with each, and stays for the second.

    A projection without it, or of another size, is refused; a checkpoint has the vectors.
    """
    both = trio(offload.family_folder(root, "bert"), "seq_bn")
    tensors = inputs_of("bert", 2)
    first, second = (recorded(both, x, grad) for x, grad in zip(tensors[:2], tensors[2:], strict=True))
    sender, reader, resumed = (wire_of("velora", both.helper) for _ in range(3))
    name = "0.output.adapters.ringtune"
    mean = subtokens(first[f"{name}.x"], HIDDEN // PARTS).mean(0)
    vector = mean / mean.norm()
    for pairs in (first, second):
        got = sent_and_read(sender, reader, pairs)
        wanted = torch.stack([(row @ vector) * vector for row in subtokens(pairs[f"{name}.x"], len(vector))])
        assert torch.allclose(got[f"{name}.x"], wanted.view_as(pairs[f"{name}.x"]), rtol=1e-12)
        assert torch.equal(got[f"{name}.grad"], pairs[f"{name}.grad"])
        both.helper.fit(got)
    again = sender.encode(second)
    assert len([key for key in again if key.endswith(".v")]) == NUM_BLOCKS
    without = {key: value for key, value in again.items() if not key.endswith(".v")}
    with pytest.raises(IntegrityError, match="not the vector"):
        wire_of("velora", both.helper).decode(without, torch.float64)
    name = next(key for key in again if key.endswith(".z"))
    with pytest.raises(IntegrityError, match="in sub-tokens of 4"):
        wire_of("velora", both.helper).decode({**again, name: again[name][..., :3]}, torch.float64)
    assert sender.vectors is not None and resumed.vectors is not None
    resumed.vectors.load(sender.vectors.tensors())
    after = resumed.encode(second)
    assert after.keys() == again.keys() and all(torch.equal(value, after[key]) for key, value in again.items())


@pytest.mark.promise("7 bounded memory")
@pytest.mark.parametrize("wire", PAIRS)
def test_vectors_of_sites_that_a_helper_does_not_have_are_refused(wire: str) -> None:
    """It keeps each to the end of the run: a host could send as many as it likes, beside pairs that are right."""
    reader = PairWire(wire, {"0.a": 8}, parts=4)
    reader.decode({"0.a.v": torch.ones(2)}, torch.float64)
    for name, size in (("0.b.v", 2), ("0.a.v", 3)):
        with pytest.raises(IntegrityError, match=rf"a vector \[{size}\] of '{name[:-2]}' came, which is none here"):
            reader.decode({"0.a.v": torch.zeros(2), name: torch.ones(size)}, torch.float64)
    assert [*reader.known] == ["0.a"] and reader.known["0.a"].sum() == 2
    sent = {"0.a.z": torch.ones(2, 5, 4), "0.a.grad": torch.ones(2, 5, 3)}
    assert reader.num_values(sent) == 2 * 5 * ((8 if wire == "velora" else 4) + 3), "as they are once unfolded"


def test_state_of_a_helper_without_the_vectors_of_its_pairs_is_refused() -> None:
    """As earlier versions saved it: the host would project on new ones. Some sites of a block may lack."""
    host = PairVectors(PairWire("velora", {"0.a": 8, "1.a": 8, "1.b": 8}, parts=4).vectors, [])
    host.load_blocks({"1.a": torch.ones(2)}, {1}, where="the blocks")
    assert host.tensors()["1.a"].numel() == 2 and not host.tensors()["1.b"].numel()
    with pytest.raises(IntegrityError, match=r"no vector of the pairs of block 0, .* resume the run on its own nodes"):
        host.load_blocks({"1.a": torch.ones(2)}, {0, 1}, where="the blocks")
    # A helper that takes over refuses what no host can have sent
    helper = PairVectors(None, [PairWire("velora", {"1.a": 8}, parts=4)])
    for vector in (torch.ones(3), torch.tensor([1.0, math.nan]), torch.full((2,), 1e200, dtype=torch.float64)):
        with pytest.raises(IntegrityError, match=r"the blocks has a vector of 1\.a with another size, or impossible"):
            helper.load_blocks({"1.a": vector}, {1}, where="the blocks")
    helper.load_blocks({"1.a": torch.ones(2), "1.other": torch.ones(9)}, {1}, where="the blocks")
    assert [*helper.tensors()] == ["1.a"]


@pytest.mark.parametrize("model_type", ["bert", "gpt2"])
@pytest.mark.parametrize("adapter", ["seq_bn[reduction_factor=4,ln_before=True]", offload.KINDS[-1]])
@pytest.mark.sampled(1)
def test_signs_make_up_for_units_that_rounding_turns(root: Path, model_type: str, adapter: str) -> None:
    """With the host's bits the update keeps the bound, with the helper's own it does not; exact pairs need none."""
    both = trio(offload.family_folder(root, model_type), adapter, with_signs=True)
    exact, without = (offload.helper(*both.made_of) for _ in range(2))
    for models in (exact, without):
        offload.moved(models)
    tensors = inputs_of(model_type, MICROBATCHES)
    for x, grad in zip(tensors[:MICROBATCHES], tensors[MICROBATCHES:], strict=True):
        pairs = recorded(both, x, grad)
        exact.fit(pairs)
        got = sent_and_read(wire_of("bfloat16", exact), wire_of("bfloat16", exact), pairs)
        both.helper.fit(got)
        without.fit({name: value for name, value in got.items() if not name.endswith(".signs")})
    plain, errors = helper_grads(exact), []
    for grads in (helper_grads(both.helper), helper_grads(without)):
        vectors = [torch.cat([each[name].flatten() for name in sorted(plain)]) for each in (grads, plain)]
        errors.append(float((vectors[0] - vectors[1]).norm() / vectors[1].norm()))
    assert errors[0] <= MAX_BF16_ERROR < errors[1]


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
