"""Auxiliary models come back from a folder into a plain model, or become a part of its matrices."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from edge.model.auxiliary import (
    LinearDelta,
    add_auxiliary,
    attach_delta,
    load_auxiliary,
    merge_auxiliary,
    merge_deltas,
    start_auxiliary,
)
from ringtune.errors import IntegrityError, UsageError
from ringtune.models.adapter_config import auxiliary_of
from ringtune.models.auxiliary_models import describe
from ringtune.models.families import FAMILIES, LAYOUTS

NAME, FILE = "ringtune", "adapter.safetensors"
EVERYWHERE = "attn_matrices=['q','v'],intermediate_lora=True,output_lora=True,alpha=0.5"
LINEAR, MLP = f"linear[{EVERYWHERE}]", f"mlp[hidden=8,{EVERYWHERE}]"
FAMILY_NAMES = ("bert", "gpt2", "llama")


def plain(folder: Path) -> Any:
    """The base model of transformers, without a head and without the adapters library."""
    from transformers import AutoModel

    return AutoModel.from_pretrained(str(folder)).double().eval()


def outputs_of(model: Any) -> torch.Tensor:
    """The last hidden state of two rows."""
    with torch.no_grad():
        hidden: torch.Tensor = model(input_ids=torch.tensor([[5, 6, 7, 8], [9, 8, 7, 6]])).last_hidden_state
    return hidden


@dataclass(frozen=True)
class Saved:
    """Auxiliary models in a folder, and what a model with them gives."""

    base: Path
    folder: Path
    outputs: torch.Tensor


@pytest.fixture(scope="module")
def saved(family: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Saved]:
    """A function that writes auxiliary models of a family with numbers in all weights, once."""

    @functools.cache
    def write(model_type: str, adapter: str) -> Saved:
        config, known = auxiliary_of(adapter), FAMILIES[model_type]
        model = plain(family(model_type))
        blocks = model.get_submodule(known.blocks_path)
        add_auxiliary(blocks, LAYOUTS[model_type], config, name=NAME)
        torch.manual_seed(1)
        for index, block in enumerate(blocks):
            start_auxiliary(block, seed=0, index=index)
        for value in own_of(model).values():
            torch.nn.init.normal_(value.data, std=0.2)
        model.double()
        folder = tmp_path_factory.mktemp("adapter")
        save_file({known.prefix + name: value.detach() for name, value in own_of(model).items()}, folder / FILE)
        described = describe(config, name=NAME, model_type=model_type, model_name="tiny")
        (folder / "adapter.json").write_text(json.dumps(described))
        return Saved(family(model_type), folder, outputs_of(model))

    return write


def own_of(model: Any) -> dict[str, torch.nn.Parameter]:
    """The weights of auxiliary models."""
    return {name: value for name, value in model.named_parameters() if f".{NAME}." in name}


Write = Callable[[str, str], Saved]


@pytest.mark.parametrize("adapter", [LINEAR, MLP])
@pytest.mark.parametrize("model_type", FAMILY_NAMES)
def test_loaded_auxiliary_models_compute_what_they_did(saved: Write, model_type: str, adapter: str) -> None:
    """Into a model without a head, whose names lack the prefix; nothing of it trains, and nothing is there twice.

    A linear one merged into its matrix computes the same, also beside a fused matrix, and one with a row an input.
    """
    made = saved(model_type, adapter)
    model = plain(made.base)
    assert (outputs_of(model) - made.outputs).abs().max() > 1e-2
    load_auxiliary(model, made.folder)
    assert torch.equal(outputs_of(model), made.outputs)
    assert own_of(model) and not any(value.requires_grad for value in own_of(model).values())
    with pytest.raises(UsageError, match="the model has an adapter 'ringtune' already; load into a fresh model"):
        load_auxiliary(model, made.folder)
    if adapter == LINEAR:
        merged = merge_auxiliary(plain(made.base), made.folder)
        assert (outputs_of(merged) - made.outputs).abs().max() < 1e-12
        assert not any(NAME in name for name, _ in merged.named_parameters())
    else:
        with pytest.raises(UsageError, match=r"kind 'mlp'.*only 'linear' is a matrix; load them with load_auxiliary"):
            merge_auxiliary(plain(made.base), made.folder)


def test_loaded_models_may_differ_by_matrix_and_block(saved: Write) -> None:
    """Each by its own kind and alpha, of one matrix for query, key and value too; in the model's own dtype."""
    config = "linear[attn_matrices=['q']]|mlp[attn_matrices=['v'],hidden=8,leave_out=[0]]"
    config += "|mlp[selfattn_lora=False,output_lora=True,alpha=3,hidden=4,leave_out=[1]]"
    made = saved("gpt2", config)
    assert torch.equal(outputs_of(load_auxiliary(plain(made.base), made.folder)), made.outputs)
    narrow = outputs_of(load_auxiliary(plain(made.base).float(), made.folder))
    assert narrow.dtype is torch.float32 and (narrow - made.outputs).abs().max() < 1e-4
    with pytest.raises(UsageError, match=r"kind 'mlp', and only 'linear' is a matrix"):
        merge_auxiliary(plain(made.base), made.folder)


