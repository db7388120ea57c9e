"""Auxiliary models ``linear`` and ``mlp``: adapters beside the matrices that LoRA wraps; and their ``adapter.json``.

A matrix with input x and output h then gives ``h + alpha * g(x)``:

========== ========================================= =====================================
kind       g(x)                                      zero at the start
========== ========================================= =====================================
``linear`` ``x W^T``, W as large as the matrix       W
``mlp``    ``relu(x V^T + b) U^T + c``               U and c, so that g is zero too
========== ========================================= =====================================

The options that choose matrices are those of LoRA. If query, key and value are one matrix, each of the three has a g of
its own. A configuration may have several of these kinds, and methods of the library with them; a matrix has at most one
part (``check_places``).

``adapter.json`` is beside ``adapter.safetensors``, which has the tensors::

    {
      "format": "ringtune-auxiliary",    always
      "version": 2,                      of this layout
      "parts": [{                        one for each auxiliary model of the configuration
        "kind": "mlp",                   or "linear"
        "alpha": 0.5,                    the matrix gives h + alpha * g(x)
        "hidden": 128,                   of an mlp; 0 for linear
        "places": ["query", "value"],    also "key", "intermediate", "output"
        "leave_out": []                  blocks without any
      }],
      "library": null,                   or AdapterHub's adapter_config.json of the library's adapters
      "name": "ringtune",                part of the name of every tensor
      "model_type": "bert",              of the base model
      "model_name": "all-MiniLM-L6-v2"   its folder or id
    }

A tensor's name is the dotted path of the module with the matrix, the adapter's name, and the part of g:
``bert.encoder.layer.0.attention.self.query.ringtune.weight`` of a ``linear``, ``....ringtune.down.weight``,
``down.bias``, ``up.weight`` and ``up.bias`` of an ``mlp``. If query, key and value are one matrix, the place follows
the adapter's name: ``transformer.h.0.attn.c_attn.ringtune.query.weight``.

Tensors of the library's adapters are in the same file under the library's names, and their configuration is in
``adapter.json``, so that the library does not load one half as the whole.

Source: ColA, section 4 and appendix B (low rank, linear and MLP as auxiliary models).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ringtune.errors import IntegrityError, JobError
from ringtune.models.families import FAMILIES
from ringtune.models.family import Shapes, Widths
from ringtune.storage.strict import to_table

LINEAR: Final = "linear"
MLP: Final = "mlp"
AUXILIARY_KINDS: Final = (LINEAR, MLP)

QUERY: Final = "query"
KEY: Final = "key"
VALUE: Final = "value"
INTERMEDIATE: Final = "intermediate"
OUTPUT: Final = "output"
PLACES: Final = (QUERY, KEY, VALUE, INTERMEDIATE, OUTPUT)
"""Matrices of a block that may have an auxiliary model, by their names in ``Widths``."""

LETTERS: Final = {"q": QUERY, "k": KEY, "v": VALUE}
_SHARED_OPTIONS: Final[dict[str, Any]] = {
    "selfattn_lora": True,
    "intermediate_lora": False,
    "output_lora": False,
    "attn_matrices": ["q", "v"],
    "alpha": 1.0,
    "leave_out": [],
}
DEFAULTS: Final[dict[str, dict[str, Any]]] = {LINEAR: _SHARED_OPTIONS, MLP: {**_SHARED_OPTIONS, "hidden": 128}}
"""Kind -> option -> default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuxiliaryConfig:
    """Configuration of one auxiliary model.

    Attributes:
        alpha: factor of g.
        hidden: width between the two matrices of an MLP; 0 = linear.
        places: matrices with a g, in the order of ``PLACES``.
    """

    kind: str
    alpha: float
    hidden: int
    places: tuple[str, ...]
    leave_out: tuple[int, ...] = ()

    @staticmethod
    def of(kind: str, options: Mapping[str, Any]) -> AuxiliaryConfig:
        """Build from checked options of a kind, with defaults filled in."""
        known = {**DEFAULTS[kind], **options}
        return AuxiliaryConfig(
            kind=kind,
            alpha=float(known["alpha"]),
            hidden=int(known.get("hidden", 0)),
            places=places_beside(known),
            leave_out=tuple(known["leave_out"]),
        )

    def shapes(self, widths: Widths) -> Shapes:
        """Shapes of all tensors in one block, by ``place.name``.

        Example: ``mlp[hidden=16]`` at width 64 has ``query.down.weight`` (16, 64), ``query.down.bias`` (16,),
        ``query.up.weight`` (64, 16), ``query.up.bias`` (64,), and the same for ``value``.
        """
        return {
            f"{place}.{name}": shape
            for place in self.places
            for name, shape in self.shapes_beside(*getattr(widths, place)).items()
        }

    def shapes_beside(self, inputs: int, outputs: int) -> Shapes:
        """Shapes of the tensors of a g beside one matrix, by the last part of their names."""
        if self.kind == LINEAR:
            return {"weight": (outputs, inputs)}
        return {
            "down.weight": (self.hidden, inputs),
            "down.bias": (self.hidden,),
            "up.weight": (outputs, self.hidden),
            "up.bias": (outputs,),
        }

    @property
    def hidden_values(self) -> int:
        """Values per token that the MLPs of a block keep for their backward, besides their inputs."""
        return self.hidden * len(self.places)


