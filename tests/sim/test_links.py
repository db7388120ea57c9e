"""Links: rates, latencies, and what messages that share a node's connection do to each other."""

from __future__ import annotations

from ringtune.costs.action_costs import CourseCosts
from ringtune.costs.profile import Profile, Work
from ringtune.schedule.actions import Payload, TensorKey
from ringtune.schedule.turns import StepKind
from ringtune.schedule.units import Units
from sim.ledger import ItemKind, Items
from sim.links import MeasuredLinks
from tests.support.cases import cases
from tests.support.plans import make_plan
from tests.support.profiles import TIMES, profile_of

PLAN = make_plan([("a", 0, 1), ("b", 1, 2), ("c", 2, 4)], ["a"], hidden_size=10)
SIZE = 25.0
TENSOR = 1000
"""Bytes of a gradient of ``SIZE`` tokens: 25 x 10 x 4."""


def links(
    rates: dict[tuple[str, str], tuple[float, float]], *, encode_s: float = 0.0, decode_s: float = 0.0
) -> MeasuredLinks:
    """Links with (rate, latency) by pair."""
    times = {**TIMES, Work.ENCODE: encode_s, Work.DECODE: decode_s, Work.HAND_OVER: 7.0}
    profile = profile_of(PLAN, times=times, links=rates)
    return measured(profile, SIZE)


def measured(profile: Profile, *sizes: float) -> MeasuredLinks:
    """The links of a profile; item 0 has micro-batches of these padded tokens."""
    costs = CourseCosts(PLAN.course, profile)
    granted = Items(costs)
    units = Units.top(PLAN.course.num_blocks, 4)
    granted.by_seq[0] = ItemKind(0, StepKind.TRAIN, units, (units.lowest,) * len(sizes), sizes)
    return MeasuredLinks(granted, profile)


GRADIENT = TensorKey(Payload.GRAD, 0, 0, 1)
"""A message of ``TENSOR`` bytes."""


def test_links_take_latency_and_bytes_over_rate() -> None:
    """A message is made, sent, and read."""
    found = links({("a", "b"): (100.0, 0.5)}, encode_s=0.25, decode_s=0.125)
    assert found.send(GRADIENT, "a", "b", 2.0)[0] == 2.0 + 0.25 + 0.125 + 10.0 + 0.5
    assert found.sent_bytes == {("a", "b"): TENSOR}
    assert found.busy_s == {("a", "b"): 10.0}


def test_links_of_one_machine_take_the_time_of_making_and_reading() -> None:
    """Without links in the profile bytes are counted, but take no time."""
    found = links({}, encode_s=0.25, decode_s=0.125)
    assert found.send(GRADIENT, "a", "b", 2.0)[0] == 2.375
    assert found.credit_s("b", "a", 3.0) == 3.0
    assert (found.sent_bytes, found.busy_s) == ({("a", "b"): TENSOR}, {("a", "b"): 0.0})


@cases(
    ("rates", "messages", "arrivals_s"),
    [
        # one message after the other; latencies overlap
        ({"ab": (100.0, 0.5)}, "ab ab ab", [10.5, 20.5, 30.5]),
        # two neighbours at the rate of the uplink; at a quarter of it a message takes a quarter of it
        ({"ab": (100.0, 0.0), "ac": (100.0, 0.0)}, "ab ac", [10.0, 20.0]),
        ({"ab": (25.0, 0.0), "ac": (100.0, 0.0)}, "ab ac", [40.0, 20.0]),
        # two senders at the receiver's rate; what waits there keeps no uplink from others
        ({"ac": (100.0, 0.0), "bc": (100.0, 0.0)}, "ac bc", [10.0, 20.0]),
        (
            {"ac": (100.0, 0.0), "bc": (100.0, 0.0), "ab": (100.0, 0.0)},
            "bc bc bc bc ac ab",
            [10.0, 20.0, 30.0, 40.0, 50.0, 20.0],
        ),
        # what comes does not slow down what goes
        ({"ab": (100.0, 0.0), "ba": (10.0, 0.0)}, "ba ab", [100.0, 10.0]),
    ],
)
def test_links_that_share_an_end_take_turns(
    rates: dict[str, tuple[float, float]], messages: str, arrivals_s: list[float]
) -> None:
    """All messages are sent at 0 s; rate and latency are those of a pair of nodes."""
    found = links({(pair[0], pair[1]): each for pair, each in rates.items()})
    assert [found.send(GRADIENT, pair[0], pair[1], 0.0)[0] for pair in messages.split()] == arrivals_s


def test_links_keep_the_order_of_messages() -> None:
    """A short message does not overtake a long one."""
    profile = profile_of(PLAN, times={**TIMES, Work.ENCODE: 0.0})
    found = measured(profile, 100.0, 0.0)
    late = found.send(GRADIENT, "a", "b", 5.0)[0]
    assert found.send(GRADIENT._replace(micro=1), "a", "b", 4.0)[0] == late


def test_links_carry_heads_with_their_own_bytes_and_time() -> None:
    """A hand-over has no micro-batch: the head, its moments, and the time of packing them."""
    found = links({("a", "b"): (100.0, 0.0)})
    head = 3 * (4000 + 2 * 100)
    assert found.send(TensorKey(Payload.HEAD, 3, -1, 0), "a", "b", 0.0)[0] == 7.0 + head / 100
    assert found.sent_bytes == {("a", "b"): head}


def test_links_return_credits_with_the_latency_only() -> None:
    """A credit is a few bytes, and does not wait."""
    found = links({("a", "b"): (1.0, 0.5)})
    found.send(GRADIENT, "a", "b", 0.0)
    assert found.credit_s("a", "b", 3.0) == 3.5
