"""The method of a plan that ringtune 0.1 wrote, whose settings lay flat in the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ringtune.errors import PlanError
from ringtune.files.strict import read_dataclass
from ringtune.schedule.methods.base import Method, method_class
from ringtune.schedule.methods.patience import Patience
from ringtune.schedule.methods.ringada import RingAda

UNFREEZING: Final = ("every_steps", "unfreeze", "unfreeze_at", "patience_steps", "min_improvement")
"""The fields that only RingAda has a use for; every plan of 0.1 has them."""


def method_of_0_1(value: Mapping[str, Any]) -> Method:
    """Read the method from the table of a plan.

    Raises:
        PlanError: an unknown method, or a setting breaks a rule.
    """
    found = method_class(str(value.get("method")), where="method")
    if found is not RingAda:
        return found.from_settings(None)
    form = value.get("unfreeze", "every")
    if form == "auto":
        settings = {name: value[name] for name in ("patience_steps", "min_improvement") if name in value}
        return RingAda(every_steps=0, auto=read_dataclass(Patience, settings, where="", error=PlanError))
    if form == "at":
        settings = {"every_steps": 0, "at": value.get("unfreeze_at", [])}
    else:
        settings = {"every_steps": value.get("every_steps")}
    return read_dataclass(RingAda, settings, where="", error=PlanError)
