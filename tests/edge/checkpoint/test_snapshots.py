"""Copies of the ends of turns: whose, of which run, and how many are kept."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edge.checkpoint import snapshot_servicer
from edge.checkpoint.snapshot_servicer import SnapshotServicer
from edge.checkpoint.snapshots import FILE, SnapshotFile, SnapshotShelf, TurnSnapshots, block_digests
from edge.checkpoint.turn_snapshots import TurnSnapshotter
from edge.transport.access import RunAccess
from ringtune.errors import FrameError, IntegrityError, StorageError, TrustError
from ringtune.schedule.access import CopyBytes
from ringtune.schedule.methods.hift import Hift
from ringtune.schedule.migration import TURNS_KEPT, trained_blocks
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Turn, turn_sequence
from ringtune.storage.chunks import cut_pieces
from ringtune.storage.pieces import Pieces
from ringtune.storage.tensor_files import TensorFile, TensorPieces, write_tensors
from ringtune.transport.parties import Party, node_party
from ringtune.v1 import control_pb2
from tests.support.plans import make_plan


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


PLAN = make_plan([("a", 0, 3), ("b", 3, 4)], ["a", "b"], num_steps=40, local_iterations=4).with_copies(True)


def servicer_of(kept: TurnSnapshots, placement_number: int = 0, **options: Any) -> SnapshotServicer:
    """Of node b in a placement of the plan, in which it has copies of what node a trains."""
    access, placement = RunAccess("b"), dataclasses.replace(PLAN.placement, placement_number=placement_number)
    course = options.pop("course", PLAN.course)
    access.place("run", Plan(course, (placement,)), None)
    return SnapshotServicer(SnapshotShelf("b"), kept, access, **options)


def send(servicer: SnapshotServicer, content: bytes, caller: Party | None = None, **changes: Any) -> None:
    """Send a copy to node b: of blocks or the head of node a after step 4, unless something is changed."""
    first: dict[str, Any] = {"run_id": "run", "node": "a", "step": 4, **changes}
    chunks = cut_pieces(FILE, [content])
    messages = (control_pb2.KeepChunk(file=chunk, **(first if not at else {})) for at, chunk in enumerate(chunks))
    servicer._keep(iter(messages), caller)


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


STRANGER = node_party("z")


@pytest.mark.promise("2 right version")
@pytest.mark.parametrize(
    ("changes", "content", "why"),
    [
        ({"node": ""}, file_of(0), "the run gives it no part"),
        ({"node": "z"}, file_of(0), "the run gives it no part"),
        ({"node": "b"}, file_of(0), "the run gives it no part"),
        ({"caller": STRANGER}, file_of(0), "speaks as node 'a'"),
        ({"caller": STRANGER, "node": "z"}, file_of(0), "the run gives it no part"),
        ({"placement_number": 1}, file_of(0), "its part is in placement 0"),
        ({"step": 5}, file_of(0), "at ends of turns after step 0, up to step 40"),
        ({"step": 0}, file_of(0), "at ends of turns after step 0, up to step 40"),
        ({"step": 44}, file_of(0), "at ends of turns after step 0, up to step 40"),
        ({"is_saved": True}, file_of(0), "its part is ends of turns"),
        ({}, file_of(2, 3), r"blocks \[2, 3\] after step 4 .*: its part is blocks \[0, 1, 2\]"),
        ({}, file_of(*range(9)), "its part is blocks"),
    ],
)
def test_copies_that_the_run_does_not_have_are_refused(
    kept: TurnSnapshots, changes: dict[str, Any], content: bytes, why: str
) -> None:
    """Whoever sends them: nothing of them is kept, and neither evicts what is."""
    servicer = servicer_of(kept)
    send(servicer, file_of(0, 1, 2))
    for is_head in (False, True):
        if is_head and not changes:
            continue  # a head has no blocks
        with pytest.raises(TrustError, match=why if not is_head else None):
            send(servicer, content, **{"caller": None, "is_head": is_head, **changes})
    (file,) = kept.everything()[1]
    assert (file.step, file.content) == (4, file_of(0, 1, 2))
    with pytest.raises(FrameError, match="prepare it first"):
        send(servicer, content, run_id="other")


def test_copy_arrives_twice_and_another_one_does_not(kept: TurnSnapshots) -> None:
    """A sender that got no answer sends the same again; a second one that differs takes no place."""
    servicer = servicer_of(kept)
    for _ in range(2):
        send(servicer, file_of(0, 1))
        send(servicer, b"a head", is_head=True)
    with pytest.raises(TrustError, match=r"has another copy of blocks .* of node a already"):
        send(servicer, file_of(0))
    with pytest.raises(TrustError, match="has another copy of the head after step 4"):
        send(servicer, b"another head", is_head=True)
    assert kept.everything()[1] == (SnapshotFile(4, file_of(0, 1), False), SnapshotFile(4, b"a head", True))


@pytest.mark.promise("2 right version")
@pytest.mark.parametrize(("is_head", "is_saved"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(
    ("left_out", "why"),
    [(slice(2, None), "is not complete"), (slice(1, 2), "its digest differs"), (slice(None), "prepare it first")],
)
def test_copies_that_end_short_are_refused(
    kept: TurnSnapshots, is_head: bool, is_saved: bool, left_out: slice, why: str
) -> None:
    """Their stream ends without an error, but before the last message, within the file, or before it begins."""
    saved: list[Pieces] = []
    method = Hift() if is_saved else PLAN.course.method
    course = dataclasses.replace(PLAN.course, method=method)
    servicer = servicer_of(kept, course=course, save=lambda run_id, step, content: saved.append(content))
    content = bytes(write_tensors({"adapter/0.up": TensorPieces("U8", (5 << 19,), Pieces.of(bytes(5 << 19)))}))
    first: dict[str, Any] = {"run_id": "run", "node": "a", "step": 4, "is_head": is_head, "is_saved": is_saved}
    messages = [
        control_pb2.KeepChunk(file=chunk, **(first if not at else {}))
        for at, chunk in enumerate(cut_pieces(FILE, [content]))
    ]
    assert len(messages) == 3
    del messages[left_out]
    with pytest.raises((IntegrityError, FrameError), match=why):
        servicer._keep(iter(messages), None)
    assert (saved, kept.everything()[1]) == ([], ())


@pytest.mark.promise("6 every wait ends")
def test_copies_that_never_end_are_refused(kept: TurnSnapshots) -> None:
    """Chunks without a byte, as many as there are: they would keep this node at work."""
    empty = control_pb2.KeepChunk(run_id="run", node="a", step=4, file=control_pb2.FileChunk(path=FILE))
    with pytest.raises(IntegrityError, match="node a has sent 0 bytes in 1,025 chunks"):
        servicer_of(kept)._keep(itertools.repeat(empty), None)


@pytest.mark.promise("7 bounded memory")
def test_fetches_that_are_not_read_keep_the_content_of_four(
    kept: TurnSnapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that reads none of them would hold what was kept of any number of turns; a fifth call waits."""
    monkeypatch.setattr(snapshot_servicer, "_LOOK_S", 0.01)
    made, access = list[int](), RunAccess("b")
    access.place("run", PLAN, None)
    access.audit("run", PLAN)

    def audited(request: control_pb2.SnapshotRequest) -> Pieces:
        made.append(request.cell.turn)
        return Pieces.of(bytes(3 << 20))

    servicer = SnapshotServicer(SnapshotShelf("b"), kept, access, audited=audited)

    def begun(turn: int) -> Iterator[control_pb2.FileChunk]:
        request = control_pb2.SnapshotRequest(node="a", run_id="run", is_audit=True)
        request.cell.turn = turn
        context = SimpleNamespace(auth_context=dict, is_active=lambda: False)
        chunks = servicer.Fetch(request, cast(Any, context))
        next(chunks, None)
        return chunks

    held = [begun(turn) for turn in range(5)]
    assert made == [0, 1, 2, 3]
    held.pop(0)
    begun(5)
    assert made == [0, 1, 2, 3, 5]


