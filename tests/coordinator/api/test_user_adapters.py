"""Whose adapters are exported and evaluated of a run in which each user has their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load, save
from typer.testing import CliRunner

from coordinator.api.export import export_run
from coordinator.api.user_adapters import adapter_of, require_user
from coordinator.client.saved_run import evaluation_job, read_run
from ringtune import cli
from ringtune.errors import IntegrityError, InvalidInputError, RingTuneError, UsageError
from ringtune.models.adapter_config import parse_adapter_config
from tests.support.saved_runs import users_instead, write_run

NAMES = ["README.md", "adapter.safetensors", "adapter_config.json", "head_config.json", "model_head.safetensors"]


def run_of(folder: Path, users: str) -> Path:
    """The folder of a run of alice and bob."""
    run = write_run(folder / "secret-place" / "run")
    users_instead(run, users)
    return run


@pytest.mark.parametrize("users", ["alone", "collaboration"])
def test_export_of_a_user_is_their_folder_and_names_nobody(tmp_path: Path, users: str) -> None:
    """Their tensors byte for byte; a card without the figures of all users, and without any name."""
    run = run_of(tmp_path, users)
    assert sorted(export_run(run, tmp_path / "out", user="bob")) == NAMES
    for name in ("adapter.safetensors", "model_head.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (run / "users/bob" / name).read_bytes()
    card = (tmp_path / "out/README.md").read_text()
    assert "| users | one of 2 users with adapters of their own |" in card.splitlines()
    assert "It was not evaluated" in card
    everything = b"".join(path.read_bytes() for path in (tmp_path / "out").iterdir())
    assert not any(name in everything for name in (b"alice", b"bob", b"carol", b"secret-place"))


@pytest.mark.usefixtures("merging_here")
def test_export_of_collaboration_is_the_sum_of_all(tmp_path: Path) -> None:
    """One adapter of twice the rank, with the factors of both beside each other, and the figures of the run."""
    digests = export_run(run_of(tmp_path, "collaboration"), tmp_path / "out")
    assert sorted(digests) == NAMES
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())["config"]
    assert (config["r"], config["alpha"]) == (4, 8)
    for name, value in load((tmp_path / "out/adapter.safetensors").read_bytes()).items():
        rows = value if name.endswith("lora_A") else value.T
        assert rows.shape == (4, 8) and rows.tolist() == [[1.0] * 8] * 2 + [[2.0] * 8] * 2
    lines = (tmp_path / "out/README.md").read_text().splitlines()
    assert "| users | all 2 users with adapters of their own, added up |" in lines and "| accuracy | 0.8 |" in lines


@pytest.mark.usefixtures("merging_here")
def test_evaluation_gets_the_folder_of_one_adapter(tmp_path: Path) -> None:
    """Of a user their own; of collaboration the sum, with the job of its rank, for as long as it takes."""
    run = read_run(run_of(tmp_path, "collaboration"))
    with adapter_of(run, "alice") as one:
        assert one.saved == run.folder / "users/alice"
        assert evaluation_job(one, None).adapter.config == run.job.adapter.config
    with adapter_of(run, "") as together:
        assert not together.result.missing_in(together.saved)
        (part,) = parse_adapter_config(evaluation_job(together, None).adapter.config)
        assert (part.options["r"], part.options["alpha"], part.options["attn_matrices"]) == (4, 8, ["q"])
    assert not together.saved.exists()


@pytest.mark.parametrize(
    ("users", "typed", "message"),
    [
        ("alone", [], "for that user's rows; give --user with one of alice, bob"),
        ("alone", ["--user", "bobby"], "has no user 'bobby'; give --user with one of alice, bob"),
        ("collaboration", ["--user", "../alice"], "has no user '../alice'; give --user with one of alice, bob"),
        ("collaboration", ["--user", "alice/"], "has no user 'alice/'; give --user"),
        ("joint", ["--user", "alice"], "has no adapters of single users, all rows trained the same; leave --user out"),
    ],
)
def test_user_who_is_missing_or_unknown_is_refused(tmp_path: Path, users: str, typed: list[str], message: str) -> None:
    """One line that lists the users; nothing is begun."""
    run = write_run(tmp_path / "run") if users == "joint" else run_of(tmp_path, users)
    for words in (["export", "--out", str(tmp_path / "out")], ["eval", "--data", str(tmp_path / "none.csv")]):
        shown = CliRunner().invoke(cli.app, [*words, str(run), *typed])
        assert shown.exit_code == UsageError.exit_code
        assert message in shown.stderr and "Traceback" not in shown.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("merging_here")
def test_user_has_to_be_named_for_merging_too_where_all_trained_alone(tmp_path: Path) -> None:
    """No forward of that run saw the sum, so nobody gets it by leaving an option out."""
    run = run_of(tmp_path, "alone")
    with pytest.raises(
        UsageError, match="were trained alone, for that user's rows; give --user with one of alice, bob"
    ):
        export_run(run, tmp_path / "out", merge=True)
    with pytest.raises(RingTuneError, match="the base model /srv/carol/models/tiny is not there"):
        export_run(run, tmp_path / "out", merge=True, user="alice")


def test_users_who_are_many_are_not_all_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first twenty, and how many more."""
    run = read_run(run_of(tmp_path, "alone"))
    monkeypatch.setattr(type(run), "users", tuple(f"user-{number}" for number in range(24)))
    with pytest.raises(UsageError, match=r"user-18, user-19 and 4 more$"):
        require_user(run, "nobody")


def test_run_of_users_lacks_a_file_of_one(tmp_path: Path) -> None:
    """A run with half of its users' folders is no whole run; the file is named."""
    run = run_of(tmp_path, "collaboration")
    (run / "users/bob/head_config.json").unlink()
    with pytest.raises(InvalidInputError, match=r"has no users/bob: users/bob/head_config\.json is missing"):
        read_run(run)


@pytest.mark.usefixtures("merging_here")
def test_damaged_file_of_a_user_is_named(tmp_path: Path) -> None:
    """By the export of that user, and by that of the sum, which leaves nothing behind."""
    run = run_of(tmp_path, "collaboration")
    path = run / "users/bob/adapter.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    for user in ("", "bob"):
        with pytest.raises(IntegrityError, match=str(path)):
            export_run(run, tmp_path / "out", user=user)
    path.write_bytes(save(dict(list(load(whole).items())[1:])))
    with pytest.raises(IntegrityError, match=r"users/bob/adapter\.safetensors and that of alice differ in bert\."):
        export_run(run, tmp_path / "out")
    export_run(run, tmp_path / "out", user="alice")
