"""Helpers (offload): those that a job names, or those that the planner chooses (``offload.mode = "auto"``).

With ``auto`` slices and ring are chosen first, without helpers. Then, slowest host first, other nodes are tried as its
helper: the simulator runs the job with and without. The fastest helper is taken if the job's seconds fall to ``WORTH``
of those without, or less. If nothing fits without helpers, every node gets the other node with the most memory as its
helper, and those that fit without it lose it again.

Where each user has adapters of their own, every host of trainable blocks needs a helper: a host never trains users'
adapters itself. Slices and ring are then chosen with one helper for all other nodes: the fastest node, or else the one
with the most memory. That node hosts blocks too, with the second one as its helper, or only helps. The first assignment
that fits is taken. Then, slowest host first, other nodes are simulated as its helper, and the fastest is kept.

Source: ColA, section 3.2 (offloading pays where pairs travel faster than gradients are computed).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from coordinator.planner.draft import Draft
from coordinator.planner.judge import Ranking, simulated_job_s
from coordinator.planner.limits import Effort
from coordinator.planner.planned import Fitting, HelpersReason, Planned, Trial, first_that_fits
from coordinator.planner.search import RingChoice, block_s
from ringtune.costs.profile import Profile
from ringtune.errors import CapacityError, JobError, StorageError
from ringtune.job.job import Job
from ringtune.schedule.course import JOINT
from ringtune.techniques.offload import AUTO, TECHNIQUE, helped, helpers_by_host, unhelped_reason

MAX_TRIED: Final = 3
"""Most nodes that are tried as the helper of one host: those with the fastest blocks."""


def chosen_with(choice: RingChoice | None, taken: Mapping[str, str], seconds: float | None) -> RingChoice | None:
    """Return the choice of a plan with helpers: explanations and predictions read it."""
    if choice is None:
        return None
    draft = dataclasses.replace(choice.best.draft, helper_of=dict(taken))
    simulated_s = choice.best.simulated_s if seconds is None else seconds
    return dataclasses.replace(choice, best=dataclasses.replace(choice.best, draft=draft, simulated_s=simulated_s))


_Placing = Callable[[Sequence[Draft]], Planned]
"""Drafts -> the best plan of them; raises an error if none fits."""


def _placing(drafts: Sequence[Draft], placed: _Placing) -> Callable[[Mapping[str, str]], Planned]:
    """Return the function that places drafts with given helpers, host -> helper."""
    return lambda helper_of: placed([dataclasses.replace(draft, helper_of=helper_of) for draft in drafts])


def with_needed_helpers(
    job: Job, drafts: Sequence[Draft], profile: Profile, effort: Effort, placed: _Placing, fitting: Fitting
) -> Planned:
    """Place drafts with a helper for every host of trainable blocks.

    Raises:
        JobError: there is only one node.
        CapacityError: nothing fits with any helpers.
        StorageError: nothing fits on the disks with any helpers.
    """
    users = f"offload.users = {job.offload.users!r}"
    if len(profile.nodes) < 2:
        raise JobError(
            f"{users} needs a helper for every host of blocks that may train, and node {profile.nodes[0].node}, the "
            f"only one of this run, can't help itself; add a node, or set offload.users = {JOINT!r}"
        )
    planned, refused = first_that_fits(helper_maps(profile), _placing(drafts, placed))
    if planned is None:
        full = next((error for error in refused if isinstance(error, CapacityError)), None)
        if full is None:
            raise refused[0]
        raise CapacityError(
            f"{full}; with {users} every host of blocks that may train needs a helper with room for all users' "
            f"adapters: add a node with more memory, or set offload.users = {JOINT!r}"
        )
    why = f"{users}, so every host of blocks that may train has one, whether it pays or not"
    trials = _Trials(job, planned, profile, effort, fitting)
    firsts = helpers_by_host(planned.plan)
    for host in trials.slowest_first(firsts):
        trials.run(host, worth=1.0, first=firsts[host])
    return dataclasses.replace(
        trials.best,
        choice=chosen_with(planned.choice, helpers_by_host(trials.best.plan), trials.best_s),
        helping=HelpersReason(trials=tuple(trials.trials), note=why, is_needed=True),
    )


def helper_maps(profile: Profile) -> Iterator[Mapping[str, str]]:
    """Yield maps host -> helper for two nodes or more: two with the fastest as helper, two with the roomiest."""
    by_speed = sorted(profile.nodes, key=lambda node: (block_s(node), node.node))
    by_room = sorted(profile.nodes, key=lambda node: (-node.memory_bytes, node.node))
    for nodes in (by_speed, by_room):
        first, second = nodes[0].node, nodes[1].node
        others = {node.node: first for node in nodes[1:]}
        yield {**others, first: second}
        yield others


WORTH: Final = 0.99
"""A helper is taken if the job's seconds with it are at most this share of those without it."""

_NOT_FITTED: Final = (
    f"{TECHNIQUE.left_out}: offload.mode = {AUTO!r} can't go with this adapter.config in this model, which no helper "
    "can fit; name helpers in offload.mode to see why, or set offload.mode = 'off'"
)


def with_helpers(
    job: Job, drafts: Sequence[Draft], profile: Profile, effort: Effort, placed: _Placing, fitting: Fitting
) -> Planned:
    """Place drafts, with helpers if the job leaves them to the planner and they make the job faster.

    Raises ``CapacityError``: nothing fits, with helpers or without.
    """
    if job.offload.mode != AUTO or not drafts[0].course.num_steps or unhelped_reason(job):
        return placed(drafts)
    if job.offload.helper_settings.has_users:
        return with_needed_helpers(job, drafts, profile, effort, placed, fitting)
    if not all(node.model.pair_token_bytes for node in profile.nodes):
        planned = placed(drafts)
        return dataclasses.replace(planned, left_out=(*planned.left_out, _NOT_FITTED))
    try:
        planned = placed(drafts)
    except CapacityError:
        helped_plan = _where_it_fits(drafts, profile, placed, fitting)
        if helped_plan is None:
            raise
        return helped_plan
    return _where_it_pays(job, planned, profile, effort, fitting)


