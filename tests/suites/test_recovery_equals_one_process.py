"""A run that loses hosts ends with what one process trains on the whole model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ringtune.costs.memory_sizes import Sizes
from ringtune.costs.model_facts import model_facts
from ringtune.run_control import events as rd
from ringtune.run_control.recovery import RecoveryPolicy
from ringtune.schedule.plan import Plan
from ringtune.storage.tensor_files import TensorFile
from tests.suites.test_recovery_on_virtual_clock import lose_at, recoveries, ring_of
from tests.support import reference
from tests.support.moves import slices_of
from tests.support.plans import changed
from tests.support.recovering_ring import RecoveringRing
from tests.support.resumed import holder_of
from tests.support.torch_ring import RUN, Case, distance, make_carrier, reference_of, write_inputs

CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"optimizer": "sgd", "microbatches": 4},
    "dropout": {"dropout": 0.2, "microbatches": 2},
    "several-owners": {"owners": ("b", "d", "a"), "microbatches": 2, "eval_every": 5},
    "turns-by-rows": {"owners": ("b", "d", "a"), "split": "dirichlet:0.4", "turns": "rows"},
    "checkpoints": {"owners": ("a", "d"), "checkpoint_every": 3, "eval_every": 4},
}
RINGS = (
    (("c", 0, 1), ("e", 1, 3), ("a", 3, 4)),
    (("e", 0, 2), ("c", 2, 4)),
    (("a", 0, 1), ("e", 1, 3, 1), ("f", 1, 3, 1), ("c", 3, 4)),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model and its rows."""
    return write_inputs(tmp_path_factory.mktemp("recovery"))


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(1)
def test_run_that_loses_a_host_equals_one_process(folder: Path, name: str, seed: int) -> None:
    """Any host at any moment, with random times: in float64 adapters and head are those of one process."""
    rng = random.Random(f"{name} {seed}")
    case = Case(folder=folder, **{"local_iterations": 2, "num_steps": 16, "every_steps": 3, **CASES[name]})
    plan = changed(case.plan((("a", 0, 4),)), slices=slices_of(RINGS[seed]))
    carrier = make_carrier(case, plan)
    ring = ring_of(plan, rng, carrier=carrier, keeper=carrier)
    lose_at(ring, rng, [rng.randint(20, 150)])
    result = ring.run()
    assert result.finish == rd.Finish("", "")
    last = recoveries(result)[-1]
    trained = reference_of(case)
    got = carrier.collected(last.part, ring.holder)
    if not case.dropout:
        assert distance(got, trained.adapter() | trained.head()) < 1e-9
    else:  # masks are drawn by step, micro-batch and unit, whoever draws them
        still = make_carrier(case, plan)
        whole = ring_of(plan, rng, carrier=still, keeper=still).run()
        assert distance(got, still.collected(plan, holder_of(plan, whole))) < 1e-9


@pytest.mark.parametrize("name", ["several-owners", "checkpoints"])
@pytest.mark.sampled(1)
def test_run_that_loses_a_host_while_it_collects_equals_one_process(folder: Path, name: str) -> None:
    """All go back to the end of the last turn, where another owner may have the head, and send again."""
    case = Case(folder=folder, **{"local_iterations": 2, "num_steps": 8, "every_steps": 3, **CASES[name]})
    plan = changed(case.plan((("a", 0, 4),)), slices=slices_of(RINGS[0]))
    carrier = make_carrier(case, plan)
    ring = ring_of(plan, random.Random(name), carrier=carrier, keeper=carrier)
    ring.when = lambda what, node: "e" if what == "collect" else None
    result = ring.run()
    assert result.finish == rd.Finish("", "")
    (recovery,) = recoveries(result)
    assert recovery.step == 8
    trained = reference_of(case)
    assert distance(carrier.collected(recovery.part, ring.holder), trained.adapter() | trained.head()) < 1e-9


OWNERS: dict[str, dict[str, Any]] = {
    "adamw": {"microbatches": 2, "checkpoint_every": 3, "eval_every": 5},
    "sgd-by-rows": {"optimizer": "sgd", "split": "dirichlet:0.4", "turns": "rows"},
    "constant-rate": {"lr_schedule": "constant", "every_steps": 2, "eval_every": 4},
}


class Loss(NamedTuple):
    """A run that went on without an owner, or waited for it."""

    case: Case
    plan: Plan
    carrier: Any
    ring: RecoveringRing
    result: Any
    recovery: rd.LogRecovery
    lost: str


