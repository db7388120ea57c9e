"""Adapters inside the matrices beside them: the same function, of one user or several, and no drift."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from edge.model.frozen_weights import FrozenFiles, FrozenMatrix
from edge.model.skeleton import Skeleton, build_skeleton
from edge.model.slice import DTYPES, BlockRunner, materialise, module_bytes
from edge.model.tensor_files import SafetensorsFiles
from edge.techniques.offload.helper import AuxiliaryModels
from edge.techniques.offload.merged_matrices import MergedMatrices, is_change
from edge.techniques.offload.pairs import Capture
from edge.techniques.offload.sites import Site, sites_of
from ringtune.errors import IntegrityError, JobError
from ringtune.models.adapter_support import merged_refusal
from ringtune.schedule.course import FrozenWeights
from tests.support import offload
from tests.support.offload import CPU, NUM_BLOCKS, inputs_of, job_of

LINEAR = "linear[alpha=0.5,attn_matrices=['q','v'],output_lora=True]"
INSTALLS = 20


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tiny models are written."""
    return tmp_path_factory.mktemp("models")


def merged_side(
    folder: Path, adapter: str, *, task: str = "", dtype: str = "float64", frozen: str = ""
) -> tuple[offload.Side, MergedMatrices]:
    """A host whose adapters are in its matrices."""
    job = job_of(folder, adapter, task=task, dtype=dtype)
    with torch.random.fork_rng(devices=[]):
        skeleton = build_skeleton(folder, job)
    with FrozenFiles(folder, FrozenWeights(dtype=frozen) if frozen else None) as files:
        materialise(skeleton, files, blocks=range(NUM_BLOCKS), with_embedding=False, dtype=DTYPES[dtype], device=CPU)
    capture = Capture(skeleton, range(NUM_BLOCKS))
    merged = MergedMatrices(skeleton, range(NUM_BLOCKS), folder, job)
    side = offload.Side(skeleton=skeleton, runner=BlockRunner(skeleton, dropout=0.0, seed=3), capture=capture)
    return side, merged


@pytest.mark.parametrize("adapter", ["lora[r=2]", "lora[r=2,init_weights='bert']", LINEAR])
@pytest.mark.sampled(1)
def test_merged_host_begins_as_the_others(root: Path, adapter: str) -> None:
    """Also with an adapter that is not zero at the start."""
    folder = offload.family_folder(root, "gpt2")
    host, _ = merged_side(folder, adapter)
    plain = offload.side(folder, job_of(folder, adapter), offloads=False)
    x = inputs_of("gpt2", 1)[0]
    assert torch.allclose(host.forward(x, 0, dropped=False), plain.forward(x, 0, dropped=False), rtol=1e-9)


def test_merged_host_holds_the_bytes_of_the_base_whatever_the_rank(root: Path) -> None:
    """Of rank 1 and 32, and of a whole matrix; and so it stays after an update."""
    folder = offload.family_folder(root, "gpt2")
    sizes = {}
    for adapter in ("lora[r=1]", "lora[r=32]", LINEAR):
        host, merged = merged_side(folder, adapter)
        at_first = module_bytes(host.skeleton.model)
        tensors = offload.moved(offload.helper(folder, job_of(folder, adapter)))
        merged.install(tensors, range(NUM_BLOCKS), where="the test")
        sizes[adapter] = (at_first, module_bytes(host.skeleton.model))
        assert not host.runner.parameters(0, NUM_BLOCKS)
    base = offload.side(folder, job_of(folder, "lora[r=1]"), offloads=False)
    adapters = sum(value.nbytes for value in base.runner.parameters(0, NUM_BLOCKS).values())
    assert set(sizes.values()) == {(module_bytes(base.skeleton.model) - adapters,) * 2}


