"""Folders from which a run begins: of the library, of PEFT, of a run; and what is refused, each with its remedy."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load, load_file, save_file

from coordinator.api.arguments import initial_file, unpickled, with_initial_digest
from edge.model import pickled
from edge.model.heads import task_of
from edge.model.result import load_initial
from edge.model.skeleton import build_skeleton
from ringtune.errors import IntegrityError, JobError, RingTuneError
from ringtune.job.job import Job, parse_job
from ringtune.models.adapter_config import CONFIGURATIONS, config_of_library, is_same_adapter
from ringtune.run_control.continuation import job_digest
from ringtune.storage.pieces import FilePieces
from ringtune.storage.tensor_files import TensorFile
from ringtune.techniques.initial_adapter import head_note, head_problem, initial_values
from tests.features.initial import folder_with_adapter
from tests.support.cases import cases
from tests.support.tiny_families import write_family
from tests.support.typed import calling

LABELS = ("bad", "good")
LIBRARY = sorted(name for name, (kind, _) in CONFIGURATIONS.items() if kind not in ("linear", "mlp"))


def job_from(folder: Path, source: Path | str, adapter: str = "seq_bn", **keys: Any) -> Job:
    """A job that begins from a folder."""
    job = parse_job(f'[model]\npath = "{folder / "model"}"\n[adapter]\nconfig = "{adapter}"', source="test")
    return job.with_overrides({"adapter.from": str(source), **keys})


def tensors_of(job: Job) -> dict[str, torch.Tensor]:
    """The tensors of the file that goes to the nodes."""
    return load(bytes(initial_values(job, unpickled)))


@cases(
    "config",
    [
        *LIBRARY,
        "seq_bn[reduction_factor={'default': 8, '1': 4}, non_linearity='gelu']",
        "par_bn[scaling=2.0]|lora[r=3, alpha=7, attn_matrices=['k']]",
    ],
)
def test_config_of_the_library_is_read_as_it_was_written(config: str) -> None:
    """What decides the computation is compared, with the library's defaults; another number is another adapter."""
    from adapters import AdapterConfig

    described = AdapterConfig.load(config).to_dict()
    assert is_same_adapter(config_of_library(described), config)
    part = described["configs"][0] if "configs" in described else described
    changed = "r" if "r" in part else "residual_before_ln"
    part[changed] = 5 if changed == "r" else not part[changed]
    assert not is_same_adapter(config_of_library(described), config)


