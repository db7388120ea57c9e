"""Rates of links, assumed or recorded in a run, and the largest message that a link accepts.

``with_assumed`` completes links that were not measured. Links within one machine use its memory and never limit a ring,
so they are not measured for a run. The number of links grows with the square of the nodes; one that was not measured in
time has the rate of its slower end::

    a -> b 10 MB/s, a -> c 4 MB/s, d -> b 8 MB/s        d -> c: d sends at 8, c receives at 4, so 4 MB/s

``busy_rate``: a node has one line up and one down. Concurrent messages share it, so each looks slow; the line's rate is
all bytes of a busy period over its seconds::

    to b  |----- 400 kB -----|                        100 ms each, 4 MB/s by itself
    to c       |----- 400 kB -----|                   together 800 kB in 125 ms: 6.4 MB/s

``RecordedLinks``: transfers of a run replace the measured rates. A receiver reports the seconds of each message, from
its sending or from the end of the message before it on the same link. A busy processor lengthens them and never
shortens them, so the rate is the third quartile of the messages' rates.

Messages of several links that share a node's line look slow, and the simulator would divide the line a second time. TCP
divides a line evenly: a link with about the largest share could have the whole busy rate of the line when alone; one
with far less is limited elsewhere::

    a -> b 2.5 MB/s, a -> c 2.5: 5 for each, alone        a -> b 8 MB/s, a -> c 2: 10 for b, but 2 for c

A rate within a tenth of the known one, alone or with the other links, leaves the known one unchanged, since that was
measured with more care. Messages shorter than ``MIN_S`` do not count: the clocks of two nodes may differ by as much.

``check_blobs`` and ``check_parcels``: a head with its optimizer state, gradients of embedding and head for other
owners, pairs for a helper, weights from it, and gradients for replicas may be larger than a message may be. Their sizes
follow from plan and model, so planning refuses such a run.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from ringtune.costs.memory_sizes import Sizes
from ringtune.costs.profile import LinkFacts
from ringtune.errors import CapacityError, PlanError
from ringtune.quantities import format_bytes
from ringtune.schedule.course import EXACT, Course
from ringtune.schedule.plan import Plan
from ringtune.schedule.units import EMBEDDING
from ringtune.schedule.versions import ever_trained
from ringtune.techniques import TECHNIQUES
from ringtune.techniques.base import Parcel

LOOPBACK_BYTES_PER_S = 1e9
LOOPBACK_LATENCY_S = 1e-4

Pair = tuple[str, str]


def loopback_link(source: str, target: str) -> LinkFacts:
    """Return the link of two nodes of one machine: 1 GB/s, 0.1 ms."""
    return LinkFacts(
        source=source,
        target=target,
        rate_bytes_per_s=LOOPBACK_BYTES_PER_S,
        latency_s=LOOPBACK_LATENCY_S,
        is_assumed=True,
    )


def with_assumed(
    nodes: Sequence[str], machines: Mapping[str, str], known: Sequence[LinkFacts]
) -> tuple[LinkFacts, ...]:
    """Complete the links of a ring: return one for each directed pair of ``nodes``, sorted.

    ``machines`` is node -> machine. Known links of other nodes are left out. A link that is assumed has the rate of its
    slower end; an end that was never measured has the median rate.
    """
    by_pair = {(link.source, link.target): link for link in known if {link.source, link.target} <= set(nodes)}
    here = tuple(by_pair.values())
    rate = statistics.median(link.rate_bytes_per_s for link in here) if here else LOOPBACK_BYTES_PER_S
    latency_s = statistics.median(link.latency_s for link in here) if here else LOOPBACK_LATENCY_S
    sending = {node: [link for link in here if link.source == node] for node in nodes}
    receiving = {node: [link for link in here if link.target == node] for node in nodes}
    links = []
    for source, target in itertools.permutations(sorted(nodes), 2):
        pair_link = by_pair.get((source, target))
        if pair_link is None and machines[source] == machines[target]:
            pair_link = loopback_link(source, target)
        if pair_link is None:
            up, down = sending[source], receiving[target]
            ends = [max((link.rate_bytes_per_s for link in end), default=rate) for end in (up, down)]
            pair_link = LinkFacts(
                source=source,
                target=target,
                rate_bytes_per_s=min(ends),
                latency_s=latency_s,
                send_cpu_s_per_byte=statistics.fmean(link.send_cpu_s_per_byte for link in up) if up else 0.0,
                receive_cpu_s_per_byte=statistics.fmean(link.receive_cpu_s_per_byte for link in down) if down else 0.0,
                is_assumed=True,
            )
        links.append(pair_link)
    return tuple(links)


BUSIEST_SHARE = 0.25


class Transfer(NamedTuple):
    """A message on a line from ``begin_s`` to ``end_s``, on the coordinator's clock."""

    begin_s: float
    end_s: float
    num_bytes: int


