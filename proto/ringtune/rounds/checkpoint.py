"""What a checkpoint is: a manifest that names every node's shard by digest.

This module also says whether a checkpoint can be used.

A checkpoint lies at a turn boundary. Shards (adapters, moments with step counts, at one owner the head) stay on
the nodes; the submitter keeps the manifest, which is written last: without it there is no checkpoint. Everything
else that a run needs to go on is a function of the plan and the step: data position, depth, learning rate and the
seed of every dropout mask (``batches``, ``schedule``, ``learning_rate``; ``edge.model.dropout``). Where the run itself
decides the depth, the manifest has what it knows of its losses.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ringtune.errors import IntegrityError, InvalidInputError, PlanError, UsageError
from ringtune.files.digests import json_digest
from ringtune.files.strict import parse_json, read_dataclass, with_renamed_key
from ringtune.ids import check_node_name, check_run_id
from ringtune.jobs.job import Job
from ringtune.rounds.length import Length, digests
from ringtune.rounds.turns.turn_operations import check_in_force
from ringtune.schedule.operations.table import Operations
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.early_stop import NONE_DONE, Evaluations
from ringtune.schedule.turns.turns import StartPoint
from ringtune.schedule.turns.unfreezing import NOTHING_KNOWN, Unfreezing

SCHEMA: Final = 1
KEPT: Final = 2
"""How many complete checkpoints are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One node's part of a checkpoint.

    Attributes:
        node: where it lies.
        sha256: hex digest of the file.
        size_bytes: of the file.
    """

    node: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointManifest:
    """A complete checkpoint.

    Attributes:
        schema: of this form.
        run_id: the run under which nodes keep the shards: the first one, if it was resumed.
        plan_digest: of the part of the plan under which it was written: of the plan, unless the run moves.
        job_digest: of the job, see ``job_changes.job_digest``.
        model_digest: of the base model (``profile.ModelFacts``).
        step: optimizer steps done.
        holder: the owner whose shard has the head.
        shards: one for each node of that part, in its order; none = it is no checkpoint, but the end of a turn that
            every node kept in memory, and that may be on their disks since the coordinator ended.
        unfreezing: what is known of the losses, so that the run goes on with the very decisions it would have made.
        operations: the table in force, if the run chooses its tables.
        placement_number: of the placement that held.
        attempt: the run that had trained so far: ``run_id``, or one that goes on with it; empty = it is not known.
        evaluations: what is known of the evaluations before it, so that the run ends early at the very same step.
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
    operations: Operations | None = None
    placement_number: int = 0
    attempt: str = ""
    evaluations: Evaluations = NONE_DONE

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
        """SHA-256 of the canonical JSON form, without ``unfreezing`` where nothing is known of the losses.

        The number of the first placement is left out as well, an unknown attempt, and evaluations of which none was
        done.
        """
        value = with_renamed_key(self._fields(), "placement_number", "epoch")  # so that earlier digests hold
        if self.unfreezing == NOTHING_KNOWN:
            del value["unfreezing"]
        return json_digest(value)

    def _fields(self) -> dict[str, Any]:
        value = dataclasses.asdict(dataclasses.replace(self, operations=None))
        del value["operations"]
        if not self.placement_number:
            del value["placement_number"]
        if not self.attempt:
            del value["attempt"]
        if self.evaluations == NONE_DONE:
            del value["evaluations"]
        return value if self.operations is None else value | {"operations": self.operations.to_json()}

    @property
    def name(self) -> str:
        """What it is, and of which step, for messages."""
        return f"the checkpoint of step {self.step}" if self.shards else f"the end of step {self.step}"

    def shard_of(self, node: str) -> Shard:
        """The shard of a node.

        Raises:
            IntegrityError: there is none.
        """
        for shard in self.shards:
            if shard.node == node:
                return shard
        raise IntegrityError(f"the checkpoint of step {self.step} has no shard of node {node}")

    def to_json(self) -> dict[str, Any]:
        """Write the manifest as a JSON-able table, with its digest."""
        return {**self._fields(), "digest": self.digest}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> CheckpointManifest:
        """Read what ``to_json`` wrote.

        Raises:
            IntegrityError: the manifest is damaged.
        """
        fields = {key: item for key, item in value.items() if key != "digest"}
        fields = with_renamed_key(fields, "epoch", "placement_number")
        try:
            given = {
                "operations": Operations.from_json(table) if (table := fields.get("operations")) is not None else None
            }
            manifest = read_dataclass(CheckpointManifest, fields, where="", error=PlanError, given=given)
        except (InvalidInputError, UsageError) as error:
            raise IntegrityError(f"the manifest is damaged: {error}") from error
        if value.get("digest") != manifest.digest:
            raise IntegrityError("the manifest is damaged: its digest does not match its content")
        return manifest

    @staticmethod
    def parse(text: str) -> CheckpointManifest:
        """Read the text of a manifest.

        Raises:
            IntegrityError: it is damaged.
        """
        try:
            value = parse_json(text)
        except ValueError as error:
            raise IntegrityError(f"the manifest is damaged: {error}") from error
        if not isinstance(value, Mapping):
            raise IntegrityError("the manifest is damaged: it is no JSON object")
        return CheckpointManifest.from_json(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """What a submitter hands over to go on with a run.

    Attributes:
        plan: of the run; it stays as it was, but for its length.
        manifests: newest first; the first one of which everything is somewhere is taken (``whereabouts``).
        lengths: that the run had before it was made longer.
    """

    plan: Plan
    manifests: tuple[CheckpointManifest, ...]
    lengths: tuple[Length, ...] = ()

    def to_text(self) -> str:
        """Write plan and manifests as JSON text."""
        lengths = [dataclasses.asdict(length) for length in self.lengths]
        manifests = [entry.to_json() for entry in self.manifests]
        return json.dumps({"plan": self.plan.to_json(), "manifests": manifests, "lengths": lengths})

    @staticmethod
    def parse(text: str) -> Resume:
        """Read what ``to_text`` wrote.

        Raises:
            IntegrityError: it is damaged.
            PlanError: the plan breaks a rule.
        """
        try:
            value = parse_json(text)
            plan, manifests = value["plan"], value["manifests"]
            found = tuple(CheckpointManifest.from_json(entry) for entry in manifests)
            lengths = tuple(Length.from_json(length) for length in value.get("lengths", ()))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise IntegrityError(f"what came to go on from is not readable ({error}); use one version") from error
        return Resume(plan=Plan.from_json(plan), manifests=found, lengths=lengths)

    def check(self, job: Job) -> None:
        """Refuse checkpoints that do not belong to this job and plan.

        Raises:
            PlanError: one is of another job or plan, or lacks a node; names it.
            UsageError: there is none.
        """
        if not self.manifests:
            raise UsageError("there is no checkpoint to go on from; start the run without --resume")
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
        """The run under which nodes keep what it goes on from."""
        return self.manifests[0].run_id

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint; -1 = there is none."""
        return max((one.step for one in self.manifests if one.shards), default=-1)

    def rest(self, placement_number: int) -> Plan:
        """The part of the plan from a placement on: nodes of placements before it need not be there any more."""
        return Plan(
            self.plan.course, tuple(one for one in self.plan.placements if one.placement_number >= placement_number)
        )

    def manifests_of(self, node: str) -> tuple[CheckpointManifest, ...]:
        """The manifests that name a shard of a node: all of them, unless the run moves."""
        return tuple(one for one in self.manifests if any(shard.node == node for shard in one.shards))
