"""Dropout: its seed is the documented one, and the job sets every probability."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from edge.model.skeleton import block_unit, seed_unit, unit_seed
from edge.runtime.executor import NodeExecutor
from tests.support import hand_ring as ring


def test_dropout_seed_is_the_documented_one() -> None:
    """The seed is 63 bits of a SHA-256 that any other implementation can compute."""
    digest = hashlib.sha256(b"3/17/2/block.5").digest()
    assert unit_seed(3, 17, 2, block_unit(5)) == int.from_bytes(digest[:8], "little") % 2**63


def test_dropout_seeds_as_torch_does_and_leaves_nothing_behind() -> None:
    """The numbers are those of ``torch.manual_seed``, which would keep each call for an accelerator of later."""
    torch.manual_seed(unit_seed(3, 17, 2, "head"))
    wanted, waiting = torch.rand(5), len(torch.cuda._queued_calls)
    for _ in range(10):
        seed_unit(3, 17, 2, "head")
    assert torch.equal(torch.rand(5), wanted)
    assert len(torch.cuda._queued_calls) == waiting


def test_dropout_sets_every_probability(model_folder: Path, tmp_path: Path) -> None:
    """Hidden, attention, head and adapter dropout all follow the job, whatever the model and adapter say."""
    job = ring.make_job(model_folder, train__dropout=0.25, adapter__config="seq_bn|lora")
    datasets = ring.make_datasets(job, model_folder, tmp_path, ("a",))
    plan = ring.make_plan(job, datasets, {"a": (0, 4)})
    model = NodeExecutor(plan, "a", job, model_folder, datasets["a"])._hosted.skeleton.model
    rates = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    parts: list[Any] = [module for name, module in model.named_modules() if name.endswith("attention.self")]
    attention = [getattr(part, "dropout_prob", part.dropout.p) for part in parts]
    assert len(attention) == 4
    assert set(rates) | set(attention) == {0.25}
