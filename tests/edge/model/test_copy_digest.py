"""The digest of an owner's copy is that of every number in it, and of nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from edge.model.heads import task_of
from edge.model.owner import OwnerParts
from ringtune.job.job import Train
from ringtune.models.family import CAUSAL_LM, CLASSIFICATION
from ringtune.schedule.units import EMBEDDING
from tests.support import whole_models as whole
from tests.support.tiny_families import write_family

UNITS = (EMBEDDING, whole.NUM_BLOCKS)


def owner_of(folder: Path, task: str) -> OwnerParts:
    """An owner without a slice, as a run begins."""
    skeleton = whole.hosted(folder, task, (), is_owner=True, trained=False)
    return OwnerParts(skeleton, skeleton.model.head, task_of(task), Train(method="hift"))


@pytest.mark.parametrize(("model_type", "task"), [("bert", CLASSIFICATION), ("llama", CAUSAL_LM)])
def test_digest_of_a_copy_changes_with_any_number_in_it(tmp_path: Path, model_type: str, task: str) -> None:
    """Two owners begin alike; one bit of one tensor, and only its unit differs."""
    folder = write_family(tmp_path / "m", model_type, with_decoder=task == CAUSAL_LM)
    first, second = owner_of(folder, task), owner_of(folder, task)
    before = {unit: first.digest(unit) for unit in UNITS}
    assert {unit: second.digest(unit) for unit in UNITS} == before
    assert len(set(before.values())) == len(UNITS)
    for unit, other in (UNITS, UNITS[::-1]):
        for name, value in second.units[unit].items():
            flat: Any = value.data.view(-1).view(torch.int32)
            flat[-1] ^= 1
            assert second.digest(unit) != before[unit], name
            assert second.digest(other) == before[other], name
            flat[-1] ^= 1
    assert {unit: second.digest(unit) for unit in UNITS} == before
