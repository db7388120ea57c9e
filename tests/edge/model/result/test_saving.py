"""What the ring saves is an ordinary AdapterHub folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Item, items, turn_sequence
from tests.support import hand_ring as ring
from tests.support import reference, tiny

FILES = {"adapter_config.json", "adapter.safetensors", "head_config.json", "model_head.safetensors"}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny model for all tests of this file."""
    return tiny.write_model(tmp_path_factory.mktemp("tiny-model"))


def _merge(hand: ring.HandRing, folder: Path) -> Path:
    """Write the nodes' parts into one folder, as the coordinator does by bytes."""
    from safetensors.torch import load, save_file

    folder.mkdir()
    adapters: dict[str, torch.Tensor] = {}
    for files in hand.files().values():
        for name, content in files.items():
            if name == "adapter.safetensors":
                part = load(content)
                assert not part.keys() & adapters.keys()
                adapters |= part
            else:
                assert not (folder / name).exists()
                (folder / name).write_bytes(content)
    save_file(adapters, folder / "adapter.safetensors")
    return folder


@pytest.mark.promise("8 adapterhub folder")
@pytest.mark.parametrize(
    ("config", "dtype"), [("seq_bn", "float32"), ("seq_bn", "float64"), ("lora", "float64"), ("loreft", "float32")]
)
@pytest.mark.parametrize("private", [0, 1])
def test_saving_loads_with_nothing_of_ours(
    model_folder: Path, tmp_path: Path, config: str, dtype: str, private: int
) -> None:
    """load_adapter into the plain base model gives the logits of the trained model, with class names."""
    from adapters import AutoAdapterModel

    job = ring.make_job(
        model_folder,
        adapter__config=config,
        model__dtype=dtype,
        train__dropout=0.1,
        train__max_steps=8,
        privacy__private_blocks=private,
    )
    datasets = ring.make_datasets(job, model_folder, tmp_path, ("a", "c"))
    plan = ring.make_plan(job, datasets, {"b": (private, 2), "c": (2, 4)})
    hand = ring.HandRing(plan, job, model_folder, datasets).train()
    folder = _merge(hand, tmp_path / "adapter")
    assert {path.name for path in folder.iterdir()} == FILES
    trained = reference.train(job, plan, model_folder, datasets)

    plain = AutoAdapterModel.from_pretrained(str(model_folder))
    plain.load_adapter(str(folder), use_safetensors=True, set_active=True)
    plain.to(getattr(torch, dtype)).eval()
    batch = datasets["a"].batch(plan.course, _first_item(plan))
    inputs = {"input_ids": batch.ids, "attention_mask": batch.mask, "token_type_ids": batch.token_type_ids}
    with torch.no_grad():
        got, want = plain(**inputs).logits, trained.model.eval()(**inputs).logits
    assert float((got - want).abs().max()) <= 1e-5
    untrained = reference.whole_model(job, plan, model_folder).eval()
    with torch.no_grad():
        assert float((got - untrained(**inputs).logits).abs().max()) > 1e-3
    assert plain.active_head == "ringtune"
    assert tuple(plain.get_labels()) == tiny.LABELS


def _first_item(plan: Plan) -> Item:
    return items(plan.course, next(turn_sequence(plan.course)))[0]


def test_saving_holds_no_local_path(model_folder: Path, tmp_path: Path) -> None:
    """The configs name the model by its folder's name only."""
    job = ring.make_job(model_folder, train__max_steps=1)
    datasets = ring.make_datasets(job, model_folder, tmp_path, ("a",))
    plan = ring.make_plan(job, datasets, {"b": (0, 4)})
    files = ring.HandRing(plan, job, model_folder, datasets).files()["a"]
    assert files.keys() == FILES - {"adapter.safetensors"}
    for name in ("adapter_config.json", "head_config.json"):
        config = json.loads(files[name])
        assert config["model_name"] == model_folder.name
        assert str(model_folder.parent) not in files[name].decode()
        assert config["name"] == "ringtune"


def test_saving_leaves_out_private_blocks_unless_asked(model_folder: Path, tmp_path: Path) -> None:
    """Every owner has the private blocks' adapters, so only one of them is asked for them."""
    from safetensors.torch import load

    job = ring.make_job(model_folder, train__max_steps=1, privacy__private_blocks=1)
    datasets = ring.make_datasets(job, model_folder, tmp_path, ("a",))
    plan = ring.make_plan(job, datasets, {"b": (1, 4)})
    owner = ring.HandRing(plan, job, model_folder, datasets).nodes["a"]
    assert owner.adapter_files(with_head=False) == {}
    private = load(bytes(owner.adapter_files(with_head=False, with_private=True)["adapter.safetensors"]))
    assert {name.split(".layer.")[1].split(".")[0] for name in private} == {"0"}
