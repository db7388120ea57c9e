"""What helpers change of a run's seconds and bytes: pairs and weights on links, and who computes which gradients.

An adapter's weights are multiplied with each token once in a forward, and once more for their gradient. So the share
of adapters in a block's weights, frozen ones and theirs together, times the block's forward, stands for both:

- a backward at the host takes that much less for each block whose adapters a helper fits;
- a fit takes three times that for each block: a forward, the gradient of the weights, the gradient between them.

Both are estimates by multiplications, and no measurement: a narrow adapter takes longer than its share says. Where a
node was measured for fits, its own time counts, reading included; but as the job's own kind of adapters is measured,
the estimate counts where it is more and users have several kinds. To ship pairs takes a host as long as to encode as
many bytes of hidden states, to read them takes a helper as long as to decode them, and to install weights no time.
Where users have adapters of their own an update takes its time once for each user that it may change; that rows of
several users are run by themselves is taken to cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from ringtune.costs.offload.set_bytes import set_bytes
from ringtune.costs.offload.traffic import pair_token_bytes, wire_of
from ringtune.costs.profile import NodeFacts
from ringtune.costs.work_times import Work
from ringtune.schedule.actions import Action, Op, Payload
from ringtune.schedule.course import Course
from ringtune.schedule.helping.helpers import Helper
from ringtune.schedule.turns.turns import StepKind
from ringtune.schedule.whose_rows.users import most_changed

_FIT_FORWARDS: Final = 3
_COMPUTED_BYTES: Final = 4


class WorkSeconds(Protocol):
    """The measured times of one node."""

    def work(self, work: Work, size: float = 0.0) -> float:
        """Seconds of a work; 0 if it was not measured."""


class OffloadCosts:
    """Seconds and bytes of a course in which helpers fit adapters.

    Args:
        course: the run.
        facts: of any node, for the model with its adapters.
        helpers: of the placement.
    """

    def __init__(self, course: Course, facts: NodeFacts, helpers: Sequence[Helper]) -> None:
        model = facts.model
        self._helpers = tuple(helpers)
        self._token_bytes = pair_token_bytes(model, wire_of(course.offload))
        self._hidden_bytes = _COMPUTED_BYTES * model.hidden_size
        self._sent_bytes = set_bytes(course, model, adapter=facts.shape.adapter).sent
        self._changed = most_changed(course)
        self._has_kinds = bool(model.kinds)
        largest = max([model.adapter_block_bytes, *(kind.adapter_block_bytes for kind in model.kinds)])
        self._share = largest / max(1, model.block_bytes + largest)

    def action_s(
        self, node: str, action: Action, work_s: float, costs: WorkSeconds, *, size: float, kind: StepKind
    ) -> float:
        """Seconds of an action, of which ``work_s`` is what it takes where nobody helps."""
        op, blocks = action.op, action.stop - action.start
        if op is Op.SHIP:
            return blocks * self._packing(size) * costs.work(Work.ENCODE, size)
        if op is Op.FIT:
            return blocks * self.fit_s(costs, size)
        if op is Op.UPDATE and self._installs(node, action):
            return 0.0
        if op is Op.UPDATE and any(one.node == node and one.has_block(action.start) for one in self._helpers):
            return self._changed * work_s
        if op is Op.BACKWARD and kind.has_update:
            helped = sum(max(0, min(action.stop, one.stop) - max(action.start, one.start)) for one in self._helpers)
            return max(0.0, work_s - helped * self._share * costs.work(Work.FORWARD, size))
        return work_s

    def fit_s(self, costs: WorkSeconds, size: float) -> float:
        """Seconds to read one block's pairs and fit its adapters, at a node with these times."""
        measured_s = costs.work(Work.FIT, size)
        if measured_s and not self._has_kinds:
            return measured_s
        read_s = self._packing(size) * costs.work(Work.DECODE, size)
        return max(measured_s, read_s + _FIT_FORWARDS * self._share * costs.work(Work.FORWARD, size))

    def parcel_bytes(self, payload: str, boundary: int, size: float) -> float:
        """Bytes of pairs or weights of the blocks from ``boundary`` on that one helper fits."""
        blocks = next((one.stop - boundary for one in self._helpers if one.has_block(boundary)), 0)
        return blocks * (size * self._token_bytes if payload == Payload.PAIRS else self._sent_bytes)

    def _packing(self, size: float) -> float:
        """Bytes of one block's pairs over those of a hidden state of the same tokens."""
        return self._token_bytes / self._hidden_bytes if size else 0.0

    def _installs(self, node: str, action: Action) -> bool:
        return any(one.has_block(action.start) and one.node != node for one in self._helpers)
