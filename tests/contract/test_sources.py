"""What is read from the sources: their shape, who knows what, what may remove files, and what runs what was read.

Rooms are files, and a folder is one room to those outside of it. A room stands above all that it imports. So an import
that runs upwards closes a circle, and there is none: neither between the rooms of a folder, nor between folders.

Nothing of the user's is ever removed. A new place that removes, renames or writes over a file needs a line in TABLE;
whoever writes it says whose the file is. Nothing that comes from a file or another machine is ever run as code.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ringtune import __version__
from ringtune.hints import WHEEL, hint_to_install
from tests.contract.test_hints import commands, parse
from tests.support.cases import cases
from tests.support.sources import ROOT, modules, parsed

METHOD_NAMES = ("ringada", "all", "single", "pipeadapter")


class Facts(NamedTuple):
    """What the searches below find in a file, which is parsed and walked through once."""

    imports: frozenset[str]
    comparisons: tuple[tuple[int, str], ...]
    ways: tuple[str, ...]
    texts: tuple[str, ...]
    places: tuple[str, ...]

    @classmethod
    def of(cls, tree: ast.Module) -> Facts:
        """Search in a file."""
        nodes = list(ast.walk(tree))
        return cls(
            frozenset(imported(nodes)), tuple(compared(nodes)), tuple(ways(nodes)), tuple(texts(nodes)),
            tuple(places(tree)),
        )  # fmt: skip


@functools.cache
def facts() -> dict[str, Facts]:
    """What every module has."""
    return {name: Facts.of(parsed(path)) for name, path in modules().items()}


def facts_of(code: str) -> Facts:
    """What some lines have."""
    return Facts.of(ast.parse(code))


# ---- rooms -----------------------------------------------------------------------------------------


def imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The modules that a module imports, also those for type checks only; a package stands for its ``__init__``."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules())
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in modules() or node.module in modules():
                    yield inner if inner in modules() else node.module


def folders() -> list[str]:
    """Every package, and the whole house."""
    return ["", *sorted({name.rpartition(".")[0] for name in modules() if "." in name})]


def room_of(module: str, folder: str) -> str:
    """The room of a folder in which a module lies; empty if it lies elsewhere or is the folder's own face."""
    rest = module.removeprefix(f"{folder}.") if folder else module
    return "" if folder and rest == module else rest.partition(".")[0]


def arrows(folder: str) -> dict[str, set[str]]:
    """Which room of a folder imports which."""
    found: dict[str, set[str]] = {}
    for module, each in facts().items():
        room = room_of(module, folder)
        if room:
            found.setdefault(room, set()).update(room_of(target, folder) for target in each.imports)
            found[room] -= {"", room}
    return found


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """Rooms that import each other in a loop; empty if there are none."""
    left = {room: set(targets) for room, targets in graph.items()}
    while True:
        ground = {room for room, targets in left.items() if not targets & left.keys()}
        if not ground:
            return sorted(left)
        left = {room: targets for room, targets in left.items() if room not in ground}


@cases("folder", folders())
def test_structure_has_no_circle(folder: str) -> None:
    """No rooms of a folder import each other in a loop, so no import runs upwards."""
    found = circle_in(arrows(folder))
    ties = {room: sorted(arrows(folder)[room] & set(found)) for room in found}
    assert not found, f"{folder or 'the house'}: {ties}"


# ---- who knows the methods and the head ------------------------------------------------------------


