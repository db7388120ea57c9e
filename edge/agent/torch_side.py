"""What an agent needs of its part with torch: ``edge.agent.workshop``, or a stand-in without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from edge.agent.active_run import ActiveRun
from edge.agent.snapshots import SnapshotLike, TakenOver
from edge.agent_options import AgentOptions
from edge.measuring.timing_request import TimingRequest
from ringtune.jobs.job import Job
from ringtune.schedule.plan import Plan


class Workshop(Protocol):
    """The part of an agent that needs torch; ``edge.agent.workshop``, loaded when first needed."""

    def preload(self) -> None:
        """Load the libraries that a run needs."""

    def inspect(
        self, options: AgentOptions, job: Job, *, timing: TimingRequest | None, memory_bytes: int, dataset: Any = None
    ) -> tuple[dict[str, Any], Any]:
        """Return the node's facts as JSON, and its dataset or None; load none if one is given."""

    def build(self, options: AgentOptions, job: Job, plan: Plan, dataset: Any) -> Any:
        """Build the executor of this node."""

    def snapshot(self, active: ActiveRun, metadata: Mapping[str, str]) -> SnapshotLike:
        """Keep what the slice of a run has trained, and at an owner the head; on the compute thread."""

    def kept_file(self, executor: Any, blocks: tuple[int, ...], of: Mapping[str, str]) -> bytes:
        """Copy what was trained of some blocks into a file; on the compute thread."""

    def take_over(self, executor: Any, taken: TakenOver) -> None:
        """Go on with what was trained of the blocks of an executor."""

    def working_clock(self, executor: Any) -> Callable[[], float]:
        """Make the clock of what the executor's computing takes at this node's quota alone."""

    def ring_servicer(self) -> Any:
        """Make the servicer that takes frames; one per process."""

    def expect(self, servicer: Any, active: ActiveRun, job: Job) -> None:
        """Let the servicer take the run's frames and deliver them to ``active``."""

    def connect(self, active: ActiveRun, target: str, address: str) -> Any:
        """Make a link that is not open yet: it has ``open(timeout_s)`` and what ``run.Link`` has."""
