"""Give hostile bytes to whatever reads those of others: ``python -m tests.bench.fuzz``.

Right inputs are changed again and again. Every answer has to be a value or an error of RingTune's own, of at most
16,000 characters, within a second of a processor and 64 MiB; what asks for a gibibyte gets none. With ``atheris``
(installed by hand: ``pip install atheris``) coverage says which changes are worth going on from; without it hypothesis
draws them. Inputs that got another answer are kept in ``build/bench/fuzz``, figures in ``build/bench/trust.json``;
the exit code is 1 if there is such an input.

========= ==================================================================================================
frames    messages of a link: unpacked, put together, checked against a plan, decoded to tensors
plan      plans, jobs, tables of operations, profiles, what a run goes on from, requests of users
files     safetensors headers and files, shards, manifests, records, files in pieces, certificates, tokens, rows
calls     grants, reports, scores, manifests and those who join, as they come in calls
========= ==================================================================================================
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from tests.bench.fuzz.campaign import ENGINES, TARGETS, summary_of
from tests.bench.trust_figures import write_part

OUT = Path("build/bench/fuzz")
GRACE_S = 120.0


def main() -> int:
    """Fuzz the targets, each in a process of its own, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="for each target")
    parser.add_argument("--target", choices=TARGETS, action="append", help="which one, more than once; default all")
    parser.add_argument("--engine", choices=ENGINES, default="auto", help="auto = atheris where it is installed")
    parser.add_argument("--seed", type=int, default=0, help="of the changes")
    options = parser.parse_args()
    found = []
    for target in options.target or TARGETS:
        folder = OUT / target
        command = [sys.executable, "-m", "tests.bench.fuzz.campaign", target, str(folder), options.engine]
        command += [str(60 * options.minutes), str(options.seed)]
        ended = subprocess.run(command, check=False, timeout=60 * options.minutes + GRACE_S)  # noqa: S603
        summary = {**summary_of(folder), "exit_code": ended.returncode}
        write_part(f"fuzz_{target}", summary)
        sys.stdout.write(json.dumps({target: summary}, indent=1) + "\n")
        sys.stdout.flush()
        found.append(summary)
    return 1 if any(summary["findings"] or summary["exit_code"] for summary in found) else 0


if __name__ == "__main__":
    sys.exit(main())
