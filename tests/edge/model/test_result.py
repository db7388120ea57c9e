"""What the ring saves is an ordinary AdapterHub folder, passes the checks, and comes back into slices."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file, save_file

from coordinator.run.collect import ExpectedResult, check_parts
from edge.model.result import result_files, side_file, users_files
from edge.model.skeleton import ADAPTER
from edge.techniques.offload.sites import adapter_weights
from ringtune.costs.model_facts import model_facts
from ringtune.errors import DivergedError, IntegrityError, ModelError, PlanError
from ringtune.job.job import Job, parse_job
from ringtune.models.families import FAMILIES
from ringtune.models.result_files import ADAPTER_FILES
from ringtune.models.result_files import result_files as names_of
from ringtune.storage.pieces import Pieces
from tests.edge.model.test_sizes import CONFIGS, LORA_EVERYWHERE, OWN_KINDS
from tests.support import hand_ring as ring
from tests.support import tiny_families, whole_models
from tests.support.plans import changed, make_plan
from tests.support.tiny_data import labels_of

FILES = {"adapter_config.json", "adapter.safetensors", "head_config.json", "model_head.safetensors"}


def _saving(model_folder: Path, folder: Path, adapter: str) -> tuple[ring.HandRing, dict[str, dict[str, torch.Tensor]]]:
    """A ring whose owner has a private block; and sets of two users for the others, at the node that hosts them."""
    values: dict[str, Any] = {"adapter__config": adapter, "train__max_steps": 1, "privacy__private_blocks": 1}
    hand = ring.make_ring(model_folder, folder, {"b": (1, 4)}, **values)
    like = adapter_weights(hand.nodes["b"]._hosted.skeleton, range(1, 4))
    return hand, {
        user: {name: torch.full_like(value, number) for name, value in like.items()}
        for number, user in enumerate(("anna", "ben"), start=1)
    }


@pytest.mark.parametrize(
    ("adapter", "is_taken_away"), [("seq_bn[ln_before=True]", False), ("mlp[hidden=4]", False), ("lora[r=2]", True)]
)
def test_each_user_gets_a_file_with_their_set_and_what_is_the_same_for_all(
    model_folder: Path, tmp_path: Path, adapter: str, is_taken_away: bool
) -> None:
    """Also of a tensor that a file has under two names, and with modules that have something else or are away."""
    hand, sets = _saving(model_folder, tmp_path, adapter)
    host, owner = (hand.nodes[name]._hosted.skeleton for name in "ba")
    want = set(hand.tensors()) - {name for name in hand.tensors() if name.startswith("heads.")}
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
        mine, common = (load(bytes(files[file])) for files in (own, rest))
        assert mine.keys() | common.keys() == want and not mine.keys() & common.keys()
        assert all(bool((value == number).all()) for value in mine.values())
        assert common.keys() == load(bytes(rest["users/anna/adapter.safetensors"])).keys() and common


def test_a_users_set_that_diverged_or_a_name_that_is_none_is_refused(model_folder: Path, tmp_path: Path) -> None:
    """The error names the user; no file gets a path of somebody else."""
    hand, sets = _saving(model_folder, tmp_path, "lora[r=2]")
    host = hand.nodes["b"]._hosted.skeleton
    with pytest.raises(PlanError, match=r"user name '\.\./ben' is not allowed"):
        users_files(host, {"../ben": sets["ben"]}, without_blocks=(), with_head=False)
    next(iter(sets["ben"].values())).fill_(float("nan"))
    with pytest.raises(DivergedError, match="of user ben is not finite"):
        users_files(host, sets, without_blocks=(), with_head=False)


Change = tuple[Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor | None]], str]
LABELS = ("neg", "pos")
PLAN = make_plan([("a", 0, 1), ("b", 1, 2)], ["b"], num_blocks=2, labels=LABELS)
LEFT_OUT = ("seq_bn[leave_out=[0]]", "seq_bn[leave_out=[0]]|lora[r=2]", "linear[leave_out=[0]]", "loreft[layers=[1]]")


def _job(folder: Path, task: str, adapter: str, dtype: str = "float32", method: str = "all") -> Job:
    text = f'[model]\npath = "{folder}"\ntask = "{task}"\ndtype = "{dtype}"\n'
    text += f'[adapter]\nconfig = "{adapter}"\n' if method == "all" else ""
    return parse_job(f'{text}[train]\nmax_length = 16\nmethod = "{method}"\n', source="test")


WITHOUT_MTL = ("gpt2", *tiny_families.PLUGGED)


def _part(folder: Path, job: Job, blocks: Iterable[int], *, is_owner: bool) -> dict[str, Pieces]:
    """What a node hands in that hosts these blocks."""
    task = job.model.task
    labels = (LABELS if labels_of(task) else ()) if is_owner else None
    skeleton = whole_models.built(folder, job, blocks, labels=labels)
    return result_files(skeleton, task, folder, without_blocks=(), with_head=is_owner)


def _cases() -> Iterator[tuple[str, str, str]]:
    """Every family with every configuration of its first task, and with one configuration of its other tasks."""
    for model_type in tiny_families.MODEL_TYPES:
        first, *others = FAMILIES[model_type].tasks
        yield from ((model_type, task, "seq_bn") for task in others)
        for adapter in (*CONFIGS, LORA_EVERYWHERE, *OWN_KINDS, *LEFT_OUT, "full"):
            # the library itself fails with the others
            if (model_type, adapter) != ("gpt2", "dora") and (adapter != "mtl_lora" or model_type not in WITHOUT_MTL):
                yield model_type, first, adapter


@pytest.mark.parametrize(("model_type", "task", "adapter"), [*_cases()])
@pytest.mark.sampled(3)
def test_adapters_and_own_weights_of_every_family_pass(
    family: Callable[[str], Path], model_type: str, task: str, adapter: str
) -> None:
    """Every configuration, also those that leave blocks out or have a tensor under two names."""
    folder = family(model_type)
    job = _job(folder, task, adapter)
    _check(
        ExpectedResult(job, PLAN, model_facts(folder, job), "b"),
        {"a": _part(folder, job, [0], is_owner=False), "b": _part(folder, job, [1], is_owner=True)},
    )


def _check(wanted: ExpectedResult, files: dict[str, dict[str, Pieces]]) -> None:
    """What the nodes hand in passes, and is no more than what a node may hand in."""
    check_parts(files, wanted)
    for node, own in files.items():
        assert sum(content.size_bytes for content in own.values()) < wanted.most_bytes(node)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("model_type", tiny_families.MODEL_TYPES)
@pytest.mark.sampled(1)
def test_whole_models_of_every_family_pass(tmp_path: Path, model_type: str, dtype: str) -> None:
    """With each task, with a pooler that nobody trains and without."""
    folder = tiny_families.write_family(tmp_path, model_type)
    for task in FAMILIES[model_type].tasks:
        job = _job(folder, task, "", dtype, "hift")
        files = whole_models.parts(folder, task, dtype=dtype)
        plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["b"], labels=labels_of(task))
        _check(ExpectedResult(job, plan, model_facts(folder, job), "b"), files)


SPLITS = ({"b": (0, 2), "c": (2, 4)}, {"a": (0, 4)}, {"c": (0, 1), "a": (1, 3), "b": (3, 4)})
PRIVATE = {"b": (1, 2), "c": (2, 4)}


def write(hand: ring.HandRing, folder: Path, names: tuple[str, ...] = ADAPTER_FILES) -> Path:
    """The folder of a ring, as the coordinator merges it."""
    from coordinator.run.result_files import adapter_folder

    folder.mkdir(exist_ok=True)
    files = {node: {name: Pieces.of(part) for name, part in own.items()} for node, own in hand.files().items()}
    for name, content in adapter_folder(files, names).items():
        (folder / name).write_bytes(bytes(content))
    return folder


def make(
    model_folder: Path, folder: Path, slices: dict[str, tuple[int, int]], adapter: str = "seq_bn", **overrides: object
) -> ring.HandRing:
    """A ring of two owners over the given slices; it has not trained."""
    return ring.make_ring(model_folder, folder, slices, ("a", "c"), eval_rows=12, adapter__config=adapter, **overrides)


def loaded(hand: ring.HandRing, folder: Path) -> ring.HandRing:
    """A ring whose nodes have all loaded a folder."""
    for executor in hand.nodes.values():
        executor.load_saved(folder)
    return hand


@pytest.fixture(scope="module")
def saved(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[ring.HandRing, Path]]:
    """A function that trains a ring with an adapter once, and saves its folder."""

    @functools.cache
    def train(adapter: str) -> tuple[ring.HandRing, Path]:
        folder = tmp_path_factory.mktemp("saved")
        hand = make(model_folder, folder, SPLITS[0], adapter, train__method="all", train__max_steps=2).train()
        return hand, write(hand, folder / "adapter", names_of("sequence-classification", adapter))

    return train


Saved = Callable[[str], tuple[ring.HandRing, Path]]


def test_sparse_file_beside_the_weights_is_not_copied(tmp_path: Path) -> None:
    """It has few bytes on its disk, and would fill that of the result."""
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelError, match=r"tokenizer.json has 1,099,511,627,776 bytes, .* are copied; fetch"):
        side_file(tmp_path / "tokenizer.json")


def test_saving_holds_no_local_path(model_folder: Path, saved: Saved) -> None:
    """The configs name the model by its folder's name only."""
    hand, _ = saved("seq_bn")
    files = hand.files()[hand.holder]
    assert files.keys() >= FILES - {"adapter.safetensors"}
    for name in ("adapter_config.json", "head_config.json"):
        config = json.loads(files[name])
        assert config["model_name"] == model_folder.name
        assert str(model_folder.parent) not in files[name].decode()
        assert config["name"] == "ringtune"


