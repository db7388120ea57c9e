"""``ringtune audit``: a ledger of which all fits together, and one line for each thing that does not."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import CliRunner

from coordinator.api import audit
from coordinator.client.run_files import RunParts
from coordinator.client.run_folder import RunFolder
from coordinator.run.events import GrowingFile
from coordinator.run.run_text import STEP_KIND
from coordinator.server.certificate_authority import Authority
from ringtune import cli
from ringtune.models.family import CLASSIFICATION
from ringtune.models.result_files import HEAD_FILE, block_of
from ringtune.schedule.turns import turn_sequence
from ringtune.storage.pieces import FilePieces, Pieces
from ringtune.storage.tensor_files import TensorFile, TensorPieces, tensors_digest, write_tensors
from ringtune.techniques.audit import LEDGER, state_digest, statement
from ringtune.transport.identity import fingerprint, sign
from ringtune.transport.parties import VARIABLE
from ringtune.v1 import control_pb2
from tests.support.audit_trails import trail_of
from tests.support.cases import cases
from tests.support.plans import make_plan
from tests.support.saved_runs import write_run
from tests.support.trust_parts import AUTHORITY, credentials_of, keep

PLAN: Final = make_plan([("a", 0, 2), ("b", 2, 4)], ["o"], num_steps=6, microbatches=2, method="all", eval_rows=0)
Lines = list[dict[str, Any]]


def weights_of(file: Path) -> dict[int, str]:
    """The digest of the weights of each block in a result."""
    blocks: dict[int, dict[str, TensorPieces]] = {}
    result = TensorFile(FilePieces(file), where="it")
    for name in result.infos:
        block = block_of(name)
        assert block is not None
        blocks.setdefault(block, {})[name.removeprefix("bert.encoder.layer.")] = result.tensor(name)
    return {block: tensors_digest(tensors) for block, tensors in blocks.items()}


def write_ledger(folder: Path, *, is_signed: bool = True, signers: Sequence[Authority] = (AUTHORITY,) * 3) -> None:
    """A run of three turns, signed with certificates of these, whose last states have the weights of the result."""
    write_run(folder)
    (folder / "plan.json").write_text(json.dumps(PLAN.to_json()))
    last = weights_of(folder / "adapter/adapter.safetensors")
    (head,) = audit.head_digests(folder / "adapter" / HEAD_FILE, CLASSIFICATION)
    authorities = sorted({one.certificate_pem.decode() for one in (*signers, AUTHORITY)}) if is_signed else []
    lines: Lines = [{"line": "run", "run": "r", "authorities": authorities}]
    turns = list(turn_sequence(PLAN.course))
    states = [{block: (f"w{at} {block}", "r") for block in last} for at in range(len(turns))]
    states.append({block: (digest, "r") for block, digest in last.items()})
    for turn in turns:
        begin, end = states[turn.index : turn.index + 2]
        nodes: dict[str, dict[str, str]] = {}
        for node in PLAN.nodes:
            trail = trail_of(PLAN, turn, node, begin.__getitem__, end.__getitem__, head)
            says = statement("r", PLAN, turn, node, trail)
            nodes[node] = {"says": says}
            if is_signed:
                signature, certificate = sign(
                    says.encode(), credentials_of(node, authority=signers[turn.index]).identity
                )
                nodes[node] |= {"signature": signature.hex(), "certificate": certificate.decode()}
        lines.append({"line": "turn", "turn": turn.index, "drawn": [["b", turn.first_seq, 0, "a"]], "nodes": nodes})
    write(folder, lines)
    metrics = "".join(json.dumps({"kind": STEP_KIND, "step": step}) + "\n" for step in range(1, turns[-1].end_step + 1))
    (folder / "metrics.jsonl").write_text(metrics)


def write(folder: Path, lines: Lines) -> None:
    """Write the lines of a ledger."""
    (folder / LEDGER).write_text("".join(json.dumps(line) + "\n" for line in lines))


def asked(folder: Path, *, trust: Path | None = None) -> tuple[int, str]:
    """Exit code and output of the command, for a user with this identity."""
    result = CliRunner().invoke(cli.app, ["audit", str(folder)], env={VARIABLE: str(trust or "")})
    return result.exit_code, result.output


def changed(folder: Path, change: Callable[[Lines], object]) -> None:
    """Change the lines of a ledger."""
    lines = [json.loads(line) for line in (folder / LEDGER).read_text().splitlines()]
    change(lines)
    write(folder, lines)


def signed_by_another(lines: Lines) -> None:
    """A member without a part in the run puts a turn without states in the place of all."""
    table = {"run": "r", "node": "m", "turn": 0, "placement": 0, "steps": [0, 6], "peers": [], "begin": {}, "end": {}}
    signature, certificate = sign((says := json.dumps(table)).encode(), credentials_of("m").identity)
    entry = {"says": says, "signature": signature.hex(), "certificate": certificate.decode()}
    lines[1:] = [{"line": "turn", "turn": 0, "drawn": [], "nodes": {"m": entry}}]


@pytest.mark.parametrize("is_signed", [True, False])
def test_ledger_of_which_all_fits_together_is_fine(tmp_path: Path, is_signed: bool) -> None:
    """It says what was found, what was not, and whether anybody has signed it."""
    folder = tmp_path / "run"
    write_ledger(folder, is_signed=is_signed)
    keep(tmp_path / "trust", credentials_of("anna", "submitter"))
    code, output = asked(folder, trust=tmp_path / "trust")
    assert code == 0 and output.splitlines()[-1] == "fine", output
    assert f"3 turns of steps 0 to 6, 9 statements, {9 * is_signed} of them signed; 3 micro-batches" in output
    assert ("nothing is signed" in output) is not is_signed
    assert "the result has the weights of step 6, the last one" in output and "not shown" in output


@pytest.mark.parametrize("name", ["bert.encoder.layer.003.up", "bert.encoder.layer.\u0663.up", "bert.encoder.layer.3"])
def test_tensor_of_a_result_with_no_name_of_a_block_is_of_none(tmp_path: Path, name: str) -> None:
    """As whoever changes a result may write it; the block lacks a tensor then."""
    write_ledger(folder := tmp_path / "run")
    result = TensorFile(FilePieces(path := folder / "adapter/adapter.safetensors"), where="it")
    tensors = {name: result.tensor(name) for name in result.infos}
    last = next(other for other in tensors if block_of(other) == 3)
    path.write_bytes(bytes(write_tensors({name: tensors.pop(last), **tensors})))
    code, output = asked(folder)
    assert code == 7 and "the result has other weights than at step 6, of block 3" in output


def test_result_with_two_tensors_of_one_place_in_a_block_is_wrong(tmp_path: Path) -> None:
    """The one that was trained, under another prefix, would hide the one that is loaded."""
    write_ledger(folder := tmp_path / "run")
    result = TensorFile(FilePieces(path := folder / "adapter/adapter.safetensors"), where="it")
    tensors = {name: result.tensor(name) for name in result.infos}
    name = next(name for name in tensors if block_of(name) == 2)
    other = name.replace("bert.encoder.layer.", "transformer.h.")
    zeros = tensors[name]._replace(data=Pieces.of(bytes(tensors[name].data.size_bytes)))
    path.write_bytes(bytes(write_tensors(tensors | {name: zeros, other: tensors[name]})))
    code, output = asked(folder)
    assert code == 7 and f"twice, once as '{other}'" in output


@pytest.mark.parametrize("change", [lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"), Path.unlink])
def test_head_of_a_result_is_compared(tmp_path: Path, change: Callable[[Path], object]) -> None:
    """With what the owner of the last turn said of it; of a ledger that says nothing of heads that is told."""
    write_ledger(folder := tmp_path / "run", is_signed=False)
    change(folder / "adapter" / HEAD_FILE)
    code, output = asked(folder)
    assert code == 7 and "the result has other weights than at step 6, of block head" in output
    lines = [json.loads(line) for line in (folder / LEDGER).read_text().splitlines()]
    for entry in (line["nodes"]["o"] for line in lines[1:]):
        entry["says"] = json.dumps({**json.loads(entry["says"]), "begin": {}, "end": {}})
    write(folder, lines)
    code, output = asked(folder)
    assert code == 0 and "nobody says what the head was" in output


def test_run_that_ends_before_its_plan_is_told(tmp_path: Path) -> None:
    """An earlier result with a ledger and metrics without their end fits together, as does a run that stopped early."""
    write_ledger(folder := tmp_path / "run")
    assert "planned ones" not in asked(folder)[1]
    more = make_plan([("a", 0, 2), ("b", 2, 4)], ["o"], num_steps=8, microbatches=2, method="all", eval_rows=0)
    (folder / "plan.json").write_text(json.dumps(more.to_json()))
    code, output = asked(folder)
    assert code == 0 and "the ledger and the metrics end at step 6 of 8 planned ones: the run stopped early" in output


def other_state_of(at: int) -> Callable[[Lines], None]:
    """A says that it began a turn with another state."""

    def change(lines: Lines) -> None:
        entry = lines[at]["nodes"]["a"]
        entry["says"] = entry["says"].replace(json.loads(entry["says"])["begin"]["1"], "0" * 64)

    return change


def other_trail(lines: Lines) -> None:
    """A says that it did something else."""
    entry = lines[2]["nodes"]["a"]
    entry["says"] = entry["says"].replace(json.loads(entry["says"])["trail"], "0" * 64)


def other_ends(lines: Lines) -> None:
    """A and b say different things of their link, in a ledger in which both ends are told."""
    for node, peer in ("ab", "ba"):
        entry = lines[2]["nodes"][node]
        entry["says"] = json.dumps({**json.loads(entry["says"]), "links": {peer: node}})


def other_key(lines: Lines) -> None:
    """What b says is signed by a."""
    signature, certificate = sign(lines[2]["nodes"]["b"]["says"].encode(), credentials_of("a").identity)
    lines[2]["nodes"]["b"] |= {"signature": signature.hex(), "certificate": certificate.decode()}


def takes_a_block_of_b(lines: Lines) -> None:
    """A says that it hosts a block of b."""
    says = json.loads((entry := lines[2]["nodes"]["a"])["says"])
    says["begin"]["2"], says["end"]["2"] = "0" * 64, ["0", "0"]
    entry["says"] = json.dumps(says)


def in_another_placement(lines: Lines) -> None:
    """A speaks of a placement that the run does not have."""
    entry = lines[1]["nodes"]["a"]
    entry["says"] = entry["says"].replace('"placement":0', '"placement":7')


@cases(
    ["change", "words"],
    [
        (other_state_of(3), ("line 4", "node a has not signed")),
        (other_trail, ("line 3", "node a has not signed")),
        (other_ends, ("line 3: nodes a and b say different things of their link",)),
        (other_key, ("line 3", "node b has not signed", "not one of")),
        (lambda lines: lines.pop(2), ("line 3 begins at step 4", "ends at 2")),
        (lambda lines: lines.pop(), ("ends at step 4", "the run has 6 steps", "other weights")),
        (lambda lines: lines.insert(2, lines[1]), ("begins at step 0", "ends at 2")),
        (lambda lines: lines[2]["nodes"].pop("b"), ("node b, with which a exchanged", "what block 2 was")),
        (lambda lines: lines[2]["nodes"].update(b=lines[2]["nodes"]["a"]), ("node b has a statement of another",)),
        (lambda lines: lines.pop(0), ("line 1", "head of the ledger is missing")),
        (lambda lines: lines[1].update(nodes=[]), ("line 2 is not a line of a ledger",)),
        (lambda lines: lines.insert(1, {**lines[0], "authorities": []}), ("line 2 leaves an authority out",)),
        (lambda lines: lines.extend([{}] * 1001), ("is not a line", "ledger.jsonl is read no further")),
        (
            signed_by_another,
            (
                "the result has other weights than at step 6, of block 0, 1, 2, 3",
                "node m has no part in plan.json",
                "node a, which trains blocks in plan.json, says nothing",
            ),
        ),
        (takes_a_block_of_b, ("line 3: node a speaks of blocks [0, 1, 2], not of [0, 1]",)),
        (in_another_placement, ("line 2: the nodes speak of placements [0, 7], plan.json has [0]",)),
        (lambda lines: lines[1]["nodes"].update({"a\x1b[2J": lines[1]["nodes"]["a"]}), (r"node a\x1b[2J has",)),
    ],
)
def test_ledger_that_was_changed_is_told_by_line_and_node(
    tmp_path: Path, change: Callable[[Lines], object], words: tuple[str, ...]
) -> None:
    """With exit code 7."""
    folder = tmp_path / "run"
    write_ledger(folder)
    changed(folder, change)
    code, output = asked(folder)
    assert code == 7 and "wrong" in output.splitlines()[-1], output
    assert not [word for word in words if word not in output], output


def test_other_result_cut_file_and_foreign_authority_are_told(tmp_path: Path) -> None:
    """The block that differs; a file that was cut off; certificates of an authority that anybody can make and name."""
    folder = tmp_path / "run"
    write_ledger(folder)
    adapter = folder / "adapter/adapter.safetensors"
    content = adapter.read_bytes()
    adapter.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    code, output = asked(folder)
    assert code == 7 and "the result has other weights than at step 6, of block" in output
    adapter.write_bytes(content)
    (folder / LEDGER).write_bytes((folder / LEDGER).read_bytes()[:-10])
    code, output = asked(folder)
    assert code == 7 and "it is cut off" in output and "line 4" in output
    write_ledger(tmp_path / "other", signers=(other := Authority.make(time.time()),) * 3)
    keep(tmp_path / "trust", credentials_of("anna", "submitter"))
    code, output = asked(tmp_path / "other", trust=tmp_path / "trust")
    assert code == 7 and "another authority than yours" in output
    write_ledger(tmp_path / "rotated", signers=(other, other, AUTHORITY))  # as in a run in which it was rotated
    code, output = asked(tmp_path / "rotated", trust=tmp_path / "trust")
    assert code == 0 and f"6 of the signatures are of the authority {fingerprint(other.certificate_pem)}" in output


def test_resumed_run_is_checked_over_its_parts(tmp_path: Path) -> None:
    """The second part begins with the states of the checkpoint's step, after which the first one has a turn more."""
    folder = tmp_path / "run"
    write_ledger(folder)
    lines = [json.loads(line) for line in (folder / LEDGER).read_text().splitlines()]
    (folder / "parts/1").mkdir(parents=True)
    write(folder / "parts/1", lines[:3])
    write(folder, [lines[0], *lines[2:]])
    code, output = asked(folder)
    assert code == 0 and "4 turns of steps 0 to 6" in output and output.count("are not checked") == 1, output
    changed(folder, other_state_of(1))
    code, output = asked(folder)
    assert code == 7 and "ledger.jsonl, line 2: node a began with another state" in output
    for name in ("2", "03", "٤"):  # nobody's parts
        (folder / "parts" / name).mkdir()
    (folder / "parts/2" / LEDGER).mkdir()
    os.mkfifo(folder / "parts/03" / LEDGER)
    (folder / "parts/٤" / LEDGER).symlink_to("/dev/zero")
    assert asked(folder) == (code, output)
    for text in ("[", "[" * 100_000):
        (folder / "metrics.jsonl").write_text(text)
        code, _ = asked(folder)
        assert code == 7


