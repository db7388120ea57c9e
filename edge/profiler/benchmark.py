"""Times of each work of a run, measured with the code of a run on one real block of the model.

The plan gives this node one block and unfreezes one more block a step: so this block is the lowest trainable one at one
step, and has a trainable one below it at the next. It stands for all blocks, which have one shape, but those of a
model of which some have no attention: one of these is timed then, as it keeps and takes most. If some have no adapter
(``leave_out``), a block with one is timed for all.

::

    put hidden, f                     FORWARD            put hidden, F, put gradient, B, U   GRAPH, BACKWARD, UPDATE
    f, F, B with half of the subnets  FORWARD_PART, GRAPH_PART, BACKWARD_PART
    E E .. E                          EMBED              put hidden, F, put gradient, B      .. of the lowest one
    E, H, U[head]                     HEAD, UPDATE_HEAD  E, H of an evaluation               HEAD_FREE
    read pairs, A                     FIT

Parts, with ``subnets // 2`` active subnets, are timed where the job has several subnets a block. Encoding, decoding,
hand-over and saving (on the disk of the node's folder) are timed too.

A computed batch has exactly the given size: real rows, repeated or cut. To make one takes as long as with real rows,
because a real batch is made first and thrown away.

The time of an action besides its work (loop, engine, report of its span) is measured with a run's loop and reporter, an
executor that does nothing, and a plan of a few steps in which this node hosts everything.

A measurement without enough memory is refused before anything is built, by the estimate of a run that hosts this block;
with little more than that freed memory is returned at once, as in such a run. Its folder is removed at the end.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from edge.checkpoint.state_folder import RunShards
from edge.data.dataset import OwnerDataset
from edge.data.examples import Values
from edge.data.tokens import Batch
from edge.machine.accelerator import settle_of
from edge.machine.resources import fit_heap
from edge.profiler.timing import (
    CpuClock,
    Cycle,
    Laps,
    MeasuredWork,
    ProfileCache,
    Quartiles,
    Timer,
    TimingRequest,
    cache_key,
    window_of,
)
from edge.runtime.executor import NodeExecutor
from edge.runtime.loop import AgentRun
from edge.runtime.reporter import Entry, Failed, Reporter, TurnDone
from edge.techniques.offload.helper import AuxiliaryModels
from edge.techniques.offload.pairs import from_file, to_file
from edge.techniques.offload.sites import sites_of
from edge.transport import frames, tensors
from ringtune.costs.measurement import Size, timed_sizes
from ringtune.costs.memory_estimate import node_memory
from ringtune.costs.memory_sizes import DTYPE_BYTES
from ringtune.costs.memory_terms import MemoryEstimate
from ringtune.costs.model_facts import computed_token_bytes
from ringtune.costs.profile import PART_OF, ModelFacts, TimedShape, Work, WorkTime
from ringtune.errors import CapacityError, DeadlineError, FrameError, StorageError, error_from_name
from ringtune.job.job import Job
from ringtune.machine.resources import cpu_quota
from ringtune.models.adapter_config import fullest_block
from ringtune.models.adapter_support import offload_refusal
from ringtune.models.families import FAMILIES
from ringtune.models.family import LANGUAGE_TASKS, NAMED_TASKS, QUESTION_ANSWERING, TAGGING, Dimensions, Family
from ringtune.models.folder import base_tensors, model_dimensions, read_config
from ringtune.models.passed_values import PassedValues
from ringtune.quantities import format_bytes
from ringtune.schedule.actions import Action, Op, Payload, TensorKey
from ringtune.schedule.course import AS_COMPUTED, Course, FrozenWeights
from ringtune.schedule.methods import RingAda
from ringtune.schedule.operation_tables import (
    FULL,
    SHORTCUT,
    BatchOperations,
    BlockCapacity,
    Choice,
    Operations,
    Policy,
)
from ringtune.schedule.placement import Placement, Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import Owner
from ringtune.schedule.turns import Item, StepKind, Turn, turn_sequence
from ringtune.storage.durable import make_folder
from ringtune.storage.pieces import Pieces
from ringtune.techniques.base import Term
from ringtune.v1 import control_pb2

_TINY_RATE = 1e-9
_UNSIZED: tuple[Work, ...] = (Work.UPDATE, Work.UPDATE_HEAD)
_BLOCK_LOOPS, _PART_LOOPS, _OWNER_LOOPS, _ONCE_LOOPS = 5, 3, 3, 2
_WITH_LOWEST: Final = {
    Work.GRAPH: Work.GRAPH_LOWEST,
    Work.BACKWARD: Work.BACKWARD_LOWEST,
    Work.GRAPH_PART: Work.GRAPH_LOWEST_PART,
    Work.BACKWARD_PART: Work.BACKWARD_LOWEST_PART,
}
"""Works of a block with trainable ones below it -> works of the lowest trainable block."""


_LOG = logging.getLogger(__name__)


def timings(
    job: Job,
    model: ModelFacts,
    dataset: OwnerDataset | None,
    *,
    shape: TimedShape,
    device: str,
    hardware: str,
    state: Path | None,
    timing: TimingRequest,
    memory_bytes: int,
    data_bytes: int = 0,
) -> MeasuredWork:
    """Time every kind of work at this node, or return the timings of an earlier measurement.

    Without ``dataset`` the node is no owner; without ``state``, its folder, there is no cache, and saving is not timed.
    ``memory_bytes`` limit the measurement, rows and tokenizer (``data_bytes``) included. ``shape``, of the job at this
    node, and ``hardware``, processor and the share of it that may be used, are part of the cache's key.

    Raises:
        ModelError: the model folder can't be used.
        JobError: the adapter configuration can't be split.
        CapacityError: one block with micro-batches of the job's size does not fit here.
    """
    key = cache_key(
        model=model.digest,
        hardware=hardware,
        shape=shape,
        batch=(job.train.batch_size, job.train.microbatches),
        classes=len({*job.data.labels, *dataset.labels}) if dataset else -1,
        neighbours=timing.neighbours,
        torch=torch.__version__,
    )
    cache = ProfileCache(state) if state is not None else None
    measured = cache.find(key, budget_s=timing.budget_s) if cache and not timing.is_fresh else None
    if measured is not None:
        return measured
    started_s = time.monotonic()
    folder = Path(job.model.path)
    bench = Bench(
        folder,
        job,
        dataset,
        model=model,
        memory_bytes=memory_bytes,
        data_bytes=data_bytes,
        device=device,
        subnets=shape.subnets,
        frozen=timing.frozen,
    )
    quota = cpu_quota()
    cpu = CpuClock.of(quota, torch.get_num_threads()) if device == "cpu" else None
    timer = Timer(window_s=window_of(quota), settle=bench.settle(), cpu=cpu)
    measured = bench.measure(timer, budget_s=timing.budget_s, disk=state)
    _LOG.info("measured %d points in %.1f s", len(measured.work_times), time.monotonic() - started_s)
    if cache is not None:
        cache.put(key, measured, budget_s=timing.budget_s)
    return measured


def full_size_s(measured: MeasuredWork, work: Work) -> float:
    """Median seconds of a work at the largest measured size; 0 if it was not measured."""
    points = [point for point in measured.work_times if point.work == work]
    return max(points, key=lambda point: point.size).median_s if points else 0.0


class Bench:
    """One real block of a model, and an owner's embedding and head where there are rows, ready to be timed.

    Args:
        dataset: the node's rows; None = it is no owner, so embedding and head are left out.
        data_bytes: of rows and tokenizer, which are in memory meanwhile.
        subnets: of each block, where the job has operations.

    Raises:
        ModelError: see ``NodeExecutor``.
        JobError: the adapter configuration can't be split.
        CapacityError: one block with micro-batches of the job's size does not fit; nothing was built then.
    """

    def __init__(
        self,
        folder: Path,
        job: Job,
        dataset: OwnerDataset | None,
        *,
        model: ModelFacts,
        memory_bytes: int,
        data_bytes: int = 0,
        device: str = "cpu",
        subnets: int = 1,
        frozen: FrozenWeights | None = None,
    ) -> None:
        self._subnets = subnets
        config = read_config(folder)
        family, dimensions = FAMILIES[config["model_type"]], model_dimensions(config)
        self.sizes = timed_sizes(job, fixed_tokens=dimensions.longest if dimensions.fixed else 0)
        self._fixed = dimensions.fixed
        self._job = job.with_overrides(
            {"train.learning_rate": _TINY_RATE, "train.warmup_steps": 0, "train.warmup_share": 0.0}
        )
        self._num_blocks = dimensions.num_blocks
        self._block = fullest_block(
            job.adapter.config,
            hidden_size=dimensions.hidden,
            widths=family.widths(config),
            num_blocks=dimensions.num_blocks,
            among=_unlike_blocks(folder, family, config),
        )
        batch_rows = self.sizes[0].rows * job.train.microbatches
        self._rows = SizedRows(dataset, job.model.task, batch_rows) if dataset else None
        has_classes = job.model.task in NAMED_TASKS
        self._plan = bench_plan(
            self._job,
            self.sizes[0],
            dimensions,
            block=self._block,
            labels=known_labels(job.data.labels, dataset, has_classes=has_classes),
            has_rows=self._rows is not None,
            subnets=subnets,
            frozen=frozen,
            passed=family.passed(config),
        )
        needs = self._memory(model, data_bytes)
        check_room(needs, memory_bytes)
        fit_heap(needs, memory_bytes)
        # SizedRows has all of OwnerDataset that the executor uses
        rows_of: Any = self._rows
        self._executor = NodeExecutor(self._plan, NODE, self._job, folder, rows_of, device=device)
        self._dtype = torch.float64 if job.model.dtype == "float64" else torch.float32
        self._device = torch.device(device)
        self._fitting: HelperBench | None = None
        if HelperBench.is_possible(folder, self._job):
            self._fitting = HelperBench(folder, self._job, self._block, self._dtype, self._device)

    def _memory(self, model: ModelFacts, data_bytes: int) -> MemoryEstimate:
        """Estimate the peak memory of the measurement as that of a run that hosts this block.

        One tensor at a time is on its way, and one micro-batch has a graph. An owner embeds all of a batch.
        """
        course, count = self._plan.course, self._job.train.microbatches
        course = dataclasses.replace(course, choice=None, microbatches=1, batch_size=self.sizes[0].rows)
        estimate = node_memory(
            Plan.of(course, dataclasses.replace(self._plan.placement, credits=1)),
            NODE,
            model,
            optimizer=self._job.train.optimizer,
            activation_token_bytes=computed_token_bytes(model, self._job),
            dtype=self._job.model.dtype,
            data_bytes=data_bytes,
        )
        embedded = course.batch_size * course.max_length * course.widest * DTYPE_BYTES[self._job.model.dtype]
        more = Term("buffers", "embedding of a further micro-batch", (count - 1) * bool(self._rows), embedded)
        return MemoryEstimate(terms=(*estimate.terms, more))

    # ---- what is measured -------------------------------------------------------------------------

    def measure(self, timer: Timer, *, budget_s: float, disk: Path | None) -> MeasuredWork:
        """Time every kind of work that this node may do.

        ``budget_s`` are approximate seconds for all loops, and again for the idle time of a quota; slow boards take
        longer. ``disk`` is the node's folder for checkpoints; None = saving is not timed.
        """
        loops = _BLOCK_LOOPS + (_OWNER_LOOPS if self._rows else 0) + (_PART_LOOPS if self._subnets > 1 else 0)
        each_s = budget_s / (len(self.sizes) * loops + _ONCE_LOOPS)
        shares = dict.fromkeys(PART_OF.values(), part_subnets(self._subnets) / self._subnets)
        times: list[WorkTime] = []
        once: dict[Work, Quartiles] = {}
        with torch.random.fork_rng(devices=[]):
            for size in self.sizes:
                sized, unsized = self._at_size(size, timer, each_s)
                times += [spread.at(work, *size, share=shares.get(work, 1.0)) for work, spread in sized.items()]
                once = once or unsized
            once |= self._once(timer, each_s, disk)
            times += [spread.at(work) for work, spread in once.items()]
            handled_s = handling_s(whole_plan(self._plan), NODE, timer.cpu or timer.clock)
            return MeasuredWork(
                tuple(times),
                self.activation_token_bytes(),
                self._rested_s(timer, budget_s),
                handled_s,
                self.activation_token_bytes(lowest=True),
            )

    def _rested_s(self, timer: Timer, budget_s: float) -> float:
        """Seconds that a forward takes less after idle time."""
        size, item = self.sizes[0], self._item(lowest=True)
        hidden, mask = self._random(size), uneven_mask(size)

        def forward() -> None:
            self._put_hidden(item, hidden, mask)
            self._run(Op.FORWARD_FREE, item)

        with self._forgetting():
            return timer.rested_s(forward, budget_s=budget_s)

    def activation_token_bytes(self, *, lowest: bool = False) -> float:
        """Bytes per padded token that one block's forward with graph keeps until backward, its output included.

        ``lowest`` measures the block as the lowest that trains.
        """
        size, item = self.sizes[0], self._item(lowest=lowest or self._block == 0)
        self._put_hidden(item, self._random(size), uneven_mask(size))
        # of no block: tensors that all blocks share are made before the first count
        self._executor.run(Action(Op.FORWARD_FREE, item, 0, self._block, self._block))
        before = self._executor.live_bytes()
        self._run(Op.FORWARD, item)
        kept = self._executor.live_bytes() - before
        self._executor.forget_turn(item)
        return kept / (size.rows * size.tokens)

    def _at_size(self, size: Size, timer: Timer, each_s: float) -> tuple[dict[Work, Quartiles], dict[Work, Quartiles]]:
        """Time the works of one size; return the works that depend on the size, and those that do not."""
        spreads: dict[Work, Quartiles] = {}
        for cycle in self._cycles(size):
            with self._forgetting():
                spreads |= timer.measure(cycle, budget_s=each_s)
        if self._block == 0:  # block 0 has no trainable block below it; its cost bounds the other works
            for work, lowest in _WITH_LOWEST.items():
                if lowest in spreads:
                    spreads.setdefault(work, spreads[lowest])
        unsized: dict[Work, Quartiles] = {work: spreads.pop(work) for work in _UNSIZED if work in spreads}
        return spreads, unsized

    def _cycles(self, size: Size) -> Iterator[Cycle]:
        hidden, mask, grad = self._random(size), uneven_mask(size), self._random(size, is_gradient=True)
        for is_part in (False, True) if self._subnets > 1 else (False,):
            yield self._forward(hidden, mask, is_part=is_part)
            yield self._train(hidden, mask, grad, lowest=True, is_part=is_part)
            if self._block:
                yield self._train(hidden, mask, grad, lowest=False, is_part=is_part)
        yield self._wire(hidden, mask)
        if self._fitting is not None:
            yield self._fitting.cycle(size)
        if self._rows is not None:
            self._rows.take_size(size.rows * self._job.train.microbatches, 0 if self._fixed else size.tokens)
            yield from (self._embed, self._head, self._head_free)

    def _once(self, timer: Timer, each_s: float, disk: Path | None) -> dict[Work, Quartiles]:
        spreads: dict[Work, Quartiles] = {}
        if self._rows is not None:
            spreads |= timer.measure(self._hand_over, budget_s=each_s)
        if disk is not None:
            with folder_in(disk, is_needed=self._job.train.checkpoint_every > 0) as folder:
                spreads |= timer.measure(self._save(folder), budget_s=each_s)
        return spreads

    # ---- the loops --------------------------------------------------------------------------------

    def _forward(self, hidden: torch.Tensor, mask: torch.Tensor, *, is_part: bool) -> Cycle:
        work = PART_OF[Work.FORWARD] if is_part else Work.FORWARD

        item = self._item(lowest=True, is_part=is_part)

        def cycle(laps: Laps) -> None:
            self._put_hidden(item, hidden, mask)
            laps.lap(work, lambda: self._run(Op.FORWARD_FREE, item))

        return cycle

    def _train(
        self, hidden: torch.Tensor, mask: torch.Tensor, grad: torch.Tensor, *, lowest: bool, is_part: bool
    ) -> Cycle:
        item, executor = self._item(lowest=lowest, is_part=is_part), self._executor
        update = Action(Op.UPDATE, item, -1, self._block, self._block + 1)
        works = (Work.GRAPH_LOWEST, Work.BACKWARD_LOWEST) if lowest else (Work.GRAPH, Work.BACKWARD)
        graph, backward = (PART_OF[work] for work in works) if is_part else works

        def cycle(laps: Laps) -> None:
            self._put_hidden(item, hidden, mask)
            laps.lap(graph, lambda: self._run(Op.FORWARD, item))
            executor.put_made(TensorKey(Payload.GRAD, item, 0, self._block + 1), grad, None)
            laps.lap(backward, lambda: self._run(Op.BACKWARD, item))
            laps.lap(Work.UPDATE, lambda: executor.run(update))

        return cycle

    def _embed(self, laps: Laps) -> None:
        item, count = self._item(lowest=True), self._job.train.microbatches  # a new item makes its batch anew
        parts = [Action(Op.EMBED, item, micro) for micro in range(count)]
        laps.lap(Work.EMBED, lambda: list(map(self._executor.run, parts)), times=count)

    def _head(self, laps: Laps) -> None:
        item = self._item(lowest=True)
        update = Action(Op.UPDATE, item, -1, self._num_blocks, self._num_blocks + 1)
        self._executor.run(Action(Op.EMBED, item, 0))
        laps.lap(Work.HEAD, lambda: self._executor.run(Action(Op.HEAD, item, 0)))
        laps.lap(Work.UPDATE_HEAD, lambda: self._executor.run(update))

    def _head_free(self, laps: Laps) -> None:
        item = self._item(lowest=True, kind=StepKind.EVALUATE)
        self._executor.run(Action(Op.EMBED, item, 0))
        laps.lap(Work.HEAD_FREE, lambda: self._executor.run(Action(Op.HEAD, item, 0)))

    def _wire(self, hidden: torch.Tensor, mask: torch.Tensor) -> Cycle:
        def cycle(laps: Laps) -> None:
            messages = laps.lap(Work.ENCODE, lambda: encode(hidden, mask, self._job.wire.dtype))
            laps.lap(Work.DECODE, lambda: decode(messages, self._dtype))

        return cycle

    def _hand_over(self, laps: Laps) -> None:
        executor = self._executor
        laps.lap(Work.HAND_OVER, lambda: executor.load_head_blob(executor.head_blob()))

    def _save(self, folder: Path) -> Cycle:
        shards, with_head = RunShards(folder, NODE), self._rows is not None

        def save() -> None:
            shards.write(0, self._executor.shard({"node": NODE}, with_head=with_head))

        return lambda laps: laps.lap(Work.SAVE, save)

    # ---- parts ------------------------------------------------------------------------------------

    def _item(self, *, lowest: bool, kind: StepKind = StepKind.TRAIN, is_part: bool = False) -> int:
        """Grant one item anew where the block is the lowest trainable one (``seq`` 0) or not (1); return that ``seq``.

        With ``is_part`` half of the block's subnets take the shortcut.
        """
        step = self._num_blocks - 1 - self._block + (0 if lowest else 1)
        index = 0 if lowest else 1
        turn = Turn(
            index=index,
            kind=kind,
            owner=self._plan.course.owners[0].node,
            round=0,
            first_seq=index,
            num_items=1,
            first_step=step,
            first_batch=0,
            operations=part_table(self._plan.course, self._block, self._subnets) if is_part else None,
        )
        self._executor.grant(turn)
        return index

    @contextmanager
    def _forgetting(self) -> Iterator[None]:
        """Drop the tensors of a loop at its end, so that the next loop begins with an empty node."""
        yield
        for index in (0, 1):
            self._executor.forget_turn(index)

    def _put_hidden(self, item: int, hidden: torch.Tensor, mask: torch.Tensor) -> None:
        self._executor.put_made(TensorKey(Payload.HIDDEN, item, 0, self._block), hidden, mask)

    def _run(self, op: Op, item: int) -> object:
        return self._executor.run(Action(op, item, 0, self._block, self._block + 1))

    def _random(self, size: Size, *, is_gradient: bool = False) -> torch.Tensor:
        """Draw what enters the block, or the gradient of what leaves it."""
        width = self._plan.course.width(self._block + is_gradient, is_gradient=is_gradient)
        return torch.randn(size.rows, size.tokens, width, dtype=self._dtype)

    def settle(self) -> Callable[[], None]:
        """Return a function that waits until the device has finished its queue; on a processor it does nothing."""
        return settle_of(self._device)


_FLUSH_S = 60.0


def handling_s(plan: Plan, node: str, clock: Callable[[], float]) -> float:
    """Seconds of an action besides its work, by ``clock``; ``node`` owns and hosts everything in ``plan``.

    Raises:
        DeadlineError: the reports were not made in time.
        RingTuneError: the loop ended with this error before its last turn.
    """
    turns = list(turn_sequence(plan.course))
    reporter = Reporter(
        run_id="measure",
        node=node,
        num_blocks=plan.course.num_blocks,
        send=control_pb2.ReportRequest.SerializeToString,
        on_refused=lambda reason: None,
    )
    reports: Any = _Reports(reporter, turns[-1].index)
    try:
        idle: Any = _Idle()  # has all that a node alone needs
        run = AgentRun(
            plan=plan, node=node, executor=idle, links={}, ack=lambda source, boundary: None, reports=reports
        )
        reports.stop = lambda: run.stop("measured")
        run.grant(turns)
        started_s = clock()
        run.loop()
        is_flushed = reporter.flush(_FLUSH_S)
        taken_s = clock() - started_s
    finally:
        reporter.close()
    if reports.failed is not None:
        raise error_from_name(reports.failed.error, reports.failed.message)
    if not is_flushed:
        raise DeadlineError(f"node {node}: waited {_FLUSH_S:g} s for the reports of idle steps; measure again")
    return taken_s / max(1, run.totals.actions)


class _Reports:
    """Forwards entries to the reporter, and stops the run after its last turn or a failure."""

    def __init__(self, reporter: Reporter, last_turn: int) -> None:
        self.stop: Callable[[], object] = lambda: None
        self.failed: Failed | None = None
        self._reporter, self._last_turn = reporter, last_turn

    def put(self, entry: Entry) -> None:
        self._reporter.put(entry)
        if isinstance(entry, Failed):
            self.failed = self.failed or entry
            self.stop()
        elif isinstance(entry, TurnDone) and entry.turn == self._last_turn:
            self.stop()


class _Idle:
    """An executor with actions that do nothing."""

    def grant(self, turn: Turn) -> None:
        """Ignore a turn."""

    def forget_turn(self, index: int) -> str:
        return ""

    def run(self, action: Action) -> tuple[tuple[str, float], ...]:
        """Return the numbers of a head, so that steps are reported."""
        return (("count", 1.0), ("loss_sum", 0.0)) if action.op is Op.HEAD else ()

    def copy_digest(self, start: int, stop: int) -> str:
        return ""


class HelperBench:
    """The adapters of one block, ready to be fitted from random pairs; only the model's configuration is read."""

    def __init__(self, folder: Path, job: Job, block: int, dtype: torch.dtype, device: torch.device) -> None:
        self._models = AuxiliaryModels(folder, job, range(block, block + 1), dtype, device)
        self._sites = sites_of(self._models.skeleton, block)
        self._dtype, self._device = dtype, device

    @staticmethod
    def is_possible(folder: Path, job: Job) -> bool:
        """Whether a helper can fit the adapters of this job; with full parameters there are none."""
        config = read_config(folder)
        fused = FAMILIES[config["model_type"]].widths(config).merged
        return not job.method.full_parameters and not offload_refusal(
            job.adapter.config, dropout=job.train.dropout, fused=fused
        )

    def cycle(self, size: Size) -> Cycle:
        """Make the loop that decodes pairs of one size from a parcel and accumulates their gradients."""
        data = self._pairs(size)

        def fit() -> None:
            self._models.fit(from_file(data, {}, where="the pairs", device=self._device))

        return lambda laps: laps.lap(Work.FIT, fit)

    def _pairs(self, size: Size) -> Pieces:
        tensors: dict[str, torch.Tensor] = {}
        for site in self._sites:
            if site.source == site.name:
                tensors[f"{site.name}.x"] = torch.randn(size.rows, size.tokens, site.inputs, dtype=self._dtype)
            tensors[f"{site.name}.grad"] = torch.randn(size.rows, size.tokens, site.outputs, dtype=self._dtype)
        return to_file(tensors, {})


