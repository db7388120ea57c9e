"""An agent chooses for each run what its heap does with freed memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from edge.agent import heap
from ringtune.jobs.job import Job, Model
from tests.support.plans import make_plan
from tests.support.tiny import write_model

PLAN = make_plan([("a", 0, 2)], ["a"], num_blocks=2)


def job_of(folder: Path) -> Job:
    """A job on a tiny model."""
    return Job(model=Model(path=str(folder))).with_overrides({"train.max_length": 64})


def chosen(monkeypatch: pytest.MonkeyPatch, folder: Path, memory_bytes: int) -> str:
    """What a heap is told with such a budget."""
    found: list[str] = []
    monkeypatch.setattr(heap, "keep_freed_memory", lambda: found.append("keep"))
    monkeypatch.setattr(heap, "return_freed_memory", lambda: found.append("return"))
    job = job_of(folder)
    model, besides_bytes = heap.facts_here(folder, job)
    heap.set_up_heap(PLAN, "a", job, model, memory_bytes=memory_bytes, data_bytes=0, besides_bytes=besides_bytes)
    return found[-1]


@pytest.mark.parametrize(("memory_bytes", "what"), [(1 << 30, "keep"), (1 << 10, "return")])
def test_heap_keeps_freed_memory_only_with_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_bytes: int, what: str
) -> None:
    """A budget near what the plan needs leaves nothing for a heap in pieces."""
    assert chosen(monkeypatch, write_model(tmp_path), memory_bytes) == what


@pytest.mark.parametrize(("memory_bytes", "what"), [(1 << 30, "keep"), (1 << 10, "return")])
def test_heap_of_a_node_with_some_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_bytes: int, what: str
) -> None:
    """A node that fetched the blocks that it hosts has no whole model; its files say what weights take."""
    path = write_model(tmp_path) / "model.safetensors"
    tensors = {name: value for name, value in load_file(path).items() if ".layer.0." not in name}
    save_file(tensors, path)
    _, besides_bytes = heap.facts_here(tmp_path, job_of(tmp_path))
    assert besides_bytes >= path.stat().st_size
    assert chosen(monkeypatch, tmp_path, memory_bytes) == what


def test_heap_of_a_node_that_only_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the configuration alone."""
    (write_model(tmp_path) / "model.safetensors").unlink()
    assert chosen(monkeypatch, tmp_path, 1 << 30) == "keep"
