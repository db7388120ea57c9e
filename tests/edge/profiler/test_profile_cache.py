"""What a node remembers of its timings, and what it tells about itself."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from edge.agent import torch_backend
from edge.checkpoint.state_folder import CACHE_FILE
from edge.data.dataset import MeanTokens
from edge.options import AgentOptions
from edge.profiler import benchmark
from edge.profiler.benchmark import Bench
from edge.profiler.timing import KEPT_ENTRIES, LONGEST_AGE_S, MeasuredWork, ProfileCache, TimingRequest
from ringtune.costs.measurement import job_shape
from ringtune.costs.memory_sizes import CONTEXT_BYTES
from ringtune.costs.profile import NodeFacts, Work, WorkTime
from ringtune.errors import CapacityError
from ringtune.job.job import Job
from ringtune.schedule.batches import BatchStream, eval_rows
from ringtune.schedule.run_shape import Owner
from ringtune.schedule.turns import StepKind, Turn, items
from tests.support import hand_ring as ring
from tests.support import tiny

POINT = WorkTime(work=Work.HEAD, rows=2, tokens=8, median_s=0.02, low_s=0.01, high_s=0.03, samples=4)
MEASURED = MeasuredWork((POINT,), 77.0)


def test_cache_forgets_what_is_old(tmp_path: Path) -> None:
    """After the stated time, or if the clock was set back, the node is measured anew; a new entry counts again."""
    now_s = [1e9]
    cache = ProfileCache(tmp_path, clock=lambda: now_s[0])
    cache.put("a", MEASURED, budget_s=2.0)
    now_s[0] = 1e9 + LONGEST_AGE_S
    assert cache.find("a", budget_s=2.0) == MEASURED
    for wrong_s in (1e9 + LONGEST_AGE_S + 1, 1e9 - 1):
        now_s[0] = wrong_s
        assert cache.find("a", budget_s=2.0) is None
    cache.put("a", MEASURED, budget_s=2.0)
    assert cache.find("a", budget_s=2.0) == MEASURED


def test_cache_keeps_the_newest_entries(tmp_path: Path) -> None:
    """A node that has seen many jobs does not remember them all."""
    cache = ProfileCache(tmp_path)
    for index in range(KEPT_ENTRIES + 2):
        cache.put(str(index), MEASURED, budget_s=1.0)
    found = [index for index in range(KEPT_ENTRIES + 2) if cache.find(str(index), budget_s=1.0)]
    assert found == list(range(2, KEPT_ENTRIES + 2))


DAMAGED = (
    b"",
    b"{",
    b"[]",
    b'{"schema": 4}',
    b'{"schema": 4, "entries": {"a": 3}}',
    b'{"schema": 4, "entries": {"a": {"budget_s": 9}}}',
    b'{"schema": 4, "entries": {"a": {"budget_s":9, "activation_token_bytes":1, "work_times": [{"work":"walk"}]}}}',
    b'{"schema": 4, "entries": {"a": {"budget_s": 9, "activation_token_bytes": 1e999, "work_times": []}}}',
    b'{"schema": 4, "entries": {"a": {"budget_s": 9, "activation_token_bytes": -1, "work_times": []}}}',
    b'{"schema": 4, "entries": {"a": {"budget_s": NaN, "activation_token_bytes": 1, "work_times": []}}}',
    b"\xff\xfe",
)
EARLIER = b'{"schema": 1, "entries": {"a": {"budget_s": 9.0, "activation_bytes": 1, "work_times": []}}}'


def test_cache_that_is_damaged_is_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is measured again, and the file is whole then; of a file of an earlier version nothing is said."""
    for content in (*DAMAGED, EARLIER):
        (tmp_path / CACHE_FILE).write_bytes(content)
        caplog.clear()
        cache = ProfileCache(tmp_path)
        assert cache.find("a", budget_s=1.0) is None, content
        assert ("measured again" in caplog.text) is (content != EARLIER), content
        assert caplog.text == "" or content != EARLIER
        cache.put("a", MEASURED, budget_s=1.0)
        assert cache.find("a", budget_s=1.0) == MEASURED


