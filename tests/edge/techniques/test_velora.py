"""VeLoRA: layers and vectors against their formulas, and what a graph keeps with them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from edge.model.skeleton import ADAPTER, Skeleton, build_skeleton
from edge.model.slice import BlockRunner, materialise
from edge.model.tensor_files import SafetensorsFiles
from edge.techniques.activation_checkpointing import saved_tensors, storage_bytes
from edge.techniques.velora import Projections, Vectors, VectorsByLayer, project, projected_linear, subtokens
from ringtune.errors import IntegrityError, JobError
from ringtune.job.job import parse_job
from ringtune.models.families import FAMILIES, LAYOUTS
from ringtune.models.family import ACTIVATIONS, keeps_result
from ringtune.models.kept_inputs import kept_inputs as model_inputs
from ringtune.schedule.saved_activations import INITS, Velora, subtoken_size
from ringtune.schedule.units import Range
from tests.support.cases import cases
from tests.support.literal_velora import every_layer, make_literal
from tests.support.tiny_families import MODEL_TYPES, write_family


def tensors(inputs: int, outputs: int = 5) -> tuple[torch.Tensor, ...]:
    """An input of two rows of three tokens, a weight, a bias, and the gradient of the output."""
    generator = torch.Generator().manual_seed(inputs)
    shapes = ((2, 3, inputs), (outputs, inputs), (outputs,), (2, 3, outputs))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def gradients(call: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, grad: torch.Tensor) -> list[torch.Tensor]:
    """Value and gradients of a linear layer."""
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias) if tensor is not None]
    y = call(*leaves[:2], leaves[2] if bias is not None else None)
    y.backward(grad)
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def projected(z: torch.Tensor, vector: torch.Tensor) -> Any:
    """A projected layer as a function of input, weight and bias."""
    return lambda x, weight, bias: projected_linear(functional.linear, x, weight, bias, z, vector)


def test_projected_linear_is_exact_but_for_the_weight() -> None:
    """Value, input's and bias' gradients have the bits of a plain layer; the weight's is that of the rebuilt input."""
    sizes = ((32, 8), (32, 5), (33, 32), (7, 7), (6, 1))
    for (inputs, parts), with_bias in itertools.product(sizes, (True, False)):
        x, weight, bias, grad = tensors(inputs)
        vector = torch.randn(subtoken_size(inputs, parts), dtype=torch.float64)
        given = bias if with_bias else None
        ours = gradients(projected(project(x, vector), vector), x, weight, given, grad)
        plain = gradients(functional.linear, x, weight, given, grad)
        assert all(torch.equal(ours[at], plain[at]) for at in range(len(plain)) if at != 2)
        sub = subtokens(x, len(vector))
        rebuilt = torch.stack([(row @ vector) * vector for row in sub]).view(6, -1)[:, :inputs]
        assert torch.allclose(ours[2], grad.view(6, -1).t() @ rebuilt, rtol=1e-9, atol=1e-12), (inputs, parts)


# ---- vectors ---------------------------------------------------------------------------------------


def make(init: str, **sizes: int) -> Vectors:
    """The vectors of some layers of seed 3."""
    return Vectors(sizes or {"0.down": 4}, init=init, seed=3)


@pytest.mark.parametrize("init", INITS)
def test_vectors_have_length_one_and_stay(init: str) -> None:
    """Whatever the init; only a running average changes, and not what it has handed out."""
    vectors, inputs = make(init), torch.randn(3, 5, 16)
    first = [vectors.next("0.down", x) for x in inputs]
    copies = [vector.clone() for vector in first]
    vectors.next("0.down", torch.randn(5, 16))
    assert all(float(vector.norm()) == pytest.approx(1, rel=1e-6) for vector in first)
    assert all(map(torch.equal, first, copies))
    assert torch.equal(first[0], first[2]) is (init != "running")


def test_vectors_of_random_depend_on_seed_and_layer_alone() -> None:
    """Not on the input, and not on the order."""
    one, other = make("random", a=4, b=4), make("random", a=4, b=4)
    x = torch.randn(5, 16)
    pair = (one.next("a", x), one.next("b", x))
    assert torch.equal(other.next("b", 2 * x), pair[1])
    assert torch.equal(other.next("a", x), pair[0])
    assert not torch.equal(*pair)
    assert not torch.equal(Vectors({"a": 4}, init="random", seed=4).next("a", x), pair[0])