def test_block_of_which_two_nodes_speak_is_told(tmp_path: Path) -> None:
    """A member could say that a part of which there is no plan ended with the state of a changed checkpoint."""
    folder = tmp_path / "run"
    write_ledger(folder)
    lines = [json.loads(line) for line in (folder / LEDGER).read_text().splitlines()]
    (folder / "parts/1").mkdir(parents=True)

    def say(line: int, node: str, /, **changes: Any) -> None:
        says = json.dumps({**json.loads(lines[line]["nodes"].get(node, lines[line]["nodes"]["a"])["says"]), **changes})
        signature, certificate = sign(says.encode(), credentials_of(node).identity)
        lines[line]["nodes"][node] = {"says": says, "signature": signature.hex(), "certificate": certificate.decode()}

    began = json.loads(lines[2]["nodes"]["a"]["says"])["begin"]
    say(2, "a", begin={**began, "1": state_digest("x", "x")})  # with what it was given
    for is_hidden in (False, True):
        if is_hidden:
            say(1, "m", node="m", peers=[], begin={}, end={"1": ["x", "x"]})
        write(folder / "parts/1", lines[:2])
        write(folder, [lines[0], *lines[2:]])
        code, output = asked(folder)
        assert code == 7 and ("node a began with another state of block 1" in output) is not is_hidden, output
        assert ("parts/1/ledger.jsonl, line 2: the nodes a, m all say what block 1 was" in output) is is_hidden


