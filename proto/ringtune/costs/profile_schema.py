"""Which forms of a profile can be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ringtune.errors import PlanError

SCHEMA: Final = 3
TOKENS_SCHEMA: Final = 2
"""The schema before: activations were counted per micro-batch of the measured shape."""


def schema_of(value: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return the schema of a table and its other fields.

    Raises:
        PlanError: the schema is none that can be read.
    """
    if not isinstance(value, Mapping):
        raise PlanError("a profile has to be a table; measure anew with 'ringtune measure'")
    schema = value.get("schema")
    if schema not in (TOKENS_SCHEMA, SCHEMA):
        raise PlanError(f"profile schema {schema!r} is not {SCHEMA}; measure anew with 'ringtune measure'")
    return schema, {key: item for key, item in value.items() if key != "schema"}
