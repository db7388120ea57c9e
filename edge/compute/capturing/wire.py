"""What pairs become on the wire, and weights on their way back: a safetensors file each.

============ ======================================= ==========================================================
wire         of an input x                           of a gradient
============ ======================================= ==========================================================
``float32``  as it is, in the type of the run        as it is
``bfloat16`` rounded                                 rounded
``velora``   ``z``: each sub-token times ``v``       as it is
============ ======================================= ==========================================================

Beside a rounded or projected x the bits of a ReLU go as they are: ``signs``, which ``Capture`` records if told to.
The gradient itself is sent, never the target ``g(x) - grad``: in 16 bits the difference of two such numbers is lost.
A site's v is made of the first micro-batch that is sent, goes with it as ``v``, and is fixed then. With the rebuilt
``z v`` in the place of x all gradients of a module are approximate, those behind a non-linearity too.

Source: ColA, section 3, Algorithm 1; VeLoRA, section 3.1, for z.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from edge.compute.saving.projected import project
from edge.compute.saving.vectors import Vectors
from edge.model.tensor_bytes import fill, pieces_of, torch_dtype
from ringtune.costs.offload.pair_bytes import BFLOAT16, VELORA, WIRES
from ringtune.errors import IntegrityError, PlanError
from ringtune.files.pieces import Pieces
from ringtune.files.safetensors_stream import TensorFile, write_tensors
from ringtune.schedule.saving import DEFAULT_PARTS, subtoken_size

_X: Final = ".x"
_Z: Final = ".z"
_VECTOR: Final = ".v"

Tensors = Mapping[str, torch.Tensor]


class PairWire:
    """One end of the way of pairs: a host encodes, its helper decodes.

    Args:
        wire: one of ``WIRES``.
        inputs: values of a token of each x, by the name of its site.
        parts: of an x with ``velora``, see ``ringtune.schedule.saving.Velora``.
        seed: of the run.

    Raises:
        PlanError: an unknown wire.

    Attributes:
        vectors: of a host with ``velora``, which a checkpoint needs; otherwise None.
    """

    def __init__(self, wire: str, inputs: Mapping[str, int], *, parts: int = DEFAULT_PARTS, seed: int = 0) -> None:
        if wire not in WIRES:
            raise PlanError(f"offload.pairs = {wire!r} is not one of {', '.join(WIRES)}")
        self._wire, self._inputs = wire, dict(inputs)
        sizes = {name: subtoken_size(size, min(parts, size)) for name, size in inputs.items()}
        self.vectors = Vectors(sizes, init="average", seed=seed) if wire == VELORA else None
        self._sizes = sizes
        self._shown: set[str] = set()
        self._known: dict[str, torch.Tensor] = {}

    def encode(self, pairs: Tensors) -> dict[str, torch.Tensor]:
        """Return what is sent for some pairs; with ``velora`` the first one of a site has its vector beside it."""
        if self._wire == BFLOAT16:
            return {name: _rounded(tensor) for name, tensor in pairs.items()}
        found: dict[str, torch.Tensor] = {}
        for name, tensor in pairs.items():
            if self.vectors is not None and name.endswith(_X):
                found |= self._projected(self.vectors, name.removesuffix(_X), tensor)
            else:
                found[name] = tensor
        return found

    def decode(self, sent: Tensors, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return pairs as ``AuxiliaryModels.fit`` takes them.

        Args:
            sent: what ``encode`` gave.
            dtype: of the computation.

        Raises:
            IntegrityError: a projection without its vector, or of another shape.
        """
        self._known |= {name.removesuffix(_VECTOR): value for name, value in sent.items() if name.endswith(_VECTOR)}
        found: dict[str, torch.Tensor] = {}
        for name, tensor in sent.items():
            if self._wire == VELORA and name.endswith(_Z):
                site = name.removesuffix(_Z)
                found[site + _X] = self._rebuilt(site, tensor).to(dtype)
            elif not name.endswith(_VECTOR):
                found[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
        return found

    def show_again(self) -> None:
        """Send every vector once more with the next pairs: the helper is a new one."""
        self._shown.clear()

    @torch.no_grad()
    def _projected(self, vectors: Vectors, site: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
        vector = vectors.next(site, x)
        found = {site + _Z: project(x, vector).view(*x.shape[:2], -1)}
        if site not in self._shown:
            self._shown.add(site)
            found[site + _VECTOR] = vector
        return found

    def _rebuilt(self, site: str, z: torch.Tensor) -> torch.Tensor:
        vector, inputs = self._known.get(site), self._inputs.get(site)
        if vector is None or inputs is None:
            raise IntegrityError(f"a projection of {site} came, but not the vector that it was projected on")
        if vector.shape != (self._sizes[site],) or z.dim() != 3 or z.shape[2] != -(-inputs // len(vector)):
            raise IntegrityError(
                f"the projection of {site} is {list(z.shape)} on a vector {list(vector.shape)}, expected one for "
                f"{inputs} inputs in sub-tokens of {self._sizes[site]}"
            )
        return (z.unsqueeze(-1) * vector).flatten(2)[..., :inputs]


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


def to_file(tensors: Tensors, metadata: Mapping[str, str]) -> Pieces:
    """Return tensors as a file, read when it is gone through: they must not change before.

    Args:
        tensors: encoded pairs, or weights.
        metadata: what they are of, such as the version of weights.
    """
    return write_tensors({name: pieces_of(value) for name, value in tensors.items()}, metadata=metadata)


def from_file(
    data: Pieces, metadata: Mapping[str, str], *, where: str, device: torch.device | None = None
) -> dict[str, torch.Tensor]:
    """Read what ``to_file`` wrote; what is held of ``data`` in memory is let go of on the way.

    Args:
        data: the file.
        metadata: what it has to be of.
        where: names it in errors.
        device: where the tensors go; None = the CPU.

    Raises:
        IntegrityError: unreadable, or of something else, such as another version.
    """
    file = TensorFile(data, where=where)
    for key, wanted in metadata.items():
        if file.metadata.get(key) != wanted:
            raise IntegrityError(
                f"{where} are of {key} {file.metadata.get(key)!r}, not {wanted!r}; use one version on all machines"
            )
    found: dict[str, torch.Tensor] = {}
    for name, info in file.infos.items():
        found[name] = torch.empty(info.shape, dtype=torch_dtype(info.dtype), device=device)
        fill(found[name], file.tensor(name))
        file.let_go_of(name)
    return found
