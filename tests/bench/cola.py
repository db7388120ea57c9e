"""``make bench-cola``: what a host of helped blocks holds at most in a training step, in ``build/bench/cola.json``.

Four blocks of BERT-base's shape (hidden size 768) with random weights, rows of 128 tokens, adapters at query and value.
The owner is elsewhere, so that embedding and head are not counted. After a step that warms up, one step is tracked: the
actions of the host's table, with what comes from owner and helper::

    <h  F[0,4)  >h  <g  B[0,4)  C[..)  >c ...  <w  U[..) ...

Every storage of a tensor that is alive at the host counts, weights included, and is counted after each operation of
torch, backward and optimizer too. Not seen: what one operation takes and gives back inside, and the buffers of the
wire. Adapters that a merging host keeps in a file (for checkpoints and the result) are not in memory, and not counted.
A helper has all four blocks in one range, or each of them in a range of its own, which makes smaller parcels.

Beside it: the same node without a helper, with gradients and AdamW's state, for LoRA and for all weights of the blocks.
With eight users each has adapters of their own, and a batch of eight rows or more has rows of all of them: beside the
matrices each row goes through its user's (alone), inside them through the sum of all (collaboration).

Exits with 1 if merged adapters of different ranks and users are further apart than ``MAX_SPREAD``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from edge.runtime.executor import NodeExecutor
from ringtune.job.job import parse_job
from ringtune.schedule.actions import Action, Op, Payload, TensorKey
from ringtune.schedule.course import ALONE, COLLABORATION, JOINT, Course, HelperSettings, Offload
from ringtune.schedule.lowering import item_updates, legs, weights_key
from ringtune.schedule.methods import Everything
from ringtune.schedule.placement import Helper, Placement, Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import Owner, UserRows
from ringtune.schedule.turns import Item, StepKind, Turn, items
from ringtune.schedule.units import Range
from ringtune.storage.pieces import Pieces
from tests.bench.rings import conclude
from tests.support.tiny import write_bert

OUT: Final = Path("build/bench/cola.json")
BLOCKS, WIDTH, HEADS, INNER, TOKENS = 4, 768, 12, 3072, 128
BATCHES: Final = (1, 8, 32)
USERS: Final = (1, 8)
RANGES: Final = {"one": (Range(0, BLOCKS),), "each": tuple(Range(block, block + 1) for block in range(BLOCKS))}
ADAPTERS: Final = {"lora 8": "lora[r=8]", "lora 64": "lora[r=64]", "linear": "linear", "mlp": "mlp[hidden=128]"}
MERGED: Final = ("lora 8", "lora 64", "linear")
LOCAL: Final = {"lora 8, local": "lora[r=8]", "all weights, local": "full"}
SPREAD: Final = "host_bytes_merged_spread"
MAX_SPREAD: Final = 0.02
HOST, HELPER, OWNER = "here", "helper", "elsewhere"


class Alive(TorchDispatchMode):
    """Counts the bytes of all storages that are alive after each operation; its peak is the most that there were.

    Args:
        held: tensors that are there before the first operation.
        left_out: tensors that do not count, such as those of a mapped file.
    """

    def __init__(self, held: Iterable[torch.Tensor], left_out: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found: dict[int, tuple[StorageWeakRef, int]] = {}
        self._left_out = {tensor.untyped_storage()._cdata for tensor in left_out}
        self._watch(held)
        self.peak_bytes = self.now_bytes()

    @property
    def _alive(self) -> dict[int, tuple[StorageWeakRef, int]]:
        self._found = {key: entry for key, entry in self._found.items() if not _is_gone(entry[0])}
        return self._found

    def now_bytes(self) -> int:
        """Bytes that are alive now."""
        return sum(size for _, size in self._alive.values())

    def _watch(self, tensors: Iterable[object]) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._left_out:
                    self._found[storage._cdata] = (_watched(storage), storage.nbytes())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count."""
        result = func(*args, **(kwargs or {}))
        self._watch(tree_leaves((args, kwargs, result)))
        self.peak_bytes = max(self.peak_bytes, self.now_bytes())
        return result


