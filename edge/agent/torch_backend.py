"""The part of an agent that needs torch: a node's facts, executor, snapshots, and both ends of links.

The import loads torch and the model libraries, which takes seconds; the agent does it in the background after it has
joined.

A ``Snapshot`` refers to the trained tensors of the node's slice at a turn boundary with their optimizer state, and at
an owner to the head. It copies nothing, because no update changes these tensors any more; the rest of the slice is
freed. Nodes send each other its blocks as safetensors files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from edge.agent.active_run import ActiveRun
from edge.checkpoint.snapshots import METADATA, MigratedState, Snapshot, block_of, write_blocks
from edge.checkpoint.state_folder import disk_of, room_bytes
from edge.data.dataset import NO_TOKENS, OwnerDataset
from edge.machine.accelerator import capacity_errors, device_budget, device_name, multiplies_bfloat16_fast, numerics_of
from edge.machine.libraries import load_libraries, touch_kernels
from edge.machine.resources import (
    describe_hardware,
    facts_here,
    keep_freed_memory,
    memory_budget,
    release_memory,
    set_up_heap,
)
from edge.model.slice import DTYPES
from edge.model.tensor_files import is_finite
from edge.options import AgentOptions
from edge.profiler import timing
from edge.profiler.benchmark import full_size_s, timings
from edge.profiler.timing import MeasuredWork, TimingRequest
from edge.runtime.audit import AuditRecorder, NodeAudit
from edge.runtime.executor import NodeExecutor
from edge.transport.frames import Hello
from edge.transport.link import OutLink
from edge.transport.server import RingServicer, RunExpectation
from ringtune.costs.measurement import job_shape
from ringtune.costs.memory_sizes import CONTEXT_BYTES, data_bytes
from ringtune.costs.model_facts import computed_token_bytes, model_facts
from ringtune.costs.profile import ModelFacts, NodeFacts, SkippedRows, TimedShape, Work
from ringtune.engine.failure_texts import LOWER_THE_RATE
from ringtune.errors import DataError, DivergedError, IntegrityError, UsageError
from ringtune.job.job import Job
from ringtune.machine.resources import cpu_cores, cpu_quota, machine_load, usable_cores
from ringtune.models.folder import has_tower
from ringtune.models.text_towers import TEXT_ONLY
from ringtune.schedule.plan import Plan
from ringtune.storage.strict import parse_json
from ringtune.storage.tensor_files import TensorFile, TensorPieces
from ringtune.techniques.audit import checked_by, fits_checked_by
from ringtune.techniques.frozen_weights import first_choice
from ringtune.techniques.operations import job_subnets
from ringtune.transport.credentials import process_credentials

_LOG = logging.getLogger(__name__)


def preload() -> None:
    """Load the libraries and kernels of a run, half of its preparation time."""
    load_libraries()
    touch_kernels()


def inspect(
    options: AgentOptions,
    job: Job,
    *,
    timing: TimingRequest | None,
    memory_bytes: int,
    dataset: OwnerDataset | None = None,
) -> tuple[dict[str, Any], OwnerDataset | None]:
    """Count this node's rows and labels, and time every kind of work; raises ``ModelError`` or ``DataError``.

    ``timing`` = None: no measurement, times are 0. The budget may be less than ``memory_bytes`` on an accelerator, see
    ``device_budget``. ``dataset`` was loaded for this run before; None = load it.

    Returns:
        ``NodeFacts`` as JSON, and the dataset of an owner.
    """
    load = machine_load()  # before this node's own work
    device, threads = set_up_torch(options, job)
    folder = Path(job.model.path)
    facts = model_facts(folder, job)
    if has_tower(folder):
        _LOG.info("model %s is a %s%s", folder.name, facts.model_type, TEXT_ONLY)
    if timing is not None and timing.frozen is None:
        timing = timing._replace(frozen=first_choice(job, facts))
    dataset = dataset or load_data(options, job, folder)
    tokens = dataset.mean_tokens(job.train.batch_size, job.train.seed, options.name) if dataset else NO_TOKENS
    held_bytes = _data_bytes(options, job, facts, dataset) if dataset else 0
    hardware = describe_hardware(threads=threads, accelerator=device_name(device) if device != "cpu" else "")
    measured, shape = MeasuredWork((), computed_token_bytes(facts, job)), TimedShape()
    if timing is not None:
        subnets = job_subnets(job, facts).count
        shape = job_shape(job, fixed_tokens=facts.fixed_tokens, subnets=subnets, frozen=timing.frozen)
        state = None if options.is_guest else options.state
        budget_bytes = device_budget(memory_bytes, device, sharing=options.device_nodes)
        with capacity_errors(options.name, device, "measuring one block"):
            try:
                measured = timings(
                    job,
                    facts,
                    dataset,
                    shape=shape,
                    device=device,
                    hardware=hardware,
                    state=state,
                    timing=timing,
                    memory_bytes=max(0, budget_bytes - CONTEXT_BYTES) if device == "cuda" else budget_bytes,
                    data_bytes=held_bytes,
                )
            finally:
                keep_freed_memory()  # a run chooses anew, by its plan
        release_memory()
    node = NodeFacts(
        node=options.name,
        train_rows=dataset.train_rows if dataset else 0,
        eval_rows=dataset.eval_rows if dataset else 0,
        labels=dataset.labels if dataset else (),
        eval_labels=dataset.eval_labels if dataset else (),
        skipped_rows=sum(dataset.left_out.values()) if dataset else 0,
        left_out=tuple(SkippedRows(why=why, rows=rows) for why, rows in sorted(dataset.left_out.items()))
        if dataset
        else (),
        cut_rows=dataset.cut_rows if dataset else 0,
        users=dataset.users if dataset else (),
        prompt_tokens=dataset.prompt_tokens if dataset else 0,
        memory_bytes=device_budget(memory_bytes, device, sharing=options.device_nodes),
        threads=threads,
        device=device,
        block_forward_s=full_size_s(measured, Work.FORWARD),
        block_graph_s=full_size_s(measured, Work.GRAPH),
        block_backward_s=full_size_s(measured, Work.BACKWARD),
        activation_token_bytes=measured.activation_token_bytes,
        lowest_token_bytes=measured.lowest_token_bytes,
        model=facts,
        data_bytes=held_bytes,
        hardware=hardware,
        cpu_cores=cpu_cores(),
        train_tokens=tokens.train,
        eval_tokens=tokens.evaluation,
        shape=shape,
        work_times=measured.work_times,
        rested_s=measured.rested_s,
        handling_s=measured.handling_s,
        fast_bfloat16=multiplies_bfloat16_fast(device),
        numerics=numerics_of(device),
        state_free_bytes=None if options.is_guest or options.state is None else room_bytes(options.state),
        state_disk="" if options.is_guest or options.state is None else disk_of(options.state),
        load=load,
        packed=dataset.packed_rows(job.train.batch_size, job.train.seed, options.name) if dataset else None,
    )
    return node.to_message(), dataset


def _data_bytes(options: AgentOptions, job: Job, model: ModelFacts, dataset: OwnerDataset) -> int:
    return data_bytes(
        model,
        tuple(file for file in (options.data, options.eval_data) if file is not None),
        num_owners=options.share[1],
        rows=dataset.train_rows + dataset.eval_rows,
        max_length=job.train.max_length,
        packed_rows=dataset.num_packed,
    )


def load_data(options: AgentOptions, job: Job, tokenizer_folder: Path) -> OwnerDataset | None:
    """Load the rows of this node; None if it was started without ``--data``, or if a job asks for a guest's texts only.

    Raises:
        DataError: a file can't be used.
    """
    writes_only = job.generation is not None and not job.generation.loss
    if options.data is None or (writes_only and not options.is_guest):
        return None
    index, count = options.share
    return OwnerDataset.load(
        job,
        options.data,
        options.eval_data,
        share=index,
        num_owners=count,
        tokenizer_folder=tokenizer_folder,
        hides_counts=not options.own_coordinator,
    )


def build(options: AgentOptions, job: Job, plan: Plan, dataset: OwnerDataset | None) -> NodeExecutor:
    """Build the executor of this node in a run; raises ``DataError`` or ``ModelError``."""
    device, _ = set_up_torch(options, job)
    folder = Path(job.model.path)
    if plan.owner(options.name) is None:
        dataset = None
    elif dataset is None:
        dataset = load_data(options, job, folder)
        if dataset is None:
            raise DataError(f"node {options.name} is an owner in the plan but was started without --data; plan anew")
    if dataset is not None:
        dataset.set_labels(plan.course.labels)
    model, besides_bytes = facts_here(folder, job)
    set_up_heap(
        plan,
        options.name,
        job,
        model,
        memory_bytes=options.memory_bytes or memory_budget(),
        data_bytes=_data_bytes(options, job, model, dataset) if dataset else 0,
        besides_bytes=besides_bytes,
    )
    with capacity_errors(options.name, device, "its part of the model"):
        return NodeExecutor(plan, options.name, job, folder, dataset, device=device)


def audit(options: AgentOptions, run_id: str, job: Job, plan: Plan, executor: NodeExecutor) -> NodeAudit:
    """Make the trail of a node, and the slice of the host whose work it repeats; raises ``ModelError``."""

    def make(again: Plan, node: str) -> NodeExecutor:
        with capacity_errors(options.name, executor.device.type, f"the blocks of node {node} for the audit"):
            return NodeExecutor(again, node, job, Path(job.model.path), None, device=str(executor.device))

    recorder = AuditRecorder(plan, options.name, executor, run_id=run_id, sign=_signed)
    audited = NodeAudit(recorder, plan, make)
    for other in checked_by(plan.placement, options.name)[:1]:
        audited.repeater(other)
    if fits_checked_by(plan.placement, options.name):
        _ = audited.fits
    return audited


def _signed(content: bytes) -> tuple[bytes, bytes]:
    """Sign with this node's certificate; nothing in plain text."""
    if (who := process_credentials()) is None:
        return b"", b""
    from ringtune.transport.identity import sign

    return sign(content, who.identity)


