"""Adapters that can't be split are refused with the reason.

That a ring trains what one process trains, and that the result loads, is among the laws.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from adapters.configuration import ADAPTER_CONFIG_MAP

from edge.model.families import CLASSES
from edge.model.skeleton import build_skeleton
from ringtune.config import sections
from ringtune.errors import JobError
from ringtune.models.adapter_config import parse_adapter_config
from ringtune.models.families import DESCRIBED
from tests.features.models import LORA_LINEAR, adapter
from tests.support.tiny_families import MODEL_TYPES


def test_families_that_are_described_can_be_run_and_are_tested() -> None:
    """Three lists that have to name the same families."""
    assert set(MODEL_TYPES) == set(CLASSES) == set(DESCRIBED)


@pytest.mark.parametrize(("model_type", "config"), [("gpt2", "dora"), ("gpt2", "mtl_lora")])
def test_adapter_that_the_library_cannot_run_is_refused(model_type: str, config: str) -> None:
    """Before anything is measured or trained, with the reason."""
    case = adapter("refused", model_type, config).case
    with pytest.raises(JobError, match=f"'{config}'.*GPT2Model"):
        build_skeleton(case.folder / "model", case.job)


def problem_of(function: Callable[[], object]) -> str:
    """What a refusal says; empty if nothing is refused."""
    try:
        function()
    except JobError as error:
        return str(error)
    return ""


def test_adapter_names_are_refused_exactly_if_their_parts_are_outside_the_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What planning refuses by name is what a look at the added tensors refuses; the library's names are all known."""
    reasons = ("outside the blocks", "shares a tensor between blocks", "loads as another method")
    by_name = {name: problem_of(lambda name=name: parse_adapter_config(name)) for name in sorted(ADAPTER_CONFIG_MAP)}  # type: ignore[misc]
    monkeypatch.setattr(sections, "parse_adapter_config", lambda text: ())
    for name, refused in by_name.items():
        # compacter wants widths that its hypercomplex matrices divide
        option = "[reduction_factor=4]" if name.startswith("compacter") else ""
        case = adapter("refused", "bert", name + option).case
        problem = problem_of(lambda case=case: build_skeleton(case.folder / "model", case.job))  # type: ignore[misc]
        assert any(reason in problem for reason in reasons) if refused else not problem, (name, refused, problem)


def test_adapter_of_a_shared_tensor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor that two blocks reach has no single owner, wherever it is registered."""
    from adapters.model_mixin import ModelAdaptersMixin

    original = ModelAdaptersMixin.add_adapter

    def add_adapter(self: Any, *args: Any, **more: Any) -> None:
        original(self, *args, **more)
        blocks = self.encoder.layer
        blocks[2].output.adapters["ringtune"] = blocks[1].output.adapters["ringtune"]

    monkeypatch.setattr(ModelAdaptersMixin, "add_adapter", add_adapter)
    case = adapter("refused", "bert", "seq_bn").case
    with pytest.raises(JobError, match="shares a tensor between blocks"):
        build_skeleton(case.folder / "model", case.job)


def test_mixture_of_one_matrix_with_two_factors_is_refused() -> None:
    """By each node too, also if nobody planned for this model."""
    case = adapter("refused", "gpt2", LORA_LINEAR + "|mlp[attn_matrices=['k'],alpha=2.0]").case
    with pytest.raises(JobError, match="are one matrix with one alpha; set the same for both"):
        build_skeleton(case.folder / "model", case.job)
