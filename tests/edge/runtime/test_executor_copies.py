"""What an executor says of a gradient that another owner sent."""

from __future__ import annotations

import pytest
import torch

from edge.model.tensor_files import pieces_of
from edge.runtime.executor import NodeExecutor
from ringtune.errors import DivergedError, IntegrityError, PlanError
from ringtune.schedule.stages import unit_grad_key
from ringtune.schedule.turns import turn_sequence
from ringtune.schedule.units import EMBEDDING
from ringtune.storage.pieces import Pieces
from ringtune.storage.tensor_files import write_tensors
from tests.support.torch_ring import Case, make_carrier, write_inputs


@pytest.fixture(scope="module")
def executors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, NodeExecutor]:
    """Owner a hosts all blocks, owner b none; the first turn, of steps 0 to 3 of owner a, is granted."""
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    case = Case(folder=folder, method="hift", adapter="full", owners=("a", "b"), num_steps=8)
    plan = case.plan((("a", 0, 4), ("c", 4, 4)))
    nodes = dict(make_carrier(case, plan).executors)
    for node in nodes.values():
        node.grant(next(iter(turn_sequence(plan.course))))
    return nodes


def blob(value: float) -> Pieces:
    """A gradient of the embedding's norm."""
    grad = torch.full((32,), value, dtype=torch.float64)
    return write_tensors({"grad/embeddings.LayerNorm.bias": pieces_of(grad)})


def test_gradient_that_diverged_names_step_and_owner(executors: dict[str, NodeExecutor]) -> None:
    """As a loss does, because it is the batch of that owner that has to be looked at."""
    with pytest.raises(DivergedError, match="at step 1, a batch of owner a: the gradient of the embedding for item 0"):
        executors["b"].put_parcel(unit_grad_key(0, EMBEDDING), blob(float("nan")))


def test_gradient_of_another_unit_is_refused(executors: dict[str, NodeExecutor]) -> None:
    """The file says which tensors it has; they have to be the unit's."""
    with pytest.raises(IntegrityError, match="the gradient of the head for item 0 has the tensors"):
        executors["b"].put_parcel(unit_grad_key(0, 4), blob(1.0))


def test_gradient_is_for_owners(executors: dict[str, NodeExecutor]) -> None:
    """A node without data has no copy."""
    with pytest.raises(PlanError, match="needs an owner"):
        executors["c"].put_parcel(unit_grad_key(0, EMBEDDING), blob(1.0))
