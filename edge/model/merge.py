"""``python -m edge.model.merge RUN OUT``: write a run's model with its adapter merged, or the sum of users' adapters.

``ringtune export --merge`` starts it as a process of its own, because an export runs without torch. For users with
adapters of their own it merges those of one user, or the sum of all. The adapter is loaded as for an evaluation, and
added to its matrices. Tensors are read and added one at a time, while the file is written.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from edge.model.adapters.lora import merge as merge_lora
from edge.model.auxiliary import FUSED_PARTS, merge_deltas, places_by_module
from edge.model.heads import task_of
from edge.model.result import load_saved, model_files, model_tensors
from edge.model.skeleton import ADAPTER, Skeleton, build_skeleton
from edge.model.slice import DTYPES, materialise
from edge.model.tensor_files import SafetensorsFiles, pieces_of, read_tensor, torch_dtype
from ringtune.errors import IntegrityError, InvalidInputError, UsageError
from ringtune.job.job import Job, config_of, job_of_sum, job_of_user, kinds_of, load_job, result_of
from ringtune.machine.process import exit_code_of
from ringtune.models.adapter_config import auxiliary_of, parse_adapter_config
from ringtune.models.adapter_support import GROWING, lora_scale, merge_refusal, places_of_part, sum_of_kinds
from ringtune.models.auxiliary_models import AUXILIARY_KINDS, describe, in_block
from ringtune.models.families import FAMILIES, LAYOUTS
from ringtune.models.family import BlockLayout
from ringtune.models.gguf import folder_of_gguf
from ringtune.models.result_files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    AUXILIARY_CONFIG_FILE,
    DESCRIPTIONS,
    HEAD_CONFIG_FILE,
    HEAD_FILE,
    INTERFACE_FILE,
    block_of,
    of_user,
)
from ringtune.schedule.course import Course
from ringtune.schedule.plan import Plan
from ringtune.storage.durable import write_pieces_durably
from ringtune.storage.pieces import FilePieces, Piece, Pieces
from ringtune.storage.strict import read_json, read_object
from ringtune.storage.tensor_files import TensorFile, TensorPieces, write_tensors


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the run, merge, write; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m edge.model.merge", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("out", type=Path, help="folder to write; it has to be there")
    parser.add_argument("--model", type=Path, help="folder of the base model; replaces the run's model.path")
    parser.add_argument("--user", default="", help="whose adapters, where each user has their own; default: all")
    parser.add_argument("--sum", action="store_true", help="write the adapters of all users added up, and no model")
    given = parser.parse_args(arguments)
    if given.sum:
        return exit_code_of(lambda: sum_run(given.run, given.out))
    return exit_code_of(lambda: merge_run(given.run, given.out, model=given.model, user=given.user))


def merge_run(run: Path, out: Path, *, model: Path | None, user: str = "") -> None:
    """Write the merged model of a run into the folder ``out``; raises as ``merged_files`` and ``sum_run``.

    ``model`` is the folder of the base model; None = the run's own. Where each user has own adapters, those of ``user``
    are merged; empty = the sum of all.
    """
    job, course = _read(run)
    base = folder_of_gguf(model or Path(job.model.path))
    if not base.is_dir():
        raise InvalidInputError(f"the base model {base} is not there; name its folder with --model")

    users = course.user_sets
    with tempfile.TemporaryDirectory(prefix="ringtune-") as summed:
        saved = run / (of_user(user) if user else result_of(job).folder)
        job = job_of_user(job, user) if user else job
        if users and not user:
            saved = Path(summed)
            sum_run(run, saved)
            job = job_of_sum(job, users)
        for name, content in merged_files(job, base, saved, course.labels).items():
            write_pieces_durably(out / name, content)


def sum_run(run: Path, out: Path) -> None:
    """Write the sum of all users' adapters of a run, as the folder of one adapter; raises as ``summed_files``."""
    job, course = _read(run)
    folders = {user: run / of_user(user) for user in course.user_sets}
    if not folders:
        raise UsageError(f"{run} has no users with adapters of their own; there is nothing to add up")
    is_own = course.trainable.blocks.__contains__
    if len(kinds_of(job, tuple(folders))) == 1:
        files = summed_files(list(folders.values()), result_of(job).files, is_own=is_own)
    else:
        adapters = [UserAdapter(folder, config_of(job, user)) for user, folder in folders.items()]
        files = summed_kinds_files(adapters, is_own=is_own)
    for name, content in files.items():
        write_pieces_durably(out / name, content)


