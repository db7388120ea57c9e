"""``adapter.json``: what auxiliary models are, beside ``adapter.safetensors`` with their tensors.

::

    {
      "format": "ringtune-auxiliary",    always
      "version": 1,                      of this layout
      "kind": "mlp",                     or "linear"
      "alpha": 0.5,                      the matrix gives h + alpha * g(x)
      "hidden": 128,                     of an mlp; 0 for linear
      "places": ["query", "value"],      also "key", "intermediate", "output"
      "leave_out": [],                   blocks without any
      "name": "ringtune",                part of the name of every tensor
      "model_type": "bert",              of the base model
      "model_name": "all-MiniLM-L6-v2"   its folder or id
    }

A tensor's name is the dotted path of the module with the matrix, the adapter's name, and the part of g:
``bert.encoder.layer.0.attention.self.query.ringtune.weight`` of a ``linear``, ``....ringtune.down.weight``,
``down.bias``, ``up.weight`` and ``up.bias`` of an ``mlp``. Where query, key and value are one matrix, the place follows
the adapter's name: ``transformer.h.0.attn.c_attn.ringtune.query.weight``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from ringtune.errors import IntegrityError
from ringtune.models.auxiliary_config import AUXILIARY_KINDS, MLP, PLACES, AuxiliaryConfig
from ringtune.models.families import FAMILIES

FORMAT: Final = "ringtune-auxiliary"
VERSION: Final = 1


class Described(NamedTuple):
    """What ``adapter.json`` says.

    Attributes:
        config: which kind, and where.
        name: of the adapter.
        model_type: of the base model.
    """

    config: AuxiliaryConfig
    name: str
    model_type: str


def describe(config: AuxiliaryConfig, *, name: str, model_type: str, model_name: str) -> dict[str, Any]:
    """Return the content of ``adapter.json``; arguments are its values."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "kind": config.kind,
        "alpha": config.alpha,
        "hidden": config.hidden,
        "places": list(config.places),
        "leave_out": list(config.leave_out),
        "name": name,
        "model_type": model_type,
        "model_name": model_name,
    }


def described(content: Mapping[str, Any], *, where: str) -> Described:
    """Read the content of ``adapter.json``.

    Args:
        content: of the file.
        where: the file, for messages.

    Raises:
        IntegrityError: it is something else, of a later version, or a value is of a wrong kind.
    """
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise IntegrityError(
            f"{where} is not of the format {FORMAT!r}, version {VERSION}; take the folder of a run with adapter.config "
            f"= {' or '.join(AUXILIARY_KINDS)}, and the RingTune that wrote it"
        )
    problem = next((key for key, holds in _RULES.items() if not holds(content.get(key))), "")
    if not problem and (content["kind"] == MLP) != (content["hidden"] > 0):
        problem = "hidden"
    if problem:
        raise IntegrityError(f"{where}: {problem} is {content.get(problem)!r}; copy the run's folder again")
    config = AuxiliaryConfig(
        kind=content["kind"],
        alpha=float(content["alpha"]),
        hidden=content["hidden"],
        places=tuple(content["places"]),
        leave_out=tuple(content["leave_out"]),
    )
    return Described(config, content["name"], content["model_type"])


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


_RULES: Final[Mapping[str, Callable[[Any], bool]]] = {
    "kind": lambda value: value in AUXILIARY_KINDS,
    "alpha": lambda value: type(value) in (int, float) and 0 < value < float("inf"),
    "hidden": _is_count,
    "places": lambda value: isinstance(value, list) and bool(value) and all(place in PLACES for place in value),
    "leave_out": lambda value: isinstance(value, list) and all(map(_is_count, value)),
    "name": lambda value: isinstance(value, str) and value.isidentifier(),
    "model_type": lambda value: value in FAMILIES,
}
