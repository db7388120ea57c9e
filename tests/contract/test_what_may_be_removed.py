"""Every place in the code that removes, renames or writes over something, with the reason why it may.

Nothing of the user's is ever removed. A new place needs a line here; whoever writes it says whose the file is.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.cases import cases

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("proto", "edge", "coordinator", "sim", "deploy")
REMOVING = frozenset(
    {
        "rmtree",
        "rmdir",
        "removedirs",
        "unlink",
        "rename",
        "renames",
        "truncate",
        "ftruncate",
        "copyfile",
        "copytree",
        "write_text",
        "write_bytes",
        "touch",
        "hardlink_to",
        "symlink_to",
        "drop_file",
        "move_folder_aside",
        "put_aside",
        "put_other_aside",
        "remove_folder",
        "remove_partial_files",
        "rename_durably",
        "replace_folder",
        "replacing",
        "write_durably",
        "write_pieces_durably",
    }
)
OF_OS = frozenset({"remove", "replace", "link", "symlink"})
OF_SHUTIL = frozenset({"move", "copy", "copy2"})

MAY_HAVE_ONE = re.compile(rf"\b(?:{'|'.join(sorted(REMOVING | OF_OS | OF_SHUTIL))}|open)\(")
"""Nine of ten files have no such word, and are not parsed."""

TABLE = """
The helpers themselves: a write replaces the file that its caller names, drafts go, others are moved
    proto/ringtune/storage/durable.py: check_writable, drop_file, move_folder_aside, remove_folder, remove_partial_files
    proto/ringtune/storage/durable.py: rename_durably, replace_folder, replacing, write_durably, write_pieces_durably
    proto/ringtune/storage/durable.py: FileLock._lock, mark, put_aside, put_other_aside
In the folder of a run, which has the marker and is locked: files of the run's own names
    coordinator/api/train.py: _in_background
    coordinator/api/predict.py: show_sample
    coordinator/client/checkpoints.py: BestFolder._drop, BestFolder.complete, BestFolder.publish
    coordinator/client/checkpoints.py: _copy_durably
    coordinator/client/checkpoints.py: RunCheckpoints.add, RunCheckpoints.rewind_to
    coordinator/client/checkpoints.py: RunCheckpoints.add_length, cut_metrics
    coordinator/client/run_folder.py: RunFolder._let_go, RunFolder.add_chunk, RunFolder.add_metrics
    coordinator/client/run_folder.py: RunFolder.write_job
    coordinator/client/run_folder.py: RunFolder.write_json, RunFolder.write_text
    coordinator/client/run_files.py: RunParts.begin
    coordinator/client/saved_run.py: RunLocation.write
    coordinator/client/run_files.py: TablesFile._write, TablesFile.rewind_to
    coordinator/client/detached_runs.py: _start
    coordinator/client/local_nodes.py: AgentTemplate.__enter__, AgentTemplate.start
    coordinator/client/local_nodes.py: LocalNodes.__enter__
    coordinator/client/submit.py: Terminal._open
What an earlier run has there is moved beside it; what the same run wrote goes when what was fetched is whole
    coordinator/client/detached_runs.py: _others, _take_over, fetched_folder
    coordinator/client/run_folder.py: put_run_aside
A folder that this command has made, with nothing in it but what it has written there
    coordinator/client/run_folder.py: remove_unused_folder
In a temporary folder that this process has made
    coordinator/api/predict.py: _file_of
    coordinator/run/node_client.py: _empty
    coordinator/api/predict.py: _started, predictions_of
    coordinator/api/predict.py: _sample
    coordinator/api/evaluation.py: _invitation
    edge/profiler/works.py: folder_in
    edge/model/merge.py: merge_run, sum_run
    edge/model/auxiliary/__init__.py: _load_library
    proto/generate.py: generate
The file that the user has named for this; rows, or a job that is there, are refused before
    coordinator/cli/init.py: init
    coordinator/cli/coordinator.py: token
The file that the user has named for this, absent or one that the same command has written
    coordinator/api/output.py: Plot.save
    coordinator/api/measure.py: Measurement.save
    coordinator/api/plan.py: PlannedJob.save
    coordinator/cli/what_if.py: _show_sweep
The file that the user has named for this; what was there is moved beside it, and told
    coordinator/api/predict.py: writer_to
The folder that the user has named, absent or empty, or one with an earlier prediction
    coordinator/api/export.py: _export_merged, _write
    coordinator/api/prediction_text.py: write_prediction
    proto/ringtune/storage/chunks.py: write_any_files.open_file
The demo's folder has its marker; in its cache a file that is not the one that is pinned is moved aside
    coordinator/cli/demo_files.py: _unpack
    coordinator/cli/demo_files.py: write_csv
    coordinator/cli/demo_files.py: write_job
Our own cache of a hub's models, locked: files of a commit, checked by digest
    coordinator/client/hub.py: _fetch, store
Our own cache of base weights, locked: names are digests, what is damaged or partial is fetched again
    edge/weights/weight_cache.py: CheckedFile.discard, CheckedFile.finish, CheckedFile.is_complete, CheckedFile.write
    edge/weights/weight_cache.py: write_whole
    edge/weights/weight_cache.py: ModelCache.write_outline
A coordinator's state folder, locked: books of runs by their ids, dropped when they are fetched and old
    coordinator/server/run_store.py: EventLog.__init__, EventLog.append
    coordinator/server/run_store.py: StoredRun._end, StoredRun.begun, StoredRun.fetched, StoredRun.found
    coordinator/server/run_store.py: RunStore._find, RunStore.begin, RunStore.close, RunStore.prune
