"""Migration of a run to another placement: calls that rest and move its nodes, and the search for that placement.

::

    FetchAhead, Rest, Move of the state machine --> calls to nodes --> their answers back through the run's queue

A lasting change of a node's or a link's pace starts a search::

    reports of nodes --> PaceMonitor --a node or a link has lastingly changed--> planning on a thread of its own
                                                                                      |
    notes with both numbers <-- Replanned through the run's queue <-------------------'
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Final, NamedTuple

from coordinator.planner.limits import Effort
from coordinator.planner.replan import PlacementProposal, placed_without, replanned
from coordinator.run.checkpoint import CheckpointManager
from coordinator.run.driver import Participants
from coordinator.run.events import work_beside
from coordinator.run.report import RunLedger
from coordinator.run.run_text import owners_text
from ringtune.config.sections import NEVER
from ringtune.costs.calibration import CHANGED, PaceMonitor
from ringtune.costs.links import RecordedLinks
from ringtune.costs.profile import LinkFacts, NodeFacts, Profile
from ringtune.errors import IntegrityError, PeerLostError, RingTuneError
from ringtune.ids import naming_node
from ringtune.job.job import Job
from ringtune.quantities import format_bytes, format_seconds
from ringtune.run_control import events as rd
from ringtune.schedule.access import CopyBytes
from ringtune.schedule.actions import TensorKey
from ringtune.schedule.migration import stay_reason
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Turn
from ringtune.storage.pieces import Pieces
from ringtune.storage.strict import read_object
from ringtune.texts import printable
from ringtune.v1 import control_pb2


class MigrationDriver:
    """Calls that prepare, rest, move and halt the nodes of one run.

    Args:
        sizes: planned, of copies; nodes take no larger ones.
    """

    def __init__(
        self,
        participants: Participants,
        part: Plan,
        job: Job,
        checkpoints: CheckpointManager,
        addresses: Mapping[str, str],
        sizes: CopyBytes,
        ledger: RunLedger,
    ) -> None:
        self.part, self._sizes, self._ledger = part, sizes, ledger
        self._job, self._job_toml, self._checkpoints, self._addresses = job, job.to_toml(), checkpoints, addresses
        self._calls, self._put, self._hear = participants.calls, participants.queue.put, participants.hear
        self._recovers = part.goes_back
        self._place()

    def prepare(self, command: rd.Prepare, saved: Mapping[str, Pieces] | None) -> None:
        """Send a node its part of the plan, with files of a saved result for its initial values."""
        node, plan = command
        request = self._prepare_request(plan)
        self._checkpoints.go_on(node, request)
        self._calls[node].prepare(
            request,
            on_result=lambda hosted: self._hear(node, self._hosted(rd.Prepared(node), hosted)),
            on_progress=lambda: self._put(rd.Progressed(node)),
            saved=saved,
        )

    def grant(self, turns: Sequence[Turn], keep: Mapping[str, Mapping[TensorKey, str]] | None = None) -> None:
        """Grant turns to all nodes of the placement, with the step from which shards are kept, and tensors to keep."""
        keys = keep or {}
        for node in self.part.nodes:
            self._calls[node].grant(turns, keep_from_step=self._checkpoints.keep_from_step, keep=keys.get(node))

    def tell(self, command: rd.FetchAhead | rd.Rest | rd.Move | rd.Halt) -> None:
        """Call a node for a prefetch, a rest, a move or a halt; a halt gives up a move."""
        match command:
            case rd.FetchAhead(node, part):
                self._fetch_ahead(node, part)
            case rd.Move():
                self._move(command)
            case rd.Rest(node):
                number = self.part.placement.placement_number
                self._calls[node].rest(
                    number,
                    on_result=lambda reply: self._hear(node, self._rested(rd.Rested(node, number), reply)),
                    on_failed=self._failed(node, number),
                )
            case rd.Halt(node, number):
                self._calls[node].halt(
                    on_result=lambda _: self._put(rd.Halted(node, number)), on_failed=self._failed(node, number)
                )

    def _fetch_ahead(self, node: str, part: Plan) -> None:
        placement_number, began_s = part.placement.placement_number, time.monotonic()

        def answer(num_bytes: int, problem: str = "") -> None:
            self._put(rd.FetchedAhead(node, placement_number, num_bytes, time.monotonic() - began_s, problem))

        self._calls[node].fetch_ahead(
            self._prepare_request(part, checkpoint_run=self._checkpoints.shards_run),
            on_result=answer,
            on_failed=lambda error: answer(0, str(error)),
        )

    def _prepare_request(self, part: Plan, *, checkpoint_run: str = "") -> control_pb2.PrepareRequest:
        return control_pb2.PrepareRequest(
            placement_number=part.placement.placement_number,
            plan_json=part.to_wire(),
            job_toml=self._job_toml,
            addresses=self._addresses,  # a node that the plan leaves out may have blocks of a resumed run on its disk
            checkpoint_run=checkpoint_run,
            block_bytes=self._sizes.block,
            head_bytes=self._sizes.head,
        )

    def _move(self, command: rd.Move) -> None:
        node, part, start, from_placement_number, sources, from_step, head_from, digests, others, other_head = command
        placement_number = part.placement.placement_number
        request = control_pb2.MoveRequest(
            prepare=self._prepare_request(part, checkpoint_run=self._checkpoints.shards_run),
            step=start.step,
            holder=start.holder,
            first_turn=start.first_turn,
            first_seq=start.first_seq,
            from_placement_number=from_placement_number,
            recovers=from_step is not None,
            repeats=start.repeats,
            head_from=head_from,
            digests=[control_pb2.CopyDigest(unit=unit, sha256=sha256) for unit, sha256 in digests],
            sources=[control_pb2.SnapshotSource(**source._asdict()) for source in sources],
            others=[control_pb2.SnapshotSource(**source._asdict()) for source in others],
            other_head=other_head,
            takes_holder=True,
        )
        self._calls[node].move(
            request,
            on_result=lambda reply: self._hear(node, self._moved(node, placement_number, reply)),
            on_failed=self._failed(node, placement_number),
        )

    def _moved(self, node: str, placement_number: int, reply: control_pb2.MoveReply) -> Iterator[rd.Event]:
        """Read the answer of a node that has moved, or was not given what it needs."""
        if reply.problem:
            problem = naming_node(node, printable(reply.problem))
            yield rd.MoveFailed(node, placement_number, IntegrityError.__name__, problem, reply.holder)
        else:
            yield from self._hosted(rd.Moved(node, placement_number, reply.fetched_bytes), reply.hosted_bytes)

    def _hosted(self, event: rd.Prepared | rd.Moved, hosted_bytes: int) -> Iterator[rd.Event]:
        """Record the bytes of weights that a node holds now."""
        self._ledger.nodes[event.node].figures["hosted_bytes"] = hosted_bytes
        yield event

    def _rested(self, event: rd.Rested, reply: control_pb2.RestReply) -> Iterator[rd.Event]:
        """Record the totals of a node in the placement that it leaves; raises ``IntegrityError``."""
        self._ledger.add_totals(event.node, read_object(reply.totals_json, f"totals.json of node {event.node}"))
        yield event

    def recovered(self, command: rd.LogRecovery) -> str:
        """Grant in the placement of a recovery from now on; return a sentence for the user."""
        owners = owners_text(self._job, self.part.course, command.part.course)
        self.part = command.part
        self._place()
        if command.link and not command.lost:
            return (
                f"{command.link}; both nodes answer the coordinator, so all nodes went back to the end of step "
                f"{command.step} in {format_seconds(command.seconds)}, with new links"
            )
        if command.returned and not command.lost:
            return (
                f"node {', '.join(command.returned)} is back; the run continues from step {command.step} after "
                f"{format_seconds(command.seconds)}"
            ) + owners
        if not command.lost:
            return (
                f"a bad step: {command.bad_step}; all nodes went back to the end of step {command.step} in"
                f" {format_seconds(command.seconds)} and repeat the steps after it"
            )
        came = format_bytes(sum(count for _, count in command.fetched_bytes))
        gone = [node for node in command.lost if node not in command.back]
        who = [f"node {', '.join(gone)} is lost"] if gone else []
        who += [f"node {', '.join(command.back)} is back"] if command.back else []
        return (
            f"{' and '.join(who)}; the run continues from step {command.step}, in placement"
            f" {self.part.placement.placement_number}, after {format_seconds(command.seconds)}; {came} of copies "
            "were fetched"
        ) + owners

    def log(self, command: rd.LogMove) -> str:
        """Grant in the present placement from now on; return a sentence for the user."""
        self.part = command.part
        self._place()
        where = f"after step {command.step}"
        if command.problem:
            return f"the run stays on placement {self.part.placement.placement_number} {where}: {command.problem}"
        came = format_bytes(sum(count for _, count in command.fetched_bytes))
        return (
            f"the run moved to placement {command.placement_number} {where} in {format_seconds(command.seconds)}; "
            f"{came} of trained tensors were sent between nodes"
        )

    def _place(self) -> None:
        for node in self.part.nodes:
            self._calls[node].place(self.part.placement.placement_number)

    def _failed(self, node: str, placement_number: int) -> Callable[[RingTuneError], None]:
        def failed(error: RingTuneError) -> None:
            name = type(error).__name__
            if self._recovers and isinstance(error, PeerLostError):  # it does not answer, which is more than a failure
                self._put(rd.NodeFailed(node, name, str(error)))
            else:
                self._put(rd.MoveFailed(node, placement_number, name, str(error), lost=error.peer))

        return failed


FIRST_MOVE_S: Final = 5.0
"""Assumed seconds of a move before the run has made one; from ``tests.bench.sim``, part ``slowed``."""


class ReplanOutcome(NamedTuple):
    """The result of a search for changed nodes.

    Attributes:
        placement_number: that of the placement at the start of the search.
        found: another placement; None = there is none.
        profile: with which it was judged.
        problem: why the search failed; empty = it did not.
        candidates: nodes that joined during the run and caused the search.
    """

    placement_number: int
    found: PlacementProposal | None
    profile: Profile
    problem: str = ""
    candidates: tuple[str, ...] = ()


class ReplanSearch:
    """The search for other placements during one run.

    Args:
        part: that holds; as long as the plan has a later placement, none is searched.
        put: takes the outcome, on the thread of the search.

    Attributes:
        pace: monitor of the nodes in the present placement; None where the run does not move.
        why_closed: why nodes that join during the run get no blocks; empty if they may.
    """

    def __init__(
        self,
        plan: Plan,
        part: Plan,
        job: Job,
        profile: Profile,
        *,
        put: Callable[[ReplanOutcome], None],
        note: Callable[[str], None],
    ) -> None:
        self._course, self._job, self._put, self._note = plan.course, job, put, note
        self._began_as = plan.parts[0]
        nodes = set(plan.nodes)
        self.profile = Profile(
            nodes=tuple(node for node in profile.nodes if node.node in nodes),
            links=tuple(link for link in profile.links if {link.source, link.target} <= nodes),
        )
        is_shared = all(link.is_assumed for link in profile.links)
        self._follows = job.placement.follow != NEVER and plan.course.decides
        self._watches = job.placement.replan != NEVER
        is_wanted = (self._watches or self._follows) and not is_shared and len(nodes) > 1
        stays = stay_reason(plan.course)
        self._may_move = is_wanted and not stays
        self.why_closed = _closed_reason(stays, watches=self._watches, is_shared=is_shared)
        self._candidates: tuple[str, ...] = ()
        self._last_placement_number = plan.placements[-1].placement_number
        self._is_thinking = False
        self._told: Mapping[str, float] = {}  # nodes, and links as "a to b"
        self._decided: tuple[int, ...] = ()
        self._next: Profile | None = None
        self._move_s = 0.0
        self.pace: PaceMonitor | None = None
        self._watch(part)

    def _watch(self, part: Plan, tried: int = 0) -> None:
        """Begin to monitor the pace, unless the plan has a placement after ``tried`` to move to."""
        self._placement_number = part.placement.placement_number
        if self._may_move and max(self._placement_number, tried) >= self._last_placement_number:
            self.pace = PaceMonitor(Plan(self._course, (part.placement,)), self.profile)

    def turn_done(
        self, part: Plan, turn: Turn, end_step: int, links: RecordedLinks, *, prepare_s: float, living: Set[str]
    ) -> None:
        """Start a search if nodes or links have changed, more blocks train, or nodes have joined.

        ``end_step`` is the end of the granted turns, the earliest point of a move.
        """
        has_decided = self._follows and turn.unfreeze_at != self._decided
        length = self._course.local_iterations
        step = -(-max(turn.end_step, end_step) // length) * length
        if self.pace is None or self._is_thinking or step >= self._course.num_steps:
            return
        lost = self.profile.by_name.keys() - living
        nodes, pairs = (self.pace.changed(), self.pace.links.changed()) if self._watches else ({}, {})
        links_told = {f"{source} to {target}": ratio for (source, target), ratio in pairs.items()}
        changed = {**nodes, **links_told}
        if changed and _differ(changed, self._told):
            self._told = changed
            compared = "compared with earlier turns of the same work"
            if nodes:
                self._note(f"after step {turn.end_step} actions of nodes take, {compared}: {_times_as_long(nodes)}")
            if pairs:
                self._note(f"after step {turn.end_step} messages take, {compared}: {_times_as_long(links_told)}")
        elif has_decided:
            self._decided = turn.unfreeze_at
            profile = dataclasses.replace(self.profile, links=links.links(self.profile.links))
            self._search_in_background(part, profile.without(lost), turn, step, prepare_s)
            return
        elif not self._candidates:
            return
        profile = self._complete(self.pace.profile(links))
        self._search_in_background(part, profile.without(lost), turn, step, prepare_s)

    def _search_in_background(self, part: Plan, profile: Profile, turn: Turn, step: int, prepare_s: float) -> None:
        self._is_thinking = True
        candidates, self._candidates = tuple(node for node in self._candidates if node in profile.by_name), ()
        move_s, number = self._move_s or max(prepare_s, FIRST_MOVE_S), part.placement.placement_number

        def think() -> ReplanOutcome:
            ring = replanned(
                part,
                self._job,
                profile,
                step=step,
                move_s=move_s,
                effort=Effort(seconds=self._job.runtime.plan_s),
                unfreeze_at=turn.unfreeze_at,
                began_as=self._began_as,
            )
            return ReplanOutcome(number, ring, profile, candidates=candidates)

        def failed(error: RingTuneError) -> ReplanOutcome:
            return ReplanOutcome(number, None, profile, f"no other placement was found: {error}", candidates)

        work_beside("replan", think, self._put, failed)

    def take(self, answer: ReplanOutcome, living: Set[str]) -> rd.Replanned | None:
        """Show the outcome, and return the event for the state machine; None if the run does not move.

        The outcome of a search in a former placement is dropped.
        """
        self._is_thinking, replanning = False, answer.found
        if answer.placement_number != self._placement_number:
            self._candidates = tuple(dict.fromkeys((*self._candidates, *answer.candidates)))  # beside what holds now
            return None
        who = f"with node {', '.join(answer.candidates)}: " if answer.candidates else ""
        if replanning is None:
            why = answer.problem or "there is no other placement that fits the nodes"
            self._note(f"{who}{why}; the run stays on its placement")
            return None
        lost = [node for node in replanning.placement.members if node not in living]
        if lost or not replanning.is_worth_it:
            also = f", and node {lost[0]} is lost" if lost else ""
            self._note(f"{who}the run stays on its placement: {replanning.line()}{also}")
            return None
        self._note(f"{who}the run will move: {replanning.line()}")
        self._next = answer.profile
        return rd.Replanned(replanning.placement, replanning.stays_s, replanning.moves_s, replanning.cost_s)

    def joined(self, facts: NodeFacts, links: Sequence[LinkFacts], *, looks: bool) -> None:
        """Add a node with its facts and links to the profile, or replace the facts of one that has returned.

        ``looks``: search for a placement with it after the next turn.
        """
        others = self.profile.without([facts.node])
        self.profile = _sorted(others, (facts,), links)
        if looks and self._may_move:
            self._candidates = (*self._candidates, facts.node)

    def _complete(self, profile: Profile) -> Profile:
        """Add to a profile the nodes that joined after it was begun."""
        missing = [node for node in self.profile.nodes if node.node not in profile.by_name]
        pairs = profile.link_by_pair.keys()
        links = [link for link in self.profile.links if (link.source, link.target) not in pairs]
        return _sorted(profile, missing, links) if missing else profile

    def find_placement(
        self, command: rd.FindPlacement, put: Callable[[rd.PlacementFound | rd.NoPlacementFound], None]
    ) -> None:
        """Search a placement without lost nodes on a thread of its own; ``put`` takes the result."""
        self.profile = self.profile.without(command.lost)
        profile, placement_number = self.profile, command.placement_number

        def think() -> rd.PlacementFound | rd.NoPlacementFound:
            effort = Effort(seconds=self._job.runtime.plan_s)
            lost = (*command.lost, *command.doubted)
            placement = placed_without(command.part, self._job, profile.without(command.doubted), lost, effort)
            return rd.PlacementFound(placement_number, placement)

        def failed(error: RingTuneError) -> rd.NoPlacementFound:
            return rd.NoPlacementFound(placement_number, type(error).__name__, str(error))

        work_beside("recover", think, put, failed)

    def moved(self, command: rd.LogMove) -> PaceMonitor | None:
        """Restart the monitor after a move, and return it; a successful move adopts the newest profile."""
        if not command.problem:
            self._move_s = command.seconds
            if self._next is not None:
                self.profile, self._told = self._complete(self._next), {}
        self._next = None
        self._watch(command.part, command.placement_number)
        return self.pace

    def recovered(self, command: rd.LogRecovery) -> PaceMonitor | None:
        """Restart the monitor after a recovery, and return it."""
        self._next, self._told, self._course = None, {}, command.plan.course
        self._watch(command.part, self._last_placement_number)  # no later placement of the plan is left
        return self.pace


def _closed_reason(stays: str, *, watches: bool, is_shared: bool) -> str:
    """Say why a node that joins during the run gets no blocks; empty if it may."""
    if stays:
        return f"the run stays on its placement, as {stays}"
    if not watches:
        return "placement.replan is 'never'"
    return "its nodes share a machine, or the links between them were not measured" if is_shared else ""


def _sorted(profile: Profile, nodes: Sequence[NodeFacts], links: Sequence[LinkFacts]) -> Profile:
    """Add nodes and links to a profile, nodes in the order of their names."""
    everybody = sorted((*profile.nodes, *nodes), key=lambda node: node.node)
    return dataclasses.replace(profile, nodes=tuple(everybody), links=(*profile.links, *links))


def _differ(now: Mapping[str, float], told: Mapping[str, float]) -> bool:
    """Whether other nodes or links have changed than last reported, or a ratio by the factor ``CHANGED``."""
    return now.keys() != told.keys() or any(
        max(now[node] / told[node], told[node] / now[node]) >= CHANGED for node in now
    )


def _times_as_long(ratios: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {ratio:.2f} times as long" for name, ratio in sorted(ratios.items()))
