"""Dropout is a function of (seed, step, micro-batch, unit), and runs only where the schedule says so."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from edge.model.skeleton import block_unit, seed_unit, unit_seed
from edge.runtime.executor import NodeExecutor
from ringtune.schedule.actions import Op, TensorKey
from ringtune.schedule.turns import StepKind, Turn
from tests.support import hand_ring as ring


def _host(model_folder: Path, folder: Path, *, kind: StepKind = StepKind.TRAIN, **overrides: object) -> NodeExecutor:
    """The host of all blocks, with one granted turn and a hidden state for micro-batches 0 and 1."""
    job = ring.make_job(model_folder, train__microbatches=2, **overrides)
    datasets = ring.make_datasets(job, model_folder, folder, ("a",), eval_rows=6)
    plan = ring.make_plan(job, datasets, {"b": (0, 4)})
    executor = NodeExecutor(plan, "b", job, model_folder, None)
    executor.grant(Turn(index=0, kind=kind, owner="a", round=0, first_seq=0, num_items=1, first_step=0, first_batch=0))
    hidden = torch.randn(3, 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for micro in range(2):
        executor.put_tensor(TensorKey("h", 0, micro, 0), hidden, torch.ones(3, 5, dtype=torch.int8))
    return executor


def _run(executor: NodeExecutor, op: Op, micro: int, start: int, stop: int) -> torch.Tensor:
    executor.run(ring.action(op, 0, micro, start, stop))
    return executor.take_tensor(TensorKey("h", 0, micro, stop))[0]


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


def test_dropout_depends_on_the_micro_batch_and_on_what_trains(model_folder: Path, tmp_path: Path) -> None:
    """What ran before doesn't matter. Frozen forwards give the same whatever the probability, also after others.

    Without dropout the generator is left alone.
    """
    first, again = (_host(model_folder, tmp_path, train__dropout=0.3) for _ in range(2))
    found = {}
    for state, (executor, micro) in enumerate(((first, 0), (again, 0), (first, 1))):
        torch.manual_seed(state)
        found[executor is first, micro] = _run(executor, Op.FORWARD, micro, 3, 4)
    assert torch.equal(found[True, 0], found[False, 0])
    assert not torch.equal(found[True, 0], found[True, 1])
    without = _host(model_folder, tmp_path)
    before = torch.get_rng_state()
    plain = _run(without, Op.FORWARD, 0, 3, 4)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(plain, found[True, 0])
    for executor in (again, without):
        assert torch.equal(_run(executor, Op.FORWARD_FREE, 1, 3, 4), plain)


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
