"""Let nodes fetch the base weights of the next placement while the present one trains.

A placement of the plan is moved to when its turn comes, whether or not all has come by then: what is missing is
fetched in the move. One that was found in mid-run has no turn yet: the run moves to it once every node has what it
needs, and stays where it is if one can't get it.
"""

from __future__ import annotations

from collections.abc import Collection

from ringtune.rounds.events.replanning_events import FetchAhead, FetchedAhead, LogFetched, Replanned
from ringtune.schedule.plan import Plan


class FetchingAhead:
    """What the nodes of one run fetch while it trains.

    Attributes:
        placement_number: for which nodes have fetched last.
    """

    def __init__(self) -> None:
        self.placement_number = -1
        self._asked: set[int] = set()
        self._found: Replanned | None = None
        self._waiting: set[str] = set()
        self._answers: list[FetchedAhead] = []

    def look_ahead(self, plan: Plan, tried: int, lost: Collection[str]) -> list[FetchAhead]:
        """Ask the nodes of the placement after that of number ``tried``, once."""
        following = next((one.placement_number for one in plan.placements if one.placement_number > tried), None)
        if following is None or following in self._asked:
            return []
        return self._ask(plan.at(following), lost)

    def find(self, found: Replanned, plan: Plan) -> list[FetchAhead]:
        """Ask the nodes of a placement that was found; ``plan`` is the one that ends with it."""
        asked = self._ask(plan.at(plan.placements[-1].placement_number))
        self._found = found
        return asked

    def take(self, event: FetchedAhead) -> LogFetched | None:
        """Take a node's answer; the last one sums all up."""
        if event.placement_number != self.placement_number or event.node not in self._waiting:
            return None
        self._waiting.discard(event.node)
        self._answers.append(event)
        if self._waiting:
            return None
        return LogFetched(
            event.placement_number,
            tuple((one.node, one.num_bytes) for one in self._answers if one.num_bytes),
            max(one.seconds for one in self._answers),
            tuple((one.node, one.problem) for one in self._answers if one.problem),
        )

    def found(self) -> Replanned | None:
        """Hand out what was found, if nobody is waited for."""
        if self._waiting:
            return None
        found, self._found = self._found, None
        return found

    def lose(self, node: str) -> None:
        """Forget what was found, if this node is in it."""
        if node in self._waiting:
            self.forget()

    def forget(self) -> None:
        """Wait for nobody any more."""
        self._found, self._waiting, self._answers = None, set(), []

    def _ask(self, part: Plan, lost: Collection[str] = ()) -> list[FetchAhead]:
        self.forget()
        self.placement_number = part.placement.placement_number
        self._asked.add(self.placement_number)
        self._waiting = {node for node in part.nodes if node not in lost}
        return [FetchAhead(node, part) for node in part.nodes if node not in lost]
