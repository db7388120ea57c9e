"""Which nodes may hold copies that have to stay equal in every bit, and the refusal of others.

Replicas of a stage and HiFT's owners each do the same update of their own copy (``schedule.replica_grads``,
``schedule.stages.replicas``), and digests compare them (``rounds.copy_digests``). Two nodes get the same bits only
where the same kernels run: an optimizer that is fused for CUDA rounds otherwise than the processor's, and a processor's
by its vector instructions. So each node tells its *numeric class* with its facts, and only equal ones hold copies.

Source: PyTorch, Reproducibility: results are not the same across releases, nor between CPU and GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ringtune.costs.profile import NodeFacts
from ringtune.errors import PlanError
from ringtune.schedule.plan import Plan


class Copies(NamedTuple):
    """What some nodes of a plan have alike.

    Attributes:
        what: in words.
        nodes: that update a copy each; at least two.
        remedy: what else the user can do.
    """

    what: str
    nodes: tuple[str, ...]
    remedy: str


def numeric_class(facts: NodeFacts) -> str:
    """Name what the last bits of a node's results depend on: ``cpu x86_64 AVX2, torch 2.11.0``.

    A node that did not tell, of a profile of an earlier version or before any device is bought, has its device alone.
    """
    return facts.numerics or facts.device


def refuse_unlike_copies(plan: Plan, facts: Mapping[str, NodeFacts]) -> None:
    """Refuse a plan whose copies are on nodes of different numeric classes.

    Args:
        plan: with all its placements.
        facts: of every node of the plan, by name.

    Raises:
        PlanError: names the copies, and two nodes with their classes.
    """
    for copies in _copies(plan):
        first = copies.nodes[0]
        for other in copies.nodes[1:]:
            classes = numeric_class(facts[first]), numeric_class(facts[other])
            if classes[0] != classes[1]:
                raise PlanError(
                    f"nodes {first} ({classes[0]}) and {other} ({classes[1]}) would hold copies of {copies.what}, "
                    "which have to be equal in every bit, and they round differently; use one kind of device and one "
                    f"version of torch for both (such as ringtune node --device cpu), or {copies.remedy}"
                )


def _copies(plan: Plan) -> Iterator[Copies]:
    owners = tuple(owner.node for owner in plan.course.owners)
    if plan.course.method.full_parameters and plan.course.num_steps and len(owners) > 1:
        yield Copies("embedding and head", owners, "let one node own all rows (data.owners = 1)")
    for placement in plan.placements:
        for stage in placement.stages:
            if len(stage) > 1:
                nodes = tuple(piece.node for piece in stage)
                yield Copies(f"blocks {stage[0].text}", nodes, "plan anew with placement.replicas = 'never'")
