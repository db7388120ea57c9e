"""Adapter configuration strings: read, refused, and counted as the library would build them."""

from __future__ import annotations

import pytest

from ringtune.errors import JobError
from ringtune.models.adapter_config import (
    Invertible,
    adapter_block_params,
    auxiliary_of,
    invertible_of,
    library_config,
    parse_adapter_config,
)
from ringtune.models.auxiliary_models import AuxiliaryConfig
from ringtune.models.family import Widths
from tests.support.cases import cases

WIDTHS = Widths.plain(64, 256)
# Trainable weights that adapters 1.3.0 really added to one block of a BERT with width 64 and inner width 256.
BUILT = {
    "seq_bn": 580,
    "pfeiffer": 580,
    "double_seq_bn": 1160,
    "houlsby": 1160,
    "par_bn": 4192,
    "scaled_par_bn": 4193,
    "lora": 2048,
    "ia3": 384,
    "dora": 2176,
    "loreft": 258,
    "noreft": 258,
    "seq_bn[reduction_factor=8]": 1096,
    "seq_bn[reduction_factor=0.5]": 16576,
    "par_bn[reduction_factor=7]": 1225,
    "seq_bn[ln_before=True]": 708,
    "seq_bn[mh_adapter=True]": 1160,
    "seq_bn[use_gating=True]": 645,
    "seq_bn[leave_out=[0]]": 580,
    "lora[r=4]": 1024,
    "lora[intermediate_lora=True,output_lora=True]": 7168,
    "lora[use_gating=True]": 2178,
    "mtl_lora": 2066,
    "mtl_lora[r=4,n_up_projection=2,task_specific_matrix_type='linear']": 1572,
}
# Of our own kinds, counted by hand: a matrix of 64 x 64 each; 64 * 128 + 128 + 128 * 64 + 64 each.
OWN = {
    "linear": 8192,
    "linear[alpha=0.5,attn_matrices=['q','k','v']]": 12288,
    "linear[selfattn_lora=False,intermediate_lora=True,output_lora=True]": 32768,
    "mlp": 33152,
    "mlp[hidden=1,attn_matrices=['k']]": 193,
    "mlp[hidden=8,leave_out=[0]]": 2192,
}


LEFT_OUT = ("seq_bn[leave_out=[0,1]]", "loreft|lora[leave_out=[1,0]]")


@cases(("config", "params"), [*BUILT.items(), *OWN.items()])
def test_adapter_block_params_equal_the_library(config: str, params: int) -> None:
    """Planning without torch counts what a node will build."""
    assert adapter_block_params(config, hidden_size=64, widths=WIDTHS, num_blocks=2) == params


@cases(
    ("config", "message"),
    [
        *[(config, "adds no weights to any block, nothing would train") for config in LEFT_OUT],
        (
            "seq_bn[reduction_factor={'default': 4, '7': 2}]",
            "reduction_factor names block 7, the model has the blocks 0",
        ),
        *[
            (f"seq_bn[{option}]", "it has to be")
            for option in ("reduction_factor='x'", "reduction_factor=0", "leave_out=3")
        ],
        ("lora[r='x']", "it has to be"),
    ],
)
def test_adapter_block_params_refuse_what_a_model_of_two_blocks_can_not_have(config: str, message: str) -> None:
    """A factor of a block that is not there would be ignored; a method that leaves out every block trains nothing."""
    with pytest.raises(JobError, match=message):
        adapter_block_params(config, hidden_size=64, widths=WIDTHS, num_blocks=2)
    if config in LEFT_OUT:
        assert adapter_block_params(config, hidden_size=64, widths=WIDTHS, num_blocks=3) > 0