def matrix_of(skeleton: Skeleton) -> torch.Tensor:
    """The merged matrix of query, key and value in block 0, as it is multiplied."""
    layer: Any = skeleton.blocks[0].get_submodule("attn.c_attn")
    return layer.weight.wide() if isinstance(layer.weight, FrozenMatrix) else layer.weight.detach()


@pytest.mark.parametrize(("frozen", "epsilon"), [("", 2.0**-24), ("bfloat16", 2.0**-8)])
def test_many_installs_do_not_drift(root: Path, frozen: str, epsilon: float) -> None:
    """The matrix is base plus delta of the last one, rounded once, in float32 as in bfloat16."""
    folder, adapter = offload.family_folder(root, "gpt2"), "lora[r=2,alpha=6]"
    host, merged = merged_side(folder, adapter, dtype="float32", frozen=frozen)
    models = offload.helper(folder, job_of(folder, adapter, dtype="float32"), range(1))
    generator = torch.Generator().manual_seed(7)
    for _ in range(INSTALLS):
        tensors = {name: torch.randn(value.shape, generator=generator) for name, value in models.weights(0, 1).items()}
        merged.install(tensors, [0], where="the test")
    with SafetensorsFiles(folder) as files:
        base = files.read("h.0.attn.c_attn.weight", torch.float64)
    low, up = (tensors[f"0.attn.c_attn.loras.ringtune.lora_{letter}"].double() for letter in "AB")
    delta = torch.zeros_like(base)
    delta[:, :32], delta[:, 64:] = (low[:2].t() @ up[:32].t()), (low[2:].t() @ up[32:].t())
    wanted = base + 3.0 * delta
    wrong = (matrix_of(host.skeleton).double() - wanted).abs()
    assert bool((wrong <= epsilon * wanted.abs() + 1e-5).all())
    fresh, once = merged_side(folder, adapter, dtype="float32", frozen=frozen)
    once.install(tensors, [0], where="the test")
    assert torch.equal(matrix_of(host.skeleton), matrix_of(fresh.skeleton))


def test_adapters_that_are_no_linear_change_are_refused(root: Path) -> None:
    """With their name, and that they work unmerged."""
    folder = offload.family_folder(root, "bert")
    side = offload.side(folder, job_of(folder, "lora"), offloads=False)
    for adapter, dropout, word in (
        ("seq_bn", 0.0, "'seq_bn' can't be merged.*no change of matrices.*offload.merged = false"),
        ("mlp", 0.0, "'mlp' can't be merged.*no change of matrices"),
        ("lora|seq_bn", 0.0, "'seq_bn' can't be merged"),
        ("lora", 0.1, "'lora' can't be merged.*train.dropout = 0.1"),
        ("lora[use_gating=True]", 0.0, "its gate, or DoRA"),
        ("ia3", 0.0, "no change of matrices"),
        ("dora", 0.0, "norm, is no change"),
    ):
        with pytest.raises(JobError, match=word):
            MergedMatrices(side.skeleton, range(NUM_BLOCKS), folder, job_of(folder, adapter, dropout=dropout))
    assert merged_refusal("lora", dropout=0.0) == merged_refusal("linear", dropout=0.1) == ""


def test_matrices_in_int8_are_not_merged(root: Path) -> None:
    """An update would change the scale of every row."""
    with pytest.raises(JobError, match=r"int8.*offload.merged = false"):
        merged_side(offload.family_folder(root, "gpt2"), "lora", dtype="float32", frozen="int8")


def test_merged_host_refuses_weights_that_do_not_fit(root: Path) -> None:
    """Nothing is changed then."""
    folder = offload.family_folder(root, "gpt2")
    host, merged = merged_side(folder, "lora[r=2]")
    before = matrix_of(host.skeleton).clone()
    good = offload.moved(offload.helper(folder, job_of(folder, "lora[r=2]"), range(1)))
    name = next(iter(good))
    for bad in ({**good, name: good[name][:1]}, {name: good[name]}, {**good, name: good[name].float()}):
        with pytest.raises(IntegrityError, match="the weights of step 9"):
            merged.install(bad, [0], where="the weights of step 9")
    assert torch.equal(matrix_of(host.skeleton), before)