def _read(run: Path) -> tuple[Job, Course]:
    plan = Plan.from_json(read_object((run / "plan.json").read_text(encoding="utf-8"), str(run / "plan.json")))
    return load_job(run / "job.toml"), plan.course


def merged_files(job: Job, model: Path, adapter: Path, labels: Sequence[str]) -> dict[str, Pieces]:
    """Make the folder of a model with a merged adapter, by file name; tensors are read when a file is iterated.

    ``model`` and ``adapter`` are the folders of the base model and of the run's result. Raises ``UsageError`` if the
    adapter is no change of matrices, ``ModelError``, or ``IntegrityError``.
    """
    if problem := merge_refusal(job.adapter.config):
        raise UsageError(f"adapter.config = {job.adapter.config!r} can't be merged: {problem}")
    task, dtype = task_of(job.model.task), DTYPES[job.model.dtype]
    with torch.random.fork_rng(devices=[]):
        skeleton = build_skeleton(model, job)
        head = task.add(skeleton.model, tuple(labels))
    blocks = range(len(skeleton.blocks))
    with SafetensorsFiles(model) as weights:
        materialise(skeleton, weights, blocks=blocks, with_embedding=True, dtype=dtype, device=torch.device("cpu"))
        task.connect(skeleton, head, weights)
    head.to(dtype)
    load_saved(skeleton, job.model.task, adapter, with_head=True)
    merge(skeleton)
    tensors = model_tensors(skeleton, job.model.task, without_blocks=(), with_owner=True)
    kept = {name: value for name, value in tensors.items() if name.startswith("heads.") or f".{ADAPTER}." not in name}
    return model_files(skeleton, job.model.task, model, kept, with_owner=True)


def merge(skeleton: Skeleton) -> None:
    """Add the adapter of every hosted block to the matrices."""
    inputs_first = LAYOUTS[skeleton.layout.model_type].inputs_first
    merge_lora(skeleton.blocks, name=ADAPTER, inputs_first=inputs_first)
    merge_deltas(skeleton.blocks, name=ADAPTER, inputs_first=inputs_first)


_DOWN, _UP = "lora_A", "lora_B"


def summed_files(folders: Sequence[Path], names: Sequence[str], *, is_own: Callable[[int], bool]) -> dict[str, Pieces]:
    """Make the files of the sum, by name; files that are equal for all users are the first user's.

    Args:
        folders: of the users.
        names: of the files of each; its adapter is one that ``ringtune.models.adapter_support.summed_config`` takes.
        is_own: whether each user has own adapters in a block. Those of other blocks never trained, are equal for all,
            and count once, as in every forward of the run.

    Raises ``IntegrityError`` for a damaged file, or adapters with other tensors.
    """
    files: dict[str, Pieces] = {name: FilePieces(folders[0] / name) for name in names}
    if (folders[0] / INTERFACE_FILE).is_file():
        files[INTERFACE_FILE] = FilePieces(folders[0] / INTERFACE_FILE)
    files[ADAPTER_FILE] = _summed([opened(folder / ADAPTER_FILE) for folder in folders], folders, is_own)
    for name in (ADAPTER_CONFIG_FILE, AUXILIARY_CONFIG_FILE):
        if name in files:
            files[name] = Pieces.of(_grown(folders[0] / name, len(folders)))
    return files


def opened(path: Path) -> TensorFile:
    """Open the tensors of an adapter; raises ``IntegrityError``."""
    return TensorFile(FilePieces(path), where=str(path))


def _summed(files: Sequence[TensorFile], folders: Sequence[Path], is_own: Callable[[int], bool]) -> Pieces:
    shapes = {name: (info.dtype, info.shape) for name, info in files[0].infos.items()}
    for file, folder in zip(files, folders, strict=True):
        other = {name: (info.dtype, info.shape) for name, info in file.infos.items()}
        if odd := sorted(name for name in shapes.keys() | other.keys() if shapes.get(name) != other.get(name)):
            raise IntegrityError(
                f"{folder / ADAPTER_FILE} and that of {folders[0].name} differ in {odd[0]}; copy the run's folder again"
            )
    return write_tensors({name: _tensor(files, name, is_own) for name in shapes}, metadata={"format": "pt"})


