"""A draft: the course of a job on its nodes, before its blocks have hosts.

Order of turns: from each owner as the start, the next owner is always the one to which the head travels fastest. Of
these tours the one with the shortest sum of hand-overs, the last one back to the start included, is taken. Without
links, or with fewer than three owners, the order is by name.

Source: RingAda, section III-B.3 (the next initiator is the one with the best link).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from ringtune.costs.memory_sizes import DEFAULT_SETTINGS, MemorySettings
from ringtune.costs.profile import ModelFacts, NodeFacts
from ringtune.errors import CapacityError, DataError, ModelError
from ringtune.job.job import Job, kinds_of
from ringtune.models.adapter_support import may_trim
from ringtune.models.families import family_named
from ringtune.models.family import NAMED_TASKS, TAGGING
from ringtune.schedule.batches import num_batches
from ringtune.schedule.course import IN_STEP, Course, HelperSettings
from ringtune.schedule.migration import stay_reason
from ringtune.schedule.placement import CREDITS, Placement, Rack, Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import Owner, users_text
from ringtune.schedule.units import Range
from ringtune.schedule.versions import may_be_stale
from ringtune.techniques import TECHNIQUES
from ringtune.techniques.activation_checkpointing import RECOMPUTE, SavingPolicy, SliceSaving, without_helped
from ringtune.techniques.offload import helped, helpers_by_host, named_helpers


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A course with the private blocks and credits of its placement, but without slices.

    Attributes:
        private_blocks: number of lowest blocks that each owner runs itself.
        saving: what slices may keep for their backwards.
        state_on_disk: whether the optimizer state of units that do not train now is in files.
        keeps_best: whether nodes keep the best result on their disks.
        has_files: whether the run has begun, so that its checkpoints may be on the disks already.
        copies: whether hosts keep the state at the end of the last turns, and copies of another host's; where all
            parameters train, copies of another host's checkpoints.
        has_room_for_all: whether a host's disk has to have room for such copies of all blocks that it does not host,
            whichever host is before it in the ring.
        helper_of: host -> the helper that fits the adapters of all its trainable blocks.
    """

    course: Course
    private_blocks: int = 0
    credits: int = CREDITS
    saving: SavingPolicy = field(default_factory=SavingPolicy)
    state_on_disk: bool = False
    keeps_best: bool = False
    has_files: bool = False
    copies: bool = False
    num_copies: int = 0
    racks: tuple[Rack, ...] = ()
    has_room_for_all: bool = False
    helper_of: Mapping[str, str] = field(default_factory=dict)
    helper_settings: HelperSettings = IN_STEP
    settings: MemorySettings = DEFAULT_SETTINGS

    @staticmethod
    def of(plan: Plan) -> Draft:
        """Return the draft of a plan; each slice keeps all activations, whatever the plan saves."""
        placement = plan.placement
        return Draft(
            course=plan.course,
            private_blocks=placement.private_blocks,
            credits=placement.credits,
            state_on_disk=placement.state_on_disk,
            copies=placement.copies,
            num_copies=placement.num_copies,
            racks=placement.racks,
        )

    def of_job(self, job: Job) -> Draft:
        """Copy the draft with the settings of a job, and with what nodes keep in its run."""
        return dataclasses.replace(self, keeps_best=job.keeps_best_on_disk, settings=MemorySettings.of_job(job))

    def with_choices(self, microbatches: int, wire_dtype: str) -> Draft:
        """Copy the draft with this number of micro-batches (0 = its own) and this wire dtype.

        With stale weights the credits become at least the number of micro-batches: two hosts need room for a whole item
        between them. Where all parameters train, they become at most the number of micro-batches, but not below 2: a
        forward waits for all earlier updates, so more items are never in flight, and hidden states are large.
        """
        course = dataclasses.replace(
            self.course, microbatches=microbatches or self.course.microbatches, wire_dtype=wire_dtype
        )
        least = course.microbatches if may_be_stale(course) else 1
        most = max(2, course.microbatches) if course.method.full_parameters else self.credits
        return dataclasses.replace(self, course=course, credits=max(min(self.credits, most), least))

    def with_helper_settings(self, course: Course) -> Course:
        """Copy a course as if helpers fitted every trainable block.

        Unchanged without helpers, or with settings of helpers that change no result.
        """
        if course.offload is not None or not self.helper_of:
            return course
        blocks = itertools.starmap(Range, course.trainable.ranges_within(0, course.num_blocks))
        return dataclasses.replace(course, offload=self.helper_settings.of_blocks(blocks))

    def may_host(self, node: str, start: int, stop: int) -> bool:
        """Whether a node may host blocks [start, stop).

        Where each user has adapters of their own, only nodes with a helper may host trainable blocks.
        """
        if not (self.helper_settings.has_users and self.course.num_steps) or node in self.helper_of:
            return True
        return not self.course.trainable.ranges_within(start, stop)

    def placed(self, slices: Sequence[Slice], savings: Mapping[str, SliceSaving] | None = None) -> Plan:
        """Make the plan with these slices, in ring order; they keep everything, but for ``savings`` by node."""
        course, recompute = self.saving.placed(self.course, slices, savings or {})
        placement = Placement(
            slices=tuple(slices),
            private_blocks=self.private_blocks,
            credits=self.credits,
            recompute=recompute,
            state_on_disk=self.state_on_disk,
            copies=self.copies,
            num_copies=self.num_copies,
            racks=self.racks,
        )
        plan = Plan.of(without_helped(course, placement.hosts, self.helper_of), placement)
        return helped(plan, self.helper_of, self.helper_settings)