@pytest.mark.promise("7 bounded memory")
def test_copies_are_as_large_as_planned_at_most(kept: TurnSnapshots) -> None:
    """A sender ends where the planned bytes and room for names are used up, before memory is."""
    servicer = servicer_of(kept)
    servicer._access.place("run", PLAN, None, CopyBytes(block=1000, head=100))
    send(servicer, file_of(0, 1, 2))
    send(servicer, b"a head", is_head=True)
    for is_head, most in ((False, 3_000 + 4 * 65_536), (True, 100 + 65_536)):
        with pytest.raises(IntegrityError, match=f"sends more than {most} B"):
            send(servicer, bytes(most + 1), step=8, is_head=is_head)


@pytest.mark.promise("2 right version")
@pytest.mark.parametrize("is_head", [False, True])
def test_copies_from_before_a_recovery_are_refused(kept: TurnSnapshots, is_head: bool) -> None:
    """A node that was held for lost goes on for a while; what it trains must not take the place of what counts."""

    def sent(placement_number: int) -> None:
        servicer = servicer_of(kept, placement_number)
        send(servicer, file_of(0), step=8, is_head=is_head, placement_number=placement_number)

    sent(0)
    kept.rewind(4, 2)
    with pytest.raises(FrameError, match="takes nothing of placement 1 of run run: it went back before placement 2"):
        sent(1)
    sent(2)
    kept.drop()
    kept.begin("run")
    sent(0)