class Counted:
    """Counts the measurements of a test instead of making them, or building anything for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = self.built = 0
        monkeypatch.setattr(Bench, "measure", self._measure)
        monkeypatch.setattr(benchmark, "NodeExecutor", self._build)
        monkeypatch.setattr(benchmark.HelperBench, "is_possible", lambda *_: False)

    def _build(self, *_: Any, **__: Any) -> None:
        self.built += 1

    def _measure(self, *_: Any, **__: Any) -> MeasuredWork:
        self.count += 1
        return MEASURED


def inspect(
    folder: Path,
    tmp_path: Path,
    job: Job,
    timing: TimingRequest | None,
    *,
    memory_bytes: int = 1 << 30,
    limit_bytes: int = 0,
    **options: Any,
) -> NodeFacts:
    """The facts of a node with rows."""
    rows = tiny.write_rows(tmp_path / "rows.csv", 20, seed=1)
    held_out = tiny.write_rows(tmp_path / "held-out.csv", 7, seed=2)
    state = {"state": tmp_path / "state", "memory_bytes": limit_bytes, **options}
    settings = AgentOptions(coordinator="127.0.0.1:9", name="a", data=rows, eval_data=held_out, threads=1, **state)
    value, _ = torch_backend.inspect(settings, job, timing=timing, memory_bytes=memory_bytes)
    return NodeFacts.from_message(json.loads(json.dumps(value)))


def test_inspection_measures_once_and_then_remembers(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured again: when asked to, for other neighbours, another shape, a larger budget, or by a guest."""
    counted, job = Counted(monkeypatch), ring.make_job(model_folder)
    # The disk's room and the machine's load are asked anew each time, and other tests change both.
    first, again = (
        dataclasses.replace(inspect(model_folder, tmp_path, job, TimingRequest(1.0)), state_free_bytes=None, load=0.0)
        for _ in range(2)
    )
    assert first == again
    assert counted.count == 1
    inspect(model_folder, tmp_path, job, TimingRequest(1.0, neighbours=1))
    inspect(model_folder, tmp_path, job, TimingRequest(1.0, is_fresh=True))
    inspect(model_folder, tmp_path, job, TimingRequest(2.0))
    inspect(model_folder, tmp_path, ring.make_job(model_folder, train__dropout=0.1), TimingRequest(1.0))
    inspect(model_folder, tmp_path, job, TimingRequest(1.0), is_guest=True)
    inspect(model_folder, tmp_path, job, TimingRequest(1.0), state=None)
    assert counted.count == 7
    inspect(model_folder, tmp_path, job, TimingRequest(1.0, neighbours=1))
    assert counted.count == 7


