"""Ask nodes that come while a run is under way about themselves; what goes wrong with one is no matter of the run.

::

    Joined --> Inspect --answer--> Met --> checks --> the run has one node more
                   '---error---> ComerFailed --> a note
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from coordinator.drive.agent_calls import AgentCalls
from coordinator.drive.answers import Facts
from coordinator.drive.plan_making.inspecting import ask_about_itself
from coordinator.members.registry import Member
from ringtune.errors import RingTuneError
from ringtune.jobs.job import Job
from ringtune.schedule.frozen_weights import FrozenWeights


class Joined(NamedTuple):
    """A node has joined the coordinator, for the first time or again."""

    member: Member


class Gathered(NamedTuple):
    """The run has the nodes that it begins with: what was heard of their joining before is no news."""


class Met(NamedTuple):
    """A node that came has answered; ``instance`` is which process of its name."""

    instance: str
    facts: Facts


class ComerFailed(NamedTuple):
    """A call to a node that came has failed, be it taken in by then or not."""

    node: str
    instance: str
    error: RingTuneError


Comes = Joined | Gathered | Met | ComerFailed
"""What happens to a node that comes."""


class Comer(NamedTuple):
    """A node that is asked about itself, and the calls to it."""

    member: Member
    calls: AgentCalls


class Comers:
    """Those that are asked in one run.

    Args:
        run_id: of the run.
        job: of the run.
        lease_s: a node that does not answer for so long is lost.
        put: takes answers, from any thread.
    """

    def __init__(self, run_id: str, job: Job, *, lease_s: float, put: Callable[[Met | ComerFailed], None]) -> None:
        self._run_id, self._job, self._lease_s, self._put = run_id, job, lease_s, put
        self._asked: dict[str, Comer] = {}

    def ask(self, member: Member, *, measure: bool, neighbours: int, frozen: FrozenWeights | None) -> None:
        """Ask a node about itself, in place of a former process of its name; see ``ask_about_itself``."""
        node, instance = member.node, member.instance
        self.drop(node, "it has joined again")
        calls = AgentCalls(
            node,
            member.address,
            self._run_id,
            lease_s=self._lease_s,
            on_failure=lambda name, error: self._put(ComerFailed(name, instance, error)),
        )
        self._asked[node] = Comer(member, calls)
        ask_about_itself(
            calls,
            self._job,
            measure=measure,
            neighbours=neighbours,
            frozen=frozen,
            put=lambda facts: self._put(Met(instance, facts)),
        )

    def take(self, node: str, instance: str) -> Comer | None:
        """Hand out who answers; None if it is not asked, or another process of its name is."""
        comer = self._asked.get(node)
        if comer is None or comer.member.instance != instance:
            return None
        return self._asked.pop(node)

    def drop(self, node: str, reason: str) -> None:
        """Let a node go that is asked, if it is."""
        comer = self._asked.pop(node, None)
        if comer is not None:
            let_go(comer.calls, reason)

    def close(self, reason: str) -> None:
        """Let all go that are asked."""
        for node in list(self._asked):
            self.drop(node, reason)


def let_go(calls: AgentCalls, reason: str) -> None:
    """Tell a node that the run does not need it, and close the calls to it after that."""
    calls.release(reason).add_done_callback(lambda _: calls.close())
