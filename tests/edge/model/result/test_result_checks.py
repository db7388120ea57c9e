"""What nodes really hand in passes the coordinator's checks, whatever the family and the adapter."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from coordinator.records.result_checks import Wanted, check_parts
from edge.model.heads import task_of
from edge.model.result.saving import result_files
from edge.model.safetensors_files import SafetensorsFiles
from edge.model.skeleton import build_skeleton
from edge.model.slice import materialise
from ringtune.costs.facts.model_facts import model_facts
from ringtune.files.pieces import Pieces
from ringtune.jobs.job import Job, parse_job
from ringtune.models.families import FAMILIES
from tests.edge.model.test_sizes import CONFIGS, LORA_EVERYWHERE, OWN_KINDS
from tests.support import tiny_families, whole_models
from tests.support.plans import make_plan
from tests.support.tiny_data import labels_of

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
    skeleton, head, task = build_skeleton(folder, job), None, job.model.task
    if is_owner:
        head = task_of(task).add(skeleton.model, LABELS if labels_of(task) else ())
    kind = getattr(torch, job.model.dtype)
    with SafetensorsFiles(folder) as weights:
        materialise(skeleton, weights, blocks=blocks, with_embedding=is_owner, dtype=kind, device=torch.device("cpu"))
        if head is not None:
            task_of(task).connect(skeleton, head, weights)
            head.to(kind)
    return result_files(skeleton, task, folder, without_blocks=(), with_head=is_owner)


@pytest.mark.parametrize("model_type", tiny_families.MODEL_TYPES)
@pytest.mark.sampled(1)
def test_adapters_and_own_weights_of_every_family_pass(tmp_path: Path, model_type: str) -> None:
    """Every configuration, also those that leave blocks out or have a tensor under two names."""
    folder = tiny_families.write_family(tmp_path, model_type, num_blocks=2)
    for task in FAMILIES[model_type].tasks:
        first = task == FAMILIES[model_type].tasks[0]
        for adapter in (*CONFIGS, LORA_EVERYWHERE, *OWN_KINDS, *LEFT_OUT, "full") if first else ("seq_bn",):
            if (model_type, adapter) == ("gpt2", "dora") or (adapter == "mtl_lora" and model_type in WITHOUT_MTL):
                continue  # the library itself fails
            job = _job(folder, task, adapter)
            files = {
                "a": _part(folder, job, [0], is_owner=False),
                "b": _part(folder, job, [1], is_owner=True),
            }
            wanted = Wanted(job, PLAN, model_facts(folder, job), "b")
            check_parts(files, wanted)
            for node, own in files.items():
                assert sum(content.size_bytes for content in own.values()) < wanted.most_bytes(node)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("model_type", tiny_families.MODEL_TYPES)
@pytest.mark.sampled(5)
def test_whole_models_of_every_family_pass(tmp_path: Path, model_type: str, dtype: str) -> None:
    """With each task, with a pooler that nobody trains and without."""
    folder = tiny_families.write_family(tmp_path, model_type)
    for task in FAMILIES[model_type].tasks:
        job = _job(folder, task, "", dtype, "hift")
        files = whole_models.parts(folder, task, dtype=dtype)
        plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["b"], labels=labels_of(task))
        wanted = Wanted(job, plan, model_facts(folder, job), "b")
        check_parts(files, wanted)
        for node, own in files.items():
            assert sum(content.size_bytes for content in own.values()) < wanted.most_bytes(node)
