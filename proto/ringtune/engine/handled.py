"""What a recording consists of: the calls of one engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ringtune.engine import events as ev


class Handled(NamedTuple):
    """One call of an engine: time, event, answer. Feeding the events again gives the same answers."""

    now_s: float
    event: ev.Event
    commands: Sequence[ev.Command]
