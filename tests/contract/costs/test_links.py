"""Tests of ``ringtune.costs.links``: recorded, blobs, assumed, busy ends."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import pytest

from ringtune.costs.links import (
    LOOPBACK_BYTES_PER_S,
    MAX_BLOB_BYTES,
    MIN_SAMPLES,
    RecordedLinks,
    Transfer,
    busy_rate,
    check_blobs,
    check_parcels,
    loopback_link,
    with_assumed,
)
from ringtune.costs.memory_sizes import Sizes
from ringtune.costs.profile import LinkFacts
from ringtune.errors import CapacityError, PlanError
from ringtune.schedule.course import Course, HelperSettings
from ringtune.schedule.placement import Slice
from ringtune.techniques.offload import helped
from tests.contract.costs.test_full_parameters_costs import plan
from tests.support.cases import cases
from tests.support.plans import changed, make_plan
from tests.support.profiles import ROUND as MODEL

KNOWN = LinkFacts(source="a", target="b", rate_bytes_per_s=12e6, latency_s=0.002)


def recorded(rate: float, *, samples: int = 40, waits: float = 0.5, num_bytes: int = 200_000) -> RecordedLinks:
    """Messages over a link of this rate; every other one also waits for half as long as it takes."""
    links = RecordedLinks()
    for index in range(samples):
        taken_s = num_bytes / rate
        seconds = KNOWN.latency_s + taken_s * (1 + (waits if index % 2 else 0.0))
        links.add("a", "b", num_bytes, seconds, at_s=10.0 * index + seconds)
    return links


@cases(("rate", "shown"), [(5e6, 5e6), (30e6, 30e6), (11.5e6, 12e6)])
def test_link_has_the_rate_that_its_messages_showed(rate: float, shown: float) -> None:
    """Known as 12 MB/s and shaped since, whatever some messages waited for; some percent are no change."""
    (found,) = recorded(rate).links((KNOWN,))
    assert found.rate_bytes_per_s == pytest.approx(shown, rel=0.01)
    assert found.latency_s == KNOWN.latency_s
    assert (found == KNOWN) == (shown == KNOWN.rate_bytes_per_s)


@cases(("rate", "samples", "num_bytes"), [(5e6, MIN_SAMPLES - 1, 200_000), (5e6, 40, 1000), (5e9, 40, 200_000)])
def test_link_keeps_its_rate_where_transfers_say_nothing(rate: float, samples: int, num_bytes: int) -> None:
    """Too few messages, too small ones, or such as are through before the clocks can tell."""
    assert recorded(rate, samples=samples, num_bytes=num_bytes).links((KNOWN,)) == (KNOWN,)


def test_link_through_a_machines_memory_stays_what_it_is() -> None:
    """There messages wait for processors, not for the link."""
    link = loopback_link("a", "b")
    assert recorded(5e6).links((link,)) == (link,)


def test_link_that_was_assumed_is_known_after_a_run() -> None:
    """Beyond the budget of a measurement links are assumed; a run that uses one knows it."""
    assumed = LinkFacts(source="a", target="b", rate_bytes_per_s=5.1e6, latency_s=0.002, is_assumed=True)
    (found,) = recorded(5e6).links((assumed,))
    assert not found.is_assumed and found.rate_bytes_per_s == 5.1e6


def test_links_that_a_run_hardly_used_are_not_shown_by_it() -> None:
    """Of three links one was used enough, and one agrees with its transfers: only those two say what they are now."""
    links = recorded(5e6)
    for index in range(MIN_SAMPLES):
        links.add("b", "a", 200_000, 200_000 / 12e6 + KNOWN.latency_s, at_s=1000.0 + index)
    for index in range(MIN_SAMPLES - 1):
        links.add("a", "c", 200_000, 1.0, at_s=2000.0 + 10 * index)
    known = (KNOWN, dataclasses.replace(KNOWN, source="b", target="a"), dataclasses.replace(KNOWN, target="c"))
    shown = links.shown((*known, loopback_link("a", "d")))
    assert shown == links.links(known)[:2]
    assert shown[0].rate_bytes_per_s == pytest.approx(5e6, rel=0.01)


_AT_NO_TIME: Final = [(0.05, at_s) for at_s in (1e17, -1e300, 1e300, float("inf"), float("nan"))]


@cases(("seconds", "at_s"), [*_AT_NO_TIME, (1e6, 5.0), (float("inf"), 5.0), (float("nan"), 5.0)])
def test_links_leave_out_messages_at_no_time_or_as_slow_as_none(seconds: float, at_s: float) -> None:
    """A time so far away that the seconds of a message are lost in it, or less than 1 byte/s: its links stay."""
    links = RecordedLinks()
    for _ in range(40):
        links.add("a", "b", 200_000, seconds, at_s=at_s)
    assert links.links((KNOWN,)) == (KNOWN,)


def test_links_that_share_a_line_have_the_rate_of_the_line() -> None:
    """Node a sends 200 kB to b and to c at a time over its 5 MB/s: each looks like 2.5, and is 5 when it is alone."""
    links = RecordedLinks()
    known = tuple(dataclasses.replace(KNOWN, target=target, latency_s=0.0) for target in "bc")
    for index in range(20):
        for link in known:
            links.add("a", link.target, 200_000, 400_000 / 5e6, at_s=float(index))
    assert [link.rate_bytes_per_s for link in links.links(known)] == [pytest.approx(5e6)] * 2


def test_link_that_is_held_up_elsewhere_has_no_part_in_a_line() -> None:
    """Node a sends to b at 8 MB/s and to c at 2 at a time: b might have had all 10, c could not."""
    links = RecordedLinks()
    known = tuple(dataclasses.replace(KNOWN, target=target, latency_s=0.0) for target in "bc")
    for index in range(20):
        links.add("a", "b", 800_000, 0.1, at_s=float(index))
        links.add("a", "c", 200_000, 0.1, at_s=float(index))
    assert [link.rate_bytes_per_s for link in links.links(known)] == [pytest.approx(10e6), pytest.approx(2e6)]


def test_links_that_only_share_a_line_keep_their_rates() -> None:
    """Each of two links of 12 MB/s had half of the line: together they carried what is known of either."""
    links = RecordedLinks()
    known = tuple(dataclasses.replace(KNOWN, source=source, latency_s=0.0) for source in "ac")
    for index in range(20):
        for link in known:
            links.add(link.source, "b", 200_000, 400_000 / 11.8e6, at_s=float(index))
    assert links.links(known) == known


BOTH = ("a", "b")
TABLE = 2 * MAX_BLOB_BYTES
ADAPTERS = make_plan([("a", 0, 4)], BOTH, num_steps=8, hidden_size=2).course


def check(course: Course, optimizer: str = "adamw", **sizes: Any) -> None:
    """Check a course with a model of these sizes."""
    model = dataclasses.replace(MODEL, **sizes)
    check_blobs(course, Sizes(course, model, optimizer=optimizer, dtype="float32", activation_token_bytes=200))


def test_tied_table_that_no_link_takes_is_refused_by_name_with_both_numbers() -> None:
    """It travels whole; a smaller batch does not help."""
    table: dict[str, Any] = {"embedding_train_bytes": TABLE, "token_table_bytes": TABLE, "is_tied": True}
    with pytest.raises(PlanError) as refused:
        check(plan(BOTH).course, **table)
    assert str(refused.value) == (
        "the gradient of the embedding, a table tied to the head, has up to 2,048 MiB, a message between owners at "
        "most 1,024 MiB; give one node all rows (data.owners = 1, or --data at one node)"
    )
    check(plan(("b",)).course, **table)
    check(changed(plan(BOTH), num_steps=0).course, **table)


def test_rows_of_a_table_that_no_link_takes_are_refused() -> None:
    """64 tokens of a batch, of 100 rows of 20 MiB; half of them are sent."""
    table: dict[str, Any] = {"embedding_train_bytes": TABLE, "token_table_bytes": TABLE}
    with pytest.raises(PlanError, match=r"gradient of the embedding has up to 1,311 MiB.*; lower train\.batch_size or"):
        check(plan(BOTH).course, **table)
    check(changed(plan(BOTH), max_length=8).course, **table)


def test_head_that_no_link_takes_is_refused() -> None:
    """Its gradient where all trains; with adapters its optimizer state too, which plain steps have not."""
    with pytest.raises(
        PlanError, match=r"the gradient of the head has up to 2,048 MiB, .* at most 1,024 MiB; give one"
    ):
        check(plan(BOTH).course, head_bytes=TABLE)
    with pytest.raises(PlanError, match=r"the head with its optimizer state has up to 1,536 MiB, .*'sgd'"):
        check(ADAPTERS, head_bytes=MAX_BLOB_BYTES // 2)
    check(ADAPTERS, "sgd", head_bytes=MAX_BLOB_BYTES // 2)
    with pytest.raises(PlanError, match=r"has up to 2,048 MiB.* 1,024 MiB; give one node"):
        check(ADAPTERS, "sgd", head_bytes=TABLE)


def test_parcels_of_helpers_that_no_link_takes_are_refused() -> None:
    """A micro-batch's pairs of a block, and its adapters on their way back: host, helper, both numbers and the way."""

    def check_helped(manner: HelperSettings, **sizes: Any) -> None:
        given = helped(make_plan([("a", 0, 4)], ["a"], num_steps=8, hidden_size=2, microbatches=2), {"a": "z"}, manner)
        model = dataclasses.replace(MODEL, **sizes)
        check_parcels(given, Sizes(given.course, model, optimizer="sgd", dtype="float32", activation_token_bytes=200))

    course = make_plan([("a", 0, 4)], ["a"], num_steps=8, hidden_size=2, microbatches=2).course
    most = MAX_BLOB_BYTES // (course.microbatch_sizes()[0] * course.max_length)
    check_helped(HelperSettings(), pair_token_bytes=most)
    with pytest.raises(CapacityError) as refused:
        check_helped(HelperSettings(), pair_token_bytes=2 * most)
    assert str(refused.value) == (
        "the pairs of a's blocks [0, 1) for helper z have up to 2,048 MiB, a message at most 1,024 MiB; raise "
        "train.microbatches, set offload.pairs = 'bfloat16', or leave a's blocks [0, 1) without helper (offload.mode)"
    )
    check_helped(HelperSettings(pairs="bfloat16"), pair_token_bytes=2 * most, pair_rounded_token_bytes=most)
    with pytest.raises(CapacityError, match=r"adapters of a's blocks \[0, 1\) from helper z have up to 2,048 MiB"):
        check_helped(HelperSettings(), adapter_block_bytes=TABLE)


