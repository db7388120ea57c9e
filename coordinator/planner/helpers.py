"""Helpers (offload): those that a job names, or those that the planner chooses (``offload.mode = "auto"``).

The planner chooses slices and ring first, without helpers. Then, slowest host first, each other node is tried as its
helper: the simulator runs the job with it and without it, with all that this takes of links, processors and memory. The
best one is taken if the job gets faster by ``WORTH``. Where nothing fits without helpers, each node gets the other node
with the most memory as its helper; those that fit without it lose it again.

Where each user has adapters of their own, every host of blocks that may train needs a helper, whether it pays or not:
a host never trains users' adapters itself. Slices and ring are then chosen with one helper for all other nodes: the
fastest node, or else the one with the most memory; it hosts blocks too, with the next one as its helper, or only helps.
The first of these with which all fits is taken. Then, slowest host first, the simulator tries other nodes as its
helper, and the fastest is kept.

Source: ColA, section 3.2 (offloading pays where pairs travel faster than gradients are computed).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from coordinator.planner.draft import Draft
from coordinator.planner.judge import simulated_job_s
from coordinator.planner.limits import Effort
from coordinator.planner.planned import Planned
from coordinator.planner.search import Choice, block_s
from ringtune.costs.profile import Profile
from ringtune.errors import CapacityError, JobError, PlanError, StorageError
from ringtune.job.job import Job
from ringtune.schedule.course import IN_STEP, JOINT, HelperSettings
from ringtune.schedule.plan import Plan
from ringtune.techniques.offload import AUTO, helped, helpers_by_host
from ringtune.techniques.offload_report import HelpersReason, Trial


def check_given_helpers(job: Job, plan: Plan) -> None:
    """Refuse a given plan with other helpers than its job names; where the job lets the planner choose, any will do.

    Raises:
        PlanError: says who helps whom in the plan and in the job.
    """
    wish = job.offload
    if wish.mode == AUTO:
        _check_manner(job, plan)
        return
    if helped(plan, wish.helpers, wish.manner) != plan:
        raise PlanError(
            f"the plan has {_text(helpers_by_host(plan))}, the job says offload.mode = {_text(wish.helpers)} with "
            f"{_manner_text(wish.manner)}; plan anew, or change [offload]"
        )


def _check_manner(job: Job, plan: Plan) -> None:
    offload = plan.course.offload
    has = offload.manner if offload else IN_STEP
    helps = bool(plan.placement.helpers)
    if (helps or job.offload.manner.has_users) and has != job.offload.manner:
        text = f"helpers with {_manner_text(has)}" if helps else "no helpers"
        raise PlanError(
            f"the plan has {text}, the job says {_manner_text(job.offload.manner)}; plan anew, or change [offload]"
        )


def unhelped_note(job: Job, plan: Plan) -> str:
    """Say which hosts a job names helpers for although none of their blocks trains; empty if there are none."""
    idle = [host for host in job.offload.helpers if host not in helpers_by_host(plan)]
    return (
        f"offload.mode names helpers for {', '.join(idle)}, where no block trains: nobody helps there" if idle else ""
    )


def _manner_text(manner: HelperSettings) -> str:
    more = [word for word, is_so in (("merged", manner.merged), ("overlap", manner.overlap)) if is_so]
    more += [f"users {manner.users}"] if manner.has_users else []
    return ", ".join([f"interval {manner.interval}", f"pairs in {manner.pairs}", *more])


def _text(helper_of: object) -> str:
    return str(helper_of) if helper_of else "no helpers"


MAX_TRIED: Final = 3
"""Most nodes that are tried as the helper of one host: those whose blocks take the least time."""


class Judge:
    """Judges plans that have the chosen ring, and differ in their helpers.

    Args:
        choice: of the ring.
        profile: of all nodes.
        effort: limits of the search; the clock begins now.
        optimizer: of the job.
    """

    def __init__(self, choice: Choice, profile: Profile, effort: Effort, *, optimizer: str) -> None:
        self._choice, self._profile, self._optimizer = choice, profile, optimizer
        self._max_actions = effort.judged_actions
        self._clock = effort.clock()

    def seconds(self, plan: Plan) -> float | None:
        """Seconds of all steps by the simulator; None if the time is over, or it can't be afforded."""
        return simulated_job_s(
            plan,
            self._profile,
            self._choice.settled.costs if self._choice.settled is not None else self._choice.costs,
            self._choice.runs.ring,
            optimizer=self._optimizer,
            max_actions=self._max_actions,
            is_over=self._clock.is_over,
        )


def chosen_with(choice: Choice | None, taken: Mapping[str, str], seconds: float | None) -> Choice | None:
    """The choice of a plan that got helpers, so that what is explained and predicted has them too."""
    if choice is None:
        return None
    draft = dataclasses.replace(choice.best.draft, helper_of=dict(taken))
    simulated_s = choice.best.simulated_s if seconds is None else seconds
    return dataclasses.replace(choice, best=dataclasses.replace(choice.best, draft=draft, simulated_s=simulated_s))


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
        job: one with users that have adapters of their own.
        drafts: to be placed.
        profile: of all nodes.
        effort: limits of the search.
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
        for helper in others[:MAX_TRIED]:
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
        effort: limits of the search.
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
            if self.best_s is None or not self._try(host, others[:MAX_TRIED]):
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
