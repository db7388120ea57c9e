"""Take what a run goes on from off the disks of its nodes, before a slice is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from edge.agent.moving.fetch import fetch
from edge.agent.snapshots import TakenOver
from edge.agent_options import AgentOptions
from edge.shards.block_files import metadata
from edge.shards.parts import SavedParts
from edge.shards.saver import GoesOn, SavedStart, saved_parts
from ringtune.errors import UsageError
from ringtune.files.pieces import Pieces


def take_from_disks(
    options: AgentOptions,
    goes_on: GoesOn,
    saved: SavedStart,
    addresses: Mapping[str, str],
    deadline_s: float,
    check: Callable[[str, str], None],
    *,
    lease_s: float,
) -> TakenOver:
    """Fetch the blocks that other nodes have on their disks, and read those of this one.

    Args:
        options: of this node.
        goes_on: from which step, and who has the head.
        saved: where everything is.
        addresses: ``host:port`` by node.
        deadline_s: until when, on the monotonic clock.
        check: raises if a node may not be reached so.
        lease_s: a node that does not answer is asked again for so long.

    Raises:
        UsageError: it is to read from its own disk, and has no folder.
        IntegrityError: a file is damaged, or not there any more.
        RingTuneError: another node can't be reached, or not in time.
    """
    node, step, attempt = options.name, goes_on.shard.step, saved.attempt
    parts, files, head = saved_parts(options.state, node, goes_on.run_id), list[Pieces](), None
    for source in saved.sources:
        if source.node != node:
            terms = (goes_on.run_id, 0, [source], addresses, deadline_s, check)
            files += fetch(*terms, step=step, lease_s=lease_s, attempt=attempt)
        else:
            files.append(_own(parts, node).part(step, attempt, source.start, source.stop, sha256=source.sha256))
    if goes_on.holder == node:
        head = _own(parts, node).head(step, attempt, sha256=saved.head_sha256)
    return TakenOver(tuple(files), metadata(attempt, step), head, goes_on.run_id, is_resumed=parts is not None)


def _own(parts: SavedParts | None, node: str) -> SavedParts:
    if parts is None:
        raise UsageError(f"node {node} has no folder for checkpoints; start it with --state DIR")
    return parts
