"""Bytes of pairs and weights that a helper's blocks take, of a model with its adapters (``ModelFacts``)."""

from __future__ import annotations

from ringtune.costs.kind_facts import KindFacts
from ringtune.costs.offload.pair_bytes import BFLOAT16, VELORA
from ringtune.costs.offload.set_bytes import set_bytes
from ringtune.costs.profile import ModelFacts, NodeFacts
from ringtune.schedule.helping.helpers import Helper
from ringtune.schedule.helping.offload import EXACT, Offload
from ringtune.schedule.plan import Plan


def wire_of(offload: Offload | None) -> str:
    """How the pairs of a run travel."""
    return EXACT if offload is None else offload.pairs


def pair_token_bytes(model: ModelFacts, wire: str) -> int:
    """Bytes of one block's pairs for each padded token, as they travel; without VeLoRA's vectors of the first ones.

    Where users have several kinds of adapters, those of the kind with most of them.
    """
    return max([_of_kind(model, wire), *(_of_kind(kind, wire) for kind in model.kinds)])


def _of_kind(kind: ModelFacts | KindFacts, wire: str) -> int:
    return {BFLOAT16: kind.pair_rounded_token_bytes, VELORA: kind.pair_projected_token_bytes}.get(
        wire, kind.pair_token_bytes
    )


def step_traffic(plan: Plan, helper: Helper, facts: NodeFacts) -> tuple[float, float]:
    """Bytes that a helper's blocks send at one step in which all train, and bytes that come back at an update.

    Args:
        plan: of the run.
        helper: of it.
        facts: of any node, for the model; rows count with the longest text of the job.
    """
    course, blocks = plan.course, helper.stop - helper.start
    tokens = course.batch_size * course.max_length
    return (
        tokens * blocks * pair_token_bytes(facts.model, wire_of(course.offload)),
        blocks * set_bytes(course, facts.model, adapter=facts.shape.adapter).sent,
    )
