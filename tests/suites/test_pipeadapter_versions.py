"""PipeAdapter stores as many versions of weights as items are in flight, and is ``all`` where nothing can be stale."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.features.feature import ONE, Feature, carry_out, run_of
from tests.features.methods import PIPEADAPTER
from tests.support.torch_ring import distance, reference_of

STALE = PIPEADAPTER[0]


@pytest.mark.parametrize("changes", [{"local_iterations": 1}, {}], ids=["one-step-turns", "one-host"])
def test_pipeadapter_that_cannot_be_stale_equals_all(changes: dict[str, Any]) -> None:
    """Turns of one step, or one host: the result of one process that trains everything."""
    splits = {"three": STALE.splits["three"]} if changes else {"one": ONE}
    feature = dataclasses.replace(STALE, changes={**STALE.changes, "num_steps": 4, **changes}, splits=splits)
    run = carry_out(feature, feature.plan_on(feature.split))
    wanted = reference_of(dataclasses.replace(feature.case, method="all"))
    assert distance(run.tensors, wanted.adapter() | wanted.head()) < 1e-9
    assert {figures["peak_versions"] for figures in run.figures.values()} <= {0, 1}


@pytest.mark.parametrize("feature", [STALE, next(one for one in PIPEADAPTER if one.name.endswith("/full"))])
def test_pipeadapter_stores_as_many_versions_as_items_in_flight(feature: Feature) -> None:
    """Hosts of three store 3, 2 and 1 versions, of adapters as of own weights."""
    figures = run_of(feature, "three").figures
    assert {node: found["peak_versions"] for node, found in figures.items()} == {"a": 3, "b": 2, "c": 1}
    # the slice of b is twice as large as that of a
    assert figures["a"]["peak_version_bytes"] == figures["b"]["peak_version_bytes"] > 0
    assert figures["c"]["peak_version_bytes"] == 0
