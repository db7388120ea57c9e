"""A run that loses nodes ends with what it would have trained with them: it goes back, and does all once more."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from ringtune.costs.memory_sizes import Sizes
from ringtune.costs.model_facts import model_facts
from ringtune.run_control import events as rd
from ringtune.run_control.recovery import RecoveryPolicy
from ringtune.schedule.course import ALONE
from ringtune.schedule.placement import Placement
from ringtune.schedule.plan import Plan
from ringtune.schedule.stages import no_replicas
from ringtune.storage.tensor_files import TensorFile
from tests.features.feature import Feature, Tensors, each_technique, run_of
from tests.features.memory import VELORA
from tests.features.methods import LEFT_OUT, OPTIMIZERS, ROWS, SHAPE
from tests.features.offload import (
    INTERVALS,
    USERS,
    USERS_IN_ANY_TIMING,
    USERS_WITHOUT_BLOCKS,
    WITH_HELPERS,
    sets_of_collaboration,
)
from tests.features.operations import CHOICES, TABLES
from tests.suites.test_recovery_on_virtual_clock import recoveries, ring_of
from tests.support import reference, users_reference
from tests.support.moves import Slices
from tests.support.recovering_ring import RecoveringRing
from tests.support.torch_ring import RUN, TorchCarrier, distance, make_carrier

RINGS: tuple[Slices, ...] = (
    (("c", 0, 1), ("e", 1, 3), ("a", 3, 4)),
    (("e", 0, 2), ("c", 2, 4)),
    (("a", 0, 1), ("e", 1, 3, 1), ("f", 1, 3, 1), ("c", 3, 4)),
)
ROUTES = pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (1, 2))])
PROJECTED_PAIRS = [
    dataclasses.replace(one, name="projected-pairs/wide")
    for one in USERS_IN_ANY_TIMING
    if one.name == "users-timing/velora-wide"
]
THREE_OWNERS: dict[str, Any] = {"owners": ("b", "d", "a"), "num_steps": 11, "every_steps": 2}
OWNER_CASES: dict[str, dict[str, Any]] = {
    "adamw": {"eval_every": 5},
    "sgd-by-rows": {"optimizer": "sgd", "split": "dirichlet:0.4", "turns": "rows", "eval_every": 0},
    "constant-rate": {"lr_schedule": "constant", "checkpoint_every": 0},
}
OWNERS = [Feature(name=f"owner/{name}", changes=THREE_OWNERS | changes) for name, changes in OWNER_CASES.items()]

LONG_WITH_HELPERS = [
    dataclasses.replace(one, name=f"{one.technique}-again/{one.name}", changes=one.changes | {"num_steps": 12})
    for one in WITH_HELPERS
    if one.split not in ("a-host-helps", "hosts-help-each-other")
]
"""Those whose first helper owns and hosts nothing."""
OWNERS_OF_INVERTIBLE = [
    Feature(name="invertible-owner/all", changes=THREE_OWNERS | {"adapter": "seq_bn_inv", "method": "all"}),
    Feature(name="invertible-owner/ringada", changes=THREE_OWNERS | {"adapter": "seq_bn_inv"}),
]


FOUR_HOSTS: Slices = (("w", 0, 1), ("x", 1, 2), ("y", 2, 3), ("z", 3, 4))
"""A ring of hosts alone, beside the owners."""


class Loss(NamedTuple):
    """A run that has lost a node, and goes on or has got it back."""

    feature: Feature
    plan: Plan
    carrier: TorchCarrier
    ring: RecoveringRing
    recovery: rd.LogRecovery

    @property
    def tensors(self) -> Tensors:
        """What it trained."""
        return tensors_of(self.feature, self.carrier, self.recovery, self.ring)


def tensors_of(feature: Feature, carrier: TorchCarrier, last: rd.LogRecovery, ring: RecoveringRing) -> Tensors:
    """What a run trained that has recovered last as ``last`` says."""
    return {name: value.detach() for name, value in feature.tensors(carrier, last.part, ring.holder).items()}


def plan_of_ring(feature: Feature, seed: int) -> Plan:
    """The plan of a feature on a ring; with helpers on its own, whose hosts they help."""
    own = feature.plan_on(feature.split)
    for owner in own.course.owners:
        feature.case.datasets()[owner.node].users = owner.users
    rings = RINGS[:2] if no_replicas(own.course) else RINGS
    return own if own.placement.helpers else feature.plan(feature.case, rings[seed % len(rings)])


def losing(
    feature: Feature,
    name: str,
    seed: int,
    *nodes: str,
    at: str = "",
    moments: tuple[int, int] = (20, 60),
    back_turns: int = 0,
    **how: Any,
) -> Loss:
    """Carry a run out that loses one of these nodes, at any of the moments or as soon as something begins.

    With ``back_turns`` it goes on without the node, and once more with it after so many turns.
    """
    rng = random.Random(f"{name} {feature.name} {seed}")
    plan = plan_of_ring(feature, seed)
    carrier = make_carrier(feature.case, plan)
    ring = ring_of(plan, rng, carrier=carrier, keeper=carrier, **feature.ring(plan, carrier), **how)
    lost, moment = rng.choice(nodes or [node for node in plan.nodes if plan.owner(node) is None]), rng.randint(*moments)

    def when(what: str, node: str) -> str | None:
        if back_turns and ring.lost and recoveries(ring.result):
            since = ring.result.logged[ring.result.logged.index(recoveries(ring.result)[0]) :]
            if sum(isinstance(entry, rd.LogKept) for entry in since) == back_turns:
                ring.clock.at(ring.clock.now_s, ring.come, lost)
        return lost if (what == at if at else len(ring.moments) == moment) else None

    ring.when = when
    result = ring.run()
    assert result.finish == rd.Finish("", "")
    *others, recovery = recoveries(result)
    assert len(others) == bool(back_turns)
    return Loss(feature, plan, carrier, ring, recovery)


@pytest.mark.promise("1 partition invariance")
@ROUTES
@each_technique(
    [*SHAPE, *OPTIMIZERS, *ROWS, *LEFT_OUT, *VELORA, *TABLES[:-1], *CHOICES, *WITH_HELPERS, *USERS_WITHOUT_BLOCKS]
)
def test_run_that_loses_a_host_equals_the_undisturbed_one(feature: Feature, seed: int) -> None:
    """Any host or helper at any moment; masks are drawn by step, micro-batch and unit, whoever draws them."""
    loss = losing(feature, "host", seed)
    assert distance(loss.tensors, run_of(feature, feature.split).tensors) < 1e-9


@pytest.mark.promise("1 partition invariance")
@ROUTES
@each_technique(LONG_WITH_HELPERS)
def test_run_whose_lost_helper_helps_again_equals_the_undisturbed_one(feature: Feature, seed: int) -> None:
    """It is lost at any moment, and is back with nothing a turn after the run has gone on, for the first placement."""
    plan, rng = plan_of_ring(feature, seed), random.Random(f"helps again {feature.name} {seed}")
    carrier = make_carrier(feature.case, plan)
    ring = ring_of(plan, rng, carrier=carrier, keeper=carrier, **feature.ring(plan, carrier))
    lost, moment = plan.placement.helpers[0].node, rng.randint(20, 60)
    asked = list[Placement]()

    def come() -> None:
        ring.come(lost)
        ring._tell_rounds(rd.Replanned(asked[0]))

    def when(what: str, node: str) -> str | None:
        if recoveries(ring.result) and not asked:
            since = ring.result.logged[ring.result.logged.index(recoveries(ring.result)[0]) :]
            if any(isinstance(entry, rd.LogKept) for entry in since):
                asked.append(plan.with_copies(True).placement)
                ring.clock.at(ring.clock.now_s, come)
        return lost if len(ring.moments) == moment else None

    ring.when = when
    assert ring.run().finish == rd.Finish("", "")
    (move,) = (entry for entry in ring.result.logged if isinstance(entry, rd.LogMove))
    assert not move.problem and move.part.placement.helpers == plan.placement.helpers
    found = {name: value.detach() for name, value in feature.tensors(carrier, move.part, ring.holder).items()}
    assert distance(found, run_of(feature, feature.split).tensors) < 1e-9


def losing_at_once(
    feature: Feature, seed: int, lost: Callable[[Plan], Sequence[str]], number: int, turns: int = 0, **how: Any
) -> tuple[RecoveringRing, TorchCarrier]:
    """Carry a run with two copies out that loses so many of these nodes at one moment, after so many turns."""
    plan = feature.plan(feature.case, FOUR_HOSTS).with_copies(True, 2)
    rng = random.Random(f"{number} {feature.name} {seed}")
    carrier = make_carrier(feature.case, plan)
    ring = ring_of(plan, rng, carrier=carrier, keeper=carrier, num_copies=2, **feature.ring(plan, carrier), **how)
    names, moment = rng.sample(lost(plan), number), rng.randint(20, 60)

    def when(what: str, node: str) -> str | None:
        kept = sum(isinstance(entry, rd.LogKept) for entry in ring.result.logged)
        if names and len(ring.moments) >= moment and kept >= turns:
            while len(names) > 1:
                ring.lose(names.pop())
            return names.pop()
        return None

    ring.when = when
    ring.run()
    assert not names
    return ring, carrier


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 8))])
@each_technique([SHAPE[0], OPTIMIZERS[0], VELORA[0]])
def test_run_with_two_copies_that_loses_two_nodes_at_once_equals_the_undisturbed_one(
    feature: Feature, seed: int
) -> None:
    """Any two hosts, neighbours too; then any two nodes: owners return with nothing, and have all from copies."""
    wanted = run_of(feature, feature.split).tensors

    def nodes(plan: Plan) -> Sequence[str]:
        return plan.nodes if seed else [one.node for one in plan.course.owners]

    back_s = dict.fromkeys("wxyz")
    for lost, policy in ((lambda _: "wxyz", RecoveryPolicy()), (nodes, RecoveryPolicy(awaits_s=100.0))):
        ring, carrier = losing_at_once(
            feature, seed, lost, 2, recovery=policy, back_s=lambda node: back_s.get(node, 5.0)
        )
        assert ring.result.finish == rd.Finish("", "")
        assert distance(tensors_of(feature, carrier, recoveries(ring.result)[-1], ring), wanted) < 1e-9


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 8))])
def test_run_with_two_copies_that_loses_three_hosts_says_whose_blocks_are_nowhere(seed: int) -> None:
    """The three that have the top block, after the first turn; before its end there is nothing to lose."""
    ring, _ = losing_at_once(SHAPE[0], seed, lambda _: "zwx", 3, turns=1)
    found = ring.result.finish
    assert found is not None and found.error == "PeerLostError", found
    assert "no living node has a copy of block 3; start it again and --resume the run" in found.message


@each_technique(OWNERS)
def test_run_that_loses_a_host_while_it_collects_equals_the_undisturbed_one(feature: Feature) -> None:
    """All go back to the end of the last turn, where another owner may have the head, and send again."""
    loss = losing(feature, "collects", 0, "e", at="collect")
    assert loss.recovery.step == feature.case.num_steps
    assert distance(loss.tensors, run_of(feature, feature.split).tensors) < 1e-9


@pytest.mark.promise("1 partition invariance")
@ROUTES
@each_technique(OWNERS)
def test_run_that_loses_an_owner_equals_one_process_without_its_later_rows(feature: Feature, seed: int) -> None:
    """Any owner at any moment: one process that trains on what was left, at the rates of the shorter run since then.

    It is far from the undisturbed run.
    """
    loss = losing(feature, "owner", seed, "b", "d", "a", recovery=RecoveryPolicy(leaves_out=True))
    plan, recovery = loss.plan, loss.recovery
    assert len(recovery.left_out) == 1
    assert distance(loss.tensors, run_of(feature, feature.split).tensors) > 1e-4
    case, turns = feature.case, reference.turns_around(plan, recovery.plan, recovery.step)
    trained = reference.train(case.job, plan, case.folder / "model", case.datasets(), turns=turns)
    assert distance(loss.tensors, trained.adapter() | trained.head()) < 1e-9
    logged = (entry for entry in loss.ring.result.logged if isinstance(entry, rd.LogEvaluation))
    evaluated = {entry.step: dict(entry.values)["loss_sum"] for entry in logged}
    assert evaluated.keys() == trained.evaluations.keys()
    for step in evaluated.keys() - {recovery.step}:  # there it is with the lost owner, or without
        assert evaluated[step] == pytest.approx(trained.evaluations[step][0], rel=1e-9)


BACK_CASES = {name: {"num_steps": 29, "eval_every": 5, **changes} for name, changes in OWNER_CASES.items()}
BACK = [Feature(name=f"owner-back/{name}", changes=THREE_OWNERS | changes) for name, changes in BACK_CASES.items()]


USERS_BACK = [
    dataclasses.replace(one, name=f"{name}-back/users", changes=one.changes | {"num_steps": 20})
    for name, one in (
        ("alone", USERS[0]),
        ("together", next(one for one in USERS if one.tensors is sets_of_collaboration and not one.changes["offload"])),
    )
]


@pytest.mark.promise("1 partition invariance")
@ROUTES
@each_technique(
    [*BACK, Feature(name="owner-back/invertible", changes=OWNERS_OF_INVERTIBLE[1].changes | {"num_steps": 29})]
)
def test_run_whose_lost_owner_comes_back_equals_one_process_without_the_turns_that_it_missed(
    feature: Feature, seed: int
) -> None:
    """Any owner at any moment, with nothing: one process that trains the turns as written; it is evaluated again."""
    case = feature.case
    policy = RecoveryPolicy(leaves_out=True, num_steps=lambda rows: case.num_steps)
    loss = losing(feature, "back", seed, "b", "d", "a", moments=(60, 160), back_turns=3, recovery=policy)
    lost, back = recoveries(loss.ring.result)
    assert lost.left_out == back.returned and not back.lost and sum(back.plan.course.missed.values()) > 0
    assert back.plan.course.num_steps == case.num_steps - sum(back.plan.course.missed.values()) * case.local_iterations
    turns = reference.turns_as_written(loss.plan, [(one.step, one.plan) for one in (lost, back)])
    trained = reference.train(case.job, loss.plan, case.folder / "model", case.datasets(), turns=turns)
    assert distance(loss.tensors, trained.adapter() | trained.head()) < 1e-9
    logged = {entry.step: entry for entry in loss.ring.result.logged if isinstance(entry, rd.LogEvaluation)}
    last = logged[back.plan.course.num_steps]
    assert dict(last.values)["count"] == sum(owner.eval_rows for owner in loss.plan.course.owners)


@pytest.mark.promise("1 partition invariance")
@ROUTES
@each_technique(USERS_BACK)
def test_users_of_an_owner_that_is_away_keep_their_adapters(feature: Feature, seed: int) -> None:
    """As they were when it was lost; they go on from there once it is back."""
    case = feature.case
    policy = RecoveryPolicy(leaves_out=True, num_steps=lambda rows: case.num_steps)
    how: dict[str, Any] = {"moments": (120, 150), "recovery": policy}
    loss = losing(feature, "users", seed, "a", "c", back_turns=1, **how)
    lost, back = recoveries(loss.ring.result)
    assert lost.left_out == back.returned and lost.step > 0 and sum(back.plan.course.missed.values()) > 0
    assert lost.plan.course.user_sets == back.plan.course.user_sets == loss.plan.course.user_sets
    turns = reference.turns_as_written(loss.plan, [(one.step, one.plan) for one in (lost, back)])
    if loss.plan.course.helper_settings.users == ALONE:
        sets, head = users_reference.alone(case, loss.plan, turns=turns)
    else:
        sets, head = users_reference.together(case, loss.plan, turns=turns), {}
    assert distance(loss.tensors, sets | head) < 1e-9


@pytest.mark.promise("1 partition invariance")
@ROUTES
@each_technique([*OWNERS, *OWNERS_OF_INVERTIBLE])
def test_run_that_waits_for_an_owner_equals_the_undisturbed_one(feature: Feature, seed: int) -> None:
    """Any owner at any moment, with the head or without: it comes back with nothing, and has it from the copies."""
    policy = RecoveryPolicy(awaits_s=100.0)
    loss = losing(feature, "waits", seed, "b", "d", "a", recovery=policy, back_s=lambda node: 5.0)
    assert len(loss.recovery.back) == 1
    assert distance(loss.tensors, run_of(feature, feature.split).tensors) < 1e-9


@pytest.mark.promise("7 bounded memory")
@each_technique(
    [
        *OPTIMIZERS[:2],
        *(one for one in VELORA if one.name == "velora-adapter/running"),
        INTERVALS[0],
        USERS[0],
        *PROJECTED_PAIRS,
    ]
)
def test_files_of_the_ends_of_turns_have_the_bytes_that_were_planned(feature: Feature) -> None:
    """Tensors of a node's own file of a turn: weights, moments, sums and vectors of what trained, and a count each."""
    case, plan = feature.case, plan_of_ring(feature, 0)
    carrier = make_carrier(case, plan)
    ring = ring_of(plan, random.Random(0), carrier=carrier, keeper=carrier)
    assert ring.run().finish == rd.Finish("", "")
    settings, job = plan.course.helper_settings, case.job
    if feature in PROJECTED_PAIRS:
        pairs = {"offload.mode": "auto", "offload.pairs": settings.pairs, "offload.projected": settings.projected}
        job = job.with_overrides(pairs)
    facts = model_facts(job.model.path, job)
    sizes = Sizes(plan.course, facts, optimizer=case.optimizer, dtype="float64", activation_token_bytes=0)
    adds_up = settings.interval > 1
    step = case.num_steps - (case.local_iterations if adds_up else 0)  # at the end everything is updated
    for node, block in [(one, block) for one in plan.nodes for block in plan.placement.trained_at(one)]:
        file = TensorFile(carrier.kept[node].part(RUN, step, block, block + 1), where="it")
        values = [file.tensor(name) for name in file.infos]
        found = sum(value.data.size_bytes for value in values if value.data.size_bytes > 8)
        assert found == sizes.snapshot_bytes, (node, block)
