"""What an agent loads: a slice without what it does not need. ``test_agent_figures`` looks at a joining agent too."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from edge.machine.libraries import NEEDLESS
from tests.support.processes import REPOSITORY, source_environment
from tests.support.tiny import write_rows
from tests.support.tiny_families import write_family

TIMEOUT_S = 200.0
HEAVY = {"numpy", "safetensors", "tokenizers", "torch", "transformers"}
# not Pillow: transformers asks for it at each of its places anew, and those who plot or own pictures have it
NEVER = {
    "accelerate",
    "adapters",
    "datasets",
    "librosa",
    "pandas",
    "scipy",
    "sklearn",
    "soundfile",
    "sympy",
    "tensorflow",
    "torch._inductor",
    "torch.distributed.tensor",
    "torchvision",
    "transformers.trainer",
}
HOST = """
import json, sys
from pathlib import Path
from edge.agent import torch_backend
torch_backend.preload()
import torch
from edge.data.dataset import OwnerDataset
from edge.runtime.executor import host
from ringtune.job.job import Job, Model
from tests.support.plans import make_plan
folder = Path(sys.argv[1])
plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["b"], eval_rows=0, labels=())
job = Job(model=Model(path=str(folder), task="causal-lm"))
dataset = OwnerDataset.load(job, folder / "rows.csv", None, tokenizer_folder=folder)
hosted = host(plan, "b", job, folder, dataset, device=torch.device("cpu"))
hidden, mask = torch.randn(2, 5, 32), torch.ones(2, 5, dtype=torch.int64)
output = hosted.blocks.run(hidden, mask, hosted.blocks.context(hidden, mask), 2, 4, train_at=(0, 0))
output.sum().backward()
hosted.optimizers.update([2, 3], 0.1)
print(json.dumps({"modules": sorted(sys.modules)}))
"""
COMPILE = """
import json, sys
from edge.machine.libraries import load_libraries
load_libraries()
import torch
parameter = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.AdamW([parameter])
parameter.grad = torch.ones(2)
optimizer.step()
before = sorted(sys.modules)
import torch._dynamo.utils
assert torch._dynamo.utils is sys.modules["torch._dynamo.utils"] and torch._dynamo is sys.modules["torch._dynamo"]
sums = torch.compile(lambda values: values + 1, backend="eager")(torch.zeros(2))
from torch.fx.experimental.symbolic_shapes import ShapeEnv, sym_eq
optimizer.step()
print(json.dumps({"before": before, "sums": sums.tolist(), "equal": sym_eq((2, 3), (2, 3)), "env": ShapeEnv.__name__}))
"""
OTHER_TORCH = """
import json, sys
from edge.machine import libraries
libraries._AT_ONCE = ("torch._dynamo.part_of_another_version",)
libraries.defer_compiler()
print(json.dumps({"left": [name for name in libraries.DEFERRED if name in sys.modules]}))
"""
# More than names: `transformers` asks for the version of what it finds before it believes it.
INSTALLED = {"scikit-learn": "sklearn"} | {name: name for name in ("accelerate", "librosa", "scipy", "soundfile")}


def python(code: str, *arguments: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run code in a fresh interpreter."""
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", code, *arguments],
        cwd=REPOSITORY,
        env=source_environment() if env is None else env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0 and done.stdout.strip(), f"exit {done.returncode}: {done.stderr}"
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.thorough
def test_hosting_a_slice_loads_nothing_needless_even_if_it_is_installed(tmp_path: Path) -> None:
    """Packages beside transformers stay unloaded at an owner of texts through a forward, a backward and an update."""
    folder = write_family(tmp_path / "model", "llama", with_decoder=True)
    write_rows(folder / "rows.csv", 10)
    site = tmp_path / "site"
    for name, module in {**INSTALLED, "torchvision": "torchvision"}.items():
        package, facts = site / module, site / f"{name.replace('-', '_')}-9.9.dist-info"
        package.mkdir(parents=True)
        facts.mkdir()
        (package / "__init__.py").write_text("__version__ = '9.9'\n")
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")
    path = source_environment()["PYTHONPATH"]
    loaded = set(python(HOST, str(folder), env=source_environment(PYTHONPATH=f"{path}:{site}"))["modules"])
    assert "transformers.models.llama.modeling_llama" in loaded, "it has hosted"
    assert NEVER & loaded == set()


@pytest.mark.thorough
def test_compiler_is_loaded_for_whoever_compiles() -> None:
    """A family that somebody plugs in may compile its blocks; the compiler is there once and whole."""
    found = python(COMPILE)
    assert NEVER & set(found["before"]) == set(), "an optimizer needs none"
    assert (found["sums"], found["equal"], found["env"]) == ([1.0, 1.0], True, "ShapeEnv")


@pytest.mark.thorough
def test_torch_without_the_parts_that_are_known_is_loaded_as_it_is() -> None:
    """Nothing stands for its compiler then: a node of another version starts, with more in its memory."""
    assert python(OTHER_TORCH) == {"left": []}


def test_needless_libraries_have_the_names_that_transformers_knows() -> None:
    """A check that a later version renames would be replaced in vain; transformers 5 knows two of them no more."""
    from transformers.utils import import_utils

    unknown = {name for name in NEEDLESS if not callable(getattr(import_utils, f"is_{name}_available", None))}
    assert unknown in (set(), {"flax", "tf"})
