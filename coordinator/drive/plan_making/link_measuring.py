"""Measure the links that a run may use before it is planned: within a budget, and only what is not known.

Pairs are asked in rounds in which no node and no machine is in two pairs, so after each round every node has one more
link. No round begins once the budget is used up; what is assumed of the other links is told. Links within a machine are
not measured at all.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from coordinator.drive.agent_calls import AgentCalls
from coordinator.drive.requests import RunRequest
from coordinator.members.link_cache import LinkCache
from coordinator.members.recruiting import machine_of
from coordinator.members.registry import Member
from ringtune.costs.links.assumed import with_assumed
from ringtune.costs.measured.measuring import Pair, hidden_bytes, link_rounds
from ringtune.costs.profile import LinkFacts, ModelFacts
from ringtune.jobs.job import Job
from ringtune.v1 import control_pb2

BUDGET_S = 30.0
_ASKED = control_pb2.MeasureLinkReply.DESCRIPTOR.fields_by_name
_FIGURES = tuple(field.name for field in dataclasses.fields(LinkFacts) if field.name in _ASKED)


class LinkAnswer(NamedTuple):
    """A node's answer about its link to another one."""

    pair: Pair
    reply: control_pb2.MeasureLinkReply


class LinkMeasuring:
    """Asks the members of one run about the links that nobody knows yet.

    Args:
        members: of the run.
        calls: to each of them.
        job: for whose messages.
        model: that the job trains.
        cache: what is known; what is measured goes there.
        put: takes the answers, from any thread; they have to come to ``take``.
        budget_s: no further round begins after so many seconds.
        now_s: a monotonic clock.
    """

    def __init__(
        self,
        members: Sequence[Member],
        calls: Mapping[str, AgentCalls],
        job: Job,
        model: ModelFacts,
        *,
        cache: LinkCache,
        put: Callable[[LinkAnswer], None],
        budget_s: float = BUDGET_S,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._addresses = {member.node: member.address for member in members}
        self._machines = {member.node: machine_of(member) for member in members}
        self._calls, self._wait_s, self._put = calls, job.runtime.wait_s, put
        self._message_bytes, self._cache = hidden_bytes(job, model), cache
        self._now_s, self._end_s = now_s, now_s() + budget_s
        self._known: dict[Pair, LinkFacts] = {
            (link.source, link.target): link for link in cache.find(self._addresses, self._message_bytes)
        }
        self._waves = self._wanted()
        self._awaited: set[Pair] = set()

    @staticmethod
    def is_wanted(request: RunRequest) -> bool:
        """Whether a run is planned with links of its own: nobody gave a profile or a plan."""
        return has_own_links(request) and request.plan is None and request.resume is None

    @property
    def is_done(self) -> bool:
        """Whether nothing is asked or waited for any more."""
        return not self._awaited and not self._waves

    def go_on(self) -> None:
        """Ask for the next wave, unless one is under way, none is left, or the budget is used up."""
        if self._awaited or not self._waves:
            return
        if self._now_s() >= self._end_s:
            self._waves = []
            return
        wave = self._waves.pop(0)
        self._awaited = set(wave)
        for pair in wave:
            self._ask(pair)

    def _ask(self, pair: Pair) -> None:
        source, target = pair
        self._calls[source].measure_link(
            target,
            self._addresses[target],
            self._message_bytes,
            timeout_s=self._wait_s,
            on_result=lambda reply: self._put(LinkAnswer(pair, reply)),
            brief=True,
        )

    def take(self, answer: LinkAnswer) -> None:
        """Take an answer; after the last one of a wave the next wave is asked for."""
        link = link_of(answer.pair, answer.reply)
        self._known[answer.pair] = link
        self._cache.put((link,), self._addresses, self._message_bytes)
        self._awaited.discard(answer.pair)
        self.go_on()

    def links(self) -> tuple[LinkFacts, ...]:
        """Every directed pair of the members, measured or assumed."""
        return with_assumed(tuple(self._addresses), self._machines, tuple(self._known.values()))

    @property
    def note(self) -> str:
        """What is assumed of how many links that were not measured; empty if nothing."""
        missing = sum(link.is_assumed and not self._is_inside(link) for link in self.links())
        if not missing:
            return ""
        total = sum(not self._is_inside(link) for link in self.links())
        return (
            f"{missing} of {total} links were not measured within {BUDGET_S:g} s: each is taken for as fast as the "
            "slower of its two ends; 'ringtune measure' measures all of them, for --profile"
        )

    def _is_inside(self, link: LinkFacts) -> bool:
        return self._machines[link.source] == self._machines[link.target]

    def _wanted(self) -> list[list[Pair]]:
        """Waves of directed pairs that are not known, of nodes on different machines."""
        waves = []
        for pairs in link_rounds(list(self._machines), self._machines):
            for direction in (pairs, tuple((target, source) for source, target in pairs)):
                wave = [
                    (source, target)
                    for source, target in direction
                    if self._machines[source] != self._machines[target] and (source, target) not in self._known
                ]
                waves += [wave] if wave else []
        return waves


def has_own_links(request: RunRequest) -> bool:
    """Whether the links of a run are those that its coordinator knows, and not those of a given profile."""
    return request.profile is None and request.evaluation is None


def remembered_links(members: Sequence[Member], job: Job, model: ModelFacts, cache: LinkCache) -> tuple[LinkFacts, ...]:
    """Every directed pair of the members without measuring any; none where no link between machines is known."""
    addresses = {member.node: member.address for member in members}
    machines = {member.node: machine_of(member) for member in members}
    known = cache.find(addresses, hidden_bytes(job, model))
    return with_assumed(tuple(addresses), machines, known) if known or len(set(machines.values())) == 1 else ()


def remember(
    links: Sequence[LinkFacts], addresses: Mapping[str, str], job: Job, model: ModelFacts, cache: LinkCache
) -> None:
    """Let the next run begin with links as the messages of a run or of a measurement showed them just now."""
    cache.put(links, addresses, hidden_bytes(job, model))


def link_of(pair: Pair, reply: control_pb2.MeasureLinkReply) -> LinkFacts:
    """Make the link of a node's answer."""
    figures: Mapping[str, float] = {name: getattr(reply, name) for name in _FIGURES}
    return LinkFacts(source=pair[0], target=pair[1], **figures)  # type: ignore[arg-type]
