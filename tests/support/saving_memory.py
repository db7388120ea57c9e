"""What saving, loading, handing over and collecting add at their peak: ``python -m tests.support.saving_memory``.

A process of its own builds an owner with a head of some 17 million weights, gives it gradients and moments, and prints
one line of JSON: how far the resident memory rose above what was there before, for each thing that a node does with
its head, and the bytes that were moved. Then the same for an owner whose embedding of some 6 million weights trains
with all else: to hand its part of the model in, to merge parts, to load its part again, and to take digests. Before
all that, what forward and backward of a decoder's head add (``tests.support.head_memory``).
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from coordinator.run.result_files import adapter_folder, result_folder, saved_part
from edge.checkpoint.shard_saver import Saver
from edge.machine.resources import peak_rss_bytes, release_memory, reset_peak, return_freed_memory, rss_bytes
from edge.model.result import load_saved, result_files
from edge.runtime.executor import NodeExecutor
from edge.transport import frames
from ringtune.models.result_files import ADAPTER_FILES, PART_FILES, model_result
from ringtune.schedule.actions import Payload
from ringtune.schedule.placement import Slice
from ringtune.schedule.plan import Plan
from ringtune.storage.chunks import cut_pieces, write_any_files
from ringtune.storage.pieces import FilePieces, Pieces
from tests.support import hand_ring, head_memory, tiny, whole_models
from tests.support.tiny_families import write_tokenizer

WIDTH = 2048
WORDS = 3000
RUN = "r20260101-000000-00000000"


def owner_of(folder: Path) -> tuple[NodeExecutor, Plan]:
    """An owner without a slice, with a large head that was updated once."""
    model = tiny.write_bert(
        folder / "model", vocab_size=200, hidden_size=WIDTH, num_blocks=1, num_heads=4, intermediate_size=16
    )
    write_tokenizer(model, padding_side="right", with_types=True)
    job = hand_ring.make_job(model, model__dtype="float32")
    datasets = hand_ring.make_datasets(job, model, folder, ("a",))
    plan = hand_ring.make_plan(job, datasets, {"b": (0, 1)}, num_blocks=1, hidden_size=WIDTH)
    owner = NodeExecutor(plan, "a", job, model, datasets["a"])
    parts: Any = owner._hosted.owner
    for parameter in parts.head.parameters():
        parameter.grad = torch.ones_like(parameter)
    parts.optimizers.update([plan.course.head], 0.01)
    return owner, plan


def rise(work: Callable[[], object]) -> int:
    """Bytes by which the resident memory rose at most while ``work`` ran."""
    release_memory()
    reset_peak()
    before = rss_bytes()
    work()
    return peak_rss_bytes() - before


def exhaust(items: Iterable[object]) -> None:
    """Go through all of it."""
    for _ in items:
        pass


def hand_over(owner: NodeExecutor, hello: frames.Hello) -> Pieces:
    """Send the head as a link does, and put it together as a link does."""
    blob = owner.head_blob()
    assembler = frames.Assembler(lambda header: None, lambda header: None)
    messages = frames.messages(frames.blob_header(hello, Payload.HEAD, 1, blob), blob)
    received = [fed.received for fed in map(assembler.feed, messages) if fed.received is not None]
    return received[0].blob


def main() -> None:
    """Measure all of it."""
    torch.set_num_threads(1)
    decoder_rise_bytes = head_memory.rise_bytes()
    # as a node without room for freed memory does: bytes that are held count, and not which free parts of the heap
    return_freed_memory()
    hello = frames.Hello(run_id=RUN, placement_number=0, source="a", digest="d", wire_dtype="float32")
    with tempfile.TemporaryDirectory(prefix="ringtune-test-") as name:
        folder = Path(name)
        owner, plan = owner_of(folder)
        saver = Saver(folder / "state", RUN, plan, "a")
        saver.open()
        saver.save(2, owner, with_head=True)  # once, so that what is loaded at first use is there
        (folder / "came").mkdir()
        gc.collect()
        gc.freeze()  # else each measurement looks at all objects of the libraries again
        shard, _ = saver.save(4, owner, with_head=True)
        found = {"save": rise(lambda: saver.save(4, owner, with_head=True))}
        found["load"] = rise(lambda: saver.load(4, shard.sha256, owner, with_head=True))
        found["send_head"] = rise(
            lambda: exhaust(
                frames.messages(frames.blob_header(hello, Payload.HEAD, 1, owner.head_blob()), owner.head_blob())
            )
        )
        held: list[Pieces] = [hand_over(owner, hello)]
        owner.drop_head_state()
        found["take_head"] = rise(lambda: owner.load_head_blob(held[0]))
        files = owner.adapter_files(with_head=True)
        chunks = (chunk for path, content in sorted(files.items()) for chunk in cut_pieces(path, content))
        came: dict[str, Path] = {}
        found["collect"] = rise(
            lambda: came.update(
                write_any_files(chunks, folder / "came", names=ADAPTER_FILES, max_bytes=1 << 30, source="node a")
            )
        )
        own: dict[str, Pieces] = {name: FilePieces(path) for name, path in came.items()}
        sent = {"a": own, "b": {"adapter.safetensors": _empty()}}
        found["merge"] = rise(lambda: exhaust(map(exhaust, adapter_folder(sent, ADAPTER_FILES).values())))
        moved = {"shard_bytes": shard.size_bytes, "head_bytes": came["model_head.safetensors"].stat().st_size}
        saver.close()
        owner.drop_head_state()
        found |= of_a_model(folder)
    rises = {f"{key}_rise_bytes": value for key, value in found.items() if not key.endswith("_bytes")}
    print(json.dumps({**moved, "model_bytes": found["model_bytes"], "decoder_rise_bytes": decoder_rise_bytes, **rises}))  # noqa: T201


def of_a_model(folder: Path) -> dict[str, int]:
    """Measure what is done with a whole model, whose largest tensor is the token table."""
    model = tiny.write_bert(
        folder / "whole", vocab_size=WORDS, hidden_size=WIDTH, num_blocks=1, num_heads=4, intermediate_size=16
    )
    write_tokenizer(model, padding_side="right", with_types=True)
    task = "sequence-classification"
    skeleton = whole_models.hosted(model, task, range(1), is_owner=True, trained=False)
    result, came = model_result(), folder / "parts"
    came.mkdir()

    def collect() -> None:
        files = result_files(skeleton, task, model, without_blocks=(), with_head=True)
        chunks = (chunk for path, content in sorted(files.items()) for chunk in cut_pieces(path, content))
        write_any_files(chunks, came, names=PART_FILES, max_bytes=1 << 30, source="node a")

    found = {"collect_model": rise(collect)}
    own: dict[str, Pieces] = {path.name: FilePieces(path) for path in came.iterdir()}
    found["merge_model"] = rise(lambda: exhaust(map(exhaust, result_folder({"a": own}, result).values())))
    (folder / "again").mkdir()
    piece = Slice(node="a", start=0, stop=1)

    def load() -> None:
        parts = saved_part(came, result, piece, is_owner=True)
        chunks = (chunk for path, content in parts.items() for chunk in cut_pieces(path, content))
        write_any_files(chunks, folder / "again", names=PART_FILES, max_bytes=1 << 30, source="the coordinator")
        load_saved(skeleton, task, folder / "again", with_head=True)

    found["load_model"] = rise(load)
    return {**found, "model_bytes": (came / "model.safetensors").stat().st_size}


def _empty() -> Pieces:
    from safetensors.torch import save

    return Pieces.of(save({}))


if __name__ == "__main__":
    main()
