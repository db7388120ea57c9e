"""Links of a run to the nodes that this one sends to, opened while the run is prepared."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from edge.agent.active_run import ActiveRun
from edge.agent.torch_side import Workshop
from edge.agent_options import AgentOptions
from ringtune.errors import ConnectionFailedError, FrameError, PlanError, RingTuneError, TrustError
from ringtune.rpc.addresses import is_allowed
from ringtune.rpc.connections import MAX_WORKERS
from ringtune.rpc.refusals import why_refused
from ringtune.schedule.lowering import links as plan_links
from ringtune.trust.parties import node_party
from ringtune.trust.speaking import is_encrypted

_LOG = logging.getLogger(__name__)
_LINK_RETRY_S = 0.1
MAX_INCOMING = MAX_WORKERS - 64
"""Links to one node; the other workers are for the coordinator's calls and for nodes that fetch weights."""


def open_links(
    active: ActiveRun, options: AgentOptions, workshop: Workshop, addresses: Mapping[str, str], deadline_s: float
) -> None:
    """Open a link to each node that this one sends to.

    Raises:
        ConnectionFailedError: a node can't be reached in time, or only unencrypted; names it.
        PlanError: more nodes send to this one than it can serve.
        InterruptedRunError: the run was released meanwhile.
    """
    name = options.name
    found = plan_links(active.plan, active.start)
    incoming = sum(target == name for _, target in found)
    if incoming > MAX_INCOMING:
        raise PlanError(
            f"{incoming} nodes would send to node {name}, which can serve {MAX_INCOMING}; take fewer owners"
        )
    for target in sorted(target for source, target in found if source == name):
        address = addresses.get(target, "")
        if not address:
            raise ConnectionFailedError(f"node {name} got no address of node {target}; let it join again")
        check_private(options, target, address)
        _open_link(workshop, active, target, address, deadline_s)


def check_private(options: AgentOptions, target: str, address: str) -> None:
    """Refuse to send tensors beyond this machine unencrypted, unless the user allowed it.

    Raises:
        ConnectionFailedError: names both ends.
    """
    if not is_allowed(address, insecure=options.insecure):
        raise ConnectionFailedError(
            f"node {options.name} won't send tensors unencrypted to {target} at {address}; "
            "let every node join with a token, or start all with --insecure if the network is trusted"
        )


def _open_link(workshop: Workshop, active: ActiveRun, target: str, address: str, deadline_s: float) -> None:
    """Open one link; try again until the deadline, because a peer refuses until it has the plan."""
    while True:
        # before it is open, so that who ends the run ends the waiting too
        link = active.links[target] = workshop.connect(active, target, address)
        active.check_wanted()
        try:
            link.open(max(0.1, deadline_s - time.monotonic()))
            return
        except (FrameError, ConnectionFailedError) as error:
            link.close()
            if time.monotonic() + _LINK_RETRY_S > deadline_s:
                _require_trust(active.node, target, address, error)
                raise
            _LOG.debug("link to %s not open yet: %s", target, error)
        active.cancelled.wait(_LINK_RETRY_S)


def _require_trust(node: str, target: str, address: str, error: RingTuneError) -> None:
    """Raise what is wrong with certificates, if that is why a link can't be opened."""
    if is_encrypted() and isinstance(error, ConnectionFailedError):
        why = why_refused(address, node_party(target), time.time())
        if why:
            raise TrustError(f"node {node} can't send to node {target}: {why}") from error
