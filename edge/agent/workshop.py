"""The part of an agent that needs torch: a node's facts, the executor, and both ends of the links.

Importing this module loads torch and the model libraries, which takes seconds; the agent does so in the
background after it has joined.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from edge.agent.active_run import ActiveRun
from edge.agent.heap import facts_here, set_up_heap
from edge.agent.snapshots import TakenOver
from edge.agent_options import AgentOptions
from edge.compute.executor import NodeExecutor
from edge.compute.snapshot import Snapshot
from edge.compute.snapshot import kept_file as copy_into_file
from edge.compute.snapshot import take_over as take_over_blocks
from edge.data.rows import NO_TOKENS, OwnerDataset
from edge.machine.accelerator import capacity_errors, device_budget, device_name, numerics_of
from edge.machine.bfloat16 import multiplies_bfloat16_fast
from edge.machine.hardware import describe_hardware
from edge.machine.libraries import load_libraries, touch_kernels
from edge.machine.memory_budget import give_memory_back, memory_budget
from edge.measuring import laps
from edge.measuring.measured_work import MeasuredWork
from edge.measuring.node import full_size_s, timings
from edge.measuring.timing_request import TimingRequest
from edge.shards.state_folder import disk_of, room_bytes
from edge.wire.frames import Hello
from edge.wire.link import OutLink
from edge.wire.server import RingServicer, RunExpectation
from ringtune.costs.facts.job_subnets import job_subnets
from ringtune.costs.facts.model_facts import computed_token_bytes, model_facts
from ringtune.costs.measured.measuring import job_shape
from ringtune.costs.memory.rows import data_bytes
from ringtune.costs.memory.sizes import CONTEXT_BYTES
from ringtune.costs.profile import LeftOut, ModelFacts, NodeFacts, TimedShape
from ringtune.costs.work_times import Work
from ringtune.errors import DataError, UsageError
from ringtune.jobs.job import Job
from ringtune.machine.cores import cpu_cores, cpu_quota, machine_load, usable_cores
from ringtune.schedule.frozen_weights import FrozenWeights
from ringtune.schedule.plan import Plan

_LOG = logging.getLogger(__name__)
_DTYPES = {"float32": torch.float32, "float64": torch.float64}


def preload() -> None:
    """Load the libraries and kernels of a run, which is half of a run's preparation; build nothing yet."""
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
    """Count this node's rows and labels, and time every kind of work.

    Args:
        options: of the agent.
        job: with the model's folder on this machine.
        timing: how to time every kind of work; None = not at all, times are then 0.
        memory_bytes: budget for a run; of an accelerator's memory it may be less, see ``device_budget``.
        dataset: that was loaded for this run before; None = load it.

    Returns:
        ``NodeFacts`` as JSON, and the dataset of an owner.

    Raises:
        ModelError: the model folder can't be used.
        DataError: a data file can't be used.
    """
    load = machine_load()  # before this node's own work
    device, threads = set_up_torch(options, job)
    folder = Path(job.model.path)
    facts = model_facts(folder, job)
    dataset = dataset or load_data(options, job, folder)
    tokens = dataset.mean_tokens(job.train.batch_size, job.train.seed, options.name) if dataset else NO_TOKENS
    hardware = describe_hardware(threads=threads, accelerator=device_name(device) if device != "cpu" else "")
    found = MeasuredWork((), computed_token_bytes(facts, job))
    if timing is not None:
        state = None if options.is_guest else options.state
        budget_bytes = device_budget(memory_bytes, device, sharing=options.device_nodes)
        with capacity_errors(options.name, device, "measuring one block"):
            found = timings(
                job,
                facts,
                dataset,
                device=device,
                hardware=hardware,
                state=state,
                timing=timing,
                memory_bytes=max(0, budget_bytes - CONTEXT_BYTES) if device == "cuda" else budget_bytes,
            )
        give_memory_back()
    node = NodeFacts(
        node=options.name,
        train_rows=dataset.train_rows if dataset else 0,
        eval_rows=dataset.eval_rows if dataset else 0,
        labels=dataset.labels if dataset else (),
        eval_labels=dataset.eval_labels if dataset else (),
        skipped_rows=sum(dataset.left_out.values()) if dataset else 0,
        left_out=tuple(LeftOut(why=why, rows=rows) for why, rows in sorted(dataset.left_out.items()))
        if dataset
        else (),
        cut_rows=dataset.cut_rows if dataset else 0,
        users=dataset.users if dataset else (),
        memory_bytes=device_budget(memory_bytes, device, sharing=options.device_nodes),
        threads=threads,
        device=device,
        block_forward_s=full_size_s(found, Work.FORWARD),
        block_graph_s=full_size_s(found, Work.GRAPH),
        block_backward_s=full_size_s(found, Work.BACKWARD),
        activation_token_bytes=found.activation_token_bytes,
        lowest_token_bytes=found.lowest_token_bytes,
        model=facts,
        data_bytes=_data_bytes(options, job, facts, dataset) if dataset else 0,
        hardware=hardware,
        cpu_cores=cpu_cores(),
        train_tokens=tokens.train,
        eval_tokens=tokens.evaluation,
        shape=_shape(job, facts, timing.frozen) if timing else TimedShape(),
        work_times=found.work_times,
        rested_s=found.rested_s,
        handling_s=found.handling_s,
        fast_bfloat16=multiplies_bfloat16_fast(device),
        numerics=numerics_of(device),
        state_free_bytes=None if options.is_guest or options.state is None else room_bytes(options.state),
        state_disk="" if options.is_guest or options.state is None else disk_of(options.state),
        load=load,
    )
    return node.to_json(), dataset