def busy_rate(transfers: Iterable[Transfer]) -> float:
    """Bytes per second that a line reaches or exceeds in a quarter of its busy time; 0.0 without transfers.

    The transfers are all over one line in one direction. Other delays of a message make a busy period slower, never
    quicker. Example: two messages of 400 kB from 0 to 100 ms and from 25 to 125 ms give 6.4 MB/s.
    """
    periods = sorted(_periods(sorted(transfers)), key=lambda period: period[1] / period[0], reverse=True)
    left_s = BUSIEST_SHARE * sum(seconds for seconds, _ in periods)
    for seconds, num_bytes in periods:
        left_s -= seconds
        if left_s <= 0:
            return num_bytes / seconds
    return 0.0


def _periods(transfers: Sequence[Transfer]) -> list[tuple[float, int]]:
    """Seconds and bytes of each period in which at least one message was on the line."""
    periods: list[tuple[float, int]] = []
    began_s = ends_s = 0.0
    num_bytes = 0
    for transfer in transfers:
        if num_bytes and transfer.begin_s > ends_s:
            periods.append((ends_s - began_s, num_bytes))
            num_bytes = 0
        if not num_bytes:
            began_s = ends_s = transfer.begin_s
        ends_s = max(ends_s, transfer.end_s)
        num_bytes += transfer.num_bytes
    return [*periods, (ends_s - began_s, num_bytes)] if num_bytes else periods


MIN_SAMPLES = 8
MIN_BYTES = 16_384
MIN_S = 0.004
KEPT_SAMPLES = 1000
_AGREES = 0.1
_EVEN_SHARE = 0.75


def has_rate(num_bytes: int, seconds: float, at_s: float) -> bool:
    """Whether a message was large and long enough for a rate, not below that of any link, and its times are finite."""
    has_times = MIN_S <= seconds <= num_bytes / 2 and math.isfinite(at_s)
    # at_s may be so large that the subtraction is lost in rounding
    return num_bytes >= MIN_BYTES and has_times and at_s - seconds / 2 < at_s


class RecordedLinks:
    """Turns the transfers of a run into the links of a profile."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, str], deque[Message]] = {}

    def add(self, source: str, target: str, num_bytes: int, seconds: float, *, at_s: float) -> None:
        """Add one message that arrived at ``at_s``; one without a rate (``has_rate``) is left out."""
        if has_rate(num_bytes, seconds, at_s):
            kept = self._samples.setdefault((source, target), deque(maxlen=KEPT_SAMPLES))
            kept.append(Message(num_bytes, seconds, at_s))

    def links(self, known: Sequence[LinkFacts]) -> tuple[LinkFacts, ...]:
        """Return the known links, with the run's rates where it has other ones."""
        shown = {(link.source, link.target): link for link in self.shown(known)}
        return tuple(shown.get((link.source, link.target), link) for link in known)

    def shown(self, known: Sequence[LinkFacts]) -> tuple[LinkFacts, ...]:
        """Return only the known links with enough transfers in the run, with their rates."""
        links = {(link.source, link.target): link for link in known if self._is_shown(link)}
        transfers = {
            pair: [message.on_link(link.latency_s) for message in self._samples[pair]] for pair, link in links.items()
        }
        return tuple(map(_Lines(transfers).corrected, links.values()))

    def _is_shown(self, link: LinkFacts) -> bool:
        """Whether a link had enough transfers; a link within a machine never counts."""
        is_memory = link.is_assumed and link.rate_bytes_per_s >= LOOPBACK_BYTES_PER_S
        return not is_memory and len(self._samples.get((link.source, link.target), ())) >= MIN_SAMPLES


class Message(NamedTuple):
    """One message: bytes, seconds, and time of arrival."""

    num_bytes: int
    seconds: float
    at_s: float

    def on_link(self, latency_s: float) -> Transfer:
        """Return the time in which its bytes were on the link."""
        return Transfer(self.at_s - self.seconds + min(latency_s, self.seconds / 2), self.at_s, self.num_bytes)


