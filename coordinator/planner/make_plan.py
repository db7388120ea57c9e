"""The plan of a job on nodes with known facts, or a refusal that names the node, the bytes it lacks and a remedy.

The planner chooses ring order, slices, unused nodes and order of turns for the least predicted seconds of the job
within every node's memory. A plan made earlier is checked against the present facts of its nodes.

Source: RingAda, sections III-B.1 (initialisation; the paper leaves the policy open) and III-B.3 (the next initiator is
the one with the best link).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from coordinator.planner.draft import Draft, nearest_chain, racks_of
from coordinator.planner.helpers import with_helpers
from coordinator.planner.limits import Effort, free_microbatches
from coordinator.planner.memory import MemoryCaps, disk_refusal, helper_refusal, refusal, refuse_full_shared_disks
from coordinator.planner.operations import settled, with_fitting_operations
from coordinator.planner.phases import PhasesReason, choose_phases
from coordinator.planner.planned import Fitting, Planned, first_that_fits, with_copies, with_techniques
from coordinator.planner.replicas import choose_replicas
from coordinator.planner.ring_costs import RingCosts
from coordinator.planner.search import (
    Candidate,
    RingChoice,
    SettledRing,
    as_alike,
    block_s,
    choose_plan,
    judged_again,
    plan_of,
    split_blocks,
)
from ringtune.config.sections import NEVER
from ringtune.costs.action_costs import CourseCosts
from ringtune.costs.links import check_blobs, check_parcels
from ringtune.costs.measurement import check_profile, job_shape, refuse_differing_copies
from ringtune.costs.memory_estimate import DiskNeeds, fullest, parts_memory, refuse_full_moves
from ringtune.costs.memory_sizes import MemorySettings, Sizes
from ringtune.costs.memory_terms import MemoryEstimate
from ringtune.costs.model_facts import model_facts
from ringtune.costs.profile import LinkFacts, ModelFacts, NodeFacts, Profile
from ringtune.errors import (
    CapacityError,
    DataError,
    DeadlineError,
    JobError,
    ModelError,
    PeerLostError,
    PlanError,
    StorageError,
)
from ringtune.job.job import Job, kinds_of
from ringtune.models.adapter_support import may_trim
from ringtune.models.families import family_named
from ringtune.models.family import NAMED_TASKS, TAGGING
from ringtune.schedule.batches import num_batches
from ringtune.schedule.course import Course
from ringtune.schedule.migration import stay_reason
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import Owner, users_text
from ringtune.techniques import TECHNIQUES
from ringtune.techniques.activation_checkpointing import SavingPolicy, keeping_all, unprojected_reason
from ringtune.techniques.offload import named_helpers


def no_split_error(caps: MemoryCaps, nodes: Sequence[NodeFacts], remedy: str = "") -> CapacityError | StorageError:
    """Make the error that no split fits, for one node that lacks memory or disk; raises ``PlanError``.

    That node is an owner without memory for embedding and head; else the first node without room for its slice in the
    split by speed; or, if the method runs all blocks on one node, the node with the most memory. Nodes that may host no
    trainable blocks do not count. A ``remedy`` precedes the usual ones.
    """
    draft = caps.draft
    start, stop = draft.private_blocks, draft.course.num_blocks
    allowed = [node for node in nodes if draft.may_host(node.node, start, stop)]
    over = " over the nodes with helpers" if len(allowed) < len(nodes) else ""
    for owner in draft.course.owners:
        if not caps.fits_empty(owner.node):
            return _lacking(caps, owner.node, stop, stop, remedy=remedy)
    if draft.course.method.max_hosts == 1:
        roomiest = max(allowed, key=lambda node: node.memory_bytes)
        more = ", and no other node with a helper has more" if over else ", and no other node has more"
        return refusal(caps, roomiest.node, start, stop, more, remedy=remedy)
    costs = [block_s(node) or 1.0 for node in allowed]
    at = start
    for node, count in zip(allowed, split_blocks(costs, start=start, stop=stop) or (), strict=False):
        above = 0 if at + count == stop else 1
        if count and caps.lacking(node.node, at, at + count, above):
            others = f", and no other split of the blocks{over} fits" if len(nodes) > 1 else ""
            return _lacking(caps, node.node, at, at + count, others, remedy=remedy)
        at += count
    raise PlanError("no split was found although one fits; please report it")


def _lacking(
    caps: MemoryCaps, node: str, start: int, stop: int, more: str = "", *, remedy: str
) -> CapacityError | StorageError:
    if caps.lacking_disk(node, start, stop):
        return disk_refusal(caps.facts[node], start, stop, caps.disk_needs(node, start, stop))
    return refusal(caps, node, start, stop, more, remedy=remedy)


def memory_remedy(job: Job, planned: Callable[[Job], object]) -> str:
    """Name the settings of which each alone would let the job fit; empty if there are none.

    ``planned`` plans a job, or raises an error.
    """
    words = []
    for key, value in (setting for technique in TECHNIQUES for setting in technique.smaller_settings(job)):
        with contextlib.suppress(CapacityError, DeadlineError, JobError, PlanError, StorageError):
            planned(job.with_overrides({key: value}))
            words.append(f"{key} = {value!r}")
    return f"{' or '.join(words)} would fit; or " if words else ""


def _with_phases(job: Job, planned: Planned, profile: Profile, effort: Effort, fitting: Fitting) -> Planned:
    """Give a run several placements if its job allows that and they are predicted to be faster."""
    if job.placement.follow == NEVER or planned.choice is None:
        return planned
    helper_of = planned.choice.best.draft.helper_of
    better, reason = choose_phases(planned.plan, profile, job, helper_of=helper_of, clock=effort.clock())
    if better is not None:
        try:
            planned = planned.moved_to(better, fitting)
        except (CapacityError, StorageError) as error:
            reason = PhasesReason(why_not=str(error))
    return dataclasses.replace(planned, phases=reason)


_REMEDY_S = 5.0
"""Longest search, in seconds, for a setting with which a job that does not fit would fit."""


def make_plan(
    job: Job,
    facts: Mapping[str, NodeFacts],
    *,
    links: Sequence[LinkFacts] = (),
    evaluation_only: bool = False,
    microbatches: Sequence[int] = (),
    wire_dtypes: Sequence[str] = (),
    effort: Effort | None = None,
) -> Planned:
    """Decide the course and the placement of a run.

    Args:
        job: to be planned.
        facts: of every node that takes part, by name.
        links: every directed pair of them; none if messages take no time.
        evaluation_only: plan one evaluation without steps.
        microbatches: numbers to choose from; default: the job's.
        wire_dtypes: to choose from; default: the job's.
        effort: limits of the search, by default of ``runtime.plan_s``; without links the simulator does not run.

    Raises:
        CapacityError: no split fits; names a node with needed and available bytes.
        StorageError: no split fits the disks; names a node with needed and free bytes.
        DataError: no node owns data, or the labels do not agree.
        DeadlineError: nothing that fits was found in time.
        JobError: the job's operations fit none of the numbers of micro-batches.
        ModelError: the nodes have different models.
        PlanError: the job breaks a rule of the plan, or a link is missing.
    """
    nodes = [facts[name] for name in sorted(facts)]
    if not nodes:
        raise PlanError("there is no node to plan for; start one with 'ringtune node'")
    model = agreed_model(nodes)
    if job.privacy.private_blocks >= model.num_blocks:
        raise PlanError(
            f"privacy.private_blocks = {job.privacy.private_blocks} leaves nothing to share out of "
            f"{model.num_blocks} blocks; lower it"
        )
    draft = job_draft(job, nodes, model)
    check_blobs(draft.course, Sizes.of_job(job, draft.course, nodes[0]))
    if evaluation_only:
        course = keeping_all(dataclasses.replace(draft.course, num_steps=0, checkpoint_every=0))
        # without training there are no helpers
        draft = Draft(course=course, private_blocks=draft.private_blocks, settings=draft.settings)
    alike = as_alike(nodes) if all(link.is_assumed for link in links) else None
    profile = Profile(nodes=alike or tuple(nodes), links=tuple(links))
    draft = _in_order(draft, profile)
    effort = (effort or Effort(seconds=job.runtime.plan_s)).begun()
    began_s = effort.now_s()
    if not links or evaluation_only:
        effort = dataclasses.replace(effort, judged_actions=0)
    counts = microbatches or free_microbatches(job, () if evaluation_only else links) or (0,)
    pairs = [(count, dtype) for dtype in wire_dtypes or (job.wire.dtype,) for count in counts]

    def fitting(plan: Plan) -> Planned:
        return refuse_if_full(job, plan, facts)

    def place(course: Course) -> Planned:
        choices = [dataclasses.replace(draft, course=course).with_choices(*pair) for pair in pairs]
        choices = [way for choice in choices for way in _with_room_for_copies(job, choice, facts)]
        is_last = course is ways[-1]  # only its refusal lists remedies

        def placed(drafts: Sequence[Draft]) -> Planned:
            return _placed(job, drafts, profile, facts, effort, is_alike=alike is not None, has_remedies=is_last)

        planned = with_helpers(job, choices, profile, effort, placed, fitting)
        if effort.judged_actions and not all(link.is_assumed for link in links):
            planned = _with_replicas(job, planned, choices, profile, effort, fitting)
            planned = _with_phases(job, planned, profile, effort, fitting)
        return planned

    ways = courses_to_try(job, draft.course, nodes)
    planned, refused = first_that_fits(ways, place, (CapacityError,))
    if planned is None:
        raise refused[-1]
    too_large = tuple((way, str(error).partition(";")[0]) for way, error in zip(ways, refused, strict=False))
    has_types = len({way.frozen for way in ways}) > 1
    choice = planned.choice and dataclasses.replace(planned.choice, too_large=too_large if has_types else None)
    planned = dataclasses.replace(
        planned, choice=choice, num_searched=effort.counts["layouts"], search_s=effort.now_s() - began_s
    )
    return with_copies(job, with_techniques(job, planned, fitting), facts, fitting)


def _with_room_for_copies(job: Job, draft: Draft, facts: Mapping[str, NodeFacts]) -> tuple[Draft, ...]:
    """Return a draft, and where a disk may be too small for copies of checkpoints the draft with room for all of them.

    A search looks at one slice after the other, and does not know the host before, of which a host keeps copies.
    """
    if not (draft.copies and draft.course.method.full_parameters):
        return (draft,)
    other = dataclasses.replace(draft, has_room_for_all=True)
    caps, first = MemoryCaps(other.of_job(job), facts), draft.private_blocks
    is_tight = any(caps.lacking_disk(node, first, first + 1) for node in facts)
    return (draft, other) if is_tight else (draft,)


def _placed(
    job: Job,
    choices: Sequence[Draft],
    profile: Profile,
    facts: Mapping[str, NodeFacts],
    effort: Effort,
    *,
    is_alike: bool,
    has_remedies: bool = True,
) -> Planned:
    """Place the best of some drafts that differ in the values that the planner may choose."""
    model = next(iter(facts.values())).model
    drafts, left_out = with_fitting_operations(job, choices, model, profile)
    choice = None
    if any(MemoryCaps(draft.of_job(job), facts).may_fit() for draft in drafts):
        choice = choose_plan(drafts, profile, effort=effort, alike=is_alike)
    if choice is None:

        def placed(other: Job) -> Planned:
            short = dataclasses.replace(effort, judged_actions=0, seconds=min(effort.seconds, _REMEDY_S), ends_s=None)
            saving = [as_job_says(other, draft, model, nodes) for draft in drafts]
            return _placed(other, saving, profile, facts, short, is_alike=is_alike, has_remedies=False)

        nodes = [facts[name] for name in sorted(facts)]
        remedy = memory_remedy(job, placed) if has_remedies else ""
        raise no_split_error(MemoryCaps(drafts[0].of_job(job), facts), nodes, remedy)
    drafted = plan_of(choice.best.draft, choice.costs, choice.best.ring)
    plan = settled(job, drafted, model, profile)
    kept = refuse_if_full(job, plan, facts)
    if plan != drafted:
        choice = dataclasses.replace(choice, settled=_judged_again(job, choice, drafted, model, profile, effort))
    left_out = (*left_out, *filter(None, [unprojected_reason(job, plan, model)]))
    return dataclasses.replace(kept, choice=choice, profile=profile, left_out=left_out)


def _with_replicas(
    job: Job, planned: Planned, drafts: Sequence[Draft], profile: Profile, effort: Effort, fitting: Fitting
) -> Planned:
    """Give stages several hosts if the job allows that and they are predicted to be faster."""
    if not job.may_have_replicas:
        return planned
    better, reason = choose_replicas(planned.plan, drafts, profile, is_over=effort.clock().is_over)
    effort.counts["layouts"] += reason.num_rough
    planned = planned if better is None else planned.moved_to(better, fitting)
    return dataclasses.replace(planned, replicas=reason)


def _judged_again(
    job: Job, choice: RingChoice, drafted: Plan, model: ModelFacts, profile: Profile, effort: Effort
) -> SettledRing:
    """Judge the chosen ring with its settled operations, and with equal counts for all nodes."""

    def judged(variant: Job) -> tuple[Candidate, RingCosts]:
        operations = settled(variant, drafted, model, profile).course.choice
        course = dataclasses.replace(choice.best.draft.course, choice=operations)
        draft = dataclasses.replace(choice.best.draft, course=course)
        return judged_again(choice.best, draft, profile, choice.costs, effort=effort)

    best, costs = judged(job)
    equal = judged(job.with_overrides({"operations.balance": False}))[0] if job.operations.balance else None
    return SettledRing(best=best, costs=costs, equal=equal)


def planned_as(
    job: Job,
    plan: Plan,
    profile: Profile,
    *,
    again: bool,
    microbatches: Sequence[int] = (),
    wire_dtypes: Sequence[str] = (),
) -> Planned:
    """Return a plan that a coordinator made from this profile; with ``again`` also the reasons, by planning here.

    Without reasons if the two plans differ, as the clock may have ended one search.
    """
    if again:
        facts, links = profile.by_name, profile.links
        planned = make_plan(job, facts, links=links, microbatches=microbatches, wire_dtypes=wire_dtypes)
        if planned.plan == plan:
            return planned
    return Planned(plan=plan, memory=plan_memory(job, plan, profile.by_name), profile=profile)


def check_inputs(job: Job, profile: Profile) -> None:
    """Refuse a profile that was not measured for this job; raises ``PlanError``, ``DataError`` or ``ModelError``.

    If the model's folder is not on this machine, only the nodes have to agree on the model.
    """
    nodes = list(profile.nodes)
    if not nodes:
        raise PlanError("the profile has no node; measure anew with 'ringtune measure'")
    model = model_facts(job.model.path, job) if Path(job.model.path).is_dir() else agreed_model(nodes)
    shape = job_shape(job, fixed_tokens=model.fixed_tokens)
    draft = with_timed_frozen(job, job_draft(job, nodes, model), nodes)
    check_profile(profile, draft.course, model_digest=model.digest, shape=shape)


def keep_plan(job: Job, plan: Plan, facts: Mapping[str, NodeFacts]) -> Planned:
    """Check the plan of an earlier run against the present facts of its nodes, by name.

    Raises:
        PeerLostError: a node is missing.
        ModelError: the nodes have different models, or not the plan's.
        DataError: an owner has other rows than the plan says.
        CapacityError: a node has less memory than it needs.
        StorageError: a node has less room on its disk than it needs.
    """
    missing = [node for node in plan.nodes if node not in facts]
    if missing:
        raise PeerLostError(f"the run can't continue without node {', '.join(missing)}; start it again")
    model = agreed_model([facts[node] for node in plan.nodes])
    if (model.num_blocks, model.hidden_size) != (plan.course.num_blocks, plan.course.hidden_size):
        raise ModelError(
            f"the nodes have a model of {model.num_blocks} blocks of width {model.hidden_size}, the run began with "
            f"{plan.course.num_blocks} of {plan.course.hidden_size}; put the same folder back"
        )
    for owner in plan.course.owners:
        check_same_rows(facts[owner.node], owner, "the run began with", "give it the same data")
    return refuse_if_full(job, plan, facts, goes_on=True)


def refuse_if_full(job: Job, plan: Plan, facts: Mapping[str, NodeFacts], *, goes_on: bool = False) -> Planned:
    """Return an existing plan with the memory that its nodes need now.

    With ``goes_on`` the run has begun, so that its checkpoints may be on the disks already.

    Raises:
        CapacityError: a node has less memory than it needs, or a helper's parcel is larger than a link takes.
        StorageError: a node has less room on its disk than it needs.
        PlanError: another message is larger than a link takes, or copies on unlike nodes would differ.
    """
    refuse_differing_copies(plan, facts)
    parts = [_refuse_part_if_full(job, part, facts, goes_on=goes_on) for part in plan.parts]
    refuse_full_moves(plan, parts, facts)
    return Planned(plan=plan, memory=fullest(parts))


def _refuse_part_if_full(
    job: Job, plan: Plan, facts: Mapping[str, NodeFacts], *, goes_on: bool
) -> dict[str, MemoryEstimate]:
    """Return the bytes that nodes need in one placement; see ``refuse_if_full``."""
    nodes = [facts[node] for node in plan.nodes]
    sizes = Sizes.of_job(job, plan.course, nodes[0])
    check_blobs(plan.course, sizes)
    check_parcels(plan, sizes)
    memory = plan_memory(job, plan, facts)
    caps = MemoryCaps(dataclasses.replace(Draft.of(plan).of_job(job), has_files=goes_on), facts)
    for node, estimate in memory.items():
        if estimate.total_bytes > facts[node].memory_bytes:
            if plan.placement.helped_by(node):
                raise helper_refusal(plan, facts[node], estimate)
            piece = plan.slice_of(node)
            raise refusal(caps, node, piece.start, piece.stop, needs=estimate)
    all_needs: dict[str, DiskNeeds] = {}
    for node in plan.nodes:
        piece, free_bytes = plan.slice_of(node), facts[node].state_free_bytes
        all_needs[node] = needs = caps.disk_of(plan, node)
        if free_bytes is not None and needs.total_bytes > free_bytes:
            raise disk_refusal(facts[node], piece.start, piece.stop, needs)
    refuse_full_shared_disks(facts, all_needs)
    return memory


def plan_memory(job: Job, plan: Plan, facts: Mapping[str, NodeFacts]) -> dict[str, MemoryEstimate]:
    """Estimate by terms the peak memory of each node of a plan.

    Placements with nodes without facts are left out: a resumed run is past them, and such nodes may be gone.
    """
    known = tuple(part.placement for part in plan.parts if facts.keys() >= set(part.nodes))
    if not known:
        return {}
    here = Plan(plan.course, known)
    return fullest(parts_memory(here, facts, MemorySettings.of_job(job)))


def _in_order(draft: Draft, profile: Profile) -> Draft:
    """Sort the draft's owners in initiator order by the seconds that the head takes between them."""
    if not profile.links:
        return draft
    costs = CourseCosts(draft.course, profile, optimizer=draft.settings.optimizer)

    def hand_over_s(source: str, target: str) -> float:
        link = costs.link(source, target)
        if link is None or draft.course.method.full_parameters:  # no head is handed over
            return 0.0
        return link.seconds(costs.head_bytes)

    by_name = {owner.node: owner for owner in draft.course.owners}
    order = initiator_order(list(by_name), hand_over_s)
    course = dataclasses.replace(draft.course, owners=tuple(by_name[name] for name in order))
    return dataclasses.replace(draft, course=course)


