"""Auxiliary models come back from a folder into a plain model, or become a part of its matrices."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from edge.model.auxiliary import add_auxiliary, load_auxiliary, merge_auxiliary, start_auxiliary
from edge.model.layouts import LAYOUTS
from ringtune.errors import IntegrityError, UsageError
from ringtune.models.adapter_config import auxiliary_of
from ringtune.models.auxiliary_models import describe
from ringtune.models.families import FAMILIES
from tests.support.tiny_families import write_family

NAME, FILE = "ringtune", "adapter.safetensors"
EVERYWHERE = "attn_matrices=['q','v'],intermediate_lora=True,output_lora=True,alpha=0.5"
LINEAR, MLP = f"linear[{EVERYWHERE}]", f"mlp[hidden=8,{EVERYWHERE}]"
FAMILY_NAMES = ("bert", "gpt2", "llama")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that writes a tiny model of two blocks of a family once."""
    root = tmp_path_factory.mktemp("models")

    def write(model_type: str) -> Path:
        folder = root / model_type
        return folder if folder.exists() else write_family(folder, model_type, num_blocks=2)

    return write


def plain(folder: Path) -> Any:
    """The base model of transformers, without a head and without the adapters library."""
    from transformers import AutoModel

    return AutoModel.from_pretrained(str(folder)).double().eval()


def outputs_of(model: Any) -> torch.Tensor:
    """The last hidden state of two rows."""
    with torch.no_grad():
        hidden: torch.Tensor = model(input_ids=torch.tensor([[5, 6, 7, 8], [9, 8, 7, 6]])).last_hidden_state
    return hidden


def saved(base: Callable[[str], Path], model_type: str, adapter: str, folder: Path) -> torch.Tensor:
    """Write auxiliary models with numbers in all weights; returns what a model with them gives."""
    config, family = auxiliary_of(adapter), FAMILIES[model_type]
    model = plain(base(model_type))
    blocks = model.get_submodule(family.blocks_path)
    add_auxiliary(blocks, LAYOUTS[model_type], config, name=NAME)
    torch.manual_seed(1)
    for index, block in enumerate(blocks):
        start_auxiliary(block, seed=0, index=index)
    own = {name: value for name, value in model.named_parameters() if f".{NAME}." in name}
    for value in own.values():
        torch.nn.init.normal_(value.data, std=0.2)
    model.double()
    folder.mkdir()
    prefix = family.prefix
    save_file({prefix + name: value.detach() for name, value in model.named_parameters() if name in own}, folder / FILE)
    described = describe(config, name=NAME, model_type=model_type, model_name="tiny")
    (folder / "adapter.json").write_text(json.dumps(described))
    return outputs_of(model)


@pytest.mark.parametrize("adapter", [LINEAR, MLP])
@pytest.mark.parametrize("model_type", FAMILY_NAMES)
def test_loaded_auxiliary_models_compute_what_they_did(
    base: Callable[[str], Path], tmp_path: Path, model_type: str, adapter: str
) -> None:
    """Into a model without a head, whose names lack the prefix; nothing of it trains."""
    want = saved(base, model_type, adapter, tmp_path / "adapter")
    model = load_auxiliary(plain(base(model_type)), tmp_path / "adapter")
    assert torch.equal(outputs_of(model), want)
    assert (outputs_of(plain(base(model_type))) - want).abs().max() > 1e-2
    assert not any(value.requires_grad for name, value in model.named_parameters() if f".{NAME}." in name)


def test_loaded_models_may_differ_by_matrix_and_block(base: Callable[[str], Path], tmp_path: Path) -> None:
    """Each by its own kind and alpha, of one matrix for query, key and value too."""
    config = "linear[attn_matrices=['q']]|mlp[attn_matrices=['v'],hidden=8,leave_out=[0]]"
    config += "|mlp[selfattn_lora=False,output_lora=True,alpha=3,hidden=4,leave_out=[1]]"
    want = saved(base, "gpt2", config, tmp_path / "adapter")
    assert torch.equal(outputs_of(load_auxiliary(plain(base("gpt2")), tmp_path / "adapter")), want)
    with pytest.raises(UsageError, match=r"kind 'mlp', and only 'linear' is a matrix"):
        merge_auxiliary(plain(base("gpt2")), tmp_path / "adapter")


