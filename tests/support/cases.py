"""Many small cases in one test: collected, set up and torn down once; a failure names its row."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest

Test = Callable[..., None]


def cases(names: str | Sequence[str], rows: Iterable[Any]) -> Callable[[Test], Test]:
    """Call a test with every row, in order, as ``pytest.mark.parametrize`` would in tests of their own.

    Each row gets a new ``tmp_path``, and what it has set with ``monkeypatch`` is undone after it.
    """
    keys = [names] if isinstance(names, str) else list(names)
    table = [(row,) if isinstance(names, str) else tuple(row) for row in rows]
    if not table:
        raise ValueError(f"there is no case of {', '.join(keys)}")

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def carry_out(**fixtures: Any) -> None:
            for number, row in enumerate(table):
                values = dict(zip(keys, row, strict=True))
                with _own(fixtures, number) as own:
                    try:
                        test(**own, **values)
                    except BaseException as error:
                        error.add_note(f"case {number} of {len(table)}: {values!r}")
                        raise

        signature = inspect.signature(test)
        left = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        carry_out.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return carry_out

    return decorate


@contextlib.contextmanager
def _own(fixtures: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """The fixtures of one row: those of pytest that remember what a test did are new."""
    own = dict(fixtures)
    with contextlib.ExitStack() as stack:
        if "tmp_path" in own:
            own["tmp_path"] = own["tmp_path"] / str(number)
            own["tmp_path"].mkdir()
        if "monkeypatch" in own:
            own["monkeypatch"] = stack.enter_context(pytest.MonkeyPatch.context())
        for name in ("capsys", "capfd"):
            if name in own:
                own[name].readouterr()
        if "caplog" in own:
            own["caplog"].clear()
        yield own
