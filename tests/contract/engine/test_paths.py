"""Credits bound what is in flight for each target and boundary."""

from __future__ import annotations

from ringtune.engine.paths import Channel, Credits, Path, Place
from ringtune.schedule.actions import Leg, Op, Payload


def test_credits_run_out_for_each_channel_by_itself() -> None:
    """Two hidden states may be in flight; another boundary of the same target is another channel."""
    room = Credits(2)
    for _ in range(2):
        assert room.channel("b", 2).left > 0
        room.channel("b", 2).left -= 1
    assert room.channel("b", 2).left == 0
    assert (room.channel("b", 4).left, room.channel("c", 2).left) == (2, 2)


def test_credits_of_a_channel_are_always_the_same_object() -> None:
    """Whoever sends and whoever hears of a credit count the same room."""
    room = Credits(1)
    assert room.channel("b", 2) is room.channel("b", 2)
    assert (room.channel("b", 2).target, room.channel("b", 2).boundary) == ("b", 2)


def test_credits_come_back_but_never_exceed_the_bound() -> None:
    """One that comes twice, or unasked, makes no more room than there was."""
    channel = Credits(1).channel("b", 2)
    channel.return_credit()
    assert channel.left == 1
    channel.left -= 1
    assert channel.left == 0
    channel.return_credit()
    channel.return_credit()
    assert channel.left == 1


def test_credits_are_not_needed_without_a_channel() -> None:
    """A stretch that sends no hidden state takes none: of three, only the first hosted block of the first one does."""
    room = Credits(1)
    legs = (
        Leg(Op.EMBED, -1, 0),
        Leg(Op.FORWARD_FREE, 0, 1),  # private
        Leg(Op.FORWARD, 1, 4),
        Leg(Op.SEND, 4, 0, "b", Payload.HIDDEN),
        Leg(Op.RECEIVE, 8, 0, "b", Payload.HIDDEN),
        Leg(Op.HEAD, 8, 9),
        Leg(Op.SEND, 8, 0, "b", Payload.GRAD),
        Leg(Op.RECEIVE, 4, 0, "b", Payload.GRAD),
        Leg(Op.BACKWARD, 1, 4),
    )
    found: dict[Op, Channel | None] = {}
    place: Place | None = Path(legs, 1, room).first
    while place is not None:
        found[place.op] = place.credit
        place = place.next
    assert found == {
        Op.EMBED: None,
        Op.FORWARD_FREE: None,
        Op.FORWARD: room.channel("b", 4),
        Op.HEAD: None,
        Op.BACKWARD: None,
    }
