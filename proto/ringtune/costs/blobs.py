"""The largest message that a link takes, and which blobs and parcels a run would send that are larger.

A head is handed over with its optimizer state; where all parameters train, gradients of embedding and head go to the
other owners. Pairs go to a helper, and weights come back. Hosts of the same blocks send each other the gradients of all
that trains of them: they are as large as the blocks where their own weights train. Sizes follow from plan and model, so
that a run which could not send them is refused in planning, and not by a link in the middle of the run.
"""

from __future__ import annotations

import math
from typing import Final

from ringtune.costs.memory.sizes import Sizes
from ringtune.errors import CapacityError, PlanError
from ringtune.quantities import format_bytes
from ringtune.schedule.course import Course
from ringtune.schedule.helping.offload import EXACT, IN_STEP
from ringtune.schedule.plan import Plan
from ringtune.schedule.stages.dealing import replicas
from ringtune.schedule.turns.versions import ever_trained
from ringtune.schedule.units import EMBEDDING

MAX_BLOB_BYTES: Final = 1 << 30
"""Bytes of the largest head with its moments, gradient of a unit, parcel, or probe, that is admitted."""


def check_blobs(course: Course, sizes: Sizes) -> None:
    """Refuse a course that would send something larger than a link takes.

    Example: the whole table of 262,144 tokens of width 1,152 is 1.13 GiB, which a tied model sends with each update.

    Raises:
        PlanError: names it, both numbers, and what can be done.
    """
    if len(course.owners) < 2 or not course.num_steps:
        return
    if not course.method.full_parameters:
        smaller = "set train.optimizer = 'sgd', which keeps no state, or " if sizes.head_bytes <= MAX_BLOB_BYTES else ""
        _check("head with its optimizer state", sizes.head_bytes + sizes.head_state_bytes, smaller)
        return
    reach = ever_trained(course)
    if course.head in reach:
        _check("gradient of the head", sizes.unit_grad_bytes(course.head), "")
    if EMBEDDING in reach:
        smaller = "" if sizes.is_tied else "lower train.batch_size or train.max_length, or "
        what = "gradient of the embedding, a table tied to the head," if sizes.is_tied else "gradient of the embedding"
        _check(what, sizes.unit_grad_bytes(EMBEDDING), smaller)


def check_parcels(plan: Plan, sizes: Sizes) -> None:
    """Refuse helpers that would get pairs, or send weights, that are larger than a link takes; and such replicas.

    Args:
        plan: with its helpers, or several hosts of the same blocks.
        sizes: of its course, at any node.

    Raises:
        CapacityError: names host and helper, or the hosts, both numbers, and what can be done.
    """
    course = plan.course
    for stage in plan.placement.stages:
        num_bytes = _replica_grad_bytes(plan, stage[0].node, sizes)
        if num_bytes > MAX_BLOB_BYTES:
            names = ", ".join(piece.node for piece in stage)
            raise CapacityError(
                f"the gradient of blocks {stage[0].text}, which nodes {names} send each other, has up to "
                f"{format_bytes(num_bytes)}, a message at most {format_bytes(MAX_BLOB_BYTES)}; give each other blocks, "
                "or take smaller adapters"
            )
    manner = course.offload.manner if course.offload is not None else IN_STEP
    pairs = math.ceil(sizes.sent_pair_bytes(course.microbatch_sizes()[0] * course.max_length))
    smaller = "raise train.microbatches, "
    if manner.pairs == EXACT:
        smaller += "set offload.pairs = 'bfloat16', "
    for helper in plan.placement.helpers:
        where = f"{plan.placement.host_of(helper.start)}'s blocks {helper.text}"
        blocks = helper.stop - helper.start
        for what, num_bytes, remedy in (
            (f"pairs of {where} for helper {helper.node}", blocks * pairs, smaller),
            (f"adapters of {where} from helper {helper.node}", blocks * sizes.helped.sent, "take smaller adapters, "),
        ):
            if num_bytes > MAX_BLOB_BYTES:
                raise CapacityError(
                    f"the {what} have up to {format_bytes(num_bytes)}, a message at most "
                    f"{format_bytes(MAX_BLOB_BYTES)}; {remedy}or leave {where} without helper (offload.mode)"
                )


def takes_replica_grads(plan: Plan, node: str, sizes: Sizes) -> bool:
    """Whether links take the gradients that a node sends to other hosts of its blocks; it may be the only host."""
    return _replica_grad_bytes(plan, node, sizes) <= MAX_BLOB_BYTES


def _replica_grad_bytes(plan: Plan, node: str, sizes: Sizes) -> int:
    if not replicas(plan.placement, node):
        return 0
    piece = plan.slice_of(node)
    ranges = ever_trained(plan.course).ranges_within(piece.start, piece.stop)
    return max((stop - start for start, stop in ranges), default=0) * sizes.adapter_bytes


def _check(what: str, num_bytes: int, remedy: str) -> None:
    if num_bytes > MAX_BLOB_BYTES:
        raise PlanError(
            f"the {what} has up to {format_bytes(num_bytes)}, a message between owners at most "
            f"{format_bytes(MAX_BLOB_BYTES)}; {remedy}give one node all rows (data.owners = 1, or --data at one node)"
        )
