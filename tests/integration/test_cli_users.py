"""Users with adapters of their own, as somebody types it: train on real nodes, then evaluate and export."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ringtune.errors import UsageError
from tests.integration.test_cli_eval import JOB, good, here
from tests.support import tiny
from tests.support.cluster import Cluster

OFFLOAD = """
[adapter]
config = "lora[r=2,alpha=4]"
[offload]
mode = {mode}
users = "{users}"
merged = {merged}
"""


@pytest.fixture(scope="module")
def trained(ring: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of runs, by whose adapters a row goes through; each trains once."""
    made: dict[str, Path] = {}

    def of(users: str) -> Path:
        if users not in made:
            folder = tmp_path_factory.mktemp(users)
            names = sorted(ring.names)
            others = ", ".join(f'"{one}" = "{other}"' for one, other in zip(names, names[1:] + names[:1], strict=True))
            merged = str(users == "collaboration").lower()
            job = JOB.format(model=ring.model).partition("[unfreeze]")[0] + 'method = "all"\n'
            offload = OFFLOAD.format(mode=f"{{{others}}}", users=users, merged=merged)
            (folder / "job.toml").write_text(job + offload)
            good("train", folder / "job.toml", "--coordinator", ring.address, "--out", folder / "run")
            made[users] = folder / "run"
        return made[users]

    return of


def logits_of(ring: Cluster, folder: Path) -> Any:
    """What an adapter gives with the plain library."""
    from adapters import AutoAdapterModel

    model = AutoAdapterModel.from_pretrained(str(ring.model))
    model.load_adapter(str(folder), use_safetensors=True, set_active=True)
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(5, 15)[None]).logits


@pytest.mark.parametrize("users", ["alone", pytest.param("collaboration", marks=pytest.mark.thorough)])
def test_each_user_has_a_folder_that_loads_with_nothing_of_ours(
    ring: Cluster, trained: Callable[[str], Path], users: str
) -> None:
    """Of every owner, with the same head and another adapter; there is none of all."""
    run = trained(users)
    owners = [owner["node"] for owner in json.loads((run / "plan.json").read_text())["course"]["owners"]]
    assert len(owners) > 1 and not (run / "adapter").exists()
    assert sorted(path.name for path in (run / "users").iterdir()) == sorted(owners)
    logits = [logits_of(ring, run / "users" / owner) for owner in owners]
    assert not torch.equal(logits[0], logits[1])
    heads = {(run / "users" / owner / "model_head.safetensors").read_bytes() for owner in owners}
    assert len(heads) == 1


@pytest.mark.thorough
def test_collaboration_is_evaluated_and_exported_as_the_sum_of_all(
    ring: Cluster, trained: Callable[[str], Path], tmp_path: Path
) -> None:
    """Alone and on the ring the figures of the run on the same rows; and a user's own give others."""
    run = trained("collaboration")
    report = json.loads((run / "report.json").read_text())["eval"]
    for more in ((), ("--coordinator", ring.address)):
        found = good("eval", run, "--data", ring.eval, *more)
        assert (found["count"], found["accuracy"]) == (report["count"], report["accuracy"])
        assert found["loss"] == pytest.approx(report["loss"], rel=1e-4)
    user = sorted(path.name for path in (run / "users").iterdir())[0]
    alone = good("eval", run, "--data", ring.eval, "--user", user)
    assert alone["count"] == report["count"] and alone["loss"] != pytest.approx(report["loss"], rel=1e-4)
    good("export", run, "--out", tmp_path / "sum", "--base-model", "acme/tiny")
    good("export", run, "--out", tmp_path / "one", "--base-model", "acme/tiny", "--user", user)
    assert not torch.allclose(logits_of(ring, tmp_path / "sum"), logits_of(ring, tmp_path / "one"))
    assert torch.equal(logits_of(ring, tmp_path / "one"), logits_of(ring, run / "users" / user))


def test_users_who_trained_alone_are_evaluated_one_at_a_time(ring: Cluster, trained: Callable[[str], Path]) -> None:
    """Without a name the command lists them; with one it counts that user's adapters."""
    run = trained("alone")
    names = sorted(path.name for path in (run / "users").iterdir())
    done = here("eval", run, "--data", ring.eval)
    assert done.returncode == UsageError.exit_code and names[0] in done.stderr and "--user" in done.stderr
    found = [good("eval", run, "--data", ring.eval, "--user", name)["loss"] for name in names]
    assert len(set(found)) == len(names)


@pytest.mark.thorough
def test_users_of_a_column_get_helpers_and_folders_of_their_own(ring: Cluster, tmp_path: Path) -> None:
    """The rows of each owner are of several users, whom a column names; the planner chooses who helps.

    One user has an adapter of another kind, and the sum of both is one matrix beside each.
    """
    names = ("ben", "anna")
    for name, count in (("train", 24), ("eval", 8)):
        rows = [
            {"text": text, "label": label, "author": names[at % 2]}
            for at, (text, label) in enumerate(tiny.make_rows(count, seed=count))
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = JOB.format(model=ring.model).partition("[unfreeze]")[0] + 'method = "all"\n'
    offload = OFFLOAD.format(mode='"auto"', users="collaboration", merged="true") + 'adapters = { anna = "linear" }\n'
    data = '[data]\ntrain = "train.jsonl"\neval = "eval.jsonl"\nuser = "author"\n'
    (tmp_path / "job.toml").write_text(job + data + offload)
    plan = tmp_path / "plan.json"
    good("plan", tmp_path / "job.toml", "--assume", 2, "--memory", "1GiB", "--save", plan)  # two equal nodes
    good("train", tmp_path / "job.toml", "--local", 2, "--plan", plan, "--out", tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run/users").iterdir()) == ["anna", "ben"]
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert report["offload"]["rows_by_user"] == {name: {"train": 12, "eval": 4} for name in sorted(names)}
    assert len(report["offload"]["helpers"]) == 2
    for name in ("anna/adapter.json", "ben/adapter_config.json"):
        assert (tmp_path / "run/users" / name).exists()
    assert good("eval", tmp_path / "run")["loss"] == pytest.approx(report["eval"]["loss"], rel=1e-4)
    assert good("eval", tmp_path / "run", "--user", "anna")["loss"] != pytest.approx(report["eval"]["loss"], rel=1e-4)
    good("export", tmp_path / "run", "--out", tmp_path / "sum", "--base-model", "acme/tiny")
    described = json.loads((tmp_path / "sum/adapter.json").read_text())
    assert [(part["kind"], part["places"]) for part in described["parts"]] == [("linear", ["query", "value"])]
    good("export", tmp_path / "run", "--merge", "--out", tmp_path / "merged", "--base-model", "acme/tiny")