def test_values_of_the_library_keep_their_bytes_and_decide_the_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pickled (both files in one process) or not, under any name; another number is another digest, of the job too."""
    reader = Mock(wraps=subprocess.run)
    monkeypatch.setattr("coordinator.api.arguments.subprocess.run", reader)
    plain, other = (folder_with_adapter("lora[r=2]", pickled=is_pickled) for is_pickled in (False, True))
    saved = load_file(plain / "from.adapter" / "adapter.safetensors")
    saved |= load_file(plain / "from.adapter" / "model_head.safetensors")
    job = job_from(plain, plain / "from.adapter", "lora[r=2]")
    assert (found := tensors_of(job)).keys() == {name.replace("last-month", "ringtune") for name in saved}
    assert all(torch.equal(found[name.replace("last-month", "ringtune")], value) for name, value in saved.items())
    first = with_initial_digest(job)
    same = with_initial_digest(job_from(plain, other / "from.adapter", "lora[r=2]"))
    reader.assert_called_once()
    assert first.adapter.sha256 == same.adapter.sha256 != "" and job_digest(first) == job_digest(same)
    changed = shutil.copytree(plain / "from.adapter", tmp_path / "changed")
    tensors = load_file(changed / "adapter.safetensors")
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, changed / "adapter.safetensors")
    another = with_initial_digest(job_from(plain, changed, "lora[r=2]"))
    assert another.adapter.sha256 != first.adapter.sha256 and job_digest(another) != job_digest(first)
    pinned = dataclasses.replace(first, adapter=dataclasses.replace(first.adapter, from_=str(changed)))
    with pytest.raises(JobError, match=r"adapter\.sha256 says .*give the folder as it was"):
        initial_file(pinned, tmp_path)
    (tmp_path / "initial.safetensors").write_bytes(bytes(initial_values(first, unpickled)))
    assert (kept := initial_file(pinned, tmp_path)) is not None and kept.sha256() == first.adapter.sha256
    # The run's own values are those of its job, though the folder has others or is gone
    (tmp_path / "job.toml").write_text(pinned.to_toml())
    asked = dataclasses.replace(first, adapter=dataclasses.replace(pinned.adapter, sha256=""))
    assert with_initial_digest(asked).adapter.sha256 == another.adapter.sha256
    shutil.rmtree(changed)
    assert (resumed := with_initial_digest(asked, tmp_path)) == pinned
    assert (kept := initial_file(resumed, tmp_path)) is not None and kept.sha256() == first.adapter.sha256
    with pytest.raises(JobError, match="is no folder"):
        with_initial_digest(asked)
    # A run that is not resumed reads its source: an earlier run's file is moved aside before it is sent
    assert (new := initial_file(first, None)) is not None
    (tmp_path / "initial.safetensors").unlink()
    assert new.sha256() == first.adapter.sha256


PEFT: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "task_type": "SEQ_CLS"}
PLACES = {
    "bert": ("bert.encoder.layer.", ("attention.self.query", "attention.self.value", "output.dense")),
    "gpt2": ("transformer.h.", ("attn.c_attn", "mlp.c_fc")),
    "llama": ("model.layers.", ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj")),
}


def write_peft(folder: Path, model_type: str, changes: dict[str, Any], *, dtype: torch.dtype = torch.float64) -> Any:
    """A model, and beside it an adapter in PEFT's layout; returns the plain model with W + scale * B A."""
    from transformers import AutoModel

    write_family(folder / "model", model_type)
    model = AutoModel.from_pretrained(str(folder / "model"), dtype=dtype).eval()
    config, tensors, rng = {**PEFT, **changes}, dict[str, torch.Tensor](), torch.Generator().manual_seed(5)
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    prefix, places = PLACES[model_type]
    inside = prefix.partition(".")[2]
    for block in changes.get("layers_to_transform", range(model.config.num_hidden_layers)):
        for place in places:
            weight = model.get_submodule(f"{inside}{block}.{place}").weight
            outputs, inputs = reversed(weight.shape) if model_type == "gpt2" else weight.shape
            a = torch.randn(config["r"], inputs, generator=rng, dtype=dtype)
            b = torch.randn(outputs, config["r"], generator=rng, dtype=dtype)
            weight.data += scale * ((b @ a).T if model_type == "gpt2" else b @ a)
            name = f"base_model.model.{prefix}{block}.{place}"
            tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    tensors |= {f"base_model.model.{name}.weight": torch.ones(2) for name in changes.get("modules_to_save", ())}
    (folder / "peft").mkdir()
    save_file(tensors, folder / "peft" / "adapter_model.safetensors")
    (folder / "peft" / "adapter_config.json").write_text(json.dumps(config))
    return model


