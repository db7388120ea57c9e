"""Copies of the ends of turns: whose, of which run, and how many are kept."""

from __future__ import annotations

import itertools

import pytest

from edge.checkpoint.snapshot_servicer import SnapshotServicer
from edge.checkpoint.snapshots import FILE, SnapshotFile, SnapshotShelf, TurnSnapshots, block_of
from ringtune.errors import FrameError, IntegrityError, RingTuneError, StorageError
from ringtune.schedule.migration import TURNS_KEPT
from ringtune.storage.chunks import cut_pieces
from ringtune.storage.pieces import Pieces
from ringtune.storage.tensor_files import TensorFile, TensorPieces, write_tensors
from ringtune.v1 import control_pb2
from tests.support.cases import cases


def file_of(*blocks: int) -> bytes:
    """A file with a tensor of one byte for each block."""
    found = {f"adapter/{block}.up": TensorPieces("U8", (1,), Pieces.of(bytes([block]))) for block in blocks}
    return bytes(write_tensors(found))


@pytest.fixture
def kept() -> TurnSnapshots:
    """Of node b in a run."""
    found = TurnSnapshots("b")
    found.begin("run")
    return found


def test_kept_turns_join_the_files_of_one_step_and_let_the_oldest_go(kept: TurnSnapshots) -> None:
    """Blocks of two nodes in one part; a step that was let go of is refused by name."""
    steps = [4 * number for number in range(1, TURNS_KEPT + 2)]
    for step in steps:
        kept.keep("run", step, "a", file_of(0, 1))
        kept.keep("run", step, "b", file_of(2))
    assert sorted(TensorFile(kept.part("run", steps[-1], 1, 3), where="it").infos) == ["adapter/1.up", "adapter/2.up"]
    with pytest.raises(FrameError, match=r"node b keeps blocks \[1, 2\] of run run after step 4 no longer"):
        kept.part("run", steps[0], 1, 3)
    kept.rewind(steps[1], 1)
    with pytest.raises(FrameError, match="no longer"):
        kept.part("run", steps[2], 0, 1)


@pytest.mark.parametrize(
    ("changes", "error"),
    [({"run_id": "other"}, FrameError), ({"node": ""}, IntegrityError), ({"run_id": ""}, FrameError)],
)
def test_copies_of_nobody_and_of_other_runs_are_refused(
    kept: TurnSnapshots, changes: dict[str, str], error: type[RingTuneError]
) -> None:
    """Nothing of them is kept."""
    (chunk,) = cut_pieces(FILE, [file_of(0)])
    said = {"run_id": "run", "node": "a", **changes}
    for is_head in (False, True):
        first = control_pb2.KeepChunk(run_id=said["run_id"], node=said["node"], is_head=is_head, step=4, file=chunk)
        with pytest.raises(error):
            SnapshotServicer(SnapshotShelf("b"), kept)._keep(iter([first]), None)
    with pytest.raises(FrameError):
        kept.part("run", 4, 0, 1)
    with pytest.raises(FrameError):
        kept.head("run", 4)


@pytest.mark.promise("2 right version")
@pytest.mark.parametrize("is_head", [False, True])
def test_copies_from_before_a_recovery_are_refused(kept: TurnSnapshots, is_head: bool) -> None:
    """A node that was held for lost goes on for a while; what it trains must not take the place of what counts."""
    servicer, (chunk,) = SnapshotServicer(SnapshotShelf("b"), kept), cut_pieces(FILE, [file_of(0)])

    def send(placement_number: int) -> None:
        first = control_pb2.KeepChunk(
            run_id="run", node="a", step=8, is_head=is_head, file=chunk, placement_number=placement_number
        )
        servicer._keep(iter([first]), None)

    send(0)
    kept.rewind(4, 2)
    with pytest.raises(FrameError, match="takes nothing of placement 1 of run run: it went back before placement 2"):
        send(1)
    send(2)
    kept.drop()
    kept.begin("run")
    send(0)