def test_models_of_two_names_beside_one_matrix_merge_one_by_one() -> None:
    """Each adds its own alpha, and the other one stays."""
    torch.manual_seed(2)
    matrix = torch.nn.Linear(3, 2).double()
    for name, alpha in (("first", 0.5), ("second", 4.0)):
        delta = LinearDelta(3, 2)
        delta.start(lambda _: torch.Generator())
        torch.nn.init.normal_(delta.double().weight)
        attach_delta(matrix, delta, name=name, alpha=alpha)
    holder, inputs = torch.nn.Sequential(matrix), torch.randn(4, 3).double()
    before = matrix(inputs)
    for name in ("second", "first"):
        merge_deltas(holder, name=name, inputs_first=False)
        assert (matrix(inputs) - before).abs().max() < 1e-12
        assert name not in dict(matrix.named_children())


def _other_family(folder: Path) -> None:
    tensors = load_file(folder / FILE)
    save_file({name.replace("query", "q_lin"): value for name, value in tensors.items()}, folder / FILE)


def _narrower(folder: Path) -> None:
    tensors = {name: value[:, :4].clone() if value.dim() == 2 else value for name, value in _all(folder).items()}
    save_file(tensors, folder / FILE)


def _lacking(folder: Path) -> None:
    save_file({name: value for name, value in _all(folder).items() if not name.endswith("up.bias")}, folder / FILE)


def _of_other_kind(folder: Path) -> None:
    content = json.loads((folder / "adapter.json").read_text())
    content["parts"][0] |= {"kind": "mlp", "hidden": 8}
    (folder / "adapter.json").write_text(json.dumps(content))


def _of_the_first_layout(folder: Path) -> None:
    content = json.loads((folder / "adapter.json").read_text())
    (folder / "adapter.json").write_text(json.dumps({**content, **content.pop("parts")[0], "version": 1}))


def _one_matrix(folder: Path) -> None:
    save_file(dict([min(_all(folder).items())]), folder / FILE)


def _other_bias(folder: Path) -> None:
    odd = {
        name: value[:3].clone() if name.endswith("value.ringtune.down.bias") else value
        for name, value in _all(folder).items()
    }
    save_file(odd, folder / FILE)


def _beside_library(config: dict[str, Any]) -> Callable[[Path], None]:
    """Say that adapters of the library were trained beside, of which there are no tensors."""

    def damage(folder: Path) -> None:
        content = json.loads((folder / "adapter.json").read_text())
        (folder / "adapter.json").write_text(json.dumps({**content, "library": {"config": config}}))

    return damage


def _all(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / FILE)


def test_what_does_not_belong_to_the_model_is_refused(saved: Write, tmp_path: Path) -> None:
    """Nothing is changed of the model then, and no adapter is left in it."""
    model = plain(saved("bert", MLP).base)
    before, modules, hooks = outputs_of(model), _names(model), _hooks(model)
    cases: list[tuple[Callable[[Path], object], str, str]] = [
        (_other_family, LINEAR, "this model differ in .*q_lin.*; copy .* and take the base model, a bert"),
        (_narrower, LINEAR, "differ in .*weight"),
        (_narrower, MLP, "differ in .*down"),
        (_lacking, MLP, "differ in .*up.bias"),
        (_other_bias, MLP, "differ in .*value.ringtune.down.bias"),
        (_one_matrix, LINEAR, "differ in .*weight"),
        (
            _beside_library({"architecture": "lora", "r": 4}),
            LINEAR,
            "differ in .*lora_A; .* take the base model, a bert",
        ),
        (_beside_library({"output_adapter": True, "reduction_factor": 2}), LINEAR, "differ in .*adapters"),
        (_beside_library({"architecture": "other"}), LINEAR, "adapter.json: adapters of architecture 'other' are not"),
        (lambda folder: (folder / FILE).write_bytes(b"x"), MLP, "can't be read"),
        (lambda folder: (folder / FILE).unlink(), MLP, "can't be read"),
        (_of_other_kind, LINEAR, "differ in .*query.ringtune"),
        (
            _of_the_first_layout,
            LINEAR,
            "is not of the format 'ringtune-auxiliary', version 2; take the folder of a run",
        ),
        (lambda folder: (folder / "adapter.json").write_text("{"), MLP, "adapter.json can't be read"),
        (lambda folder: (folder / "adapter.json").write_text("[]"), MLP, "adapter.json is no table"),
    ]
    for number, (damage, adapter, message) in enumerate(cases):
        folder = Path(shutil.copytree(saved("bert", adapter).folder, tmp_path / str(number)))
        damage(folder)
        with pytest.raises(IntegrityError, match=message):
            load_auxiliary(model, folder)
        assert torch.equal(outputs_of(model), before), message
        assert (_names(model), _hooks(model)) == (modules, hooks), message
    with pytest.raises(IntegrityError, match=r"adapter.safetensors: .*; take the base model, a bert"):
        load_auxiliary(plain(saved("gpt2", LINEAR).base), saved("bert", LINEAR).folder)


def _names(model: Any) -> list[str]:
    return [name for name, _ in model.named_modules()]


def _hooks(model: Any) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
