"""The configuration of several adapters added up."""

from __future__ import annotations

import pytest

from ringtune.errors import UsageError
from ringtune.models.adapters.adapter_config import parse_adapter_config
from ringtune.models.adapters.summed_adapters import summed_config


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ("lora[r=4,alpha=16]", {"r": 12, "alpha": 48}),
        ("lora", {"r": 24, "alpha": 24}),
        ("lora[attn_matrices=['k'],init_weights='bert']", {"r": 24, "alpha": 24, "attn_matrices": ["k"]}),
        ("linear[alpha=2.0]", {"alpha": 2.0}),
    ],
)
def test_sum_has_the_rank_and_alpha_of_all_so_that_their_ratio_stays(config: str, options: dict[str, object]) -> None:
    """Other options stay; a matrix of its own does not grow."""
    (part,) = parse_adapter_config(summed_config(config, 3))
    assert {name: part.options[name] for name in options} == options


def test_sum_of_a_mixture_is_the_mixture_of_sums() -> None:
    """Each part by its own rule."""
    own = "linear[alpha=2.0,attn_matrices=['v']]|linear[selfattn_lora=False,output_lora=True]"
    config = f"lora[r=4,attn_matrices=['q']] | {own}"
    lora, *linear = parse_adapter_config(summed_config(config, 3))
    assert lora == ("lora", {"r": 12, "alpha": 24, "attn_matrices": ["q"]})
    assert linear == list(parse_adapter_config(config)[1:])


@pytest.mark.parametrize(
    ("config", "count", "message"),
    [
        ("seq_bn", 2, "can't be added up: it is no change of matrices; give one of them with --user"),
        ("mlp[hidden=4]", 2, "can't be added up"),
        ("lora[r=64]", 65, "add up to rank 4,160, at most 4,096 is allowed; give one of them with --user"),
    ],
)
def test_sum_that_is_no_adapter_is_refused(config: str, count: int, message: str) -> None:
    """It says why, and the remedy."""
    with pytest.raises(UsageError, match=message):
        summed_config(config, count)
