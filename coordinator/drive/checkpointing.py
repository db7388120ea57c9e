"""The coordinator's part in checkpoints: collect what nodes saved, and choose the checkpoint to go on from.

Pure bookkeeping of one run. A checkpoint is complete when every node has its shard on disk; its manifest then
goes to the submitter, and only when the submitter has that on disk too may nodes drop older shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from coordinator.planner.make_plan import keep_plan
from coordinator.planner.planned import Planned
from ringtune.costs.profile import NodeFacts
from ringtune.errors import IntegrityError, ModelError
from ringtune.jobs.job import Job
from ringtune.rounds import rounds
from ringtune.rounds.checkpoint import CheckpointManifest, Resume, Shard
from ringtune.rounds.job_changes import job_digest
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.turns import StartPoint
from ringtune.v1 import control_pb2


class Noted(NamedTuple):
    """The note that the submitter has the manifest of the checkpoint of ``step`` on disk."""

    step: int


class Checkpointing:
    """The checkpoints of one run: those that it may go on from, and those that it saves.

    Args:
        run_id: of the run.
        job: of the run.
        resume: what to go on from; None = begin.

    Attributes:
        start: where the run goes on, once it was chosen; None = it begins.
        passed_over: why newer checkpoints could not be used.
        keep_from_step: nodes may drop shards of earlier steps.

    Raises:
        PlanError: the checkpoints are of another job or plan.
    """

    def __init__(self, run_id: str, job: Job, resume: Resume | None) -> None:
        if resume is not None:
            resume.check(job)
        self.start: StartPoint | None = None
        self.passed_over: tuple[str, ...] = ()
        self.keep_from_step = 0
        self._job = job
        self._resume = resume
        self._run_id = resume.manifests[0].run_id if resume else run_id
        self._problems: dict[str, dict[int, str]] = {}
        self._chosen: CheckpointManifest | None = None
        self._model_digest = ""
        self._saved: dict[int, dict[str, Shard]] = {}
        self._noted: list[int] = []
        self._newest_step: int | None = None

    @property
    def needed_nodes(self) -> tuple[str, ...]:
        """Names of the nodes without which the run can't go on; none if it begins."""
        return self._resume.plan.nodes if self._resume else ()

    @property
    def shards_run(self) -> str:
        """Under which run nodes keep shards: the first one, if it goes on."""
        return self._run_id

    def stopped(self, reason: str) -> str:
        """Say why a run was stopped, and what of it is saved.

        Example: ``stopped by the user, with a checkpoint of step 20``.
        """
        start = self._resume.manifests[0].step if self._resume else None
        step = self._newest_step if self._newest_step is not None else self.start.step if self.start else start
        return (
            f"{reason}, with a checkpoint of step {step}" if step is not None else f"{reason}; there is no checkpoint"
        )

    # ---- going on ---------------------------------------------------------------------------------

    def ask_about(self, node: str, request: control_pb2.InspectRequest) -> None:
        """Add to an inspection the digests of the node's shards, so that it says whether they are intact."""
        if self._resume is None:
            return
        request.checkpoint_run = self._run_id
        for manifest in self._resume.manifests_of(node):
            request.shards.add(step=manifest.step, sha256=manifest.shard_of(node).sha256)

    def note_states(self, node: str, states: Sequence[control_pb2.ShardState]) -> None:
        """Remember what a node said of its shards."""
        self._problems[node] = {state.step: state.problem for state in states}

    def planned(self, facts: Mapping[str, NodeFacts]) -> Planned | None:
        """Choose the checkpoint to go on from and check its plan against the nodes; None if the run begins.

        Raises:
            IntegrityError: no checkpoint is whole, or a node did not say.
            ModelError: the nodes have another model than the run began with.
            RingTuneError: the plan can't go on with these nodes.
        """
        if self._resume is None:
            return None
        planned = keep_plan(self._job, self._resume.plan, facts)
        for node in planned.plan.nodes:
            silent = [
                entry for entry in self._resume.manifests_of(node) if entry.step not in self._problems.get(node, {})
            ]
            if silent:
                raise IntegrityError(
                    f"node {node} did not say whether its shards are whole; use one version everywhere"
                )
        self._chosen, self.passed_over = self._resume.choose(self._problems)
        model_digest = facts[planned.plan.nodes[0]].model.digest
        if model_digest != self._chosen.model_digest:
            raise ModelError(
                f"the run began with model {self._chosen.model_digest[:12]}…, the nodes have {model_digest[:12]}… now; "
                "put the same folder back"
            )
        chosen = self._chosen
        self.start = StartPoint.of(
            planned.plan.course,
            step=chosen.step,
            holder=chosen.holder,
            unfreezing=chosen.unfreezing,
            operations=chosen.operations,
            evaluations=chosen.evaluations,
            epoch=chosen.epoch,
        )
        return planned

    def note_model(self, facts: Mapping[str, NodeFacts], plan: Plan) -> None:
        """Remember the digest of the nodes' base model for the manifests."""
        self._model_digest = facts[plan.nodes[0]].model.digest

    def go_on(self, node: str, request: control_pb2.PrepareRequest) -> None:
        """Add to a preparation the shard that the node shall load, if the run goes on from a checkpoint."""
        if self._chosen is not None:
            request.checkpoint_run = self._run_id
            request.checkpoint_plan = self._chosen.plan_digest
            request.start_holder = self._chosen.holder
            request.shard.step = self._chosen.step
            request.shard.sha256 = self._chosen.shard_of(node).sha256

    # ---- saving -----------------------------------------------------------------------------------

    def note_saved(self, node: str, saved: Sequence[control_pb2.Saved]) -> None:
        """Remember which shards a node has on disk; hearing of a shard twice has no further effect."""
        for entry in saved:
            shard = Shard(node=node, sha256=entry.sha256, size_bytes=entry.bytes)
            self._saved.setdefault(entry.step, {})[node] = shard

    def manifest(self, plan: Plan, saved: rounds.LogCheckpoint) -> CheckpointManifest:
        """Make the manifest of a checkpoint that every node of this part of the plan has saved.

        Raises:
            IntegrityError: a node did not say what it saved.
        """
        step = saved.step
        shards = self._saved.pop(step, {})
        missing = [node for node in plan.nodes if node not in shards]
        if missing:
            raise IntegrityError(
                f"node {', '.join(missing)} did not say what it saved at step {step}; use one version on all machines"
            )
        self._newest_step = step
        return CheckpointManifest(
            run_id=self._run_id,
            plan_digest=plan.digest,
            job_digest=job_digest(self._job),
            model_digest=self._model_digest,
            step=step,
            holder=saved.holder,
            shards=tuple(shards[node] for node in plan.nodes),
            unfreezing=saved.unfreezing,
            operations=saved.operations,
            evaluations=saved.evaluations,
            epoch=plan.placement.epoch,
        )

    def note_kept(self, step: int) -> bool:
        """Note that the manifest of ``step`` is on disk; True if nodes may now drop more shards than before.

        Hearing of a manifest from both the submitter and the keeper of the run has no further effect.

        The checkpoint before it stays: after notes of steps 100, 200 and 300 shards of steps before 200 may go.
        """
        if self._noted and step <= self._noted[-1]:
            return False
        before = self._noted[-1] if self._noted else self.start.step if self.start else 0
        self._noted = [step]
        has_more = before > self.keep_from_step
        self.keep_from_step = max(self.keep_from_step, before)
        return has_more