USERS = ("anna", "ben", "carl")
FACTORS = "lora[r=2,alpha=16,attn_matrices=['q','v'],intermediate_lora=True]"
ONE_MATRIX = "lora[r=16,alpha=8,attn_matrices=['q','v'],output_lora=True]"
LINEAR_OF_USERS = "linear[alpha=0.5,attn_matrices=['k','v']]"


def host_of(folder: Path, adapter: str, users: int) -> tuple[Skeleton, MergedMatrices]:
    """A host whose matrices have the adapters of so many users."""
    job = job_of(folder, adapter)
    with torch.random.fork_rng(devices=[]):
        skeleton = build_skeleton(folder, job)
    with SafetensorsFiles(folder) as files:
        blocks = range(NUM_BLOCKS)
        materialise(skeleton, files, blocks=blocks, with_embedding=False, dtype=torch.float64, device=CPU)
    Capture(skeleton, range(NUM_BLOCKS))
    return skeleton, MergedMatrices(skeleton, range(NUM_BLOCKS), folder, job, users=users)


def helper_of(folder: Path, adapter: str) -> AuxiliaryModels:
    """The helper of all blocks and users; every set is another one."""
    models = AuxiliaryModels(folder, job_of(folder, adapter), range(NUM_BLOCKS), torch.float64, CPU, USERS)
    offload.moved(models)
    return models


def output_of(skeleton: Skeleton, site: Site, x: torch.Tensor) -> torch.Tensor:
    """What the matrix of a site gives."""
    index, _, path = site.name.partition(".")
    matrix: Any = skeleton.blocks[int(index)].get_submodule(path.removesuffix(".ringtune").removesuffix(".loras"))
    with torch.no_grad():
        found: torch.Tensor = matrix(x)
    return found


@pytest.mark.parametrize("adapter", [FACTORS, ONE_MATRIX, LINEAR_OF_USERS])
@pytest.mark.parametrize("model_type", ["bert", "gpt2", "llama"])
@pytest.mark.sampled(2)
def test_matrix_changes_by_the_sum_of_what_every_user_adds(root: Path, model_type: str, adapter: str) -> None:
    """Also where query, key and value are one matrix, and where the sum travels as one matrix."""
    folder = offload.family_folder(root, model_type)
    models, (host, merged), (base, _) = (
        helper_of(folder, adapter),
        host_of(folder, adapter, 3),
        host_of(folder, adapter, 1),
    )
    merged.install(models.sums(0, NUM_BLOCKS), range(NUM_BLOCKS), where="the test")
    own = [site for block in range(NUM_BLOCKS) for site in sites_of(models.skeleton, block)]
    assert {is_change(site, 3) for site in own} <= {adapter is ONE_MATRIX, False}
    assert any(is_change(site, 3) for site in own) is (adapter is ONE_MATRIX)
    for site in own:
        x = torch.randn(2, 3, site.inputs, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        changed = output_of(host, site, x) - output_of(base, site, x)
        added = torch.zeros_like(changed)
        columns = slice(None) if site.columns is None else site.columns
        assert models._sets is not None
        for user in USERS:
            with models._sets.using(user), torch.no_grad():
                added[..., columns] += site.alpha * site.delta(x)
        assert float(added.norm()) > 0.1
        assert torch.allclose(changed, added, rtol=1e-9, atol=1e-9)


def test_host_refuses_the_sum_of_other_users(root: Path) -> None:
    """Two users' factors are not those of three."""
    folder = offload.family_folder(root, "bert")
    _, merged = host_of(folder, FACTORS, 2)
    with pytest.raises(IntegrityError, match=r"the test has .*lora_A.*expected"):
        merged.install(helper_of(folder, FACTORS).sums(0, NUM_BLOCKS), range(NUM_BLOCKS), where="the test")