def test_inspection_measures_anew_for_another_number_of_subnets(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four heads in groups of one and of two are two measurements; other operations of the same groups are none."""
    counted = Counted(monkeypatch)

    def subnets(**operations: Any) -> tuple[int, int]:
        keys = {f"operations__{key}": value for key, value in {"policy": "two-stage", "compute": 0.5}.items()}
        keys |= {f"operations__{key}": value for key, value in operations.items()}
        job = ring.make_job(model_folder, train__batch_size=4, train__microbatches=2, **keys)
        return inspect(model_folder, tmp_path, job, TimingRequest(1.0)).shape.subnets, counted.count

    assert subnets(heads=1) == (4, 1)
    assert subnets(heads=2) == (2, 2)
    assert subnets(heads=2, compute=0.6, backward_score="fisher") == (2, 2)
    assert subnets(heads=0) == (1, 3)


def test_inspection_tells_hardware_shape_and_times(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that a profile holds is in the facts, and survives JSON."""
    job = ring.make_job(model_folder)
    half = dataclasses.replace(POINT, work=Work.FORWARD, tokens=4, median_s=0.011)
    points = tuple(dataclasses.replace(POINT, work=work) for work in (Work.FORWARD, Work.GRAPH, Work.BACKWARD))
    monkeypatch.setattr(Bench, "measure", lambda *_, **__: MeasuredWork((half, *points), 77))
    facts = inspect(model_folder, tmp_path, job, TimingRequest(1.0))
    assert facts.shape == job_shape(job)
    assert facts.work_times == (half, *points)
    assert facts.hardware.endswith("1 thread")
    assert (facts.block_forward_s, facts.block_graph_s, facts.block_backward_s) == (0.02, 0.02, 0.02)
    assert facts.activation_token_bytes == 77


@pytest.mark.promise("7 bounded memory")
def test_measurement_that_does_not_fit_is_refused_before_anything_is_built(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes tell what one block with the job's micro-batches needs; both numbers are in the message.

    A board that has no room for the weights of one block is told so, not killed while they are read.
    """
    counted = Counted(monkeypatch)
    large, plain = ring.make_job(model_folder, train__batch_size=20_000), ring.make_job(model_folder)
    with pytest.raises(
        CapacityError, match=r"measuring one block needs [\d,.]+ MiB .* but there are 64\.0 MiB: it is timed as it"
    ):
        inspect(model_folder, tmp_path, large, TimingRequest(1.0), memory_bytes=64 << 20)
    with pytest.raises(CapacityError, match="measuring one block needs"):
        inspect(model_folder, tmp_path, plain, TimingRequest(1.0), memory_bytes=1 << 10)
    assert (counted.count, counted.built) == (0, 0)


def test_room_for_measuring_is_that_of_the_device_that_computes(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA a run has the least of the device's free memory, the host's and the user's limit; timing no context."""
    asked: list[int] = []

    def timed(*_: Any, memory_bytes: int, **__: Any) -> MeasuredWork:
        asked.append(memory_bytes)
        return MEASURED

    monkeypatch.setattr(torch_backend, "timings", timed)
    monkeypatch.setattr(torch_backend, "set_up_torch", lambda *_: ("cuda", 1))
    values = {
        "mem_get_info": (2 << 30, 1 << 40),
        "get_device_name": "a device",
        "get_device_capability": (9, 0),
        "memory_reserved": 0,
        "max_memory_reserved": 0,
    }
    for name, value in values.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda value=value: value)
    job = ring.make_job(model_folder)
    for known_bytes, limit_bytes, budget_bytes in (
        (1 << 40, 0, (2 << 30) + CONTEXT_BYTES),
        (4 << 20, 0, 4 << 20),
        (3 << 20, 3 << 20, 3 << 20),
    ):
        sizes = {"memory_bytes": known_bytes, "limit_bytes": limit_bytes}
        facts = inspect(model_folder, tmp_path, job, TimingRequest(1.0), **sizes)
        assert asked.pop() == max(0, budget_bytes - CONTEXT_BYTES)
        assert facts.memory_bytes == budget_bytes


def test_mean_tokens_are_those_of_the_batches_of_a_run(model_folder: Path, tmp_path: Path) -> None:
    """The mean over a pass over the rows equals that of the batches that the owner really makes."""
    job = ring.make_job(model_folder)
    datasets = ring.make_datasets(job, model_folder, tmp_path, ("a",), num_rows=20, eval_rows=7)
    plan = ring.make_plan(job, datasets, {"a": (0, 4)})
    dataset = datasets["a"]
    found = dataset.mean_tokens(job.train.batch_size, job.train.seed, "a")
    dataset.set_labels(plan.course.labels)
    owner = plan.owner("a")
    assert isinstance(owner, Owner)
    means = []
    for kind, count in ((StepKind.TRAIN, 4), (StepKind.EVALUATE, 2)):
        turn = Turn(index=0, kind=kind, owner="a", round=0, first_seq=0, num_items=count, first_step=0, first_batch=0)
        means.append(
            statistics.fmean(dataset.batch(plan.course, item).mask.shape[1] for item in items(plan.course, turn))
        )
    assert BatchStream(20, job.train.batch_size, 0, "a").num_batches == 4
    assert eval_rows(7, job.train.batch_size, 1) == (6,)
    assert found == MeanTokens(*means)


def test_mean_tokens_stop_at_their_budget(model_folder: Path, tmp_path: Path) -> None:
    """Then the batches that were done stand for all, one at least; without evaluation rows there is no mean."""
    job = ring.make_job(model_folder)
    dataset = ring.make_datasets(job, model_folder, tmp_path, ("a",), num_rows=20)["a"]
    found = dataset.mean_tokens(job.train.batch_size, job.train.seed, "a", budget_s=0.0)
    assert 0 < found.train <= 16 and found.evaluation == 0.0
