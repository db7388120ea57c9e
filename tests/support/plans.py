"""Plans for tests: one by hand, and any number drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ringtune.schedule.plan import Owner, Phase, Plan, Slice


def make_plan(
    slices: Sequence[tuple[str, int, int]],
    owners: Sequence[str],
    *,
    num_blocks: int = 4,
    num_steps: int = 8,
    local_iterations: int = 2,
    every_steps: int = 2,
    microbatches: int = 2,
    batch_size: int = 4,
    method: str = "ringada",
    train_rows: int = 10,
    eval_rows: int = 3,
    eval_every: int = 0,
    checkpoint_every: int = 0,
    credits_per_channel: int = 4,
    private_blocks: int = 0,
    wire_dtype: str = "float32",
    max_length: int = 16,
    hidden_size: int = 32,
    labels: Sequence[str] = ("neg", "pos"),
    seed: int = 0,
    unfreeze: str = "every",
    unfreeze_at: tuple[int, ...] = (),
    patience_steps: int = 20,
    min_improvement: float = 0.01,
) -> Plan:
    """A plan from (node, start, stop) triples in ring order."""
    return Plan(
        method=method,
        num_blocks=num_blocks,
        phases=(Phase(slices=tuple(Slice(node=node, start=start, stop=stop) for node, start, stop in slices)),),
        owners=tuple(Owner(node=owner, train_rows=train_rows, eval_rows=eval_rows) for owner in owners),
        num_steps=num_steps,
        local_iterations=local_iterations,
        every_steps=every_steps,
        batch_size=batch_size,
        microbatches=microbatches,
        max_length=max_length,
        hidden_size=hidden_size,
        eval_every=eval_every,
        checkpoint_every=checkpoint_every,
        credits=credits_per_channel,
        wire_dtype=wire_dtype,
        private_blocks=private_blocks,
        labels=tuple(labels),
        seed=seed,
        unfreeze=unfreeze,
        unfreeze_at=unfreeze_at,
        patience_steps=patience_steps,
        min_improvement=min_improvement,
    )


def random_plan(rng: random.Random) -> Plan:
    """Any shape of run: 1 to 4 hosts, empty slices, owners that host nothing, private blocks, all methods."""
    num_blocks = rng.randint(2, 8)
    num_hosts = rng.randint(1, 4)
    private_blocks = rng.choice([0, 0, 0, 1, 2]) if num_blocks > 2 else 0
    inner = sorted(rng.randint(private_blocks, num_blocks) for _ in range(num_hosts - 1))
    cuts = [private_blocks, *inner, num_blocks]
    names = [f"node-{index}" for index in range(num_hosts + 1)]
    hosts = rng.sample(names, num_hosts)
    return make_plan(
        [(hosts[index], cuts[index], cuts[index + 1]) for index in range(num_hosts)],
        rng.sample(names, rng.randint(1, len(names))),
        num_blocks=num_blocks,
        num_steps=rng.randint(1, 20),
        local_iterations=rng.randint(1, 4),
        every_steps=rng.randint(1, 5),
        microbatches=rng.choice([1, 2, 4]),
        method=rng.choice(["ringada", "ringada", "all", "pipeadapter"]),
        eval_rows=rng.choice([0, 3, 9]),
        eval_every=rng.choice([0, 3]),
        checkpoint_every=rng.choice([0, 2, 5]),
        credits_per_channel=rng.choice([1, 2, 4, 8]),
        private_blocks=private_blocks,
    )
