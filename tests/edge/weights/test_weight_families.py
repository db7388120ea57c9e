"""What is fetched is what is read, for every family: a node builds the same from its cache as from a copy."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from edge.model.tensor_files import SafetensorsFiles
from edge.options import AgentOptions
from edge.runtime.executor import HostedModel, host
from edge.weights.weight_fetch import ModelFetcher
from ringtune.errors import ModelError
from ringtune.job.job import Job, Model
from ringtune.models.families import FAMILIES
from ringtune.models.folder import base_tensors, read_config, select_tensors
from ringtune.schedule.plan import Plan
from tests.support.plans import make_plan
from tests.support.tiny_families import DECODERS, IMAGE_TOKENS, MODEL_TYPES, write_family
from tests.support.weights_parts import RUN, TIMEOUT_S, digest_at, serving

CASES: list[tuple[str, dict[str, Any]]] = [(model_type, {}) for model_type in MODEL_TYPES]
CASES += [("llama", {"tie_word_embeddings": False}), ("gpt2", {"tie_word_embeddings": False}), ("deberta-v2", {})]


def job_of(model_type: str) -> Job:
    """A job with the task that the family is mostly used for."""
    task = {"vit": "image-classification"}.get(model_type, "sequence-classification")
    task = "causal-lm" if model_type in DECODERS else task
    job = Job(model=Model(path="nowhere/tiny", task=task))
    job = job.with_overrides({"adapter.config": "lora"}) if model_type == "deberta-v2" else job
    return job.with_overrides({"train.max_length": IMAGE_TOKENS if model_type == "vit" else 16})


def built(plan: Plan, node: str, job: Job, folder: Path) -> HostedModel:
    """What a node hosts, from a folder."""
    dataset: Any = None
    if plan.owner(node) is not None:
        owner = plan.owner(node)
        dataset = SimpleNamespace(
            train_rows=owner.train_rows, eval_rows=owner.eval_rows, set_labels=lambda labels: None, labels=()
        )
    return host(plan, node, job, folder, dataset, device=torch.device("cpu"))


@pytest.mark.parametrize(("model_type", "config"), CASES)
@pytest.mark.sampled(2)
def test_weights_of_a_family_are_those_that_are_read(
    model_type: str, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host, and an owner with private blocks: equal tensors, every one of them read, none of them missing."""
    folder = write_family(tmp_path / "tiny", model_type, with_decoder=model_type in DECODERS, **config)
    job = job_of(model_type)
    is_lm = job.model.task == "causal-lm"
    plan = make_plan(
        [("a", 1, 3), ("b", 3, 4)],
        ["a"],
        private_blocks=1,
        max_length=job.train.max_length,
        labels=() if is_lm else ("neg", "pos"),
    )
    read: list[str] = []
    original = SafetensorsFiles.read

    def record(weights: SafetensorsFiles, name: str, dtype: torch.dtype | None = None, **how: bool) -> torch.Tensor:
        read.append(name)
        return original(weights, name, dtype, **how)

    monkeypatch.setattr(SafetensorsFiles, "read", record)
    with serving(folder) as server:
        for node in ("a", "b"):
            options = AgentOptions(
                coordinator=f"127.0.0.1:{server.port}",
                name=node,
                cache=tmp_path / f"cache-{node}",
                data=tmp_path if node == "a" else None,
            )
            borrower = ModelFetcher(options, list)
            borrower.trust(RUN, digest_at(options.coordinator))
            borrower.for_planning(RUN, job, timeout_s=TIMEOUT_S)
            cache = Path(borrower.for_run(RUN, job, plan, timeout_s=TIMEOUT_S).model.path)
            wanted = built(plan, node, job, folder)
            read.clear()
            found = built(plan, node, job, cache)
            with SafetensorsFiles(cache) as weights:
                assert {weights.find(name, FAMILIES[model_type]) for name in read} == set(read)
            assert len(set(read)) == len(list(cache.glob("*.safetensors")))
            expected = dict(wanted.skeleton.model.state_dict())
            state = dict(found.skeleton.model.state_dict())
            assert state.keys() == expected.keys()
            assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_families_know_every_tensor_that_a_model_has_to_have(family: Callable[[str], Path]) -> None:
    """Planning names a tensor that is in no block, or is not beside them, before any node loads the model."""
    for model_type in MODEL_TYPES:
        config, known = read_config(family(model_type)), FAMILIES[model_type]
        shapes = {name: stored.shape for name, stored in base_tensors(family(model_type), config).items()}
        first, second = (f"{known.block_prefix}{block}." for block in range(2))
        owned = tuple(f"{path}." for path in known.owner_paths)
        needed = [name for name in shapes if name.startswith((first, *owned))]
        assert len(needed) > 10
        for absent in needed:
            gone = {absent, absent.replace(first, second)}
            left = {name: shape for name, shape in shapes.items() if name not in gone}
            with pytest.raises(ModelError, match=f"has no tensor '{re.escape(absent)}'"):
                select_tensors(left, config, where="m", blocks=range(2), is_owner=True, with_decoder=False)
