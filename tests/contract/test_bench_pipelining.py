"""The benchmark beside torch's pipeline: its parts work, here in one process, and only what is the same is compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.bench import pipelining, torch_steps
from tests.bench.pipelining import Pair, figures_of, quietest, require_same
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


def test_ratio_is_the_median_of_the_quietest_pairs() -> None:
    """Each ring is compared with the other side's run next to it; a pair beside which others worked counts last."""
    found = [Pair(ring_s=ring_s, other_s=1.0, others_share=share) for ring_s, share in ((9, 0.5), (1, 0.2), (3, 0.0))]
    kept = quietest(found, 2)
    assert [pair.ring_s for pair in kept] == [1, 3]
    assert figures_of("ddp", kept)["ddp_ratio"] == 2.0


def test_own_work_is_not_that_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 busy seconds 3 were its own: in 2 s on two cores, others had a quarter."""
    times = {"_busy_s": [10.0, 14.0], "_own_s": [5.0, 8.0]}
    for name, values in times.items():
        monkeypatch.setattr(pipelining, name, lambda values=values: values.pop(0))
    clock = [100.0, 102.0]
    monkeypatch.setattr("tests.bench.pipelining.time.monotonic", lambda: clock.pop(0))
    monkeypatch.setattr("tests.bench.pipelining.os.cpu_count", lambda: 2)
    with pipelining.others_share() as shares:
        pass
    assert shares == [0.25]