def _tensor(files: Sequence[TensorFile], name: str, is_own: Callable[[int], bool]) -> TensorPieces:
    """Describe a tensor of the sum; its values are computed when the pieces are iterated."""
    info, rank, block = files[0].infos[name], _rank(files[0], name), block_of(name)
    shape, size_bytes = list(info.shape), info.nbytes
    if rank:
        shape[0 if name.endswith(_DOWN) else 1] *= len(files)
        size_bytes *= len(files)

    def make() -> Iterator[Piece]:
        tensors = [read_tensor(file.tensor(name)) for file in files]
        if block is not None and not is_own(block):
            tensors = [tensors[0], *(torch.zeros_like(tensor) for tensor in tensors[1:])]
        yield from pieces_of(_added(tensors, name, rank)).data

    return TensorPieces(info.dtype, tuple(shape), Pieces(size_bytes, make))


def _rank(file: TensorFile, name: str) -> int:
    """Return the rank of a low-rank factor; 0 for another tensor."""
    if not name.endswith((_DOWN, _UP)):
        return 0
    stem = name.removesuffix(_DOWN).removesuffix(_UP)
    down, up = (file.infos[part].shape if (part := stem + end) in file.infos else () for end in (_DOWN, _UP))
    if len(down) != 2 or len(up) != 2 or up[1] < 1 or down[0] % up[1]:
        raise IntegrityError(f"{stem}{_DOWN} and {_UP} of a user do not fit each other; copy the run's folder again")
    return up[1]


def _added(tensors: Sequence[torch.Tensor], name: str, rank: int) -> torch.Tensor:
    """Add up matrices, and concatenate low-rank factors.

    For a fused matrix ``lora_A`` has ``rank`` rows for each part, one after the other.
    """
    if name.endswith(_UP):
        return torch.cat(list(tensors), dim=1)
    if name.endswith(_DOWN):
        apart = [tensor.reshape(-1, rank, tensor.shape[-1]) for tensor in tensors]
        return torch.cat(apart, dim=1).reshape(-1, tensors[0].shape[-1])
    return torch.stack([tensor.double() for tensor in tensors]).sum(0).to(tensors[0].dtype)


