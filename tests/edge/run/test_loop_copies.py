"""The loop carries out what engines say of copies: gradients of units leave, arrive, and give a credit back."""

from __future__ import annotations

from edge.run import reporter as rp
from ringtune.engine.handled import Handled
from ringtune.engine.spans import Span
from ringtune.schedule.actions import Op, Payload
from ringtune.schedule.methods import Hift
from ringtune.schedule.units import EMBEDDING
from tests.edge.run.test_loop import _line, ring_of
from tests.support.plans import changed, make_plan
from tests.support.replay import replay


def test_run_sends_gradients_of_units_to_every_other_owner() -> None:
    """Twelve steps of three groups: four gradients of the embedding and four of the head, to each of two owners."""
    plan = changed(make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "c", "d"], num_steps=12), method=Hift(group_size=2))
    with ring_of(plan, record=True) as ring:
        ring.start()
        assert ring.wait_done(len(ring.grant_all()))
        assert all(run.num_waiting == 0 and not run._inbox.parcels for run in ring.runs.values())
    sent = [entry for node in plan.nodes for entry in ring.reports[node].of(rp.Sent) if entry.payload != Payload.HIDDEN]
    grads = [entry for entry in sent if entry.payload == Payload.UNIT_GRAD]
    assert len(grads) == 2 * (4 + 4) and not [entry for entry in sent if entry.payload == Payload.HEAD]
    for owner in ("a", "c", "d"):
        actions = [span.action for span in ring.reports[owner].of(Span)]
        updates = [action for action in actions if action.op is Op.UPDATE]
        assert sum(action.start == EMBEDDING for action in updates) == 4
        assert sum(action.start == 4 for action in updates) == 4
    came = [entry for owner in ("a", "c", "d") for entry in ring.executors[owner].log if isinstance(entry, bytes)]
    assert len(came) == 16 and {entry.split(b"/")[1] for entry in came} == {b"-1", b"4"}
    for node in plan.nodes:
        lines = [_line(entry) for entry in ring.reports[node].entries if isinstance(entry, rp.HeaderLine | Handled)]
        assert replay(lines, plan, node) == len(lines) - 1 > 0
