"""Parts of a whole model as two nodes would hand them in, each parameter moved as if it trained; and runs with LoRA.

A run of the second kind left a LoRA of random values, beside the model that has it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from coordinator.run.result_files import result_folder
from edge.data.tokens import Batch
from edge.model.heads import task_of
from edge.model.result import result_files
from edge.model.skeleton import Skeleton, build_skeleton
from edge.model.slice import DTYPES, BlockRunner, materialise
from edge.model.tensor_files import SafetensorsFiles
from ringtune.job.job import Job, parse_job
from ringtune.models.family import CAUSAL_LM
from ringtune.models.result_files import model_result
from ringtune.storage.durable import mark
from ringtune.storage.pieces import Pieces
from tests.support.plans import make_plan
from tests.support.tiny_data import labels_of
from tests.support.tiny_families import write_family

NUM_BLOCKS = 4


def built(
    folder: Path,
    job: Job,
    blocks: Iterable[int],
    *,
    labels: Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
) -> Skeleton:
    """What a node hosts as a job begins; with ``labels`` of an owner, with embedding and head, else blocks alone."""
    task, kind, cpu = task_of(job.model.task), dtype or DTYPES[job.model.dtype], torch.device("cpu")
    with torch.random.fork_rng(devices=[]):
        skeleton = build_skeleton(folder, job)
        head = None if labels is None else task.add(skeleton.model, tuple(labels))
    with SafetensorsFiles(folder) as weights:
        materialise(skeleton, weights, blocks=blocks, with_embedding=head is not None, dtype=kind, device=cpu)
        if head is not None:
            task.connect(skeleton, head, weights)
            head.to(kind)
    return skeleton


def hosted(
    folder: Path, task: str, blocks: Iterable[int], *, is_owner: bool, trained: bool = True, dtype: str = "float32"
) -> Skeleton:
    """What one node hosts of a model in whose runs all parameters train; ``trained`` moves every one of them."""
    text = f'[model]\npath = "{folder}"\ntask = "{task}"\ndtype = "{dtype}"\n[train]\nmethod = "hift"\n'
    skeleton = built(folder, parse_job(text, source="test"), blocks, labels=labels_of(task) if is_owner else None)
    skeleton.model.eval()
    if trained:
        # once for each memory, so that what is tied stays tied
        moved: set[int] = set()
        for name, parameter in skeleton.model.named_parameters():
            if any(parameter.stride()) and parameter.data_ptr() not in moved:
                moved.add(parameter.data_ptr())
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                with torch.no_grad():
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return skeleton


class OfBlocks:
    """The model that a skeleton computes block by block, called as a model of the library with its head is."""

    def __init__(self, skeleton: Skeleton) -> None:
        self._skeleton, self._head = skeleton, skeleton.model.head

    def eval(self) -> OfBlocks:
        """Return the model: it never trains."""
        return self

    def get_labels(self) -> Any:
        """The names of the head's classes; None without."""
        return list(self._head.config.get("label2id") or ()) or None

    def __call__(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Run embedding, blocks and head."""
        ids = torch.zeros(0) if input_ids is None else input_ids
        mask = torch.ones(2, 1) if attention_mask is None else attention_mask
        batch = Batch(ids=ids, mask=mask, labels=ids, token_type_ids=torch.zeros_like(ids), pixels=pixel_values)
        runner = BlockRunner(self._skeleton, dropout=0.0, seed=0)
        hidden = self._skeleton.family.embed(self._skeleton.base, batch)
        context = runner.context(hidden, mask)
        hidden = runner.run(hidden, mask, context, 0, NUM_BLOCKS)
        last, more = self._skeleton.family.finish(self._skeleton.base, hidden, batch)
        logits, cap = self._head(last, **more), self._head.logit_cap
        if self._head.config["head_type"] == "question_answering":
            return dict(zip(("start_logits", "end_logits"), logits.unbind(-1), strict=True))
        return {"logits": cap * torch.tanh(logits / cap) if cap else logits}


def whole(folder: Path, task: str, *, trained: bool = True) -> Any:
    """The trained model as one process has it, with the head active."""
    return as_model(hosted(folder, task, range(NUM_BLOCKS), is_owner=True, trained=trained))


def as_model(skeleton: Skeleton) -> Any:
    """The model of a skeleton with all parts, with the head active."""
    return OfBlocks(skeleton)


def parts(folder: Path, task: str, *, dtype: str = "float32") -> dict[str, dict[str, Pieces]]:
    """What a node with blocks [0, 2) hands in, and an owner with the rest."""
    low = hosted(folder, task, range(2), is_owner=False, dtype=dtype)
    high = hosted(folder, task, range(2, NUM_BLOCKS), is_owner=True, dtype=dtype)
    return {
        "a": result_files(low, task, folder, without_blocks=(), with_head=False),
        "b": result_files(high, task, folder, without_blocks=(), with_head=True),
    }


def write_result(files: dict[str, dict[str, Pieces]], folder: Path, **more: Any) -> Path:
    """The folder of the trained model, merged as a coordinator does."""
    folder.mkdir(parents=True)
    for name, content in result_folder(files, model_result(), **more).items():
        (folder / name).write_bytes(b"".join(content))
    return folder


def inputs_of(model_type: str) -> dict[str, torch.Tensor]:
    """Two rows, one of them with padding; or two images."""
    if model_type == "vit":
        return {"pixel_values": torch.randn(2, 1, 12, 12, generator=torch.Generator().manual_seed(0))}
    return {
        "input_ids": torch.tensor([[2, 5, 6, 7, 8, 3], [2, 9, 10, 3, 0, 0]]),
        "attention_mask": torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0]]),
    }


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
        blocks, cpu = range(NUM_BLOCKS), torch.device("cpu")
        materialise(skeleton, weights, blocks=blocks, with_embedding=True, dtype=torch.float32, device=cpu)
        task_of(task).connect(skeleton, head, weights)
        for name, parameter in skeleton.model.named_parameters():
            if ".ringtune." in name and parameter.requires_grad:
                parameter.normal_(std=0.3)
    skeleton.model.eval()
    (folder / "run/adapter").mkdir(parents=True)
    mark(folder / "run", "run")
    (folder / "run/job.toml").write_text(job.to_toml())
    plan = make_plan([("a", 0, 4)], ["a"], num_blocks=NUM_BLOCKS, hidden_size=32, labels=labels)
    (folder / "run/plan.json").write_text(json.dumps(plan.to_json()))
    for name, content in result_files(skeleton, task, base, without_blocks=(), with_head=True).items():
        (folder / "run/adapter" / name).write_bytes(bytes(content))
    return folder / "run", skeleton
