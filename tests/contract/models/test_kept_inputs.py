"""Which inputs a block keeps for linear layers that train, family by family; what nodes really keep is tested there."""

from __future__ import annotations

from ringtune.models.adapter_config import has_adapter
from ringtune.models.families import DESCRIBED, FAMILIES
from ringtune.models.kept_inputs import (
    KeptInput,
    kept_inputs,
    lora_values,
    paper_layers,
    trained_layers,
    with_shared_inputs,
)
from ringtune.schedule.saved_activations import LAYERS
from tests.support.cases import cases


def inputs_of(name: str, adapter: str, **config: str) -> tuple[KeptInput, ...]:
    """Of a family's default model, with other keys of its config."""
    family = FAMILIES[name]
    return kept_inputs(family, {key: spec.default for key, spec in family.config_keys.items()} | config, adapter)


def test_own_weights_keep_each_tensor_once() -> None:
    """Three layers read one input of the attention; without a gate one reads that of the feed-forward part."""
    assert inputs_of("bert", "full") == (
        KeptInput(layers=("query", "key", "value"), width=768, readers=3),
        KeptInput(layers=("attention_out",), width=768, kept_anyway=True),
        KeptInput(layers=("up",), width=768),
        KeptInput(layers=("down",), width=3072),
    )
    assert inputs_of("llama", "full")[2].layers == ("up", "gate")
    assert not any(kept.kept_anyway for kept in inputs_of("electra", "full"))
    for name in DESCRIBED:
        assert set(trained_layers(inputs_of(name, "full"))) <= set(LAYERS) - {"adapter_down"}


@cases(
    ("name", "adapter", "sites"),
    [
        ("bert", "seq_bn", {"adapter_down": 768}),
        ("bert", "par_bn", {"adapter_down": 768}),
        ("gpt2", "par_bn", {}),
        ("llama", "scaled_par_bn", {}),
        ("bert", "lora", {"query value": 768}),
        ("bert", "lora[attn_matrices=['q','k','v']]", {"query key value": 768}),
        ("bert", "lora[intermediate_lora=True, output_lora=True]", {"query value": 768, "up": 768, "down": 3072}),
        ("llama", "lora[selfattn_lora=False, intermediate_lora=True]", {"down": 11008}),
        ("llama", "lora[selfattn_lora=False, output_lora=True]", {"up": 4096}),
        ("qwen2", "lora[selfattn_lora=False, output_lora=True]", {"down": 22016}),
        ("gpt2", "lora[output_lora=True]", {"query value": 768, "down": 3072}),
        ("bert", "seq_bn|lora", {"adapter_down": 768, "query value": 768}),
        ("bert", "seq_bn[use_gating=True]", {}),
        ("bert", "lora[use_gating=True]|seq_bn", {}),
        ("bert", "linear", {"query value": 768}),
        ("bert", "mlp[intermediate_lora=True, output_lora=True]", {"query value": 768, "up": 768, "down": 3072}),
        ("llama", "linear[selfattn_lora=False, intermediate_lora=True]", {"down": 11008}),
        (
            "bert",
            "linear[attn_matrices=['q']]|mlp[attn_matrices=['v'], output_lora=True]|lora[attn_matrices=['k']]",
            {"key query value": 768, "down": 3072},
        ),
        ("bert", "ia3", {}),
        ("bert", "loreft", {}),
    ],
)
def test_adapters_keep_the_inputs_of_their_first_matrices(name: str, adapter: str, sites: dict[str, int]) -> None:
    """LoRA has one input for all matrices of the attention; a gate, or a norm before an adapter, keeps it anyway."""
    found = {
        " ".join(layer.partition(":")[2] or layer for layer in kept.layers): kept for kept in inputs_of(name, adapter)
    }
    assert {words: kept.width for words, kept in found.items()} == sites
    assert all(kept.is_adapter for kept in found.values())


ALL_LORA = "lora[attn_matrices=['q','v'], intermediate_lora=True, output_lora=True]"


