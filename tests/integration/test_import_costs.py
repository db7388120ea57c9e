"""What an agent loads, and when: membership without torch, a slice without what it does not need."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.machine.libraries import NEEDLESS
from tests.bench.imports import environment, join_once, load_once, python

HEAVY = {"adapters", "numpy", "safetensors", "tokenizers", "torch", "transformers"}
# not Pillow: transformers asks for it at each of its places anew, and those who plot or own pictures have it
NEVER = {
    "accelerate",
    "adapters.trainer",
    "datasets",
    "librosa",
    "pandas",
    "scipy",
    "sklearn",
    "soundfile",
    "tensorflow",
    "torchvision",
    "transformers.trainer",
}
HOST = """
import json, sys
from pathlib import Path
from edge.agent import workshop
workshop.preload()
import torch
from edge.compute.hosting import host
from ringtune.jobs.job import Job, Model
from tests.support.plans import make_plan
folder = Path(sys.argv[1])
plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["c"])
hosted = host(plan, "b", Job(model=Model(path=str(folder))), folder, None, device=torch.device("cpu"))
hidden, mask = torch.randn(2, 5, 32), torch.ones(2, 5, dtype=torch.int64)
output = hosted.blocks.run(hidden, mask, hosted.blocks.context(hidden, mask), 2, 4, train_at=(0, 0))
output.sum().backward()
hosted.optimizers.update([2, 3], 0.1)
print(json.dumps({"modules": sorted(sys.modules)}))
"""
# More than names: `transformers` asks for the version of what it finds before it believes it.
INSTALLED = {"scikit-learn": "sklearn"} | {name: name for name in ("accelerate", "librosa", "scipy", "soundfile")}


def test_joining_loads_no_torch() -> None:
    """An agent is a member before it has loaded torch, the model libraries, or anything that they bring."""
    loaded = set(join_once()["modules"])
    assert {"grpc", "edge.agent.membership"} <= loaded, "it has joined"
    assert HEAVY & loaded == set()


def test_loading_for_a_slice_loads_nothing_needless() -> None:
    """Of the libraries the idle agent loads what a slice needs: no trainer, no data sets."""
    loaded = set(load_once()["modules"])
    assert {"torch", "adapters.heads", "transformers.modeling_utils"} <= loaded
    assert NEVER & loaded == set()


@pytest.mark.thorough
def test_hosting_a_slice_loads_nothing_needless_even_if_it_is_installed(tmp_path: Path) -> None:
    """Packages beside transformers stay unloaded through a forward, a backward and an update."""
    from tests.support import tiny

    folder = tiny.write_model(tmp_path / "model")
    site = tmp_path / "site"
    for name, module in {**INSTALLED, "torchvision": "torchvision"}.items():
        package, facts = site / module, site / f"{name.replace('-', '_')}-9.9.dist-info"
        package.mkdir(parents=True)
        facts.mkdir()
        (package / "__init__.py").write_text("__version__ = '9.9'\n")
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")
    path = environment()["PYTHONPATH"]
    loaded = set(python(HOST, str(folder), env=environment(PYTHONPATH=f"{path}:{site}"))["modules"])
    assert "transformers.models.bert.modeling_bert" in loaded, "it has hosted"
    assert NEVER & loaded == set()


@pytest.mark.parametrize("name", NEEDLESS)
def test_needless_libraries_have_the_names_that_transformers_knows(name: str) -> None:
    """A flag that a later version renames would be set in vain."""
    from transformers.utils import import_utils

    assert isinstance(getattr(import_utils, f"_{name}_available"), bool)
