"""Who has what a run goes on from: shards, copies, attempts, and what is missing with whom to ask."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from ringtune.run_control.checkpoint import CheckpointHolders, CheckpointManifest, SavedPart, Shard
from ringtune.schedule.migration import Source
from ringtune.schedule.placement import Placement, Slice
from tests.support.cases import cases
from tests.support.plans import make_plan

RUN, OTHER = "r20260101-000000-00000000", "r20260101-000000-11111111"
PLAN = make_plan([("a", 0, 2), ("b", 2, 4), ("c", 4, 6)], ["a", "b"], num_blocks=6, num_steps=20, method="all")
STEP = 8
SHA = {node: f"{number}d" * 32 for number, node in enumerate(PLAN.nodes)}


def manifest(*, with_shards: bool = True, attempt: str = RUN, step: int = STEP) -> CheckpointManifest:
    """A checkpoint, or the end of a turn."""
    return CheckpointManifest(
        run_id=RUN,
        plan_digest=PLAN.digest,
        job_digest="",
        model_digest="",
        step=step,
        holder="b",
        shards=tuple(Shard(node=node, sha256=SHA[node], size_bytes=1) for node in PLAN.nodes) if with_shards else (),
        attempt=attempt,
    )


def where(
    parts: Mapping[str, Sequence[SavedPart]],
    problems: Mapping[str, str] | None = None,
    *,
    of: CheckpointManifest | None = None,
) -> CheckpointHolders:
    """Who has what; nodes that are not among the problems are not there, empty = their shard is whole."""
    told = {node: {STEP: problem} for node, problem in (problems or {}).items()}
    return CheckpointHolders(of or manifest(), PLAN.course, PLAN.placement, parts, told)


def copy(*blocks: int, attempt: str = RUN, step: int = STEP) -> SavedPart:
    """A file beside shards."""
    return SavedPart(step, attempt, blocks)


HEAD = SavedPart(STEP, RUN, has_head=True)
ALL_THERE = {"a": "", "b": "", "c": ""}


def test_each_node_takes_its_own_shard_where_all_are_whole() -> None:
    """Also where there are copies; the head is at its holder."""
    found = where({"a": [copy(4, 5), HEAD]}, ALL_THERE)
    assert found.why_not(["a", "b"]) == ""
    assert found.sources(PLAN.placement, "c") == (Source("c", 4, 6, SHA["c"]),)
    assert found.head_at(["a", "b"]) == ("b", SHA["b"])


@cases("problems", [{"a": "", "b": ""}, {"a": "", "b": "", "c": "c has no shard"}])
def test_blocks_of_a_lost_disk_come_from_the_copy(problems: dict[str, str]) -> None:
    """The node is not there, or its disk is empty: the copy is at the next host."""
    found = where({"a": [copy(4, 5)]}, problems)
    assert found.why_not(["a", "b"]) == ""
    assert found.sources(PLAN.placement, "c") == (Source("a", 4, 6),)


def test_other_placement_takes_blocks_from_whoever_has_them() -> None:
    """What a node has goes first, be it a file; blocks of one shard that are neighbours are one range."""
    placement = Placement(slices=(Slice(node="b", start=0, stop=3), Slice(node="a", start=3, stop=6)))
    found = where({"a": [copy(4, 5), HEAD]}, ALL_THERE)
    assert found.sources(placement, "b") == (Source("a", 0, 2, SHA["a"]), Source("b", 2, 3, SHA["b"]))
    assert found.sources(placement, "a") == (Source("b", 3, 4, SHA["b"]), Source("a", 4, 6))
    assert found.head_at(["a"]) == ("a", ""), "the holder has no rows any more"
    alone = Placement(slices=(Slice(node="b", start=0, stop=6),))
    sources = where({"b": [copy(4, 5)]}, {"a": "", "b": ""}).sources(alone, "b")
    assert sources[1:] == (Source("b", 2, 4, SHA["b"]), Source("b", 4, 6))


def test_blocks_that_were_not_trained_are_no_matter() -> None:
    """The end of a turn has no shards: after 4 steps of a run that unfreezes later, all that is needed is in files."""
    ringada = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], every_steps=100, num_steps=200)
    low = dataclasses.replace(manifest(with_shards=False), step=4)
    files = [SavedPart(4, RUN, (3,)), SavedPart(4, RUN, has_head=True)]
    found = CheckpointHolders(low, ringada.course, ringada.placement, {"b": files}, {})
    assert found.why_not(["a", "b"]) == "" and found.sources(ringada.placement, "a") == ()


def test_head_is_at_another_owner_where_its_holder_is_gone() -> None:
    """The copy is at the next owner, else at a host."""
    parts = {"a": [HEAD], "c": [copy(2, 3), HEAD]}
    found = where(parts, {"a": "", "c": ""})
    assert found.head_at(["a"]) == ("a", "")
    assert found.why_not(["a"]) == ""
    alone = where({"c": [copy(2, 3), HEAD]}, {"a": "", "c": ""})
    assert (alone.why_not(["a"]), alone.head_at(["a"])) == ("", ("c", ""))
    nobody = where({"c": [copy(2, 3)]}, {"a": "", "c": ""})
    assert nobody.why_not(["a"]) == "no joined node has the head, which node b had, or a copy of it"


def test_what_nobody_has_is_named_with_who_had_it() -> None:
    """Two neighbours are gone at once."""
    assert where({"a": [HEAD]}, {"a": ""}).why_not(["a"]) == (
        "no joined node has the trained tensors of blocks 2, 3, 4, 5, which node b, c had, or copies of them"
    )
    assert where({}, {"a": "", "b": "", "c": "torn"}).missing == (4, 5)


@cases("attempt", [OTHER, ""])
def test_files_of_another_attempt_or_step_are_not_mixed_in(attempt: str) -> None:
    """A run that left an owner out comes to the same step with other weights; a manifest may not know its attempt."""
    of = manifest(attempt=attempt)
    assert where({"a": [copy(4, 5)]}, {"a": "", "b": ""}, of=of).missing == (4, 5)
    assert where({"a": [copy(4, 5, step=6)]}, {"a": "", "b": ""}).missing == (4, 5)
    assert where({"a": [copy(4, 5, attempt=attempt)]}, {"a": "", "b": ""}).missing == (4, 5)