def test_folder_of_the_first_version_is_read(base: Callable[[str], Path], tmp_path: Path) -> None:
    """It had one kind, beside the other keys."""
    want = saved(base, "bert", MLP, tmp_path / "adapter")
    path = tmp_path / "adapter/adapter.json"
    content = json.loads(path.read_text())
    (part,) = content.pop("parts")
    content.pop("library")
    path.write_text(json.dumps({**content, **part, "version": 1}))
    assert torch.equal(outputs_of(load_auxiliary(plain(base("bert")), tmp_path / "adapter")), want)


@pytest.mark.parametrize("model_type", FAMILY_NAMES)
def test_merged_linear_computes_the_same_without_it(
    base: Callable[[str], Path], tmp_path: Path, model_type: str
) -> None:
    """Also beside a fused matrix, and one that is stored with a row for each input."""
    want = saved(base, model_type, LINEAR, tmp_path / "adapter")
    model = merge_auxiliary(plain(base(model_type)), tmp_path / "adapter")
    assert (outputs_of(model) - want).abs().max() < 1e-12
    assert not any(NAME in name for name, _ in model.named_parameters())


def test_mlp_is_no_matrix(base: Callable[[str], Path], tmp_path: Path) -> None:
    """It can't be merged, and the function that loads it is named."""
    saved(base, "bert", MLP, tmp_path / "adapter")
    with pytest.raises(UsageError, match=r"kind 'mlp'.*only 'linear' is a matrix; load them with load_auxiliary"):
        merge_auxiliary(plain(base("bert")), tmp_path / "adapter")


def test_auxiliary_models_load_once(base: Callable[[str], Path], tmp_path: Path) -> None:
    """A second time they would count twice."""
    saved(base, "bert", LINEAR, tmp_path / "adapter")
    model = load_auxiliary(plain(base("bert")), tmp_path / "adapter")
    with pytest.raises(UsageError, match="has an adapter 'ringtune' already; load into a fresh model"):
        load_auxiliary(model, tmp_path / "adapter")


def test_name_in_earlier_model_cards_still_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import that cards of earlier versions print gives the same function, and says where it is now."""
    monkeypatch.delitem(sys.modules, "edge.model.auxiliary.loading", raising=False)
    with pytest.warns(FutureWarning, match="from edge.model.auxiliary"):
        earlier = importlib.import_module("edge.model.auxiliary.loading")
    assert earlier.load_auxiliary is load_auxiliary


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


def _all(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / FILE)


@pytest.mark.parametrize(
    ("damage", "adapter", "message"),
    [
        (_other_family, LINEAR, "q_lin, which this model does not have in that shape; take the base model, a bert"),
        (_narrower, LINEAR, "does not have in that shape"),
        (_narrower, MLP, "does not have in that shape"),
        (_lacking, MLP, "does not have in that shape"),
        (lambda folder: (folder / FILE).write_bytes(b"x"), MLP, "can't be read"),
        (lambda folder: (folder / FILE).unlink(), MLP, "can't be read"),
        (_of_other_kind, LINEAR, "does not have in that shape"),
        (lambda folder: (folder / "adapter.json").write_text("{"), MLP, "adapter.json can't be read"),
        (lambda folder: (folder / "adapter.json").write_text("[]"), MLP, "adapter.json is no table"),
    ],
)
def test_what_does_not_belong_to_the_model_is_refused(
    base: Callable[[str], Path], tmp_path: Path, damage: Callable[[Path], None], adapter: str, message: str
) -> None:
    """Nothing is changed of the model then."""
    saved(base, "bert", adapter, tmp_path / "adapter")
    damage(tmp_path / "adapter")
    model = plain(base("bert"))
    before = outputs_of(model)
    with pytest.raises(IntegrityError, match=message):
        load_auxiliary(model, tmp_path / "adapter")
    assert torch.equal(outputs_of(model), before)