@cases(
    ("model_type", "config", "changes"),
    [
        ("bert", "lora[r=4, output_lora=True]", {"modules_to_save": ["classifier", "score"]}),
        ("bert", "lora[r=4, alpha=16, output_lora=True]", {"use_rslora": True}),
        ("bert", "lora[r=4, output_lora=True, leave_out=[0]]", {"layers_to_transform": [1, 2, 3]}),
        ("llama", "lora[r=4, attn_matrices=['q','k'], output_lora=True]", {}),
        ("gpt2", "lora[r=4, attn_matrices=['q','k','v'], intermediate_lora=True]", {}),
    ],
)
def test_lora_of_peft_computes_the_same(tmp_path: Path, model_type: str, config: str, changes: dict[str, Any]) -> None:
    """The library with the values of PEFT's folder gives the hidden states of W + alpha / r * B A, in float64.

    A head without named classes is left out.
    """
    from adapters import AutoAdapterModel

    config = config.replace("r=4,", "r=4, alpha=8,") if "alpha" not in config else config
    model = write_peft(tmp_path, model_type, changes)
    job = job_from(tmp_path, tmp_path / "peft", config, **{"model.dtype": "float64"})
    ours = AutoAdapterModel.from_pretrained(str(tmp_path / "model"), dtype=torch.float64).eval()
    ours.add_adapter("ringtune", config=config, set_active=True)
    ours.to(torch.float64)
    odd = ours.load_state_dict(tensors_of(job), strict=False)
    assert not odd.unexpected_keys and not any(".ringtune." in name for name in odd.missing_keys)
    ids = torch.tensor([[1, 5, 7, 2]])
    with torch.no_grad():
        own = ours.base_model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        theirs = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
    assert float((own - theirs).norm() / theirs.norm()) < 1e-12


def test_lora_of_peft_in_some_blocks_is_an_adapter_that_leaves_out_the_others(tmp_path: Path) -> None:
    """A job with all blocks is told the configuration; other matrices in some blocks have none."""
    write_peft(tmp_path, "bert", {"layers_to_transform": [1]})
    with pytest.raises(JobError, match=r"set adapter\.config = 'lora\[.*leave_out=\[0, 2, 3\].*\]'"):
        tensors_of(job_from(tmp_path, tmp_path / "peft", "lora[r=4, alpha=8, output_lora=True]"))
    file = tmp_path / "peft" / "adapter_model.safetensors"
    others = {name.replace("layer.1.", "layer.0."): value for name, value in load_file(file).items() if "query" in name}
    save_file(load_file(file) | others, file)
    with pytest.raises(JobError, match="has LoRA beside other matrices in some blocks than in others"):
        tensors_of(job_from(tmp_path, tmp_path / "peft", "lora[r=4, alpha=8, output_lora=True]"))


def _write(folder: Path, name: str, value: object) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


def _edit(name: str, **changes: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        for key, value in changes.items():
            (content["config"] if key in content.get("config", {}) else content)[key] = value
        _write(folder, name, content)

    return edit


def _tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "adapter.safetensors")
        change(tensors)
        save_file(tensors, folder / "adapter.safetensors")

    return edit


def _with_code(folder: Path) -> None:
    (folder / "adapter.safetensors").unlink()
    (folder / "pytorch_adapter.bin").write_bytes(pickle.dumps(print))


def _with_code_in_head(folder: Path) -> None:
    (folder / "model_head.safetensors").unlink()
    (folder / "pytorch_model_head.bin").write_bytes(pickle.dumps(print))
    tensors = load_file(folder / "adapter.safetensors")
    (folder / "adapter.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_adapter.bin")


def _expanded(folder: Path) -> None:
    (folder / "adapter.safetensors").unlink()
    torch.save({"a": torch.zeros(1).expand(1 << 23)}, folder / "pytorch_adapter.bin")


