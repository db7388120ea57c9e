"""``python -m tests.support.members_watch ADDRESS SECONDS``: a coordinator's members, a line of JSON every so often.

``{"c": ["idle", 0.21]}``: state, and the seconds for which nothing was heard of it; ``{}`` while
nobody answers.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time

from coordinator.client.connection import Connection
from ringtune.errors import RingTuneError


def main(address: str, every_s: float) -> None:
    """Watch until the process is ended."""
    while True:
        with contextlib.suppress(RingTuneError), Connection(address, insecure=True) as client:
            while True:
                entries = client.nodes()
                found = {each.joined.node: [each.state, round(each.seen_s, 2)] for each in entries}
                say(found)
                time.sleep(every_s)
        say({})
        time.sleep(every_s)


def say(members: dict[str, list[object]]) -> None:
    """Print a line at once."""
    sys.stdout.write(json.dumps(members) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
