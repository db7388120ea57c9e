"""Tensors as bytes: read or filled a piece at a time, digested, and checked to be finite.

Frozen tensors that are used as they are in the file are views of it, mapped: the kernel may drop their pages and read
them again, and all processes of a machine share them. The mapping is private to a process: a write would never reach
the file. Other tensors are read a piece at a time, because a mapped file would be resident beside its copy: half as
much again where bfloat16 becomes float32.

A matrix that is multiplied is mapped only where it begins at a multiple of ``ALIGNMENT``, as tensors of torch do:
products of one row add up in another order elsewhere (MKL with AVX-512, float32, not at a multiple of 16).

A sum of finite numbers may overflow, but a sum with NaN or infinity is never finite. So one sum per tensor nearly
always suffices, and single numbers are checked only where the sum is not finite.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
import mmap
import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import torch

from edge.model.four_bit import CODEBOOKS, FourBit, WideningBuffer
from edge.model.gguf_blocks import GgufBlocks, in_order
from edge.transport.tensors import bytes_of
from ringtune.engine.failure_texts import LOWER_THE_RATE
from ringtune.errors import DivergedError, IntegrityError, ModelError
from ringtune.models.family import Family
from ringtune.models.folder import StoredTensor, base_name, read_headers
from ringtune.models.four_bit import BLOCK
from ringtune.quantities import format_bytes
from ringtune.storage.gguf import GgufType
from ringtune.storage.pieces import PIECE_BYTES, Pieces
from ringtune.storage.tensor_files import ALIGNMENT, TensorPieces

_TOLD_BYTES: Final = 64 << 20


class SafetensorsFiles:
    """Tensors of a model folder, by name; a context manager.

    Raises:
        ModelError: the folder has no safetensors file, or its index is not readable.
        IntegrityError: a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stored = read_headers(folder)
        self._name_of: dict[str, str] = {}
        self._piece: torch.Tensor | None = None
        self._copied: dict[Path, int] = {}

    def __enter__(self) -> SafetensorsFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._piece = None

    def find(self, name: str, family: Family) -> str | None:
        """Return the name in the files of a tensor of the base model or a decoder, see ``base_name``; None without."""
        if not self._name_of:
            self._name_of = {base_name(stored, family): stored for stored in self._stored}
        return self._name_of.get(base_name(name, family))

    def read(
        self, name: str, dtype: torch.dtype | None = None, *, private: bool = False, whole: bool = False
    ) -> torch.Tensor:
        """Read one tensor, on the CPU.

        Args:
            name: in the files.
            dtype: to convert to, except from integers; None = the file's.
            private: copied into memory. Otherwise the tensor may be the mapped file, of which only used pages become
                resident.
            whole: all numbers are used. Otherwise a mapped matrix is not checked, because it would become resident.

        Raises:
            ModelError: the file is missing, has an unsupported dtype, or numbers that are not finite.
            IntegrityError: the file is damaged.
        """
        stored = self._stored[name]
        if stored.is_coded:
            return self._read_converted(name, torch.float32 if dtype is None else dtype)
        kind = _kind_of(name, stored)
        target = dtype if dtype is not None and kind.is_floating_point else kind
        is_mapped = target is kind and not private
        if is_mapped:
            tensor = _mapped(stored).view(kind).view(stored.shape)
        else:
            tensor = _read_in_place(stored, kind) if target is kind else self._read_converted(name, target)
        is_checked = whole or not is_mapped or tensor.dim() <= 1
        if is_checked and target.is_floating_point and first_not_finite({name: tensor}):
            as_text = str(target).removeprefix("torch.")
            raise ModelError(
                f"{stored.path}: tensor {name} has numbers that are not finite in {as_text}: the model is damaged, or "
                "was saved in the midst of a training that diverged; fetch it again or give another one"
            )
        return tensor

    def read_frozen(
        self,
        name: str,
        dtype: torch.dtype,
        *,
        whole: bool = False,
        alignment: int = ALIGNMENT,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        """Read one tensor that never trains; arguments and errors as of ``read``.

        With ``whole`` it is mapped only if it begins at a multiple of ``alignment`` bytes. ``device``: None = the CPU.
        """
        stored, is_matrix = self._stored[name], len(self.shape(name)) > 1
        can_map = is_matrix and stored.info.offset % alignment == 0
        if whole and is_matrix and not can_map and TORCH_DTYPES.get(stored.info.dtype) is dtype:
            self._copied[stored.path] = self._copied.get(stored.path, 0) + stored.info.nbytes
        tensor = self.read(name, dtype, private=whole and not can_map, whole=whole)
        return tensor if device is None else tensor.to(device)

    def copied_text(self) -> str:
        """Say which files have frozen matrices that were copied for their place alone; empty below 64 MiB."""
        total, names = sum(self._copied.values()), sorted(path.name for path in self._copied)
        if total < _TOLD_BYTES:
            return ""
        return (
            f"{format_bytes(total)} of frozen weights are copied into memory, not mapped from {', '.join(names)} "
            f"(not at multiples of {ALIGNMENT} bytes); to map them, make a copy of each file, and put it in "
            "its place: python -m ringtune.storage.tensor_files FILE COPY"
        )

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in the files."""
        return self._stored[name].shape

    def row_pieces(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Read a matrix some rows at a time into one buffer.

        Yields:
            Index of the first row, and the rows in the stored dtype.

        Raises:
            ModelError, IntegrityError: see ``read``.
        """
        columns = self.shape(name)[1]
        for start, part in self.number_pieces(name, multiple=columns):
            yield start // columns, part.view(-1, columns)

    def number_pieces(self, name: str, *, multiple: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield index of the first number and numbers, in the stored dtype, of a tensor, in one buffer.

        Each time a multiple of ``multiple`` numbers but for the last; errors as of ``read``.
        """
        stored = self._stored[name]
        if not stored.is_coded:
            yield from _pieces(stored, self._piece_of(_kind_of(name, stored), multiple))
            return
        held: FourBit | GgufBlocks = self.read_gguf(name) if stored.four_bit is None else self.read_four_bit(name)
        (rows, columns), room = held.shape, WideningBuffer()
        step = math.lcm(multiple, columns) // columns
        each = max(1, PIECE_BYTES // (step * columns * 4)) * step
        for start in range(0, rows, each):
            yield start * columns, held.widen(slice(start, start + each), torch.float32, room).reshape(-1)

    def read_gguf(self, name: str, *, whole: bool = True) -> GgufBlocks:
        """Map a tensor of a GGUF file, with its rows in the order of transformers; a vector is a row.

        Only rows that llama.cpp has in another order are copied. With ``whole``, scales or numbers that are not finite
        are refused. Raises ``ModelError`` or ``IntegrityError``.
        """
        stored = self._stored[name]
        kind = GgufType.of(stored.info.dtype)
        if kind is None:
            raise ModelError(
                f"{stored.path}: tensor {name} is not that of a GGUF file; set runtime.frozen to another type than gguf"
            )
        rows, flat = math.prod(stored.shape[:-1]), _mapped(stored)
        if kind.heads:
            ordered = rows if rows > 1 else stored.shape[0]
            flat = flat.view(ordered, -1)[in_order(kind.heads, ordered)]
        width = stored.shape[-1]
        blocks = GgufBlocks(
            kind=kind.name,
            packed=flat.view(rows, -1),
            width=width,
            rows=(0, rows),
            columns=(0, width),
            is_added=kind.is_added,
        )
        if whole and not blocks.is_finite():
            raise ModelError(
                f"{stored.path}: tensor {name} has numbers that are not finite: the model is damaged; fetch it again"
            )
        return blocks

    def is_four_bit(self, name: str) -> bool:
        """Whether the files have a matrix in 4 bits."""
        return self._stored[name].four_bit is not None

    def read_four_bit(self, name: str) -> FourBit:
        """Read a matrix that the files have in 4 bits, as it is; raises ``ModelError`` or ``IntegrityError``."""
        stored = self._stored[name]
        if stored.four_bit is None:
            raise ValueError(f"{name} is no matrix in 4 bits")
        parts = {
            end: _read_in_place(part := StoredTensor(*place), torch_dtype(part.info.dtype)).flatten()
            for end, place in stored.four_bit.parts.items()
        }
        codebook = torch.tensor(CODEBOOKS[stored.four_bit.kind])
        problem = "" if torch.allclose(parts["quant_map"], codebook, atol=1e-4) else "another codebook than its type"
        if first_not_finite({end: part for end, part in parts.items() if part.is_floating_point()}):
            problem = "scales that are not finite"
        if problem:
            raise ModelError(f"{stored.path}: 4-bit tensor {name} has {problem}; fetch the model again")
        rows, columns = stored.four_bit.shape
        packed = _mapped(stored)
        if missing := len(parts["absmax"]) * BLOCK // 2 - len(packed):  # of the last block
            packed = torch.nn.functional.pad(packed, (0, missing))
        return FourBit(
            kind=stored.four_bit.kind,
            packed=packed,
            scales=parts["absmax"],
            groups=parts.get("nested_absmax"),
            levels=parts.get("nested_quant_map", torch.empty(0)),
            offset=stored.four_bit.offset,
            width=columns,
            rows=(0, rows),
            columns=(0, columns),
        )

    def _read_converted(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Read a tensor into memory of its own in another type, a piece at a time."""
        result = torch.empty(self.shape(name), dtype=dtype)
        for start, piece in self.number_pieces(name, multiple=1):
            result.view(-1)[start : start + len(piece)].copy_(piece)
        return result

    def _piece_of(self, dtype: torch.dtype, multiple: int) -> torch.Tensor:
        """Return the buffer for a piece, always the same, so that the heap has no gaps between the tensors."""
        count = max(1, PIECE_BYTES // (multiple * dtype.itemsize)) * multiple
        if self._piece is None or self._piece.numel() < count * dtype.itemsize:
            self._piece = torch.empty(max(PIECE_BYTES, count * dtype.itemsize), dtype=torch.uint8)
        return self._piece[: count * dtype.itemsize].view(dtype)


def _kind_of(name: str, stored: StoredTensor) -> torch.dtype:
    kind = TORCH_DTYPES.get(stored.info.dtype)
    if kind is None:
        raise ModelError(f"{stored.path}: tensor {name} has numbers of type {stored.info.dtype}; convert the model")
    return kind


_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype, _LIBC.munmap.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_REFUSED: Final = ctypes.c_void_p(-1).value


def _mapped(stored: StoredTensor) -> torch.Tensor:
    """Map the bytes of a tensor; the mapping ends with the last view of it.

    Python's ``mmap`` keeps a file open for each tensor; torch maps the whole file, which Linux refuses where it is
    larger than the memory.
    """
    size, start = stored.info.nbytes, stored.info.offset // mmap.PAGESIZE * mmap.PAGESIZE
    before = stored.info.offset - start
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    with _reading(stored.path), stored.path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < stored.info.offset + size:
            raise _ends_too_soon(stored.path)
        allowed = mmap.PROT_READ | mmap.PROT_WRITE
        address = _LIBC.mmap(None, before + size, allowed, mmap.MAP_PRIVATE, file.fileno(), start)
        if address == _REFUSED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    pages = (ctypes.c_uint8 * (before + size)).from_address(address)
    weakref.finalize(pages, _LIBC.munmap, address, before + size).atexit = False
    return torch.frombuffer(pages, dtype=torch.uint8, count=size, offset=before)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing; fetch the model again") from error
    except OSError as error:
        raise IntegrityError(f"{path} is damaged ({error}); fetch the model again") from error


def _ends_too_soon(path: Path) -> IntegrityError:
    return IntegrityError(f"{path} is damaged (it ends too soon); fetch the model again")


def _read_in_place(stored: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
    result = torch.empty(stored.info.shape, dtype=dtype)
    for _ in _pieces(stored, result.view(-1), in_place=True):
        pass
    return result


def _pieces(
    stored: StoredTensor, buffer: torch.Tensor, *, in_place: bool = False
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the number of values before each piece, and the piece, of a tensor in order.

    The buffer is flat, of the stored dtype; it takes all pieces one after the other (``in_place``), or each in turn.
    """
    count = buffer.numel() if in_place else math.prod(stored.info.shape)
    each = min(count, PIECE_BYTES // buffer.element_size()) if in_place else buffer.numel()
    with _reading(stored.path):
        file = stored.path.open("rb", buffering=0)
    with file:
        file.seek(stored.info.offset)
        for start in range(0, count, max(1, each)):
            num = min(each, count - start)
            part = buffer[start : start + num] if in_place else buffer[:num]
            with _reading(stored.path):
                size = file.readinto(part.view(torch.uint8).numpy().data)
            if size != part.nbytes:
                raise _ends_too_soon(stored.path)
            yield start, part


TORCH_DTYPES: Final = {
    "F32": torch.float32,
    "F64": torch.float64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES: Final = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for a dtype of a safetensors file, such as ``F32``; raises ``IntegrityError``."""
    if name not in TORCH_DTYPES:
        raise IntegrityError(f"a tensor has the type {name}, which is not supported; save it as float32 or bfloat16")
    return TORCH_DTYPES[name]


def pieces_of(tensor: torch.Tensor) -> TensorPieces:
    """Return a tensor's dtype, shape and bytes, read when iterated: the tensor must not change before.

    A tensor on another device is copied a piece at a time, one that is not contiguous as a whole.
    """
    held = tensor.detach()

    def make() -> Iterator[memoryview]:
        flat = held.reshape(-1)
        step = PIECE_BYTES // flat.element_size()
        if 0 < flat.numel() <= step and flat.device.type == "cpu":  # most of an adapter's: without two more calls
            yield bytes_of(flat)
            return
        for start in range(0, flat.numel(), step):
            yield bytes_of(flat[start : start + step].cpu())

    return TensorPieces(DTYPE_NAMES[held.dtype], tuple(held.shape), Pieces(held.numel() * held.element_size(), make))


def fill(target: torch.Tensor, source: TensorPieces) -> None:
    """Replace the values of a tensor by ``source`` in its dtype, a piece at a time; raises ``IntegrityError``."""
    num_came = source.data.size_bytes / torch_dtype(source.dtype).itemsize
    if num_came != target.numel():
        raise IntegrityError(f"a tensor of {target.numel():,} numbers came with {num_came:,g}; copy it again")
    with torch.no_grad():
        # a non-contiguous target is small: a part of a larger tensor
        flat = target.detach().view(-1) if target.is_contiguous() else torch.empty_like(target).contiguous().view(-1)
        is_as_it_came = flat.dtype is torch_dtype(source.dtype) and flat.device.type == "cpu"
        at = _fill_bytes(flat, source.data) if is_as_it_came else _fill_values(flat, source)
        if at != flat.numel():
            raise IntegrityError(
                f"a tensor of {flat.numel():,} numbers came with {at:,}: its file was cut off; copy it again"
            )
        if not target.is_contiguous():
            target.detach().copy_(flat.view(target.shape))


def read_tensor(source: TensorPieces, device: torch.device | None = None) -> torch.Tensor:
    """Read a tensor to a device, by default the CPU; raises ``IntegrityError``."""
    tensor = torch.empty(source.shape, dtype=torch_dtype(source.dtype), device=device)
    fill(tensor, source)
    return tensor


def _fill_bytes(flat: torch.Tensor, data: Pieces) -> int:
    """Copy all pieces; return the number of whole values."""
    room, at = bytes_of(flat), 0
    for piece in data:
        room[at : at + len(piece)] = piece
        at += len(piece)
    return at // flat.element_size()


def _fill_values(flat: torch.Tensor, source: TensorPieces) -> int:
    """Convert the values piece by piece; return their number."""
    at = 0
    for values in _values(source):
        flat[at : at + values.numel()].copy_(values)
        at += values.numel()
    return at


Kind = tuple[str, tuple[int, ...]]
"""Dtype, as in a safetensors file, and shape of a tensor."""


def kind_of(tensor: torch.Tensor) -> Kind:
    """Return the dtype and shape that a tensor has in a file."""
    return DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)


def require_kind(name: str, came: Kind, needed: Kind, *, where: str) -> None:
    """Refuse a tensor of another dtype or shape; ``where`` names its file in the ``IntegrityError``."""
    if came != needed:
        raise IntegrityError(
            f"{where} has {name} as {came[0]} {list(came[1])}, expected {needed[0]} {list(needed[1])}; it is of "
            "another job, model or version"
        )


def is_finite(source: TensorPieces) -> bool:
    """Whether all numbers of a tensor are finite; integers always are."""
    return all(not values.is_floating_point() or bool(torch.isfinite(values).all()) for values in _values(source))


def has_negative(source: TensorPieces) -> bool:
    """Whether a number of a tensor is below 0."""
    return any(bool((values < 0).any()) for values in _values(source))


def _values(source: TensorPieces) -> Iterator[torch.Tensor]:
    """Yield the values in order, piece by piece, in one buffer."""
    dtype, size_bytes = torch_dtype(source.dtype), source.data.size_bytes
    buffer = torch.empty(min(PIECE_BYTES, size_bytes), dtype=torch.uint8)
    room, filled = bytes_of(buffer), 0
    for piece in source.data:
        rest = memoryview(piece)
        while rest:
            count = min(len(rest), len(room) - filled)
            room[filled : filled + count] = rest[:count]
            rest, filled = rest[count:], filled + count
            if filled == len(room):
                yield buffer.view(dtype)
                filled = 0
    if filled:
        yield buffer[: filled - filled % dtype.itemsize].view(dtype)


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the hex SHA-256 of tensors with their names, in the order of the names."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(name.encode())
        for piece in pieces_of(value).data:
            digest.update(piece)
    return digest.hexdigest()


def require_finite_grads(parameters: Mapping[str, torch.nn.Parameter], unit: str) -> None:
    """Refuse gradients of a unit, such as ``block 2``, that are not finite; raises ``DivergedError`` with the first."""
    grads = ((name, value.grad) for name, value in parameters.items() if value.grad is not None)
    if name := first_not_finite({name: grad._values() if grad.is_sparse else grad for name, grad in grads}):
        raise DivergedError(f"the gradient of {unit} is not finite, first that of {name}")


def require_finite_values(tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Refuse weights that are not finite after the last update; ``where`` is their part; raises ``DivergedError``."""
    if name := first_not_finite(tensors):
        raise DivergedError(
            f"the training diverged: {name} of {where} is not finite after the last step; {LOWER_THE_RATE}"
        )


def first_not_finite(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the name of the first tensor with NaN or infinity; empty if there is none."""
    if not tensors:
        return ""
    sums = torch.stack([tensor.sum().to(torch.float64) for tensor in tensors.values()])
    if math.isfinite(sums.sum().item()):
        return ""
    return next((name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())), "")