def _packed(folder: Path) -> None:
    """Zeros that take a thousandth of their bytes, which torch would unpack."""
    _expanded(folder)
    torch.save({"a": torch.zeros(1 << 20)}, folder / "whole.bin")
    packed = zipfile.ZipFile(folder / "pytorch_adapter.bin", "w", zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(folder / "whole.bin") as whole, packed:
        for name in whole.namelist():
            packed.writestr(name, whole.read(name))


def _twice(own: dict[str, torch.Tensor]) -> None:
    name, value = next((name, value) for name, value in own.items() if ".last-month." in name)
    own[name.replace(".last-month.", ".ringtune.")] = value.clone()


ADAPTER_CONFIG = "adapter_config.json"
BAD: list[tuple[Callable[[Path], object], dict[str, object], str]] = [
    (lambda folder: shutil.rmtree(folder), {}, "is no folder; give the --out of a run, or a folder of"),
    (lambda folder: (folder / ADAPTER_CONFIG).unlink(), {}, "has no adapter_config.json; give the --out of a run"),
    (lambda folder: (folder / "adapter.safetensors").unlink(), {}, "has no adapter.safetensors or pytorch_adapter.bin"),
    (lambda folder: _write(folder, ADAPTER_CONFIG, "{"), {}, "can't be read"),
    (lambda folder: _write(folder, "config.json", {}), {}, "is a whole model; set model.path = '.*', and remove"),
    (lambda folder: _write(folder, "model/config.json", {}), {}, "set model.path = '.*/model', and remove"),
    (lambda folder: _write(folder, "users/anna/x", ""), {}, "has an adapter for each user; give one, such as .*anna"),
    (lambda folder: _write(folder, "adapter/blocks.safetensors", ""), {}, "no adapter; put them into a model folder"),
    (_edit(ADAPTER_CONFIG, reduction_factor=4), {}, r"set adapter\.config = 'seq_bn\[reduction_factor=4\]'"),
    (_edit(ADAPTER_CONFIG, inv_adapter="glow"), {}, r"inv_adapter = 'glow' can't be run: .*use seq_bn"),
    (_edit(ADAPTER_CONFIG, model_type="t5"), {}, "is for a model of the type 't5'; supported are bert"),
    (_edit(ADAPTER_CONFIG, peft_type="IA3"), {}, "peft_type 'IA3'; only LORA of PEFT"),
    (_edit(ADAPTER_CONFIG, peft_type="LORA", use_dora=True), {}, "its DoRA has other names and shapes; merge it"),
    (_edit(ADAPTER_CONFIG, peft_type="LORA", modules_to_save=["wte"]), {}, "a copy of the whole module wte; merge it"),
    (_tensors(lambda own: own.update({"bert.encoder.layer.9.x": torch.ones(1)})), {}, r"layer\.9\.x, the model model"),
    (_tensors(lambda own: next(iter(own.values())).fill_(math.nan)), {}, "not finite: its training diverged"),
    (
        _tensors(lambda own: own.update(dict.fromkeys([next(iter(own))], torch.ones(2, dtype=torch.int8)))),
        {},
        "of I8; sup",
    ),
    (_tensors(_twice), {}, "two tensors have one name; the folder has several adapters"),
    (lambda folder: (folder / "users").mkdir(), {}, r"is damaged \(IndexError: .*copy the folder again"),
    (_edit("head_config.json", label2id={"a": 0, "b": "1"}), {}, r"is damaged \(TypeError: "),
    (_packed, {}, r"pytorch_adapter\.bin unpacks to 4,[0-9,]+ bytes, more than 2 times its own"),
    (_expanded, {}, r"pytorch_adapter\.bin has tensors larger than the file"),
    (_with_code_in_head, {}, r"can't be read: pytorch_model_head\.bin has more than tensors, or is damaged "),
    (_with_code, {}, "has more than tensors, or is damaged .*use_safetensors=True"),
    (lambda folder: None, {"adapter.config": "full"}, "model's own weights train; give the folder of a trained model"),
    (
        lambda folder: None,
        {"offload.mode": "auto", "offload.merged": True, "offload.users": "collaboration"},
        "once for each user; set offl",
    ),
]


@cases(("spoil", "keys", "message"), BAD)
def test_folder_that_can_not_be_taken_over_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Path], object],
    keys: dict[str, Any],
    message: str,
) -> None:
    """Before anything is started: the error names folder, file or key, and the remedy."""
    monkeypatch.setattr("coordinator.api.arguments.subprocess.run", calling(pickled))
    plain = folder_with_adapter("seq_bn")
    folder = shutil.copytree(plain / "from.adapter", tmp_path / "mine")
    spoil(folder)
    with pytest.raises(RingTuneError, match=message):
        with_initial_digest(job_from(plain, folder, **keys))


