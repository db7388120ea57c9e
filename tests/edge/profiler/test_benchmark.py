"""Every kind of work is timed through the executor, with what surrounds it, and leaves nothing behind."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import pytest
import torch

from edge.machine.resources import fit_heap, keep_freed_memory, peak_rss_bytes, release_memory, reset_peak, rss_bytes
from edge.model.slice import BlockRunner
from edge.profiler import benchmark
from edge.profiler.benchmark import decode, encode, handling_s
from edge.profiler.timing import Timer
from edge.runtime.executor import NodeExecutor
from edge.runtime.reporter import Reporter
from ringtune.costs.memory_terms import MemoryEstimate
from ringtune.costs.profile import PART_OF, WHOLE_WORKS, Work, WorkTime
from ringtune.errors import DeadlineError, PlanError, RingTuneError, StorageError
from ringtune.machine.resources import PROC, proc_bytes
from ringtune.models.families import DESCRIBED
from ringtune.models.family import CAUSAL_LM
from ringtune.schedule.actions import Action, Op
from ringtune.schedule.course import FrozenWeights
from tests.bench.memory import LlamaShape, write_llama
from tests.support import hand_ring as ring
from tests.support import tiny
from tests.support.plans import make_plan
from tests.support.torch_ring import Case, write_family_inputs


def test_handling_is_the_time_of_a_run_over_its_actions() -> None:
    """A clock that says 0 s before and 9 s after: all actions of the plan together took 9 s, so each takes a part."""
    plan = make_plan([("a", 0, 4)], ["a"], num_steps=2)
    times = iter((0.0, 9.0))
    found = handling_s(plan, "a", lambda: next(times))
    actions = 9.0 / found
    assert actions == pytest.approx(round(actions))
    assert actions > 2 * (1 + 4 + 1 + 1)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("error", "told"),
    [(PlanError("no such action"), "no such action"), (ZeroDivisionError("by zero"), "ZeroDivisionError at ")],
)
def test_handling_that_fails_ends_with_its_error(monkeypatch: pytest.MonkeyPatch, error: Exception, told: str) -> None:
    """An error in the loop ends the measurement; nobody waits for a last turn that never comes."""

    def run(self: object, action: Action) -> None:
        raise error

    monkeypatch.setattr(benchmark._Idle, "run", run)
    kind = type(error) if isinstance(error, RingTuneError) else RingTuneError
    with pytest.raises(kind, match=told):
        handling_s(make_plan([("a", 0, 4)], ["a"], num_steps=2), "a", lambda: 0.0)


def test_handling_is_no_time_of_reports_that_were_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports that take too long are an error, not a minute for every action."""
    monkeypatch.setattr(Reporter, "flush", lambda self, timeout_s: False)
    with pytest.raises(DeadlineError, match="60 s for the reports"):
        handling_s(make_plan([("a", 0, 4)], ["a"], num_steps=2), "a", lambda: 0.0)


_ERRORS = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@pytest.mark.parametrize("dtype", sorted(_ERRORS))
def test_decoded_hidden_state_is_the_encoded_one(dtype: str) -> None:
    """Within the type's precision; float16 travels times a power of two, which decoding has to undo."""
    hidden = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(5))
    came = decode(encode(hidden, torch.ones(2, 6, dtype=torch.int64), dtype), torch.float32)
    assert bool(((came - hidden).abs() <= hidden.abs() * _ERRORS[dtype]).all())


QUICK = Timer(window_s=0.0)
SIZED = {
    Work.FORWARD,
    Work.GRAPH,
    Work.GRAPH_LOWEST,
    Work.BACKWARD,
    Work.BACKWARD_LOWEST,
    Work.ENCODE,
    Work.DECODE,
    Work.FIT,
}
OWNERS = {Work.EMBED, Work.HEAD, Work.HEAD_FREE}


def points(found: tuple[WorkTime, ...]) -> dict[tuple[str, int, int], int]:
    """Which works were timed at which sizes, and how often."""
    return {(point.work, point.rows, point.tokens): point.samples for point in found}


def test_measure_times_every_work_of_an_owner_at_two_sizes(model_folder: Path, tmp_path: Path) -> None:
    """All works of the list are there, nothing twice; the folder for checkpoints is left as it was.

    What a run draws next does not depend on whether there was a measurement.
    """
    job = ring.make_job(model_folder, train__batch_size=5, train__microbatches=2, train__dropout=0.1)
    rows = ring.make_datasets(job, model_folder, tmp_path, ("a",), num_rows=20, eval_rows=3)["a"]
    before = torch.get_rng_state()
    measured = ring.make_bench(model_folder, job, rows).measure(QUICK, budget_s=0.0, disk=tmp_path / "state")
    assert torch.equal(torch.get_rng_state(), before)
    wanted = {(work, 3, tokens) for work in SIZED | OWNERS for tokens in (16, 8)}
    wanted |= {(work, 0, 0) for work in (Work.UPDATE, Work.UPDATE_HEAD, Work.HAND_OVER, Work.SAVE)}
    assert set(points(measured.work_times)) == wanted
    assert {work for work, _, _ in wanted} == {*WHOLE_WORKS, Work.FIT}
    assert all(point.samples == 3 and point.median_s > 0 for point in measured.work_times)
    assert 0 < measured.lowest_token_bytes < measured.activation_token_bytes
    assert list((tmp_path / "state").iterdir()) == []