def test_killed_run_is_checked_as_far_as_its_ledger_goes_and_whole_once_it_is_resumed(tmp_path: Path) -> None:
    """The last line may be cut off; what is whole has to fit together; the former part keeps its file."""
    folder, whole = tmp_path / "run", tmp_path / "whole"
    write_ledger(folder)
    (folder / "adapter").rename(whole)
    (folder / "metrics.jsonl").unlink()
    lines = (folder / LEDGER).read_text().splitlines(keepends=True)
    (folder / LEDGER).unlink()
    part = folder / f"{LEDGER}.part"
    with RunFolder(folder, resume=True) as run:

        def emit(event: control_pb2.RunEvent) -> None:
            run.add_chunk(event.file)

        growing = GrowingFile(LEDGER, emit)
        for line in lines[:3]:
            growing.write(line.encode(), at_once=True)
        assert part.read_text() == "".join(lines[:3])  # of each closed turn, while the run goes on
    part.write_text("".join(lines[:3]) + lines[3][:-50])
    code, output = asked(folder)
    assert code == 0 and "2 turns of steps 0 to 4" in output and "checked up to step 4 only" in output, output
    part.write_text("".join(lines[:2]) + lines[2].replace('"turn": 1', '"turn": 2') + lines[3][:9])
    code, output = asked(folder)
    assert code == 7 and "ledger.jsonl.part, line 3: node a" in output
    part.write_text("".join(lines[:3]) + lines[3][:-50])
    RunParts(folder).begin(4)
    code, output = asked(folder)
    assert code == 0 and "2 turns of steps 0 to 4" in output and not part.exists()
    (folder / LEDGER).write_text(lines[0] + lines[3])
    whole.rename(folder / "adapter")
    (folder / "metrics.jsonl").write_text(json.dumps({"kind": STEP_KIND, "step": 6}) + "\n")
    code, output = asked(folder)
    assert code == 0 and "3 turns of steps 0 to 6" in output and "step 6, the last one" in output, output
    (folder / LEDGER).rename(part)  # a result is compared all the same
    code, output = asked(folder)
    assert code == 0 and "step 6, the last one" in output, output
    part.unlink()
    code, output = asked(folder)
    assert code == 7 and "the ledger ends at step 4, and the run has 6 steps" in output, output


def test_line_without_end_is_read_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of zeros takes no room on a disk, and would fill the memory."""
    write_ledger(tmp_path / "run")
    with (tmp_path / "run" / LEDGER).open("ab") as file:
        file.truncate(1 << 20)
    monkeypatch.setattr(audit, "_MAX_LINE", 1 << 16)
    code, output = asked(tmp_path / "run")
    assert code == 7 and "has 65,536 bytes or more" in output


def test_run_without_a_ledger_is_refused(tmp_path: Path) -> None:
    """With the key that makes one."""
    code, _ = asked(write_run(tmp_path / "run"))
    assert code == 2
