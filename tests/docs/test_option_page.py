"""``docs/options.md`` lists the options that the command line has."""

from __future__ import annotations

from docs import make_options
from tests.contract.test_hints import commands


def test_option_page_is_current() -> None:
    """If this fails, an option has changed: run ``python -m docs.make_options``."""
    assert make_options.PAGE.read_text(encoding="utf-8") == make_options.page()


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