@pytest.mark.parametrize("adapter", ["seq_bn", "full"])
@pytest.mark.parametrize("slices", [*SPLITS, PRIVATE])
@pytest.mark.sampled(2)
def test_loading_gives_the_evaluation_of_the_trained_ring(
    model_folder: Path, tmp_path: Path, saved: Saved, adapter: str, slices: dict[str, tuple[int, int]]
) -> None:
    """Whatever the split, a ring that loads the folder counts what the trained one counted, without a step.

    Also with private blocks, which had been of the slices; norms are the base model's own.
    """
    trained, folder = saved(adapter)
    more: dict[str, Any] = {"privacy__private_blocks": 1} if slices is PRIVATE else {}
    hand = loaded(make(model_folder, tmp_path, slices, adapter, train__max_steps=1, **more), folder)
    hand.plan = changed(hand.plan, num_steps=0)
    hand.train()
    assert hand.evaluations[0] == pytest.approx(trained.evaluations[2], rel=1e-12)


def test_loading_fills_the_private_blocks_of_an_owner(model_folder: Path, tmp_path: Path) -> None:
    """Blocks that every owner runs itself get the saved values at each owner, and one of them hands them in."""
    values: dict[str, Any] = {"privacy__private_blocks": 1, "train__method": "all", "train__max_steps": 1}
    hand = make(model_folder, tmp_path, PRIVATE, **values).train()
    assert hand.nodes["a"].adapter_files(with_head=False) == {}
    private = load(bytes(hand.nodes["a"].adapter_files(with_head=False, with_private=True)["adapter.safetensors"]))
    assert {name.split(".layer.")[1].split(".")[0] for name in private} == {"0"}
    folder = write(hand, tmp_path / "adapter")
    other = loaded(make(model_folder, tmp_path, PRIVATE, **values, train__seed=5), folder)
    for holder in ("a", "c"):
        other.holder = holder
        again = other.tensors()
        assert all(torch.equal(value, again[name]) for name, value in hand.tensors().items())


