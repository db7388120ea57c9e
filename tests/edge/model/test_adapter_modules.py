"""Adapter modules compute, name, draw and describe what AdapterHub's library does, to the last bit."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from edge.model.adapters import add_adapters, description, interface, options_of
from edge.model.adapters.reft import read_mask, rows_of
from ringtune.errors import JobError
from ringtune.models.decoders import interface_of
from ringtune.models.families import FAMILIES
from ringtune.models.family import Family
from tests.support.tiny_families import base_model

pytestmark = pytest.mark.skipif(
    not transformers.__version__.startswith("4."), reason="AdapterHub's library needs transformers 4"
)
NAME, DROPOUT, BLOCKS = "ringtune", 0.1, 3
EVERYWHERE = "attn_matrices=['q','k','v'],intermediate_lora=True,output_lora=True"
BOTTLENECKS = (
    "seq_bn",
    "double_seq_bn[use_gating=True,ln_before=True]",
    "double_seq_bn[ln_after=True,adapter_residual_before_ln=True,scaling='learned',init_weights='houlsby']",
    "par_bn[mh_adapter=True,scaling='channel',ln_after=True,leave_out=[1]]",
    "seq_bn[residual_before_ln=False,init_weights='mam_adapter',init_weights_seed=3,non_linearity='leakyrelu']",
    "scaled_par_bn[reduction_factor={'1': 8, 'default': 4}]|lora[r=2,output_lora=True]|loreft[suffix_positions=2]",
)
NATIVE = ("double_seq_bn[original_ln_after=False,original_ln_before=True]", "double_seq_bn_inv")
POST_ADD = ("seq_bn[residual_before_ln='post_add',mh_adapter=True]",)
LORA = (
    f"lora[r=4,alpha=3,init_weights='bert',{EVERYWHERE}]",
    f"lora[use_gating=True,init_weights='vera',{EVERYWHERE}]",
    "ia3[init_weights='bert',use_gating=True,output_lora=True]",
)
SEPARATE = (f"dora[init_weights='bert',{EVERYWHERE}]", f"mtl_lora[n_up_projection=2,init_weights='bert',{EVERYWHERE}]")
REFT = ("loreft[layers=[0,2],r=2,non_linearity='relu']", "noreft[tied_weights=True,suffix_positions=1]")
WHOLE = (*BOTTLENECKS, *NATIVE, *LORA, *REFT)
CASES = [
    *(("bert", config) for config in (*WHOLE, *POST_ADD, *SEPARATE)),
    *(("gpt2", config) for config in (*WHOLE, "mtl_lora[selfattn_lora=False,output_lora=True,init_weights='bert']")),
    *(("llama", config) for config in (*WHOLE, *SEPARATE)),
    *(("distilbert", config) for config in (*BOTTLENECKS, *NATIVE, *POST_ADD, LORA[0])),
    *(("vit", config) for config in (*BOTTLENECKS, NATIVE[0], LORA[0], *SEPARATE)),
    *(("electra", config) for config in (BOTTLENECKS[1], NATIVE[1], SEPARATE[0])),
    *((kind, BOTTLENECKS[-1]) for kind in ("roberta", "xlm-roberta", "mistral", "qwen2", "smollm3", "gemma3_text")),
    *(("gemma2", config) for config in (*BOTTLENECKS, *LORA, SEPARATE[0], *REFT)),
]


def inputs_of(model_type: str) -> dict[str, torch.Tensor]:
    """Three rows, two of them padded at the right."""
    if model_type == "vit":
        return {"pixel_values": torch.linspace(-1, 1, 3 * 144).view(3, 1, 12, 12)}
    mask = (torch.arange(7) < torch.tensor([7, 5, 3])[:, None]).long()
    return {"input_ids": (torch.arange(21) * 5 % 40).view(3, 7), "attention_mask": mask}


def pair(model_type: str, config: str) -> tuple[Any, Any]:
    """Ours and the library's, with adapters of one seed; the generators are then equal too."""
    family, adapters = FAMILIES[model_type], importlib.import_module("adapters")
    ours: Any = base_model(model_type, num_blocks=BLOCKS)
    ours.requires_grad_(False)
    ours.config.name_or_path = "tiny"
    if family.plugged:
        library = copy.deepcopy(ours)
        adapters.init(library, interface=adapters.AdapterModelInterface(**interface_of(family)))
    else:
        library = adapters.AutoAdapterModel.from_config(copy.deepcopy(ours.config))
        library.base_model.load_state_dict(ours.state_dict(), strict=False)
    torch.manual_seed(5)
    parsed = adapters.AdapterConfig.load(config)
    parts = [part.replace(dropout=dropout_of(config)) for part in getattr(parsed, "configs", [parsed])]
    library.add_adapter(NAME, config=parts[0] if len(parts) == 1 else adapters.ConfigUnion(*parts))
    library.train_adapter(NAME)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    add_adapters(ours, family, config, dropout=dropout_of(config), name=NAME)
    assert torch.equal(torch.rand(1), drawn)
    return ours.train(), library


