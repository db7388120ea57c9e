"""Convert members to messages and back; a member's fields have the names that they have in ``JoinRequest``."""

from __future__ import annotations

import dataclasses
from typing import Any, Final, Literal

from coordinator.members.registry import Member
from ringtune.texts import printable
from ringtune.v1 import control_pb2

_MOST_TEXT: Final = 300
_SAID = tuple(field.name for field in dataclasses.fields(Member) if field.name not in ("seen_at_s", "rss_bytes"))
_OPTIONAL: tuple[Literal["train_rows"], Literal["eval_rows"]] = ("train_rows", "eval_rows")
_TOLD = tuple(name for name in _SAID if name != "instance")


def member_of(request: control_pb2.JoinRequest) -> Member:
    """Make a member from what an agent said of itself as it joined."""
    said: dict[str, Any] = {name: _checked(getattr(request, name)) for name in _SAID}
    return Member(**said | {name: None for name in _OPTIONAL if not request.HasField(name)})


def _checked(value: object) -> object:
    """Bound a text of an agent, which is shown and logged later."""
    return printable(value, most=_MOST_TEXT) if isinstance(value, str) else value


def entry_of(member: Member, state: str, seen_s: float) -> control_pb2.NodeEntry:
    """Make the entry of a member in a list for users; its ``instance`` is left out."""
    joined = control_pb2.JoinRequest(**{name: getattr(member, name) for name in _TOLD})
    return control_pb2.NodeEntry(joined=joined, state=state, seen_s=seen_s, rss_bytes=member.rss_bytes)
