"""``[recovery]``: what a run keeps so that it goes on when a node is lost, and without whose rows it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ringtune.errors import JobError
from ringtune.jobs.sections import MOST_WAIT_S, check_choice, check_range

AUTO: Final = "auto"
NEXT: Final = "next"
NONE: Final = "none"
WAIT: Final = "wait"
SKIP: Final = "skip"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoverySettings:
    """``[recovery]``: what happens when a node is lost in mid-run; results depend on it by rows that are left out only.

    Attributes:
        copies: who keeps a copy of what a host has trained at each turn's end, so that the run goes on without the
            host: the next host in the ring, or none; then the run ends when a host is lost, and can be resumed. auto =
            the next host, where the method may move and the nodes have memory for it.
        owners: what happens when an owner of rows is lost. wait = the run waits for it, as long as wait_s says, and
            goes on from copies when it is back; skip = the run goes on from copies without it, and the owner's turns
            are left out from then on.
        wait_s: longest time that the run waits for a node without which it can't go on, in seconds: an owner of rows,
            or any node with room for blocks that fit nowhere else. Then it ends, and can be resumed. 0 = it ends at
            once, as it does where no copies are kept, and with --local, whose nodes nobody starts again.
    """

    copies: str = AUTO
    owners: str = WAIT
    wait_s: float = 300.0

    def __post_init__(self) -> None:
        """Refuse unknown words."""
        check_choice("recovery.copies", self.copies, (AUTO, NEXT, NONE))
        check_choice("recovery.owners", self.owners, (WAIT, SKIP))
        check_range("recovery.wait_s", self.wait_s, 0, MOST_WAIT_S)
        if self.owners == SKIP and self.copies == NONE:
            raise JobError(
                "recovery.owners = 'skip' goes on from copies, but recovery.copies = 'none' keeps none; leave one out"
            )
