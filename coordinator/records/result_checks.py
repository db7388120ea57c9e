"""Check what the nodes hand in at the end of a run against its plan, before anything of it is merged.

A part comes from another machine. It may have the tensors of the blocks that its node answers for, and no others;
every block the same tensors in the same shapes, of as many numbers as planning counted, in the type in which the run
computes, all finite. What is wrong is told with the node that sent it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Final, NamedTuple

from ringtune.costs.kind_facts import KindFacts
from ringtune.costs.memory.sizes import DTYPE_BYTES
from ringtune.costs.profile import ModelFacts
from ringtune.errors import IntegrityError
from ringtune.files.finite import is_finite
from ringtune.files.pieces import Pieces
from ringtune.files.safetensors_stream import TensorFile
from ringtune.files.strict import read_object
from ringtune.jobs.job import Job
from ringtune.jobs.result import result_of
from ringtune.models.result_files import (
    ADAPTER_FILE,
    BLOCKS_FILE,
    DESCRIPTIONS,
    HEAD_CONFIG_FILE,
    HEAD_FILE,
    INTERFACE_FILE,
    USERS_FOLDER,
    block_of,
    of_user,
)
from ringtune.models.tensors import CONFIG_FILE, WEIGHTS_FILE
from ringtune.schedule.plan import Plan
from ringtune.schedule.stages.dealing import replicas
from ringtune.schedule.whose_rows.users import user_sets
from ringtune.texts import shown

MAX_HEADER_BYTES: Final = 1 << 22
"""Longest header of a part; one of 20,000 tensors is shorter."""
MAX_SIDE_BYTES: Final = 1 << 26
"""Most bytes of all files beside the tensors; the longest tokenizer that there is takes a third."""
MAX_CONFIG_BYTES: Final = 1 << 20
"""Most bytes of a description or of a node's totals."""
_DTYPES: Final = {"float32": "F32", "float64": "F64"}
_NUMBER_BYTES: Final = 8
_LEFT_OUT: Final = ("leave_out", "layers")
"""Options of adapters with which a block may have fewer tensors than another one."""
_TWICE: Final = "ln_before"
"""An option with which a tensor is saved under two names."""
_WITH_BASES: Final = "reft"
"""Adapters beside which two square matrices are saved that do not train."""
_CONFIGS: Final = (*DESCRIPTIONS, HEAD_CONFIG_FILE, INTERFACE_FILE, CONFIG_FILE)


class First(NamedTuple):
    """Where a tensor of blocks was seen first, with its shape."""

    shape: tuple[int, ...]
    node: str
    block: int


Seen = dict[str, First]
"""Tensors by their names in a block."""


class Wanted(NamedTuple):
    """What the parts of a run's result have to be.

    Attributes:
        job: of the run.
        part: of its plan that holds at the end.
        model: its sizes, on which all nodes agreed.
        holder: the node with the newest head, which hands in what is in no block.
    """

    job: Job
    part: Plan
    model: ModelFacts
    holder: str

    def blocks(self, node: str) -> range:
        """The blocks that a node hands in: those of its slice, of replicas the first one's."""
        piece, others = self.part.slice_of(node), replicas(self.part.placement, node)
        return range(piece.start, piece.stop) if not others or others[0] == node else range(0)

    def may_send(self, node: str) -> frozenset[int]:
        """The blocks of which a node may hand in tensors: with private ones at the holder, and those that it helps."""
        private = range(self.part.placement.private_blocks if node == self.holder else 0)
        helped = self.part.placement.helped_by(node) if self.sets() else ()
        return frozenset(
            (*self.blocks(node), *private, *(one for each in helped for one in range(each.start, each.stop)))
        )

    @property
    def may_lack(self) -> bool:
        """Whether the job leaves adapters out of some blocks."""
        return any(option in self.job.adapter.config for option in _LEFT_OUT)

    def sets(self) -> tuple[str, ...]:
        """The files of users with adapters of their own, of which hosts and helpers hand in parts."""
        return tuple(of_user(user, ADAPTER_FILE) for user in user_sets(self.part.course))

    def paths(self) -> tuple[str, ...]:
        """The files with tensors of blocks that every host hands in."""
        if self.sets():
            return ()
        return tuple(name for name in result_of(self.job).files if name in (ADAPTER_FILE, BLOCKS_FILE, WEIGHTS_FILE))

    def most_bytes(self, node: str) -> int:
        """More than what a node sends takes, whatever its tensors are called."""
        numbers = max(self._numbers(self.model), *map(self._numbers, self.model.kinds), 0)
        blocks = len(self.may_send(node))
        sets = max(1, len(user_sets(self.part.course)))
        whole = sum(self._outside()) if node == self.holder else 0
        return (
            (2 * blocks * sets * self.most_numbers(numbers) + 2 * whole) * _NUMBER_BYTES
            + sets * MAX_HEADER_BYTES
            + MAX_SIDE_BYTES
        )

    def block_numbers(self, path: str) -> int:
        """How many numbers of a file each block has."""
        user = path.split("/")[1] if path.startswith(f"{USERS_FOLDER}/") else ""
        return self._numbers(next((kind for kind in self.model.kinds if user in kind.users), self.model))

    def most_numbers(self, counted: int) -> int:
        """At most how many numbers a block has in a file, of as many that planning counted."""
        config = self.job.adapter.config
        return counted * (2 if _TWICE in config else 1) + 2 * self.model.hidden_size**2 * config.count(_WITH_BASES)

    def head_numbers(self) -> int:
        """How many numbers the head of an adapter has."""
        size = self.model.head_bytes + len(self.part.course.labels) * self.model.head_class_bytes
        return size // DTYPE_BYTES[self.job.model.dtype]

    def whole_numbers(self) -> tuple[int, int]:
        """How many numbers of a whole model are in no block: at least, and at most, with what nobody trains."""
        least = sum(self._outside())
        return least, least + 2 * self.model.hidden_size * (self.model.hidden_size + 1)

    def _outside(self) -> tuple[int, int]:
        return self.model.embedding_train_bytes // DTYPE_BYTES[self.job.model.dtype], self.head_numbers()

    def _numbers(self, sizes: ModelFacts | KindFacts) -> int:
        return sizes.adapter_block_bytes // DTYPE_BYTES[self.job.model.dtype]


