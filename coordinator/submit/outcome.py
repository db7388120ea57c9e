"""What has come of a run so far, for whoever asked for it."""

from __future__ import annotations

from typing import Any

from coordinator.planner.make_plan import plan_memory
from ringtune.costs.profile import Profile
from ringtune.errors import ConnectionFailedError, RingTuneError, error_from_name
from ringtune.files.strict import read_object
from ringtune.jobs.job import Job
from ringtune.schedule.plan import Plan
from ringtune.v1 import control_pb2


class Outcome:
    """What events told about a run.

    Args:
        job: of the run.

    Attributes:
        run_id: once it has begun.
        is_kept: whether the coordinator keeps the run, which goes on without its submitter.
        phase: the one that it entered last.
        plan: once it is made.
        profile: once it is measured.
        memory: what each node needs at most, in bytes; once there is a plan.
        report: once the run is done.
        notes: sentences for the user.
        is_done: whether it ended well.
        error: with which the run failed.
    """

    def __init__(self, job: Job) -> None:
        self.run_id = ""
        self.is_kept = False
        self.phase = ""
        self.plan: Plan | None = None
        self.profile: Profile | None = None
        self.memory: dict[str, int] = {}
        self.report: dict[str, Any] = {}
        self.notes: list[str] = []
        self.error: RingTuneError | None = None
        self._job = job
        self.is_done = False

    def __call__(self, event: control_pb2.RunEvent) -> None:
        """Note one event.

        Raises:
            RingTuneError: the event is not readable.
        """
        match event.WhichOneof("event"):
            case "run_id":
                self.run_id = event.run_id
            case "kept":
                self.is_kept = event.kept
            case "state":
                self.phase = event.state
            case "profile_json":
                self.profile = Profile.from_json(read_object(event.profile_json, "the profile"))
            case "plan_json":
                self.plan = Plan.from_json(read_object(event.plan_json, "the plan"))
                self.memory = self._memory_of(self.plan)
            case "note":
                self.notes.append(event.note)
            case "report_json":
                self.report = read_object(event.report_json, "the report")
            case "failure":
                self.error = error_from_name(event.failure.error, event.failure.message)
            case "done":
                self.is_done = True

    def require_end(self) -> None:
        """Refuse a run that did not end well.

        Raises:
            RingTuneError: the run failed.
            ConnectionFailedError: the events end without telling how the run ended.
        """
        if self.error is not None:
            raise self.error
        if not self.is_done:
            raise ConnectionFailedError("the coordinator ended before the run did; see its log and repeat the run")

    def _memory_of(self, plan: Plan) -> dict[str, int]:
        if self.profile is None:
            return {}
        memory = plan_memory(self._job, plan, {node.node: node for node in self.profile.nodes})
        return {node: estimate.total_bytes for node, estimate in memory.items()}
