"""Which policy holds in which slice, as a word, in words, and as a table."""

from __future__ import annotations

import dataclasses

from ringtune.models.kept_inputs import KeptInput
from ringtune.schedule.saved_activations import Velora
from ringtune.schedule.units import Range
from ringtune.techniques.activation_checkpointing import SlicePolicy, sites_that_save_nothing
from tests.support.cases import cases
from tests.support.plans import changed, make_plan
from tests.support.profiles import node

PLAN = changed(
    make_plan([("a", 0, 2), ("b", 2, 3), ("c", 3, 4)], ["a"]),
    recompute=(Range(1, 3),),
    velora=Velora(blocks=(Range(0, 2),), layers=("adapter_down",)),
)


@cases(
    ("start", "stop", "name", "text"),
    [
        (0, 2, "both", "blocks [1, 2) run again, VeLoRA in blocks [0, 2)"),
        (2, 3, "recompute", "blocks [2, 3) run again"),
        (0, 1, "velora", "VeLoRA in blocks [0, 1)"),
        (3, 4, "none", ""),
    ],
)
def test_policy_of_a_slice(start: int, stop: int, name: str, text: str) -> None:
    """Only what is in the slice counts."""
    found = SlicePolicy.of(PLAN, start, stop)
    assert (found.name, found.text) == (name, text)


@cases(
    ("layers", "init", "dropout", "says"),
    [
        (("adapter_down:value",), "average", 0.0, "adapter_down:value, but the same 32 values a token are kept for "),
        (("adapter_down:value",), "average", 0.1, ""),
        (("adapter_down:query", "adapter_down:value"), "average", 0.0, ""),
        (("adapter_down",), "random", 0.0, ""),
        (("adapter_down:down",), "average", 0.0, ""),
    ],
)
def test_site_whose_input_is_kept_in_any_case_is_told(
    layers: tuple[str, ...], init: str, dropout: float, says: str
) -> None:
    """LoRA at query reads the same tensor; with dropout each has one of its own."""
    inputs = (
        KeptInput(layers=("adapter_down:query", "adapter_down:value"), width=32, readers=2, lora=2),
        KeptInput(layers=("adapter_down:down",), width=128, lora=1),
    )
    facts = node(PLAN, "a")
    facts = dataclasses.replace(
        facts,
        model=dataclasses.replace(facts.model, kept_inputs=inputs),
        shape=dataclasses.replace(facts.shape, dropout=dropout),
    )
    velora = Velora(blocks=(Range(0, 4),), layers=layers, parts=8, init=init)
    found = sites_that_save_nothing(changed(PLAN, velora=velora), [facts])
    assert len(found) == bool(says)
    assert all(
        says in line and line.endswith("adapter_down:query: it keeps 8 more; add the others, or leave it out")
        for line in found
    )