# ---- the draft of a job -----------------------------------------------------------------------------


def job_draft(job: Job, nodes: Sequence[NodeFacts], model: ModelFacts) -> Draft:
    """Make the draft of a job on these nodes; raises ``DataError`` or ``JobError``."""
    owners = tuple(_owner(job, node) for node in nodes if node.train_rows)
    if not owners:
        raise DataError("no node has training rows; give at least one its file with --data")
    train, private_blocks, family = job.train, job.privacy.private_blocks, family_named(model.model_type)
    course = Course(
        method=job.method,
        num_blocks=model.num_blocks,
        owners=owners,
        num_steps=train.num_steps([owner.train_rows for owner in owners]),
        local_iterations=train.local_iterations,
        batch_size=train.batch_size,
        microbatches=train.microbatches,
        max_length=model.fixed_tokens or train.max_length,
        hidden_size=model.hidden_size,
        eval_every=train.eval_every,
        checkpoint_every=train.checkpoint_every,
        wire_dtype=job.wire.dtype,
        labels=agreed_labels(job, nodes),
        seed=train.seed,
        turns=train.turns,
        frozen_blocks=private_blocks,
        head_tokens=family.head_tokens(job.model.task),
        trims=bool(family.head_tokens(job.model.task)) and may_trim(family, job.adapter_configs, dropout=train.dropout),
        packed=bool(train.packing),
        entering=model.entering,
        returning=model.returning,
    )
    course = courses_to_try(job, course, nodes)[0]
    kinds_of(job, course.users)  # refuses an adapter of a user who is none of the run
    for technique in TECHNIQUES:
        technique.check_course(job, course, model)
    has_copies = job.needs_copies and not stay_reason(course, from_disks=True)
    course, saving = SavingPolicy.of(job, course, model)
    return Draft(
        course=course,
        saving=saving,
        private_blocks=private_blocks,
        state_on_disk=job.keeps_state_on_disk,
        copies=has_copies,
        num_copies=job.recovery.num_copies if has_copies else 0,
        racks=racks_of(nodes, job.recovery.num_copies) if has_copies else (),
        helper_of=named_helpers(job.offload, [node.node for node in nodes]),
        helper_settings=job.offload.helper_settings,
    ).of_job(job)