_HELLO = frames.Hello(run_id="measure", placement_number=0, source="measured", digest="")


def encode(hidden: torch.Tensor, mask: torch.Tensor, dtype: str) -> list[bytes]:
    """Encode a hidden state and its mask to messages, as the sender's thread does."""
    encoded = tensors.encode(hidden, mask, dtype)
    header = frames.tensor_header(_HELLO, TensorKey(Payload.HIDDEN, 0, 0, 0), encoded)
    return list(frames.messages(header, encoded.parts))


def decode(messages: list[bytes], compute_dtype: torch.dtype) -> torch.Tensor:
    """Decode messages to the hidden state, as the receiver's thread does; raises ``FrameError``."""
    assembler = frames.Assembler(lambda header: None, lambda header: None)
    for message in messages:
        fed = assembler.feed(message)
        if fed.error is not None:
            raise fed.error
        if fed.received is not None:
            header, payload, _ = fed.received
            dtype = frames.DTYPE_NAMES[header.dtype]
            hidden, _ = tensors.decode(
                payload,
                tuple(header.shape),
                dtype,
                header.mask_bytes,
                compute_dtype=compute_dtype,
                exponent=header.exponent,
            )
            return hidden
    raise FrameError("a measured tensor did not arrive whole; please report this")


def _unlike_blocks(folder: Path, family: Family, config: Mapping[str, Any]) -> list[int]:
    """Return the blocks with other matrices than attention's, of which a gated delta net keeps most; none if all have.

    One block is timed for all: of a model with both kinds one of these.
    """
    if not family.layout.instead:
        return []
    names, blocks = base_tensors(folder, config), range(model_dimensions(config).num_blocks)
    paths = [path for _, path in family.layout.instead]
    return [block for block in blocks if any(f"{family.block_prefix}{block}.{path}.weight" in names for path in paths)]