def test_gradients_between_replicas_that_no_link_takes_are_refused() -> None:
    """Where the blocks' own weights train: hosts, blocks, both numbers; a ring of single hosts sends none."""
    ring = make_plan([("a", 0, 4)], ["o"], num_blocks=4, num_steps=8, microbatches=2, method="all")
    both = changed(ring, slices=(Slice(node="a", start=0, stop=4), Slice(node="b", start=0, stop=4)))
    for given, share, refused in ((ring, 2, False), (both, 4, False), (both, 2, True)):
        model = dataclasses.replace(MODEL, adapter_block_bytes=MAX_BLOB_BYTES // share)
        sizes = Sizes(given.course, model, optimizer="sgd", dtype="float32", activation_token_bytes=200)
        if not refused:
            check_parcels(given, sizes)
            continue
        with pytest.raises(CapacityError) as told:
            check_parcels(given, sizes)
        assert str(told.value) == (
            "the gradient of blocks [0, 4), which nodes a, b send each other, has up to 2,048 MiB, a message at most "
            "1,024 MiB; give each other blocks, or take smaller adapters"
        )


def link(source: str, target: str, rate: float) -> LinkFacts:
    """A measured link."""
    return LinkFacts(
        source=source, target=target, rate_bytes_per_s=rate, latency_s=0.01, send_cpu_s_per_byte=rate / 1e9
    )


def test_assumed_link_is_as_fast_as_the_slower_of_its_ends() -> None:
    """Node d sends at 8 at most and c receives at 4 at most, so d to c is 4."""
    known = [link("a", "b", 10.0), link("a", "c", 4.0), link("d", "b", 8.0)]
    machines = {name: name for name in "abcd"}
    found = {(each.source, each.target): each for each in with_assumed("abcd", machines, known)}
    assert len(found) == 12
    assert found["a", "b"] == known[0]
    assert (found["d", "c"].rate_bytes_per_s, found["d", "c"].latency_s) == (4.0, 0.01)
    assert found["d", "c"].is_assumed
    assert found["d", "c"].send_cpu_s_per_byte == 8.0 / 1e9
    assert found["b", "a"].rate_bytes_per_s == 8.0  # nobody knows b's uplink or a's downlink: the median link


def test_links_of_one_machine_are_its_memory() -> None:
    """Nodes a and b are on one machine; whatever is known of others says nothing about them."""
    found = with_assumed("abc", {"a": "x", "b": "x", "c": "y"}, [link("a", "c", 4.0), link("x", "c", 9.0)])
    rates = {(each.source, each.target): each.rate_bytes_per_s for each in found}
    assert rates["a", "b"] == rates["b", "a"] == LOOPBACK_BYTES_PER_S
    assert rates["b", "c"] == rates["c", "a"] == 4.0


SLOW = [Transfer(10.0 * at, 10.0 * at + 1, 1_000_000) for at in range(3)]


@cases(
    ("transfers", "rate"),
    [
        ([], 0.0),
        # of 4 MB/s each, 100 ms long, they overlap by 75 ms and count together
        ([Transfer(0.025, 0.125, 400_000), Transfer(0.0, 0.1, 400_000)], 6.4e6),
        # however long the line rests between them
        (SLOW, 1e6),
        # something else stood in the way of the slow ones; a flash of 10 ms is nothing
        ([*SLOW, Transfer(50.0, 51.0, 3_000_000), Transfer(60.0, 60.01, 900_000)], 3e6),
    ],
)
def test_rate_of_a_line_is_that_of_the_best_quarter_of_its_busy_time(transfers: list[Transfer], rate: float) -> None:
    """Nothing is known of a line without transfers; pauses do not count."""
    assert busy_rate(transfers) == pytest.approx(rate)
