"""The folder of a finished run, written by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy
from safetensors.numpy import save

from ringtune.models.adapter_config import auxiliary_of
from ringtune.models.auxiliary_models import describe
from ringtune.schedule.course import COLLABORATION
from ringtune.schedule.methods import Everything
from ringtune.schedule.placement import CREDITS
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import Owner
from ringtune.storage.durable import mark
from ringtune.techniques.offload import helped
from tests.support.fake_agents import job
from tests.support.model_folder import bert_shapes, safetensors_bytes, write_model
from tests.support.plans import changed, make_plan

LABELS = ("neg", "pos")
NUM_BLOCKS = 4
LORA = "lora[r=2,alpha=4,attn_matrices=['q']]"
MIXTURE = "lora[r=2,attn_matrices=['q'],leave_out=[0]]|linear[attn_matrices=['v']]"
AUXILIARY = "linear[alpha=0.5,attn_matrices=['q']]"


def plan(**changes: object) -> Plan:
    """The plan of a run of two owners."""
    owners = (Owner(node="alice", train_rows=9, eval_rows=3), Owner(node="bob", train_rows=9, eval_rows=2))
    slices = [("alice", 0, 2), ("bob", 2, 4)]
    made = make_plan(slices, ["alice", "bob"], num_blocks=NUM_BLOCKS, max_length=8, hidden_size=8, labels=LABELS)
    return changed(made, **{"owners": owners, "credits": CREDITS, **changes})


def write_run(folder: Path) -> Path:
    """A run's folder: job, plan, report and adapter."""
    (folder / "adapter").mkdir(parents=True)
    mark(folder, "run")
    wanted = job(model__path="/srv/carol/models/tiny", data__train="/srv/carol/rows/train.csv")
    (folder / "job.toml").write_text(wanted.to_toml())
    (folder / "plan.json").write_text(json.dumps(plan().to_json()))
    report = {"steps": 8, "wall_s": 61.5, "version": "0.1.0", "eval": {"accuracy": 0.8, "loss": 0.5, "count": 5}}
    (folder / "report.json").write_text(json.dumps(report))
    for name, content in adapter_files().items():
        (folder / "adapter" / name).write_bytes(content)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its content, by its path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def texts_instead(folder: Path) -> Path:
    """Make a run one that learned to write."""
    text = (folder / "job.toml").read_text()
    (folder / "job.toml").write_text(text.replace('task = "sequence-classification"', 'task = "causal-lm"'))
    (folder / "plan.json").write_text(json.dumps(plan(labels=()).to_json()))
    return folder


def own_weights_instead(folder: Path) -> None:
    """Make a run one that trained the blocks' own weights."""
    (folder / "job.toml").write_text((folder / "job.toml").read_text().replace('config = "seq_bn"', 'config = "full"'))
    (folder / "adapter/adapter_config.json").unlink()
    (folder / "adapter/adapter.safetensors").rename(folder / "adapter/blocks.safetensors")


def auxiliary_instead(folder: Path) -> None:
    """Make a run one that trained ``linear``, beside the queries of each block."""
    job_file, adapter = folder / "job.toml", folder / "adapter"
    job_file.write_text(job_file.read_text().replace('config = "seq_bn"', f'config = "{AUXILIARY}"'))
    (adapter / "adapter_config.json").unlink()
    described = describe(auxiliary_of(AUXILIARY), name="ringtune", model_type="bert", model_name="tiny")
    (adapter / "adapter.json").write_text(json.dumps(described))
    tensors = {
        f"bert.encoder.layer.{block}.attention.self.query.ringtune.weight": numpy.ones((8, 8), dtype=numpy.float32)
        for block in range(NUM_BLOCKS)
    }
    (adapter / "adapter.safetensors").write_bytes(save(tensors))


