"""Results of nodes at the end of a run and after its best evaluation: collect, check, send to the submitter.

A part is from another machine, so it is checked against the plan before any merge: only tensors of the node's own
blocks, in every block the same tensors and shapes, as many numbers as planning counted, in the run's type, all finite.
Of a model with unlike blocks each has some tensors, and no more numbers than the largest. Errors name the node.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from coordinator.run.driver import Participants
from coordinator.run.events import EventSink
from coordinator.run.result_files import result_folder, users_folders
from ringtune.costs.memory_sizes import DTYPE_BYTES
from ringtune.costs.profile import KindFacts, ModelFacts
from ringtune.errors import IntegrityError, PlanError
from ringtune.job.job import Job, result_of, result_of_user
from ringtune.models.adapter_config import trains_own_weights
from ringtune.models.families import FAMILIES
from ringtune.models.folder import CONFIG_FILE, WEIGHTS_FILE
from ringtune.models.result_files import (
    ADAPTER_FILE,
    BEST_FOLDER,
    BLOCKS_FILE,
    DESCRIPTIONS,
    HEAD_CONFIG_FILE,
    HEAD_FILE,
    INTERFACE_FILE,
    USERS_FOLDER,
    block_of,
    of_user,
)
from ringtune.run_control import events as rd
from ringtune.schedule.plan import Plan
from ringtune.schedule.stages import collected_blocks
from ringtune.schedule.turns import Evaluations
from ringtune.storage.chunks import cut_pieces
from ringtune.storage.durable import storage_errors
from ringtune.storage.pieces import Pieces
from ringtune.storage.strict import read_object
from ringtune.storage.tensor_files import TensorFile, is_finite
from ringtune.texts import shown
from ringtune.v1 import control_pb2

MAX_HEADER_BYTES: Final = 1 << 22
"""Limit of a part's header; one of 20,000 tensors is shorter."""
MAX_SIDE_BYTES: Final = 1 << 26
"""Limit of all files besides tensors; the longest known tokenizer takes a third."""
MAX_CONFIG_BYTES: Final = 1 << 20
"""Limit of a description, and of a node's totals."""
_DTYPES: Final = {"float32": "F32", "float64": "F64"}
_NUMBER_BYTES: Final = 8
_LEFT_OUT: Final = ("leave_out", "layers")
"""Adapter options with which a block may have fewer tensors than another."""
_TWICE: Final = "ln_before"
"""An adapter option with which a tensor is saved under two names."""
_WITH_BASES: Final = "reft"
"""Adapters that are saved with two square matrices that do not train."""
_CONFIGS: Final = (*DESCRIPTIONS, HEAD_CONFIG_FILE, INTERFACE_FILE, CONFIG_FILE)


class FirstOccurrence(NamedTuple):
    """Shape of a tensor in the first node and block where it occurred."""

    shape: tuple[int, ...]
    node: str
    block: int


FirstOccurrences = dict[str, FirstOccurrence]
"""Tensors by their names in a block."""