def test_invertible_adapter_that_does_not_fit_its_configuration_is_refused(tmp_path: Path) -> None:
    """Before anything is started: tensors that are missing, and those of an invertible adapter that nobody needs."""
    whole = folder_with_adapter("seq_bn_inv")
    tensors_of(job_from(whole, whole / "from.adapter", "seq_bn_inv"))
    folder = shutil.copytree(whole / "from.adapter", tmp_path / "mine")
    _tensors(lambda own: own.pop(next(name for name in own if ".invertible_adapters." in name)))(folder)
    with pytest.raises(
        JobError, match=r"has 7 tensors of an invertible .* 'seq_bn_inv' needs 8; copy the folder again"
    ):
        tensors_of(job_from(whole, folder, "seq_bn_inv"))
    _edit(ADAPTER_CONFIG, inv_adapter=None, inv_adapter_reduction_factor=None)(folder)
    with pytest.raises(JobError, match=r"has 7 tensors of an invertible adapter, .* needs 0"):
        tensors_of(job_from(whole, folder))


@cases(
    ("change", "message"),
    [
        (lambda own: own.popitem(), r"adapter\.from lacks bert\..*; it belongs to another adapter\.config"),
        (
            lambda own: own.update({name: value[:1].clone() for name, value in [*own.items()][-1:]}),
            r"has bert\.encoder\..* of shape \[1.*\], this model needs \[",
        ),
        (
            lambda own: own.update({name: value.double().fill_(1e300) for name, value in own.items()}),
            r"adapter\.from has bert\..* with numbers beyond torch\.float32; take another one",
        ),
    ],
)
def test_values_of_another_shape_are_refused_at_the_node(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    """When a node builds its part, before the first step: the error names tensor and both shapes."""
    plain = folder_with_adapter("seq_bn")
    folder = shutil.copytree(plain / "from.adapter", tmp_path / "mine")
    _tensors(change)(folder)
    job = job_from(plain, folder)
    path = tmp_path / "initial.safetensors"
    path.write_bytes(bytes(initial_values(job, unpickled)))
    with pytest.raises(IntegrityError, match=message):
        load_initial(build_skeleton(plain / "model", job), path)


def test_head_of_other_classes_begins_anew(tmp_path: Path) -> None:
    """It is taken over for the same classes in the same order only, and one line says so."""
    plain = folder_with_adapter("seq_bn")
    job = job_from(plain, plain / "from.adapter")
    path = tmp_path / "initial.safetensors"
    path.write_bytes(bytes(initial_values(job, unpickled)))
    saved = load_file(plain / "from.adapter" / "model_head.safetensors")
    own = {name.removeprefix("heads.last-month."): value for name, value in saved.items()}
    metadata = TensorFile(FilePieces(path), where="test").metadata
    for labels, is_taken in ((LABELS, True), (LABELS[::-1], False), (("bad", "fair", "good"), False)):
        skeleton = build_skeleton(plain / "model", job)
        head = task_of(job.model.task).add(skeleton.model, labels)
        before = {name: value.clone() for name, value in head.state_dict().items()}
        load_initial(skeleton, path, head_of=(job.model.task, labels))
        wanted = own if is_taken else before
        assert all(torch.equal(value, wanted[name]) for name, value in head.state_dict().items())
        assert bool(head_problem(metadata, job.model.task, labels)) is not is_taken
        note = head_note(metadata, job.model.task, labels)
        assert ("the head begins from there too" in note) is is_taken
        assert ("a new head trains" in note) is not is_taken
    assert "its head is for sequence-classification" in head_note(metadata, "question-answering", ())
    assert not head_note({}, "causal-lm", ())
