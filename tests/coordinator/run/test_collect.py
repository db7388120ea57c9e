"""Results of nodes at the end of a run: where they lie, what is read, and what of a hostile node is refused."""

from __future__ import annotations

import dataclasses
import json
import re
import struct
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from safetensors import deserialize
from safetensors.numpy import load, save

from coordinator.run import collect, result_files
from coordinator.run.collect import ExpectedResult, ResultCollector, Results, check_parts
from coordinator.run.result_files import result_folder, same_everywhere, saved_files, saved_part
from ringtune.costs.profile import KindFacts
from ringtune.errors import IntegrityError
from ringtune.models.result_files import ADAPTER_FILE, adapter_result, model_result
from ringtune.run_control import events as rd
from ringtune.schedule.placement import Slice
from ringtune.storage.pieces import Pieces
from ringtune.storage.tensor_files import is_finite
from tests.support.fake_agents import MODEL, block_tensor, job
from tests.support.model_folder import with_header
from tests.support.plans import make_plan


def _part(*users: str) -> Any:
    """What of a plan of the nodes a and b says whose adapters there are."""
    return SimpleNamespace(nodes=("a", "b"), course=SimpleNamespace(user_sets=users))


def test_results_of_own_weights_are_merged_blocks() -> None:
    """Blocks of all nodes in one file beside the head; no adapter is asked for."""
    results = Results()
    files: dict[str, bytes] = defaultdict(bytes)

    def take(event: Any) -> None:
        files[event.file.path] += event.file.chunk

    head = {"head_config.json": b"{}", "model_head.safetensors": save({"h": numpy.ones(1, dtype=numpy.float32)})}
    for node, more in (("a", head), ("b", {})):
        blocks = save({f"bert.encoder.layer.{node}": numpy.ones(2, dtype=numpy.float32)})
        results.take(node, {name: Pieces.of(part) for name, part in {"blocks.safetensors": blocks, **more}.items()})
    wanted = job(adapter__config="full")
    results.send(wanted, take, part=_part())
    assert files.keys() == {"adapter/blocks.safetensors", "adapter/head_config.json", "adapter/model_head.safetensors"}
    assert load(files["adapter/blocks.safetensors"]).keys() == {f"bert.encoder.layer.{node}" for node in "ab"}


def _adapters(users: dict[str, list[str]]) -> dict[str, Pieces]:
    """Files of users with these tensors."""
    return {
        f"users/{user}/adapter.safetensors": Pieces.of(save({name: numpy.ones(2) for name in names}))
        for user, names in users.items()
    }


def test_results_without_a_user_or_a_block_of_theirs_are_refused() -> None:
    """Named before anything is sent: a user gets all blocks or the run has no result."""
    rows: list[tuple[dict[str, list[str]], str]] = [
        ({"anna": ["b.0"]}, "no node sent users/ben/adapter.safetensors; use one version"),
        ({"anna": ["b.0", "b.1"], "ben": ["b.1"]}, "no node sent b.0 of users/ben/adapter.safetensors"),
    ]
    for sent, message in rows:
        results = Results()
        results.take("a", {"adapter_config.json": Pieces.of(b"{}"), **_adapters(sent)})
        wanted, part = job(model__task="causal-lm"), _part("anna", "ben")
        with pytest.raises(IntegrityError, match=re.escape(message)):
            results.send(wanted, lambda event: pytest.fail(str(event)), part=part)


def test_results_have_the_totals_of_each_node() -> None:
    """As they were sent; a node without any is named."""
    results = Results()
    results.take("a", {"totals.json": Pieces.of(b'{"peak_rss_bytes": 7}')})
    assert dict(results.totals()) == {"a": {"peak_rss_bytes": 7}}
    results.take("b", {})
    with pytest.raises(IntegrityError, match=r"totals\.json of node b is not JSON"):
        dict(results.totals())
    # ``Infinity`` and a huge exponent are no figures, for whoever reads a node's JSON
    for text in (b'{"peak_rss_bytes": Infinity}', b'{"cpu_s": 1e999}', json.dumps({"a": float("nan")}).encode()):
        results = Results()
        results.take("b", {"totals.json": Pieces.of(text)})
        with pytest.raises(IntegrityError, match=r"totals\.json of node b is not JSON"):
            dict(results.totals())
    results = Results()
    results.take("b", {"totals.json": Pieces.of(b" " * ((1 << 20) + 1))})
    with pytest.raises(IntegrityError, match=r"node b sent totals\.json of 1,048,577 bytes"):
        dict(results.totals())


