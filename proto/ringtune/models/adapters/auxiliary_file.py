"""``adapter.json``: what auxiliary models are, beside ``adapter.safetensors`` with their tensors.

::

    {
      "format": "ringtune-auxiliary",    always
      "version": 2,                      of this layout
      "parts": [{                        one for each kind that stands somewhere
        "kind": "mlp",                   or "linear"
        "alpha": 0.5,                    the matrix gives h + alpha * g(x)
        "hidden": 128,                   of an mlp; 0 for linear
        "places": ["query", "value"],    also "key", "intermediate", "output"
        "leave_out": []                  blocks without any
      }],
      "library": null,                   or what AdapterHub's adapter_config.json says of the adapters beside them
      "name": "ringtune",                part of the name of every tensor
      "model_type": "bert",              of the base model
      "model_name": "all-MiniLM-L6-v2"   its folder or id
    }

A tensor's name is the dotted path of the module with the matrix, the adapter's name, and the part of g:
``bert.encoder.layer.0.attention.self.query.ringtune.weight`` of a ``linear``, ``....ringtune.down.weight``,
``down.bias``, ``up.weight`` and ``up.bias`` of an ``mlp``. Where query, key and value are one matrix, the place follows
the adapter's name: ``transformer.h.0.attn.c_attn.ringtune.query.weight``.

Adapters of the library beside auxiliary models have their tensors in the same file, under the library's names, and
their configuration in this one: neither half is a folder that the library would load as if it were the whole.

In version 1 what is in ``parts`` stood beside ``format``, for one kind, and there was no ``library``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from ringtune.errors import IntegrityError
from ringtune.models.adapters.auxiliary_config import AUXILIARY_KINDS, MLP, PLACES, AuxiliaryConfig, in_block
from ringtune.models.families import FAMILIES
from ringtune.models.family import Widths

FORMAT: Final = "ringtune-auxiliary"
VERSION: Final = 2
_ONE_KIND: Final = 1

_LIBRARY_MODULES: Final = ("adapters", "loras", "refts")
"""The parents of the library's modules. Source: adapters 1.3.0, ``AdapterLoader.filter_func``."""

_OF_WHOLE: Final = ("model_type", "model_name", "name")
"""What the library's configuration repeats of the file that it is in."""


class Described(NamedTuple):
    """What ``adapter.json`` says.

    Attributes:
        parts: which kinds, and where.
        name: of the adapter.
        model_type: of the base model.
        library: the library's configuration of the adapters beside these; None without any.
    """

    parts: tuple[AuxiliaryConfig, ...]
    name: str
    model_type: str
    library: dict[str, Any] | None = None


def describe(
    parts: Iterable[AuxiliaryConfig],
    *,
    name: str,
    model_type: str,
    model_name: str,
    library: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the content of ``adapter.json``; arguments are its values."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "parts": [
            {
                "kind": one.kind,
                "alpha": one.alpha,
                "hidden": one.hidden,
                "places": list(one.places),
                "leave_out": list(one.leave_out),
            }
            for one in parts
        ],
        "library": library and {key: value for key, value in library.items() if key not in _OF_WHOLE},
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
    version = content.get("version")
    if content.get("format") != FORMAT or version not in (_ONE_KIND, VERSION):
        raise IntegrityError(
            f"{where} is not of the format {FORMAT!r}, version {VERSION}; take the folder of a run with adapter.config "
            f"= {' or '.join(AUXILIARY_KINDS)}, and the RingTune that wrote it"
        )
    _check(content, _RULES, where)
    if version == _ONE_KIND:
        return Described((_part(content, where),), content["name"], content["model_type"])
    parts, library = content.get("parts"), content.get("library")
    if not isinstance(parts, list) or not parts or not all(isinstance(part, dict) for part in parts):
        raise _odd("parts", parts, where)
    if library is not None and not (isinstance(library, dict) and isinstance(library.get("config"), dict)):
        raise _odd("library", library, where)
    found = tuple(_part(part, where) for part in parts)
    whole = {key: content[key] for key in _OF_WHOLE if key in content}
    return Described(found, content["name"], content["model_type"], library and {**library, **whole})


def is_of_library(tensor: str, name: str) -> bool:
    """Whether a tensor, by its name, belongs to an adapter of the library with this name."""
    return any(f".{module}.{name}." in tensor for module in _LIBRARY_MODULES)


def own_tensors(parts: Iterable[AuxiliaryConfig], block: int) -> int:
    """How many tensors the auxiliary models of a block have together."""
    return sum(len(one.shapes(Widths.plain(1, 1))) for one in in_block(parts, block))


def _part(content: Mapping[str, Any], where: str) -> AuxiliaryConfig:
    _check(content, _PART_RULES, where)
    if (content["kind"] == MLP) != (content["hidden"] > 0):
        raise _odd("hidden", content["hidden"], where)
    return AuxiliaryConfig(
        kind=content["kind"],
        alpha=float(content["alpha"]),
        hidden=content["hidden"],
        places=tuple(content["places"]),
        leave_out=tuple(content["leave_out"]),
    )


def _check(content: Mapping[str, Any], rules: Mapping[str, Callable[[Any], bool]], where: str) -> None:
    for key, holds in rules.items():
        if not holds(content.get(key)):
            raise _odd(key, content.get(key), where)


def _odd(key: str, value: Any, where: str) -> IntegrityError:
    return IntegrityError(f"{where}: {key} is {value!r}; copy the run's folder again")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


_PART_RULES: Final[Mapping[str, Callable[[Any], bool]]] = {
    "kind": lambda value: value in AUXILIARY_KINDS,
    "alpha": lambda value: type(value) in (int, float) and 0 < value < float("inf"),
    "hidden": _is_count,
    "places": lambda value: isinstance(value, list) and bool(value) and all(place in PLACES for place in value),
    "leave_out": lambda value: isinstance(value, list) and all(map(_is_count, value)),
}
_RULES: Final[Mapping[str, Callable[[Any], bool]]] = {
    "name": lambda value: isinstance(value, str) and value.isidentifier(),
    "model_type": lambda value: isinstance(value, str) and value in FAMILIES,
}