@pytest.mark.parametrize("config", ["double_seq_bn", "par_bn", "lora", "ia3", "loreft", "linear", "mlp[hidden=8]"])
@pytest.mark.sampled(1)
def test_loading_round_trips_other_adapters(model_folder: Path, tmp_path: Path, config: str) -> None:
    """What one ring saved another ring with other initial values saves again, bit for bit."""
    values: dict[str, Any] = {"model__dtype": "float32", "wire__dtype": "float32"}
    values |= {"train__method": "all", "train__max_steps": 1}
    hand = make(model_folder, tmp_path, SPLITS[0], config, **values).train()
    folder = write(hand, tmp_path / "adapter", names_of("sequence-classification", config))
    other = loaded(make(model_folder, tmp_path, SPLITS[0], config, **values, train__seed=5), folder)
    other.holder = hand.holder
    again = other.tensors()
    assert all(torch.equal(value, again[name]) for name, value in hand.tensors().items())


def _first(tensors: dict[str, torch.Tensor]) -> str:
    """The name of a tensor of the top block."""
    return next(name for name in sorted(tensors) if ".layer.3." in name)


TOP = "bert.encoder.layer.3."
OWN_WEIGHTS: tuple[Change, ...] = (
    (lambda _: {f"{TOP}output.LayerNorm.weight": torch.zeros(32)}, "LayerNorm.weight, which this model has not"),
    (lambda _: {f"{TOP}output.dense.bias": torch.zeros(32)}, "output.dense.bias, which this model has not"),
    (lambda _: {"bert.embeddings.word_embeddings.weight": torch.zeros(32)}, "word_embeddings.weight, which this model"),
)
ADAPTERS: tuple[Change, ...] = (
    (lambda had: {_first(had): None}, f"lacks {TOP}"),
    (lambda had: {_first(had).replace("adapter_down", "other"): torch.zeros(3)}, "which this model has not"),
    (lambda had: {_first(had): had[_first(had)][:1].clone()}, "of shape"),
    (lambda _: {f"{TOP}attention.self.query.weight": torch.zeros(32, 32)}, "query.weight, which this model has not"),
    (lambda _: {"bert.embeddings.word_embeddings.weight": torch.zeros(3, 32)}, "word_embeddings.weight, which this"),
)


@pytest.mark.parametrize(
    ("adapter", "file", "changes"),
    [("seq_bn", "adapter.safetensors", ADAPTERS), ("full", "blocks.safetensors", OWN_WEIGHTS)],
)
def test_loading_refuses_what_does_not_train(
    saved: Saved, tmp_path: Path, adapter: str, file: str, changes: tuple[Change, ...]
) -> None:
    """Missing, foreign or misshapen tensors are refused by name, a file never reaches a base weight; half is damage."""
    hand, folder = saved(adapter)
    path = Path(shutil.copytree(folder, tmp_path / "adapter")) / file
    good = load_file(path)
    for change, message in changes:
        tensors = good | change(good)
        save_file({name: value for name, value in tensors.items() if value is not None}, path)
        with pytest.raises(IntegrityError, match=message):
            hand.nodes["c"].load_saved(path.parent)
    path.write_bytes(path.read_bytes()[:999])
    with pytest.raises(IntegrityError, match=rf"{path.name} is damaged"):
        hand.nodes["c"].load_saved(path.parent)