@cases(
    ("name", "adapter", "has_dropout", "layers"),
    [
        ("bert", "full", False, "query key value down"),
        ("bert", "double_seq_bn", False, "adapter_down"),
        ("bert", "seq_bn|lora", False, "adapter_down"),
        ("bert", "lora", False, ""),
        ("bert", "lora", True, "adapter_down:value"),
        ("bert", "lora[attn_matrices=['v']]", False, "adapter_down:value"),
        ("bert", ALL_LORA, False, "adapter_down:down"),
        ("bert", ALL_LORA, True, "adapter_down:value adapter_down:down"),
        ("gpt2", ALL_LORA, True, "adapter_down:down"),
        ("gpt2", "lora[attn_matrices=['v']]", False, "adapter_down:value"),
        ("llama", "lora[intermediate_lora=True, output_lora=True]", False, "adapter_down:down"),
        ("bert", "linear[output_lora=True]", True, "adapter_down:down"),
    ],
)
def test_layers_of_the_paper(name: str, adapter: str, has_dropout: bool, layers: str) -> None:
    """Of LoRA the one at down, and the one at value if it saves by itself."""
    assert paper_layers(inputs_of(name, adapter), has_dropout=has_dropout) == tuple(layers.split())


def test_inputs_know_how_many_matrices_read_them() -> None:
    """Those of the attention are one matrix in a GPT-2; LoRA has one for each that it wraps.

    Auxiliary models have one for each place, also in a GPT-2.
    """
    found = {
        (name, adapter): [kept.readers for kept in inputs_of(name, adapter)]
        for name in ("bert", "gpt2", "llama")
        for adapter in ("full", "lora[attn_matrices=['q','v'], output_lora=True]", "linear")
    }
    assert list(found.values()) == [
        *([3, 1, 1, 1], [2, 1], [2]),
        *([1, 1, 1, 1], [1, 1], [2]),
        *([3, 1, 2, 1], [2, 1], [2]),
    ]


@cases(("key", "value"), [("hidden_act", "relu"), ("hidden_act", "tanh"), ("activation", "relu")])
def test_layers_behind_some_activation_functions_are_left_alone(key: str, value: str) -> None:
    """ReLU keeps its result, which is the input of ``down``, and of LoRA beside it."""
    name = "bert" if key == "hidden_act" else "distilbert"
    own, lora = (inputs_of(name, adapter, **{key: value}) for adapter in ("full", "lora[output_lora=True]"))
    assert [kept.always_kept for kept in own] == [False, False, False, True]
    assert own[-1].groups(["down"], has_dropout=False) == [], "its projection would free nothing"
    assert [kept.always_kept for kept in lora] == [False, True]
    assert with_shared_inputs(["value", "down"], own) == ("query", "key", "value")
    assert with_shared_inputs(["adapter_down"], lora) == ("adapter_down",)
    assert not any(kept.always_kept for kept in inputs_of("llama", "full", hidden_act="relu"))


def test_blocks_may_be_left_out() -> None:
    """A part of a configuration may leave blocks out; others may have them."""
    assert [has_adapter("seq_bn[leave_out=[0, 2]]", block) for block in range(3)] == [False, True, False]
    assert [has_adapter("seq_bn[leave_out=[0]]|lora[leave_out=[0, 1]]", block) for block in range(3)] == [
        False,
        True,
        True,
    ]
    assert has_adapter("full", 0)


@cases(
    ("adapter", "values"),
    [
        ("lora[r=4]", 8),
        ("lora[r=4,attn_matrices=['q','k','v'],intermediate_lora=True,output_lora=True]", 20),
        ("lora[r=4,selfattn_lora=False,output_lora=True]", 4),
        ("par_bn|lora[r=2]", 4),
        ("ia3", None),
        ("seq_bn", None),
        ("linear", None),
        ("full", None),
    ],
)
def test_values_inside_lora_are_its_ranks(adapter: str, values: int | None) -> None:
    """One rank for each matrix; what scales, and what is no LoRA, has none."""
    assert lora_values(adapter) == values
