"""HiFT on real processes: two owners, gradients of embedding and head over the wire, and a resume in mid-sweep."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load

from coordinator.run.run_text import is_step
from ringtune.run_control.checkpoint import Resume
from ringtune.run_control.continuation import with_state_where_asked
from tests.support import hift_reference
from tests.support.cluster import Cluster, Outcome
from tests.support.replay import replay
from tests.support.results import datasets_of, largest_difference

pytestmark = pytest.mark.slow

HEAD = {"heads.ringtune.1.": "bert.pooler.dense.", "heads.ringtune.4.": "classifier."}
"""AdapterHub's head of a BERT, and the same two layers in a model of transformers."""


def trained(outcome: Outcome) -> dict[str, torch.Tensor]:
    """The tensors of the model that a run leaves."""
    return load(bytes(outcome.files["model/model.safetensors"]))


def plain_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The names that transformers gives to the tensors of the reference."""
    found = {}
    for name, value in tensors.items():
        ours = next((before for before in HEAD if name.startswith(before)), "")
        found[HEAD.get(ours, "") + name.removeprefix(ours)] = value
    return found


@pytest.mark.promise("1 partition invariance")
@pytest.mark.thorough
def test_hift_on_real_processes_equals_one_process_and_resumes(cluster: Cluster) -> None:
    """Three nodes, two owners, float64: equal to 1e-9; recordings replay; resumed, on disks too: the same bits."""
    job = cluster.job(train__method="hift", train__max_steps=9, train__checkpoint_every=3, runtime__record=True)
    outcome = cluster.run(job)
    assert outcome.is_done and outcome.plan is not None, outcome.message
    wanted = hift_reference.train_hift(job, outcome.plan, cluster.model, datasets_of(cluster, job))
    assert largest_difference(trained(outcome), plain_names(hift_reference.tensors_of(wanted.model))) < 1e-9
    losses = {line["step"]: line["loss"] for line in outcome.metrics if is_step(line)}
    assert [losses[step] for step in sorted(losses)] == pytest.approx(wanted.losses, abs=1e-9)
    for node in outcome.plan.nodes:
        lines = outcome.files[f"recordings/{node}.jsonl"].decode().splitlines()
        assert replay(lines, outcome.plan, node) == len(lines) - 1 > 0
    first = outcome.checkpoints[0]
    assert first.step == 3  # of six groups
    again = cluster.follow(job, Resume(plan=outcome.plan, manifests=(first,))).wait()
    assert (again.message, again.resumed_at) == ("", 3)
    assert largest_difference(trained(again), trained(outcome)) == 0.0
    on_disk = job.with_overrides({"hift.state": "disk"})
    moved = Resume(plan=with_state_where_asked(outcome.plan, on_disk), manifests=(first,))
    again = cluster.follow(on_disk, moved).wait()
    assert (again.message, again.resumed_at) == ("", 3)
    assert largest_difference(trained(again), trained(outcome)) == 0.0