def _watched(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _is_gone(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]


class Step:
    """One host, and its helper if it has one, ready for a warm-up and one tracked step.

    Args:
        model: folder.
        adapter: configuration.
        ranges: what the helper has; empty = there is none.
        folder: for adapters in a file.
        rows: of a batch.
        merged: whether the host holds the adapters inside the matrices.
        users: how many have adapters of their own; 1 = there is one set.

    Attributes:
        plan: of the step.
    """

    def __init__(
        self,
        model: Path,
        adapter: str,
        folder: Path,
        rows: int,
        *,
        ranges: tuple[Range, ...] = (),
        merged: bool = False,
        users: int = 1,
    ) -> None:
        self.plan, self._rows = _plan_of(ranges, rows, merged=merged, users=users), rows
        job = parse_job(f'[model]\npath = "{model}"\n[adapter]\nconfig = "{adapter}"\n', source="bench")
        nodes = (HOST, HELPER) if ranges else (HOST,)
        self._nodes = {node: NodeExecutor(self.plan, node, job, model, None) for node in nodes}
        self._nodes[HOST].offloading.keep_on_disk(folder, {"node": HOST})
        turn = Turn(
            index=0, kind=StepKind.TRAIN, owner=OWNER, round=0, first_seq=0, num_items=2, first_step=0, first_batch=0
        )
        for executor in self._nodes.values():
            executor.grant(turn)
        self._items = items(self.plan.course, turn)

    def measure(self) -> dict[str, Any]:
        """Return the bytes held before the step, the most that it held, and the most in each kind of operation."""
        torch.manual_seed(0)
        hosted = self._nodes[HOST]._hosted
        sets = [] if hosted.parts.sets is None else hosted.parts.sets.parameters(range(BLOCKS)).values()
        alive = Alive([*hosted.weights(), *sets], left_out=hosted.parts.kept.values())
        self._carry_out(self._items[0], alive)
        held_bytes = alive.now_bytes()
        peaks = self._carry_out(self._items[1], alive)
        return {"peak_bytes": max(peaks.values()), "held_bytes": held_bytes, "peaks": peaks}

    def _carry_out(self, item: Item, alive: Alive) -> dict[str, int]:
        """Do one step; gives the peak of each kind of operation."""
        host, peaks, shipped = self._nodes[HOST], dict[str, int](), Action(Op.SHIP, item.seq)

        def tracked(name: str, do: Callable[..., Any], *arguments: Any) -> Any:
            with alive:
                alive.peak_bytes = alive.now_bytes()
                found = do(*arguments)
            peaks[name] = max(peaks.get(name, 0), alive.peak_bytes)
            return found

        for leg in legs(self.plan, item, HOST)[0]:
            action = leg.bind(item.seq, 0)
            if leg.op is Op.RECEIVE:
                tracked("messages", self._receive, action.key)
            elif leg.op is Op.SEND and leg.payload == Payload.PAIRS:
                self._fit(shipped, tracked("messages", self._parcel, action.key))
            elif leg.op is Op.SEND:
                tracked("messages", self._send, action.key)
            else:
                shipped = action if leg.op is Op.SHIP else shipped
                tracked(leg.op.name, host.run, action)
        for action in item_updates(self.plan, item, HOST):
            if weights := self._updated(action):
                tracked("messages", host.put_parcel, weights_key(action), Pieces.of(weights))
            tracked("update", host.run, action)
        return peaks

    def _receive(self, key: TensorKey) -> None:
        """Give the host a hidden state with its mask, or a gradient."""
        rows = self._rows
        mask = torch.ones(rows, TOKENS, dtype=torch.int64) if key.payload == Payload.HIDDEN else None
        self._nodes[HOST].put_tensor(key, torch.randn(rows, TOKENS, WIDTH), mask)

    def _send(self, key: TensorKey) -> None:
        """Let the host drop what it sent."""
        self._nodes[HOST].take_tensor(key)

    def _parcel(self, key: TensorKey) -> bytes:
        """What the host sends to its helper."""
        return bytes(self._nodes[HOST].take_parcel(key))

    def _fit(self, shipped: Action, pairs: bytes) -> None:
        """Let the helper take the pairs of some blocks."""
        helper = self._nodes[HELPER]
        helper.put_parcel(TensorKey(Payload.PAIRS, shipped.seq, 0, shipped.start), Pieces.of(pairs))
        helper.run(Action(Op.FIT, *shipped[1:]))

    def _updated(self, action: Action) -> bytes:
        """What a helper sends after an update; nothing where there is none."""
        if HELPER not in self._nodes:
            return b""
        self._nodes[HELPER].run(action)
        return bytes(self._nodes[HELPER].take_parcel(weights_key(action)))


def _plan_of(ranges: tuple[Range, ...], rows: int, *, merged: bool, users: int) -> Plan:
    manner = HelperSettings(merged=merged, users=JOINT if users == 1 else COLLABORATION if merged else ALONE)
    offload = None if manner.is_exact else Offload(blocks=(Range(0, BLOCKS),), **dataclasses.asdict(manner))
    train_rows = max(BATCHES)
    shares = tuple(UserRows(name=f"user-{index}", train_rows=train_rows // users) for index in range(users))
    course = Course(
        method=Everything(),
        num_blocks=BLOCKS,
        owners=(Owner(node=OWNER, train_rows=train_rows, users=shares if users > 1 else ()),),
        num_steps=2,
        local_iterations=2,
        batch_size=rows,
        microbatches=1,
        max_length=TOKENS,
        hidden_size=WIDTH,
        labels=("a", "b"),
        offload=offload,
    )
    helpers = tuple(Helper(node=HELPER, start=one.start, stop=one.stop) for one in ranges)
    return Plan.of(course, Placement(slices=(Slice(node=HOST, start=0, stop=BLOCKS),), helpers=helpers))


def write_model(folder: Path) -> Path:
    """Write blocks of BERT-base's shape with a few words."""
    return write_bert(
        folder, vocab_size=64, hidden_size=WIDTH, num_blocks=BLOCKS, num_heads=HEADS, intermediate_size=INNER
    )


def measure(folder: Path) -> dict[str, Any]:
    """All adapters, batch sizes and ranges."""
    model, threads = write_model(folder / "model"), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cases = {
            f"{rows} rows": {name: make(rows).measure() for name, make in ways(model, folder).items()}
            for rows in BATCHES
        }
    finally:
        torch.set_num_threads(threads)
    return {"cases": cases, "figures": figures_of(cases)}


def ways(model: Path, folder: Path) -> dict[str, Callable[[int], Step]]:
    """Every way to train, by name: how its nodes are made for a number of rows."""
    found = {name: functools.partial(Step, model, adapter, folder) for name, adapter in LOCAL.items()}
    for (name, adapter), (cut, ranges) in itertools.product(ADAPTERS.items(), RANGES.items()):
        for users in USERS:
            helped = functools.partial(Step, model, adapter, folder, ranges=ranges, users=users)
            found[f"{name}, {cut}, {users} users"] = helped
            if name in MERGED:
                found[f"{name}, {cut}, {users} users, merged"] = functools.partial(helped, merged=True)
    return dict(found)


def figures_of(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """How far merged adapters of all kinds and users are apart, ``(most - least) / least``, by batch size and ranges.

    Once of all that the host holds, which has a bound, and once of what it holds above what it has between two steps.
    """
    found = {}
    for (rows, case), cut in itertools.product(cases.items(), RANGES):
        own = [case[f"{name}, {cut}, {users} users, merged"] for name in MERGED for users in USERS]
        found[f"{SPREAD}, {rows}, {cut}"] = _spread([one["peak_bytes"] for one in own])
        above = [one["peak_bytes"] - one["held_bytes"] for one in own]
        found[f"above_weights_spread, {rows}, {cut}"] = _spread(above)
    return found


def _spread(values: Sequence[int]) -> float:
    return round((max(values) - min(values)) / min(values), 4)


def missed(figures: dict[str, Any]) -> list[str]:
    """The spreads above the bound."""
    found = figures["figures"].items()
    return [f"{name} is {x}, at most {MAX_SPREAD}" for name, x in found if name.startswith(SPREAD) and x > MAX_SPREAD]


def main() -> int:
    """Count, write and print; 1 if a spread is above the bound."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory(prefix="cola-") as folder:
        figures = measure(Path(folder).resolve())
    return conclude(OUT, figures, missed(figures))


if __name__ == "__main__":
    sys.exit(main())
