"""Matrices of a model folder that bitsandbytes has saved in 4 bits: their tensors, and what is refused.

Such a matrix is a tensor of bytes under its own name, and tensors beside it, for example those of ``q.weight``::

    q.weight                                  U8   bytes of two numbers each
    q.weight.absmax                           U8   scales of blocks of 64 numbers; F32 without double quantisation
    q.weight.quant_map                        F32  the 16 values of the codes
    q.weight.nested_absmax                    F32  scales of groups of 256 scales, with double quantisation
    q.weight.nested_quant_map                 F32  the 256 levels of scales, with double quantisation
    q.weight.quant_state.bitsandbytes__nf4    U8   JSON: type, sizes of blocks and groups, shape, mean of the scales

Everything is checked by sizes before a number is read.

Source: bitsandbytes 0.50.2, ``QuantState.as_dict``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from ringtune.errors import ModelError
from ringtune.schedule.course import NF4
from ringtune.storage.tensor_files import TensorInfo

FP4: Final = "fp4"
BLOCK: Final = 64
"""Numbers with one scale."""
GROUP: Final = 256
"""Scales that are rounded together."""

_STATE: Final = re.compile(r"(?P<name>.+)\.quant_state\.bitsandbytes__(?P<kind>.+)")
_MAX_STATE_BYTES: Final = 4096
_MAX_SIDE: Final = 1 << 31


class FourBitTensor(NamedTuple):
    """A 4-bit matrix in the files.

    Attributes:
        kind: ``nf4`` or ``fp4``.
        parts: place of each tensor by the end of its name: ``absmax``, ``quant_map``, ``nested_absmax`` and
            ``nested_quant_map``, the last two with double quantisation.
        offset: mean of the scales; 0 without double quantisation.
    """

    kind: str
    shape: tuple[int, int]
    parts: Mapping[str, tuple[Path, TensorInfo]]
    offset: float

    @property
    def is_double(self) -> bool:
        """Whether the scales are in 8 bits."""
        return "nested_absmax" in self.parts

    @property
    def ends(self) -> set[str]:
        """Ends of the names of the tensors beside the matrix."""
        return {*self.parts, f"quant_state.bitsandbytes__{self.kind}"}

    @property
    def more_bytes(self) -> int:
        """Bytes of the scales above those of double quantisation."""
        blocks = -(-self.shape[0] * self.shape[1] // BLOCK)
        return 0 if self.is_double else 4 * blocks - blocks - 4 * -(-blocks // GROUP)


def check_quantization(settings: Any, *, where: str, inputs_first: bool) -> None:
    """Refuse a ``quantization_config`` other than that of 4-bit matrices of bitsandbytes; raises ``ModelError``."""
    remedy = "give the plain weights, or 4 bits of bitsandbytes (load_in_4bit)"
    values = settings if isinstance(settings, dict) else {}
    method = values.get("quant_method", "bitsandbytes" if "load_in_4bit" in values else "of no known kind")
    if values.get("load_in_8bit") is True or method != "bitsandbytes" or values.get("load_in_4bit") is not True:
        name = f"{method} in 8 bits" if values.get("load_in_8bit") is True else str(method)[:40]
        raise ModelError(f"{where}: quantization_config is refused: it names a quantizer to load ({name}); {remedy}")
    if inputs_first:
        raise ModelError(
            f"{where}: quantization_config is refused: 4-bit matrices of this family are saved transposed; give the "
            "plain weights"
        )


def four_bit_tensors(headers: Mapping[str, tuple[Path, TensorInfo]]) -> dict[str, FourBitTensor]:
    """Find the 4-bit matrices of a folder, by name; raises ``ModelError``."""
    matches = filter(None, map(_STATE.fullmatch, headers))
    return {match["name"]: _matrix(match["name"], match["kind"], headers) for match in matches}


def _matrix(name: str, kind: str, headers: Mapping[str, tuple[Path, TensorInfo]]) -> FourBitTensor:
    path, info = headers[f"{name}.quant_state.bitsandbytes__{kind}"]
    if kind not in (NF4, FP4):
        raise _refused(path, name, f"is of type {kind[:40]!r}, known are {NF4} and {FP4}")
    state = _state(path, info, name)
    is_double = f"{name}.nested_absmax" in headers
    known: dict[str, object] = {"quant_type": kind, "blocksize": BLOCK}
    known |= {"nested_blocksize": GROUP, "nested_dtype": "float32"} if is_double else {}
    for key, value in known.items():
        if state.get(key) != value:
            raise _refused(path, name, f"has {key} {str(state.get(key))[:40]!r}, supported is {value!r}")
    shape, offset = state.get("shape"), state.get("nested_offset", 0.0) if is_double else 0.0
    if not isinstance(shape, list) or len(shape) != 2 or not all(_is_size(side) for side in shape):
        raise _refused(path, name, f"has shape {str(shape)[:40]}, which is not that of a matrix")
    if type(offset) not in (int, float) or not abs(offset) < math.inf:
        raise _refused(path, name, f"has nested_offset {str(offset)[:40]!r}, which is no finite number")
    blocks = -(-shape[0] * shape[1] // BLOCK)
    sizes = {"": ("U8", -(-shape[0] * shape[1] // 2)), "quant_map": ("F32", 16)}
    sizes["absmax"] = ("U8" if is_double else "F32", blocks)
    if is_double:
        sizes |= {"nested_absmax": ("F32", -(-blocks // GROUP)), "nested_quant_map": ("F32", 256)}
    parts = {}
    for end, (dtype, count) in sizes.items():
        part = f"{name}.{end}" if end else name
        if part not in headers:
            raise _refused(path, name, f"lacks {part}")
        parts[end] = headers[part]
        stored = parts[end][1]
        if (stored.dtype, math.prod(stored.shape)) != (dtype, count):
            raise _refused(
                path,
                name,
                f"has {math.prod(stored.shape):,} {stored.dtype} in {part}, its shape means {count:,} {dtype}",
            )
    del parts[""]
    return FourBitTensor(kind, (shape[0], shape[1]), parts, float(offset))


def _state(path: Path, info: TensorInfo, name: str) -> dict[str, Any]:
    if info.dtype != "U8" or info.nbytes > _MAX_STATE_BYTES:
        raise _refused(path, name, f"has a description of {info.nbytes:,} bytes of type {info.dtype}")
    try:
        with path.open("rb") as file:
            file.seek(info.offset)
            values = json.loads(file.read(info.nbytes))
    except OSError as error:
        raise ModelError(f"can't read {path}: {error.strerror}; fetch the model again") from error
    except (ValueError, RecursionError) as error:
        raise _refused(path, name, "has a description that is not JSON") from error
    if not isinstance(values, dict):
        raise _refused(path, name, "has a description that is no table")
    return values


def _is_size(value: object) -> bool:
    return type(value) is int and 1 <= value < _MAX_SIDE


def _refused(path: Path, name: str, what: str) -> ModelError:
    return ModelError(f"{path}: 4-bit tensor {name} {what}; fetch the model again, or give the plain weights")
