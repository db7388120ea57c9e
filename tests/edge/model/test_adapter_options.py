"""The options that a job may give an adapter are those of the library, less those that can't be sliced."""

from __future__ import annotations

import dataclasses

import pytest
from adapters import BnConfig, LoRAConfig, MTLLoRAConfig, ReftConfig
from adapters.methods.modeling import Activation_Function_Class

from ringtune.errors import JobError
from ringtune.models.adapter_config import option_rules, parse_adapter_config

LIBRARY = {"bottleneck": BnConfig, "lora": LoRAConfig, "mtl_lora": MTLLoRAConfig, "reft": ReftConfig}
# Weights that blocks share, and what the library sets itself.
NOT_GIVEN = {"architecture", "dtype", "cross_adapter", "vera_d", "vera_b"}
PHM = ("phm", "factorized", "shared_", "learn_phm", "hypercomplex")


def test_options_are_those_of_the_library() -> None:
    """No option is missing and none is invented."""
    for kind, config in LIBRARY.items():
        fields = {field.name for field in dataclasses.fields(config)}
        wanted = {name for name in fields if name not in NOT_GIVEN and not name.startswith(PHM)}
        assert set(option_rules(kind)) == wanted, kind


def test_every_activation_that_is_allowed_is_built() -> None:
    """What the rule lists, the library finds, and none of it has weights of its own."""
    words = option_rules("bottleneck")["non_linearity"].removeprefix("one of ")
    for name in (word.strip("'") for word in words.split(", ")):
        assert not list(Activation_Function_Class(name).parameters()), name


def test_configuration_that_trains_nothing_is_refused() -> None:
    """At least one place of a block gets an adapter."""
    reft = ("loreft[output_reft=False]", "noreft[prefix_positions=0]")
    for config in ("seq_bn[output_adapter=False]", "lora[selfattn_lora=False]", *reft):
        with pytest.raises(JobError, match="nothing would train"):
            parse_adapter_config(config)