def compared(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Every comparison in a file, and every case of a match, with its line."""
    for node in nodes:
        if isinstance(node, ast.Compare):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.match_case):
            yield node.pattern.lineno, ast.unparse(node.pattern)


def comparisons() -> Iterator[tuple[str, int, str]]:
    """(module, line, text) of all comparisons of the production code."""
    for name, found in facts().items():
        for line, text in found.comparisons:
            yield name, line, text


def asks_which_method(text: str) -> bool:
    """Whether a comparison is with a method's name; two methods may be compared as the values that they are."""
    names = [name for name in METHOD_NAMES if re.search(rf"""['"]{name}['"]""", text)]
    by_name = names not in ([], ["all"]) or ("all" in names and "method" in text)
    return by_name or re.search(r"\btrain\.method\b|\bmethod\.name\b|\bmethod_name\b", text) is not None


def asks_for_the_head_by_a_number(text: str) -> bool:
    """Whether a comparison of a unit is with the number of blocks."""
    units = r"\b(unit|start|stop|block|boundary|lowest|index|at)\b"
    return re.search(rf"{units}.*[=!]= .*num_blocks$|num_blocks [=!]= .*{units}$", text) is not None


def test_structure_keeps_names_of_methods_in_the_methods() -> None:
    """Nobody else asks which method it is; they ask the method what it does."""
    found = [entry for entry in comparisons() if asks_which_method(entry[2])]
    assert [entry for entry in found if not entry[0].startswith("ringtune.schedule.methods")] == []


def test_structure_asks_for_the_head_by_its_name() -> None:
    """Whether a unit is the head is asked of the head's unit, not of the number of blocks."""
    assert [entry for entry in comparisons() if asks_for_the_head_by_a_number(entry[2])] == []


# ---- what runs what was read ------------------------------------------------------------------------

MODULES = frozenset(
    {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "jsonpickle"}
)
CALLS = frozenset({"eval", "exec", "compile", "__import__"})
METHODS = frozenset({"torch.load", "torch.jit.load", "torch.hub.load", "runpy.run_path", "os.system", "os.popen"})
OPTIONS = frozenset({"allow_pickle", "trust_remote_code", "shell"})


def _reads_tensors_only(call: ast.Call) -> bool:
    return any(option.arg == "weights_only" and ast.unparse(option.value) == "True" for option in call.keywords)


def ways(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Every way in a source to run what was read; ``numpy.load`` says itself that it takes no pickles."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name == "torch.load" and _reads_tensors_only(node):
                continue
            if name in CALLS | METHODS or name.endswith((".extractall", "multiprocessing.connection.Listener")):
                yield name
            if name in ("np.load", "numpy.load") and "allow_pickle" not in {option.arg for option in node.keywords}:
                yield f"{name} without allow_pickle"
            for option in node.keywords:
                is_off = isinstance(option.value, ast.Constant) and option.value.value is False
                if option.arg in OPTIONS and not is_off:
                    yield f"{name}({option.arg}=...)"


def test_sources_have_no_way_to_run_what_they_read() -> None:
    """No unpickling, no evaluating, no code of a model's folder, no shell; numpy's own pickles are off."""
    assert len(facts()) > 200
    assert {name: found.ways for name, found in facts().items() if found.ways} == {}


@cases(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load(x)",
        "torch.load(x, weights_only=given)",
        "eval(text)",
        "np.load(x)",
        "np.load(x, allow_pickle=True)",
        "f(trust_remote_code=given)",
        "archive.extractall(folder)",
        "subprocess.run(x, shell=True)",
    ],
)
def test_search_for_such_ways_finds_them(text: str) -> None:
    """Negative control of the search."""
    assert facts_of(text).ways


# ---- what messages advise ------------------------------------------------------------------------------

QUOTED = re.compile(r"'(ringtune [a-z][^']*)'")
OPTION = re.compile(r"(?<![\w>-])--[a-z][a-z-]*[a-z](?![-\w])(?!-*>)")
OTHERS = {"--no-deps", "--wheel-dir", "--dest", "--revision", "--lora", "--turns"}
"""Of pip, hf and llama.cpp, and an arrow of a drawing."""


def texts(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Every text of a file; what is put into one stands there as X."""
    inner = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.value


def all_texts() -> Iterator[tuple[str, str]]:
    """(module, text) of all production code."""
    return ((name, text) for name, found in facts().items() for text in found.texts)


def test_hints_quoted_in_messages_are_commands() -> None:
    """What stands in quotes is a command by its name, or a line that can be typed."""
    found = [(name, quoted) for name, text in all_texts() for quoted in QUOTED.findall(text)]
    assert len(found) > 10
    wrong = []
    for name, line in found:
        try:
            assert line.split()[1] in commands()
            if len(line.split()) > 2:
                parse(line)
        except Exception as error:
            wrong.append((name, line, repr(error)))
    assert wrong == []


def test_hints_name_options_that_there_are() -> None:
    """No message and no docstring advises an option that no command has."""
    known = {option for command in commands().values() for parameter in command.params for option in parameter.opts}
    known |= {
        option for command in commands().values() for parameter in command.params for option in parameter.secondary_opts
    }
    known |= {"--help", "--version", "--verbose"} | OTHERS
    sentences = [(name, text) for name, text in all_texts() if " " in text]
    assert {
        (name, option) for name, text in sentences for option in OPTION.findall(text) if option not in known
    } == set()


def test_hints_install_nothing_that_no_index_has() -> None:
    """RingTune is in no package index: a message names a checkout, the file of the wheel, or another package."""
    assert [entry for entry in all_texts() if re.search(r"pip install '?ringtune\b(?!-)", entry[1])] == []
    assert f"ringtune-{__version__}-py3-none-any.whl" == WHEEL
    for extra in ("node", "sweeps", "plots", "web", "tensorboard"):
        assert f"[{extra}]" in hint_to_install(extra)


# ---- what may be removed -------------------------------------------------------------------------------

TOOLS = [ROOT / "proto/generate.py", *sorted((ROOT / "deploy").rglob("*.py"))]
NAMES = """
    rmtree rmdir removedirs unlink rename renames truncate ftruncate copyfile copytree write_text write_bytes touch
    hardlink_to symlink_to drop_file move_folder_aside put_aside put_other_aside remove_folder remove_partial_files
    rename_durably replace_folder replacing write_durably write_pieces_durably
"""
REMOVING = frozenset(NAMES.split())
OF_OS = frozenset({"remove", "replace", "link", "symlink"})
OF_SHUTIL = frozenset({"move", "copy", "copy2"})

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
    coordinator/client/run_folder.py: RunFolder.write_initial, RunFolder.write_job
    coordinator/client/run_folder.py: RunFolder.write_json, RunFolder.write_text
    coordinator/client/run_files.py: RunParts.begin
    coordinator/client/saved_run.py: RunLocation.write
    coordinator/client/run_files.py: TablesFile._write, TablesFile.rewind_to
    coordinator/client/detached_runs.py: _start
    coordinator/client/local_nodes.py: AgentTemplate.__enter__, AgentTemplate.start
    coordinator/client/local_nodes.py: LocalNodes.__enter__
    coordinator/client/submit.py: Interrupts._open_log
What an earlier run has there is moved beside it; what the same run wrote goes when what was fetched is whole
    coordinator/client/detached_runs.py: _others, _take_over, fetched_folder
    coordinator/client/run_folder.py: put_run_aside
A folder that this command has made, with nothing in it but what it has written there
    coordinator/client/run_folder.py: remove_unused_folder
In a temporary folder that this process has made
    coordinator/api/predict.py: _file_of
    coordinator/run/node_client.py: _empty
    coordinator/api/text_process.py: LineProcess.__init__, command_of
    coordinator/api/predict.py: _sample
    coordinator/api/evaluation.py: _invitation
    edge/profiler/benchmark.py: folder_in
    edge/model/merge.py: merge_run, sum_run
    proto/generate.py: generate
The file that the user has named for this; rows, or a job that is there, are refused before
    coordinator/cli/init.py: init
    coordinator/cli/coordinator.py: token
The file that the user has named for this, absent or one that the same command has written
    coordinator/api/output.py: Plot.save
    coordinator/api/train.py: Measurement.save
    coordinator/api/plan.py: PlannedJob.save
    coordinator/cli/what_if.py: _show_sweep
The file that the user has named for this; what was there is moved beside it, and told
    coordinator/api/predict.py: writer_to
The folder that the user has named, absent or empty, or one with an earlier prediction
    coordinator/api/export.py: _working_folder, _write
    coordinator/api/prediction_text.py: write_prediction
    proto/ringtune/storage/chunks.py: write_any_files
The demo's folder has its marker; in its cache a file that is not the one that is pinned is moved aside
    coordinator/cli/demo_files.py: _unpack
    coordinator/cli/demo_files.py: write_csv
    coordinator/cli/demo_files.py: write_job
A new file in a temporary folder of the caller
    edge/model/pickled.py: convert
A new file that its caller names: one that exists is left alone
    coordinator/server/database.py: _engine
    proto/ringtune/storage/tensor_files.py: write_aligned
Our own cache of a hub's models, locked: files of a commit, checked by digest
    coordinator/client/hub.py: _fetch, store
Our own cache of folders for GGUF files: names are digests of path, time and size
    proto/ringtune/models/gguf.py: folder_of_gguf
Our own cache of base weights, locked: names are digests, what is damaged or partial is fetched again
    edge/weights/weight_cache.py: CheckedFile.discard, CheckedFile.finish, CheckedFile.is_complete, CheckedFile.write
    edge/weights/weight_cache.py: write_whole
    edge/weights/weight_cache.py: ModelCache.write_outline
A coordinator's state folder, locked: books of runs by their ids, dropped when they are fetched and old
    coordinator/server/run_store.py: EventLog.__init__, EventLog.append
    coordinator/server/run_store.py: StoredRun.write_record
    coordinator/server/run_store.py: RunStore._delete, RunStore._find, RunStore.begin, RunStore.close
A coordinator's copy of a database, locked, in a folder of that database's id: below the ids of runs
    coordinator/server/database.py: Database._copy_events, Database.copy_to
A node's state folder, locked: below the ids of runs, and what the node has measured of itself
    edge/techniques/activation_cache.py: ActivationCache._delete_above, write_hidden
    edge/profiler/timing.py: ProfileCache.put
    edge/runtime/generation.py: TextWriter._close
    edge/model/optimizer_state.py: DiskStateStore.close, DiskStateStore.make_room
    edge/model/optimizer_state.py: StateFile.make, StateFile.moved
    edge/checkpoint/state_folder.py: RunShards.finish, RunShards.keep_best, RunShards.keep_from, RunShards.keep_rows
    edge/checkpoint/state_folder.py: RunShards.reopen, RunShards.write_part
    edge/checkpoint/state_folder.py: _write_with_digest, StateFolder.drop_moments, StateFolder.drop_old_runs
Keys, certificates and tokens: made once, only where there is none, or replaced by one that holds longer
    coordinator/server/certificate_authority.py: Authority.write, TrustKeeper._put_in_place
    coordinator/server/certificate_authority.py: Register.__init__
    proto/ringtune/transport/identity.py: write_identity
    proto/ringtune/transport/page_access.py: token_of
No file of anybody: an event, an output, a setting of the kernel, an order to fail that a test has written
    coordinator/server/coordinator.py: Coordinator.report
    edge/machine/resources.py: reset_peak
    proto/ringtune/machine/process.py: guard_outputs
Tools of this repository: boards, control groups and ledgers that they have made themselves, in folders of their own
    deploy/arm64/__main__.py: _rings
    deploy/arm64/emulated.py: Board.make
    deploy/arm64/__main__.py: Mixed._started
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
    paths = [(path, facts()[name].places) for name, path in modules().items()]
    paths += [(path, tuple(places(parsed(path)))) for path in TOOLS]
    return {f"{path.relative_to(ROOT)}:{place}" for path, names in paths for place in names}


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