def snapshot(active: ActiveRun, metadata: Mapping[str, str]) -> Snapshot:
    """Make a snapshot of the slice's trained tensors, and at an owner of the head."""
    blocks, is_owner = active.plan.placement.trained_at(active.node), active.plan.owner(active.node) is not None
    return Snapshot(active.executor, blocks, metadata, with_head=is_owner)


def set_up_torch(options: AgentOptions, job: Job) -> tuple[str, int]:
    """Choose the device, and set torch's number of threads; raises ``UsageError``.

    Returns:
        ``cpu`` or ``cuda``, and the number of compute threads.
    """
    threads = options.threads or job.runtime.threads or usable_cores()
    torch.set_num_threads(threads)
    has_cuda = options.device != "cpu" and torch.cuda.is_available()
    if options.device == "cuda" and not has_cuda:
        raise UsageError(f"node {options.name} was started with --device cuda, but torch sees none; use --device cpu")
    return ("cuda" if has_cuda else "cpu"), threads


# ---- links ---------------------------------------------------------------------------------------


def working_clock(executor: NodeExecutor) -> Callable[[], float]:
    """Make the clock of the executor's computing at this node's quota alone; on CUDA it stays at 0."""
    quota = cpu_quota() if executor.device.type == "cpu" else None
    return timing.working_clock(quota, torch.get_num_threads())


