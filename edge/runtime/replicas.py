"""Gradients between hosts of the same blocks: sent, summed, and refused if not finite.

Every replica sums the gradients of all hosts in the same order and does the same update, so all replicas stay equal in
bits. A step with a gradient that is not finite is not applied at all.
"""

from __future__ import annotations

import torch
from torch import nn

from edge.model.tensor_files import require_finite_grads
from edge.model.unit_grads import grad_blob, read_grads
from edge.runtime.micro_batches import OpenItem
from edge.runtime.node_model import HostedModel
from ringtune.engine.failure_texts import diverged, may_diverge
from ringtune.errors import DivergedError, PlanError
from ringtune.schedule.actions import Action, TensorKey
from ringtune.schedule.course import Course
from ringtune.schedule.plan import Plan
from ringtune.schedule.stages import replicas
from ringtune.schedule.units import EMBEDDING, unit_name
from ringtune.storage.pieces import Pieces

Grads = dict[str, torch.Tensor | None]


class Replica:
    """Gradients of one host's blocks, with those of the other hosts of its stage.

    A single host of its blocks sums nothing.
    """

    def __init__(self, plan: Plan, node: str, hosted: HostedModel) -> None:
        self._piece, self._blocks = plan.slice_of(node), hosted.blocks
        self._names = replicas(plan.placement, node)
        self._rank = self._names.index(node) if self._names else 0
        self._came: dict[TensorKey, Grads] = {}

    def grads(self, key: TensorKey, entry: OpenItem) -> Pieces:
        """Return the gradients of this host's micro-batches of an item as one safetensors file; they stay unchanged."""
        return grad_blob(self._parameters(key, entry), ())

    def put(self, key: TensorKey, data: Pieces, entry: OpenItem) -> None:
        """Keep the gradients of another host; raises ``IntegrityError`` or ``DivergedError``."""
        where = f"the gradients of item {key.seq} from node {self._names[key.micro]}"
        self._came[key] = read_grads(data, self._parameters(key, entry), where=where)

    def add_up(self, update: Action) -> None:
        """Sum the gradients of all hosts for an update, in ring order.

        No sent tensor is changed in place: the link may still read it.
        """
        if not self._names:
            return
        ranks = {key.micro: self._came.pop(key) for key in list(self._came) if _is_of(key, update)}
        for name, parameter in self._blocks.parameters(update.start, update.stop).items():
            total = None
            for rank in range(len(self._names)):
                grad = parameter.grad if rank == self._rank else ranks[rank][name]
                if grad is not None:
                    total = grad if total is None else total + grad
            parameter.grad = total

    def _parameters(self, key: TensorKey, entry: OpenItem) -> dict[str, nn.Parameter]:
        ranges = entry.trained.ranges_within(self._piece.start, self._piece.stop)
        for start, stop in ranges:
            if start == key.boundary:
                return dict(self._blocks.parameters(start, stop))
        raise PlanError(f"item {key.seq} trains no blocks from {key.boundary} on here, so it has no gradients of them")


def _is_of(key: TensorKey, update: Action) -> bool:
    return (key.seq, key.boundary) == (update.seq, update.start)


def complete_grads(action: Action, entry: OpenItem, course: Course, hosted: HostedModel, replica: Replica) -> None:
    """Sum the gradients of an update over all copies or replicas, and refuse those that are not finite.

    Raises:
        DivergedError: a gradient is not finite; names step, unit and rows.
        PlanError: the node has no embedding and head to update.
    """
    if action.start in (EMBEDDING, course.head):
        if hosted.owner is None:
            raise PlanError(f"{action} needs an owner, which this node is not")
        hosted.owner.complete(action.start)
        units = {action.start: hosted.owner.units[action.start]}
    else:
        replica.add_up(action)
        units = {unit: dict(hosted.optimizers.units.get(unit, {})) for unit in range(action.start, action.stop)}
    if not may_diverge(entry.item):
        return
    try:
        for unit, parameters in units.items():
            name = unit_name(unit, course.head)
            require_finite_grads(parameters, f"the {name}" if unit in (EMBEDDING, course.head) else name)
    except DivergedError as error:
        raise diverged(entry.item, str(error), course=course) from error