class ExpectedResult(NamedTuple):
    """Bounds for the parts of a run's result.

    Attributes:
        holder: the node with the newest head, which sends the tensors outside of blocks.
    """

    job: Job
    part: Plan
    model: ModelFacts
    holder: str

    def blocks(self, node: str) -> range:
        """The blocks that a node sends."""
        return collected_blocks(self.part.placement, node)

    def may_send(self, node: str) -> frozenset[int]:
        """The blocks of which a node may send tensors: its own, private ones at the holder, helped ones of users."""
        private = range(self.part.placement.private_blocks if node == self.holder else 0)
        helped = self.part.placement.helped_by(node) if self.sets() else ()
        return frozenset(
            (*self.blocks(node), *private, *(block for each in helped for block in range(each.start, each.stop)))
        )

    @property
    def may_lack(self) -> bool:
        """Whether the job leaves adapters out of some blocks."""
        return any(option in self.job.adapter.config for option in _LEFT_OUT)

    @property
    def is_unlike(self) -> bool:
        """Whether blocks may have other tensors than others: layers of other kinds or widths, no experts."""
        family = FAMILIES[self.model.model_type]
        return family.layout.is_unlike or (family.generic and trains_own_weights(self.job.adapter.config))

    @property
    def sends_invertible(self) -> str:
        """The node that sends an invertible adapter: the holder of the head; empty without one."""
        return self.holder if self.part.course.invertible else ""

    def sets(self) -> tuple[str, ...]:
        """Files of users with adapters of their own; hosts and helpers send parts of them."""
        return tuple(of_user(user, ADAPTER_FILE) for user in self.part.course.user_sets)

    def paths(self) -> tuple[str, ...]:
        """The files with tensors of blocks that every host sends."""
        if self.sets():
            return ()
        return tuple(name for name in result_of(self.job).files if name in (ADAPTER_FILE, BLOCKS_FILE, WEIGHTS_FILE))

    def head_files(self) -> tuple[str, ...]:
        """The files that the holder alone sends; users' adapters are checked apart."""
        if self.sets():
            return ()
        return tuple(name for name in result_of(self.job).files if name in (HEAD_CONFIG_FILE, HEAD_FILE))

    def most_bytes(self, node: str) -> int:
        """Upper bound of the bytes that a node sends, whatever the names of its tensors."""
        numbers = max(self._numbers(self.model), *map(self._numbers, self.model.kinds), 0)
        blocks = len(self.may_send(node))
        sets = max(1, len(self.part.course.user_sets))
        whole = sum(self._outside()) if node == self.holder else 0
        return (
            (2 * blocks * sets * self.max_numbers(numbers) + 2 * whole) * _NUMBER_BYTES
            + sets * MAX_HEADER_BYTES
            + MAX_SIDE_BYTES
        )

    def block_numbers(self, path: str) -> int:
        """Numbers of each block in a file."""
        user = path.split("/")[1] if path.startswith(f"{USERS_FOLDER}/") else ""
        return self._numbers(next((kind for kind in self.model.kinds if user in kind.users), self.model))

    def max_numbers(self, counted: int) -> int:
        """Upper bound of a block's numbers in a file, for a planned count."""
        config = self.job.adapter.config
        return counted * (2 if _TWICE in config else 1) + 2 * self.model.hidden_size**2 * config.count(_WITH_BASES)

    def head_numbers(self) -> int:
        """Numbers of the head of an adapter."""
        size = self.model.head_bytes + len(self.part.course.labels) * self.model.head_class_bytes
        return size // DTYPE_BYTES[self.job.model.dtype]

    def outside_numbers(self, path: str) -> tuple[int, int]:
        """Bounds of a file's numbers outside of blocks; the upper one of a whole model includes untrained tensors."""
        if path != WEIGHTS_FILE:
            return (self._outside()[0] if path == ADAPTER_FILE else self.head_numbers(),) * 2
        least = sum(self._outside())
        return least, least + 2 * self.model.hidden_size * (self.model.hidden_size + 1)

    def _outside(self) -> tuple[int, int]:
        return self.model.embedding_train_bytes // DTYPE_BYTES[self.job.model.dtype], self.head_numbers()

    def _numbers(self, sizes: ModelFacts | KindFacts) -> int:
        return sizes.adapter_block_bytes // DTYPE_BYTES[self.job.model.dtype]


def check_parts(files: Mapping[str, Mapping[str, Pieces]], expected: ExpectedResult) -> None:
    """Check the files (content by file name, by node) against the expected result; raises ``IntegrityError``."""
    seen: dict[tuple[str, int], FirstOccurrences] = {}
    totals: dict[str, Counter[int | None]] = {path: Counter() for path in expected.sets()}
    for node, sent in sorted(files.items()):
        check_part(node, sent, expected, seen, totals)
    for path, counts in totals.items():
        blocks = range(expected.part.placement.private_blocks, expected.part.course.num_blocks)
        _check_counts("the nodes sent", path, {block: counts[block] for block in blocks}, expected)


def check_part(
    node: str,
    files: Mapping[str, Pieces],
    expected: ExpectedResult,
    seen: dict[tuple[str, int], FirstOccurrences],
    totals: Mapping[str, Counter[int | None]],
) -> None:
    """Check the files of one node, and add them to what was ``seen`` and to ``totals``; raises ``IntegrityError``."""
    sends = (expected.blocks(node) and not expected.may_lack) or node == expected.sends_invertible
    needed = (*(expected.paths() if sends else ()), *(expected.head_files() if node == expected.holder else ()))
    if missing := [path for path in needed if path not in files]:
        raise _refused(f"node {node} sent no {missing[0]}")
    for path, content in sorted(files.items()):
        name, where = path.rpartition("/")[2], f"{path} of node {node}"
        if name in (ADAPTER_FILE, BLOCKS_FILE, HEAD_FILE, WEIGHTS_FILE):
            tensors = TensorFile(content, where=where, max_header_bytes=MAX_HEADER_BYTES)
            numbers = expected.block_numbers(path)
            counts = _counted(node, path, tensors, expected, seen.setdefault((name, numbers), {}))
            if path in totals:
                totals[path].update(counts)
            else:
                _check_counts(f"node {node} sent", path, counts, expected)
        elif name in _CONFIGS:
            if content.size_bytes > MAX_CONFIG_BYTES:
                raise _refused(f"{where} has {content.size_bytes:,} bytes, {MAX_CONFIG_BYTES:,} are allowed")
            read_object(bytes(content), where)


