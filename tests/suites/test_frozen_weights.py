"""Frozen weights that are held small: the result is that of one process whose frozen weights were rounded once."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from ringtune.schedule.course import FROZEN_DTYPES, FrozenWeights
from ringtune.schedule.saved_activations import Velora
from ringtune.schedule.units import Range
from tests.support.operation_masks import SPLITS, collected, mixed_table, one_process, run
from tests.support.plans import changed
from tests.support.rounded import LORA, WAYS, write_rounded
from tests.support.tiny_families import MODEL_TYPES
from tests.support.torch_ring import Case, distance, reference_of, write_family_inputs

ADAPTERS = {
    "bottleneck": "double_seq_bn",
    "lora": LORA,
    "ia3": "ia3",
    "mlp": "linear[attn_matrices=['q']]|mlp[hidden=8, attn_matrices=['v'], output_lora=True]",
}
FOUR = (("a", 0, 1), ("b", 1, 2), ("c", 2, 3), ("d", 3, 4))
EXACT, NATIVE = 1e-6, 0.03
"""Relative distance after some steps of SGD: of equal products, and of products in bfloat16."""


class Inputs:
    """Model folders with rows, and beside each of them the same with rounded weights."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def plain(self, model_type: str, task: str, **config: Any) -> Path:
        """A folder as it is."""
        folder = self._folder / "-".join([model_type, task, *map(str, config.values())])
        return folder if folder.exists() else write_family_inputs(folder, model_type, task, **config)

    def rounded(self, plain: Path, dtype: str, trained: tuple[str, ...] = ()) -> Path:
        """The same with weights that were rounded once."""
        folder = self._folder / f"{plain.name}-{dtype}-{len(trained)}"
        if folder.exists():
            return folder
        write_rounded(plain / "model", folder / "model", dtype, trained=trained)
        for path in plain.glob("*.*"):
            (folder / path.name).symlink_to(path)
        return folder


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Folders for the tests of this file."""
    return Inputs(tmp_path_factory.mktemp("inputs"))


def case_of(folder: Path, model_type: str, frozen: FrozenWeights | None, **changes: Any) -> Case:
    """A few steps of SGD with unfreezing, in float32."""
    task = "image-classification" if model_type == "vit" else "sequence-classification"
    values = {
        "task": task,
        "dtype": "float32",
        "optimizer": "sgd",
        "num_steps": 4,
        "every_steps": 2,
        "microbatches": 2,
        **changes,
    }
    return Case(folder=folder, frozen=frozen, **values)


def trained_in_a_ring(case: Case, split: str | tuple[tuple[str, int, int], ...] = "two") -> dict[str, torch.Tensor]:
    """Adapters and head of a run."""
    plan = case.plan(SPLITS[split] if isinstance(split, str) else split)
    return collected(plan, run(case, plan)[1])


def trained_alone(case: Case, folder: Path) -> dict[str, torch.Tensor]:
    """Adapters and head of one process with plain transformers, on a folder with rounded weights."""
    trained = reference_of(dataclasses.replace(case, folder=folder, frozen=None))
    return {**trained.adapter(), **trained.head()}


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize(
    ("adapter", "dtype", "model_type"),
    [
        (*way, model_type)
        for way in (("bottleneck", "bfloat16"), ("lora", "int8"), ("ia3", "bfloat16"))
        for model_type in MODEL_TYPES
    ]
    + [way for name in ("bert", "gpt2", "llama") for way in (("mlp", "int8", name), ("lora", "bfloat16", name))],
)
@pytest.mark.sampled(3)
def test_frozen_weights_of_every_family_equal_weights_that_were_rounded_once(
    inputs: Inputs, model_type: str, adapter: str, dtype: str
) -> None:
    """Widened: the modules of the libraries compute the same products with them."""
    task = "image-classification" if model_type == "vit" else "sequence-classification"
    plain = inputs.plain(model_type, task)
    case = case_of(plain, model_type, FrozenWeights(dtype=dtype), adapter=ADAPTERS[adapter])
    want = trained_alone(case, inputs.rounded(plain, dtype))
    assert distance(trained_in_a_ring(case), want) < EXACT
    unrounded = trained_alone(case, plain)
    assert distance(unrounded, want) > 10 * EXACT  # negative control: rounding is seen


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("frozen", WAYS, ids=str)
@pytest.mark.parametrize("model_type", ["bert", "gpt2"])
@pytest.mark.sampled(1)
def test_frozen_weights_give_the_same_bits_on_any_split(inputs: Inputs, model_type: str, frozen: FrozenWeights) -> None:
    """One node, two and four: every node multiplies alike, natively and widened."""
    plain = inputs.plain(model_type, "sequence-classification")
    case = case_of(plain, model_type, frozen, adapter=LORA, optimizer="adamw", num_steps=6, every_steps=1)
    first, *others = [trained_in_a_ring(case, split) for split in ("one", "two", FOUR)]
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("dtype", FROZEN_DTYPES)
@pytest.mark.parametrize("model_type", ["bert", "gpt2", "llama"])
@pytest.mark.sampled(1)
def test_frozen_weights_multiplied_natively_are_near(inputs: Inputs, model_type: str, dtype: str) -> None:
    """Products in bfloat16 round what is multiplied with the weights too; the result stays near."""
    plain = inputs.plain(model_type, "sequence-classification")
    case = case_of(plain, model_type, FrozenWeights(dtype=dtype, native=True))
    found = distance(trained_in_a_ring(case), trained_alone(case, inputs.rounded(plain, dtype)))
    assert EXACT < found < NATIVE


@pytest.mark.parametrize("dtype", FROZEN_DTYPES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
@pytest.mark.sampled(1)
def test_frozen_decoder_equals_one_that_was_rounded_once(
    inputs: Inputs, monkeypatch: pytest.MonkeyPatch, model_type: str, dtype: str, tied: bool
) -> None:
    """A language model's head is frozen too, in one with the token table or not; logits at once and in chunks."""
    plain = inputs.plain(model_type, "causal-lm", tie_word_embeddings=tied)
    case = case_of(plain, model_type, FrozenWeights(dtype=dtype), task="causal-lm", eval_every=2)
    want = trained_alone(case, inputs.rounded(plain, dtype))
    assert distance(trained_in_a_ring(case), want) < EXACT
    monkeypatch.setattr("edge.model.heads.logits_fit", lambda *sizes: False)
    monkeypatch.setattr("edge.model.heads.MAX_LOGIT_BYTES", 16 << 10)
    assert distance(trained_in_a_ring(case, "one"), want) < 10 * EXACT