# ---- helpers because nothing fits without -----------------------------------------------------------


def _where_it_fits(drafts: Sequence[Draft], profile: Profile, placed: _Placing, fitting: Fitting) -> Planned | None:
    """Place drafts with the node with the most memory as the helper of all others; None if that does not fit either."""
    roomiest = list(helper_maps(profile))[2:] if len(profile.nodes) > 1 else ()
    planned, _ = first_that_fits(roomiest, _placing(drafts, placed))
    if planned is None:
        return None
    settings = drafts[0].helper_settings
    for host in list(helpers_by_host(planned.plan)):
        fewer = {name: helper for name, helper in helpers_by_host(planned.plan).items() if name != host}
        with contextlib.suppress(CapacityError, StorageError):
            planned = planned.moved_to(helped(planned.plan, fewer, settings), fitting)
    taken = helpers_by_host(planned.plan)
    trials = tuple(Trial(host=host, helper=helper, is_taken=True) for host, helper in taken.items())
    reason = HelpersReason(trials=trials, note="no split of the blocks fits without a helper")
    return dataclasses.replace(planned, choice=chosen_with(planned.choice, taken, None), helping=reason)


# ---- helpers because they make the job faster --------------------------------------------------------


def _where_it_pays(job: Job, planned: Planned, profile: Profile, effort: Effort, fitting: Fitting) -> Planned:
    choice = planned.choice
    if choice is None or not effort.judged_actions:
        note = "no helpers, as links were not measured, so the time of pairs is not known"
        return dataclasses.replace(planned, helping=HelpersReason(note=note))
    trials = _Trials(job, planned, profile, effort, fitting)
    course, placement = planned.plan.course, planned.plan.placement
    training = [piece.node for piece in placement.hosts if course.trainable.ranges_within(piece.start, piece.stop)]
    for host in trials.slowest_first(training):
        if not trials.is_cut:
            trials.run(host, worth=WORTH)
    taken = helpers_by_host(trials.best.plan)
    if not taken:
        is_cut = trials.is_cut
        note = "planning ran out of time or of steps to simulate before helpers were tried" if is_cut else ""
        return dataclasses.replace(planned, helping=HelpersReason(trials=tuple(trials.trials), note=note))
    choice = chosen_with(choice, taken, trials.best_s)
    return dataclasses.replace(trials.best, choice=choice, helping=HelpersReason(trials=tuple(trials.trials)))


class _Trials:
    """Helpers that are tried for one host after the other, and the best plan so far.

    Attributes:
        best: the plan with the helpers that were taken.
        best_s: its seconds of all steps by the simulator; None if it could not be simulated.
        is_cut: whether the clock or the simulator's limit ended them.
    """

    def __init__(self, job: Job, planned: Planned, profile: Profile, effort: Effort, fitting: Fitting) -> None:
        self._settings, self._choice = job.offload.helper_settings, planned.choice
        self._profile, self._fitting = profile, fitting
        self._max_actions, self._clock = effort.judged_actions, effort.clock()
        self._block_s = {node.node: block_s(node) for node in profile.nodes}
        self.best, self.best_s = planned, self._seconds(planned)
        self.trials: list[Trial] = []
        self.is_cut = self.best_s is None

    def slowest_first(self, hosts: Iterable[str]) -> list[str]:
        return sorted(hosts, key=lambda name: (-self._block_s[name], name))

    def run(self, host: str, *, worth: float, first: str = "") -> None:
        """Try other nodes as the helper of ``host``, and take the fastest.

        A helper is taken if the seconds with it are at most the share ``worth`` of the present ones, and fewer.
        ``first`` is the present helper of a host that needs one; else empty.
        """
        plan, before_s = self.best.plan, self.best_s
        trials = [Trial(host=host, helper=first, with_s=before_s)] if first else []
        ranking = Ranking[tuple[int, Planned]](lambda option: self._seconds(option[1]))
        others = sorted(self._block_s.keys() - {host, first}, key=lambda name: (self._block_s[name], name))
        for helper in others[:MAX_TRIED] if before_s is not None else ():
            trial = Trial(host=host, helper=helper, without_s=None if first else before_s)
            try:
                other = helped(plan, {**helpers_by_host(plan), host: helper}, self._settings)
                checked = self.best.moved_to(other, self._fitting)
            except (CapacityError, StorageError) as error:
                trials.append(dataclasses.replace(trial, full=str(error)))
                continue
            with_s = ranking.judge((len(trials), checked))
            if with_s is None:
                break
            trials.append(dataclasses.replace(trial, with_s=with_s))
        self.is_cut = self.is_cut or ranking.is_cut
        taken = 0 if first else None
        if ranking.judged and before_s is not None:
            best_s, (at, best) = ranking.ranked[0]
            if best_s < before_s and best_s <= worth * before_s:
                taken, self.best_s, self.best = at, best_s, best
        self.trials += [dataclasses.replace(each, is_taken=at == taken) for at, each in enumerate(trials)]

    def _seconds(self, planned: Planned) -> float | None:
        """Seconds of all steps by the simulator; None if the time is over, or its limit of actions is too low."""
        choice = self._choice
        if choice is None:
            return None
        return simulated_job_s(
            planned.plan,
            self._profile,
            choice.settled.costs if choice.settled is not None else choice.costs,
            choice.runs.ring,
            max_actions=self._max_actions,
            is_over=self._clock.is_over,
        )
