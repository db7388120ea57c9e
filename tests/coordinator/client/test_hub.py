"""Models of a hub: the cache first, then a network, and nothing of an answer is used before it was checked."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.api.arguments import job_here
from coordinator.client import hub
from coordinator.client import hub as download
from coordinator.client.hub import FILES, HubFile, hub_cache, model_folder, store, wanted_files
from ringtune.errors import BusyError, ConnectionFailedError, DeadlineError, IntegrityError
from ringtune.models.folder import HubId, cached_folder
from ringtune.storage.durable import FileLock
from tests.contract.models.test_folder import COMMIT, write_cache
from tests.support.saved_runs import contents

WANTED = HubId("acme", "mini", "v1")
CONTENT = {
    "additional_chat_templates/rag.jinja": b"{{ x }}",
    "config.json": b"{}",
    "model.safetensors": b"weights" * 9,
    "vocab.txt": b"",
}


def entry(name: str, content: bytes = b"", **changes: Any) -> Any:
    """A line of the hub's listing; weights are large files."""
    large = SimpleNamespace(sha256=hashlib.sha256(content).hexdigest()) if name.endswith("safetensors") else None
    told = {
        "rfilename": name,
        "size": len(content),
        "blob_id": hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest(),
        "lfs": large,
    }
    return SimpleNamespace(**told | changes)


LISTED = wanted_files(entry(name, content) for name, content in CONTENT.items())


class Hub:
    """Answers with content by name, in pieces."""

    def __init__(self, content: dict[str, bytes]) -> None:
        self.content, self.asked = content, list[str]()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[Iterable[bytes]]:
        """Answer."""
        self.asked.append(name)
        yield [self.content[name][:3], self.content[name][3:]]


def test_model_is_fetched_whole_and_found(tmp_path: Path) -> None:
    """All files under the commit, the revision names it, and the second time nobody is asked."""
    hub = Hub(CONTENT)
    for _ in range(2):
        folder = store(WANTED, COMMIT, LISTED, tmp_path, hub)
    assert contents(folder) == CONTENT
    assert not list((folder.parents[1] / "fetching").iterdir())
    assert cached_folder(WANTED, tmp_path) == folder
    assert hub.asked == sorted(CONTENT)


@pytest.mark.parametrize("name", CONTENT)
@pytest.mark.parametrize("damage", ["short", "long", "other"])
def test_file_with_another_digest_is_not_used(tmp_path: Path, name: str, damage: str) -> None:
    """Small files too; what came whole stays for the next try, and the cache lacks the model until then."""
    good = CONTENT[name]
    bad = {"short": good[:-1], "long": good + b"x", "other": good[:-1] + b"?"}[damage]
    if bad == good:
        bad = b"?"
    with pytest.raises(IntegrityError, match=name):
        store(WANTED, COMMIT, LISTED, tmp_path, Hub({**CONTENT, name: bad}))
    assert cached_folder(WANTED, tmp_path) is None
    again = Hub(CONTENT)
    assert cached_folder(WANTED, tmp_path) is None and store(WANTED, COMMIT, LISTED, tmp_path, again)
    assert again.asked == [file.name for file in LISTED if file.name >= name]


ODD = st.one_of(
    st.text("./\\amdel-\n", max_size=9),
    st.builds("additional_chat_templates/{}.jinja".format, st.text("./\\a\n", max_size=5)),
    st.builds("{}{}".format, st.sampled_from(["../", "/", "a/", "model-../", "./", "..\\"]), st.sampled_from(FILES)),
)


@settings(max_examples=25)
@given(names=st.lists(ODD | st.sampled_from(FILES), max_size=6))
def test_names_that_lead_elsewhere_are_not_fetched(names: list[str]) -> None:
    """Whatever a hub lists: a name without a folder but that of templates, of what we read."""
    for file in wanted_files(map(entry, names)):
        assert (
            Path(file.name).name == file.name.removeprefix("additional_chat_templates/")
            and file.name in names
            and ".." not in Path(file.name).parts
        )
        assert not file.name.endswith((".bin", ".py"))


@pytest.mark.parametrize("commit", ["", "../../../../outside", "main", "A" * 40, COMMIT + "\n", "/" + COMMIT])
def test_commit_that_is_none_is_refused(tmp_path: Path, commit: str) -> None:
    """It would be a path; nothing is asked or written."""
    hub = Hub(CONTENT)
    with pytest.raises(IntegrityError, match="the hub answers with commit"):
        store(WANTED, commit, LISTED, tmp_path, hub)
    assert not hub.asked and not contents(tmp_path)


def test_file_without_a_digest_is_refused() -> None:
    """An ETag of any form is not asked for; the listing has to tell size and digest."""
    rows: list[dict[str, Any]] = [
        {"blob_id": "../../../outside"},
        {"blob_id": None},
        {"size": None},
        {"size": -1},
        {"lfs": SimpleNamespace(sha256="x")},
    ]
    for changes in rows:
        with pytest.raises(IntegrityError, match=r"no size and digest of config\.json"):
            wanted_files([entry("config.json", **changes)])


