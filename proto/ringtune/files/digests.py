"""Digests of values: two parties that hold equal values get equal digests."""

from __future__ import annotations

import hashlib
import json


def json_digest(value: object) -> str:
    """SHA-256, in hex, of a value's JSON form with sorted keys and without spaces."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
