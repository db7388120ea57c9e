"""Disk where all parameters train: bytes that can be added up by hand."""

from __future__ import annotations

import dataclasses

from ringtune.costs.memory_estimate import disk_needs
from ringtune.costs.memory_sizes import Sizes
from ringtune.costs.memory_terms import Share
from ringtune.schedule.course import ALONE, COLLABORATION, HelperSettings
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import Owner, UserRows
from ringtune.techniques.offload import helped
from tests.contract.costs.test_full_parameters_costs import plan
from tests.support.cases import cases
from tests.support.plans import changed, make_plan
from tests.support.profiles import ROUND as MODEL

SLICE = 2 * 10_000
COPIES = 60_000 + 3_000


def needs(
    of: Plan, node: str, optimizer: str = "adamw", *, on_disk: bool = True, keeps_best: bool = False
) -> dict[str, int]:
    """What a node takes on its disk."""
    sizes = Sizes(of.course, MODEL, optimizer=optimizer, dtype="float32", activation_token_bytes=200)
    share = Share.of(changed(of, state_on_disk=on_disk), node)
    return disk_needs(of.course, share, sizes, keeps_best=keeps_best).parts()


def parts(state: int = 0, checkpoints: int = 0) -> dict[str, int]:
    """The parts of needs, without those of no bytes."""
    return {name: size for name, size in (("optimizer state", state), ("checkpoints", checkpoints)) if size}


@cases(("optimizer", "moments"), [("adamw", 2), ("momentum", 1), ("sgd", 0)])
def test_state_on_disk_is_that_of_all_units_of_a_node(optimizer: str, moments: int) -> None:
    """Two blocks at a host; an owner has embedding and head too. In memory it takes no disk."""
    assert needs(plan(), "a", optimizer) == parts(moments * SLICE, 0)
    assert needs(plan(), "b", optimizer) == parts(moments * (SLICE + COPIES), 0)
    assert needs(plan(), "b", optimizer, on_disk=False) == parts(0, 0)


def test_units_that_no_step_trains_have_no_state_but_are_saved() -> None:
    """Two steps train the embedding and block 0; both checkpoints of this short run have all units."""
    short = changed(plan(), num_steps=2, checkpoint_every=1, local_iterations=1)
    assert needs(short, "a") == parts(2 * 10_000, 2 * (SLICE + 2 * 10_000))


@cases(("steps", "shards"), [(10, 1), (20, 2), (30, 3), (90, 3)])
def test_three_shards_of_a_node_are_there_at_once(steps: int, shards: int) -> None:
    """The last two, and the one that is being written."""
    saving = changed(plan(), num_steps=steps, checkpoint_every=10)
    assert needs(saving, "b") == parts(2 * (SLICE + COPIES), shards * 3 * (SLICE + COPIES))


@cases(("eval_every", "checkpoint_every", "number"), [(10, 0, 1), (10, 30, 4), (45, 10, 2), (0, 10, 0)])
def test_best_results_are_those_of_each_checkpoint_and_the_newest(
    eval_every: int, checkpoint_every: int, number: int
) -> None:
    """Weights alone; no more of them than evaluations, and of 90 steps there are at most three checkpoints at once."""
    keeping = changed(plan(), num_steps=90, eval_every=eval_every, checkpoint_every=checkpoint_every)
    plain = needs(keeping, "b")
    best = number * (SLICE + COPIES)
    assert needs(keeping, "b", keeps_best=True) == plain | ({"best results": best} if best else {})


def test_copies_of_another_hosts_blocks_are_there_as_often_as_its_shards_while_one_arrives() -> None:
    """Two blocks with moments at either host, without embedding and head: every owner has these itself."""
    saving = changed(plan(), num_steps=90, checkpoint_every=10)
    plain = needs(saving, "b")
    assert needs(saving.with_copies(True), "b") == plain | {"copies of another host's checkpoints": 4 * 3 * SLICE}


def test_dropped_state_is_in_no_checkpoint() -> None:
    """But that of the head is, which every step trains."""
    dropping = changed(plan(drops_state=True, always_active=("head",)), num_steps=10, checkpoint_every=10)
    assert needs(dropping, "b", on_disk=False) == parts(0, SLICE + COPIES + 2 * 3_000)


@cases(
    ("manner", "sets"),
    [
        (HelperSettings(), 0),
        (HelperSettings(merged=True), 1),
        (HelperSettings(users=ALONE), 0),
        (HelperSettings(users=COLLABORATION, merged=True), 3),
    ],
)
def test_merged_adapters_are_in_a_file_of_their_host(manner: HelperSettings, sets: int) -> None:
    """One set for each helped block, or the sum of three users' low-rank ones; without merging they are in memory."""
    users = tuple(UserRows(name=name, train_rows=4) for name in ("anna", "ben", "carl"))
    plain = make_plan([("a", 0, 2), ("b", 2, 4)], ["b"], num_steps=8, method="all", eval_rows=0)
    plain = changed(plain, owners=(Owner(node="b", train_rows=12, users=users),))
    of = helped(plain, {"a": "z", "b": "z"}, manner)
    model = dataclasses.replace(MODEL, block_bytes=50_000)
    sizes = Sizes(of.course, model, optimizer="adamw", dtype="float32", activation_token_bytes=200)
    found = disk_needs(of.course, Share.of(of, "a"), sizes)
    assert found.parts() == ({"merged adapters": 2 * sets * 10_000} if sets else {})
    assert found.total_bytes == 2 * sets * 10_000
    assert disk_needs(of.course, Share.of(of, "z"), sizes).total_bytes == 0


@cases(
    ("manner", "sets", "hosted", "sums"),
    [
        (HelperSettings(), 1, 1, 0),
        (HelperSettings(users=ALONE), 3, 3, 0),
        (HelperSettings(users=COLLABORATION, merged=True), 3, 3, 3),
        (HelperSettings(users=ALONE, interval=2), 3, 3, 3),
    ],
)
def test_checkpoints_have_the_sets_of_a_helper_with_moments_and_those_of_its_host(
    manner: HelperSettings, sets: int, hosted: int, sums: int
) -> None:
    """Two blocks of 10,000 bytes, three users; one checkpoint, of the last step. With an interval gradients too.

    In collaboration the sum of all users.
    """
    users = tuple(UserRows(name=f"u{index}", train_rows=4) for index in range(3))
    bare = make_plan([("a", 0, 2), ("b", 2, 4)], ["b"], method="all", num_steps=10, checkpoint_every=10)
    bare = changed(bare, owners=(Owner(node="b", train_rows=12, users=users),))
    of = helped(bare, {"a": "z", "b": "z"}, manner)
    model = dataclasses.replace(MODEL, block_bytes=50_000)
    sizes = Sizes(of.course, model, optimizer="adamw", dtype="float32", activation_token_bytes=200)
    helper, host = (disk_needs(of.course, Share.of(of, node), sizes) for node in ("z", "a"))
    assert helper.parts()["checkpoints"] == 4 * (sets * 3 + sums) * 10_000
    assert host.parts()["checkpoints"] == 2 * hosted * 10_000