PLAN = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"])
WANTED = ExpectedResult(job(), PLAN, MODEL, "a")
HEAD = {"head_config.json": b"{}", "model_head.safetensors": save({"head": numpy.ones(25, dtype=numpy.float32)})}


def blocks(*indices: int, **changes: Any) -> dict[str, Any]:
    """The tensors of some blocks, with others in their place or besides."""
    return {block_tensor(index): numpy.ones(3, dtype=numpy.float32) for index in indices} | changes


def check(node: str, tensors: dict[str, Any] | bytes | None, wanted: ExpectedResult = WANTED, **files: bytes) -> None:
    """Check a run's result in which one node hands in these tensors."""
    sent = {"a": {"adapter.safetensors": save(blocks(0, 1)), **HEAD}, "b": {"adapter.safetensors": save(blocks(2, 3))}}
    if tensors is None:
        del sent[node]["adapter.safetensors"]
    else:
        sent[node]["adapter.safetensors"] = tensors if isinstance(tensors, bytes) else save(tensors)
    sent[node] |= {name.replace("__", "."): content for name, content in files.items()}
    check_parts({name: {k: Pieces.of(v) for k, v in own.items()} for name, own in sent.items()}, wanted)


def _with(value: Any, dtype: Any = numpy.float32, count: int = 3) -> dict[str, Any]:
    return blocks(2) | {block_tensor(3): numpy.full(count, value, dtype=dtype)}


def test_part_that_is_not_as_planned_is_refused() -> None:
    """Parts as planned pass."""
    check("b", blocks(2, 3))
    # Nothing, numbers that are none, other types and shapes, other blocks: the node is named, the text is short
    for tensors, message in BAD_PARTS:
        with pytest.raises(IntegrityError) as caught:
            check("b", tensors)
        text = str(caught.value)
        assert message in text and "node b" in text and len(text) < 600 and text.isprintable(), message
    # The holder alone has the head, so it is the one that lacks
    with pytest.raises(IntegrityError, match=r"node a sent no head_config\.json; .*resume the run"):
        check_parts({"a": {"adapter.safetensors": Pieces.of(save(blocks(0, 1)))}, "b": {}}, WANTED)


