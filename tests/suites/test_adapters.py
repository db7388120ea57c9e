"""Adapters that can't be split are refused with the reason.

That a ring trains what one process trains, and that the result loads, is among the laws.
"""

from __future__ import annotations

from typing import Any

import adapters
import pytest
from adapters import AdapterConfig
from adapters.configuration import ADAPTER_CONFIG_MAP

from edge.model.families import FORWARDS
from edge.model.skeleton import build_skeleton
from ringtune.errors import JobError
from ringtune.models.adapter_config import INVERTIBLE, parse_adapter_config
from ringtune.models.families import DESCRIBED
from tests.features.models import LORA_LINEAR, adapter
from tests.support.tiny_families import MODEL_TYPES, base_model


def test_families_that_are_described_can_be_run_and_are_tested() -> None:
    """Three lists that have to name the same families."""
    assert set(MODEL_TYPES) == set(FORWARDS) == set(DESCRIBED)


@pytest.mark.parametrize(("model_type", "config"), [("gpt2", "dora"), ("gpt2", "mtl_lora")])
def test_adapter_without_a_form_for_a_fused_matrix_is_refused(model_type: str, config: str) -> None:
    """Before anything is measured or trained, with the reason."""
    case = adapter("refused", model_type, config).case
    with pytest.raises(JobError, match=f"'{config}'.*GPT2Model"):
        build_skeleton(case.folder / "model", case.job)


def stays_in_blocks(name: str) -> bool:
    """Whether each tensor is in one block, or in an invertible adapter, and its configuration is saved as it is."""
    config = AdapterConfig.load(name + "[reduction_factor=4]" * name.startswith("compacter"))
    model: Any = base_model("bert", num_blocks=2)
    adapters.init(model)
    before = set(model.state_dict())
    model.add_adapter("own", config=config)
    added = {key: value for key, value in model.state_dict().items() if key not in before}
    homes: dict[int, set[str]] = {}
    for key, value in added.items():
        homes.setdefault(value.data_ptr(), set()).add(".".join(key.split(".")[:3]))
    known = "subtract_projection"
    is_saved = getattr(AdapterConfig.load(config.to_dict()), known, None) == getattr(config, known, None)
    is_inside = all(key.startswith(("encoder.layer.", f"{INVERTIBLE}.")) for key in added)
    return is_saved and is_inside and all(len(blocks) == 1 for blocks in homes.values() if "encoder" in str(blocks))


def test_adapter_names_are_refused_exactly_if_their_parts_are_outside_the_blocks() -> None:
    """What planning refuses by name is what the library has outside the blocks; its names are all known."""
    for name in ADAPTER_CONFIG_MAP:
        try:
            parse_adapter_config(name)
        except JobError:
            assert not stays_in_blocks(name), name
        else:
            assert stays_in_blocks(name), name


def test_mixture_of_one_matrix_with_two_factors_is_refused() -> None:
    """By each node too, also if nobody planned for this model."""
    case = adapter("refused", "gpt2", LORA_LINEAR + "|mlp[attn_matrices=['k'],alpha=2.0]").case
    with pytest.raises(JobError, match="are one matrix with one alpha; set the same for both"):
        build_skeleton(case.folder / "model", case.job)
