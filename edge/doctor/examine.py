"""Run all checks of one machine, in the order in which they are shown."""

from __future__ import annotations

import os
from pathlib import Path

from edge.doctor.check import Check, passed
from edge.doctor.machine import (
    check_cores,
    check_device,
    check_disk,
    check_memory,
    check_port,
    check_proxies,
    check_python,
    check_system,
)
from edge.doctor.package_versions import check_packages, check_protobuf, requirements
from ringtune import __version__
from ringtune.errors import UsageError
from ringtune.rpc.addresses import require_private
from ringtune.trust.choosing import refuse_both

_EXTRAS = {"node": ("node",), "coordinator": ()}
_BINDS = {"node": "127.0.0.1:0", "coordinator": "127.0.0.1:7070"}


def examine(
    role: str,
    *,
    model: Path | None,
    coordinator: str,
    bind: str,
    disk: Path,
    insecure: bool,
    trust: Path | None = None,
) -> list[Check]:
    """Check this machine, and on request a model folder and a coordinator.

    Args:
        role: ``node`` or ``coordinator``; a coordinator needs no torch.
        model: a model folder to check; None = none.
        coordinator: ``host:port`` to ask; empty = none.
        bind: ``host:port`` to try; empty = the role's default.
        disk: folder whose disk is looked at.
        insecure: whether ``coordinator`` may be another machine, without encryption.
        trust: folder of this machine's identity; None = where the role or this user has it, if at all.

    Raises:
        UsageError: an option makes no sense.
    """
    if role not in _EXTRAS:
        raise UsageError(f"--role {role!r} is not one of {', '.join(_EXTRAS)}")
    refuse_both(trust, insecure=insecure)
    from edge.doctor.trust import check_own

    checks = [
        passed("ringtune", __version__),
        check_system(),
        check_python(),
        *check_packages(requirements(), _EXTRAS[role]),
        check_protobuf(),
        check_cores(),
        check_memory(),
        *([check_device()] if role == "node" else []),
        check_disk(disk.resolve()),
        check_port(bind or _BINDS[role]),
        check_proxies(os.environ),
        check_own(role, trust, insecure=insecure),
    ]
    if model is not None:
        from edge.doctor.model_folder import check_model

        checks += check_model(model)
    if coordinator:
        checks += _coordinator(coordinator, insecure)
    return checks


def _coordinator(address: str, insecure: bool) -> list[Check]:
    from edge.doctor.remote import check_coordinator
    from edge.doctor.trust import check_other

    require_private(address, option="--coordinator", insecure=insecure)
    return [*check_other(address), *check_coordinator(address)]