@pytest.mark.parametrize("init", INITS)
def test_vectors_of_an_input_without_direction_are_finite(init: str) -> None:
    """Zeros, and what diverged, give a vector of equal values; numbers that are near the largest one give some."""
    for value in (0.0, math.inf, math.nan, 1e30):
        vector = make(init).next("0.down", torch.full((5, 16), value))
        assert torch.isfinite(vector).all(), value
        assert float(vector.norm()) == pytest.approx(1, rel=1e-6), value


@pytest.mark.parametrize("init", INITS)
def test_vectors_go_on_from_a_checkpoint(init: str) -> None:
    """With the same bits, those without a micro-batch so far too."""
    vectors, again = make(init, a=4, b=4), make(init, a=4, b=4)
    inputs = torch.randn(4, 5, 16)
    for x in inputs[:2]:
        vectors.next("a", x)
    saved = vectors.tensors()
    assert saved["b"].numel() == 0
    again.check(saved, where="the shard")
    again.load(saved)
    for x in inputs[2:]:
        assert torch.equal(again.next("a", x), vectors.next("a", x))
        assert torch.equal(again.next("b", x), vectors.next("b", x))


def test_vectors_refuse_a_checkpoint_of_other_layers() -> None:
    """Missing, unknown, and of another size: one line names the layer."""
    vectors = make("average", a=4)
    for given, problem in (
        ({}, "has VeLoRA's vectors of other layers than this node's: a"),
        ({"a": torch.ones(4), "b": torch.ones(4)}, "has VeLoRA's vectors of other layers than this node's: b"),
        ({"a": torch.ones(5)}, r"has VeLoRA's vector of a as \[5\], expected \[4\]"),
    ):
        with pytest.raises(IntegrityError, match=f"the shard {problem}"):
            vectors.check(given, where="the shard")


@pytest.mark.parametrize(
    "changes",
    [
        {"a/count": torch.tensor(-1)},
        {"a/count": torch.tensor(1 << 62)},
        {"a/count": torch.tensor([1, 2])},
        {"a/count": torch.tensor(math.nan)},
        {"a": torch.tensor([1.0, math.nan, 0.0, 0.0])},
        {"a": torch.ones(4, dtype=torch.int64)},
        {"a": torch.full((4,), 1e200, dtype=torch.float64)},  # infinite as it is used
    ],
)
def test_vectors_refuse_numbers_that_no_training_has(changes: dict[str, torch.Tensor]) -> None:
    """Of another node: this one would fail with them later, as if by an error of its own."""
    vectors = make("running", a=4)
    vectors.next("a", torch.randn(5, 16))
    with pytest.raises(IntegrityError, match="the blocks has a count or VeLoRA's vector of a with impossible numbers"):
        vectors.check(vectors.tensors() | changes, where="the blocks")
    vectors.load(vectors.tensors() | {"a": torch.ones(4, dtype=torch.float64)})
    assert vectors.next("a", torch.randn(5, 16)).dtype is torch.float32


def test_vectors_of_blocks_that_move_are_complete() -> None:
    """Other blocks' vectors stay; a part without a layer of its blocks is refused, and changes nothing."""
    before, after = (make("running", **{"0.down": 4, "1.down": 4, "1.up": 4}) for _ in range(2))
    x = torch.randn(5, 16)
    for layer in ("0.down", "1.down"):
        before.next(layer, x)
    moved = {name: value for name, value in before.tensors().items() if name.startswith("1.")}
    lacking = {name: value for name, value in moved.items() if name != "1.up"}
    with pytest.raises(
        IntegrityError, match=r"the blocks has VeLoRA's vectors of other layers than this node's: 1\.up"
    ):
        after.load_blocks(lacking, {1}, where="the blocks")
    assert not after.tensors()["1.down"].numel()
    after.load_blocks(moved, {1}, where="the blocks")
    assert torch.equal(after.next("1.down", 2 * x), before.next("1.down", 2 * x))
    assert not after.tensors()["0.down"].numel()