def mixture_instead(folder: Path) -> None:
    """Make a run one that trained LoRA beside the queries of all blocks but the first, and ``linear`` beside values."""
    job_file, adapter = folder / "job.toml", folder / "adapter"
    job_file.write_text(job_file.read_text().replace('config = "seq_bn"', f'config = "{MIXTURE}"'))
    (adapter / "adapter_config.json").unlink()
    library = {"config": {"r": 2, "leave_out": [0]}, "name": "ringtune", "model_name": "tiny", "version": "1.3.0"}
    described = describe(auxiliary_of(MIXTURE), name="ringtune", model_type="bert", model_name="tiny", library=library)
    (adapter / "adapter.json").write_text(json.dumps(described))
    tensors = {}
    for block in range(NUM_BLOCKS):
        where = f"bert.encoder.layer.{block}.attention.self"
        tensors[f"{where}.value.ringtune.weight"] = numpy.ones((8, 8), dtype=numpy.float32)
        if block:
            tensors[f"{where}.query.loras.ringtune.lora_A"] = numpy.ones((2, 8), dtype=numpy.float32)
            tensors[f"{where}.query.loras.ringtune.lora_B"] = numpy.ones((8, 2), dtype=numpy.float32)
    (adapter / "adapter.safetensors").write_bytes(save(tensors))


def users_instead(folder: Path, users: str) -> None:
    """Make a run one in which alice and bob have adapters of their own: LoRA beside the queries, of ones and twos."""
    wanted = job(
        model__path="/srv/carol/models/tiny",
        data__train="/srv/carol/rows/train.csv",
        train__method="all",
        adapter__config=LORA,
        offload__mode={"alice": "carol", "bob": "carol"},
        offload__users=users,
        offload__merged=users == COLLABORATION,
    )
    (folder / "job.toml").write_text(wanted.to_toml())
    made = helped(plan(method=Everything()), wanted.offload.helpers, wanted.offload.helper_settings)
    (folder / "plan.json").write_text(json.dumps(made.to_json()))
    shutil.rmtree(folder / "adapter")
    config = {"config": {"r": 2, "alpha": 4, "leave_out": []}, "model_name": "tiny", "model_type": "bert"}
    for number, user in enumerate(("alice", "bob"), start=1):
        own = folder / "users" / user
        own.mkdir(parents=True)
        for name, content in adapter_files().items():
            (own / name).write_bytes(content)
        (own / "adapter_config.json").write_text(json.dumps({**config, "version": "adapters.1.3.0"}))
        tensors = {
            f"bert.encoder.layer.{block}.attention.self.query.loras.ringtune.{name}": numpy.full(
                shape, number, dtype=numpy.float32
            )
            for block in range(NUM_BLOCKS)
            for name, shape in (("lora_A", (2, 8)), ("lora_B", (8, 2)))
        }
        (own / "adapter.safetensors").write_bytes(save(tensors))


def adapter_files() -> dict[str, bytes]:
    """A small adapter of every block, and a head of two classes."""
    tensors = {
        f"bert.encoder.layer.{block}.output.adapters.ringtune.{part}": numpy.full((2, 3), block, dtype=numpy.float32)
        for block in range(NUM_BLOCKS)
        for part in ("adapter_down.0.weight", "adapter_up.weight")
    }
    adapter = {"config": {"leave_out": []}, "model_name": "tiny", "model_type": "bert", "version": "adapters.1.3.0"}
    head = {"config": {"label2id": {"neg": 0, "pos": 1}}, "model_name": "tiny", "name": "ringtune"}
    return {
        "adapter.safetensors": save(tensors),
        "adapter_config.json": json.dumps(adapter).encode(),
        "head_config.json": json.dumps(head).encode(),
        "model_head.safetensors": save({"heads.ringtune.1.weight": numpy.ones((2, 8), dtype=numpy.float32)}),
    }


def whole_model_instead(folder: Path) -> Path:
    """Make a run one that trained all parameters of a small BERT; returns the folder of its model."""
    wanted = job(model__path="/srv/carol/models/tiny", data__train="/srv/carol/rows/train.csv", train__method="hift")
    (folder / "job.toml").write_text(wanted.to_toml())
    shutil.rmtree(folder / "adapter")
    config = {"num_hidden_layers": NUM_BLOCKS}
    shapes = bert_shapes(prefix="bert.", config=config) | {"classifier.weight": (2, 8), "classifier.bias": (2,)}
    described = {"architectures": ["BertForSequenceClassification"], "label2id": {"neg": 0, "pos": 1}}
    model = write_model(folder / "model", config=config | described, weights=safetensors_bytes(shapes))
    (model / "tokenizer.json").write_text("{}")
    return model