class _Lines:
    """Rates of links, and busy rates of the lines that they share."""

    def __init__(self, transfers: Mapping[Pair, Sequence[Transfer]]) -> None:
        self._rates = {
            pair: [each.num_bytes / (each.end_s - each.begin_s) for each in messages]
            for pair, messages in transfers.items()
        }
        self._own = {
            pair: statistics.quantiles(rates, n=4, method="inclusive")[2] for pair, rates in self._rates.items()
        }
        self._could_have: dict[Pair, float] = dict(self._own)
        for end in (0, 1):
            for node in {pair[end] for pair in transfers}:
                self._share(transfers, [pair for pair in transfers if pair[end] == node])

    def _share(self, transfers: Mapping[Pair, Sequence[Transfer]], pairs: Sequence[Pair]) -> None:
        """Set the rate that each link of one line would have alone."""
        carried = busy_rate(itertools.chain.from_iterable(transfers[pair] for pair in pairs))
        most = max(self._own[pair] for pair in pairs)
        for pair in pairs:
            if self._own[pair] >= _EVEN_SHARE * most:
                self._could_have[pair] = max(carried, self._could_have[pair])

    def corrected(self, link: LinkFacts) -> LinkFacts:
        """Return the link with its recorded rate."""
        pair = (link.source, link.target)
        recorded, rate, rates = self._own[pair], self._could_have[pair], self._rates[pair]
        known = link.rate_bytes_per_s
        if recorded <= known * (1 + _AGREES) and rate >= known * (1 - _AGREES):
            return dataclasses.replace(link, is_assumed=False)
        return dataclasses.replace(
            link,
            rate_bytes_per_s=rate,
            rate_low_bytes_per_s=statistics.median(rates),
            rate_high_bytes_per_s=max(rate, *rates),
            is_assumed=False,
        )


MAX_BLOB_BYTES: Final = 1 << 30
"""Bytes of the largest message with a head, gradient of a unit, parcel or probe that a link accepts."""


def check_blobs(course: Course, sizes: Sizes) -> None:
    """Refuse a course with a head, or a gradient of embedding or head, larger than ``MAX_BLOB_BYTES``.

    Example: the whole table of 262,144 tokens of width 1,152 is 1.13 GiB; a tied model would send it at each update.
    """
    if len(course.owners) < 2 or not course.num_steps:
        return
    if not course.method.full_parameters:
        smaller = "set train.optimizer = 'sgd', which keeps no state, or " if sizes.head_bytes <= MAX_BLOB_BYTES else ""
        _check("head with its optimizer state", sizes.handed_over_bytes, smaller)
        return
    reach = ever_trained(course)
    if course.head in reach:
        _check("gradient of the head", sizes.unit_grad_bytes(course.head), "")
    if EMBEDDING in reach:
        smaller = "" if sizes.is_tied else "lower train.batch_size or train.max_length, or "
        what = "gradient of the embedding, a table tied to the head," if sizes.is_tied else "gradient of the embedding"
        _check(what, sizes.unit_grad_bytes(EMBEDDING), smaller)


def check_parcels(plan: Plan, sizes: Sizes) -> None:
    """Refuse pairs and weights of helpers, and parcels of techniques, larger than ``MAX_BLOB_BYTES``."""
    for parcel in (*_parcels(plan, sizes), *_helper_parcels(plan, sizes)):
        if parcel.size_bytes > MAX_BLOB_BYTES:
            raise CapacityError(
                f"{parcel.what} up to {format_bytes(parcel.size_bytes)}, a message at most "
                f"{format_bytes(MAX_BLOB_BYTES)}; {parcel.remedy}"
            )


def _helper_parcels(plan: Plan, sizes: Sizes) -> Iterator[Parcel]:
    course = plan.course
    pairs = math.ceil(sizes.sent_pair_bytes(course.microbatch_sizes()[0] * course.max_length))
    smaller = "raise train.microbatches, "
    if course.helper_settings.pairs == EXACT:
        smaller += "set offload.pairs = 'bfloat16', "
    for helper in plan.placement.helpers:
        nodes = (plan.placement.host_of(helper.start), helper.node)
        where, blocks = f"{nodes[0]}'s blocks {helper.text}", helper.stop - helper.start
        without = f"or leave {where} without helper (offload.mode)"
        yield Parcel(f"the pairs of {where} for helper {helper.node} have", nodes, blocks * pairs, smaller + without)
        adapters = f"the adapters of {where} from helper {helper.node} have"
        yield Parcel(adapters, nodes, blocks * sizes.helped.sent, f"take smaller adapters, {without}")


def takes_parcels(plan: Plan, node: str, sizes: Sizes) -> bool:
    """Whether all parcels that a node sends or gets for techniques are at most ``MAX_BLOB_BYTES``."""
    return all(parcel.size_bytes <= MAX_BLOB_BYTES for parcel in _parcels(plan, sizes) if node in parcel.nodes)


def _parcels(plan: Plan, sizes: Sizes) -> Iterator[Parcel]:
    return (parcel for technique in TECHNIQUES for parcel in technique.parcels(plan, sizes))


def _check(what: str, num_bytes: int, remedy: str) -> None:
    if num_bytes > MAX_BLOB_BYTES:
        raise PlanError(
            f"the {what} has up to {format_bytes(num_bytes)}, a message between owners at most "
            f"{format_bytes(MAX_BLOB_BYTES)}; {remedy}give one node all rows (data.owners = 1, or --data at one node)"
        )