def _shape(job: Job, model: ModelFacts, frozen: FrozenWeights | None) -> TimedShape:
    """Return the shape that this node's timings belong to."""
    return job_shape(job, fixed_tokens=model.fixed_tokens, subnets=job_subnets(job, model).count, frozen=frozen)


def _data_bytes(options: AgentOptions, job: Job, model: ModelFacts, dataset: OwnerDataset) -> int:
    files = tuple(file for file in (options.data, options.eval_data) if file is not None)
    rows = dataset.train_rows + dataset.eval_rows
    return data_bytes(model, files, num_owners=options.share[1], rows=rows, max_length=job.train.max_length)


def load_data(options: AgentOptions, job: Job, tokenizer_folder: Path) -> OwnerDataset | None:
    """Load the rows of this node; None if it was started without ``--data``.

    Raises:
        DataError: a file can't be used.
    """
    if options.data is None:
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
    """Build the executor of what this node hosts in a run.

    Raises:
        DataError: the plan wants data that this node does not have.
        ModelError: the model folder can't be used.
    """
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


def snapshot(active: ActiveRun, metadata: Mapping[str, str]) -> Snapshot:
    """Keep what the slice of a run has trained, and at an owner the head."""
    piece, is_owner = active.plan.slice_of(active.node), active.plan.owner(active.node) is not None
    return Snapshot(active.executor, piece, metadata, with_head=is_owner)


def kept_file(executor: NodeExecutor, blocks: tuple[int, ...], of: Mapping[str, str]) -> bytes:
    """Copy what was trained of some blocks into a file."""
    return copy_into_file(executor, blocks, of)


def take_over(executor: NodeExecutor, taken: TakenOver) -> None:
    """Go on with what was trained of the blocks of an executor.

    Raises:
        IntegrityError: it is of something else, or damaged.
    """
    take_over_blocks(executor, taken.files, taken.metadata)
    if taken.head is not None:
        executor.load_head_blob(taken.head)


def set_up_torch(options: AgentOptions, job: Job) -> tuple[str, int]:
    """Choose the device, and set torch's number of threads.

    Returns:
        ``cpu`` or ``cuda``, and the number of compute threads.

    Raises:
        UsageError: ``--device cuda`` where torch sees no such device.
    """
    threads = options.threads or job.runtime.threads or usable_cores()
    torch.set_num_threads(threads)
    has_cuda = options.device != "cpu" and torch.cuda.is_available()
    if options.device == "cuda" and not has_cuda:
        raise UsageError(f"node {options.name} was started with --device cuda, but torch sees none; use --device cpu")
    return ("cuda" if has_cuda else "cpu"), threads


# ---- links ---------------------------------------------------------------------------------------


def working_clock(executor: NodeExecutor) -> Callable[[], float]:
    """Make the clock of what the executor's computing takes at this node's quota alone; on CUDA it stands at 0."""
    quota = cpu_quota() if executor.device.type == "cpu" else None
    return laps.working_clock(quota, torch.get_num_threads())


def ring_servicer() -> RingServicer:
    """Make the servicer that takes frames."""
    return RingServicer()


def expect(servicer: RingServicer, active: ActiveRun, job: Job) -> None:
    """Take the frames of a run from now on."""
    expectation = RunExpectation(
        run_id=active.run_id,
        placement_number=active.placement_number,
        plan=active.plan,
        digest=active.plan.digest,
        node=active.node,
        compute_dtype=_DTYPES[job.model.dtype],
        start=active.start,
    )
    servicer.expect(expectation, active)


def connect(active: ActiveRun, target: str, address: str) -> OutLink:
    """Make a link to ``target`` that is not open yet."""
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
        now_unix_s=active.clock.now_unix_s,
    )