def check_parts(files: Mapping[str, Mapping[str, Pieces]], wanted: Wanted) -> None:
    """Check the files that the nodes handed in.

    Args:
        files: content by file name, by node.
        wanted: what they have to be.

    Raises:
        IntegrityError: names the node, the file and the tensor.
    """
    seen: dict[tuple[str, int], Seen] = {}
    totals: dict[str, Counter[int | None]] = {path: Counter() for path in wanted.sets()}
    for node, own in sorted(files.items()):
        missing = [path for path in wanted.paths() if path not in own]
        if missing and wanted.blocks(node) and not wanted.may_lack:
            raise _refused(f"node {node} sent no {missing[0]}")
        for path, content in sorted(own.items()):
            name, where = path.rpartition("/")[2], f"{path} of node {node}"
            if name in (ADAPTER_FILE, BLOCKS_FILE, HEAD_FILE, WEIGHTS_FILE):
                tensors = TensorFile(content, where=where, max_header_bytes=MAX_HEADER_BYTES)
                numbers = wanted.block_numbers(path)
                found = _counted(node, path, tensors, wanted, seen.setdefault((name, numbers), {}))
                if path in totals:
                    totals[path].update(found)
                else:
                    _check_counts(f"node {node} sent", path, found, wanted)
            elif name in _CONFIGS:
                _check_config(content, where)
    for path, counts in totals.items():
        blocks = range(wanted.part.placement.private_blocks, wanted.part.course.num_blocks)
        _check_counts("the nodes sent", path, {block: counts[block] for block in blocks}, wanted)


def _counted(node: str, path: str, tensors: TensorFile, wanted: Wanted, seen: Seen) -> dict[int | None, int]:
    """Check each tensor of a file; return how many numbers each block has, and what is in none."""
    dtype, blocks = _DTYPES[wanted.job.model.dtype], wanted.may_send(node)
    is_holder, is_whole = node == wanted.holder, path == WEIGHTS_FILE
    found: dict[int | None, int] = dict.fromkeys(wanted.blocks(node), 0)
    for name, info in tensors.infos.items():
        block = None if path == HEAD_FILE else block_of(name)
        where = f"node {node} sent {path} with tensor {shown(name)}"
        if block is None and not (is_holder and (is_whole or path == HEAD_FILE)):
            raise _refused(f"{where}, which is not its to send")
        if block is not None and block not in blocks:
            raise _refused(f"{where} of a block that it does not answer for")
        if info.dtype != dtype and not (block is None and is_whole):
            raise _refused(f"{where} in numbers of type {info.dtype} instead of {dtype}")
        if block is not None:
            first = seen.setdefault(name.partition(f".{block}.")[2], First(info.shape, node, block))
            if first.shape != info.shape:
                raise _refused(
                    f"{where} of shape {list(info.shape)}, but node {first.node} has {list(first.shape)} in block "
                    f"{first.block}"
                )
        if not is_finite(tensors.tensor(name).data, info.dtype):
            raise _refused(f"{where}, which has numbers that are not finite")
        found[block] = found.get(block, 0) + math.prod(info.shape)
    return found


def _check_counts(who: str, path: str, found: Mapping[int | None, int], wanted: Wanted) -> None:
    """Compare the numbers of each block, and of what is in none, with what planning counted."""
    counted = wanted.block_numbers(path)
    least = 0 if wanted.may_lack else counted
    for block, count in found.items():
        if block is None:
            lowest, highest = wanted.whole_numbers() if path == WEIGHTS_FILE else (wanted.head_numbers(),) * 2
        elif path == HEAD_FILE:
            continue
        else:
            lowest, highest = least, wanted.most_numbers(counted)
        if not lowest <= count <= highest:
            what = "outside of blocks" if block is None else f"in block {block}"
            raise _refused(f"{who} {path} with {count:,} numbers {what}, but the plan has {highest:,}")


def _check_config(content: Pieces, where: str) -> None:
    if content.size_bytes > MAX_CONFIG_BYTES:
        raise _refused(f"{where} has {content.size_bytes:,} bytes, {MAX_CONFIG_BYTES:,} are allowed")
    read_object(bytes(content), where)


def _refused(problem: str) -> IntegrityError:
    return IntegrityError(f"{problem}; nothing of the result was written, mend the node and go on with --resume")
