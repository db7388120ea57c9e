"""The image's torch: a CPU build, whatever the machine that builds it, or no image."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.support.cases import cases

DOCKERFILE = Path(__file__).parents[2] / "deploy/Dockerfile"
INDEX = "https://index.example/cpu"


def instructions() -> list[str]:
    """The instructions of the file, each on one line, without comments."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    return "\n".join(lines).replace("\\\n", "").splitlines()


def build(folder: Path, *, machine: str, found: str = "cpu", **arguments: str) -> tuple[int, str, str]:
    """Run the step that installs torch, on such a machine, with an index that has such a build.

    Returns:
        Exit code, what pip was asked for, and the errors.
    """
    defaults = dict(line[4:].split("=", 1) for line in instructions() if line.startswith("ARG "))
    values = {name: value.strip('"') for name, value in defaults.items()} | arguments
    (step,) = [line[4:] for line in instructions() if line.startswith("RUN ") and "$TORCH " in line]
    for name, script in {
        "uname": f"echo {machine}",
        "pip": f"echo $* >> '{folder}/pip.log'",
        "python": f"echo {found}",
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", **values}
    done = subprocess.run(  # noqa: S603 - the file's own step
        ["/bin/sh", "-c", step], env=environment, capture_output=True, text=True, timeout=120.0
    )
    log = folder / "pip.log"
    return done.returncode, log.read_text().strip() if log.exists() else "", done.stderr


def test_image_for_amd64_needs_the_index_of_cpu_builds(tmp_path: Path) -> None:
    """The default index would give gigabytes of CUDA: refused before anything is fetched, with the remedy."""
    code, asked, errors = build(tmp_path, machine="x86_64")
    assert (code, asked) == (1, "")
    assert "--build-arg TORCH_INDEX=URL" in errors


@cases("machine", ["x86_64", "aarch64"])
def test_image_takes_torch_from_the_index_that_is_named(tmp_path: Path, machine: str) -> None:
    """Only torch comes from there."""
    code, asked, _ = build(tmp_path, machine=machine, TORCH_INDEX=INDEX)
    assert code == 0
    assert asked.startswith("install torch==") and asked.endswith(f"--index-url {INDEX}")


def test_image_for_arm64_needs_no_index(tmp_path: Path) -> None:
    """The default index has CPU builds there."""
    code, asked, _ = build(tmp_path, machine="aarch64")
    assert code == 0
    assert "--index-url" not in asked


@cases(("found", "wanted", "code"), [("cuda", "cpu", 1), ("cpu", "cuda", 1), ("cuda", "cuda", 0)])
def test_image_refuses_another_build_than_was_asked_for(tmp_path: Path, found: str, wanted: str, code: int) -> None:
    """Whatever the index gave is looked at."""
    result = build(tmp_path, machine="x86_64", found=found, TORCH_INDEX=INDEX, TORCH_BUILD=wanted)
    assert result[0] == code
    assert not code or f"gave a {found} build of torch" in result[2]


def test_image_of_a_coordinator_has_no_torch(tmp_path: Path) -> None:
    """Nothing is asked for."""
    assert build(tmp_path, machine="x86_64", BUILD_EXTRA="") == (0, "", "")


def test_image_names_no_host_of_an_index() -> None:
    """Which index is whoever builds to say."""
    assert "http" not in DOCKERFILE.read_text()