def drafts_of(part: Plan, job: Job, *, has_files: bool = False) -> tuple[Draft, ...]:
    """Return the drafts for another placement of the rest of a run; ``has_files`` as in ``Draft``.

    Hosts have the helpers that they have now. The first draft keeps all activations. If blocks of the present placement
    run again, a second draft recomputes all trained blocks of a slice, so that more may fit. The caller checks memory
    with the blocks that really run again.
    """
    draft = dataclasses.replace(
        Draft.of(part),
        course=dataclasses.replace(part.course, offload=None),
        has_files=has_files,
        helper_of=helpers_by_host(part),
        helper_settings=part.course.helper_settings,
    ).of_job(job)
    return (draft, dataclasses.replace(draft, saving=SavingPolicy(RECOMPUTE))) if part.placement.recompute else (draft,)


T = TypeVar("T")


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


def first_fit(ways: Sequence[Course], place: Callable[[Course], T]) -> tuple[T, tuple[tuple[Course, str], ...]]:
    """Place the first course that fits; return the plan, and each course before it with the reason why it does not fit.

    ``ways`` are variants of a course in the order of preference; ``place`` raises ``CapacityError`` for one that does
    not fit.
    """
    too_large: list[tuple[Course, str]] = []
    for course in ways[:-1]:
        try:
            return place(course), tuple(too_large)
        except CapacityError as error:
            too_large.append((course, str(error).partition(";")[0]))
    return place(ways[-1]), tuple(too_large)


def initiator_order(owners: Sequence[str], hand_over_s: Callable[[str, str], float] | None) -> tuple[str, ...]:
    """Sort owners in the order of their turns; by name if there are fewer than three or links take no time.

    ``hand_over_s``: (from, to) -> seconds that the head takes; None if links take no time.
    """
    names = sorted(owners)
    if hand_over_s is None or len(names) < 3:
        return tuple(names)
    tours = [tuple(nearest_chain(start, names, hand_over_s)) for start in names]
    return min(tours, key=lambda tour: (sum(map(hand_over_s, (tour[-1], *tour), tour)), tour))


N = TypeVar("N", int, str)


def nearest_chain(first: N, nodes: Iterable[N], seconds: Callable[[N, N], float]) -> list[N]:
    """Sort nodes: ``first`` first, then always the nearest of the rest."""
    chain, left = [first], set(nodes) - {first}
    while left:
        chain.append(min(left, key=lambda node: (seconds(chain[-1], node), node)))
        left.remove(chain[-1])
    return chain


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
        racks=racks_of(nodes) if has_copies and job.recovery.num_copies else (),
        helper_of=named_helpers(job.offload, [node.node for node in nodes]),
        helper_settings=job.offload.helper_settings,
    ).of_job(job)


def racks_of(nodes: Iterable[NodeFacts]) -> tuple[Rack, ...]:
    """Return the racks of nodes, sorted, for the places of numbered copies."""
    return tuple(sorted(Rack(node.node, node.rack) for node in nodes if node.rack))


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


def as_job_says(job: Job, draft: Draft, model: ModelFacts, nodes: Sequence[NodeFacts]) -> Draft:
    """Copy a draft with method, frozen weights, activations and place of the optimizer state of another job."""
    ways = courses_to_try(job, draft.course, nodes)
    course = draft.course if draft.course in ways else ways[0]
    course, saving = SavingPolicy.of(job, dataclasses.replace(course, method=job.method), model)
    return dataclasses.replace(draft, course=course, saving=saving, state_on_disk=job.keeps_state_on_disk).of_job(job)