def test_measure_needs_room_on_the_disk_for_checkpoints_only(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk a job that saves nothing is measured without that; one with checkpoints is refused."""

    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    plain, saving = (
        ring.make_bench(model_folder, ring.make_job(model_folder, train__checkpoint_every=every)) for every in (0, 5)
    )
    measured = plain.measure(QUICK, budget_s=0.0, disk=tmp_path)
    assert {point.work for point in measured.work_times} == SIZED | {Work.UPDATE}
    with pytest.raises(
        StorageError, match=r"a block's part of a checkpoint can't be written in .* are free; make room"
    ):
        saving.measure(QUICK, budget_s=0.0, disk=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_measure_of_a_part_of_a_block_computes_just_that_part(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every work of a block is timed with half of its subnets too, at both sizes, and says with which share.

    Half of the subnets of the one block are passed by, with a graph and without; whole blocks have no pattern.
    """
    seen: list[tuple[str, ...]] = []
    run = BlockRunner.run

    def watched(self: Any, *args: Any, patterns: Mapping[int, str] | None = None, **options: Any) -> torch.Tensor:
        seen.append(tuple((patterns or {}).values()))
        return run(self, *args, patterns=patterns, **options)

    monkeypatch.setattr(BlockRunner, "run", watched)
    bench = ring.make_bench(model_folder, ring.make_job(model_folder), subnets=4)
    measured = bench.measure(QUICK, budget_s=0.0, disk=None).work_times
    parts = {(found.work, found.tokens, found.share) for found in measured if found.work in PART_OF.values()}
    assert parts == {(work, tokens, 0.5) for work in PART_OF.values() for tokens in (16, 8)}
    assert {found.work for found in measured} == SIZED | {Work.UPDATE} | set(PART_OF.values())
    assert {found.share for found in measured if found.work in SIZED} == {1.0}
    first_part = seen.index(("1133",))
    assert set(seen[:first_part]) == {()}
    assert set(seen) == {(), ("1133",)}
    assert seen.count(("1133",)) >= 2 * 3 * 4


def test_measure_times_own_weights(model_folder: Path) -> None:
    """Without an adapter every work of a block and the update of its weights are timed, in parts too; no fits."""
    bench = ring.make_bench(model_folder, ring.make_job(model_folder, adapter__config="full"), subnets=2)
    measured = bench.measure(QUICK, budget_s=0.0, disk=None)
    assert {found.work for found in measured.work_times} == SIZED - {Work.FIT} | {Work.UPDATE} | {*PART_OF.values()}
    assert bench.activation_token_bytes() == pytest.approx(measured.activation_token_bytes)


def test_measure_of_one_block_bounds_what_it_does_not_have(tmp_path: Path) -> None:
    """A model of one block has none with trainable ones below: the lowest one's times stand for it, in parts too."""
    folder = tiny.write_model(tmp_path, num_blocks=1)
    measured = ring.make_bench(folder, ring.make_job(folder), subnets=2).measure(QUICK, budget_s=0.0, disk=None)
    by_work = {(point.work, point.tokens): point.median_s for point in measured.work_times}
    assert by_work[Work.GRAPH, 16] == by_work[Work.GRAPH_LOWEST, 16]
    assert {work for work, _ in by_work} >= set(PART_OF.values())


def test_measure_runs_the_actions_of_a_run(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same block is the lowest trainable one in one loop and has trainable ones below it in another.

    With ``leave_out`` for the upper blocks the highest of the others is timed, and it has a backward.
    """
    seen: list[tuple[Op, bool]] = []
    run = NodeExecutor.run

    def watched(self: NodeExecutor, action: Action) -> object:
        values = run(self, action)
        if action.op is Op.FORWARD:
            (graph,) = self._flows.of(action).graphs.values()
            seen.append((action.op, next(graph.tensors()).requires_grad))
        elif action.op is not Op.FORWARD_FREE:
            seen.append((action.op, False))
        return values

    plain, left_out = (
        ring.make_bench(model_folder, ring.make_job(model_folder, adapter__config=config))
        for config in ("seq_bn", "seq_bn[leave_out=[2,3]]")
    )
    wanted_bytes = plain.activation_token_bytes()
    monkeypatch.setattr(NodeExecutor, "run", watched)
    assert left_out.measure(QUICK, budget_s=0.0, disk=None).activation_token_bytes == wanted_bytes
    lowest = [(Op.FORWARD, False), (Op.BACKWARD, False), (Op.UPDATE, False)]
    above = [(Op.FORWARD, True), (Op.BACKWARD, False), (Op.UPDATE, False)]
    assert seen[:24] == 4 * lowest + 4 * above


@pytest.mark.parametrize(
    ("model_type", "task"), [(name, task) for name, kind in DESCRIBED.items() for task in kind.tasks]
)
@pytest.mark.sampled(2)
def test_measure_works_for_every_family_and_task(tmp_path: Path, model_type: str, task: str) -> None:
    """With rows of its own; images have one length, so half of the rows is the other size."""
    case = Case(folder=write_family_inputs(tmp_path, model_type, task), task=task, owners=("a",), microbatches=2)
    folder, job = case.folder / "model", case.job.with_overrides({"wire.dtype": "int8"})
    bench = ring.make_bench(folder, job, case.datasets()["a"])
    measured = bench.measure(QUICK, budget_s=0.0, disk=None)
    assert set(points(measured.work_times)) == {
        *((work, *size) for work in SIZED | OWNERS for size in bench.sizes),
        *((work, 0, 0) for work in (Work.UPDATE, Work.UPDATE_HEAD, Work.HAND_OVER)),
    }
    (rows, tokens), half = bench.sizes
    assert half == ((rows // 2, tokens) if task == "image-classification" else (rows, tokens // 2))


def test_bench_times_frozen_weights_as_they_are_held(model_folder: Path) -> None:
    """The block that is timed has them small; what a graph keeps stays the same."""
    job = ring.make_job(model_folder, model__dtype="float32")
    benches = [ring.make_bench(model_folder, job, frozen=frozen) for frozen in (None, FrozenWeights(dtype="int8"))]
    held = [bench._executor.hosted_bytes for bench in benches]
    assert held[1] < held[0]
    assert benches[1].activation_token_bytes() == benches[0].activation_token_bytes()


@pytest.mark.parametrize("is_owner", [False, True])
def test_measuring_needs_the_graph_of_one_micro_batch(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_owner: bool
) -> None:
    """Whatever their number; an owner embeds all of a batch, so that it has as many hidden states."""
    needs: list[int] = []
    monkeypatch.setattr(benchmark, "fit_heap", lambda estimate, _: needs.append(estimate.total_bytes))
    for count in (1, 4):
        job = ring.make_job(model_folder, train__batch_size=2 * count, train__microbatches=count)
        rows = ring.make_datasets(job, model_folder, tmp_path, ("a",), num_rows=20)["a"] if is_owner else None
        ring.make_bench(model_folder, job, rows)
    hidden_bytes = 2 * job.train.max_length * 32 * 8
    assert needs[1] - needs[0] == 3 * hidden_bytes * is_owner


MIB: Final = 1 << 20
SMALL = LlamaShape(blocks=2, width=64, inner=96, words=1000, heads=4, key_heads=2)
LARGE = LlamaShape(blocks=2, width=512, inner=768, words=48 << 10, heads=8, key_heads=2)


@pytest.mark.promise("7 bounded memory")
def test_measuring_takes_no_more_than_its_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a board with just enough, of an owner with a token table and a decoder of 24 MiB each in int8.

    Such a board returns freed memory at once. 16 MiB are for what libraries keep; a copy of one in float32, 96 MiB, has
    no room. Pages of libraries do not count: how many are mapped at once depends on the page cache.
    """
    needs: list[int] = []

    def file_bytes() -> int:
        return proc_bytes(PROC / "self" / "status", "RssFile") or 0

    def fit(estimate: MemoryEstimate, _: int) -> None:
        needs.append(estimate.total_bytes)
        fit_heap(estimate, estimate.total_bytes)

    monkeypatch.setattr(benchmark, "fit_heap", fit)
    try:
        for shape in (SMALL, LARGE):  # the first one loads the code
            folder = write_llama(tmp_path / str(shape.words), shape)
            job = ring.make_job(folder, model__task=CAUSAL_LM, model__dtype="float32", adapter__config="lora")
            rows = ring.make_datasets(job, folder, tmp_path, ("a",), num_rows=20, eval_rows=3)["a"]
            release_memory()
            reset_peak()
            before, files = rss_bytes(), file_bytes()
            bench = ring.make_bench(folder, job, rows, frozen=FrozenWeights(dtype="int8"))
            bench.measure(QUICK, budget_s=0.0, disk=None)
            added = peak_rss_bytes() - before - max(0, file_bytes() - files)
            del bench
    finally:
        keep_freed_memory()
    assert 48 * MIB < added < needs[-1] + 16 * MIB < (48 + 96) * MIB