def ring_servicer() -> RingServicer:
    """Make the servicer that receives frames."""
    return RingServicer()


def expect(servicer: RingServicer, active: ActiveRun, job: Job) -> None:
    """Receive the frames of a run from now on."""
    expectation = RunExpectation(
        run_id=active.run_id,
        placement_number=active.placement_number,
        plan=active.plan,
        node=active.node,
        compute_dtype=DTYPES[job.model.dtype],
        start=active.start,
        access=active.access,
        reopen_s=job.runtime.lease_s,
        sizes=active.sizes,
    )
    active.lease_s = job.runtime.lease_s
    servicer.expect(expectation, active)


def connect(active: ActiveRun, target: str, address: str) -> OutLink:
    """Make an unopened link to ``target``."""
    hello = Hello(
        run_id=active.run_id,
        placement_number=active.placement_number,
        source=active.node,
        digest=active.plan.digest,
        wire_dtype=active.plan.course.wire_dtype,
    )
    return OutLink(
        target,
        address,
        hello,
        on_ack=active.on_ack,
        on_broken=active.on_link_lost,
        on_sent=active.on_sent,
        on_reopened=active.on_link_reopened,
        reopen_s=active.lease_s,
        now_unix_s=active.clock.now_unix_s,
    )


def kept_file(executor: NodeExecutor, blocks: Collection[int], of: Mapping[str, str]) -> bytes:
    """Copy the trained tensors of some blocks, with optimizer state, into a file; the executor continues.

    ``of`` is run and step, for the file's metadata. Raises ``DivergedError``.
    """
    tensors = {name: value for name, value in executor.part.tensors().items() if _block_of(name) in blocks}
    for name, value in tensors.items():
        if not is_finite(value):
            raise DivergedError(f"the training diverged: {name} is not finite at the turn's end; {LOWER_THE_RATE}")
    return bytes(write_blocks(tensors, blocks, of))


def load_migrated(executor: NodeExecutor, taken: MigratedState) -> None:
    """Replace trained tensors and optimizer state of the next slice by parts of snapshots, of different blocks.

    Raises:
        IntegrityError: a file is unreadable, has other metadata, or its tensors are not those of this slice.
    """
    tensors: dict[str, TensorPieces] = {}
    for content in taken.files:
        file = TensorFile(content, where="a snapshot")
        _check(file, taken.metadata)
        tensors |= {name: file.tensor(name) for name in file.infos}
    executor.part.load_migrated(tensors, blocks={_block_of(name) for name in tensors})
    if taken.head is not None:
        executor.load_head_blob(taken.head)


def _check(file: TensorFile, metadata: Mapping[str, str]) -> None:
    try:
        stored = dict(parse_json(file.metadata[METADATA]))
    except (KeyError, ValueError, TypeError) as error:
        raise IntegrityError("a snapshot has no readable metadata; use one version on all machines") from error
    if stored != dict(metadata):
        raise IntegrityError(f"a snapshot is of {stored}, expected is {dict(metadata)}; start the run again")


def _block_of(name: str) -> int:
    """Block index of a tensor; raises ``IntegrityError`` if it is of no block."""
    block = block_of(name)
    if block < 0:
        raise IntegrityError(f"a snapshot has a tensor {name!r} of no block; use one version on all machines")
    return block
