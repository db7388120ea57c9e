"""The adapters of several users added up: one adapter that adds what all of them add."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from coordinator.run.result_files import users_folders
from edge.model import merge
from edge.model.result import users_files
from edge.model.tensor_files import SafetensorsFiles
from edge.techniques.offload.helper import AdapterModules
from ringtune.errors import IntegrityError
from ringtune.job.job import Job, job_of_user, result_of_user
from ringtune.models.result_files import block_of
from ringtune.schedule.course import COLLABORATION, HelperSettings
from ringtune.schedule.run_shape import Owner
from ringtune.techniques.offload import helped
from tests.support import offload
from tests.support.plans import changed, make_plan
from tests.support.whole_models import built

USERS = ("anna", "ben", "cleo")
LABELS = ("neg", "pos")
PRIVATE = "lora[r=2,alpha=6,init_weights='bert']"
CASES = [
    ("bert", "lora[r=2,alpha=6,attn_matrices=['q','v'],output_lora=True]"),
    ("gpt2", "lora[r=2,alpha=3,attn_matrices=['q','v'],intermediate_lora=True]"),
    ("bert", offload.KINDS[3]),
    ("gpt2", offload.KINDS[3]),
    ("gpt2", "lora[r=2,alpha=3,attn_matrices=['q']]|linear[alpha=0.5,attn_matrices=['v'],output_lora=True]"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models."""
    return tmp_path_factory.mktemp("models")


KINDS = [
    ("bert", "lora[r=2,alpha=6,attn_matrices=['q','v']]", "linear[alpha=0.5,attn_matrices=['k','v'],output_lora=True]"),
    ("gpt2", "lora[r=2,alpha=3,attn_matrices=['k','v']]", "linear[alpha=0.5,attn_matrices=['q','v']]"),
    ("gpt2", "linear[attn_matrices=['v']]", "lora[r=2,alpha=3,attn_matrices=['q','v'],intermediate_lora=True]"),
    ("llama", "lora[r=2,output_lora=True]", "lora[r=3,alpha=6,attn_matrices=['q','k']]"),
]