BLOCKS = (Range(0, 2),)
ROWS, TOKENS, WIDTH = 4, 16, 32
DOWN = Velora(blocks=BLOCKS, layers=("adapter_down",), parts=8)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that makes two real blocks of a family."""
    root = tmp_path_factory.mktemp("models")

    def make(
        model_type: str, adapter: str, dropout: float = 0.0, dtype: torch.dtype = torch.float32, **config: Any
    ) -> Skeleton:
        folder = root / "-".join([model_type, *config.values()])
        if not folder.exists():
            write_family(folder, model_type, num_blocks=2, **config)
        text = (
            f'[model]\npath = "{folder}"\ntask = "{FAMILIES[model_type].tasks[-1]}"\n'
            f'[adapter]\nconfig = "{adapter}"\n[train]\ndropout = {dropout}\n'
        )
        skeleton = build_skeleton(folder, parse_job(text, source="test"))
        with SafetensorsFiles(folder) as weights:
            device = torch.device("cpu")
            materialise(skeleton, weights, blocks=[0, 1], with_embedding=False, dtype=dtype, device=device)
        return skeleton

    return make


def projections_of(skeleton: Skeleton, velora: Velora) -> Projections:
    """The chosen layers of both blocks."""
    return Projections(velora, skeleton, start=0, stop=2, seed=0)


def graph_of(
    skeleton: Skeleton, velora: Velora | None, dropout: float, x: torch.Tensor | None = None, pattern: str = ""
) -> torch.Tensor:
    """What leaves two blocks, with the graph behind it; of both the subnets have these operations."""
    runner = BlockRunner(skeleton, dropout=dropout, seed=0)
    x = torch.randn(ROWS, TOKENS, WIDTH, requires_grad=True) if x is None else x
    mask = torch.ones(ROWS, TOKENS, dtype=torch.int64)
    used: VectorsByLayer = {}
    around = None
    if velora is not None:
        projections = projections_of(skeleton, velora)
        around = lambda index: projections.block(index, used)  # noqa: E731
    patterns = {0: pattern, 1: pattern} if pattern else {}
    return runner.run(x, mask, runner.context(x, mask), 0, 2, train_at=(0, 0), patterns=patterns, around=around)


def kept_inputs(skeleton: Skeleton, velora: Velora, dropout: float, *, is_projected: bool) -> dict[str, bool]:
    """For each chosen layer, whether the graph keeps its input."""
    inputs: dict[str, torch.Tensor] = {}
    places = [place for found in projections_of(skeleton, velora).layers.values() for place in found]
    handles = [place.module.register_forward_pre_hook(_note(inputs, place.name)) for place in places]
    y = graph_of(skeleton, velora if is_projected else None, dropout)
    for handle in handles:
        handle.remove()
    kept = storage_bytes(saved_tensors(y))
    return {name: x.untyped_storage().data_ptr() in kept for name, x in inputs.items()}


def _note(inputs: dict[str, torch.Tensor], name: str) -> Any:
    def note(module: Any, args: Any) -> None:
        inputs[name] = args[-1].detach()

    return note


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.sampled(2)
def test_velora_keeps_no_input_of_own_weights(build: Any, model_type: str) -> None:
    """With dropout in the attention nobody else keeps them; without VeLoRA they are all kept."""
    skeleton = build(model_type, "full", 0.1)
    velora = every_layer(model_type, blocks=BLOCKS)
    before = kept_inputs(skeleton, velora, 0.1, is_projected=False)
    assert len(before) == 2 * len(set(paths(model_type, velora)))
    assert set(before.values()) == {True}
    assert set(kept_inputs(skeleton, velora, 0.1, is_projected=True).values()) == {False}


def test_velora_keeps_no_input_of_subnets(build: Any) -> None:
    """Of one full subnet of four it saves the inputs at the feed-forward part's second matrix, less the projections."""
    skeleton, down = build("bert", "full"), Velora(blocks=BLOCKS, layers=("down",), parts=8)
    found = (storage_bytes(saved_tensors(graph_of(skeleton, one, 0.0, pattern="1332"))) for one in (None, down))
    kept, projected = (sum(each.values()) for each in found)
    inner, bytes_each = skeleton.model.config.intermediate_size, 4
    assert kept - projected >= 2 * ROWS * TOKENS * bytes_each * (inner / 4 - 8) - 2 * bytes_each * inner


def paths(model_type: str, velora: Velora) -> list[str]:
    """The modules of a block that the layers are in."""
    return [getattr(LAYOUTS[model_type], layer) for layer in velora.layers]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.sampled(2)
def test_velora_can_not_free_what_some_attention_keeps(build: Any, model_type: str) -> None:
    """Without dropout the fused kernel keeps the very tensor that enters ``attention_out``."""
    kept = kept_inputs(build(model_type, "full"), every_layer(model_type, blocks=BLOCKS), 0.0, is_projected=True)
    found = [name for name, is_kept in kept.items() if is_kept]
    name = f"{LAYOUTS[model_type].attention_out}.weight"
    is_fused = model_type not in ("electra", "gemma2")  # written-out attention keeps its scores
    assert found == [f"0.{name}", f"1.{name}"] * is_fused