A node's state folder, locked: below the ids of runs, and what the node has measured of itself
    edge/techniques/activation_cache.py: ActivationCache._delete_above, write_hidden
    edge/profiler/profile_cache.py: ProfileCache.put
    edge/model/optimizer_state.py: DiskStateStore.close, DiskStateStore.make_room
    edge/model/optimizer_state.py: StateFile.make, StateFile.moved
    edge/checkpoint/state_folder.py: SavedParts.drop_before, SavedParts.write
    edge/checkpoint/state_folder.py: RunShards.finish, RunShards.keep_from, RunShards.keep_rows, RunShards.reopen
    edge/checkpoint/state_folder.py: RunShards.write, StateFolder.drop_moments, StateFolder.drop_old_runs
Keys, certificates and tokens: made once, only where there is none, or replaced by one that holds longer
    coordinator/server/certificate_authority.py: Authority.write
    coordinator/server/certificate_authority.py: Register.__init__
    proto/ringtune/transport/identity.py: write_identity
    proto/ringtune/transport/page_access.py: token_of
No file of anybody: an event, an output, a setting of the kernel, an order to fail that a test has written
    coordinator/server/coordinator.py: Coordinator.report
    edge/machine/resources.py: reset_peak
    proto/ringtune/machine/process.py: guard_outputs
Tools of this repository: boards, control groups and ledgers that they have made themselves, in folders of their own
    deploy/arm64/commands.py: _rings
    deploy/arm64/emulated.py: Board.make
    deploy/arm64/ring.py: Mixed._started
    deploy/smoke/tiny_job.py: write_job, write_model, write_rows
    deploy/testbed/capabilities.py: _why_no_group
    deploy/testbed/cleanup.py: Ledger._append, Ledger.open, Ledger.remove_all
    deploy/testbed/groups.py: apply, kill_and_remove
    deploy/testbed/processes.py: start
"""


def places(tree: ast.Module) -> Iterator[str]:
    """Name the functions of a module that remove or write over a file, each as often as it does."""

    def visit(node: ast.AST, names: tuple[str, ...]) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            inner = names
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inner = (*names, child.name)
            if isinstance(child, ast.Call) and is_one(child):
                yield ".".join(names) or "(module)"
            yield from visit(child, inner)

    yield from visit(tree, ())


def is_one(call: ast.Call) -> bool:
    """Whether a call may remove, rename or write over a file, by its name and its arguments."""
    function = call.func
    if isinstance(function, ast.Name):
        return function.id in REMOVING or (function.id == "open" and opens_to_write(call))
    if not isinstance(function, ast.Attribute):
        return False
    owner = function.value.id if isinstance(function.value, ast.Name) else ""
    if owner in ("os", "shutil"):
        known = REMOVING | OF_OS if owner == "os" else REMOVING | OF_SHUTIL
        return function.attr in known or (function.attr == "open" and "O_CREAT" in ast.unparse(call))
    if function.attr == "replace":  # of a path; that of a text has two arguments
        return len(call.args) == 1 and not call.keywords and owner not in ("dataclasses", "os")
    return function.attr in REMOVING or (function.attr == "open" and opens_to_write(call))


def opens_to_write(call: ast.Call) -> bool:
    """Whether a file is opened in a mode that writes, or in one that is only known when it runs."""
    modes = [*call.args[:2], *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    texts = [node.value for mode in modes for node in ast.walk(mode) if isinstance(node, ast.Constant)]
    return any(isinstance(text, str) and 0 < len(text) <= 3 and set(text) & set("wax+") for text in texts)


def found() -> set[str]:
    """Every place, as ``file:function``."""
    files = (path for package in PACKAGES for path in sorted((REPOSITORY / package).rglob("*.py")))
    return {
        f"{path.relative_to(REPOSITORY)}:{place}"
        for path in files
        if "_pb2" not in path.name and MAY_HAVE_ONE.search(text := path.read_text(encoding="utf-8"))
        for place in places(ast.parse(text))
    }


def listed() -> dict[str, str]:
    """The table: place -> the reason above it."""
    reasons, reason = dict[str, str](), ""
    for line in filter(None, TABLE.splitlines()):
        if not line.startswith("    "):
            reason = line
            continue
        file, functions = line.split(": ")
        reasons |= {f"{file.strip()}:{function}": reason for function in functions.split(", ")}
    return reasons


def test_every_place_that_removes_or_writes_over_has_a_reason() -> None:
    """None is missing, and none is left of a place that is gone."""
    has, reasons = found(), listed()
    assert sorted(has - reasons.keys()) == [], "say in TABLE whose the file is, or use a helper of ringtune.storage"
    assert sorted(reasons.keys() - has) == [], "no such place any more"
    assert all(reasons.values())


@cases(
    "line",
    [
        "shutil.rmtree(x)",
        "path.unlink()",
        "path.rename(y)",
        "path.replace(y)",
        "os.replace(x, y)",
        "os.remove(x)",
        "path.open('w')",
        "path.open('ab' if x else 'wb')",
        "open(x, mode='r+b')",
        "os.open(x, os.O_CREAT)",
        "path.write_text('')",
        "write_durably(x, y)",
    ],
)
def test_a_new_place_is_seen(line: str) -> None:
    """Whatever the call; reading, and texts that are replaced, are none."""
    assert list(places(ast.parse(f"class A:\n def b(self):\n  {line}"))) == ["A.b"]
    for harmless in ("path.open()", "open(x, 'rb')", "text.replace('a', 'b')", "dataclasses.replace(x)", "os.open(x)"):
        assert not list(places(ast.parse(harmless)))
