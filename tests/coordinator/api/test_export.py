"""Export of a run's adapter: whole, checked, without anything local; of plugged families, and of single users."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import load, save
from typer.testing import CliRunner

from coordinator.api.export import export_run
from coordinator.api.model_card import whole_model_card
from coordinator.client.saved_run import adapter_of, evaluation_job, read_run, require_user
from ringtune import cli
from ringtune.errors import IntegrityError, InvalidInputError, ModelError, RingTuneError, UsageError
from ringtune.job.job import load_job
from ringtune.models.adapter_config import INVERTIBLE_TENSORS, parse_adapter_config
from ringtune.schedule.methods import Hift
from ringtune.schedule.plan import Plan
from ringtune.schedule.saved_activations import Velora
from ringtune.schedule.units import Range
from tests.support.disk import log_of_syncs
from tests.support.plans import changed
from tests.support.saved_runs import (
    AUXILIARY,
    auxiliary_instead,
    mixture_instead,
    own_weights_instead,
    users_instead,
    whole_model_instead,
    write_run,
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder."""
    return write_run(tmp_path / "secret-place" / "run")


def test_export_has_adapter_and_card(run: Path, tmp_path: Path) -> None:
    """Five files; tensors byte for byte; the digests are those of the files."""
    digests = export_run(run, tmp_path / "out").sha256
    assert {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / "out").iterdir()
    } == digests
    assert sorted(digests) == [
        "README.md",
        "adapter.safetensors",
        "adapter_config.json",
        "head_config.json",
        "model_head.safetensors",
    ]
    for name in ("adapter.safetensors", "model_head.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (run / "adapter" / name).read_bytes()
    assert not list(tmp_path.glob("*.part"))


def test_export_card_says_what_it_is_and_not_who(run: Path, tmp_path: Path) -> None:
    """Base model, task, labels, steps, seed, owner count, versions and figures; no node name, no path."""
    digests = export_run(run, tmp_path / "out", base_model="acme/tiny").sha256
    card = (tmp_path / "out/README.md").read_text()
    assert "last token" not in card  # an encoder reads the first one
    assert "```\n\nThe lines need AdapterHub's library: `pip install 'adapters==1.3.*'`.\n" in card
    for line in (
        'base_model: "acme/tiny"',
        "| task | sequence-classification |",
        "| labels | neg, pos |",
        "| steps | 8 |",
        "| seed | 0 |",
        "| data owners | 2 |",
        "| RingTune | 0.1.0 |",
        "| library | adapters.1.3.0 |",
        "| accuracy | 0.8 |",
        "| count | 5 |",
        f"| `adapter.safetensors` | `{digests['adapter.safetensors']}` |",
    ):
        assert line in card.splitlines()
    everything = b"".join(path.read_bytes() for path in (tmp_path / "out").iterdir())
    for private in (b"alice", b"bob", b"carol", b"secret-place", str(tmp_path).encode()):
        assert private not in everything
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["model_name"] == "acme/tiny"


@pytest.mark.parametrize("has_old_head", [True, False])
def test_export_of_a_language_model_has_no_head(run: Path, tmp_path: Path, has_old_head: bool) -> None:
    """Its decoder is the base model's own, and the card says how both are put together; an old result's is left out."""
    job = (run / "job.toml").read_text()
    (run / "job.toml").write_text(job.replace('"sequence-classification"', '"causal-lm"'))
    if not has_old_head:
        for name in ("head_config.json", "model_head.safetensors"):
            (run / "adapter" / name).unlink()
    assert sorted(export_run(run, tmp_path / "out").sha256) == [
        "README.md",
        "adapter.safetensors",
        "adapter_config.json",
    ]
    card = (tmp_path / "out/README.md").read_text()
    assert 'model = AutoModelForCausalLM.from_pretrained("tiny")\nadapters.init(model)\n' in card
    assert "AutoAdapterModel" not in card


def test_export_of_a_language_model_with_an_invertible_adapter_needs_the_inverse(run: Path, tmp_path: Path) -> None:
    """The card loads it with the class that computes the inverse; a tensor that is missing is found."""
    job, plan, path = (run / name for name in ("job.toml", "plan.json", "adapter/adapter.safetensors"))
    text = job.read_text().replace('"sequence-classification"', '"causal-lm"')
    job.write_text(text.replace('config = "seq_bn"', 'config = "seq_bn_inv"'))
    plan.write_text(json.dumps(changed(Plan.from_json(json.loads(plan.read_text())), invertible=True).to_json()))
    with pytest.raises(IntegrityError, match="has 0 tensors of an invertible adapter, the run has 8; copy"):
        export_run(run, tmp_path / "out")
    prefix, one = "bert.invertible_adapters.ringtune.", numpy.ones(1, dtype=numpy.float32)
    tensors = load(path.read_bytes()) | {f"{prefix}{name}": one for name in INVERTIBLE_TENSORS}
    path.write_bytes(save(tensors))
    export_run(run, tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert 'model = AutoAdapterModel.from_pretrained("tiny")\n' in card and "through the inverse" in card


def test_export_of_auxiliary_models_says_how_they_load(run: Path, tmp_path: Path) -> None:
    """Their description stands in the place of the library's; the card and the last line name the function."""
    auxiliary_instead(run)
    out = tmp_path / "out"
    shown = CliRunner().invoke(cli.app, ["export", str(run), "--out", str(out), "--base-model", "acme/tiny"])
    assert shown.exit_code == 0, shown.output
    names = {"README.md", "adapter.json", "adapter.safetensors", "head_config.json", "model_head.safetensors"}
    assert {path.name for path in out.iterdir()} == names
    assert json.loads((out / "adapter.json").read_text())["model_name"] == "acme/tiny"
    card = (out / "README.md").read_text()
    assert 'load_auxiliary(model, "PATH_OF_THIS_FOLDER")' in card and "library_name: ringtune" in card
    assert shown.stdout.splitlines()[-1].endswith(f"load_auxiliary(model, {str(out)!r})")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "peft"}, "is not of the format 'ringtune-auxiliary', version 2; take the folder of a run"),
        ({"version": 3}, "version 2; take the folder of a run"),
        ({"parts": []}, "parts is []"),
        ({"library": {"config": "lora"}}, "library is {'config': 'lora'}"),
        ({"kind": "low-rank"}, "adapter.json: kind is 'low-rank'; copy the run's folder again"),
        ({"alpha": 0}, "alpha is 0"),
        ({"hidden": 3}, "hidden is 3"),
        ({"places": ["query", "gate"]}, "places is"),
        ({"places": ["query", "value"]}, "1 tensors of the auxiliary models of block 0, 2 are described"),
        ({"library": {"config": {}}}, "lacks all tensors of the library's adapters"),
    ],
)
def test_export_of_auxiliary_models_checks_what_describes_them(
    run: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    """Another format, a later version, or a value of a wrong kind: one line that names the key."""
    auxiliary_instead(run)
    path = run / "adapter/adapter.json"
    content = json.loads(path.read_text())
    (part,) = content["parts"]
    part |= {key: value for key, value in changes.items() if key in part}
    path.write_text(json.dumps({**content, **{key: value for key, value in changes.items() if key not in part}}))
    with pytest.raises(IntegrityError, match=re.escape(message)):
        export_run(run, tmp_path / "out")


def test_export_of_a_mixture_has_both_halves_or_none(run: Path, tmp_path: Path) -> None:
    """The card says that one function loads both; a block without a part of its LoRA is found, the first has none."""
    mixture_instead(run)
    export_run(run, tmp_path / "out")
    assert "`load_auxiliary` loads both" in (tmp_path / "out/README.md").read_text()
    assert "adapter_config.json" not in {path.name for path in (tmp_path / "out").iterdir()}
    path = run / "adapter/adapter.safetensors"
    tensors = load(path.read_bytes())
    path.write_bytes(save({name: value for name, value in tensors.items() if not re.search(r"\.2\..*lora_A", name)}))
    with pytest.raises(IntegrityError, match=r"lacks attention.self.query.loras.ringtune.lora_A of block 2"):
        export_run(run, tmp_path / "again")


@pytest.mark.usefixtures("merging_here")
@pytest.mark.parametrize(
    ("adapter", "options", "message"),
    [
        ("seq_bn", ["--merge"], "it is no change of matrices; leave --merge or --format gguf out, or train linear"),
        ("mlp[hidden=4]", ["--merge"], "can't be merged: it is no change of matrices"),
        (AUXILIARY, ["--model", "x"], "--model is the base model to merge into; give --merge too"),
        (AUXILIARY, ["--merge"], "the base model /srv/carol/models/tiny is not there; name its folder with --model"),
    ],
)
def test_export_refuses_what_it_can_not_merge(
    run: Path, tmp_path: Path, adapter: str, options: list[str], message: str
) -> None:
    """Before a process is started, or with the words of that process; nothing is left behind."""
    auxiliary_instead(run)
    job = (run / "job.toml").read_text()
    (run / "job.toml").write_text(job.replace(AUXILIARY, adapter))
    if adapter == "seq_bn":
        (run / "adapter/adapter.json").rename(run / "adapter/adapter_config.json")
    shown = CliRunner().invoke(cli.app, ["export", str(run), "--out", str(tmp_path / "out"), *options])
    assert shown.exit_code != 0
    assert message in shown.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret-place"]


def test_export_of_own_weights_is_refused(run: Path, tmp_path: Path) -> None:
    """There is no adapter to give away; where the weights are is said."""
    own_weights_instead(run)
    with pytest.raises(UsageError, match=r"no adapter to export.*'full'.*run/adapter/blocks\.safetensors"):
        export_run(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_export_of_a_whole_model_is_a_folder_of_transformers(run: Path, tmp_path: Path) -> None:
    """Config, weights and tokenizer as they are, and a card with the class that loads them; nothing local."""
    model = whole_model_instead(run)
    digests = export_run(run, tmp_path / "out", base_model="acme/tiny").sha256
    files = ["README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(digests) == files
    for name in set(digests) - {"README.md"}:
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()
        assert digests[name] == hashlib.sha256((model / name).read_bytes()).hexdigest()
    card = (tmp_path / "out/README.md").read_text()
    for line in (
        'base_model: "acme/tiny"',
        "library_name: transformers",
        "# Model trained from acme/tiny",
        "from transformers import BertForSequenceClassification",
        'model = BertForSequenceClassification.from_pretrained("PATH_OF_THIS_FOLDER")',
        "| architecture | BertForSequenceClassification |",
    ):
        assert line in card.splitlines()
    for private in ("alice", "bob", "carol", "secret-place"):
        assert private not in card


def test_card_says_how_the_method_and_velora_were_set(run: Path) -> None:
    """Groups, their order, what always trained, and what became of resting state: a reader could train it again."""
    saved = read_run(run)
    method = Hift(group_size=2, order="random", seed=3, always_active=("head",), drops_state=True)
    velora = Velora(blocks=(Range(0, 2),), layers=("query", "key", "value"), parts=4)
    hift = replace(saved, plan=changed(saved.plan, method=method, velora=velora))
    lines = whole_model_card(hift, base_model="acme/tiny", config={}, digests={}).text.splitlines()
    for line in (
        "| method | hift |",
        "| hift, group size | 2 |",
        "| hift, order | random |",
        "| hift, seed | 3 |",
        "| hift, always active | head |",
        "| hift, drops state | yes |",
        "| velora, layers | query, key, value |",
        "| velora, parts | 4 |",
    ):
        assert line in lines
    assert any(line.startswith("| optimizer | adamw, learning rate ") for line in lines)
    plain = whole_model_card(saved, base_model="acme/tiny", config={}, digests={}).text
    assert "| ringada, every steps | " in plain and "velora" not in plain and "hift" not in plain


Damage = Callable[[Path], object]
ADAPTER = "adapter/adapter.safetensors"


def _cut(name: str) -> Damage:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-1])


def _keys(name: str, **changes: object) -> Damage:
    return lambda folder: (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **changes}))