def _write_run(folder: Path, job: Job, *, private: int = 0) -> Path:
    """A run of three users, whose adapters are numbers drawn anew for each; those of private blocks are as built."""
    folder.mkdir(parents=True)
    (folder / "job.toml").write_text(job.to_toml())
    owners = tuple(Owner(node=user, train_rows=4) for user in USERS)
    plan = make_plan(
        [("anna", private, offload.NUM_BLOCKS)],
        USERS,
        num_blocks=offload.NUM_BLOCKS,
        labels=LABELS,
        method="all",
        private_blocks=private,
    )
    plan = changed(plan, owners=owners)
    plan = helped(plan, {"anna": "z"}, HelperSettings(users=COLLABORATION, merged=True))
    (folder / "plan.json").write_text(json.dumps(plan.to_json()))
    path, blocks, cpu = Path(job.model.path), range(offload.NUM_BLOCKS), torch.device("cpu")
    skeleton = built(path, job, blocks, labels=LABELS, dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    kinds = {user: AdapterModules(path, job_of_user(job, user), blocks, torch.float64, cpu) for user in USERS}
    sets = {
        user: {
            name: torch.randn(value.shape, generator=generator, dtype=value.dtype)
            for name, value in modules.parameters(blocks[private:]).items()
        }
        for user, modules in kinds.items()
    }
    others = {user: kinds[user].skeleton for user in job.offload.chosen_adapters}
    files = users_files(skeleton, sets, without_blocks=(), with_head=True, others=others)
    results = {user: result_of_user(job, user) for user in USERS}
    for place, content in users_folders({"anna": files}, results).items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_bytes(bytes(content))
    return folder


def _job(models: Path, model_type: str, adapter: str) -> Job:
    return offload.job_of(offload.family_folder(models, model_type), adapter)


def _merged(run: Path, out: Path, *more: str) -> dict[str, torch.Tensor]:
    """The weights that merging writes."""
    out.mkdir()
    assert merge.main([str(run), str(out), *more]) == 0
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize(("model_type", "adapter"), CASES)
@pytest.mark.sampled(1)
def test_merged_sum_adds_what_every_user_adds(models: Path, tmp_path: Path, model_type: str, adapter: str) -> None:
    """A matrix beside which adapters stand changes by the sum of its changes; also where three are one matrix.

    The sum is an adapter, too, that gives the same beside the base model and loads without us.
    """
    job = _job(models, model_type, adapter)
    run = _check_sum(job, tmp_path)
    (tmp_path / "sum").mkdir()
    assert merge.main([str(run), str(tmp_path / "sum"), "--sum"]) == 0
    _check_adapter(job, tmp_path / "sum", tmp_path / "all")


@pytest.mark.parametrize(("model_type", "adapter", "other"), KINDS)
@pytest.mark.sampled(1)
def test_merged_sum_adds_what_users_of_other_kinds_add(
    models: Path, tmp_path: Path, model_type: str, adapter: str, other: str
) -> None:
    """Low rank and linear, beside the same matrices or others, with a factor each, become one matrix."""
    _check_sum(_with_kinds(_job(models, model_type, adapter), {"ben": other}), tmp_path, shares=False)


def _with_kinds(job: Job, adapters: dict[str, str]) -> Job:
    offload = {"mode": "auto", "users": "collaboration", "merged": True, "adapters": adapters}
    return Job.from_tables({**job.to_tables(), "offload": offload})


def _check_sum(job: Job, tmp_path: Path, *, shares: bool = True) -> Path:
    """Compare the merged sum with what each user alone changes; with ``shares`` all change the same matrices."""
    run = _write_run(tmp_path / "run", job)
    together = _merged(run, tmp_path / "all")
    alone = {user: _merged(run, tmp_path / user, "--user", user) for user in USERS}
    changed_names = set()
    with SafetensorsFiles(Path(job.model.path)) as weights:
        for name, value in together.items():
            if block_of(name) is None:
                continue
            base = weights.read(name.partition(".")[2]).double()
            want = base + sum(own[name] - base for own in alone.values())
            torch.testing.assert_close(value, want, rtol=0, atol=1e-12)
            if not torch.equal(value, base):
                changed_names.add(name)
                assert not shares or all(not torch.allclose(own[name], value) for own in alone.values())
    assert len(changed_names) >= offload.NUM_BLOCKS
    return run


@pytest.mark.parametrize(("model_type", "adapter"), [("bert", PRIVATE), ("gpt2", PRIVATE)])
@pytest.mark.sampled(1)
def test_sum_has_the_adapters_of_blocks_that_never_train_once(
    models: Path, tmp_path: Path, model_type: str, adapter: str
) -> None:
    """They are the same for all users, and not zero at the start: each forward of the run had them once."""
    job = _job(models, model_type, adapter)
    run = _write_run(tmp_path / "run", job, private=1)
    together, alone = _merged(run, tmp_path / "all"), _merged(run, tmp_path / "ben", "--user", "ben")
    same = {name for name, value in together.items() if torch.allclose(value, alone[name], rtol=0, atol=1e-12)}
    changed_names = set()
    with SafetensorsFiles(Path(job.model.path)) as weights:
        for name, value in together.items():
            if block_of(name) is not None and not torch.equal(value, weights.read(name.partition(".")[2]).double()):
                changed_names.add(name)
    assert {block_of(name) for name in changed_names & same} == {0}
    assert {block_of(name) for name in changed_names - same} == {1}


def _check_adapter(job: Job, adapter: Path, merged_folder: Path) -> None:
    """A folder gives, beside the base model, what the base model gives with the sum in its matrices."""
    from adapters import AutoAdapterModel

    from edge.model.auxiliary import load_auxiliary
    from tests.support import tiny

    ids = torch.arange(1, 9).reshape(2, 4) % len(tiny.vocabulary())
    plain = AutoAdapterModel.from_pretrained(job.model.path).double()
    merged = AutoAdapterModel.from_pretrained(str(merged_folder)).double()
    with torch.no_grad():
        before = plain(input_ids=ids).last_hidden_state
    if (adapter / "adapter_config.json").exists():
        plain.load_adapter(str(adapter), use_safetensors=True, set_active=True, with_head=False)
    else:
        load_auxiliary(plain, adapter)
    with torch.no_grad():
        got, want = (model.double().eval().base_model(input_ids=ids)[0] for model in (plain, merged))
    assert float((got - want).abs().max()) < 1e-5
    assert float((got - before).abs().max()) > 1e-3


def test_sum_of_adapters_that_differ_or_are_damaged_is_refused(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file and the tensor are named, and nothing is written."""
    run = _write_run(tmp_path / "run", _job(models, *CASES[0]))
    (tmp_path / "out").mkdir()
    path = run / "users/ben/adapter.safetensors"
    good, content = load_file(path), path.read_bytes()
    name = next(name for name in good if name.endswith("lora_B"))
    for tensors in (dict(list(good.items())[:-1]), {**good, name: torch.zeros(good[name].shape[0], 9)}):
        save_file(tensors, path)
        assert merge.main([str(run), str(tmp_path / "out"), "--sum"]) == IntegrityError.exit_code
        assert f"{path} and that of anna differ in " in capsys.readouterr().err
    path.write_bytes(content[:-1])
    assert merge.main([str(run), str(tmp_path / "out")]) == IntegrityError.exit_code
    assert str(path) in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())
