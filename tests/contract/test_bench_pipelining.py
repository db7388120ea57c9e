"""The benchmark beside torch's pipeline: its parts work, here in one process, and only what is the same is compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.bench import torch_steps
from tests.bench.pipelining import Pairs, require_same
from tests.support import reference
from tests.support.torch_ring import Case, write_inputs


def test_stages_of_torch_are_the_whole_model(tmp_path: Path) -> None:
    """Embedding, blocks and head of all stages in a row give the logits of the plain model; none has a block twice."""
    case = Case(folder=write_inputs(tmp_path, num_blocks=6), num_blocks=6, num_steps=2, method="all")
    plan = case.plan((("a", 0, 6),))
    batch = torch_steps.batches_of(plan, case.datasets())[0]
    model = reference.whole_model(case.job, plan, case.folder / "model").eval()
    stages = [torch_steps.Stage(model, index) for index in range(torch_steps.WORLD)]
    found = batch.ids
    with torch.no_grad():
        for stage in stages:
            found = stage(found, batch.mask, batch.token_type_ids)
        expected = model(**reference.inputs_of(model, batch)).logits
    assert torch.equal(found, expected)
    assert [len(stage.blocks) for stage in stages] == [1, 2, 1, 2]
    trained = [value for stage in stages for value in stage.parameters() if value.requires_grad]
    assert {id(value) for value in trained} == {id(value) for value in model.parameters() if value.requires_grad}


def test_step_of_several_processes_ends_with_the_last_one() -> None:
    """Ends are the latest, losses and processor seconds the sums: others than the last stage tell no loss."""
    first = {"ends_s": [1.0, 4.0], "losses": [0.0, 0.0], "cpu_s": [0.5, 1.0]}
    last = {"ends_s": [2.0, 3.0], "losses": [0.7, 0.6], "cpu_s": [0.25, 0.5]}
    assert torch_steps.together([first, last]) == {"ends_s": [2.0, 4.0], "losses": [0.7, 0.6], "cpu_s": [0.75, 1.5]}


def test_steps_with_other_losses_are_not_compared() -> None:
    """A loss that differs by more than rounding, or a step too few, is an error."""
    require_same([0.7, 0.6], [0.7, 0.600001], "ddp")
    with pytest.raises(RuntimeError, match="torch's ddp did not do the same steps"):
        require_same([0.7, 0.6], [0.7, 0.601], "ddp")
    with pytest.raises(ValueError, match="shorter"):
        require_same([0.7, 0.6], [0.7], "ddp")


def test_ratio_of_pairs_is_their_median() -> None:
    """Each ring is compared with the other side's run next to it."""
    found = Pairs(ring_s=[1.0, 3.0, 2.0], other_s=[2.0, 3.0, 1.0]).figures("ddp")
    assert found["ddp_ratio"] == 1.0
    assert found["samples"]["ddp_ratio"] == [0.5, 1.0, 2.0]