def _tensors(name: str, change: Callable[[dict[str, numpy.ndarray]], object]) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load((folder / name).read_bytes())
        change(tensors)
        (folder / name).write_bytes(save(tensors))

    return damage


def _of_block_2(tensors: dict[str, numpy.ndarray]) -> None:
    for name in [name for name in tensors if ".layer.2." in name]:
        del tensors[name]


def _add_block_9(tensors: dict[str, numpy.ndarray]) -> None:
    for name in [name for name in tensors if ".layer.3." in name]:
        tensors[name.replace(".layer.3.", ".layer.9.")] = tensors[name]


@pytest.mark.parametrize(
    ("is_whole", "damage", "message"),
    [
        (False, _cut(ADAPTER), "damaged or no safetensors file"),
        (
            False,
            _tensors(ADAPTER, _of_block_2),
            r"lacks output\.adapters\.ringtune\.adapter_down\.0\.weight of block 2",
        ),
        (
            False,
            _tensors(
                ADAPTER, lambda found: found.pop("bert.encoder.layer.1.output.adapters.ringtune.adapter_up.weight")
            ),
            r"lacks output\.adapters\.ringtune\.adapter_up\.weight of block 1",
        ),
        (False, _tensors(ADAPTER, _add_block_9), r"blocks \[0, 1, 2, 3, 9\], the model has 4"),
        (
            False,
            _tensors(ADAPTER, lambda found: found.update(embeddings=numpy.ones(1))),
            "embeddings, which belongs to no block",
        ),
        (False, _keys("adapter/head_config.json", config={"label2id": {"neg": 1, "pos": 0}}), "it mixes runs"),
        (
            False,
            _tensors(
                "adapter/model_head.safetensors",
                lambda found: found.update({"heads.ringtune.1.weight": numpy.ones((3, 8))}),
            ),
            "no output of 2 classes",
        ),
        (
            False,
            _keys("adapter/adapter_config.json", base="/srv/carol/models/tiny"),
            r"adapter_config\.json names the local path /srv/carol",
        ),
        (True, _keys("config.json", label2id={"neg": 1, "pos": 0}), "config.json has the classes"),
        (True, _tensors("model.safetensors", _of_block_2), r"has no tensor 'encoder\.layer\.2"),
        (True, _cut("model.safetensors"), "damaged or no safetensors file"),
        (True, _keys("tokenizer.json", file="/srv/carol/models/tiny"), "tokenizer.json names the local path"),
    ],
)
def test_export_refuses_what_would_not_load_or_would_tell(
    run: Path, tmp_path: Path, is_whole: bool, damage: Damage, message: str
) -> None:
    """Of an adapter and of a whole model: what is wrong is named, and nothing is written."""
    damage(whole_model_instead(run) if is_whole else run)
    with pytest.raises(RingTuneError, match=message):
        export_run(run, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret-place"]


def test_export_of_an_adapter_for_some_blocks(run: Path, tmp_path: Path) -> None:
    """A configuration that leaves blocks out has no tensors there."""
    _tensors(ADAPTER, _of_block_2)(run)
    _keys("adapter/adapter_config.json", config={"leave_out": [2]})(run)
    assert export_run(run, tmp_path / "out")


def test_export_is_on_the_disk_before_it_has_its_name(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file is forced to the disk, then the folder is renamed, then its new name is forced to the disk."""
    log = log_of_syncs(monkeypatch)
    digests = export_run(run, tmp_path / "out").sha256
    (renamed,) = [index for index, entry in enumerate(log) if entry.endswith(".part -> out")]
    named = {entry.split(" -> ")[1] for entry in log[:renamed] if " -> " in entry}
    assert named == set(digests) and tmp_path.name in log[renamed:]


def test_export_keeps_what_is_there(run: Path, tmp_path: Path) -> None:
    """A folder with something in it is never written to; an empty one is used."""
    (tmp_path / "out").mkdir()
    export_run(run, tmp_path / "out")
    before = (tmp_path / "out/README.md").read_bytes()
    with pytest.raises(UsageError, match="is there already"):
        export_run(run, tmp_path / "out", base_model="acme/other")
    assert (tmp_path / "out/README.md").read_bytes() == before


@pytest.mark.parametrize("base_model", ["/models/tiny", "a/b/c", "../tiny", "a b"])
def test_export_refuses_a_path_as_the_base_model(run: Path, tmp_path: Path, base_model: str) -> None:
    """The id of a model is a name, with its owner's at most."""
    with pytest.raises(UsageError, match="is no model id"):
        export_run(run, tmp_path / "out", base_model=base_model)


def test_export_that_cannot_be_written_leaves_nothing(run: Path, tmp_path: Path) -> None:
    """A file where the folder should go: an error that says so."""
    (tmp_path / "file").write_text("")
    with pytest.raises(RingTuneError, match="can't write"):
        export_run(run, tmp_path / "file" / "out")


def test_export_command_names_the_class_that_loads_the_head_too(run: Path, tmp_path: Path) -> None:
    """``AutoModel`` would leave the head behind."""
    whole_model_instead(run)
    out = tmp_path / "out"
    shown = CliRunner().invoke(cli.app, ["export", str(run), "--out", str(out)])
    assert shown.exit_code == 0
    load = f"transformers.BertForSequenceClassification.from_pretrained({str(out)!r})"
    assert shown.stdout.splitlines()[-1] == f"exported to {out}; load it with {load}"


def test_card_of_an_adapter_that_the_library_can_not_load_has_no_lines_of_it(run: Path, tmp_path: Path) -> None:
    """A matrix of MTL-LoRA for each task: the library's module for it fails."""
    config, job, out = "mtl_lora[task_specific_matrix_type='linear']", run / "job.toml", tmp_path / "out"
    job.write_text(job.read_text().replace('config = "seq_bn"', f'config = "{config}"'))
    shown = CliRunner().invoke(cli.app, ["export", str(run), "--out", str(out)])
    card = (out / "README.md").read_text()
    assert "library_name: ringtune\n" in card and "load_adapter" not in card + shown.stdout
    assert f'--set "adapter.config={config}" --set adapter.from=PATH_OF_THIS_FOLDER' in card


def test_export_of_a_plugged_model_says_how_it_loads(tmp_path: Path) -> None:
    """The interface is given away as it is; the card has the lines, with what this family and task need."""
    run = write_run(tmp_path / "run")
    config = json.loads((run / "adapter/adapter_config.json").read_text())
    (run / "adapter/adapter_config.json").write_text(json.dumps({**config, "model_type": "gemma2"}))
    (run / "adapter/adapter_interface.json").write_text('{"interface": {}}')
    digests = export_run(run, tmp_path / "out", base_model="acme/tiny").sha256
    assert (tmp_path / "out/adapter_interface.json").read_text() == '{"interface": {}}'
    assert "adapter_interface.json" in digests
    card = (tmp_path / "out/README.md").read_text()
    load = "model = AutoModelForSequenceClassification.from_pretrained"
    assert (
        f'{load}("acme/tiny", num_labels=2, attn_implementation="eager")\nadapters.init(model, interface=inter' in card
    )
    assert 'interface = adapters.AdapterModelInterface(**json.load(file)["interface"])' in card
    assert (
        "The head reads the last token of a text, whatever that token is. transformers finds it by the padding" in card
    )
    (run / "adapter/adapter_config.json").write_text(json.dumps({**config, "model_type": "modernbert"}))
    job = (run / "job.toml").read_text()
    (run / "job.toml").write_text(job.replace('"sequence-classification"', '"token-classification"'))
    export_run(run, tmp_path / "tags", base_model="acme/tiny")
    card = (tmp_path / "tags/README.md").read_text()
    assert 'AutoModelForTokenClassification.from_pretrained("acme/tiny", num_labels=2)\nadapters.init(model, i' in card
    assert "reads the last token" not in card


@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        ({"model_type": "llama", "rope_parameters": {"rope_theta": 5e5}}, "rope_theta=500000.0"),
        (
            {"model_type": "modernbert", "rope_parameters": {"full_attention": {"rope_theta": 9e4}}},
            "global_rope_theta=90000.0",
        ),
    ],
)
def test_card_says_how_transformers_4_loads_a_base_model_of_5(
    tmp_path: Path, config: dict[str, object], arguments: str
) -> None:
    """It would take the default base of rotary positions without a word."""
    run, base = write_run(tmp_path / "run"), tmp_path / "base"
    job = (run / "job.toml").read_text()
    (run / "job.toml").write_text(job.replace("/srv/carol/models/tiny", str(base)))
    base.mkdir()
    (base / "config.json").write_text(json.dumps(config))
    export_run(run, tmp_path / "out", base_model="acme/tiny")
    assert f"Load the base model with `{arguments}` there." in (tmp_path / "out/README.md").read_text()
    (base / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not JSON that can be read"):
        export_run(run, tmp_path / "again", base_model="acme/tiny")


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
    assert sorted(export_run(run, tmp_path / "out", user="bob").sha256) == NAMES
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
    digests = export_run(run_of(tmp_path, "collaboration"), tmp_path / "out").sha256
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
        export_run(run, tmp_path / "out", form="merged", user="alice")


def test_sum_that_the_family_can_not_have_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """Of LoRA of two ranks it is a ``linear``, which a generic family has not; each user's own is there."""
    run = run_of(tmp_path, "collaboration")
    job, paths = run / "job.toml", [run / f"users/{user}/adapter_config.json" for user in ("alice", "bob")]
    job.write_text(load_job(job).with_overrides({"offload.adapters": {"bob": "lora[r=2]"}}).to_toml())
    require_user(read_run(run), "")  # a BERT has it
    for path in paths:
        path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "phi3"}))
    with pytest.raises(UsageError, match=r"is .linear.*, which a phi3 can't have; give one user with --user, of alice"):
        require_user(read_run(run), "")
    require_user(read_run(run), "bob")


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
