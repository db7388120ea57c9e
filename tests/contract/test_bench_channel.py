"""The benchmark of the ring's channel: both sides are treated alike, and its parts work, here in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from ringtune.schedule.plan import Plan
from ringtune.transport.channels import open_channel
from tests.bench import channel
from tests.bench.ring import TARGETS
from tests.support.cases import cases

TOKENS, WIDTH = 4, 8


class FakeSender:
    """A link that needs no time."""

    def __init__(self, address: str, plan: Plan) -> None:
        self.link = contextlib.ExitStack()

    def run(self, hidden: Sequence[torch.Tensor], mask: torch.Tensor, count: int) -> float:
        """Seconds of the ring."""
        return 2.0


@cases("as_agent", [True, False])
def test_channel_pairs_have_receivers_of_one_kind(monkeypatch: pytest.MonkeyPatch, as_agent: bool) -> None:
    """What receives the ring's tensors and what receives the bare stream keep freed memory, or neither does."""
    receivers: list[tuple[Plan, bool]] = []

    @contextlib.contextmanager
    def receiver(plan: Plan, *, as_agent: bool = True) -> Iterator[str]:
        receivers.append((plan, as_agent))
        yield f"127.0.0.1:{len(receivers)}"

    monkeypatch.setattr(channel, "receiver", receiver)
    monkeypatch.setattr(channel, "RingSender", FakeSender)
    monkeypatch.setattr(channel, "open_channel", lambda address: contextlib.ExitStack())
    monkeypatch.setattr(channel, "run_bare", lambda *arguments: 1.5)
    plan = channel.bench_plan("float32", TOKENS, WIDTH)
    figures = channel.channel_ratio(pairs=2, messages=8, as_agent=as_agent)
    assert receivers == [(channel.bench_plan("float32"), as_agent)] * 2 * channel.GROUPS
    assert (figures["ratio"], figures["pairs"]) == (0.75, 2 * channel.GROUPS), "the first pair of a group warms up"
    receivers.clear()
    assert channel._pairs(plan, [torch.zeros(1)], 3, 8, as_agent=as_agent) == [(2.0, 1.5)] * 3
    assert receivers == [(plan, as_agent)] * 2


@cases(("words", "as_agent"), [([], True), (["--plain-allocator"], False)])
def test_channel_sender_has_the_allocator_of_its_receivers(
    monkeypatch: pytest.MonkeyPatch, words: list[str], as_agent: bool
) -> None:
    """One option chooses the allocator of all processes of a measurement."""
    kept: list[str] = []
    asked: list[bool] = []

    def channel_ratio(*arguments: Any, as_agent: bool) -> dict[str, float]:
        asked.append(as_agent)
        return {"ratio": 1.0}

    monkeypatch.setattr(channel, "keep_freed_memory", lambda: kept.append("here"))
    monkeypatch.setattr(channel, "channel_ratio", channel_ratio)
    monkeypatch.setattr(channel, "bf16_bytes_ratio", lambda: 0.5)
    monkeypatch.setattr("sys.argv", ["channel", *words])
    channel.main()
    assert (kept, asked) == (["here"] * as_agent, [as_agent])


def test_channel_receiver_takes_the_frames_of_its_plan() -> None:
    """Whole batches of the plan's rows pass the checks of a real node, and the bare stream counts its bytes."""
    plan = channel.bench_plan("float32", TOKENS, WIDTH)
    rows = plan.course.batch_size
    hidden = [torch.randn(rows, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    with channel.serving(plan) as address:
        sender, bare = channel.RingSender(address, plan), open_channel(address)
        try:
            for count in (8, 24):
                assert sender.run(hidden, torch.ones(rows, TOKENS, dtype=torch.int64), count) > 0
            assert channel.run_bare(bare, [b"four", b"more"], 5) > 0
        finally:
            sender.link.close()
            bare.close()


def test_bfloat16_halves_the_bytes_on_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Framing included: the target of the benchmark, which depends on no clock."""

    @contextlib.contextmanager
    def receiver(plan: Plan) -> Iterator[str]:
        with channel.serving(plan) as address:
            yield address

    monkeypatch.setattr(channel, "receiver", receiver)
    sign, bound = TARGETS["bf16_bytes_ratio"]
    assert sign == "<=" and 0.5 < channel.bf16_bytes_ratio(count=8) <= bound
