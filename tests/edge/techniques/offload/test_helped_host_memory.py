"""What a host of helped blocks holds in a training step, which the planner's estimate counts on."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringtune.costs.memory_estimate import memory_estimate
from ringtune.costs.memory_sizes import Sizes
from ringtune.costs.memory_terms import Share
from ringtune.costs.model_facts import computed_token_bytes, model_facts
from ringtune.job.job import parse_job
from tests.bench import cola
from tests.bench.cola import ADAPTERS, HOST, TOKENS, ways

ROWS = 8


@pytest.mark.promise("7 bounded memory")
@pytest.mark.parametrize(
    ("adapter", "users", "merged"),
    [
        ("lora 8", 1, ""),
        ("lora 8", 1, ", merged"),
        ("lora 8", 8, ""),
        ("lora 8", 8, ", merged"),
        ("lora 64", 8, ", merged"),
        ("linear", 1, ", merged"),
        ("linear", 8, ", merged"),
        ("mlp", 8, ""),
    ],
)
@pytest.mark.sampled(1)
def test_host_holds_the_adapters_of_the_estimate_and_never_more_in_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: str, users: int, merged: str
) -> None:
    """Between steps to the byte: a set for each user, or none where they are merged; in a step at most its sum."""
    for name, value in {"WIDTH": 32, "HEADS": 4, "INNER": 64}.items():
        monkeypatch.setattr(cola, name, value)
    model = cola.write_model(tmp_path / "model")
    step = ways(model, tmp_path)[f"{adapter}, one, {users} users{merged}"](ROWS)
    config = ADAPTERS[adapter]
    job = parse_job(
        f'[model]\npath = "{model}"\n[adapter]\nconfig = "{config}"\n[train]\nmax_length = {TOKENS}\n', source="test"
    )
    facts, plan = model_facts(model, job), step.plan
    sizes = Sizes(
        plan.course,
        facts,
        optimizer=job.train.optimizer,
        dtype=job.model.dtype,
        activation_token_bytes=computed_token_bytes(facts, job),
        has_dropout=job.train.dropout > 0,
        adapter=config,
    )
    estimate = memory_estimate(plan.course, Share.of(plan, HOST), sizes)
    found = step.measure()
    held = sum(term.total_bytes for term in estimate.terms if term.part in ("weights", "adapters"))
    assert held == found["held_bytes"]
    assert found["peak_bytes"] <= estimate.total_bytes
