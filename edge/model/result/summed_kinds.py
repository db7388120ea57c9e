"""Add up adapters of several kinds: a matrix beside each matrix that any of them changes (``summed_adapters``).

Tensors are read and added one at a time, as the file is gone through.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from edge.model.auxiliary.build import places_by_module
from edge.model.auxiliary.modules import FUSED_PARTS
from edge.model.layouts import LAYOUTS, BlockLayout
from edge.model.result.summed import opened, read_tensor
from edge.model.skeleton import ADAPTER
from edge.model.tensor_bytes import pieces_of, torch_dtype
from ringtune.errors import IntegrityError
from ringtune.files.pieces import FilePieces, Piece, Pieces
from ringtune.files.safetensors_stream import TensorFile, TensorPieces, write_tensors
from ringtune.files.strict import parse_json
from ringtune.models.adapters.adapter_config import auxiliary_of, parse_adapter_config
from ringtune.models.adapters.auxiliary_config import AUXILIARY_KINDS, in_block
from ringtune.models.adapters.auxiliary_file import describe
from ringtune.models.adapters.merge_support import places_of_part
from ringtune.models.adapters.summed_adapters import lora_scale, sum_of_kinds
from ringtune.models.families import FAMILIES
from ringtune.models.result_files import (
    ADAPTER_FILE,
    AUXILIARY_CONFIG_FILE,
    DESCRIPTIONS,
    HEAD_CONFIG_FILE,
    HEAD_FILE,
    block_of,
)


class OfUser(NamedTuple):
    """The adapter of one user.

    Attributes:
        folder: that it is in.
        config: ``adapter.config`` that it has.
    """

    folder: Path
    config: str


class _Opened(NamedTuple):
    file: TensorFile
    config: str


def summed_kinds_files(users: Sequence[OfUser], *, is_own: Callable[[int], bool]) -> dict[str, Pieces]:
    """Make the files of the sum, a ``linear``; the head is that of the first, as it is the same for all.

    Args:
        users: with adapters that ``sum_of_kinds`` takes.
        is_own: see ``summed_files``.

    Returns:
        Name to content.

    Raises:
        IntegrityError: a file is damaged.
    """
    folder = users[0].folder
    facts = _facts(folder)
    (auxiliary,) = auxiliary_of(sum_of_kinds([user.config for user in users]))
    family, layout = FAMILIES[facts["model_type"]], LAYOUTS[facts["model_type"]]
    files = [_Opened(opened(user.folder / ADAPTER_FILE), user.config) for user in users]
    blocks = sorted({block for one in files for name in one.file.infos if (block := block_of(name)) is not None})
    tensors: dict[str, TensorPieces] = {}
    for block in blocks:
        for path, places in places_by_module(layout, auxiliary.places).items():
            stem = f"{family.prefix}{family.block_prefix}{block}.{path}"
            for place in places if in_block((auxiliary,), block) else ():
                name = f"{stem}.{ADAPTER}.{place}.weight" if _is_fused(layout, place) else f"{stem}.{ADAPTER}.weight"
                by_user = [_changes(one, stem, block, place, layout) for one in files]
                every = [change for changes in by_user for change in changes]
                tensors[name] = _sum(every, len(every) if is_own(block) else len(by_user[0]), name)
    found: dict[str, Pieces] = {
        name: FilePieces(folder / name) for name in (HEAD_CONFIG_FILE, HEAD_FILE) if (folder / name).is_file()
    }
    described = describe(
        (auxiliary,), name=ADAPTER, model_type=facts["model_type"], model_name=facts.get("model_name", "")
    )
    found[ADAPTER_FILE] = write_tensors(tensors, metadata={"format": "pt"})
    found[AUXILIARY_CONFIG_FILE] = Pieces.of((json.dumps(described, indent=2) + "\n").encode())
    return found


def _facts(folder: Path) -> Mapping[str, Any]:
    """Read what describes an adapter, of any kind."""
    path = next((folder / name for name in DESCRIPTIONS if (folder / name).is_file()), folder / DESCRIPTIONS[0])
    try:
        found: Mapping[str, Any] = parse_json(path.read_text(encoding="utf-8"))
        _ = FAMILIES[found["model_type"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"{path} does not describe an adapter ({error}); copy the run's folder again") from error
    return found


def _is_fused(layout: BlockLayout, place: str) -> bool:
    return layout.is_merged and place in FUSED_PARTS


class _Change(NamedTuple):
    """What one adapter changes at one place: a matrix, or the product of two.

    Attributes:
        file: that has them.
        up: name of the matrix with a row for each output.
        down: name of the matrix that is multiplied from the right; empty without one.
        part: which of the parts that ``up`` and ``down`` have, one for each place in one matrix.
        parts: of these.
        scale: factor.
    """

    file: TensorFile
    up: str
    down: str
    part: int
    parts: int
    scale: float

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs.

        Raises:
            IntegrityError: the factors do not fit each other.
        """
        up, down = self.file.infos[self.up].shape, self.file.infos[self.down or self.up].shape
        if len(up) != 2 or len(down) != 2 or up[0] % self.parts or (self.down and up[1] * self.parts != down[0]):
            raise IntegrityError(f"{self.up} of a user does not fit the rest of it; copy the run's folder again")
        return up[0] // self.parts, down[1]

    def value(self) -> torch.Tensor:
        """Read it, in float64."""
        up = read_tensor(self.file.tensor(self.up)).double().chunk(self.parts)[self.part]
        if not self.down:
            return up * self.scale
        return up @ read_tensor(self.file.tensor(self.down)).double().chunk(self.parts)[self.part] * self.scale


def _sum(changes: Sequence[_Change], counted: int, where: str) -> TensorPieces:
    """Describe the sum of the changes at one place without reading them; the first ones are counted."""
    first = changes[0]
    dtype, shape = first.file.infos[first.up].dtype, first.shape
    if odd := next((change for change in changes if change.shape != shape), None):
        raise IntegrityError(f"{where} is {list(shape)} of one user, {list(odd.shape)} of another; they mix runs")
    size_bytes = shape[0] * shape[1] * torch.empty(0, dtype=torch_dtype(dtype)).element_size()

    def make() -> Iterator[Piece]:
        found = torch.zeros(shape, dtype=torch.float64)
        for change in changes[:counted]:
            found += change.value()
        yield from pieces_of(found.to(torch_dtype(dtype))).data

    return TensorPieces(dtype, shape, Pieces(size_bytes, make))


def _changes(one: _Opened, stem: str, block: int, place: str, layout: BlockLayout) -> list[_Change]:
    """List what a user's adapter changes at a place of a block."""
    is_fused, found = _is_fused(layout, place), list[_Change]()
    own = f"{stem}.{ADAPTER}.{place}.weight" if is_fused else f"{stem}.{ADAPTER}.weight"
    for auxiliary in in_block(auxiliary_of(one.config), block):
        if place in auxiliary.places and own in one.file.infos:
            found.append(_Change(one.file, own, "", 0, 1, auxiliary.alpha))
    down, up = (f"{stem}.loras.{ADAPTER}.{name}" for name in ("lora_A", "lora_B"))
    if not {down, up} <= one.file.infos.keys():
        return found
    for part in parse_adapter_config(one.config):
        places = [other for other in FUSED_PARTS if other in places_of_part(part)] if is_fused else [place]
        if part.name not in AUXILIARY_KINDS and place in places_of_part(part):
            found.append(_Change(one.file, up, down, places.index(place), len(places), lora_scale(part)))
    return found
