"""What the ring saves is an ordinary AdapterHub folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from edge.compute.capturing.install import adapter_weights
from edge.model.result.saving import users_files
from edge.model.skeleton import ADAPTER
from ringtune.errors import DivergedError, PlanError
from ringtune.files.pieces import Pieces
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.turns import Item, items, turn_sequence
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
@pytest.mark.sampled(2)
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


def _saving(model_folder: Path, folder: Path, adapter: str) -> tuple[ring.HandRing, dict[str, dict[str, torch.Tensor]]]:
    """A ring whose owner has a private block; and sets of two users for the others, at the node that hosts them."""
    job = ring.make_job(model_folder, adapter__config=adapter, train__max_steps=1, privacy__private_blocks=1)
    datasets = ring.make_datasets(job, model_folder, folder, ("a",))
    hand = ring.HandRing(ring.make_plan(job, datasets, {"b": (1, 4)}), job, model_folder, datasets)
    like = adapter_weights(hand.nodes["b"]._hosted.skeleton, range(1, 4))
    return hand, {
        user: {name: torch.full_like(value, number) for name, value in like.items()}
        for number, user in enumerate(("anna", "ben"), start=1)
    }


def _loaded(files: dict[str, Pieces], name: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load

    return load(bytes(files[name]))


@pytest.mark.parametrize(
    ("adapter", "is_taken_away"),
    [("seq_bn[ln_before=True]", False), ("mlp[hidden=4]", False), ("lora[r=2]", False), ("lora[r=2]", True)],
)
def test_each_user_gets_a_file_with_their_set_and_what_is_the_same_for_all(
    model_folder: Path, tmp_path: Path, adapter: str, is_taken_away: bool
) -> None:
    """Also of a tensor that a file has under two names, and with modules that have something else or are away."""
    hand, sets = _saving(model_folder, tmp_path, adapter)
    host, owner = (hand.nodes[name]._hosted.skeleton for name in "ba")
    want = {name for files in hand.files().values() for name in _names(files)}
    if is_taken_away:
        for block in host.blocks:
            for name in [path for path, _ in block.named_modules() if path.endswith(f".{ADAPTER}")]:
                delattr(block.get_submodule(name.rpartition(".")[0]), ADAPTER)
    own = users_files(host, sets, without_blocks=(0,), with_head=False)
    rest = users_files(owner, {user: {} for user in sets}, without_blocks=(), with_head=True)
    assert own.keys() == {"users/anna/adapter.safetensors", "users/ben/adapter.safetensors"}
    config = "adapter.json" if adapter.startswith("mlp") else "adapter_config.json"
    assert rest.keys() == own.keys() | {config, "head_config.json", "model_head.safetensors"}
    for number, file in enumerate(sorted(own), start=1):
        mine, common = _loaded(own, file), _loaded(rest, file)
        assert mine.keys() | common.keys() == want and not mine.keys() & common.keys()
        assert all(bool((value == number).all()) for value in mine.values())
        assert common.keys() == _loaded(rest, "users/anna/adapter.safetensors").keys() and common


def _names(files: dict[str, bytes]) -> set[str]:
    from safetensors.torch import load

    return set(load(files["adapter.safetensors"])) if "adapter.safetensors" in files else set()


def test_a_users_set_that_diverged_or_a_name_that_is_none_is_refused(model_folder: Path, tmp_path: Path) -> None:
    """The error names the user; no file gets a path of somebody else."""
    hand, sets = _saving(model_folder, tmp_path, "lora[r=2]")
    host = hand.nodes["b"]._hosted.skeleton
    with pytest.raises(PlanError, match=r"user name '\.\./ben' is not allowed"):
        users_files(host, {"../ben": sets["ben"]}, without_blocks=(), with_head=False)
    next(iter(sets["ben"].values())).fill_(float("nan"))
    with pytest.raises(DivergedError, match="of user ben is not finite"):
        users_files(host, sets, without_blocks=(), with_head=False)