def losing_an_owner(folder: Path, name: str, rng: random.Random, seed: int, **how: Any) -> Loss:
    """Carry a case of ``OWNERS`` out, one of whose owners is lost at any moment; ``how`` is for ``ring_of``."""
    values: dict[str, Any] = {"local_iterations": 2, "num_steps": 17, "every_steps": 3, "owners": ("b", "d", "a")}
    case = Case(folder=folder, **{**values, **OWNERS[name]})
    plan = changed(case.plan((("a", 0, 4),)), slices=slices_of(RINGS[seed % 3]))
    carrier = make_carrier(case, plan)
    ring = ring_of(plan, rng, carrier=carrier, keeper=carrier, **how)
    lost, moment = rng.choice(["b", "d", "a"]), rng.randint(20, 150)
    ring.when = lambda what, node: lost if len(ring.moments) == moment else None
    result = ring.run()
    assert result.finish == rd.Finish("", "")
    (recovery,) = recoveries(result)
    return Loss(case, plan, carrier, ring, result, recovery, lost)


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", OWNERS)
@pytest.mark.sampled(1)
def test_run_that_loses_an_owner_equals_one_process_without_its_later_rows(folder: Path, name: str, seed: int) -> None:
    """Any owner at any moment: one process that trains on what was left, at the rates of the shorter run since then."""
    loss = losing_an_owner(
        folder, name, random.Random(f"owner {name} {seed}"), seed, recovery=RecoveryPolicy(leaves_out=True)
    )
    case, plan, carrier, ring, result, recovery, lost = loss
    assert recovery.left_out == (lost,)
    trained = reference.train(
        case.job,
        plan,
        folder / "model",
        case.datasets(),
        turns=reference.turns_around(plan, recovery.plan, recovery.step),
    )
    got = carrier.collected(recovery.part, ring.holder)
    assert distance(got, trained.adapter() | trained.head()) < 1e-9
    evaluated = {entry.step: entry.values for entry in result.logged if isinstance(entry, rd.LogEvaluation)}
    assert evaluated.keys() == trained.evaluations.keys()
    for step in evaluated.keys() - {recovery.step}:  # there it is with the lost owner, or without
        assert dict(evaluated[step])["loss_sum"] == pytest.approx(trained.evaluations[step][0], rel=1e-9)


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", OWNERS)
@pytest.mark.sampled(1)
def test_run_that_waits_for_an_owner_equals_one_process(folder: Path, name: str, seed: int) -> None:
    """Any owner at any moment, with the head or without: it comes back with nothing, and has it from the copies."""
    loss = losing_an_owner(
        folder,
        name,
        random.Random(f"waits {name} {seed}"),
        seed,
        recovery=RecoveryPolicy(awaits_s=100.0),
        back_s=lambda node: 5.0,
    )
    case, _, carrier, ring, result, recovery, lost = loss
    assert recovery.back == (lost,)
    trained = reference_of(case)
    got = carrier.collected(recovery.part, ring.holder)
    assert distance(got, trained.adapter() | trained.head()) < 1e-9
    evaluated = {entry.step: entry.values for entry in result.logged if isinstance(entry, rd.LogEvaluation)}
    for step, sums in evaluated.items():
        assert dict(sums)["loss_sum"] == pytest.approx(trained.evaluations[step][0], rel=1e-9)


@pytest.mark.promise("7 bounded memory")
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_files_of_the_ends_of_turns_have_the_bytes_that_were_planned(folder: Path, optimizer: str) -> None:
    """Tensors of a node's own file of the last turn: weights and moments of what trained, and a count each."""
    case = Case(folder=folder, local_iterations=2, num_steps=16, every_steps=3, optimizer=optimizer)
    plan = changed(case.plan((("a", 0, 4),)), slices=slices_of(RINGS[0]))
    carrier = make_carrier(case, plan)
    ring = ring_of(plan, random.Random(0), carrier=carrier, keeper=carrier)
    assert ring.run().finish == rd.Finish("", "")
    sizes = Sizes(
        plan.course,
        model_facts(case.job.model.path, case.job),
        optimizer=optimizer,
        dtype="float64",
        activation_token_bytes=0,
    )
    for node in plan.nodes:
        piece = plan.slice_of(node)
        file = TensorFile(carrier.kept[node].part(RUN, 16, piece.start, piece.stop), where="it")
        values = [file.tensor(name) for name in file.infos]
        planned = piece.num_blocks * (sizes.adapter_bytes + sizes.adapter_state_bytes)
        found = sum(value.data.size_bytes for value in values if value.data.size_bytes > 8)
        assert found == planned, node
