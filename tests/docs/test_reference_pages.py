"""Pages of reference say what the code says: every key of a job, every option, every kind of line of a run."""

from __future__ import annotations

import re
import tomllib

import pytest

from docs import make_combinations, make_job, make_options, make_trust
from ringtune.errors import JobError, TrustError
from ringtune.job.job import Job, Model
from ringtune.job.job_reference import KeyFacts, describe_job
from ringtune.models.adapter_config import (
    CONFIGURATIONS,
    OTHER_NAMES,
    REFUSED,
    parse_adapter_config,
)
from ringtune.transport import parties
from ringtune.transport.parties import Permission
from tests.contract.test_hints import commands
from tests.support.cases import cases
from tests.support.job_keys import KEYS, refusal
from tests.support.sources import ROOT


@pytest.fixture(scope="module")
def keys() -> dict[str, KeyFacts]:
    """Every key by its name."""
    return {key.name: key for section in describe_job() for key in section.keys}


@pytest.mark.parametrize(
    ("roles", "error"), [({}, TrustError), ({"Steal": Permission(frozenset({"node"}))}, ValueError)]
)
def test_table_of_calls_has_no_call_without_a_row(
    roles: dict[str, Permission], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new call needs a permission, and one between nodes rows of the access list or a digest."""
    monkeypatch.setattr(make_trust, "calls", lambda: ["Snapshots.Steal"])
    monkeypatch.setattr(parties, "PERMISSIONS", {"Snapshots": roles})
    with pytest.raises(error, match="Steal"):
        make_trust.page()


def test_combinations_are_found_by_the_checks() -> None:
    """What job, model or a key's meaning refuses, and what a plan goes without; two values of one key are no job."""

    def found(keys: dict[str, object], *others: dict[str, object], why_not: str = "") -> tuple[str, str] | None:
        first = make_combinations.Feature("a", keys, lambda *_: why_not)
        return make_combinations.tried(
            first, *(make_combinations.Feature("b", other) for other in others), method="ringada"
        )

    assert found({"train.dropout": 0.1}) == ("", "")
    assert found({"train.dropout": 1.5}) == ("train.dropout is 1.5, it has to be below 1", "[{}]")
    assert found({"privacy.private_blocks": 3}) == ("privacy.private_blocks is 3, the model has 3 blocks", "[{}]")
    assert found({"train.dropout": 0.1}, why_not="there is no room; make room") == ("there is no room", "({})")
    scores = {"adapter.config": "full", "operations.policy": "random", "operations.full": 1}
    reason, mark = found({**scores, "operations.scores": "adapter"}) or ("", "")
    assert (reason.partition(" has no meaning")[0], mark) == ("operations.scores = 'adapter'", "≠{}")
    assert found({"train.dropout": 0.1}, {"train.dropout": 0.2}) is None


def test_job_page_has_every_key_with_a_sentence(keys: dict[str, KeyFacts]) -> None:
    """No key of any section is left out, and each says what it does, in a job's words."""
    assert list(keys) == list(KEYS)
    assert len(keys) >= 42
    assert [key.name for key in keys.values() if len(key.meaning) < 10 or not key.meaning.endswith(".")] == []
    page = make_job.page()
    assert [key.name for key in keys.values() if f"| `{key.name.partition('.')[2]}` |" not in page] == []


def test_job_page_defaults_are_those_of_a_job(keys: dict[str, KeyFacts]) -> None:
    """What a job that names only a model resolves to is what the page says of each of its keys."""
    written = tomllib.loads(Job(model=Model(path="m")).to_toml())
    found = {f"{section}.{name}": value for section, part in written.items() for name, value in part.items()}
    told = {name: tomllib.loads(f"x = {key.default}")["x"] for name, key in keys.items() if key.default}
    resolved = {"model.path": "m", "train.rounds": 5, "unfreeze.every_steps": 40}
    assert found == {name: told[name] for name in found if name in told} | resolved


def test_job_page_examples_are_taken_by_a_job(keys: dict[str, KeyFacts]) -> None:
    """Whoever copies an example gets a job that is read; one that is the default follows it."""
    edited = make_job.examples(make_job.page())
    assert edited["train.seed"] == "seed = 1" and edited.keys() < keys.keys()
    assert make_job.examples("## [train]\n| `seed` | integer | `7` | any | what it does | `seed = 7` |") == {}
    for name, key in keys.items():
        own = name.partition(".")[2]
        value = tomllib.loads(edited.get(name, f"{own} = {key.default}"))[own]
        assert refusal(name, value) == "", name


@cases(
    ("name", "default", "allowed"),
    [
        ("model.path", "", ""),
        ("model.dtype", '"float32"', "float32, float64"),
        ("data.split", '"iid"', "'iid' or 'dirichlet:ALPHA' with ALPHA above 0"),
        ("train.dropout", "0.0", "at least 0, below 1"),
        ("train.microbatches", "4", "1 to train.batch_size, or 'auto'"),
        ("unfreeze.at", "", "a list of steps or 'auto'"),
        ("runtime.record", "false", ""),
    ],
)
def test_job_page_ranges_are_those_of_the_code(
    keys: dict[str, KeyFacts], name: str, default: str, allowed: str
) -> None:
    """What a section refuses is what the page says."""
    assert (keys[name].default, keys[name].allowed) == (default, allowed)


def test_job_page_has_every_adapter() -> None:
    """Names, older names and refused ones are those of the reader."""
    page = make_job.page()
    for name in (*CONFIGURATIONS, *OTHER_NAMES):
        assert f"`{name}`" in page
        parse_adapter_config(name)
    for name in REFUSED:
        assert f"| `{name}` |" in page
        with pytest.raises(JobError):
            parse_adapter_config(name)


def test_option_page_marks_defaults_that_are_values() -> None:
    """The folder in which one is reads as such, not as the end of a sentence."""
    page = make_options.page()
    assert "Folder for runs and models. Default: `.`." in page
    assert "Default: .." not in page


def test_option_page_has_every_option() -> None:
    """No option of any command is left out."""
    page = make_options.page()
    shown = {option for command in commands().values() for each in command.params for option in each.opts}
    assert {option for option in shown if option.startswith("--") and f"`{option}" not in page} == set()


def test_page_names_every_kind_of_line() -> None:
    """Of metrics.jsonl."""
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "coordinator/run").rglob("*.py"))
    kinds = {kind for source in sources for kind in re.findall(r'"kind": "(\w+)"', source)}
    page = (ROOT / "docs/reference/files.md").read_text(encoding="utf-8")
    assert len(kinds) > 5
    assert kinds <= set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
