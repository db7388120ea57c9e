"""Adapters of AdapterHub's library in a base model of transformers, by its plug-in interface where it has no class."""

from __future__ import annotations

from typing import Any

from ringtune.models.decoders import interface_of
from ringtune.models.family import Family


def plug_in(model: Any, family: Family) -> None:
    """Prepare a model of transformers for adapters, by its family's interface if it has one."""
    import adapters

    adapters.init(model, interface=adapter_interface(family) if family.plugged else None)


def adapter_interface(family: Family) -> Any:
    """Make AdapterHub's interface of a plugged-in family."""
    from adapters import AdapterModelInterface

    return AdapterModelInterface(**interface_of(family))