def _grown(path: Path, count: int) -> bytes:
    """Return the description of an adapter with the rank of the sum."""
    try:
        described: dict[str, Any] = read_json(path)
        if path.name == ADAPTER_CONFIG_FILE:
            described["config"] = _with_rank(described["config"], count)
        elif described.get("library"):
            described["library"] = {**described["library"], "config": _with_rank(described["library"]["config"], count)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IntegrityError(
            f"{path} does not describe a LoRA adapter ({error}); copy the run's folder again"
        ) from error
    return (json.dumps(described, indent=2) + "\n").encode()


def _with_rank(config: Mapping[str, Any], count: int) -> dict[str, Any]:
    return {**config, **{name: config[name] * count for name in GROWING}}


class UserAdapter(NamedTuple):
    """The adapter of one user; ``config`` is its ``adapter.config``."""

    folder: Path
    config: str


def summed_kinds_files(users: Sequence[UserAdapter], *, is_own: Callable[[int], bool]) -> dict[str, Pieces]:
    """Make the files of the sum, a ``linear``, by name; the head, equal for all, is the first user's.

    The adapters are those that ``sum_of_kinds`` takes; ``is_own`` and errors as for ``summed_files``.
    """
    folder = users[0].folder
    facts = _facts(folder)
    (auxiliary,) = auxiliary_of(sum_of_kinds([user.config for user in users]))
    family, layout = FAMILIES[facts["model_type"]], LAYOUTS[facts["model_type"]]
    files = [(opened(user.folder / ADAPTER_FILE), user.config) for user in users]
    blocks = sorted({block for file, _ in files for name in file.infos if (block := block_of(name)) is not None})
    tensors: dict[str, TensorPieces] = {}
    for block in blocks:
        for path, places in places_by_module(layout, auxiliary.places).items():
            stem = f"{family.prefix}{family.block_prefix}{block}.{path}"
            for place in places if in_block((auxiliary,), block) else ():
                name = f"{stem}.{ADAPTER}.{place}.weight" if _is_fused(layout, place) else f"{stem}.{ADAPTER}.weight"
                by_user = [_changes(*opened, stem, block, place, layout) for opened in files]
                every = [change for changes in by_user for change in changes]
                tensors[name] = _sum(every, len(every) if is_own(block) else len(by_user[0]), name)
    result: dict[str, Pieces] = {
        name: FilePieces(folder / name) for name in (HEAD_CONFIG_FILE, HEAD_FILE) if (folder / name).is_file()
    }
    described = describe(
        (auxiliary,), name=ADAPTER, model_type=facts["model_type"], model_name=facts.get("model_name", "")
    )
    result[ADAPTER_FILE] = write_tensors(tensors, metadata={"format": "pt"})
    result[AUXILIARY_CONFIG_FILE] = Pieces.of((json.dumps(described, indent=2) + "\n").encode())
    return result


def _facts(folder: Path) -> Mapping[str, Any]:
    path = next((folder / name for name in DESCRIPTIONS if (folder / name).is_file()), folder / DESCRIPTIONS[0])
    try:
        facts: Mapping[str, Any] = read_json(path)
        _ = FAMILIES[facts["model_type"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"{path} does not describe an adapter ({error}); copy the run's folder again") from error
    return facts


def _is_fused(layout: BlockLayout, place: str) -> bool:
    return layout.is_merged and place in FUSED_PARTS


class _Change(NamedTuple):
    """Change of one matrix by one adapter: a matrix, or the product of two.

    Attributes:
        file: with both.
        up: name of the matrix with a row for each output.
        down: name of the right factor; empty without one.
        part: index of the part in ``up`` and ``down``, which have one for each place of a fused matrix.
    """

    file: TensorFile
    up: str
    down: str
    part: int
    parts: int
    scale: float

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        up, down = self.file.infos[self.up].shape, self.file.infos[self.down or self.up].shape
        if len(up) != 2 or len(down) != 2 or up[0] % self.parts or (self.down and up[1] * self.parts != down[0]):
            raise IntegrityError(f"{self.up} of a user does not fit the rest of it; copy the run's folder again")
        return up[0] // self.parts, down[1]

    def value(self) -> torch.Tensor:
        up = read_tensor(self.file.tensor(self.up)).double().chunk(self.parts)[self.part]
        if not self.down:
            return up * self.scale
        return up @ read_tensor(self.file.tensor(self.down)).double().chunk(self.parts)[self.part] * self.scale


def _sum(changes: Sequence[_Change], counted: int, where: str) -> TensorPieces:
    """Describe the sum of the first ``counted`` changes at one place; it is computed when the pieces are iterated."""
    first = changes[0]
    dtype, shape = first.file.infos[first.up].dtype, first.shape
    if odd := next((change for change in changes if change.shape != shape), None):
        raise IntegrityError(f"{where} is {list(shape)} of one user, {list(odd.shape)} of another; they mix runs")
    size_bytes = shape[0] * shape[1] * torch.empty(0, dtype=torch_dtype(dtype)).element_size()

    def make() -> Iterator[Piece]:
        sums = torch.zeros(shape, dtype=torch.float64)
        for change in changes[:counted]:
            sums += change.value()
        yield from pieces_of(sums.to(torch_dtype(dtype))).data

    return TensorPieces(dtype, shape, Pieces(size_bytes, make))


def _changes(file: TensorFile, config: str, stem: str, block: int, place: str, layout: BlockLayout) -> list[_Change]:
    """List the changes of a user's adapter at one place of a block."""
    is_fused, changes = _is_fused(layout, place), list[_Change]()
    whole = f"{stem}.{ADAPTER}.{place}.weight" if is_fused else f"{stem}.{ADAPTER}.weight"
    for auxiliary in in_block(auxiliary_of(config), block):
        if place in auxiliary.places and whole in file.infos:
            changes.append(_Change(file, whole, "", 0, 1, auxiliary.alpha))
    down, up = (f"{stem}.loras.{ADAPTER}.{name}" for name in ("lora_A", "lora_B"))
    if not {down, up} <= file.infos.keys():
        return changes
    for part in parse_adapter_config(config):
        places = [other for other in FUSED_PARTS if other in places_of_part(part)] if is_fused else [place]
        if part.name not in AUXILIARY_KINDS and place in places_of_part(part):
            changes.append(_Change(file, up, down, places.index(place), len(places), lora_scale(part)))
    return changes


if __name__ == "__main__":
    sys.exit(main())
