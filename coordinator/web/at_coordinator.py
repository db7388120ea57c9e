"""The page of a coordinator: its members, and the events of its runs."""

from __future__ import annotations

from coordinator.server.coordinator import Coordinator
from coordinator.web.watching import MemberNow, Watching


def watch(coordinator: Coordinator) -> Watching:
    """Look at a coordinator from now on; runs that began before are not seen."""

    def members() -> dict[str, MemberNow]:
        return {
            member.node: MemberNow(state, member.rss_bytes, member.memory_bytes, member.device)
            for member, state, _ in coordinator.members()
        }

    watching = Watching(members=members)
    coordinator.onlookers.append(watching.hear)
    return watching