def check_room(needs: MemoryEstimate, memory_bytes: int) -> None:
    """Refuse a measurement that needs more than ``memory_bytes``; raises ``CapacityError``."""
    if needs.total_bytes > memory_bytes:
        raise CapacityError(
            f"measuring one block needs {needs} but there are {format_bytes(memory_bytes)}: it is timed as it trains, "
            "with its whole graph, of which a run may keep less; lower train.batch_size or train.max_length, or raise "
            "train.microbatches"
        )


@contextmanager
def folder_in(disk: Path, *, is_needed: bool) -> Iterator[Path]:
    """Make a temporary folder inside ``disk``, removed at the end; a failed write is an error only if ``is_needed``.

    Raises ``StorageError``: a write failed, and ``is_needed``.
    """
    make_folder(disk)
    folder = Path(tempfile.mkdtemp(prefix=".measure-", dir=disk))
    try:
        yield folder
    except StorageError as error:
        if is_needed:
            raise StorageError(
                f"a block's part of a checkpoint can't be written in {disk}, where "
                f"{format_bytes(shutil.disk_usage(disk).free)} are free; make room, or give another --state"
            ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


NODE: Final = "measured"
_BELOW, _ABOVE = "below", "above"
_HANDLED_STEPS = 4


def bench_plan(
    job: Job,
    size: Size,
    dimensions: Dimensions,
    *,
    block: int,
    labels: tuple[str, ...],
    has_rows: bool,
    subnets: int = 1,
    frozen: FrozenWeights | None = None,
    passed: PassedValues | None = None,
) -> Plan:
    """Make a plan in which this node hosts ``block`` alone; step s unfreezes block N - 1 - s of N blocks.

    ``block`` is the index of the hosted block; ``labels`` are class names that all owners agreed on; ``has_rows``:
    this node is the owner. With more than one of ``subnets`` a block, turns may carry operation tables.
    """
    batch, num_blocks = size.rows * job.train.microbatches, dimensions.num_blocks
    pieces = (
        Slice(node=_BELOW, start=0, stop=block),
        Slice(node=NODE, start=block, stop=block + 1),
        Slice(node=_ABOVE, start=block + 1, stop=num_blocks),
    )
    course = Course(
        method=RingAda(every_steps=1),
        num_blocks=num_blocks,
        owners=(Owner(node=NODE if has_rows else _ABOVE, train_rows=batch, eval_rows=batch),),
        num_steps=num_blocks + 1,
        local_iterations=1,
        batch_size=batch,
        microbatches=job.train.microbatches,
        max_length=size.tokens,
        hidden_size=dimensions.hidden,
        wire_dtype=job.wire.dtype,
        labels=labels,
        seed=job.train.seed,
        choice=_any_table(subnets) if subnets > 1 else None,
        frozen=frozen,
        compute=job.train.compute or AS_COMPUTED,
        entering=() if passed is None else passed.entering,
        returning=() if passed is None else passed.returning,
    )
    return Plan.of(course, Placement(slices=tuple(piece for piece in pieces if piece.num_blocks)))


def whole_plan(plan: Plan) -> Plan:
    """Make a plan of a few steps in which this node owns and hosts everything."""
    course = plan.course
    owners = (dataclasses.replace(course.owners[0], node=NODE, eval_rows=0),)
    course = dataclasses.replace(course, owners=owners, num_steps=min(_HANDLED_STEPS, course.num_steps), choice=None)
    return Plan.of(course, Placement(slices=(Slice(node=NODE, start=0, stop=course.num_blocks),)))


def part_subnets(subnets: int) -> int:
    """Number of active subnets where a part of a block is timed: half, rounded down."""
    return subnets // 2


def part_table(course: Course, block: int, subnets: int) -> Operations:
    """Make the table in which the upper subnets of ``block`` take the shortcut and all others are full."""
    active, start = part_subnets(subnets), block * subnets
    row = list(FULL * course.num_blocks * subnets)
    row[start + active : start + subnets] = SHORTCUT * (subnets - active)
    rows = ("".join(row),) * course.microbatches
    batch = BatchOperations(owner=course.owners[0].node, batch_id=0, rows=rows)
    return Operations(batches=(batch,), subnets=subnets)


def _any_table(subnets: int) -> Choice:
    """Make a choice of operations that allows turns any table with so many subnets a block."""
    capacity = BlockCapacity(full=1.0, forward_only=0.0, forward=1.0, backward=1.0)
    return Choice(policy=Policy.RANDOM.value, subnets=subnets, capacities=(capacity,))


_PADDED_SHARE = 4


class SizedRows:
    """An ``OwnerDataset`` with batches of a chosen size, made of the owner's rows."""

    def __init__(self, real: OwnerDataset, task: str, rows: int) -> None:
        self._real, self._task = real, task
        self._size = Size(rows, 0)
        self._made: dict[tuple[StepKind, Size], Batch] = {}
        self.train_rows = self.eval_rows = rows

    def take_size(self, rows: int, tokens: int) -> None:
        """Set the size of later batches; 0 tokens keep the real length, for images."""
        self._size = Size(rows, tokens)

    def set_labels(self, labels: tuple[str, ...]) -> None:
        """Set the classes of the real rows."""
        self._real.set_labels(labels)

    def batch(self, course: Course, item: Item) -> Batch:
        """Make a batch of the set size; takes at least as long as a batch of real rows."""
        kind = StepKind.EVALUATE if item.kind is StepKind.EVALUATE and self._real.eval_rows else StepKind.TRAIN
        real = self._real.batch(course, dataclasses.replace(item, kind=kind, batch=0))
        if (kind, self._size) not in self._made:
            self._made[kind, self._size] = resized(real, self._size, self._task)
        return self._made[kind, self._size]

    def score(self, course: Course, item: Item, batch: Batch, predictions: torch.Tensor | None) -> Values:
        """Score the predictions with the real rows, as an evaluation does."""
        return self._real.score(course, item, batch, predictions)


def resized(batch: Batch, size: Size, task: str) -> Batch:
    """Repeat or cut a batch to ``size``; rows 0, 2, 4, ... end in padding.

    0 tokens keep the length. The task decides whether labels are per row, per token or positions.
    """
    chosen = torch.arange(size.rows) % len(batch.mask)
    taken = Batch(*(None if tensor is None else tensor[chosen] for tensor in batch))  # type: ignore[arg-type]
    if not size.tokens:
        return taken
    columns = torch.arange(size.tokens) % taken.mask.shape[1]
    labels = taken.labels
    if task in (*LANGUAGE_TASKS, TAGGING):
        labels = labels[:, columns]
    elif task == QUESTION_ANSWERING:
        labels = labels.clamp(max=size.tokens - 1)
    return taken._replace(
        ids=taken.ids[:, columns],
        mask=uneven_mask(size),
        token_type_ids=taken.token_type_ids[:, columns],
        labels=labels,
    )


def uneven_mask(size: Size) -> torch.Tensor:
    """Make a mask (B, T) in which the last quarter of rows 0, 2, 4, ... is padding: 8 tokens are 6 ones and 2 zeros.

    A mask costs time and memory, and most batches of a run have one.
    """
    mask = torch.ones(size.rows, size.tokens, dtype=torch.int64)
    mask[::2, size.tokens - size.tokens // _PADDED_SHARE :] = 0
    return mask


def known_labels(job_labels: tuple[str, ...], real: OwnerDataset | None, *, has_classes: bool) -> tuple[str, ...]:
    """Sort all class names of the job and of this node's rows; made-up names fill up to two.

    A task without classes has none. Example: rows of class "yes" alone give "yes" and "(one)".
    """
    if not has_classes:
        return ()
    classes: set[Any] = {*real.labels, *real.eval_labels} if real else set()
    labels = sorted({*job_labels, *classes})
    return tuple([*labels, *(name for name in ("(one)", "(other)") if name not in labels)][: max(2, len(labels))])
