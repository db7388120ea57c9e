"""New prediction heads have the bits of AdapterHub's: initial values, logits, gradients, and what is saved of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters.loading import PredictionHeadLoader
from safetensors.torch import load
from transformers.modeling_outputs import BaseModelOutput

from edge.model.heads import NUMBER, task_of
from edge.model.prediction_heads import Head
from edge.model.result import result_files
from edge.model.skeleton import build_skeleton
from ringtune.job.job import Job, Model, Train
from ringtune.models.families import FAMILIES
from ringtune.models.family import LANGUAGE_TASKS, REGRESSION
from tests.support import reference
from tests.support.plans import make_plan
from tests.support.stock_plugged import interface_of, is_plugged
from tests.support.tiny_data import labels_of
from tests.support.tiny_families import MODEL_TYPES


def outputs(head: Any, last: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """Logits of a head, as it is called here, in AdapterHub, or in an architecture of transformers."""
    found: torch.Tensor
    if isinstance(head, Head):
        found = head(last, cls_output=rows)
        return found
    if isinstance(head, torch.nn.Linear):
        found = head(last[:, 0] if rows is None else rows)
        return found
    return reference.outputs_of(head(BaseModelOutput(last_hidden_state=last), cls_output=rows, return_dict=True))


def bits(head: Any, *, reads_last: bool, dropout_seed: int) -> list[torch.Tensor]:
    """Initial values of a head, and its logits and gradients for a hidden state, with dropout."""
    draws = torch.Generator().manual_seed(1)
    last = torch.randn(2, 5, 32, generator=draws, requires_grad=True)
    rows = torch.randn(2, 32, generator=draws, requires_grad=True) if reads_last else None
    torch.manual_seed(dropout_seed)
    logits = outputs(head.train(), last, rows)
    values = list(head.parameters())
    leaves = [leaf for leaf in (last, rows, *values) if leaf is not None]
    grads = torch.autograd.grad(logits.square().sum(), leaves, allow_unused=True)
    return [value.detach() for value in (*values, logits, *grads) if value is not None]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_heads_have_the_bits_of_the_library(family: Callable[[str], Path], tmp_path: Path, model_type: str) -> None:
    """Of every task with a new head; and the library's writer gives the same files."""
    folder = family(model_type)
    for task in sorted({*FAMILIES[model_type].tasks} - {*LANGUAGE_TASKS}):
        job, labels = Job(model=Model(path=str(folder), task=task), train=Train(dropout=0.2)), labels_of(task)
        torch.manual_seed(5)
        skeleton = build_skeleton(folder, job)
        head = task_of(task).add(skeleton.model, labels)
        stock = reference.whole_model(job, make_plan([("a", 0, 2)], ["a"], num_blocks=2, labels=labels), folder)
        wanted = stock.heads[stock.active_head]
        list(wanted.modules())[-1]._forward_hooks.clear()  # a reference gives padding no share in an answer
        for reads_last in (False, True):
            mine, theirs = (bits(one, reads_last=reads_last, dropout_seed=9) for one in (head, wanted))
            assert len(mine) == len(theirs) > 3 and all(map(torch.equal, mine, theirs)), task
        stock.config.name_or_path = skeleton.model.config.name_or_path
        out = tmp_path / task
        names = {label: index for index, label in enumerate(labels or (NUMBER,))}
        if is_plugged(model_type):
            del stock.heads  # those of the reference
            stock.config.label2id = names
        elif task == REGRESSION:
            wanted.config["label2id"] = names
        PredictionHeadLoader(stock, use_safetensors=True).save(str(out), reference.NAME)
        saved = result_files(skeleton, task, folder, without_blocks=(), with_head=True)
        files = {name: bytes(content) for name, content in saved.items()}
        assert files["head_config.json"] == (out / "head_config.json").read_bytes()
        ours, its = load(files["model_head.safetensors"]), load((out / "model_head.safetensors").read_bytes())
        assert ours.keys() == its.keys() and all(torch.equal(ours[name], its[name]) for name in its), task
        if is_plugged(model_type):
            interface_of(model_type)._save(str(out), stock.config)
            assert files["adapter_interface.json"] == (out / "adapter_interface.json").read_bytes()
