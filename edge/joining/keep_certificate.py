"""Keep the certificate of a node young while its agent runs, and refuse those whose certificates were removed."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path

import grpc

from ringtune.trust.speaking import speaker

_LOOK_S = 600.0


def keep_certificate(channel: grpc.Channel, folder: Path | None) -> None:
    """Renew the certificate of this process at two thirds of its life, in the background.

    Args:
        channel: to the coordinator.
        folder: where the identity is kept; None = there is none.
    """
    if folder is None or speaker() is None:
        return
    threading.Thread(target=_keep, args=(channel, folder), name="keep-certificate", daemon=True).start()


def _keep(channel: grpc.Channel, folder: Path) -> None:
    from ringtune.rpc.joining import renew_if_due
    from ringtune.v1 import trust_pb2_grpc

    stub = trust_pb2_grpc.MembershipStub(channel)
    while (who := speaker()) is not None:
        renew_if_due(stub, who, folder, time.time())
        time.sleep(_LOOK_S)


def refuse_removed(removed: Mapping[str, str]) -> None:
    """Refuse the bearers of these certificates from now on, serial -> reason."""
    who = speaker()
    if who is not None:
        who.removed = dict(removed)
