"""Measurement of a job: works, sizes and links in their order, the rehearsal, and checks of profile and copies.

Links are measured in rounds of pairs, as in a tournament: within a round a node is in at most one pair, and so is a
machine, because pairs that share processors would slow each other down.

Works that are timed one by one lack effects of a ring: neighbours in the same memory, sending during computation, and a
quota for all of it. So ``ringtune measure`` ends with a rehearsal, a few steps of the same ring without a result, and
corrects the times by the rehearsal's actions, as a run does for the next one.

Replicas of a stage, and HiFT's owners, do the same update of their own copies (``schedule.lowering``,
``schedule.stages``), and digests compare them (``techniques.replicas``). Two nodes compute the same bits only with the
same kernels: CUDA's fused optimizers round differently from a processor's, and a processor's depend on its vector
instructions. So each node reports its *numeric class*, and only nodes of equal classes hold copies.

Source: the circle method for round-robin tournaments (Kirkman 1847); PyTorch, Reproducibility: results are not the same
across releases, nor between CPU and GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from ringtune.costs.action_costs import wire_token_bytes
from ringtune.costs.profile import BLOCK_WORKS, ModelFacts, NodeFacts, Profile, TimedShape, Work, WorkTable
from ringtune.errors import PlanError
from ringtune.job.job import Job
from ringtune.schedule.course import AS_COMPUTED, Course, FrozenWeights, name_of
from ringtune.schedule.operation_tables import Policy
from ringtune.schedule.plan import Plan
from ringtune.techniques import TECHNIQUES

Pair = tuple[str, str]


class Size(NamedTuple):
    """Size of a micro-batch: rows, and padded tokens of each row."""

    rows: int
    tokens: int


def job_shape(job: Job, *, fixed_tokens: int = 0, subnets: int = 1, frozen: FrozenWeights | None = None) -> TimedShape:
    """Return the shape of a job's timings: its largest micro-batch, at ``train.max_length`` tokens.

    ``fixed_tokens`` are those of every image; 0 = texts.
    """
    return TimedShape(
        rows=-(-job.train.batch_size // job.train.microbatches),
        tokens=fixed_tokens or job.train.max_length,
        task=job.model.task,
        adapter=job.adapter.config,
        dtype=job.model.dtype,
        wire_dtype=job.wire.dtype,
        optimizer=job.train.optimizer,
        dropout=job.train.dropout,
        subnets=subnets,
        frozen=name_of(frozen),
        compute=job.train.compute or AS_COMPUTED,
    )


def timed_sizes(job: Job, *, fixed_tokens: int = 0) -> tuple[Size, ...]:
    """Return the sizes at which work is timed: the largest micro-batch, and half of it.

    The half has half the tokens, or half the rows for images, which have one length; it is left out if it would be
    empty. Example: 4 rows of 128 tokens are timed at (4, 128) and (4, 64). ``fixed_tokens`` as for ``job_shape``.
    """
    shape = job_shape(job, fixed_tokens=fixed_tokens)
    whole = Size(shape.rows, shape.tokens)
    half = Size(whole.rows // 2, whole.tokens) if fixed_tokens else Size(whole.rows, whole.tokens // 2)
    return (whole, half) if half.rows and half.tokens else (whole,)


def hidden_bytes(job: Job, model: ModelFacts) -> int:
    """Bytes of the widest hidden state of the largest micro-batch at full length, with its mask.

    Example: 4 rows of 128 tokens, 384 wide, in float32: 4 * 128 * (4 * 384 + 1) = 786,944.
    """
    shape = job_shape(job, fixed_tokens=model.fixed_tokens)
    width = max(model.entering, default=model.hidden_size)
    return shape.rows * shape.tokens * (wire_token_bytes(width, job.wire.dtype) + 1)


def link_rounds(nodes: Sequence[str], machines: Mapping[str, str]) -> tuple[tuple[Pair, ...], ...]:
    """Pair every two nodes once, in rounds in which no node and no machine is in two pairs.

    Example: four nodes on machines of their own need three rounds of two pairs.
    """
    rounds: list[tuple[list[Pair], set[str]]] = []  # pairs, and their machines
    for pair in _tournament(sorted(nodes)):
        ends = {machines[node] for node in pair}
        pairs, busy = next((each for each in rounds if not ends & each[1]), ([], set()))
        if not pairs:
            rounds.append((pairs, busy))
        pairs.append(pair)
        busy |= ends
    return tuple(tuple(pairs) for pairs, _ in rounds)


def _tournament(nodes: Sequence[str]) -> Iterator[Pair]:
    """Yield all pairs, round by round, by the circle method: the first node stays, the others rotate.

    With an odd number of nodes one is free in each round.
    """
    seats = [*nodes, *([""] if len(nodes) % 2 else [])]
    half = len(seats) // 2
    for _ in range(len(seats) - 1):
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield from ((first, second) for first, second in pairs if first and second)
        seats = [seats[0], seats[-1], *seats[1:-1]]


SKIPPED_ITEMS: Final = 4
"""First items of a rehearsal that do not count, as kernels, caches and connections are used for the first time."""

REHEARSAL_S: Final = 60.0
"""Most seconds of training in a rehearsal."""

_SHALLOW_STEPS: Final = SKIPPED_ITEMS + 6
_DEEP_STEPS: Final = 14
_TURN_STEPS: Final = 4


def rehearsal_steps(job: Job, num_blocks: int) -> int:
    """Number of steps of a rehearsal: ten with one block, one for each further depth, fourteen with all blocks.

    Example: 29 for six blocks, 47 for twenty-four; 27 for six of which two are private, as these never train.
    """
    return _SHALLOW_STEPS + _deeper(job, num_blocks) + _DEEP_STEPS


def rehearsal_of(job: Job, num_blocks: int) -> Job:
    """Make the job of a rehearsal: the same work in short turns, quickly rising depth, nothing saved."""
    steps = rehearsal_steps(job, num_blocks)
    changes: dict[str, object] = {
        "train.max_steps": 2 * steps,  # it is stopped earlier, as an end evaluates and collects
        "train.local_iterations": min(job.train.local_iterations, _TURN_STEPS),
        "train.eval_every": 0,
        "train.keep_best": False,  # which evaluations judge, as does patience
        "train.patience_evals": 0,
        "train.checkpoint_every": 0,
        "recovery.copies": "none",
        "operations.policy": Policy.STANDARD.value,  # whole blocks; the correction holds for parts too
        "adapter.from": "",  # values don't matter for times
    }
    if job.unfreeze is not None:
        changes["unfreeze.at"] = [_SHALLOW_STEPS + block for block in range(_deeper(job, num_blocks))]
    return dataclasses.replace(job, audit=None).with_overrides(changes)


def _deeper(job: Job, num_blocks: int) -> int:
    return max(0, num_blocks - job.privacy.private_blocks - 1)


def rehearsed(before: Profile, after: Profile) -> Profile:
    """Apply the corrections of a rehearsal to nodes that did not do all works in it.

    ``before`` is the profile of its plan, ``after`` the one corrected by it. Each work that a node did not do is scaled
    by the median ratio of the nodes that did it.
    """
    known, ratios = before.by_name, dict[str, list[float]]()
    by_node = [_ratios(known[node.node], node) for node in after.nodes]
    for work, ratio in itertools.chain.from_iterable(measured.items() for measured in by_node):
        ratios.setdefault(work, []).append(ratio)
    medians = {work: statistics.median(measured) for work, measured in ratios.items()}
    with_messages = any(node.has_messages for node in after.nodes)
    missing = [{work: ratio for work, ratio in medians.items() if work not in measured} for measured in by_node]
    nodes = zip(after.nodes, missing, strict=True)
    return dataclasses.replace(
        after, nodes=tuple(_corrected(node, lacks, with_messages=with_messages) for node, lacks in nodes)
    )


def _ratios(before: NodeFacts, after: NodeFacts) -> dict[str, float]:
    """Seconds after over seconds before of each work that has changed, at the sizes of the points before."""
    if before.work_times == after.work_times:
        return {}
    table = WorkTable(after.work_times, where=f"node {after.node}")
    by_work: dict[str, list[float]] = {}
    for point in before.work_times:
        work = Work(point.work)
        if point.median_s > 0 and work in table:
            by_work.setdefault(point.work, []).append(table.seconds(work, point.size) / point.median_s)
    ratios = {work: statistics.fmean(values) for work, values in by_work.items()}
    return {work: ratio for work, ratio in ratios.items() if abs(ratio - 1) > _SAME}


_SAME: Final = 1e-9


def _corrected(node: NodeFacts, missing: Mapping[str, float], *, with_messages: bool) -> NodeFacts:
    """Scale the works of a node that it did not rehearse by these ratios."""
    if not missing:
        return node
    return dataclasses.replace(
        node,
        work_times=tuple(point.scaled(missing.get(point.work, 1.0)) for point in node.work_times),
        has_messages=node.has_messages or (with_messages and any(work in missing for work in BLOCK_WORKS)),
        block_forward_s=node.block_forward_s * missing.get(Work.FORWARD, 1.0),
        block_graph_s=node.block_graph_s * missing.get(Work.GRAPH, 1.0),
        block_backward_s=node.block_backward_s * missing.get(Work.BACKWARD, 1.0),
    )


def check_profile(profile: Profile, course: Course, *, model_digest: str = "", shape: TimedShape | None = None) -> None:
    """Refuse a profile that does not belong to a course; raises ``PlanError``.

    An empty ``model_digest`` is that of any model, but the same for all nodes. The rows of a micro-batch may differ
    from those of ``shape``, as times are scaled.
    """
    digest = model_digest or (profile.nodes[0].model.digest if profile.nodes else "")
    for node in profile.nodes:
        model = node.model
        if model.digest != digest:
            raise PlanError(
                f"node {node.node} was profiled with another model ({model.digest[:12]}, not {digest[:12]})"
            )
        if (model.num_blocks, model.hidden_size) != (course.num_blocks, course.hidden_size):
            raise PlanError(
                f"the profile is of a model with {model.num_blocks} blocks of width {model.hidden_size}, the run has "
                f"{course.num_blocks} of {course.hidden_size}"
            )
        if shape is not None and node.shape.is_measured:
            for technique in TECHNIQUES:
                if problem := technique.timing_mismatch(course, node):
                    raise PlanError(
                        f"node {node.node} was profiled with {problem}; measure anew with 'ringtune measure'"
                    )
            for name in ("tokens", "task", "adapter", "dtype", "wire_dtype", "optimizer", "dropout"):
                profiled, needed = getattr(node.shape, name), getattr(shape, name)
                if profiled != needed:
                    raise PlanError(
                        f"node {node.node} was profiled with {name} {profiled}, the job has {needed}; "
                        "measure anew with 'ringtune measure'"
                    )


BFLOAT16_INSTRUCTIONS: Final = ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16")
"""Names of instructions that multiply bfloat16, on x86-64 and on ARM; each sums in another order."""


def numeric_class(facts: NodeFacts, course: Course) -> str:
    """Name the hardware and software that determine the last bits of a run: ``cpu x86_64 AVX2, torch 2.11.0``.

    It is the device alone if the profile does not have more. Instructions for bfloat16 count where the course rounds
    its products.
    """
    text = facts.numerics or facts.device
    if not course.rounds_products:
        for name in BFLOAT16_INSTRUCTIONS:
            text = text.replace(f" {name},", ",").replace(f" {name} ", " ")
    return text


def differing_transformers(nodes: Sequence[NodeFacts]) -> list[str]:
    """Say which nodes have which version of transformers; nothing if all have one, as far as they say."""
    by_version: dict[str, list[str]] = {}
    for facts in nodes:
        if "torch" in facts.numerics:
            by_version.setdefault(facts.numerics.partition(", transformers ")[2] or "4", []).append(facts.node)
    if len(by_version) < 2:
        return []
    have = ", ".join(f"{version} on {' and '.join(names)}" for version, names in sorted(by_version.items()))
    return [f"unlike versions of transformers ({have}) differ in the last bits; install one version everywhere"]


def refuse_differing_copies(plan: Plan, facts: Mapping[str, NodeFacts]) -> None:
    """Refuse a plan with copies on nodes of different numeric classes; raises ``PlanError``."""
    for copies in (each for technique in TECHNIQUES for each in technique.copies(plan)):
        first = copies.nodes[0]
        for other in copies.nodes[1:]:
            classes = numeric_class(facts[first], plan.course), numeric_class(facts[other], plan.course)
            if classes[0] != classes[1]:
                raise PlanError(
                    f"nodes {first} ({classes[0]}) and {other} ({classes[1]}) would hold copies of {copies.what}, "
                    "which have to be equal in every bit, and they round differently; use one kind of device and equal "
                    "versions of torch and transformers for both (such as ringtune node --device cpu), or "
                    f"{copies.remedy}"
                )
