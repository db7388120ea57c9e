"""Helpers where each user has adapters of their own: every host of blocks that may train needs one.

A host never trains users' adapters itself. Slices and ring are chosen with one helper for all other nodes: the fastest
node, or else the one with the most memory; it hosts blocks too, with the next one as its helper, or only helps. The
first of these with which all fits is taken. Then, slowest host first, other nodes are tried as its helper by the
simulator, and the fastest is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from coordinator.planner.draft import Draft
from coordinator.planner.effort import Effort
from coordinator.planner.even import block_s
from coordinator.planner.explaining.helpers import HelpersReason, Trial
from coordinator.planner.helping.judging import MOST_TRIED, Judge, chosen_with
from coordinator.planner.planned import Planned
from ringtune.costs.profile import Profile
from ringtune.errors import CapacityError, JobError, StorageError
from ringtune.jobs.job import Job
from ringtune.schedule.helped import helped, helpers_by_host
from ringtune.schedule.helping.offload import JOINT
from ringtune.schedule.plan import Plan


def with_needed_helpers(
    job: Job,
    drafts: Sequence[Draft],
    profile: Profile,
    effort: Effort,
    placed: Callable[[Sequence[Draft]], Planned],
    refuse: Callable[[Plan], Planned],
) -> Planned:
    """Place drafts with a helper for every host of blocks that may train.

    Args:
        job: whose users have adapters of their own.
        drafts: to be placed.
        profile: of all nodes.
        effort: how hard to look.
        placed: places drafts.
        refuse: checks the memory of a plan; raises ``CapacityError`` where a node has too little.

    Raises:
        JobError: there is one node only.
        CapacityError: nothing fits, whoever helps.
        StorageError: no disk has room, whoever helps.
    """
    users = f"offload.users = {job.offload.users!r}"
    if len(profile.nodes) < 2:
        raise JobError(
            f"{users} needs a helper for every host of blocks that may train, and node {profile.nodes[0].node}, the "
            f"only one of this run, can't help itself; add a node, or set offload.users = {JOINT!r}"
        )
    planned, full, no_room = None, "", None
    for helper_of in _maps(profile):
        try:
            planned = placed([dataclasses.replace(draft, helper_of=helper_of) for draft in drafts])
            break
        except CapacityError as error:
            full = full or str(error)
        except StorageError as error:
            no_room = no_room or error
    if planned is None and no_room is not None and not full:
        raise no_room
    if planned is None:
        raise CapacityError(
            f"{full}; with {users} every host of blocks that may train needs a helper with room for all users' "
            f"adapters: add a node with more memory, or set offload.users = {JOINT!r}"
        )
    why = f"{users}, so every host of blocks that may train has one, whether it pays or not"
    return _with_fastest(job, planned, profile, effort, refuse, why)


def _maps(profile: Profile) -> Iterator[Mapping[str, str]]:
    """Who could help whom, the likely best first."""
    by_speed = sorted(profile.nodes, key=lambda node: (block_s(node), node.node))
    by_room = sorted(profile.nodes, key=lambda node: (-node.memory_bytes, node.node))
    for nodes in (by_speed, by_room):
        first, second = nodes[0].node, nodes[1].node
        others = {node.node: first for node in nodes[1:]}
        yield {**others, first: second}
        yield others


def _with_fastest(
    job: Job, planned: Planned, profile: Profile, effort: Effort, refuse: Callable[[Plan], Planned], why: str
) -> Planned:
    """Try other helpers of each host, and keep the fastest."""
    best, manner = planned, job.offload.manner
    judge = Judge(planned.choice, profile, effort, optimizer=job.train.optimizer) if planned.choice else None
    best_s = judge.seconds(planned.plan) if judge is not None and effort.judged_actions else None
    slowest = {node.node: block_s(node) for node in profile.nodes}
    trials: list[Trial] = []
    hosts = sorted(helpers_by_host(planned.plan), key=lambda name: (-slowest[name], name))
    for host in hosts:
        first = helpers_by_host(planned.plan)[host]
        found = [Trial(host=host, helper=first, with_s=best_s)]
        taken = 0
        others = sorted(slowest.keys() - {host, first}, key=lambda name: (slowest[name], name))
        for helper in others[:MOST_TRIED]:
            if judge is None or best_s is None:
                break
            trial = Trial(host=host, helper=helper)
            try:
                checked = refuse(helped(best.plan, {**helpers_by_host(best.plan), host: helper}, manner))
            except (CapacityError, StorageError) as error:
                found.append(dataclasses.replace(trial, full=str(error)))
                continue
            with_s = judge.seconds(checked.plan)
            if with_s is None:
                break
            found.append(dataclasses.replace(trial, with_s=with_s))
            if with_s < best_s:
                best_s, taken = with_s, len(found) - 1
                best = dataclasses.replace(best, plan=checked.plan, memory=checked.memory)
        trials += [dataclasses.replace(one, is_taken=at == taken) for at, one in enumerate(found)]
    reason = HelpersReason(trials=tuple(trials), note=why, is_needed=True)
    return dataclasses.replace(
        best, choice=chosen_with(planned.choice, helpers_by_host(best.plan), best_s), helping=reason
    )