@pytest.mark.parametrize("adapter", ["dora", "full"])
def test_frozen_weights_where_they_are_read_or_partly_train(inputs: Inputs, adapter: str) -> None:
    """DoRA reads norms of the frozen rows; own weights that train are not rounded."""
    plain = inputs.plain("bert", "sequence-classification")
    text = "lora[r=4, use_dora=True]" if adapter == "dora" else "full"
    case = case_of(plain, "bert", FrozenWeights(dtype="int8"), adapter=text)
    own = ("query.weight", "key.weight", "value.weight", "dense.weight")
    folder = inputs.rounded(plain, "int8", own if adapter == "full" else ())
    assert distance(trained_in_a_ring(case), trained_alone(case, folder)) < EXACT


@pytest.mark.parametrize("model_type", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("dtype", FROZEN_DTYPES)
@pytest.mark.sampled(1)
def test_frozen_weights_of_subnets_equal_weights_that_were_rounded_once(
    inputs: Inputs, model_type: str, dtype: str
) -> None:
    """Some rows and columns of a frozen matrix are those of the rounded one."""
    plain = inputs.plain(model_type, "sequence-classification")
    operations = mixed_table(7, ("a", "b"), 2 if model_type == "llama" else 4)
    case = case_of(
        plain,
        model_type,
        FrozenWeights(dtype=dtype),
        adapter=LORA,
        method="all",
        owners=("a", "b"),
        microbatches=4,
        num_steps=3,
        local_iterations=2,
        operations=operations,
    )
    want = one_process(dataclasses.replace(case, folder=inputs.rounded(plain, dtype), frozen=None))
    assert distance(trained_in_a_ring(case), want) < 10 * EXACT


def test_frozen_weights_with_dropout_and_private_blocks(inputs: Inputs) -> None:
    """Rounding changes neither what is dropped nor who runs the lowest block."""
    plain = inputs.plain("bert", "sequence-classification")
    case = case_of(plain, "bert", FrozenWeights(dtype="bfloat16"), dropout=0.2, private_blocks=1, owners=("a", "b"))
    want = trained_alone(case, inputs.rounded(plain, "bfloat16"))
    assert distance(trained_in_a_ring(case, (("b", 1, 2), ("a", 2, 4))), want) < EXACT


@pytest.mark.parametrize("frozen", WAYS, ids=str)
@pytest.mark.sampled(1)
def test_frozen_weights_of_blocks_that_run_again_give_the_same_bits(inputs: Inputs, frozen: FrozenWeights) -> None:
    """Recomputation multiplies with the same matrices once more, dropout included."""
    plain = inputs.plain("bert", "sequence-classification")
    case = case_of(plain, "bert", frozen, adapter=LORA, dropout=0.2, every_steps=1)
    plan = case.plan(SPLITS["two"])
    again = changed(plan, recompute=(Range(0, 4),))
    first, other = (collected(each, run(case, each)[1]) for each in (plan, again))
    assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("frozen", WAYS, ids=str)
@pytest.mark.sampled(1)
def test_frozen_weights_with_other_microbatches_are_near(inputs: Inputs, frozen: FrozenWeights) -> None:
    """Sums come in another order, and products in bfloat16 are of other shapes; nothing else differs."""
    plain = inputs.plain("bert", "sequence-classification")
    results = [
        trained_in_a_ring(case_of(plain, "bert", frozen, microbatches=microbatches)) for microbatches in (1, 2, 4)
    ]
    assert max(distance(other, results[0]) for other in results[1:]) < (1e-2 if frozen.native else 1e-5)


@pytest.mark.parametrize("adapter", ["seq_bn", "lora[r=4]"])
def test_frozen_weights_go_with_projections_of_what_trains(inputs: Inputs, adapter: str) -> None:
    """VeLoRA is of layers that train: frozen ones keep no input, small or not."""
    plain = inputs.plain("bert", "sequence-classification")
    case = case_of(plain, "bert", FrozenWeights(dtype="int8"), adapter=adapter, optimizer="adamw")
    velora = Velora(blocks=(Range(0, 4),), layers=("adapter_down",), parts=4)
    rounded = dataclasses.replace(case, folder=inputs.rounded(plain, "int8"), frozen=None)
    found = []
    for one in (case, rounded):
        plan = changed(one.plan(SPLITS["two"]), velora=velora)
        found.append(collected(plan, run(one, plan)[1]))
    assert distance(*found) < EXACT
    assert distance(found[0], trained_in_a_ring(case)) > 10 * EXACT  # negative control: projections are seen
