"""Ask whoever types ``ringtune init``, with a default for each question; or nobody, and take the defaults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import typer

from ringtune.errors import InvalidInputError

MOST_QUESTIONS: Final = 5


class Ask(Protocol):
    """Answers the questions that looking leaves open."""

    def choose(self, question: str, default: str, choices: Sequence[str] = ()) -> str:
        """Answer with one of the choices, where there are any; the default is one of them."""

    def place(self, question: str, find: Callable[[], str]) -> str:
        """Answer with a path; ``find`` finds the default, or raises where there is none."""


class NobodyAsked:
    """Takes every default; what can't be found is an error."""

    def choose(self, question: str, default: str, choices: Sequence[str] = ()) -> str:
        """Return the default."""
        return default

    def place(self, question: str, find: Callable[[], str]) -> str:
        """Return what is found.

        Raises:
            InvalidInputError: as ``find``.
        """
        return find()


class OnTerminal:
    """Asks on the terminal; an empty line takes the default."""

    def choose(self, question: str, default: str, choices: Sequence[str] = ()) -> str:
        """Ask until the answer is one of the choices."""
        among = f" ({', '.join(choices)})" if choices else ""
        while True:
            answer = str(typer.prompt(f"{question}{among}", default=default, err=True)).strip()
            if not choices or answer in choices:
                return answer
            typer.echo(f"{answer!r} is none of {', '.join(choices)}", err=True)

    def place(self, question: str, find: Callable[[], str]) -> str:
        """Ask for a path; where nothing is found, say so, and ask without a default."""
        try:
            return str(typer.prompt(question, default=find(), err=True)).strip()
        except InvalidInputError as error:
            typer.echo(str(error), err=True)
            return str(typer.prompt(question, err=True)).strip()