def test_heads_of_others_are_kept_as_long_as_their_turns_and_no_more_of_them(kept: TurnSnapshots) -> None:
    """A node that sends heads of turns that nobody has done fills no memory."""
    (chunk,) = cut_pieces(FILE, [b"a head"])
    for step in range(4, 4 * 10, 4):
        first = control_pb2.KeepChunk(run_id="run", node="a", is_head=True, step=step, file=chunk)
        SnapshotServicer(SnapshotShelf("b"), kept)._keep(iter([first]), None)
    steps = [step for step in range(4, 4 * 10, 4) if has_head(kept, step)]
    assert steps == [24, 28, 32, 36]
    for step in (32, 36, 40, 44):
        kept.keep("run", step, "b", file_of(0))
    assert [step for step in range(4, 48, 4) if has_head(kept, step)] == [36]
    kept.rewind(32, 1)
    assert not has_head(kept, 36)


def has_head(kept: TurnSnapshots, step: int) -> bool:
    """Whether the head after a step is kept."""
    try:
        return bytes(kept.head("run", step)) == b"a head"
    except FrameError:
        return False


def test_copies_of_a_checkpoint_are_saved_whenever_they_come(kept: TurnSnapshots) -> None:
    """What is here already at once, what comes later before its sender hears of it; this node's own has a shard."""
    saved: list[SnapshotFile] = []
    kept.keep("run", 8, "a", file_of(0))
    kept.keep("run", 8, "b", file_of(2), b"own head")
    kept.save_at(8, saved.append, with_head=False)
    assert saved == [SnapshotFile(8, file_of(0), is_head=False)]
    kept.keep("run", 8, "c", file_of(3))
    kept.keep("run", 12, "a", file_of(0))
    kept.keep_head("run", 8, b"head")
    assert saved[1:] == [SnapshotFile(8, file_of(3), is_head=False), SnapshotFile(8, b"head", is_head=True)]
    kept.save_at(12, saved.append, with_head=True)
    assert saved[3:] == [SnapshotFile(12, file_of(0), is_head=False)]
    kept.drop("run")
    assert kept.everything() == ("", ())


def test_everything_that_is_kept_is_told_with_its_run(kept: TurnSnapshots) -> None:
    """Files of all nodes, and heads."""
    kept.keep("run", 8, "a", file_of(0))
    kept.keep("run", 8, "b", file_of(2), b"head")
    run_id, files = kept.everything()
    wanted = [(8, file_of(0), False), (8, file_of(2), False), (8, b"head", True)]
    assert run_id == "run" and sorted(files) == sorted(wanted)


def test_full_disk_loses_the_copy_of_a_checkpoint_and_not_the_run(kept: TurnSnapshots) -> None:
    """The sender is answered, so that it goes on; a copy that this node does not keep is refused before it arrives."""
    chunks = [control_pb2.KeepChunk(file=chunk) for chunk in cut_pieces(FILE, [file_of(0), file_of(1)])]

    def save(run_id: str, step: int, content: Pieces) -> None:
        raise StorageError("the disk is full")

    def refuse(run_id: str, node: str, step: int) -> None:
        raise FrameError(f"no copy of step {step} of {node}")

    first = control_pb2.KeepChunk(run_id="run", node="a", step=4, is_saved=True, file=chunks[0].file)
    rest = iter(chunks[1:])
    SnapshotServicer(SnapshotShelf("b"), kept, save=save)._keep(itertools.chain([first], rest), None)
    assert next(rest, None) is None
    unread = iter(chunks)
    with pytest.raises(FrameError, match="no copy of step 4 of a"):
        SnapshotServicer(SnapshotShelf("b"), kept, may_save=refuse)._keep(itertools.chain([first], unread), None)
    assert len(list(unread)) == len(chunks)


@cases(
    ("name", "block"),
    [
        ("adapter/3.output.weight", 3),
        ("adapter/4.a/3.output.weight", 3),
        ("moments/anna/12.output.weight/exp_avg", 12),
        ("sums/0.output.weight", 0),
        ("velora/3.output/count", 3),
        ("pairs/lora[alpha=2.0]/3.output", 3),
        ("head", -1),
        ("adapter/embeddings.weight", -1),
    ],
)
def test_block_of_a_tensor_is_in_its_name(name: str, block: int) -> None:
    """Users may have names like blocks, and kinds of adapters have dots."""
    assert block_of(name) == block
