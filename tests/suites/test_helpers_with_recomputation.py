"""A host that runs blocks again ships their pairs once: adapters that helpers fit are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringtune.schedule.units import Range
from tests.suites.test_helpers_equal_one_process import WAYS, case_of, collected, helped, run
from tests.support.plans import changed
from tests.support.torch_ring import distance, reference_of, write_inputs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model and its rows."""
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("adapter", ["lora[r=4,alpha=16]", "linear", "mlp[hidden=8]"])
@pytest.mark.parametrize("recompute", [(), (Range(1, 3),)], ids=["none", "some"])
@pytest.mark.sampled(1)
def test_helpers_fit_blocks_that_run_again(folder: Path, adapter: str, recompute: tuple[Range, ...]) -> None:
    """With dropout, several hosts and helpers, and micro-batches under way together."""
    case = case_of(folder, adapter=adapter, dropout=0.1, method="all", num_steps=6, microbatches=2)
    plan = changed(helped(case, *WAYS["some-of-several-hosts"]), recompute=recompute)
    theirs = reference_of(case)
    assert distance(collected(plan, run(case, plan)), {**theirs.adapter(), **theirs.head()}) < 1e-9