def in_block(auxiliary: Iterable[AuxiliaryConfig], block: int) -> tuple[AuxiliaryConfig, ...]:
    """Return the auxiliary models that do not leave out a block."""
    return tuple(part for part in auxiliary if block not in part.leave_out)


def check_places(parts: Sequence[tuple[str, Mapping[str, Any]]], blocks: Iterable[int], *, is_merged: bool) -> None:
    """Refuse two parts of a configuration at one matrix if one of them is an auxiliary model; raises ``JobError``.

    Example: ``lora|linear``, both at query and value, is refused;
    ``lora[attn_matrices=['q']]|linear[attn_matrices=['v']]`` is not. ``parts`` are names and options, defaults
    included. If query, key and value are one matrix (``is_merged``), its auxiliary models must have one alpha.
    """
    beside = [(name, options, places_beside(options)) for name, options in parts if "attn_matrices" in options]
    for block in blocks:
        part_at: dict[str, str] = {}
        fused: list[AuxiliaryConfig] = []
        here = [part for part in beside if block not in part[1]["leave_out"]]
        for name, options, places in sorted(here, key=lambda part: part[0] in AUXILIARY_KINDS):
            if name not in AUXILIARY_KINDS:
                part_at |= dict.fromkeys(places, name)
                continue
            for place in places:
                if place in part_at:
                    raise JobError(
                        f"adapter.config gives the matrix {place} of block {block} both {part_at[place]!r} and "
                        f"{name!r}, of which it can have one; choose other attn_matrices for one of them, leave the "
                        "block out of one, or remove one"
                    )
                part_at[place] = name
            if is_merged and set(places) - {INTERMEDIATE, OUTPUT}:
                fused.append(AuxiliaryConfig.of(name, options))
        check_alphas(fused)


def check_alphas(fused: Iterable[AuxiliaryConfig]) -> None:
    """Refuse different alphas of auxiliary models at one matrix for query, key and value; raises ``JobError``."""
    by_alpha = {part.alpha: part for part in fused}
    if len(by_alpha) > 1:
        first, second = list(by_alpha.values())[:2]
        raise JobError(
            f"adapter.config gives {first.kind!r} alpha {first.alpha:g} and {second.kind!r} alpha {second.alpha:g}, "
            "but query, key and value of this model are one matrix with one alpha; set the same for both"
        )


def places_beside(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the matrices that LoRA's options choose."""
    letters = {LETTERS[letter] for letter in options["attn_matrices"]} if options["selfattn_lora"] else set()
    others = {INTERMEDIATE: options["intermediate_lora"], OUTPUT: options["output_lora"]}
    return tuple(place for place in PLACES if place in letters or others.get(place))


FORMAT: Final = "ringtune-auxiliary"
VERSION: Final = 2

_LIBRARY_MODULES: Final = ("adapters", "loras", "refts", "invertible_adapters")
"""Parents of the library's modules. Source: adapters 1.3.0, ``AdapterLoader.filter_func``."""

_OF_WHOLE: Final = ("model_type", "model_name", "name")
"""Keys that are both in ``adapter.json`` and in the library's configuration, and stored once."""


class AdapterDescription(NamedTuple):
    """Content of ``adapter.json``."""

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
    """Build the content of ``adapter.json``; arguments are its values."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "parts": [to_table(part) for part in parts],
        "library": library and {key: value for key, value in library.items() if key not in _OF_WHOLE},
        "name": name,
        "model_type": model_type,
        "model_name": model_name,
    }


def described(content: Mapping[str, Any], *, where: str) -> AdapterDescription:
    """Parse the content of ``adapter.json``; ``where`` is its path, for messages; raises ``IntegrityError``."""
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise IntegrityError(
            f"{where} is not of the format {FORMAT!r}, version {VERSION}; take the folder of a run with adapter.config "
            f"= {' or '.join(AUXILIARY_KINDS)}, and the RingTune that wrote it"
        )
    _check(content, _RULES, where)
    parts, library = content.get("parts"), content.get("library")
    if not isinstance(parts, list) or not parts or not all(isinstance(part, dict) for part in parts):
        raise _odd("parts", parts, where)
    if library is not None and not (isinstance(library, dict) and isinstance(library.get("config"), dict)):
        raise _odd("library", library, where)
    auxiliary = tuple(_part(part, where) for part in parts)
    whole = {key: content[key] for key in _OF_WHOLE if key in content}
    return AdapterDescription(auxiliary, content["name"], content["model_type"], library and {**library, **whole})


def is_of_library(tensor: str, name: str) -> bool:
    """Whether a tensor's name is that of a library adapter with this name."""
    return any(f".{module}.{name}." in tensor for module in _LIBRARY_MODULES)


def own_tensors(parts: Iterable[AuxiliaryConfig], block: int) -> int:
    """Number of tensors of the auxiliary models in a block."""
    return sum(len(part.shapes(Widths.plain(1, 1))) for part in in_block(parts, block))


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
