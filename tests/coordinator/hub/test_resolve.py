"""From the id of a hub to a folder here: the cache first, then a network, else one message."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from coordinator.commands.overrides import changed_job
from coordinator.hub import download, resolve
from coordinator.hub.resolve import hub_cache, model_folder
from ringtune.errors import ConnectionFailedError
from ringtune.models.hub import HubId
from tests.contract.models.test_hub import COMMIT, write_cache


def no_network(wanted: HubId, cache: Path) -> str:
    """Fail as where nothing answers."""
    return "no route to host"


def never(wanted: HubId, cache: Path) -> str:
    """Nobody may ask for a network."""
    raise AssertionError(f"{wanted} was fetched")


def test_resolve_takes_a_path_that_exists_before_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder ``acme/mini-v2`` beside the job wins; what is no id stays a path, there or not."""
    write_cache(tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    assert model_folder("acme/mini-v2", cache=tmp_path / "cache", fetch=never).name == COMMIT
    (tmp_path / "acme/mini-v2").mkdir(parents=True)
    assert model_folder("acme/mini-v2", cache=tmp_path / "cache", fetch=never) == Path("acme/mini-v2")
    assert model_folder("models/a/b", cache=tmp_path, fetch=never) == Path("models/a/b")


def test_resolve_fetches_what_the_cache_lacks(tmp_path: Path) -> None:
    """Once: the next time it is there."""
    asked: list[str] = []

    def fetch(wanted: HubId, cache: Path) -> str:
        asked.append(str(wanted))
        write_cache(cache)
        return ""

    for _ in range(2):
        assert (
            model_folder("acme/mini-v2", cache=tmp_path / "library", own=tmp_path / "own", fetch=fetch).name == COMMIT
        )
    assert asked == ["acme/mini-v2"]
    assert not (tmp_path / "library").exists(), "others' cache is only read"


def test_resolve_says_how_to_get_what_it_can_not_fetch(tmp_path: Path) -> None:
    """Id, cache, reason and command stand in one line."""
    with pytest.raises(ConnectionFailedError) as caught:
        model_folder("acme/mini-v2@v1", cache=tmp_path, own=tmp_path, fetch=no_network)
    assert str(caught.value) == (
        f"model.path = 'acme/mini-v2@v1' is no folder here, the Hugging Face cache {tmp_path} lacks it, and it can't "
        "be fetched (no route to host); where there is a network: hf download acme/mini-v2 --revision v1, or name a "
        "folder"
    )
    with pytest.raises(ConnectionFailedError, match=r"the hub has no config\.json and \.safetensors of it"):
        model_folder("acme/mini-v2", cache=tmp_path, own=tmp_path, fetch=lambda wanted, cache: "")


def test_resolve_gives_the_job_a_folder_and_leaves_the_file_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever submits a job resolves it; the id may also be typed with --set."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = write_cache(tmp_path / "cache")
    file = tmp_path / "job.toml"
    file.write_text('[model]\npath = "acme/mini-v2"\n', encoding="utf-8")
    assert changed_job(file, []).model.path == str(folder)
    file.write_text('[model]\npath = "gone"\n', encoding="utf-8")
    assert changed_job(file, ["model.path=acme/mini-v2"]).model.path == str(folder)
    assert changed_job(file, []).model.path == str(tmp_path / "gone")


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({}, str(Path.home() / ".cache/huggingface/hub")),
    ],
)
def test_resolve_looks_where_the_library_does(environment: dict[str, str], found: str) -> None:
    """The variables in the library's order."""
    assert hub_cache(environment) == Path(found)


def test_download_without_a_network_ends_with_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The library is told to stay offline in tests, which is how no network looks; nothing is left in the cache."""
    assert download.main(["acme/mini-v2", "main", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "cached snapshot" in line or "offline" in line.lower()
    assert not list(tmp_path.rglob("*.safetensors"))


class ReadTimeout(OSError):  # noqa: N818 - their name
    """As the libraries of the hub call what they raise."""


@pytest.mark.parametrize("is_cause", [False, True])
def test_download_names_a_hub_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_cause: bool
) -> None:
    """With its address, the seconds and what can be done, whichever library's text it was."""

    def late(*_: object) -> None:
        if is_cause:
            raise ValueError("HTTPSConnectionPool(...)") from ReadTimeout("timed out")
        raise ReadTimeout("HTTPSConnectionPool(...): Read timed out.")

    monkeypatch.setattr(download, "_fetch_from_hub", late)
    assert download.main(["acme/mini-v2", "main", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    hub = importlib.import_module("huggingface_hub").constants.ENDPOINT
    assert line == f"the hub {hub} did not answer within 20 s; try again, or set HF_ENDPOINT to another one"


def test_download_asks_for_no_pickled_weights_and_no_code() -> None:
    """Neither by name nor by a pattern."""
    assert not [name for name in download.FILES if name.endswith((".bin", ".py", ".pt", ".pkl", "*"))]


def test_fetching_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that does not end in time is ended, and says so."""
    monkeypatch.setattr(resolve, "FETCH_S", 0.0)
    assert resolve._fetch(HubId("acme", "mini"), tmp_path) == "it is not there after 0 s"
