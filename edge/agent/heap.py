"""Choose how the process's heap treats freed memory in a run, by what the run needs here and what there is."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from edge.machine.allocator import keep_freed_memory, return_freed_memory
from ringtune.costs.facts.model_facts import computed_token_bytes, model_facts
from ringtune.costs.memory.estimate import node_memory
from ringtune.costs.memory.heap import has_room_for_heap
from ringtune.costs.profile import ModelFacts
from ringtune.errors import ModelError
from ringtune.jobs.job import Job
from ringtune.schedule.plan import Plan

_WIDENED: Final = 2
"""A 16-bit file in memory as float32, over its bytes."""


def facts_here(folder: Path, job: Job) -> tuple[ModelFacts, int]:
    """Return sizes of the model, and bytes of weights that they leave out: all, where only a part of them is here.

    Args:
        folder: of the model on this machine.
        job: of the run.

    Raises:
        ModelError: the folder can't be used.
    """
    try:
        return model_facts(folder, job), 0
    except ModelError:  # the weights of other nodes' blocks are not here
        pass
    files = (path.stat().st_size for path in folder.glob("*.safetensors"))
    return model_facts(folder, job, in_part=True), _WIDENED * sum(files)


def set_up_heap(
    plan: Plan, node: str, job: Job, model: ModelFacts, *, memory_bytes: int, data_bytes: int, besides_bytes: int = 0
) -> None:
    """Let the heap keep freed memory where the node has room for that; otherwise give it back at once.

    Args:
        plan: of the run.
        node: this one.
        job: of the run.
        model: sizes of the model.
        memory_bytes: the node's budget.
        data_bytes: of its rows and tokenizer.
        besides_bytes: of weights that ``model`` leaves out. Where these train, nothing is known of what they need, and
            the heap keeps freed memory.
    """
    if besides_bytes and job.method.full_parameters:
        keep_freed_memory()
        return
    needs = node_memory(
        plan,
        node,
        model,
        optimizer=job.train.optimizer,
        activation_token_bytes=computed_token_bytes(model, job),
        dtype=job.model.dtype,
        data_bytes=data_bytes,
    )
    if has_room_for_heap(needs, memory_bytes - besides_bytes):
        keep_freed_memory()
    else:
        return_freed_memory()
