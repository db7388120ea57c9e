"""The adapters of several users inside one matrix: the sum of what each of them changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from edge.compute.capturing.capture import Capture
from edge.compute.capturing.merged import MergedMatrices
from edge.compute.capturing.sites import Site, sites_of
from edge.compute.capturing.sums import is_change
from edge.compute.helping.auxiliary_models import AuxiliaryModels
from edge.model.safetensors_files import SafetensorsFiles
from edge.model.skeleton import Skeleton, build_skeleton
from edge.model.slice import materialise
from ringtune.errors import IntegrityError
from tests.support import offload
from tests.support.offload import CPU, NUM_BLOCKS, job_of

USERS = ("anna", "ben", "carl")
FACTORS = "lora[r=2,alpha=16,attn_matrices=['q','v'],intermediate_lora=True]"
ONE_MATRIX = "lora[r=16,alpha=8,attn_matrices=['q','v'],output_lora=True]"
LINEAR = "linear[alpha=0.5,attn_matrices=['k','v']]"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tiny models are written."""
    return tmp_path_factory.mktemp("models")


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


@pytest.mark.parametrize("adapter", [FACTORS, ONE_MATRIX, LINEAR])
@pytest.mark.parametrize("model_type", ["bert", "gpt2", "llama"])
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


@pytest.mark.parametrize("adapter", [FACTORS, ONE_MATRIX, LINEAR])
def test_sums_are_never_larger_than_sets_or_matrices(root: Path, adapter: str) -> None:
    """What a host gets does not grow with users beyond the matrices that it holds anyway."""
    models = helper_of(offload.family_folder(root, "bert"), adapter)
    sums, sets = models.sums(0, 1), models.weights(0, 1, USERS)
    matrices = sum(site.inputs * site.outputs for site in sites_of(models.skeleton, 0))
    assert sum(value.numel() for value in sums.values()) <= min(matrices, sum(value.numel() for value in sets.values()))


def test_host_refuses_the_sum_of_other_users(root: Path) -> None:
    """Two users' factors are not those of three."""
    folder = offload.family_folder(root, "bert")
    _, merged = host_of(folder, FACTORS, 2)
    with pytest.raises(IntegrityError, match=r"the test has .*lora_A.*expected"):
        merged.install(helper_of(folder, FACTORS).sums(0, NUM_BLOCKS), range(NUM_BLOCKS), where="the test")