def _counted(
    node: str, path: str, tensors: TensorFile, expected: ExpectedResult, seen: FirstOccurrences
) -> dict[int | None, int]:
    """Check each tensor of a file; return the numbers by block, None = outside of blocks."""
    dtype, blocks = _DTYPES[expected.job.model.dtype], expected.may_send(node)
    is_holder, is_whole = node == expected.holder, path == WEIGHTS_FILE
    counts: dict[int | None, int] = dict.fromkeys(expected.blocks(node), 0)
    if path == ADAPTER_FILE and node == expected.sends_invertible:
        counts[None] = 0
    for name, info in tensors.infos.items():
        block = None if path == HEAD_FILE else block_of(name)
        where = f"node {node} sent {path} with tensor {shown(name)}"
        if block is None and not (is_holder and (is_whole or path == HEAD_FILE)) and None not in counts:
            raise _refused(f"{where}, which it may not send")
        if block is not None and block not in blocks:
            raise _refused(f"{where} of a block that it may not send")
        if info.dtype != dtype and not (block is None and is_whole):
            raise _refused(f"{where} in numbers of type {info.dtype} instead of {dtype}")
        if block is not None:
            unlike_in = f"{block}." if expected.is_unlike else ""
            first = seen.setdefault(
                unlike_in + name.partition(f".{block}.")[2], FirstOccurrence(info.shape, node, block)
            )
            if first.shape != info.shape:
                raise _refused(
                    f"{where} of shape {list(info.shape)}, but node {first.node} has {list(first.shape)} in block "
                    f"{first.block}"
                )
        if not is_finite(tensors.tensor(name).data, info.dtype):
            raise _refused(f"{where}, which has numbers that are not finite")
        counts[block] = counts.get(block, 0) + math.prod(info.shape)
    return counts


def _check_counts(who: str, path: str, counts: Mapping[int | None, int], expected: ExpectedResult) -> None:
    """Compare the numbers by block with the planned ones."""
    counted = expected.block_numbers(path)
    least = 0 if expected.may_lack else min(1, counted) if expected.is_unlike else counted
    for block, count in counts.items():
        if block is None:
            lowest, highest = expected.outside_numbers(path)
        elif path == HEAD_FILE:
            continue
        else:
            lowest, highest = least, expected.max_numbers(counted)
        if not lowest <= count <= highest:
            what = "outside of blocks" if block is None else f"in block {block}"
            raise _refused(f"{who} {path} with {count:,} numbers {what}, but the plan has {highest:,}")


def _refused(problem: str) -> IntegrityError:
    return IntegrityError(
        f"{problem}; nothing of the result was written, repair the node and resume the run with --resume"
    )


_TOTALS = "totals.json"
_MAX_RESULT_BYTES = 1 << 38


