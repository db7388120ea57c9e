"""A tiny host with offloaded blocks, its helper, and what both have to equal: the same blocks with autograd."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from edge.model.skeleton import Skeleton, build_skeleton
from edge.model.slice import DTYPES, BlockRunner, materialise
from edge.model.tensor_files import SafetensorsFiles
from edge.techniques.offload.helper import AuxiliaryModels
from edge.techniques.offload.pairs import Capture, Pairs
from edge.techniques.offload.sites import adapter_weights, check_config, install
from ringtune.job.job import Job, parse_job
from tests.support.tiny_families import HIDDEN, IMAGE_TOKENS, write_family

NUM_BLOCKS = 2
LEAST = torch.tensor(1e-3)
CPU = torch.device("cpu")
FUSED_LORA = "lora[r=4,alpha=16,attn_matrices=['q','v'],intermediate_lora=True,output_lora=True]"
KINDS = (
    FUSED_LORA,
    "seq_bn[reduction_factor=4,scaling=3.0]",
    "double_seq_bn[reduction_factor=4]",
    "linear[alpha=0.5,attn_matrices=['q','v'],output_lora=True]",
    "lora[r=4,attn_matrices=['q']]|linear[alpha=0.5,attn_matrices=['v']]|mlp[hidden=8,alpha=0.5,attn_matrices=['k']]",
    "mlp[hidden=8,alpha=2.0,attn_matrices=['k','v'],intermediate_lora=True]",
)


def job_of(folder: Path, adapter: str, *, dropout: float = 0.0, dtype: str = "float64", task: str = "") -> Job:
    """A job on the model of a folder."""
    text = f'[model]\npath = "{folder}"\ntask = "{task or "sequence-classification"}"\ndtype = "{dtype}"\n'
    text += f'[adapter]\nconfig = "{adapter}"\n[train]\ndropout = {dropout}\nseed = 3\n'
    return parse_job(text, source="test")


def family_folder(root: Path, model_type: str) -> Path:
    """The folder of a tiny model, written once."""
    folder = root / model_type
    return folder if folder.exists() else write_family(folder, model_type, num_blocks=NUM_BLOCKS)


@dataclass(kw_only=True)
class Side:
    """Blocks of one process."""

    skeleton: Skeleton
    runner: BlockRunner
    capture: Any

    def forward(self, x: torch.Tensor, micro: int, *, dropped: bool, pairs: Pairs | None = None) -> Any:
        """Run all blocks with a graph."""
        mask = mask_of(x)
        with torch.no_grad():
            context = self.runner.context(x, mask)
        at = (0, micro) if dropped else None
        with contextlib.nullcontext() if self.capture is None else self.capture.recording(pairs):
            return self.runner.run(x, mask, context, 0, NUM_BLOCKS, train_at=at)

    def grads(self) -> dict[str, torch.Tensor]:
        """What autograd gave the weights."""
        return {name: p.grad for name, p in self.runner.parameters(0, NUM_BLOCKS).items() if p.grad is not None}


def side(folder: Path, job: Job, *, offloads: bool, with_signs: bool = False) -> Side:
    """Build the blocks; see ``Side``."""
    with torch.random.fork_rng(devices=[]):
        skeleton = build_skeleton(folder, job)
    with SafetensorsFiles(folder) as files:
        materialise(
            skeleton, files, blocks=range(NUM_BLOCKS), with_embedding=False, dtype=DTYPES[job.model.dtype], device=CPU
        )
    if offloads:
        check_config(job.adapter.config, skeleton, dropout=job.train.dropout)
    capture = Capture(skeleton, range(NUM_BLOCKS), with_signs=with_signs) if offloads else None
    return Side(
        skeleton=skeleton, runner=BlockRunner(skeleton, dropout=job.train.dropout, seed=job.train.seed), capture=capture
    )


def helper(folder: Path, job: Job, units: range = range(NUM_BLOCKS)) -> AuxiliaryModels:
    """The helper of all blocks."""
    return AuxiliaryModels(folder, job, units, DTYPES[job.model.dtype], CPU)


def moved(models: AuxiliaryModels) -> dict[str, torch.Tensor]:
    """Move all weights of a helper as if they had trained; return them."""
    generator = torch.Generator().manual_seed(11)
    for parameter in models.parameters(models.units.start, models.units.stop).values():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            parameter.add_(0.2 * noise.to(parameter.dtype))
    return models.weights(models.units.start, models.units.stop)


@dataclass(kw_only=True)
class Trio:
    """A host that offloads, its helper, and a process whose weights train by autograd; all weights are equal.

    ``made_of`` is what another helper can be built from.
    """

    host: Side
    helper: AuxiliaryModels
    plain: Side
    made_of: tuple[Path, Job]


def trio(folder: Path, adapter: str, *, with_signs: bool = False, **more: Any) -> Trio:
    """Build all three; see ``job_of`` for what can be said."""
    job = job_of(folder, adapter, **more)
    models = helper(folder, job)
    host, plain = (side(folder, job, offloads=offloads, with_signs=with_signs) for offloads in (True, False))
    tensors = moved(models)
    for one in (host, plain):
        install(adapter_weights(one.skeleton, range(NUM_BLOCKS)), tensors, where="the test")
    return Trio(host=host, helper=models, plain=plain, made_of=(folder, job))


def inputs_of(model_type: str, count: int, *, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Hidden states that enter the lowest block, and as many gradients of what leaves the top one."""
    generator = torch.Generator().manual_seed(5)
    tokens = IMAGE_TOKENS if model_type == "vit" else 6
    shape = (3, tokens, HIDDEN)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2 * count)]


def mask_of(x: torch.Tensor) -> torch.Tensor:
    """All tokens but the last of the first row."""
    mask = torch.ones(x.shape[:2], dtype=torch.int64)
    if x.shape[1] != IMAGE_TOKENS:
        mask[0, -1] = 0
    return mask


def apart(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    """The largest relative distance of two tensors of one name.

    A bias of the keys has no gradient but rounding, as softmax does not see what all keys share: it is measured
    against a thousandth.
    """
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())[:3]
    return max(float((ours[name] - theirs[name]).norm() / max(theirs[name].norm(), LEAST)) for name in theirs)


def helper_grads(models: AuxiliaryModels) -> dict[str, torch.Tensor]:
    """What pairs gave the weights of a helper."""
    found = models.parameters(models.units.start, models.units.stop).items()
    return {name: parameter.grad for name, parameter in found if parameter.grad is not None}


def plain_grads(both: Trio, xs: list[torch.Tensor], grads: list[torch.Tensor], *, dropped: bool) -> Iterator[Any]:
    """Train the plain process on some micro-batches; yield the gradient of each one's input."""
    for micro, (x, grad) in enumerate(zip(xs, grads, strict=True)):
        leaf = x.clone().requires_grad_()
        both.plain.forward(leaf, micro, dropped=dropped).backward(grad)
        yield leaf.grad


def task_of(model_type: str) -> str:
    """A task that the family has."""
    return "image-classification" if model_type == "vit" else ""