MAX_EVAL_BATCHES: Final = 1 << 18
"""Most evaluation batches of a node: the coordinator has all of an evaluation in memory, half a kilobyte each."""


def _owner(job: Job, node: NodeFacts) -> Owner:
    if job.data.user and not node.users:
        raise DataError(
            f"the job says data.user = {job.data.user!r}, and the facts have no users of node {node.node}; "
            "measure anew with this job"
        )
    batches = num_batches(node.eval_rows, job.train.batch_size)
    if batches > MAX_EVAL_BATCHES:
        raise DataError(
            f"node {node.node} has {node.eval_rows:,} evaluation rows, {batches:,} batches, where at most "
            f"{MAX_EVAL_BATCHES:,} are evaluated at once; give it fewer rows, or raise train.batch_size"
        )
    users = node.users if job.data.user else ()
    return Owner(node=node.node, train_rows=node.train_rows, eval_rows=node.eval_rows, users=users)


def agreed_labels(job: Job, nodes: Sequence[NodeFacts]) -> tuple[str, ...]:
    """Return the sorted class names of a run: ``data.labels`` of the job, or the union of the owners' names.

    Empty for a task without classes. Raises ``DataError``.
    """
    if job.model.task not in NAMED_TASKS:
        return ()
    labels = tuple(sorted(job.data.labels or {label for node in nodes for label in node.labels}))
    name, key = ("tag", "data.tags") if job.model.task == TAGGING else ("class", "data.label")
    if len(labels) < 2:
        names = "tags" if name == "tag" else "classes"
        raise DataError(f"the owners' data has the {names} {list(labels)}, a classifier needs two; check {key}")
    for node in nodes:
        for kind, own_labels in (("training", node.labels), ("evaluation", node.eval_labels)):
            outside = sorted(set(own_labels) - set(labels))
            if outside:
                names = "rows of class" if name == "class" else "words of tag"
                raise DataError(
                    f"node {node.node} has {kind} {names} {outside[0]!r}, those of this run are {', '.join(labels)}; "
                    "add it to data.labels or remove the rows"
                )
    return labels


