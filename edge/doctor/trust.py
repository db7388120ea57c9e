"""Check certificates: this machine's, the coordinator's, and whether each takes the other."""

from __future__ import annotations

import time
from pathlib import Path

from edge.agent_options import default_name, default_state
from edge.doctor.check import Check, failed, passed, warned
from ringtune.errors import ConnectionFailedError, TrustError
from ringtune.rpc.joining import certificate_at
from ringtune.rpc.refusals import problem_of_certificate
from ringtune.trust.certificates import facts_of, utc
from ringtune.trust.choosing import speak_from
from ringtune.trust.identity import has_identity
from ringtune.trust.parties import COORDINATOR
from ringtune.trust.places import coordinator_trust, found_user_trust, node_trust
from ringtune.trust.speaking import speak_as, speaker

_NAME, _ITS_NAME = "certificate", "its certificate"
_REMEDY = "join with a new token of the coordinator, or correct --trust"


def check_own(role: str, trust: Path | None, *, insecure: bool) -> Check:
    """Check the identity of this machine, and speak with it from now on.

    Args:
        role: ``node`` or ``coordinator``.
        trust: its folder; None = where the role or this user has it, if at all.
        insecure: whether the user wants plain text.
    """
    speak_as(None)
    try:
        folder = None if insecure else trust or _found(role)
        if folder is None:
            return passed(_NAME, "none: plain text, on this machine or with --insecure")
        facts = speak_from(folder).identity.facts
    except TrustError as error:
        return failed(_NAME, str(error), _REMEDY)
    found = f"{facts.party}, until {utc(facts.ends_unix_s)}"
    if time.time() > facts.renew_at_unix_s:
        late = f"it should have been renewed on {utc(facts.renew_at_unix_s)}"
        return warned(_NAME, f"{found}; {late}", "let the node run, or a command, while the coordinator runs")
    return passed(_NAME, found)


def _found(role: str) -> Path | None:
    """Find the folder of the identity that this machine would use for its role."""
    own = coordinator_trust() if role == "coordinator" else node_trust(default_state(default_name()))
    return own if has_identity(own) else found_user_trust()


def check_other(address: str) -> list[Check]:
    """Check the certificate that a coordinator shows: chain, dates and name; nothing in plain text."""
    who = speaker()
    if who is None:
        return []
    try:
        pem = certificate_at(address)
    except ConnectionFailedError as error:
        return [failed(_ITS_NAME, str(error), "correct address and trust folders")]
    problem = problem_of_certificate(pem, address, COORDINATOR, who, time.time())
    if problem:
        return [failed(_ITS_NAME, problem, "set the clocks, or " + _REMEDY)]
    return [passed(_ITS_NAME, f"of the same authority, until {utc(facts_of(pem).ends_unix_s)}")]
