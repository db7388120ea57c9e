"""How long a run stands still when it moves to a board without a copy of the model: ``python -m tests.bench.moving``.

Three boards of the testbed at 0.4 cores, with links of some Mbit/s. board-0 owns rows and has the demo's MiniLM, the
others have no copy; after some turns board-2 takes four blocks over. Compared in pairs: base weights that come while
the run trains, and the same run whose coordinator loses the call that asks for them, so that they come in the move.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import sys
from pathlib import Path

from coordinator.demo.fetch import demo_cache
from coordinator.demo.workspace import prepare
from coordinator.planner.given.given_plan import GivenPlan
from deploy.testbed.agents import AgentSetup
from deploy.testbed.testbed import Testbed
from ringtune.failpoints import VARIABLE
from ringtune.schedule.plan import Plan
from tests.bench.jobs import write_job
from tests.bench.testbed_runs import ON_BOARDS, Bed, equal_boards, say
from tests.support.moves import moving, slices_of

OUT = Path("build/bench/moving").resolve()
FIRST, SECOND = (("board-0", 0, 3), ("board-1", 3, 6)), (("board-0", 0, 2), ("board-2", 2, 6))
TURN, MOVE_AFTER, STEPS = 10, 16, 180
LOST = "call FetchAhead 2 drop-request"


def stood_still(folder: Path, mbit_per_s: float, *, ahead: bool) -> dict[str, object]:
    """Train once on new boards; return what the books say of the move."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    workspace = prepare(OUT / "demo", demo_cache())
    model, train = workspace.model.resolve(), workspace.job.with_name("train.csv").resolve()
    orders = folder / "orders"
    orders.mkdir()
    if not ahead:
        (orders / "coordinator").write_text(LOST, encoding="utf-8")
    os.environ[VARIABLE] = str(orders)
    four = equal_boards(0.4, mbit_per_s=mbit_per_s)
    boards = [dataclasses.replace(board, data=train if board.name == "board-0" else None) for board in four.boards[:3]]
    job = write_job(
        folder / "job.toml",
        model=Path("elsewhere") / model.name,
        train=train,
        steps=STEPS,
        more=ON_BOARDS | {"train.local_iterations": TURN, "unfreeze.every_steps": STEPS},
    )
    job.write_text(job.read_text().replace(str(Path("elsewhere").resolve()), "elsewhere"), encoding="utf-8")
    try:
        with Testbed(dataclasses.replace(four, boards=tuple(boards)), folder=folder) as testbed:
            testbed.start_coordinator(lease_s=30.0)
            testbed.start_agents(AgentSetup(models={"board-0": model}))
            bed = Bed(testbed, folder)
            plan_file = folder / "plan.json"
            bed.ringtune("plan", str(job), "--nodes", "3", "--save", str(plan_file))
            made = GivenPlan.from_json(json.loads(plan_file.read_text(encoding="utf-8"))).plan
            first = Plan.of(made.course, type(made.placement)(slices=slices_of(FIRST)))
            plan_file.write_text(json.dumps(moving(first, (MOVE_AFTER, SECOND)).to_json()), encoding="utf-8")
            bed.ringtune("train", str(job), "--plan", str(plan_file), "--out", str(folder / "run"), "--replace")
    finally:
        del os.environ[VARIABLE]
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    (move,) = [line for line in lines if line.get("kind") == "move"]
    fetched = [line for line in lines if line.get("kind") == "fetched"]
    return {"move_s": move["seconds"], "problem": move.get("problem", ""), "fetched": fetched}


def main() -> None:
    """Measure pairs, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--mbit-per-s", type=float, default=20.0)
    asked = parser.parse_args()
    runs: dict[str, list[dict[str, object]]] = {"ahead": [], "in the move": []}
    for pair in range(asked.pairs):
        for name in runs if pair % 2 else reversed(runs):
            found = stood_still(OUT / f"{name.replace(' ', '-')}-{pair}", asked.mbit_per_s, ahead=name == "ahead")
            runs[name].append(found)
            say(f"{name}: {found}")
    seconds = {name: [float(str(run["move_s"])) for run in found] for name, found in runs.items()}
    figures = {"mbit_per_s": asked.mbit_per_s, "runs": runs}
    figures |= {f"{name}_s": statistics.median(found) for name, found in seconds.items()}
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "moving.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