def test_heads_of_others_are_kept_as_long_as_their_turns_and_no_more_of_them(kept: TurnSnapshots) -> None:
    """Memory for three turns, and one that is not done here yet."""
    for step in range(4, 4 * 10, 4):
        send(servicer_of(kept), b"a head", step=step, is_head=True)
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


def test_digest_of_a_block_is_of_its_tensors_alone() -> None:
    """It is the same in any file with the block, and changes with a name, a type, a shape or a byte of it."""

    def digest(
        name: str = "adapter/1.up", dtype: str = "U8", shape: tuple[int, ...] = (2,), data: bytes = b"12"
    ) -> str:
        tensors = {
            name: TensorPieces(dtype, shape, Pieces.of(data)),
            "adapter/1.a": TensorPieces("U8", (), Pieces.of(b"0")),
        }
        (alone,) = block_digests(write_tensors(tensors)).values()
        others = {"adapter/0.up": TensorPieces("F32", (), Pieces.of(b"4444")), "moment/2.up": tensors[name]}
        assert block_digests(write_tensors(tensors | others))[1] == alone
        return alone

    found = [
        digest(),
        digest(name="moment/1.up"),
        digest(dtype="I8"),
        digest(shape=(1, 2)),
        digest(data=b"13"),
        digest(name="adapter/1.b"),
    ]
    assert len(set(found)) == len(found) and digest() == found[0]


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


def test_full_disk_loses_the_copy_of_a_checkpoint_and_not_the_run(kept: TurnSnapshots) -> None:
    """The sender is answered, so that it goes on; a copy that this node does not keep is refused before it arrives."""
    chunks = [control_pb2.KeepChunk(file=chunk) for chunk in cut_pieces(FILE, [file_of(0), file_of(1)])]
    course = dataclasses.replace(PLAN.course, method=Hift())

    def save(run_id: str, step: int, content: Pieces) -> None:
        raise StorageError("the disk is full")

    first = control_pb2.KeepChunk(run_id="run", node="a", step=4, is_saved=True, file=cut_once(file_of(0)))
    servicer_of(kept, course=course, save=save)._keep(iter([first]), None)
    unread = iter(chunks)
    with pytest.raises(TrustError, match="no part in this call"):
        servicer_of(kept, course=course)._keep(
            itertools.chain([control_pb2.KeepChunk(run_id="run", node="z")], unread), None
        )
    assert len(list(unread)) == len(chunks)


def cut_once(content: bytes) -> control_pb2.FileChunk:
    """The only message of a short file."""
    (chunk,) = cut_pieces(FILE, [content])
    return chunk


def ended_turn(plan: Plan, turn: Turn) -> tuple[list[Any], list[Mapping[int, str]]]:
    """Let node a end a turn; return the copies that it sends, and what it tells once they have arrived."""
    sent, told = list[Any](), list[Mapping[int, str]]()
    sender: Any = SimpleNamespace(start=lambda: None, put=sent.append)
    executor: Any = SimpleNamespace(head_blob=lambda: Pieces.of(b"a head"))
    made = TurnSnapshotter(
        "run", "a", plan, executor, TurnSnapshots("a"), make_file=lambda _, blocks, of: file_of(*blocks), sender=sender
    )
    made.end(turn, told.append)
    for copy in sent:
        assert told == []
        copy.then()
    return sent, told