def odd_models(nodes: Iterable[NodeFacts]) -> dict[str, str]:
    """Return the nodes that have another model than more than half of all, each with what differs.

    Empty if all have the same model, or no model is that of more than half.
    """
    digests = {node.node: node.model.digest for node in nodes}
    ((most, count), *_) = Counter(digests.values()).most_common(1)
    agree = ", ".join(sorted(node for node, digest in digests.items() if digest == most))
    return {
        node: f"it has another model ({digest[:12]}…) than node {agree} ({most[:12]}…); copy the same folder to it"
        for node, digest in digests.items()
        if digest != most and 2 * count > len(digests)
    }


def agreed_model(nodes: Sequence[NodeFacts]) -> ModelFacts:
    """Return the model that all nodes have; raises ``ModelError``."""
    first = nodes[0]
    for node, problem in odd_models(nodes).items():
        raise ModelError(f"node {node}: {problem}")
    for other in nodes:
        if other.model.digest != first.model.digest:
            raise ModelError(
                f"nodes {first.node} and {other.node} have different models ({first.model.digest[:12]}… and "
                f"{other.model.digest[:12]}…); copy the same folder to all"
            )
    return first.model


def check_same_rows(facts: NodeFacts, owner: Owner | None, before: str, advice: str) -> None:
    """Refuse a node with other rows, or rows of other users, than its plan says; raises ``DataError``.

    ``owner`` is of the plan, None for a node without rows; ``before`` precedes the plan's rows in the message,
    ``advice`` is its remedy.
    """
    says = (owner.train_rows, owner.eval_rows) if owner else (0, 0)
    has = (facts.train_rows, facts.eval_rows)
    if has != says and (owner or has[0]):
        raise DataError(
            f"node {facts.node} has {has[0]} training and {has[1]} evaluation rows, {before} {says[0]} and {says[1]}; "
            f"{advice}"
        )
    if owner and owner.users and facts.users != owner.users:
        raise DataError(
            f"node {facts.node} has rows of {users_text(facts.users, but=owner.users)}, {before} "
            f"{users_text(owner.users, but=facts.users)}; {advice}"
        )