@pytest.mark.parametrize(
    ("model_type", "adapter"),
    [(name, adapter) for name in ("bert", "gpt2", "llama") for adapter in ("seq_bn", "double_seq_bn")]
    + [(name, "seq_bn[ln_before=True]|lora[r=2]") for name in ("bert", "gpt2", "llama")]
    + [
        ("bert", "par_bn"),
        ("bert", "linear[output_lora=True]"),
        ("gpt2", "lora|linear[attn_matrices=['k']]"),
        ("llama", "mlp[hidden=8]"),
    ],
)
@pytest.mark.sampled(2)
def test_velora_keeps_no_input_of_adapters(build: Any, model_type: str, adapter: str) -> None:
    """Bottlenecks, parallel ones, behind a norm of their own, and LoRA beside them."""
    skeleton = build(model_type, adapter)
    before = kept_inputs(skeleton, DOWN, 0.0, is_projected=False)
    assert before
    assert set(before.values()) == {True}
    assert set(kept_inputs(skeleton, DOWN, 0.0, is_projected=True).values()) == {False}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("model_type", "key"), [("bert", "hidden_act"), ("gpt2", "activation_function"), ("llama", "hidden_act")]
)
@pytest.mark.sampled(3)
def test_velora_leaves_what_an_activation_function_keeps(
    build: Any, monkeypatch: pytest.MonkeyPatch, model_type: str, key: str, activation: str
) -> None:
    """Some functions need their result in backward, which is what ``down`` reads; a gate's product is nobody else's."""
    skeleton = build(model_type, "full", 0.1, **{key: activation})
    velora = dataclasses.replace(every_layer(model_type, blocks=BLOCKS), layers=("down",))
    keeps = not LAYOUTS[model_type].gate and keeps_result(activation)
    if keeps:
        with pytest.raises(JobError, match=r"has 'down', but the activation function of this .* anyway; leave it out"):
            projections_of(skeleton, velora)
        monkeypatch.setattr("edge.techniques.velora._check_activation", lambda *args: None)
    assert set(kept_inputs(skeleton, velora, 0.1, is_projected=True).values()) == {keeps}
    lora = build(model_type, "lora[r=2, intermediate_lora=True, output_lora=True]", **{key: activation})
    kept = kept_inputs(lora, DOWN, 0.0, is_projected=True)
    assert set(kept.values()) == {False}
    assert any(name.startswith(f"0.{LAYOUTS[model_type].down}.") for name in kept) is not keeps


LORA = "lora[r=2,attn_matrices=['q','v'],intermediate_lora=True,output_lora=True]"
FUSED = "lora[r=2,attn_matrices=['q','v']]|linear[attn_matrices=['k'],output_lora=True]"


