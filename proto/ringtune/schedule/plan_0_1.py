"""Reads plans that ringtune 0.1 wrote: one flat table in place of course and placements.

A run of 0.1 that has ended can be evaluated, exported and predicted. None can be gone on with: its checkpoints name the
digests of 0.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ringtune.errors import PlanError
from ringtune.files.digests import json_digest
from ringtune.files.strict import check_keys, read_dataclass
from ringtune.schedule.course import Course
from ringtune.schedule.methods.version_0_1 import UNFREEZING, method_of_0_1
from ringtune.schedule.placement import Placement
from ringtune.schedule.plan import Plan

_COURSE: Final = (
    "num_blocks",
    "owners",
    "num_steps",
    "local_iterations",
    "batch_size",
    "microbatches",
    "max_length",
    "hidden_size",
    "eval_every",
    "checkpoint_every",
    "wire_dtype",
    "labels",
    "seed",
)
_KEYS: Final = (*_COURSE, *UNFREEZING, "method", "phases", "credits", "private_blocks", "digest")


_LATER: Final = {"unfreeze": "every", "unfreeze_at": [], "patience_steps": 20, "min_improvement": 0.01}
"""What 0.1 left out of the digest at its default, because plans had been written before."""


def is_of_0_1(value: object) -> bool:
    """Whether a table looks like a plan of ringtune 0.1."""
    return isinstance(value, Mapping) and "phases" in value and "schema" not in value


def read_any_plan(value: object) -> Plan:
    """Read a plan of this version, or of 0.1.

    Raises:
        PlanError: a field is missing or unknown, a rule is broken, or the digest differs.
    """
    return _read(value) if is_of_0_1(value) and isinstance(value, Mapping) else Plan.from_json(value)


def _read(value: Mapping[str, Any]) -> Plan:
    check_keys(value, _KEYS, where="", error=PlanError)
    if value.get("digest", _digest(value)) != _digest(value):
        raise PlanError(
            "the digest of this plan of ringtune 0.1 does not match its content; restore the file as it was"
        )
    phases = value["phases"]
    if not isinstance(phases, list) or len(phases) != 1 or not isinstance(phases[0], Mapping):
        raise PlanError("a plan of ringtune 0.1 has exactly one phase; restore the file as it was written")
    private_blocks = value.get("private_blocks", 0)
    placed = {"slices": phases[0].get("slices"), "private_blocks": private_blocks}
    if "credits" in value:
        placed["credits"] = value["credits"]
    placement = read_dataclass(Placement, placed, where="phases[0]", error=PlanError)
    fields = {name: value[name] for name in _COURSE if name in value} | {"frozen_blocks": private_blocks}
    method = method_of_0_1(value).fitted(placement.slices)
    course = read_dataclass(Course, fields, where="", error=PlanError, given={"method": method})
    return Plan.of(course, placement)


def _digest(value: Mapping[str, Any]) -> str:
    fields = {key: item for key, item in value.items() if key != "digest"}
    return json_digest({key: item for key, item in fields.items() if key not in _LATER or item != _LATER[key]})