class Results:
    """Result files of all nodes of one run, in a temporary folder.

    Attributes:
        model: sizes for the check of the files; None = they are not checked.
    """

    def __init__(self, model: ModelFacts | None = None) -> None:
        self.model = model
        self._holder = ""
        self._wanted: ExpectedResult | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._files: dict[str, dict[str, Pieces]] = {}

    def folder_of(self, node: str) -> Path:
        """Make an empty folder for a node's files; a node sends again after a recovery; raises ``StorageError``."""
        with storage_errors(Path("any temporary folder")):
            place = tempfile.gettempdir()
        with storage_errors(Path(place)):
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="ringtune-", dir=place, ignore_cleanup_errors=True)
            return Path(tempfile.mkdtemp(prefix=f"{node}-", dir=self._folder.name))

    def most_bytes(self, command: rd.Collect, job: Job, part: Plan) -> int:
        """Expect what a node is about to be asked for; return the upper bound of its bytes."""
        self._holder = command.node if command.with_head else self._holder
        self._wanted = expected = ExpectedResult(job, part, self.model, self._holder) if self.model else None
        return expected.most_bytes(command.node) if expected else _MAX_RESULT_BYTES

    def take(self, node: str, files: dict[str, Pieces]) -> None:
        """Take a node's files in its folder; raises ``IntegrityError`` where they are not what it has to send."""
        if self._wanted is not None:
            check_part(node, files, self._wanted, {}, {path: Counter() for path in self._wanted.sets()})
        self._files[node] = files

    def totals(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each node with its totals of the run; raises ``IntegrityError``."""
        for node, files in self._files.items():
            content = files.get(_TOTALS, Pieces.of(b""))
            if content.size_bytes > MAX_CONFIG_BYTES:
                raise IntegrityError(
                    f"node {node} sent {_TOTALS} of {content.size_bytes:,} bytes; use one version on all machines"
                )
            yield node, read_object(bytes(content), f"{_TOTALS} of node {node}")

    def send(self, job: Job, emit: EventSink, *, part: Plan, below: str = "") -> None:
        """Send the merged adapter or model, or that of each user, to the submitter; raises ``IntegrityError``.

        ``part`` is of the plan that holds at the end; ``below`` is a prefix of each path in the run's folder.
        """
        # a node that was lost may have sent something before
        sent = {node: files for node, files in self._files.items() if node in part.nodes}
        if self.model is not None:
            check_parts(sent, ExpectedResult(job, part, self.model, self._holder))
        result = result_of(job)
        if users := part.course.user_sets:
            files = users_folders(sent, {user: result_of_user(job, user) for user in users})
        else:
            files = {f"{result.folder}/{name}": made for name, made in result_folder(sent, result).items()}
        for path, content in sorted(files.items()):
            for chunk in cut_pieces(below + path, content):
                emit(control_pb2.RunEvent(file=chunk))

    def drop(self) -> None:
        """Delete all files."""
        if self._folder is not None:
            self._folder.cleanup()


class ResultCollector:
    """Results of the nodes of one run: the last one, and the best one, unless the nodes keep that on their disks."""

    def __init__(self, participants: Participants, job: Job) -> None:
        self._participants, self._job, self._emit = participants, job, participants.output.emit
        self.last = Results()
        self._number, self._best, self._best_step = 0, Results(), 0

    def carry_out(
        self,
        command: rd.Collect | rd.CollectBest | rd.LogBest,
        part: Plan,
        *,
        needed_steps: Collection[int] = (),
    ) -> None:
        """Request a node's part, or send the best result to the submitter after all nodes have sent theirs.

        ``needed_steps`` are those of best results that a resumed run may need.

        Raises:
            IntegrityError: the files differ from the plan.
            StorageError: no room.
        """
        if isinstance(command, rd.Collect):
            self._ask(self.last, command, part, lambda files: self._take_last(command.node, files))
            return
        if isinstance(command, rd.CollectBest):
            self._ask_best(command, part, needed_steps)
            return
        if command.number != self._number:
            raise PlanError(f"the best result of step {command.step} is not the received one; please report this")
        self._best_step = command.step
        if self._job.keeps_best_on_disk:
            return
        self._best.send(self._job, self._emit, part=part, below=f"{BEST_FOLDER}/{command.step}/")
        self._tell(command.step, is_result=False)
        self._best.drop()

    def _ask_best(self, command: rd.CollectBest, part: Plan, needed_steps: Collection[int]) -> None:
        node, step, number, with_head, with_private = command
        if number != self._number:
            self._best.drop()
            self._number, self._best = number, Results(self.last.model)
        self._ask(
            self._best,
            rd.Collect(node, with_head, with_private, step if self._job.keeps_best_on_disk else 0),
            part,
            lambda files: self._take_best(node, number, files),
            goes_on=True,
            needed_steps={*needed_steps, self._best_step} - {0},  # a run that is stopped before all have sent keeps it
        )

    def _ask(
        self,
        results: Results,
        command: rd.Collect,
        part: Plan,
        read: Callable[[dict[str, Pieces]], Iterator[rd.Event]],
        **more: Any,
    ) -> None:
        """Request a node's trained tensors; ``more`` are fields of the request."""
        node, with_head, with_private, best_step = command
        self._participants.calls[node].collect(
            control_pb2.CollectRequest(with_head=with_head, with_private=with_private, best_step=best_step, **more),
            results.folder_of(node),
            max_bytes=results.most_bytes(command, self._job, part),
            users=part.course.user_sets,
            on_result=lambda files: self._participants.hear(node, read(files)),
            on_progress=lambda: self._participants.queue.put(rd.Progressed(node)),
        )

    def _take_last(self, node: str, files: dict[str, Pieces]) -> Iterator[rd.Event]:
        self.last.take(node, files)
        yield rd.Collected(node)

    def _take_best(self, node: str, number: int, files: dict[str, Pieces]) -> Iterator[rd.Event]:
        """Take a node's part, unless its request is outdated."""
        if number == self._number and not self._job.keeps_best_on_disk:
            self._best.take(node, files)
        yield rd.BestSent(node, number)

    def settle(self, best: Evaluations | None, last_step: int) -> bool:
        """Report to the submitter that the best result is that of the run.

        False if it is the last one, or the nodes kept it, so that it is the collected one.
        """
        if best is None or best.best_step == last_step or self._job.keeps_best_on_disk:
            return False
        self._tell(best.best_step, is_result=True)
        return True

    def drop(self) -> None:
        """Delete all files."""
        self.last.drop()
        self._best.drop()

    def _tell(self, step: int, *, is_result: bool) -> None:
        self._emit(control_pb2.RunEvent(best_json=json.dumps({"step": step, "is_result": is_result})))
