"""Runs that left a LoRA of random values, beside the model that has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from edge.model.heads import task_of
from edge.model.result import result_files
from edge.model.skeleton import Skeleton, build_skeleton
from edge.model.slice import materialise
from edge.model.tensor_files import SafetensorsFiles
from ringtune.job.job import parse_job
from ringtune.models.family import CAUSAL_LM
from ringtune.storage.durable import mark
from tests.support import whole_models as whole
from tests.support.plans import make_plan
from tests.support.tiny_data import labels_of
from tests.support.tiny_families import write_family

ALL_MATRICES = "lora[r=2,alpha=6,attn_matrices=['q','v'],intermediate_lora=True,output_lora=True]"


def lora_run(folder: Path, model_type: str, task: str, config: str, **changes: Any) -> tuple[Path, Skeleton]:
    """The folder of a run that left random values, and its model; ``changes`` are of the base model's config.

    Without a ``model_type`` the base model is there.
    """
    base = folder / "base"
    if model_type:
        write_family(base, model_type, with_decoder=task == CAUSAL_LM, **changes)
    text = f'[model]\npath = "{base}"\ntask = "{task}"\n[adapter]\nconfig = "{config}"\n[data]\ntrain = "x"\n'
    job, labels = parse_job(text, source="test"), labels_of(task)
    with torch.random.fork_rng(devices=[]), SafetensorsFiles(base) as weights, torch.no_grad():
        torch.manual_seed(7)
        skeleton = build_skeleton(base, job)
        head = task_of(task).add(skeleton.model, labels)
        blocks, cpu = range(whole.NUM_BLOCKS), torch.device("cpu")
        materialise(skeleton, weights, blocks=blocks, with_embedding=True, dtype=torch.float32, device=cpu)
        task_of(task).connect(skeleton, head, weights)
        for name, parameter in skeleton.model.named_parameters():
            if ".ringtune." in name and parameter.requires_grad:
                parameter.normal_(std=0.3)
    skeleton.model.eval()
    (folder / "run/adapter").mkdir(parents=True)
    mark(folder / "run", "run")
    (folder / "run/job.toml").write_text(job.to_toml())
    plan = make_plan([("a", 0, 4)], ["a"], num_blocks=whole.NUM_BLOCKS, hidden_size=32, labels=labels)
    (folder / "run/plan.json").write_text(json.dumps(plan.to_json()))
    for name, content in result_files(skeleton, task, base, without_blocks=(), with_head=True).items():
        (folder / "run/adapter" / name).write_bytes(bytes(content))
    return folder / "run", skeleton
