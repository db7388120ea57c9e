"""Find the error of a process that ended by itself: the error that it printed, or a lost node."""

from __future__ import annotations

import signal
from pathlib import Path

from ringtune.errors import PeerLostError, RingTuneError, all_errors

_OUT_OF_MEMORY = (
    "the system does so where memory runs out ('journalctl -k' tells): free some, lower train.batch_size or take more "
    "nodes, then repeat or --resume the run"
)


def exit_error(who: str, code: int, output: str, *, log: Path) -> RingTuneError:
    """Make the error of a process that ended by itself.

    The exit code tells the error's class and the last line ``error: ...`` its message. If one of them is missing, or
    a signal ended the process, the node counts as lost.

    Args:
        who: ended, e.g. ``node node-1``.
        code: what the process ended with; negative for a signal.
        output: the end of what it printed.
        log: where all of it is.
    """
    lines = [line.removeprefix("error: ") for line in output.splitlines() if line.startswith("error: ")]
    kinds = {kind.exit_code: kind for kind in reversed(all_errors()) if kind is not RingTuneError}
    if lines and code in kinds:
        return kinds[code](f"{who}: {lines[-1]}")
    if code < 0:  # from outside, often for want of memory; its own last words say nothing about it
        name = signal.Signals(-code).name
        why = _OUT_OF_MEMORY if name == "SIGKILL" else f"see {log} and repeat or --resume the run"
        return PeerLostError(f"{who} was ended by {name}; {why}")
    last = output.strip().splitlines()[-1:] or ["it printed nothing"]
    return PeerLostError(
        f"{who} ended with exit code {code} ({last[0][:300]}); see {log} and repeat or --resume the run"
    )