def test_fetching_ends_where_nothing_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then is no progress."""
    clock = iter(range(0, 10_000, 7))
    monkeypatch.setattr(hub, "time", SimpleNamespace(monotonic=lambda: next(clock)))

    @contextlib.contextmanager
    def trickle(name: str) -> Iterator[Iterable[bytes]]:
        yield iter(lambda: b"x", b"")

    with pytest.raises(DeadlineError, match=r"config\.json: 9 bytes arrived in 60 s"):
        store(WANTED, COMMIT, [HubFile("config.json", 10_000, "0" * 40)], tmp_path, trickle)


def test_model_is_fetched_by_one_process(tmp_path: Path) -> None:
    """A second one is told which process is at it."""
    place = tmp_path / "models--acme--mini"
    place.mkdir()
    with FileLock(place / "lock", busy=""), pytest.raises(BusyError, match="fetches acme/mini@v1"):
        store(WANTED, COMMIT, LISTED, tmp_path, Hub(CONTENT))


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
            model_folder("acme/mini-v2", cache=tmp_path / "library", target=tmp_path / "own", fetch=fetch).name
            == COMMIT
        )
    assert asked == ["acme/mini-v2"]
    assert not (tmp_path / "library").exists(), "others' cache is only read"


def test_resolve_says_how_to_get_what_it_can_not_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Id, cache, reason and command stand in one line."""
    with pytest.raises(ConnectionFailedError) as caught:
        model_folder("acme/mini-v2@v1", cache=tmp_path, target=tmp_path, fetch=no_network)
    assert str(caught.value) == (
        f"model.path = 'acme/mini-v2@v1' is no folder here, the Hugging Face cache {tmp_path} lacks it, and it can't "
        "be fetched (no route to host); where there is a network: hf download acme/mini-v2 --revision v1, or name a "
        "folder"
    )
    (tmp_path / "acme" / "mini-v3").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConnectionFailedError, match=r"is no folder here \(did you mean 'acme/mini-v3'\?\), .* \(no route"
    ):
        model_folder("acme/mini-v2", cache=tmp_path, target=tmp_path, fetch=no_network)
    with pytest.raises(ConnectionFailedError, match=r"the hub has no config\.json and \.safetensors of it"):
        model_folder("acme/mini-v2", cache=tmp_path, target=tmp_path, fetch=lambda wanted, cache: "")


def test_resolve_gives_the_job_a_folder_and_leaves_the_file_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever submits a job resolves it; the id may also be typed with --set."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = write_cache(tmp_path / "cache")
    file = tmp_path / "job.toml"
    file.write_text('[model]\npath = "acme/mini-v2"\n', encoding="utf-8")
    assert job_here(file, {}).model.path == str(folder)
    file.write_text('[model]\npath = "gone"\n', encoding="utf-8")
    assert job_here(file, {"model.path": "acme/mini-v2"}).model.path == str(folder)
    assert job_here(file, {}).model.path == str(tmp_path / "gone")


def test_resolve_looks_where_the_library_does() -> None:
    """The variables in the library's order."""
    rows: list[tuple[dict[str, str], str]] = [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({}, str(Path.home() / ".cache/huggingface/hub")),
    ]
    for environment, found in rows:
        assert hub_cache(environment) == Path(found)


def test_download_without_a_network_ends_with_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The library is told to stay offline in tests, which is how no network looks; nothing is left in the cache."""
    assert download.main(["acme/mini-v2", "main", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"HF_HUB_OFFLINE forbids to ask the hub {hub_address()}; unset it"
    assert not list(tmp_path.rglob("*.safetensors"))


def hub_address() -> str:
    """Address that the library asks."""
    return str(importlib.import_module("huggingface_hub").constants.ENDPOINT)


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
    assert line == f"the hub {hub_address()} did not answer within 20 s; try again, or set HF_ENDPOINT to another one"


@pytest.mark.parametrize(
    ("name", "status", "told"),
    [
        ("RepositoryNotFoundError", 401, "has no acme/mini-v2 for you; correct the name, or hf auth login if it is"),
        ("GatedRepoError", 403, "acme/mini-v2 to who agreed to its terms; agree on its page, and hf auth"),
        ("RevisionNotFoundError", 404, "acme/mini-v2 has no revision v9 on the hub "),
        (
            "HfHubHTTPError",
            401,
            " refuses access to acme/mini-v2 (401): agree to its licence on its page, and hf auth ",
        ),
        (
            "HfHubHTTPError",
            403,
            " refuses access to acme/mini-v2 (403): agree to its licence on its page, and hf auth ",
        ),
        ("HfHubHTTPError", 503, " answers 503 for acme/mini-v2; try again later, or set HF_ENDPOINT to another one"),
        ("", 0, " can't be reached; check network and HTTPS_PROXY, or set HF_ENDPOINT to another one"),
    ],
)
def test_download_names_the_cause_and_the_remedy(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    status: int,
    told: str,
) -> None:
    """Of the library's own errors, whose texts have several lines and an address for each request."""
    import requests
    from huggingface_hub import errors

    answer = requests.Response()
    answer.status_code = status
    error = getattr(errors, name)("raw", response=answer) if name else requests.ConnectionError("raw")

    def refused(*_: object) -> None:
        raise error

    monkeypatch.setattr(download, "_fetch_from_hub", refused)
    assert download.main(["acme/mini-v2", "v9", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line and hub_address() in line and "raw" not in line


def test_fetching_has_a_deadline_and_takes_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that does not end in time is ended, and says so."""
    monkeypatch.setattr(hub, "FETCH_S", 0.0)
    assert hub._fetch_in_process(HubId("acme", "mini"), tmp_path) == "it is not there after 0 s"
    # Neither by name nor by a pattern
    assert not [name for name in download.FILES if name.endswith((".bin", ".py", ".pt", ".pkl", "*"))]
