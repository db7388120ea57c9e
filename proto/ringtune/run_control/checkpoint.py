"""Checkpoints: the manifest with every node's shard by digest, and the nodes that have each part on disk.

A checkpoint is taken at a turn boundary. Shards (adapters, moments with step counts, at one owner the head) stay on the
nodes; the submitter keeps the manifest, which is written last: without it there is no checkpoint. All else that a
resumed run needs is a function of the plan and the step: data position, depth, learning rate and the seed of every
dropout mask (``schedule.batches``, ``schedule.versions``, ``config.sections.learning_rate``; ``edge.model.skeleton``).
Where the run decides the depth, the manifest has the state of that rule (``schedule.turns.Unfreezing``).

``CheckpointHolders`` after a checkpoint of hosts a [0,3) and b [3,6), owner a, with copies at each other::

    blocks 0 to 2   in the shard of a, and in a file at b
    blocks 3 to 5   in the shard of b, and in a file at a
    head            in the shard of a, and in a file at the next owner, if there is one

So the run continues when a disk is lost. A file names the run that trained it: a run that went back may reach the same
step with other weights, for example without an owner, and the two are never mixed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple

from ringtune.config.sections import SKIP_OWNER
from ringtune.errors import IntegrityError, InvalidInputError, PlanError, UsageError
from ringtune.ids import check_node_name, check_run_id
from ringtune.job.job import Job
from ringtune.run_control.continuation import Length, digests
from ringtune.schedule.course import Course
from ringtune.schedule.migration import Source, joined, stay_reason
from ringtune.schedule.operation_tables import Operations
from ringtune.schedule.placement import Placement
from ringtune.schedule.plan import Plan
from ringtune.schedule.stages import saves_head
from ringtune.schedule.turns import NONE_DONE, NOTHING_KNOWN, Evaluations, StartPoint, Unfreezing
from ringtune.schedule.versions import was_trained
from ringtune.storage.strict import LATER, json_digest, parse_json, read_dataclass, to_table, with_renamed_key
from ringtune.techniques.operations import check_in_force
from ringtune.techniques.replicas import CopyDigest

SCHEMA: Final = 1
KEPT: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One node's part of a checkpoint: the file on that node, by its hex digest and size."""

    node: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointManifest:
    """A complete checkpoint, or the end of a turn that every node kept in memory.

    Attributes:
        run_id: the run under which nodes keep the shards: of a resumed run the first one.
        plan_digest: of the part of the plan under which it was written.
        step: optimizer steps done.
        holder: the owner whose shard has the head.
        shards: one for each node of that part, in its order; empty = the end of a turn kept in memory, which nodes may
            have written to disk when the coordinator ended.
        unfreezing: state of the unfreezing rule, so that a resumed run makes the same decisions.
        operations: the table in force, if the run chooses its tables.
        attempt: id of the run that trained up to here: ``run_id`` or one that continues it; empty = not known.
        evaluations: state of early stopping, so that a resumed run ends at the same step.
        excluded: nodes whose work was found wrong; they take no part in a resumed run either.
        digests: of the trained blocks, and of the head, as those who trained them said.
    """

    run_id: str
    plan_digest: str
    job_digest: str
    model_digest: str
    step: int
    holder: str
    shards: tuple[Shard, ...]
    schema: int = SCHEMA
    unfreezing: Unfreezing = NOTHING_KNOWN
    placement_number: Annotated[int, LATER] = 0
    attempt: Annotated[str, LATER] = ""
    evaluations: Annotated[Evaluations, LATER] = NONE_DONE
    operations: Annotated[Operations | None, LATER] = None
    excluded: Annotated[tuple[str, ...], LATER] = ()
    digests: Annotated[tuple[CopyDigest, ...], LATER] = ()

    def __post_init__(self) -> None:
        """Refuse a wrong schema, and a run id or node name that may not become part of a path."""
        check_run_id(self.run_id)
        if self.attempt:
            check_run_id(self.attempt)
        for shard in self.shards:
            check_node_name(shard.node)
        if self.schema != SCHEMA:
            raise PlanError(f"schema {self.schema} of a checkpoint is not {SCHEMA}; use the version that wrote it")

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON form, without ``unfreezing`` where it has no losses."""
        value = with_renamed_key(to_table(self), "placement_number", "epoch")  # so that earlier digests hold
        if self.unfreezing == NOTHING_KNOWN:
            del value["unfreezing"]
        return json_digest(value)

    @property
    def name(self) -> str:
        """``the checkpoint of step N``, or ``the end of step N`` without shards."""
        return f"the checkpoint of step {self.step}" if self.shards else f"the end of step {self.step}"

    def shard_of(self, node: str) -> Shard:
        """Find the shard of a node; raises ``IntegrityError``."""
        shard = next((shard for shard in self.shards if shard.node == node), None)
        if shard is None:
            raise IntegrityError(f"the checkpoint of step {self.step} has no shard of node {node}")
        return shard

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able table with the digest."""
        return {**to_table(self), "digest": self.digest}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> CheckpointManifest:
        """Parse the table of ``to_json``; raises ``IntegrityError``."""
        fields = {key: item for key, item in value.items() if key != "digest"}
        fields = with_renamed_key(fields, "epoch", "placement_number")
        try:
            manifest = read_dataclass(CheckpointManifest, fields, where="", error=PlanError)
        except (InvalidInputError, UsageError) as error:
            raise IntegrityError(f"the manifest is damaged: {error}") from error
        if value.get("digest") != manifest.digest:
            raise IntegrityError("the manifest is damaged: its digest does not match its content")
        return manifest

    @staticmethod
    def parse(text: str) -> CheckpointManifest:
        """Parse JSON text; raises ``IntegrityError``."""
        try:
            value = parse_json(text)
        except ValueError as error:
            raise IntegrityError(f"the manifest is damaged: {error}") from error
        if not isinstance(value, Mapping):
            raise IntegrityError("the manifest is damaged: it is no JSON object")
        return CheckpointManifest.from_json(value)