def courses_to_try(job: Job, course: Course, nodes: Sequence[NodeFacts]) -> tuple[Course, ...]:
    """Return variants of a course, for example by dtype of frozen weights: the preferred one first.

    Each next one needs less memory.
    """
    courses: tuple[Course, ...] = (course,)
    for technique in TECHNIQUES:
        courses = tuple(way for before in courses for way in technique.courses(job, before, nodes))
    return courses


def with_timed_frozen(job: Job, draft: Draft, nodes: Sequence[NodeFacts]) -> Draft:
    """Copy a draft with the course variant under which the nodes were timed, if its job allows that variant."""
    timed = next((node for node in nodes if node.shape.is_measured), None)
    if timed is None:
        return draft
    ways = courses_to_try(job, draft.course, nodes)
    same = (way for way in ways if not any(technique.timing_mismatch(way, timed) for technique in TECHNIQUES))
    return dataclasses.replace(draft, course=next(same, draft.course))


def as_job_says(job: Job, draft: Draft, model: ModelFacts, nodes: Sequence[NodeFacts]) -> Draft:
    """Copy a draft with method, frozen weights, activations and place of the optimizer state of another job."""
    ways = courses_to_try(job, draft.course, nodes)
    course = draft.course if draft.course in ways else ways[0]
    course, saving = SavingPolicy.of(job, dataclasses.replace(course, method=job.method), model)
    return dataclasses.replace(draft, course=course, saving=saving, state_on_disk=job.keeps_state_on_disk).of_job(job)


def initiator_order(owners: Sequence[str], hand_over_s: Callable[[str, str], float] | None) -> tuple[str, ...]:
    """Sort owners in the order of their turns; by name if there are fewer than three or links take no time.

    From each owner as the start, the next one is always the one to which the head travels fastest. Of these tours the
    one with the shortest sum of hand-overs, the last one back to the start included, is taken.

    ``hand_over_s``: (from, to) -> seconds that the head takes; None if links take no time.
    """
    names = sorted(owners)
    if hand_over_s is None or len(names) < 3:
        return tuple(names)
    tours = [tuple(nearest_chain(start, names, hand_over_s)) for start in names]
    return min(tours, key=lambda tour: (sum(map(hand_over_s, (tour[-1], *tour), tour)), tour))