def dropout_of(config: str) -> float:
    """(IA)3 has none."""
    return 0.0 if config.startswith("ia3") else DROPOUT


def trained(model: Any) -> dict[str, torch.Tensor]:
    """What trains, by name."""
    return {name: value for name, value in model.base_model.named_parameters() if value.requires_grad}


@pytest.mark.parametrize(("model_type", "config"), CASES)
def test_model_equals_that_of_the_library(tmp_path: Path, model_type: str, config: str) -> None:
    """Names, initial values, outputs and gradients with dropout, and files."""
    ours, library = pair(model_type, config)
    assert trained(ours).keys() == trained(library).keys() != set()
    for name, value in trained(library).items():
        assert torch.equal(trained(ours)[name], value), name
    inputs, found = inputs_of(model_type), []
    for model in (ours, library):
        torch.manual_seed(7)
        mask = inputs.get("attention_mask", torch.ones(3, 10, dtype=torch.long))
        with rows_of(mask):
            last = model.base_model(**inputs).last_hidden_state
        (last * torch.linspace(-1, 1, last.numel()).view(last.shape)).sum().backward()
        found.append(last.detach())
    assert torch.equal(*found)
    for name, value in trained(library).items():
        assert torch.equal(trained(ours)[name].grad, value.grad), name  # type: ignore[arg-type]
    check_files(ours, library, FAMILIES[model_type], config, tmp_path)


def check_files(ours: Any, library: Any, family: Family, config: str, folder: Path) -> None:
    """Names of the tensors, and both descriptions byte by byte."""
    start = f"{library.base_model_prefix}." * (library is not library.base_model)
    loader = importlib.import_module("adapters.loading").AdapterLoader(library)
    saved = loader.save_to_state_dict(NAME)[0]
    assert {f"{start}{name}" for name in ours.state_dict() if f".{NAME}." in name} == saved.keys()
    loader.save(str(folder), NAME)
    parts = options_of(config, dropout=dropout_of(config))
    assert description(parts, ours, family, name=NAME) == (folder / "adapter_config.json").read_bytes()
    if family.plugged:
        library.adapter_interface._save(str(folder), library.config)
        assert interface(family) == (folder / "adapter_interface.json").read_bytes()


@pytest.mark.parametrize(
    ("model_type", "config", "reason"),
    [
        ("gpt2", "seq_bn[residual_before_ln='post_add']", "a sum before a norm"),
        ("bert", "seq_bn[residual_before_ln='post_add',original_ln_before=False]", "a sum before a norm"),
        ("bert", "lora[leave_out=[0]]|ia3[leave_out=[1,2]]", "two parts of one kind"),
    ],
)
def test_what_the_library_fails_on_is_refused(model_type: str, config: str, reason: str) -> None:
    """Its users could not run the result."""
    with pytest.raises(JobError, match=reason):
        add_adapters(base_model(model_type, num_blocks=BLOCKS), FAMILIES[model_type], config, dropout=0.0, name=NAME)


def test_reft_takes_rows_shorter_than_its_prefix_and_suffix() -> None:
    """A row's tokens have the same numbers alone as beside longer rows, where the library fails or mixes up tokens."""
    base: Any = base_model("bert", num_blocks=BLOCKS).double().requires_grad_(False)
    add_adapters(base, FAMILIES["bert"], "loreft[prefix_positions=3,suffix_positions=2,r=2]", dropout=0.0, name=NAME)
    base.double().eval()
    lengths = torch.tensor([7, 2, 1])
    ids, mask = (torch.arange(21) * 5 % 40).view(3, 7), (torch.arange(7) < lengths[:, None]).long()
    with rows_of(mask):
        together = base(input_ids=ids, attention_mask=mask).last_hidden_state
    for row, length in enumerate(lengths):
        one = slice(row, row + 1), slice(length)
        with rows_of(mask[one]):
            alone = base(input_ids=ids[one], attention_mask=mask[one]).last_hidden_state
        alone.sum().backward()
        torch.testing.assert_close(alone[0], together[row, :length])


def test_reft_reads_the_mask_of_a_call() -> None:
    """By name or place; the last tokens are otherwise those of the padding."""
    base: Any = base_model("bert", num_blocks=BLOCKS).eval()
    add_adapters(base, FAMILIES["bert"], "noreft[suffix_positions=1]", dropout=0.0, name=NAME)
    inputs = inputs_of("bert")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with rows_of(mask):
        wanted = base(ids, mask).last_hidden_state
    read_mask(base)
    for found in (base(ids, mask), base(**inputs)):
        assert torch.equal(found.last_hidden_state, wanted)
    without = base(ids, token_type_ids=torch.zeros_like(ids)).last_hidden_state
    assert torch.equal(without[0], wanted[0]) and not torch.allclose(without[1], wanted[1])