def of_one_course(
    job: Job, plan: Plan, manifests: Sequence[CheckpointManifest], lengths: Sequence[Length]
) -> tuple[CheckpointManifest, ...]:
    """Return the checkpoints without those from before an owner was lost or came back, except the newest.

    ``plan`` is that of the newest, which is first; ``lengths`` are former ones of the run.
    """
    known = set[str]().union(*digests(job, plan, lengths).values())
    return tuple(manifest for manifest in manifests if manifest is manifests[0] or manifest.plan_digest in known)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """The values with which a submitter continues a run.

    Attributes:
        plan: of the run; only its length may have changed.
        manifests: newest first; the run continues from the first complete one (``CheckpointHolders``).
        lengths: former ones of a run that was made longer.
    """

    plan: Plan
    manifests: tuple[CheckpointManifest, ...]
    lengths: tuple[Length, ...] = ()

    def to_text(self) -> str:
        """Write JSON text."""
        lengths = [to_table(length) for length in self.lengths]
        manifests = [entry.to_json() for entry in self.manifests]
        return json.dumps({"plan": self.plan.to_json(), "manifests": manifests, "lengths": lengths})

    @staticmethod
    def parse(text: str) -> Resume:
        """Parse the text of ``to_text``; raises ``IntegrityError``, ``PlanError`` or ``UsageError``."""
        try:
            value = parse_json(text)
            plan, manifests = value["plan"], value["manifests"]
            parsed = tuple(CheckpointManifest.from_json(entry) for entry in manifests)
            lengths = tuple(Length.from_json(length) for length in value.get("lengths", ()))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise IntegrityError(
                f"the checkpoints to resume from are not readable ({error}); use one version"
            ) from error
        return Resume(plan=Plan.from_json(plan), manifests=parsed, lengths=lengths)

    def __post_init__(self) -> None:
        """Refuse an empty list of checkpoints: the newest one names the run; raises ``UsageError``."""
        if not self.manifests:
            raise UsageError("there is no checkpoint to resume from; start the run without --resume")

    def check(self, job: Job) -> None:
        """Refuse checkpoints of another job or plan; raises ``PlanError``."""
        known = digests(job, self.plan, self.lengths)
        for manifest in self.manifests:
            name = manifest.name
            if manifest.job_digest not in known:
                raise PlanError(f"{name} is of another job; give the job that the run was started with")
            if manifest.plan_digest not in known[manifest.job_digest]:
                raise PlanError(
                    f"{name} is of plan {manifest.plan_digest[:12]}, plan.json is {self.plan.digest[:12]}; they have "
                    "to be of one run"
                )
            nodes = tuple(shard.node for shard in manifest.shards)
            if manifest.shards and nodes != self.plan.at(manifest.placement_number).nodes:
                raise PlanError(f"{name} does not have a shard of every node of the plan")
            StartPoint.of(self.plan.course, step=manifest.step, holder=manifest.holder)
            manifest.unfreezing.check(self.plan.course, manifest.step)
            check_in_force(self.plan, manifest.step, manifest.operations)
        if len({manifest.run_id for manifest in self.manifests}) != 1:
            raise PlanError("the checkpoints are of different runs; keep those of one")

    @property
    def run_id(self) -> str:
        """The run under which nodes keep the state."""
        return self.manifests[0].run_id

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint with shards; -1 = there is none."""
        return max((manifest.step for manifest in self.manifests if manifest.shards), default=-1)

    def returning(self, job: Job) -> tuple[str, ...]:
        """Names of the owners that are left out, and taken back where they are there when the run is resumed.

        That is a run of all parameters, which can't take them back later without going to disks.
        """
        course = self.plan.course
        is_on = course.method.full_parameters and job.recovery.owners == SKIP_OWNER
        return tuple(absent.owner.node for absent in course.absent) if is_on else ()

    def rest(self, placement_number: int) -> Plan:
        """Return the plan from a placement on: the nodes of those before may be gone.

        A run that can't move while it trains has one: those after it are of a part that is not continued.
        """
        kept = tuple(placement for placement in self.plan.placements if placement.placement_number >= placement_number)
        return Plan(self.plan.course, kept[:1] if stay_reason(self.plan.course) else kept)

    def whole(self, placement_number: int) -> Plan:
        """Return the plan of a run that continues from a placement: those before it, and ``rest``."""
        before = (placement for placement in self.plan.placements if placement.placement_number < placement_number)
        return Plan(self.plan.course, (*before, *self.rest(placement_number).placements))

    def manifests_of(self, node: str) -> tuple[CheckpointManifest, ...]:
        """List the manifests with a shard of a node."""
        return tuple(manifest for manifest in self.manifests if any(shard.node == node for shard in manifest.shards))


class SavedPart(NamedTuple):
    """An intact file beside the shards on a node's disk: some blocks, the head, or a best result.

    ``attempt`` is the id of the run that trained it, empty for a best result, which may be one of several files.
    """

    step: int
    attempt: str
    blocks: tuple[int, ...] = ()
    has_head: bool = False
    is_best: bool = False


class CheckpointHolders:
    """The nodes that have the trained blocks and the head at the step of a manifest.

    By present node, ``parts`` are its files beside shards, ``problems`` the damage of its shard at each step, empty =
    intact. ``course`` and ``placement`` are those of that time.
    """

    def __init__(
        self,
        manifest: CheckpointManifest,
        course: Course,
        placement: Placement,
        parts: Mapping[str, Sequence[SavedPart]],
        problems: Mapping[str, Mapping[int, str]],
    ) -> None:
        self._manifest, self._course, self._placement = manifest, course, placement
        settled = course.decided(manifest.unfreezing.unfreeze_at, manifest.operations)
        self._trained = tuple(block for block in range(course.num_blocks) if was_trained(settled, block, manifest.step))
        # block -> node -> digest of its shard; empty = a file beside shards
        self._holders: dict[int, dict[str, str]] = {block: {} for block in self._trained}
        self._heads: dict[str, str] = {}
        for shard in manifest.shards:
            if problems.get(shard.node, {}).get(manifest.step) == "":
                with_head = saves_head(course, shard.node, manifest.holder)
                self._add(shard.node, shard.sha256, placement.trained_at(shard.node), has_head=with_head)
        for node, files in sorted(parts.items()):
            for file in files:
                if file.attempt and (file.step, file.attempt) == (manifest.step, manifest.attempt):
                    self._add(node, "", file.blocks, has_head=file.has_head)

    def _add(self, node: str, sha256: str, blocks: Iterable[int], *, has_head: bool) -> None:
        for block in blocks:
            if block in self._holders:
                self._holders[block].setdefault(node, sha256)
        if has_head:
            self._heads.setdefault(node, sha256)

    @property
    def missing(self) -> tuple[int, ...]:
        """Trained blocks that no present node has."""
        return tuple(block for block in self._trained if not self._holders[block])

    def head_at(self, owners: Collection[str]) -> tuple[str, str] | None:
        """Choose the node that serves the head and the digest of its shard; None = no present node has it.

        The manifest's holder goes first, then other ``owners``, then nodes that keep copies. The digest is empty where
        the head is in a file beside shards.
        """
        nodes = sorted(self._heads, key=lambda node: (node not in owners, node != self._manifest.holder))
        return (nodes[0], self._heads[nodes[0]]) if nodes else None

    def head_for(self, owner: str, owners: Collection[str]) -> tuple[str, str] | None:
        """Choose the node from which an owner takes the head where every owner has one: itself if it can."""
        return (owner, self._heads[owner]) if owner in self._heads else self.head_at(owners)

    def sources(self, placement: Placement, node: str) -> tuple[Source, ...]:
        """List the sources of a node's trained blocks in a placement: the node itself where it has them."""
        parts = []
        for block in placement.held_at(node):
            if holders := self._holders.get(block):  # else it was not trained yet, so every node makes it by itself
                source = node if node in holders else next(iter(holders))
                parts.append(Source(source, block, block + 1, holders[source]))
        return joined(parts)

    def why_not(self, owners: Collection[str]) -> str:
        """Name the missing blocks or head with their last holder; empty if all are present, the head at ``owners``."""
        if self.missing:
            hosts = sorted({self._placement.trainer_of(block) for block in self.missing})
            plural = "s" if len(self.missing) > 1 else ""
            listed = ", ".join(map(str, self.missing))
            return f"no joined node has the trained tensors of block{plural} {listed}, which node " + (
                f"{', '.join(hosts)} had, or copies of them"
            )
        if self.head_at(owners) is None:
            return f"no joined node has the head, which node {self._manifest.holder} had, or a copy of it"
        return ""