@cases(
    ("config", "message"),
    [
        ("", "is not of the form name[option=value, ...]"),
        ("seq_bn[", "is not of the form"),
        ("seq_bn]x", "is not of the form"),
        ("seq_bn|", "'' is not of the form"),
        ("seqbn", "'seqbn' is not known; did you mean 'seq_bn'?"),
        ("bert", "'bert' is not known"),
        ("ful", "did you mean 'full'"),
        ("full|lora", "'full' trains the blocks' own weights; it stands alone"),
        ("seq_bn | full", "'full' trains the blocks' own weights; it stands alone"),
        ("full[reduction_factor=2]", "'full' trains the blocks' own weights; it stands alone"),
        ("full[]", "'full' trains the blocks' own weights; it stands alone"),
        ("lora[r=]", "the options are not readable"),
        ("lora[non_linearity=gelu]", "write texts in quotes"),
        ("lora[r=__import__('os')]", "the options are not readable"),
        ("lora[4]", "write options as option=value"),
        ("compacter", "'compacter' can't be sliced: it shares weights between blocks"),
        ("compacter++", "can't be sliced: it shares weights"),
        ("vera", "can't be sliced"),
        ("prefix_tuning", "can't be sliced"),
        ("mam", "can't be sliced"),
        ("unipelt", "can't be sliced"),
        ("prompt_tuning", "can't be sliced: it adds tokens at the embedding"),
        ("direft", "is refused: the library does not write down what makes it one"),
        ("lora|prefix_tuning", "'prefix_tuning' can't be sliced"),
        ("seq_bn[inv_adapter='nice']", "has inv_adapter alone; set inv_adapter_reduction_factor = 2 too"),
        ("seq_bn_inv[inv_adapter='glow']", "can't be run: the library's GLOW coupling cuts texts between tokens"),
        ("seq_bn_inv[inv_adapter_reduction_factor=0.5]", "it has to be None or a number from 1"),
        ("seq_bn_inv|double_seq_bn_inv", "has two invertible adapters, the library would use the first"),
        ("seq_bn[phm_layer=True]", "can't be sliced: it shares weights"),
        ("lora[vera_d=0.1]", "can't be sliced: it shares weights"),
        ("loreft[layers=[]]", "'loreft' adds no weights to any block, nothing would train"),
        ("lora[attn_matrices=[]]", "'lora' adds no weights to any block, nothing would train"),
        ("seq_bn|lora[selfattn_lora=False]", "'lora' adds no weights to any block, nothing would train"),
        ("seq_bn[reduction_factor={'default': 4, 1: 2}]", "it has to be a number above 0, or a table of them by block"),
        ("seq_bn[reduction_factor={'default': 4, '01': 2}]", "it has to be a number above 0, or a table of them"),
        (
            "linear[attn_matrices=['x']]",
            "'linear': attn_matrices is ['x'], it has to be a list of some of 'q', 'k', 'v'",
        ),
        ("mlp[hidden=0]", "'mlp': hidden is 0, it has to be a whole number from 1 to 4096"),
        ("mlp[hidden=True]", "'mlp': hidden is True, it has to be a whole number"),
        ("linear[alpha=0]", "'linear': alpha is 0, it has to be a number above 0"),
        ("linear[hidden=8]", "'linear' has no option 'hidden'; known here: alpha, attn_matrices"),
        ("mlp[hiden=8]", "'mlp' has no option 'hiden'; did you mean 'hidden'?"),
        ("mlp[attn_matrices=[]]", "'mlp' adds no weights to any block, nothing would train"),
        ("mlp|linear", "gives the matrix query of block 0 both 'mlp' and 'linear', of which it can have one"),
        ("linear[attn_matrices=['q']]|linear[attn_matrices=['q','k']]", "query of block 0 both 'linear' and 'linear'"),
        ("linear[attn_matrices=['v']]|dora", "the matrix value of block 0 both 'dora' and 'linear'"),
        ("linear[leave_out=[0]]|mlp[leave_out=[2]]", "query of block 1 both"),
        ("linear[leave_out=[0]]|mlp[leave_out=[1000000000000]]", "query of block 1 both"),
        ("linear[leave_out=[0,1]]|lora[leave_out=[1,2]]|seq_bn[leave_out=[3]]", "query of block 3 both"),
        ("linear|lora|seq_bn|lora", "has 'lora' twice"),
        ("linear|mlp[attn_matrices=['k'], hidden=0]", "hidden is 0"),
        ("x" * 1001, "has 1001 characters, 1000 are allowed"),
        ("lora[r=" + "(" * 900 + "]", "the options are not readable"),
    ],
)
def test_parse_adapter_config_refuses(config: str, message: str) -> None:
    """Unreadable, unknown, or not inside the blocks: refused before any node builds something."""
    with pytest.raises(JobError) as caught:
        parse_adapter_config(config)
    assert message in str(caught.value)
    assert str(caught.value).startswith("adapter.config ")