def adapter_gradients(skeleton: Skeleton, run: Any) -> dict[str, torch.Tensor]:
    """Gradients of all that trains in two blocks, with weights in which no matrix is zero."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: value for name, value in skeleton.model.named_parameters() if value.requires_grad}
    weights = {name: value for name, value in weights.items() if ADAPTER in name and value.device.type != "meta"}
    with torch.no_grad():
        for value in weights.values():
            value.copy_(torch.randn(value.shape, generator=generator, dtype=value.dtype))
    x = torch.randn(ROWS, TOKENS, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    run(x).square().sum().backward()
    return {name: value.grad for name, value in weights.items() if value.grad is not None}


@cases(
    ("model_type", "adapter", "sites", "sub_tokens"),
    [
        *(("bert", LORA, (site,), {"parts": 8}) for site in ("query", "value", "up", "down")),
        ("bert", LORA, ("value", "down"), {"parts": 0, "values": 6}),
        ("llama", LORA, ("up", "down"), {"parts": 8}),
        ("gpt2", FUSED, ("value",), {"parts": 0, "values": 5}),
    ],
)
def test_one_site_has_the_gradient_of_the_formulas(
    build: Any, model_type: str, adapter: str, sites: tuple[str, ...], sub_tokens: dict[str, Any]
) -> None:
    """In float64; all other weights have exact gradients, and those at the sites have others than without VeLoRA."""
    velora = Velora(blocks=BLOCKS, layers=tuple(f"adapter_down:{site}" for site in sites), **sub_tokens)

    def of_blocks(*, is_projected: bool, is_literal: bool = False) -> dict[str, torch.Tensor]:
        skeleton = build(model_type, adapter, dtype=torch.float64)
        if is_literal:
            make_literal(skeleton.model, velora, seed=0)
        return adapter_gradients(skeleton, lambda x: graph_of(skeleton, velora if is_projected else None, 0.0, x))

    ours, literal = of_blocks(is_projected=True), of_blocks(is_projected=False, is_literal=True)
    exact = of_blocks(is_projected=False)
    paths = [f".{getattr(LAYOUTS[model_type], site)}." for site in sites]
    assert ours.keys() == exact.keys()
    for name, grad in ours.items():
        assert torch.allclose(grad, literal[name], rtol=1e-9, atol=1e-9 * float(grad.abs().max())), name
    changed = [name for name, grad in ours.items() if not torch.allclose(grad, exact[name], rtol=1e-6)]
    assert len(changed) == 2 * len(sites)
    assert all(any(path in name for path in paths) for name in changed)


@cases(
    ("model_type", "adapter", "sites"),
    [
        ("bert", LORA, ("down",)),
        ("bert", LORA, ("value",)),
        ("bert", LORA, ("value", "down")),
        ("bert", LORA, ("query", "up")),
        ("llama", LORA, ("up", "down")),
        ("gpt2", FUSED, ("value", "down")),
        ("gpt2", "lora[r=2,attn_matrices=['q']]|linear[attn_matrices=['v']]", ("value",)),  # LoRA of q has its own A
    ],
)
def test_graph_keeps_what_planning_counts(build: Any, model_type: str, adapter: str, sites: tuple[str, ...]) -> None:
    """To the byte, but for the vectors, with dropout in LoRA and without."""
    layers = tuple(f"adapter_down:{site}" for site in sites)
    family = FAMILIES[model_type]
    for init in ("average", "random"):
        velora = Velora(blocks=BLOCKS, layers=layers, parts=8, init=init)
        for dropout in (0.0, 0.1):
            skeleton = build(model_type, adapter, dropout)
            kept = []
            for one in (None, velora):
                weights = storage_bytes([*skeleton.model.parameters(), *skeleton.model.buffers()])
                found = storage_bytes(saved_tensors(graph_of(skeleton, one, dropout)))
                kept.append(sum(size for address, size in found.items() if address not in weights))
            vectors = sum(-(-place.inputs // 8) for place in projections_of(skeleton, velora).layers[0]) * 2 * 4
            of_model = model_inputs(family, skeleton.model.config.to_dict(), adapter)
            inputs = (one.saved_values(velora, has_dropout=dropout > 0) for one in of_model)
            counted = 2 * 4 * ROWS * TOKENS * sum(inputs)
            assert kept[0] - kept[1] == pytest.approx(counted, abs=vectors), (init, dropout)


# ---- what is refused -------------------------------------------------------------------------------


def test_velora_refuses_layers_that_save_nothing(build: Any) -> None:
    """A frozen layer keeps no input, and one whose input another one keeps saves nothing: one line says so."""
    gate = "but its gate keeps the input of 0.*"
    cases: tuple[tuple[str, str, dict[str, Any], str], ...] = (
        ("bert", "seq_bn", {"layers": ("down",)}, "has 'down', but nothing of that kind trains in block 0"),
        ("bert", "full", {"layers": ("adapter_down",)}, "has 'adapter_down', but nothing of that kind trains"),
        ("bert", "ia3", {"layers": ("adapter_down",)}, "has 'adapter_down', but nothing of that kind trains"),
        ("bert", "full", {"layers": ("up", "gate")}, "has 'gate', but nothing of that kind trains"),
        ("llama", "full", {"layers": ("up",)}, "has up without gate: in a llama both read one tensor"),
        ("bert", "seq_bn[use_gating=True]", {}, f"{gate} anyway; leave it out, or use an"),
        ("bert", "lora[use_gating=True]", {"layers": ("adapter_down:query",)}, f"'adapter_down:query', {gate}lora_A"),
        (
            "gpt2",
            "par_bn",
            {},
            "but the norm before the feed-forward part keeps the input of 0.* anyway; .* use seq_bn",
        ),
        (
            "bert",
            "seq_bn",
            {"parts": 33},
            "velora.parts is 33, but the input of 0.* has 32 values; set it to at most 32",
        ),
    )
    for model_type, adapter, changes, problem in cases:
        with pytest.raises(JobError, match=problem):
            projections_of(build(model_type, adapter), dataclasses.replace(DOWN, **changes))


def test_velora_passes_blocks_by_that_have_no_adapter(build: Any) -> None:
    """``leave_out`` leaves a block frozen as a whole; nothing is chosen there."""
    found = projections_of(build("bert", "seq_bn[leave_out=[1]]"), DOWN)
    assert [len(places) for places in found.layers.values()] == [1, 0]
