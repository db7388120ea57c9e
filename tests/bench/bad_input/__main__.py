"""``python -m tests.bench.bad_input``: every case of wrong input, and what is wrong with the answers.

A case is wrong input in a folder of its own with a right model, right rows and a right job beside it. Its answer is
one line that begins with ``error:`` and says what, where and the remedy, with the stated exit code; no traceback, no
file and no process is left. Prints what differs, and exits with 1 if anything does.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.bad_input.all_cases import all_cases
from tests.bench.bad_input.answers import Workshop, problems


def main() -> int:
    """Try all cases whose name has the given text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="text that a case's name has to have")
    parser.add_argument("--skip", default="\0", help="text that a case's name must not have")
    parser.add_argument("--show", action="store_true", help="print every answer")
    options = parser.parse_args()
    cases = [case for case in all_cases() if options.only in case.name and options.skip not in case.name]
    began_s, bad = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="bad-input-") as folder, Workshop(Path(folder)) as workshop:
        for case in cases:
            try:
                answer = workshop.answer(case)
                found = problems(case, answer)
            except Exception as error:  # a case that can't be judged is one that failed
                answer, found = None, [f"{type(error).__name__}: {error}"]
            bad += bool(found)
            if found or options.show:
                sys.stdout.write(f"{'BAD' if found else 'ok '} {case.name}: {'; '.join(found)}\n")
                sys.stdout.write(f"      {answer.code if answer else '-'} {answer.errors[-600:] if answer else ''}\n")
                sys.stdout.flush()
    sys.stdout.write(f"{len(cases)} cases, {bad} wrong, {time.monotonic() - began_s:.0f} s\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