def test_auxiliary_of_reads_what_stands_where() -> None:
    """Letters and options become matrices in a fixed order; an adapter of the library has none."""
    mlp = AuxiliaryConfig(kind="mlp", alpha=2.0, hidden=8, places=("query", "value", "output"))
    assert auxiliary_of("mlp[attn_matrices=['v','q'], output_lora=True, hidden=8, alpha=2]") == (mlp,)
    linear = AuxiliaryConfig(kind="linear", alpha=1.0, hidden=0, places=("query", "value"), leave_out=(1,))
    assert auxiliary_of("linear[leave_out=[1]]") == (linear,)
    assert len(auxiliary_of(" linear ")) == 1
    assert [auxiliary_of(other) for other in ("lora", "full", "linearly", "vera", "")] == [()] * 5


def test_invertible_adapter_is_read_from_any_bottleneck_of_a_union() -> None:
    """Widths of the halves of an odd width differ by one; a bottleneck without a channel is refused."""
    config = "lora|par_bn[inv_adapter='nice', inv_adapter_reduction_factor=3]"
    assert [invertible_of(one) for one in ("seq_bn", "full", "lora|mlp[attn_matrices=['k']]")] == [None] * 3
    assert invertible_of("pfeiffer+inv") == invertible_of("houlsby+inv") == Invertible(2)
    found = invertible_of(config)
    assert found == Invertible(3)
    shapes = found.shapes(33)
    assert (shapes["F.0.weight"], shapes["F.2.bias"]) == ((5, 17), (16,))
    assert (shapes["G.0.weight"], shapes["G.2.weight"]) == ((5, 16), (17, 5))
    with pytest.raises(JobError, match=r"inv_adapter_reduction_factor = 3 leaves no channel of 2; lower it"):
        found.shapes(4)


def test_auxiliary_of_and_library_config_take_a_union_apart() -> None:
    """Each matrix has the kind that stands beside it; what the library has is left as it was written."""
    library = ("seq_bn[reduction_factor=8]", "lora[attn_matrices=['k']]")
    union = f"linear[attn_matrices=['q']] | {library[0]}|mlp[attn_matrices=['v'], hidden=8]|{library[1]}"
    assert [(one.kind, one.places) for one in auxiliary_of(union)] == [("linear", ("query",)), ("mlp", ("value",))]
    assert library_config(union) == "|".join(library)
    assert [library_config(other) for other in ("linear", "full", "vera", "lora|seq_bn")] == [
        "",
        "",
        "vera",
        "lora|seq_bn",
    ]


def test_adapter_block_params_count_every_part_of_a_union() -> None:
    """Also where blocks differ: the most of all blocks."""

    def count(config: str) -> int:
        return adapter_block_params(config, hidden_size=64, widths=WIDTHS, num_blocks=2)

    q, v = "[attn_matrices=['q']", "[attn_matrices=['v']"
    assert count(f"linear{q}]|mlp{v},hidden=8]|seq_bn") == sum(
        map(count, (f"linear{q}]", f"mlp{v},hidden=8]", "seq_bn"))
    )
    assert count("linear[leave_out=[0]]|mlp[leave_out=[1],hidden=4]") == count("linear")


def test_places_are_checked_once_the_model_is_known() -> None:
    """One beside query in the blocks that have it, whatever the blocks are that a part leaves out."""
    one, other = "linear[leave_out=[0]]", "lora[leave_out=[1]]"
    assert adapter_block_params(f"{one}|{other}", hidden_size=64, widths=WIDTHS, num_blocks=2) == 8192
    with pytest.raises(
        JobError, match=r"the matrix query of block 2 both 'lora' and 'linear', of which it can have one"
    ):
        adapter_block_params(f"{one}|{other}", hidden_size=64, widths=WIDTHS, num_blocks=3)


def test_one_matrix_for_query_key_and_value_has_one_alpha() -> None:
    """It adds one product with one factor; elsewhere each matrix has its own."""
    config = "linear[attn_matrices=['q'], alpha=2]|mlp[attn_matrices=['v'], hidden=4, output_lora=True]"
    assert adapter_block_params(config, hidden_size=64, widths=WIDTHS, num_blocks=2) > 0
    merged = Widths.plain(64, 256, merged=True)
    with pytest.raises(JobError, match=r"'linear' alpha 2 and 'mlp' alpha 1, but .* are one matrix with one alpha"):
        adapter_block_params(config, hidden_size=64, widths=merged, num_blocks=2)
    apart = "linear[attn_matrices=['q'], alpha=2]|mlp[selfattn_lora=False, hidden=4, output_lora=True]"
    assert adapter_block_params(apart, hidden_size=64, widths=merged, num_blocks=2) > 0
    assert adapter_block_params("linear", hidden_size=64, widths=merged, num_blocks=2) == OWN["linear"]