BAD_PARTS: list[tuple[dict[str, Any] | bytes | None, str]] = [
    (None, "node b sent no adapter.safetensors"),
    ({}, "0 numbers in block 2, but the plan has 3"),
    (blocks(2), "0 numbers in block 3"),
    (_with(numpy.nan), "'bert.encoder.layer.3.x', which has numbers that are not finite"),
    (_with(-numpy.inf), "not finite"),
    (_with(1.0, numpy.float64), "of type F64 instead of F32"),
    (_with(1, numpy.int32), "of type I32"),
    (_with(1.0, count=4), "of shape [4], but node a has [3] in block 0"),
    (blocks(2, 3, **{"bert.encoder.layer.3.y": numpy.ones(2, dtype=numpy.float32)}), "5 numbers in block 3"),
    (blocks(1, 2, 3), "of a block that it may not send"),
    (blocks(2, 3, **{"bert.embeddings.x": numpy.ones(1, dtype=numpy.float32)}), "which it may not send"),
    (blocks(2, 3, **{f"bert.encoder.layer.{'9' * 900}.x": numpy.ones(1, dtype=numpy.float32)}), "it may not send"),
    (blocks(2, 3, **{"\x1b[2J": numpy.ones(1, dtype=numpy.float32)}), "it may not send"),
    # no files at all: deep, endless, of long names
    ((60_000).to_bytes(8, "little") + b'{"a":' * 10_000 + b"[" * 10_000, "is damaged"),
    (with_header({"a": {"dtype": "F32", "shape": [1 << 70] * 4000, "data_offsets": [0, 4]}}, b"0000"), "is damaged"),
    (with_header({"a" * 70_000: {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"0000"), "is damaged"),
]


def test_long_header_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose header is longer than any part's takes no memory: its first bytes are enough."""
    monkeypatch.setattr(collect, "MAX_HEADER_BYTES", 100)
    read: list[int] = []
    whole = Pieces.of(save(blocks(2, 3)))

    def pieces() -> Any:
        for piece in whole:
            read.append(len(piece))
            yield piece

    content = Pieces(whole.size_bytes, pieces)

    def part(start: int, size: int) -> Pieces:
        read.append(size)
        return whole.part(start, size)

    monkeypatch.setattr(content, "part", part)
    with pytest.raises(IntegrityError, match="its header has"):
        check_parts({"b": {"adapter.safetensors": content}}, WANTED)
    assert sum(read) <= 16


def test_descriptions_are_objects_of_bounded_size() -> None:
    """A config is read whole by everybody later; the head comes from the node that has it."""
    for name, content, message in [
        ("adapter_config__json", b"[" * 100_000, "is not JSON"),
        ("adapter_config__json", b'{"a": Infinity}', "is not JSON"),
        ("head_config__json", b'{"a": 1e999}', "is not JSON"),
        ("head_config__json", b" " * ((1 << 20) + 1), "1,048,577 bytes"),
        ("model_head__safetensors", HEAD["model_head.safetensors"], "it may not send"),
    ]:
        with pytest.raises(IntegrityError, match="node b") as caught:
            check("b", blocks(2, 3), WANTED, **{name: content})
        assert message in str(caught.value)


def test_sizes_of_parts_are_those_of_the_plan() -> None:
    """A head of another task or number of classes is none of this run."""
    with pytest.raises(IntegrityError, match=r"node a sent model_head\.safetensors with 24 numbers outside of blocks"):
        check("a", blocks(0, 1), model_head__safetensors=save({"head": numpy.ones(24, dtype=numpy.float32)}))
    # A user with another kind of adapter has other numbers in a block, as planning counted them
    kind = KindFacts(
        config="linear",
        users=("ben",),
        adapter_block_bytes=8,
        adapter_block_factor_bytes=0,
        pair_token_bytes=0,
        pair_rounded_token_bytes=0,
        pair_projected_token_bytes=0,
        more_activation_token_bytes=0.0,
    )
    wanted = WANTED._replace(model=dataclasses.replace(MODEL, kinds=(kind,)))
    assert [wanted.block_numbers(f"users/{user}/adapter.safetensors") for user in ("anna", "ben")] == [3, 2]
    # What a node may send is bounded by its slice: far below what would fill a disk
    wide = WANTED._replace(part=make_plan([("a", 0, 1), ("b", 1, 4)], ["a", "b"]), holder="b")
    assert wide.most_bytes("a") < WANTED._replace(holder="").most_bytes("a") < wide.most_bytes("b") < 1 << 27


def test_blocks_may_lack_adapters_only_where_the_job_says_so() -> None:
    """With ``leave_out`` a block may have none; more than planned it never has."""
    wanted = WANTED._replace(job=job(adapter__config="seq_bn[leave_out=[3]]"))
    check("b", blocks(2), wanted)
    check("b", None, wanted)
    with pytest.raises(IntegrityError, match="in block 3"):
        check("b", blocks(2, 3, **{"bert.encoder.layer.3.y": numpy.ones(2, dtype=numpy.float32)}), wanted)


def test_unlike_blocks_have_other_tensors_and_at_most_those_of_the_largest() -> None:
    """Of LFM2, whose convolutions have other matrices; but no block lacks all of them."""
    wanted = WANTED._replace(job=job(adapter__config="lora"), model=dataclasses.replace(MODEL, model_type="lfm2"))
    number = numpy.ones(1, dtype=numpy.float32)
    check("b", blocks(2, **{block_tensor(3): number}), wanted)
    with pytest.raises(IntegrityError, match="with 0 numbers in block 3"):
        check("b", blocks(2), wanted)
    with pytest.raises(IntegrityError, match="with 4 numbers in block 3, but the plan has 3"):
        check("b", blocks(2, 3, **{f"{block_tensor(3)}.more": number}), wanted)
    with pytest.raises(IntegrityError, match="of shape"):
        check("b", blocks(2, **{block_tensor(3): number}))


def test_private_blocks_come_from_the_holder_and_replicas_from_the_first() -> None:
    """Who hosts the same as another one sends no block; nobody but the holder sends a private one."""
    plan = make_plan([("a", 1, 4), ("b", 1, 4)], ["a", "b"], private_blocks=1)
    wanted = WANTED._replace(part=plan)
    own = {"adapter.safetensors": save(blocks(0, 1, 2, 3)), **HEAD}
    files: dict[str, dict[str, Pieces]] = {"a": {name: Pieces.of(content) for name, content in own.items()}, "b": {}}
    check_parts(files, wanted)
    with pytest.raises(IntegrityError, match=r"node b sent adapter\.safetensors"):
        check_parts({**files, "b": {"adapter.safetensors": Pieces.of(save(blocks(0)))}}, wanted)


def test_finite_numbers_of_every_type_are_told_from_others() -> None:
    """Also where a number lies across two pieces, and of the largest that there are."""
    for dtype, numbers, found in (
        ("F32", struct.pack("<3f", 1.0, -3.4e38, 0.0), True),
        ("F32", struct.pack("<3f", 1.0, float("nan"), 0.0), False),
        ("F32", struct.pack("<f", float("-inf")), False),
        ("F64", struct.pack("<2d", 1.7e308, -1.7e308), True),
        ("F64", struct.pack("<2d", 0.0, float("inf")), False),
        ("F16", struct.pack("<2e", 65504.0, -1.0), True),
        ("F16", struct.pack("<2e", 1.0, float("inf")), False),
        ("BF16", bytes([0x7F, 0x7F]), True),
        ("BF16", bytes([0x00, 0x3F, 0x80, 0x7F]), False),
        ("BF16", bytes([0xC0, 0xFF]), False),
        ("I64", b"\xff" * 8, True),
        ("F8_E4M3", b"\x00", False),
        ("F32", b"\x00" * 7, False),
    ):
        assert is_finite([numbers], dtype) is found, (dtype, numbers)
        assert is_finite([numbers[:3], memoryview(numbers[3:])], dtype) is found, (dtype, numbers)


def file_of(**tensors: bytes) -> bytes:
    """A safetensors file of float32 vectors, written by the real library."""
    arrays = {name: numpy.frombuffer(data, dtype=numpy.float32) for name, data in tensors.items()}
    return bytes(save(arrays))


def merge(parts: dict[str, bytes]) -> bytes:
    """The merged file of some files."""
    files = {source: {ADAPTER_FILE: Pieces.of(content)} for source, content in parts.items()}
    return bytes(result_files.adapter_folder(files, [ADAPTER_FILE])[ADAPTER_FILE])


def test_merge_keeps_every_byte_whoever_came_first() -> None:
    """The merged file, read by the safetensors library, has each part's tensors unchanged."""
    low, high = struct.pack("<2f", 1.5, -2.0), struct.pack("<3f", 0.25, 1e-30, 7.0)
    merged = merge({"node-1": file_of(a=low), "node-2": file_of(b=high)})
    found = {name: (entry["dtype"], entry["shape"], bytes(entry["data"])) for name, entry in deserialize(merged)}
    assert found == {"a": ("F32", [2], low), "b": ("F32", [3], high)}
    # The same tensors give the same file, whichever node sent which
    one, two = file_of(a=b"\0" * 4), file_of(b=b"\1" * 8)
    assert merge({"x": one, "y": two}) == merge({"x": two, "y": one})
    # A float32 tensor never starts at an odd offset because a byte tensor lies before it
    odd = bytes(save({"a": numpy.frombuffer(b"abc", dtype=numpy.uint8)}))
    merged = merge({"x": odd, "y": file_of(z=b"\0" * 8)})
    (length,) = struct.unpack("<Q", merged[:8])
    header = json.loads(merged[8 : 8 + length])
    assert (8 + length) % 8 == 0
    assert header["z"]["data_offsets"] == [0, 8]
    assert header["a"]["data_offsets"] == [8, 11]
    # A node that hosts nothing sends an empty file
    assert deserialize(merge({"x": file_of()})) == []
    # Two nodes that both claim a block are named
    with pytest.raises(IntegrityError, match="nodes x and y both sent tensor a"):
        merge({"x": file_of(a=b"\0" * 4), "y": file_of(a=b"\0" * 4)})


def test_same_everywhere_names_who_differs() -> None:
    """Configurations of one run have to be equal."""
    assert same_everywhere([("a", b"1"), ("b", b"1")], name="adapter_config.json") == b"1"
    with pytest.raises(IntegrityError, match="nodes a and c"):
        same_everywhere([("a", b"1"), ("b", b"1"), ("c", b"2")], name="adapter_config.json")
    with pytest.raises(IntegrityError, match="no node sent"):
        same_everywhere([], name="adapter_config.json")


def part_of(*names: str, **files: bytes) -> dict[str, Pieces]:
    """What a node hands in of a model: tensors of one number, and small files."""
    weights = bytes(save({name: numpy.ones(2, dtype=numpy.float32) for name in names}))
    return {"model.safetensors": Pieces.of(weights), **{name: Pieces.of(content) for name, content in files.items()}}


LOW = part_of("bert.encoder.layer.0.w", "bert.encoder.layer.1.w")
HIGH = part_of("bert.encoder.layer.2.w", "bert.embeddings.w", "heads.ringtune.1.weight", **{"config.json": b"{}"})


def names_in(content: Pieces) -> set[str]:
    """Names of the tensors in a file."""
    return {name for name, _ in deserialize(bytes(content))}


def test_folder_of_a_result_has_all_parts_and_only_files_that_came() -> None:
    """Weights are merged, the config is there; tokenizer files only as the owner has them."""
    folder = result_folder({"a": LOW, "b": {**HIGH, "vocab.txt": Pieces.of(b"x")}}, model_result())
    assert folder.keys() == {"config.json", "model.safetensors", "vocab.txt"}
    assert names_in(folder["model.safetensors"]) == names_in(LOW["model.safetensors"]) | names_in(
        HIGH["model.safetensors"]
    )
    # Of a family that is plugged in; other results have none, and a second one has to be the same
    adapter, result = Pieces.of(file_of(x=b"1234")), adapter_result("causal-lm", "lora")
    own = {"adapter.safetensors": adapter, "adapter_config.json": Pieces.of(b"{}")}
    assert result_folder({"a": own}, result).keys() == own.keys()
    folder = result_folder({"a": {**own, "adapter_interface.json": Pieces.of(b"{1}")}}, result)
    assert bytes(folder["adapter_interface.json"]) == b"{1}"
    # What no node sent is named
    with pytest.raises(IntegrityError, match=r"no node sent config\.json"):
        result_folder({"a": LOW}, model_result())
    with pytest.raises(IntegrityError, match=r"no node sent model\.safetensors"):
        result_folder({"b": {"config.json": Pieces.of(b"{}")}}, model_result())


@pytest.mark.parametrize("shard_bytes", [1 << 30, 16])
def test_model_goes_back_to_nodes_in_parts(tmp_path: Path, shard_bytes: int) -> None:
    """From one file or several: each node gets the blocks of its slice, an owner also what is in no block."""
    for name, content in result_folder({"a": LOW, "b": HIGH}, model_result(), shard_bytes=shard_bytes).items():
        (tmp_path / name).write_bytes(bytes(content))
    (sent,) = saved_files(tmp_path, model_result()).items()
    assert sent[0] == "model.safetensors"
    (tmp_path / "came").mkdir()
    (tmp_path / "came" / sent[0]).write_bytes(bytes(sent[1]))
    wanted = {
        (0, 2, False): {"bert.encoder.layer.0.w", "bert.encoder.layer.1.w"},
        (2, 3, True): {"bert.encoder.layer.2.w", "bert.embeddings.w", "heads.ringtune.1.weight"},
        (0, 0, True): {"bert.embeddings.w", "heads.ringtune.1.weight"},
        (0, 0, False): set(),
    }
    for (start, stop, is_owner), names in wanted.items():
        piece = Slice(node="n", start=start, stop=stop)
        part = saved_part(tmp_path / "came", model_result(), piece, is_owner=is_owner)
        assert names_in(part["model.safetensors"]) == names


def participants_of(node: Any, hear: Callable[[Any], object] = print) -> Any:
    """A run's only node, and who takes the events of its answers."""
    output = SimpleNamespace(emit=print)
    return SimpleNamespace(calls={"a": node}, output=output, hear=lambda name, events: hear(events))


def test_best_result_before_stays_until_all_have_sent_the_next() -> None:
    """A run that is stopped meanwhile goes on from the one before: its last checkpoint names that."""
    asked: list[set[int]] = []
    node = SimpleNamespace(collect=lambda request, *_, **__: asked.append(set(request.needed_steps)))
    wanted = job(train__method="hift", train__keep_best=True, train__eval_every=2, adapter__config="full")
    collector = ResultCollector(participants_of(node), wanted)
    part = make_plan([("a", 0, 4)], ["a"])
    for number, step in enumerate((4, 8), start=1):
        command = rd.CollectBest("a", step, number, with_head=True, with_private=False)
        collector.carry_out(command, part, needed_steps=(2,))
        if step == 4:
            collector.carry_out(rd.LogBest(step, number), part)
    collector.drop()
    assert asked == [{2}, {2, 4}]


def test_answer_to_an_outdated_request_is_no_part_of_the_best_result() -> None:
    """It comes late, after the nodes were asked for a better one."""
    answers: list[Any] = []
    node = SimpleNamespace(collect=lambda *_, on_result, **__: answers.append(on_result))
    heard: list[rd.Event] = []
    wanted = job(train__keep_best=True, train__eval_every=2)
    collector = ResultCollector(participants_of(node, heard.extend), wanted)
    part = make_plan([("a", 0, 4)], ["a"])
    for number, step in enumerate((4, 8), start=1):
        command = rd.CollectBest("a", step, number, with_head=True, with_private=False)
        collector.carry_out(command, part)
    for answer, content in zip(reversed(answers), (b"new", b"old"), strict=True):
        answer({ADAPTER_FILE: Pieces.of(content)})
    collector.drop()
    assert heard == [rd.BestSent("a", 2), rd.BestSent("a", 1)]
    assert bytes(collector._best._files["a"][ADAPTER_FILE]) == b"new"
