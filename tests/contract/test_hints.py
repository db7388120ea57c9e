"""Every command line that RingTune or its documentation tells a user to type is one that the command line takes."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from coordinator.cli import train
from coordinator.screen.progress import join_lines, listening_line, reachable_address
from ringtune import cli
from ringtune.errors import JobError
from ringtune.hints import hint_to_start_coordinator
from ringtune.transport.credentials import using_credentials
from tests.contract.transport.test_tls import COORDINATOR_ITSELF
from tests.support.cases import cases
from tests.support.sources import ROOT

HINT = re.compile(r"\bringtune [a-z-]+( .*)?$")
OPTION = re.compile(r"(?<![\w>-])--[a-z][a-z-]*[a-z](?![-\w])(?!-*>)")
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "deploy/README.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
ADDRESSES: tuple[str, ...] = ("127.0.0.1:7070", "192.168.1.10:7070", "[::1]:7070", "[fd00::7]:7070", "desk.local:7070")
ADDRESSES += ("10.0.0.1:7070,10.0.0.2:7070",)


@functools.cache
def commands() -> dict[str, Any]:
    """Every command of the command line by name."""
    return cli.all_commands()


def parse(line: str) -> None:
    """Let the command line read a line, and do nothing; a placeholder N is a number."""
    words = ["1" if word == "N" else word for word in shlex.split(line, comments=True)]
    assert words[0] == "ringtune"
    if len(words) > 1 and words[1].startswith("-"):
        assert words[1] in ("--help", "--version")
        return
    if "--help" not in words:
        depth = 3 if " ".join(words[1:3]) in commands() else 2
        name = " ".join(words[1:depth])
        commands()[name].make_context(name, words[depth:])


def lines_of_pages() -> Iterator[tuple[str, str]]:
    """(page, command line) of every example in the documentation."""
    for page in PAGES:
        for block in re.findall(r"```(?:sh)?\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                found = re.match(r"\s*(?:\$ )?(?:sudo )?(?:-u \S+ )?(?:[A-Z_]+=\S+ )?(?:\S*/)?(ringtune .*)", line)
                if found:
                    yield page.relative_to(ROOT).as_posix(), found[1]


def spans_of_pages() -> Iterator[tuple[str, str]]:
    """(page, code) of every `ringtune ...` that stands within a sentence of the documentation."""
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for span in re.findall(r"`(ringtune\s[a-z][^`]*)`", text):
            yield page.relative_to(ROOT).as_posix(), " ".join(span.split())


@cases(("page", "line"), list(lines_of_pages()))
def test_hints_of_the_documentation_can_be_typed(page: str, line: str) -> None:
    """Every example is read by the command line as it stands."""
    parse(line)


def test_hints_within_sentences_name_options_of_their_command() -> None:
    """A sentence shows a part of a line: its command exists, and each option is one of that command."""
    found = list(spans_of_pages())
    assert len(found) > 30
    wrong = []
    for page, span in found:
        words = span.split()
        command = commands().get(" ".join(words[1:3])) or commands().get(words[1])
        own = {option for parameter in command.params for option in parameter.opts} if command else set()
        wrong += [(page, span)] if not command or set(OPTION.findall(span)) - own else []
    assert wrong == []


@cases("address", ADDRESSES)
def test_hints_of_a_coordinator_can_be_typed(address: str) -> None:
    """Its first lines name commands that the command line takes, for the address at which it is reached."""
    lines = [hint_to_start_coordinator(address), listening_line(address), *join_lines(address)]
    found = [match[0] for match in map(HINT.search, lines) if match]
    assert len(found) >= 4
    for line in found:
        parse(line)


def test_hints_for_other_machines_have_a_routable_address() -> None:
    """All addresses of a machine are no address to join; and what leaves this machine says so."""
    assert reachable_address("0.0.0.0:7070", "10.0.0.7") == "10.0.0.7:7070"
    assert reachable_address("[::]:7070", "10.0.0.7") == "10.0.0.7:7070"
    assert reachable_address("0.0.0.0:7070", "") == "HOST:7070"
    assert reachable_address("127.0.0.1:7070", "10.0.0.7") == "127.0.0.1:7070"
    told = "\n".join(join_lines("10.0.0.7:7070"))
    assert told.count("--insecure") == told.count("--coordinator 10.0.0.7:7070") == 4
    assert "--insecure" not in "\n".join(join_lines("127.0.0.1:7070"))


def test_hints_of_a_coordinator_that_encrypts_have_a_token() -> None:
    """Nothing is plain then, and who joins needs a token: how one is made stands first."""
    with using_credentials(COORDINATOR_ITSELF):
        lines = [hint_to_start_coordinator("10.0.0.7:7070"), *join_lines("10.0.0.7:7070")]
        elsewhere = join_lines("10.0.0.7:7070", trust=Path("my keys"))
    told = "\n".join(lines)
    assert "--insecure" not in told and "--name" not in told
    assert told.count("--token-file FILE") == 1
    assert elsewhere[0].endswith("--save FILE --trust 'my keys'")
    assert "export RINGTUNE_TRUST='my keys/admin'" in elsewhere[3]
    found = [match[0] for match in map(HINT.search, lines) if match]
    assert "ringtune coordinator token NAME --save FILE" in found
    for line in found:
        parse(line)


@cases(
    "typed",
    [
        ["-v", "train", "my job.toml", "--local", "2", "--out", "run", "--replace"],
        ["train", "job.toml", "--coordinator", "10.0.0.1:7", "--insecure", "--out", "run", "--resume"],
        ["demo", "--local", "2"],
        ["train", "job.toml", "--local", "2", "--out", "run", "--microbatches", "2,4", "--wire=float16"],
        ["train", "job.toml", "--local", "2", "--plan", "p.json", "--out", "run", "--set", "train.seed=1"],
        ["train", "job.toml", "--plan=p.json", "--coordinator", "10.0.0.1:7", "--insecure", "--out", "run"],
    ],
)
def test_hints_to_resume_can_be_typed(typed: list[str]) -> None:
    """Whatever command trained, and however it was started, the line that goes on is one of ``ringtune train``.

    The command refuses nothing of it: it gets as far as the job, which is not there.
    """
    words = train._typed(typed, Path("my job.toml"), Path("run"), 2)
    line = train.resume_hint(7, words).partition("resume with: ")[2]
    assert line.startswith("ringtune ") and line.count("--resume") == 1 and "--replace" not in line
    parse(line.replace("ringtune -v", "ringtune"))
    done = CliRunner().invoke(cli.app, shlex.split(line)[1:])
    assert "can't read the job file" in done.stderr, done.stderr
    assert done.exit_code == JobError.exit_code
    assert ("--set" in typed) == ("--set train.seed=1" in line)