def test_what_others_keep_is_told_with_its_digests() -> None:
    """Of the trained blocks and the head that went out, once they have arrived; of a turn without copies nothing."""
    told: list[Mapping[int, str]] = []
    for plan in (PLAN, make_plan([("a", 0, 4)], ["a"], num_steps=40, local_iterations=4).with_copies(True)):
        told += ended_turn(plan, next(turn for turn in turn_sequence(plan.course) if turn.owner == "a"))[1]
    blocks = trained_blocks(PLAN.course, PLAN.placement, "a", next(turn_sequence(PLAN.course)))
    assert blocks == (2,)
    head = {PLAN.course.head: hashlib.sha256(b"a head").hexdigest()}
    assert told == [{**head, **block_digests(Pieces.of(file_of(*blocks)))}, {}]


def test_each_holder_gets_one_file_and_the_turn_is_done_with_the_last_one() -> None:
    """Two copies of host a's blocks at b and c, of owner a's head at b, the next owner, and the host c."""
    slices = [("a", 0, 2), ("b", 2, 3), ("c", 3, 4)]
    plan = make_plan(slices, ["a", "b"], method="all", num_steps=40, local_iterations=4).with_copies(True, 2)
    sent, told = ended_turn(plan, next(turn_sequence(plan.course)))
    assert [(copy.holder, copy.is_head) for copy in sent] == [("b", True), ("c", True), ("b", False), ("c", False)]
    assert [bytes(copy.content()) for copy in sent[2:]] == [file_of(0, 1)] * 2
    head = {plan.course.head: hashlib.sha256(b"a head").hexdigest()}
    assert told == [{**head, **block_digests(Pieces.of(file_of(0, 1)))}]


def test_copies_of_turns_to_come_take_nobodys_place(kept: TurnSnapshots) -> None:
    """A neighbour may send them before this node is granted the turns; it loses its own alone."""
    servicer = servicer_of(kept)
    for step in (4, 8):
        kept.keep("run", step, "b", file_of(3))
        kept.keep("run", step, "c/part", file_of(2))
    for step in range(12, 40, 4):
        send(servicer, file_of(0), step=step)
    for step in (4, 8):
        assert bytes(kept.part("run", step, 2, 4))
    assert sorted({file.step for file in kept.everything()[1]}) == [4, 8, 28, 32, 36]
    for step in (32, 36, 40):
        kept.keep("run", step, "b", file_of(3))
    assert sorted({file.step for file in kept.everything()[1]}) == [32, 36, 40]


def test_head_of_a_granted_turn_is_taken_of_its_owner_alone(kept: TurnSnapshots) -> None:
    """Another owner may send heads too, but not in place of this one's."""
    servicer = servicer_of(kept)
    servicer._access.granted(itertools.islice(turn_sequence(PLAN.course), 2))
    kept.keep("run", 8, "b", file_of(3), b"own head")
    send(servicer, b"a head", is_head=True)
    with pytest.raises(TrustError, match="the turn is that of node b"):
        send(servicer, b"a head", step=8, is_head=True)
    assert [bytes(kept.head("run", step)) for step in (4, 8)] == [b"a head", b"own head"]


@pytest.mark.promise("7 bounded memory")
def test_disk_takes_copies_of_checkpoints_and_of_two_more_steps(kept: TurnSnapshots) -> None:
    """Where the user stops the run, and after a recovery; not of every turn."""
    saved: list[int] = []
    course = dataclasses.replace(PLAN.course, method=Hift(), checkpoint_every=16)
    servicer = servicer_of(kept, course=course, save=lambda run_id, step, content: saved.append(step))
    for step in range(4, 44, 4):
        if step in (4, 8, 16, 32, 40):
            send(servicer, file_of(0), step=step, is_saved=True)
        else:
            with pytest.raises(TrustError, match="no checkpoint is due there"):
                send(servicer, file_of(0), step=step, is_saved=True)
    assert saved == [4, 8, 16, 32, 40]
