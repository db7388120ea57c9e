"""The other side of ``tests.bench.pipelining``: a run's very steps by torch's own pipeline or data parallelism.

``python -m tests.bench.torch_steps RUN --as pipelining`` starts four processes with one compute thread each, which talk
by gloo, and prints one line of JSON: when each step ended, the losses, and processor seconds. Each process has the
allocator and the session of its own that an agent has, builds the whole plain model, and has all batches in memory
before the first step.

``pipelining``: ``Schedule1F1B`` over as many stages as processes, blocks split evenly, the embedding in the first one
and the head in the last one; masks do not travel. ``ddp``: ``DistributedDataParallel``, each process has its share of
the rows of each batch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from edge.data.dataset import OwnerDataset
from edge.data.tokens import Batch
from edge.machine.resources import keep_freed_memory
from edge.model.families.encoders import sdpa_mask
from ringtune.job.job import Job, load_job
from ringtune.machine.process import die_with_parent
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StepKind, items, turn_sequence
from tests.bench.plain import datasets_of
from tests.support import reference

WORLD = 4
KINDS = ("pipelining", "ddp")
_WAIT = timedelta(seconds=120)
Step = Callable[[Batch], float]


class Stage(nn.Module):
    """One stage of the plain model: some blocks, the embedding before the first, the head behind the last.

    Args:
        model: the whole one, a BERT; the stage takes its modules.
        index: of the stage.
    """

    def __init__(self, model: Any, index: int) -> None:
        super().__init__()
        blocks = [block for _, block in model.iter_layers()]
        first, last = len(blocks) * index // WORLD, len(blocks) * (index + 1) // WORLD
        self._base = [model.base_model]  # in a list it is no submodule
        self.embeddings = model.base_model.embeddings if index == 0 else None
        self.blocks = nn.ModuleList(blocks[first:last])
        self.head = model.heads[reference.NAME] if index == WORLD - 1 else None

    def forward(self, entering: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
        """Take token ids (B, T) or a hidden state (B, T, D); give a hidden state, or the logits (B, C)."""
        from adapters.context import ForwardContext

        hidden = entering
        if self.embeddings is not None:
            hidden = self.embeddings(input_ids=entering, token_type_ids=types)
        with ForwardContext(self._base[0], inputs_embeds=hidden, attention_mask=mask):
            whole_mask = sdpa_mask(hidden, mask)
            for block in self.blocks:
                hidden = block(hidden, whole_mask, None, None)[0]
        if self.head is None:
            return hidden
        logits: torch.Tensor = self.head(
            BaseModelOutput(last_hidden_state=hidden), attention_mask=mask, return_dict=True
        ).logits
        return logits


def pipelining(model: Any, job: Job, rank: int, like: Batch) -> Step:
    """One step of this process by torch's pipeline; the loss is the last stage's to tell, others tell 0."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # three seconds that no test needs

    part = Stage(model, rank)
    rows = like.rows(0, len(like.labels) // job.train.microbatches)
    hidden = torch.empty(*rows.ids.shape, model.config.hidden_size, requires_grad=True)
    with torch.no_grad():
        entering = rows.ids if rank == 0 else hidden
        leaving = part(hidden, rows.mask, rows.token_type_ids).requires_grad_() if rank == WORLD - 1 else hidden
    stage = PipelineStage(part, rank, WORLD, torch.device("cpu"), input_args=entering, output_args=leaving)
    schedule = Schedule1F1B(stage, job.train.microbatches, loss_fn=nn.functional.cross_entropy)
    optimizer = adamw(job, part.parameters())

    def step(batch: Batch) -> float:
        losses: list[torch.Tensor] = []
        more: dict[str, Any] = {"mask": batch.mask, "types": batch.token_type_ids}
        if rank == 0:
            schedule.step(batch.ids, **more, return_outputs=False)
        elif rank == WORLD - 1:
            schedule.step(target=batch.labels, losses=losses, **more, return_outputs=False)
        else:
            schedule.step(**more, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return sum(float(loss.detach()) for loss in losses) / len(losses) if losses else 0.0

    return step


def ddp(model: Any, job: Job, rank: int, like: Batch) -> Step:
    """One step of this process on its share of the rows; the loss is that share's part of the batch's."""
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = adamw(job, model.parameters())

    def step(batch: Batch) -> float:
        rows = len(batch.labels)
        mine = batch.rows(rows * rank // WORLD, rows * (rank + 1) // WORLD)
        loss = wrapped(**reference.inputs_of(model, mine), labels=mine.labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach()) / WORLD

    return step


def adamw(job: Job, parameters: Any) -> torch.optim.Optimizer:
    """Torch's AdamW, on the path that a node of the ring takes."""
    trained = [value for value in parameters if value.requires_grad]
    return torch.optim.AdamW(trained, lr=job.train.learning_rate, weight_decay=job.train.weight_decay, fused=True)


def work(folder: Path, kind: str, rank: int, rendezvous: Path, parent: int) -> dict[str, Any]:
    """Do all train steps of a run as one of the processes, unless the one that started them ends before.

    Returns:
        ``ends_s``: when each step ended, on the machine's monotonic clock; ``losses``; and ``cpu_s``, the processor
        seconds of this process until then.
    """
    if not die_with_parent(parent):
        raise RuntimeError("the process that started this one has ended")
    keep_freed_memory()
    torch.set_num_threads(1)
    job = load_job(folder / "job.toml")
    plan = Plan.from_json(json.loads((folder / "plan.json").read_text(encoding="utf-8")))
    model = reference.whole_model(job, plan, Path(job.model.path)).train()
    batches = batches_of(plan, datasets_of(job, plan))
    dist.init_process_group("gloo", f"file://{rendezvous}", timeout=_WAIT, rank=rank, world_size=WORLD)
    step = {"pipelining": pipelining, "ddp": ddp}[kind](model, job, rank, batches[0])
    done: dict[str, list[float]] = {"ends_s": [], "losses": [], "cpu_s": []}
    for batch in batches:
        done["losses"].append(step(batch))
        done["ends_s"].append(time.monotonic())
        done["cpu_s"].append(time.process_time())
    dist.destroy_process_group()
    return done


def batches_of(plan: Plan, datasets: Mapping[str, OwnerDataset]) -> list[Batch]:
    """The batch of each train step of the owners, in order."""
    for dataset in datasets.values():
        dataset.set_labels(plan.course.labels)
    course = plan.course
    every = (item for turn in turn_sequence(course) for item in items(course, turn))
    return [datasets[item.owner].batch(course, item) for item in every if item.kind is StepKind.TRAIN]


def together(parts: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    """The steps of all processes: a step ends with its last process; losses and processor seconds are summed."""
    ends_s, losses, cpu_s = (zip(*(part[key] for part in parts), strict=True) for key in ("ends_s", "losses", "cpu_s"))
    return {
        "ends_s": [max(times) for times in ends_s],
        "losses": [sum(each) for each in losses],
        "cpu_s": [sum(each) for each in cpu_s],
    }


def launch(folder: Path, kind: str) -> dict[str, list[float]]:
    """Start the processes, wait for all, and put together what they tell.

    Raises:
        RuntimeError: one failed.
    """
    with tempfile.TemporaryDirectory() as shared:
        command = [sys.executable, "-m", "tests.bench.torch_steps", str(folder), "--as", kind]
        command += ["--rendezvous", str(Path(shared) / "rendezvous"), "--parent", str(os.getpid())]
        workers = [
            # a session each, as agents have: the scheduler shares the cores out by session
            subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True, start_new_session=True)  # noqa: S603
            for rank in range(WORLD)
        ]
        try:
            outputs = [worker.communicate()[0] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
    if any(worker.returncode for worker in workers):
        raise RuntimeError(f"a process of torch's {kind} failed; see above")
    return together([json.loads(output.splitlines()[-1]) for output in outputs])


def main() -> None:
    """Read the command line, print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run: job.toml and plan.json are read")
    parser.add_argument("--as", dest="kind", choices=KINDS, default=KINDS[0])
    parser.add_argument("--rank", type=int, help="be this process of the four")
    parser.add_argument("--rendezvous", type=Path, help="file by which they find each other")
    parser.add_argument("--parent", type=int, help="process whose end ends this one")
    options = parser.parse_args()
    if options.rank is None:
        found = launch(options.run, options.kind)
    else:
        found = work(options.run, options.kind, options.rank, options.rendezvous, options.parent)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
