"""What a slice adds to an idle agent, measured in a process of its own: ``python -m tests.support.slice_memory``.

The process loads what an agent has loaded when it is idle, builds a slice as the agent does, and runs one forward.
Prints one line of JSON: resident bytes before and after, and what of the difference is anonymous (not a file's pages).
An idle agent has run each kernel once (``touch_kernels``): what that adds to the loaded libraries stands beside it.

With several ways to hold frozen weights, each has a line, and a process that is forked from the idle one. Only its
anonymous bytes and those of the model's files compare then: pages of other files that the idle one has are not mapped
in it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any, Final

import edge.agent.process  # noqa: F401 - as in an agent that has joined
from edge.agent import torch_backend
from edge.machine.libraries import limit_libraries, load_libraries
from edge.machine.resources import keep_freed_memory
from ringtune.costs.memory_sizes import Sizes
from ringtune.costs.model_facts import model_facts
from ringtune.job.job import Job, Model
from ringtune.schedule.course import FROZEN_DTYPES, FrozenWeights
from tests.support.plans import changed, make_plan

PLAIN: Final = "plain"
"""Frozen weights as they are in the job's ``model.dtype``."""


def resident(model: Path) -> dict[str, int]:
    """Resident bytes of this process now: without a file (``anonymous``), and with those of a model's files (``own``).

    How many pages of a library's file a fault maps depends on what the page cache has of it, and all processes share
    them: after an installation there may be 80 MB more.
    """
    found = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    anonymous = int(found["RssAnon"].split()[0]) << 10
    return {"anonymous": anonymous, "own": anonymous + mapped_bytes(model, "Rss") - mapped_bytes(model, "Anonymous")}


def mapped_bytes(folder: Path, key: str = "Rss") -> int:
    """Bytes of pages of a folder's files that this process has mapped; ``key`` is one of ``/proc/self/smaps``."""
    found, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_ours = str(folder) in line
        elif is_ours and line.startswith(f"{key}:"):
            found += int(line.split()[1]) << 10
    return found


def is_mapped(address: int, folder: Path) -> bool:
    """Whether an address of this process is in a mapped file of a folder."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()]
    ours = (line[0].split("-") for line in lines if str(folder) in line[-1])
    return any(int(start, 16) <= address < int(end, 16) for start, end in ours)


def main() -> None:
    """Read the command line, load what an idle agent has, measure each way, print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--blocks", type=int, nargs=2, default=(2, 4), metavar=("FIRST", "STOP"))
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument(
        "--frozen", choices=(PLAIN, *FROZEN_DTYPES), nargs="+", default=[PLAIN], help="hold frozen weights so"
    )
    options = parser.parse_args()
    limit_libraries(1)
    keep_freed_memory()
    load_libraries()
    loaded = resident(options.model)
    torch_backend.preload()

    import torch

    torch.set_num_threads(1)
    if len(options.frozen) == 1:
        print(json.dumps(measured(options, options.frozen[0], loaded)))  # noqa: T201
        return
    for frozen in options.frozen:
        if child := os.fork():
            if os.waitpid(child, 0)[1]:
                sys.exit(f"no figures of {frozen}")
        else:
            print(json.dumps(measured(options, frozen, loaded)), flush=True)  # noqa: T201
            os._exit(0)


def measured(options: argparse.Namespace, frozen: str, loaded: dict[str, int]) -> dict[str, Any]:
    """Build a slice in this process, run a forward, and tell what that added."""
    import torch

    from edge.runtime.executor import host
    from ringtune.models.folder import read_config

    config = read_config(options.model)
    num_blocks, width = int(config["num_hidden_layers"]), int(config["hidden_size"])
    first, stop = options.blocks
    slices = [("below", 0, first), ("here", first, stop), ("above", stop, num_blocks)]
    slices = [piece for piece in slices if piece[1] < piece[2]]
    plan = make_plan(slices, ["owner"], num_blocks=num_blocks, hidden_size=width)
    if frozen != PLAIN:
        plan = changed(plan, frozen=FrozenWeights(dtype=frozen))
    job = Job(model=Model(path=str(options.model)))
    before = resident(options.model)

    hosted = host(plan, "here", job, options.model, None, device=torch.device("cpu"))
    built = resident(options.model)
    hidden = torch.randn(options.rows, options.tokens, width)
    mask = torch.ones(options.rows, options.tokens, dtype=torch.int64)
    with torch.no_grad():
        context = hosted.blocks.context(hidden, mask)
        output = hosted.blocks.run(hidden, mask, context, first, stop)
    after = resident(options.model)
    facts = model_facts(options.model, job)
    sizes = Sizes(plan.course, facts, optimizer="adamw", dtype="float32", activation_token_bytes=0)
    weights = (stop - first) * (sizes.block_bytes + sizes.adapter_bytes) + sizes.widened_bytes(is_owner=False)
    return {
        "planned_bytes": weights,
        "idle_anonymous_bytes": before["anonymous"],
        "kernels_bytes": before["own"] - loaded["own"],
        "built_bytes": built["own"] - before["own"],
        "added_bytes": after["own"] - before["own"],
        "added_with_kernels_bytes": after["own"] - loaded["own"],
        "added_anonymous_bytes": after["anonymous"] - before["anonymous"],
        "mapped_bytes": mapped_bytes(options.model, "Rss") - mapped_bytes(options.model, "Anonymous"),
        "hosted_bytes": hosted.hosted_bytes,
        "is_finite": bool(torch.isfinite(output).all()),
        "modules": sorted(sys.modules),
    }


if __name__ == "__main__":
    main()
