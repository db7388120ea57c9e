"""Which nodes help others, where a job leaves it to the planner (``offload.mode = "auto"``).

Slices and ring are chosen first, as if nobody helped. Then, slowest host first, each other node is tried as its helper:
the simulator runs the job with it and without it, with all that this takes of links, processors and memory. The best
one is taken if the job gets faster by ``WORTH``. Where nothing fits without helpers, each node is helped by the one of
the others with the most memory, and those that fit without it are left alone again. Where each user has adapters of
their own every host needs a helper, whether it pays or not: see ``needed``.

Source: ColA, section 3.2 (offloading pays where pairs travel faster than gradients are computed).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final

from coordinator.planner.choose import Choice
from coordinator.planner.draft import Draft
from coordinator.planner.effort import Effort
from coordinator.planner.even import block_s
from coordinator.planner.explaining.helpers import HelpersReason, Trial
from coordinator.planner.helping.judging import MOST_TRIED, Judge, chosen_with
from coordinator.planner.helping.needed import with_needed_helpers
from coordinator.planner.planned import Planned
from ringtune.costs.profile import Profile
from ringtune.errors import CapacityError, StorageError
from ringtune.jobs.job import Job
from ringtune.jobs.parts.offload import AUTO
from ringtune.schedule.helped import helped, helpers_by_host
from ringtune.schedule.plan import Plan

WORTH: Final = 0.99
"""A helper is taken if the job takes at most so much of its time without: predictions are not closer than that."""

Refuse = Callable[[Plan], Planned]
"""Checks the memory of a plan; raises ``CapacityError`` where a node has too little."""


def with_helpers(
    job: Job,
    drafts: Sequence[Draft],
    profile: Profile,
    effort: Effort,
    placed: Callable[[Sequence[Draft]], Planned],
    refuse: Refuse,
) -> Planned:
    """Place drafts, with helpers where the job leaves them to the planner and they pay.

    Args:
        job: with its wish.
        drafts: to be placed.
        profile: of all nodes.
        effort: how hard to look.
        placed: places drafts.
        refuse: checks the memory of a plan.

    Raises:
        CapacityError: nothing fits, with helpers or without.
    """
    if job.offload.mode != AUTO or not drafts[0].course.num_steps:
        return placed(drafts)
    if job.offload.manner.has_users:
        return with_needed_helpers(job, drafts, profile, effort, placed, refuse)
    try:
        planned = placed(drafts)
    except CapacityError:
        found = _where_it_fits(drafts, profile, placed, refuse)
        if found is None:
            raise
        return found
    return _where_it_pays(job, planned, profile, effort, refuse)


# ---- where nothing fits otherwise ------------------------------------------------------------------


def _where_it_fits(
    drafts: Sequence[Draft], profile: Profile, placed: Callable[[Sequence[Draft]], Planned], refuse: Refuse
) -> Planned | None:
    """Let the roomiest other node help each node, or the roomiest all others; None if nothing fits then either."""
    by_room = [node.node for node in sorted(profile.nodes, key=lambda node: (-node.memory_bytes, node.node))]
    if len(by_room) < 2:
        return None
    roomiest, next_one = by_room[:2]
    all_others = dict.fromkeys(by_room[1:], roomiest)
    planned = None
    for helper_of in ({**all_others, roomiest: next_one}, all_others):
        try:
            planned = placed([dataclasses.replace(draft, helper_of=helper_of) for draft in drafts])
            break
        except (CapacityError, StorageError):
            continue
    if planned is None:
        return None
    manner = drafts[0].manner
    for host in list(helpers_by_host(planned.plan)):
        fewer = {one: helper for one, helper in helpers_by_host(planned.plan).items() if one != host}
        try:
            kept = refuse(helped(planned.plan, fewer, manner))
        except (CapacityError, StorageError):
            continue
        planned = dataclasses.replace(planned, plan=kept.plan, memory=kept.memory)
    taken = helpers_by_host(planned.plan)
    trials = tuple(Trial(host=host, helper=helper, is_taken=True) for host, helper in taken.items())
    reason = HelpersReason(trials=trials, note="no split of the blocks fits without a helper")
    return dataclasses.replace(planned, choice=chosen_with(planned.choice, taken, None), helping=reason)


# ---- where the job gets faster ---------------------------------------------------------------------


def _where_it_pays(job: Job, planned: Planned, profile: Profile, effort: Effort, refuse: Refuse) -> Planned:
    choice = planned.choice
    if choice is None or not effort.judged_actions:
        note = "nobody helps, as links were not measured, so that it is not known what pairs take"
        return dataclasses.replace(planned, helping=HelpersReason(note=note))
    search = _Search(job, planned.plan, profile, effort, choice, refuse)
    search.run()
    if search.best is None:
        note = "planning ran out of time or of steps to simulate before helpers were tried" if search.is_cut else ""
        return dataclasses.replace(planned, helping=HelpersReason(trials=tuple(search.trials), note=note))
    taken = helpers_by_host(search.best.plan)
    return dataclasses.replace(
        planned,
        plan=search.best.plan,
        memory=search.best.memory,
        choice=chosen_with(choice, taken, search.best_s),
        helping=HelpersReason(trials=tuple(search.trials)),
    )


class _Search:
    """The trials of helpers for one plan, and the best plan so far.

    Attributes:
        trials: made so far.
        best: the plan with the helpers that were taken; None while there are none.
        best_s: its seconds; those of the plan without helpers while there are none.
        is_cut: whether the clock or the simulator's limit ended the trials.
    """

    def __init__(self, job: Job, plan: Plan, profile: Profile, effort: Effort, choice: Choice, refuse: Refuse) -> None:
        self._job, self._plan, self._profile, self._refuse = job, plan, profile, refuse
        self._judge = Judge(choice, profile, effort, optimizer=job.train.optimizer)
        self.trials: list[Trial] = []
        self.best: Planned | None = None
        self.best_s: float | None = None
        self.is_cut = False

    def run(self) -> None:
        """Try helpers for each host, slowest first."""
        self.best_s = self._judge.seconds(self._plan)
        slowest = {node.node: block_s(node) for node in self._profile.nodes}
        hosts = [piece.node for piece in self._plan.placement.hosts]
        for host in sorted(hosts, key=lambda name: (-slowest[name], name)):
            others = sorted((name for name in slowest if name != host), key=lambda name: (slowest[name], name))
            if self.best_s is None or not self._try(host, others[:MOST_TRIED]):
                self.is_cut = True
                return

    def _try(self, host: str, others: Sequence[str]) -> bool:
        """Try some nodes as the helper of a host, and take the best if it is worth it; False if the time is over."""
        before, before_s = self.best, self.best_s
        taken = helpers_by_host(before.plan) if before is not None else {}
        best: tuple[float, int, Planned] | None = None
        for helper in others:
            trial = Trial(host=host, helper=helper, without_s=before_s)
            plan = helped(self._plan, {**taken, host: helper}, self._job.offload.manner)
            if plan.placement.helpers == (before.plan if before is not None else self._plan).placement.helpers:
                return True  # no block of this host trains
            try:
                checked = self._refuse(plan)
            except (CapacityError, StorageError) as error:
                self.trials.append(dataclasses.replace(trial, full=str(error)))
                continue
            with_s = self._judge.seconds(plan)
            if with_s is None:
                return False
            self.trials.append(dataclasses.replace(trial, with_s=with_s))
            if best is None or with_s < best[0]:
                best = with_s, len(self.trials) - 1, checked
        if best is not None and before_s is not None and best[0] <= WORTH * before_s:
            self.best_s, at, self.best = best
            self.trials[at] = dataclasses.replace(self.trials[at], is_taken=True)
        return True
