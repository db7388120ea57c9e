"""Say what a failed call to a node means: the node's own error, or that the node is lost."""

from __future__ import annotations

import grpc

from ringtune.errors import ConnectionFailedError, DeadlineError, PeerLostError, RingTuneError
from ringtune.ids import naming_node
from ringtune.rpc.statuses import error_of_status


def call_error(error: grpc.RpcError, *, node: str, address: str) -> RingTuneError:
    """Make the error of a call to a node; see ``node_error``."""
    if not isinstance(error, grpc.Call):
        return PeerLostError(f"node {node} at {address}: {error}; start it again")
    return node_error(error.code().name, error.details() or "", node=node, address=address)


def node_error(status: str, details: str, *, node: str, address: str) -> RingTuneError:
    """Make the error of a failed call: the node's own error, or ``PeerLostError`` if no answer came.

    Example: status ``UNAVAILABLE`` without an error's name in its details is a lost node.
    """
    error = error_of_status(status, details, peer=f"node {node} at {address}")
    if type(error) in (ConnectionFailedError, DeadlineError) and not details.startswith("ringtune."):
        return PeerLostError(
            f"node {node} at {address} does not answer ({status}); start it again and repeat or --resume the run"
        )
    return type(error)(naming_node(node, str(error)))
