"""Method ``single``: one node hosts all blocks and trains all units; a baseline of RingAda's paper."""

from __future__ import annotations

from dataclasses import dataclass

from ringtune.schedule.methods.base import method
from ringtune.schedule.methods.everything import Everything


@method
@dataclass(frozen=True, kw_only=True, slots=True)
class Single(Everything):
    """All units train at every step, on one host. Source: RingAda, section IV, baseline Single."""

    name = "single"
    max_hosts = 1
