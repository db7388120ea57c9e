"""Whether stages with several hosts are faster than the best ring: both are judged by the simulator in the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from coordinator.planner.choose import Choice
from coordinator.planner.predict.judge import simulated_steps_s
from coordinator.planner.replicating.layouts import ranked_layouts, slices_of_layout
from coordinator.planner.replicating.reason import ReplicasReason, layout_text
from ringtune.costs.profile import Profile
from ringtune.schedule.plan import Plan
from ringtune.schedule.slice_policy import NONE
from ringtune.schedule.stages.refusals import no_replicas

WORTH: Final = 0.98
"""Stages with several hosts are taken where they need at most this share of the ring's seconds."""

_JUDGED: Final = 5
_TRIED: Final = 60


def choose_replicas(
    plan: Plan,
    choice: Choice,
    profile: Profile,
    *,
    optimizer: str,
    adapter_block_bytes: int,
    is_over: Callable[[], bool],
) -> tuple[Plan | None, ReplicasReason]:
    """Judge the best layouts that fit the nodes' memory beside the best ring.

    Args:
        plan: the best ring.
        choice: how it was found.
        profile: nodes with times, and links.
        optimizer: of the job.
        adapter_block_bytes: of what replicas exchange of each block.
        is_over: whether the time for planning is used up.

    Returns:
        The plan with replicas if it is worth taking, else None; and the reasons.
    """
    costs, draft = choice.costs, choice.best.draft
    if why_not := _why_not(plan, choice):
        return None, ReplicasReason(why_not=why_not)

    def exchange_s(nodes: Sequence[int], blocks: int) -> float:
        return _exchange_s(profile, [costs.names[node] for node in nodes], blocks * adapter_block_bytes)

    fitting: list[Plan] = []
    for layout in ranked_layouts(costs, exchange_s)[:_TRIED]:
        one = draft.placed(slices_of_layout(costs, layout))
        if all(choice.caps.holds(one, node) for node in one.nodes):
            fitting.append(one)
        if len(fitting) == _JUDGED or is_over():
            break
    if not fitting:
        return None, ReplicasReason(why_not="no node has memory for blocks of another one too")
    judged = []
    for one in fitting:
        if is_over():
            break
        judged.append((simulated_steps_s(one, profile, costs, optimizer=optimizer), one))
    if not judged:
        return None, ReplicasReason(why_not="the time for planning was used up")
    ring_s = simulated_steps_s(plan, profile, costs, optimizer=optimizer)
    judged.sort(key=lambda pair: pair[0])
    best_s, best = judged[0]
    is_taken = best_s <= WORTH * ring_s
    texts = tuple((layout_text(one), seconds) for seconds, one in judged)
    return best if is_taken else None, ReplicasReason(ring_s=ring_s, judged=texts, is_taken=is_taken)


def _why_not(plan: Plan, choice: Choice) -> str:
    if reason := no_replicas(plan.course):
        return reason
    if plan.placement.helpers:
        return "helpers fit adapters of one host"
    if plan.course.method.max_hosts == 1:
        return "the method runs all blocks on one node"
    if choice.best.draft.activations != NONE:
        return "memory.activations is decided for slices of their own"
    if plan.course.may_skip:
        return "operation tables are balanced over the hosts of a ring"
    if choice.costs.num_nodes < 2:
        return "there is one node"
    if choice.costs.num_micro < 2:
        return "a step has one micro-batch"
    return ""


def _exchange_s(profile: Profile, names: Sequence[str], num_bytes: float) -> float:
    """Seconds in which each of some nodes sends so many bytes to every other one, one after the other."""
    longest_s = 0.0
    for source in names:
        links = (profile.link_by_pair.get((source, target)) for target in names if target != source)
        longest_s = max(longest_s, sum(link.seconds(num_bytes) for link in links if link is not None))
    return longest_s
