"""The check of a run from its ledger: ``ringtune audit``.

A ledger has a line for each closed turn, with what was drawn and a *statement* of each node: digests of its links, of
the states of its blocks at both ends of the turn, and of its trail (``ringtune.techniques.audit.statement``). With
certificates each statement is signed::

    {"line": "run", "run": "r2026...", "authorities": ["-----BEGIN CERTIFICATE..."]}
    {"line": "turn", "turn": 0, "drawn": [["b", 3, 1, "c"]], "nodes": {"b": {"says": "{...}", "signature": "3045...",
     "certificate": "-----BEGIN ..."}}}

What a run without the tensors can show: who said what, that all of it fits together, and that the result is what they
said last. That the numbers were computed rightly is known of the drawn cells, by the coordinator, during the run.

A run that was killed has ``ledger.jsonl.part``, which is checked as far as it goes; where it was resumed, that is in
``parts/1``. Who spoke of which blocks is compared with ``plan.json``, which is of the part that ended last.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from coordinator.client.run_files import FOLDER as PARTS
from coordinator.client.run_files import PART
from coordinator.client.run_folder import read_metrics
from coordinator.client.saved_run import read_run
from coordinator.run.run_text import is_step
from ringtune.errors import IntegrityError, RingTuneError, UsageError
from ringtune.job.job import kinds_of
from ringtune.models.architecture_heads import HEAD_PREFIX, architecture_head
from ringtune.models.families import FAMILIES
from ringtune.models.result_files import ADAPTER_FILE, BLOCKS_FILE, HEAD_FILE, block_of, has_trained_head
from ringtune.schedule.plan import Plan
from ringtune.storage.pieces import FilePieces
from ringtune.storage.strict import read_object
from ringtune.storage.tensor_files import TensorFile, TensorPieces, tensors_digest
from ringtune.techniques.audit import LEDGER, blocks_with_state, state_digest
from ringtune.texts import one_line, shown
from ringtune.transport.parties import find_user_trust, node_party

_MAX_PROBLEMS: Final = 1000
"""Of a file, which is read no further then."""
_MAX_LINE: Final = 1 << 28
"""Bytes of a line: a node takes some 200 for each block."""


class Statement(NamedTuple):
    """What a node says of a turn.

    Attributes:
        placement: number of the placement.
        steps: at both ends of the turn.
        peers: nodes with which it exchanged tensors.
        links: digest by the other node, equal at both ends; of a ledger before tags.
        begin: digest of the state by block.
        end: digests of weights and optimizer state by block.
    """

    run: str
    node: str
    turn: int
    placement: int
    steps: tuple[int, int]
    peers: tuple[str, ...]
    links: Mapping[str, str]
    begin: Mapping[int, str]
    end: Mapping[int, tuple[str, str]]

    @classmethod
    def read(cls, text: str) -> Statement:
        """Parse a statement; raises ``IntegrityError``."""
        table = read_object(text, "a statement")
        try:
            first, stop = table["steps"]
            return cls(
                str(table["run"]),
                str(table["node"]),
                int(table["turn"]),
                int(table["placement"]),
                (int(first), int(stop)),
                tuple(map(str, table.get("peers", table.get("links", ())))),
                {str(peer): str(digest) for peer, digest in table.get("links", {}).items()},
                {int(block): str(digest) for block, digest in table["begin"].items()},
                {int(block): (str(weights), str(rest)) for block, (weights, rest) in table["end"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise IntegrityError("a statement is not one of a turn") from error


class CheckedLedger(NamedTuple):
    """What a ledger shows.

    Attributes:
        problems: each with its line; none = all fits together.
        facts: sentences about what was found.
        figures: turns, statements, signatures, drawn cells, first and last step.
        is_done: whether the run has ended, with a result that was compared.
    """

    problems: tuple[str, ...]
    facts: tuple[str, ...]
    figures: Mapping[str, int]
    is_done: bool


def audit_run(folder: Path) -> CheckedLedger:
    """Check the ledger of a run, and of its earlier parts, against itself and the run's result.

    A ledger without a result is checked as far as it goes.

    Raises:
        UsageError: the run has no ledger.
        RingTuneError: the folder is not one of a run; see ``read_run``.
    """
    run = read_run(folder, needs_result=False)
    parts = (path for path in (folder / PARTS).glob("*") if path.name.isdecimal())
    ledgers = [*map(_ledger_in, sorted(parts, key=lambda path: int(path.name))), _ledger_in(folder)]
    if not any(ledgers):
        raise UsageError(f"{folder} has no {LEDGER}; a run with [audit] in its job writes one")
    check = LedgerCheck()
    for path in filter(None, ledgers):
        plan = run.plan if path.parent == folder else None
        adapters = [kind.config for kind in kinds_of(run.job, run.plan.course.user_sets)]
        check.read(path, str(path.relative_to(folder)), plan=plan, adapters=adapters)
    weights = {
        f"{user}/" if user else "": path
        for user in run.plan.course.user_sets or ("",)
        for name in (ADAPTER_FILE, BLOCKS_FILE)
        if (path := run.saved / user / name).is_file()
    }
    is_trained = has_trained_head(run.job.model.task)
    paths = [run.saved / user / HEAD_FILE for user in run.plan.course.user_sets or ("",)] if is_trained else []
    if weights:  # whatever the ledger is called, which who changes a result may rename or leave out
        private = run.plan.placements[-1].private_blocks
        steps = max((int(line["step"]) for line in read_metrics(folder) if is_step(line)), default=0)
        keeps_best = bool(run.job.train.keep_best)
        check.compare(
            weights,
            steps=steps,
            keeps_best=keeps_best,
            head=run.plan.course.head,
            private_blocks=private,
            heads=[head_digests(path, run.job.model.task) for path in paths],
        )
        check.compare_length(run.plan.course.num_steps)
    return check.checked()


def _ledger_in(folder: Path) -> Path | None:
    return next((path for name in (LEDGER, LEDGER + PART) if (path := folder / name).is_file()), None)


class LedgerCheck:
    """The check of the ledgers of a run's parts, in their order."""

    def __init__(self) -> None:
        self._problems: list[str] = []
        self._facts: list[str] = []
        self._figures = dict.fromkeys(("turns", "statements", "signatures", "drawn"), 0)
        self._ends: dict[int, dict[int, tuple[str, str]]] = {}  # by step, by block
        self._first = self._last = 0
        self._authorities: tuple[bytes, ...] = ()
        self._own: set[str] | None = None  # digests of the user's authorities
        self._foreign: Counter[str] = Counter()  # signatures by digest of another authority
        self._certificates: dict[str, bytes] = {}
        self._run_id, self._is_first, self._is_done = "", True, False
        self._plan: Plan | None = None
        self._adapters: Collection[str] = ()

    def read(self, path: Path, name: str, *, plan: Plan | None = None, adapters: Collection[str] = ()) -> None:
        """Check one file.

        Args:
            path: of the file, which may be cut off if its name ends with ``.part``.
            name: for messages.
            plan: of the run that wrote it; None = not known.
            adapters: configurations of the adapters, which say what blocks have a state.
        """
        self._plan, self._adapters = plan, adapters
        self._certificates, self._is_first, self._authorities = {}, True, ()
        most, line = len(self._problems) + _MAX_PROBLEMS, b""
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE), b""), start=1):
                if len(line) == _MAX_LINE:
                    return self._problems.append(
                        f"{name}, line {number} has {_MAX_LINE:,} bytes or more; copy it again"
                    )
                if line != b"\n" and (line.endswith(b"\n") or path.suffix != PART):
                    self._line(line, f"{name}, line {number}", is_first=number == 1)
                if len(self._problems) > most:
                    return self._problems.append(f"{name} is read no further")
        if not line.endswith(b"\n") and path.suffix != PART:
            self._problems.append(f"{name} ends in the middle of a line; it is cut off")
        return None

    def _line(self, line: bytes, where: str, *, is_first: bool) -> None:
        try:
            table = read_object(line, where)
            if is_first or table["line"] == "run":
                self._head(table, where)
            else:
                self._turn(table, where)
        except RingTuneError as error:
            self._problems.append(f"{where}: {error}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self._problems.append(f"{where} is not a line of a ledger: {type(error).__name__} {error}")

    def _head(self, table: Mapping[str, Any], where: str) -> None:
        if table["line"] != "run":
            raise IntegrityError("the head of the ledger is missing")
        self._run_id = str(table["run"])
        before, self._authorities = self._authorities, tuple(text.encode() for text in table["authorities"])
        if not {*before} <= {*self._authorities}:
            self._problems.append(f"{where} leaves an authority out, which only another run can")
        if not self._authorities:
            self._facts.append(
                "nothing is signed, as the run was in plain text: who has the file may have written it all"
            )
            return
        from ringtune.transport.identity import fingerprint, read_identity

        shown, trust = {fingerprint(authority) for authority in self._authorities}, find_user_trust()
        if trust is None:
            self._facts.append(
                f"the certificates are of the authority {', '.join(sorted(shown))}; compare it with your coordinator's"
            )
        else:
            self._own = set(map(fingerprint, read_identity(trust, time.time()).authorities))

    def _turn(self, table: Mapping[str, Any], where: str) -> None:
        """Check signatures, links, and that the turn begins with the states with which the one before ended."""
        if table["line"] != "turn":
            raise IntegrityError("a line of another kind")
        statements: dict[str, Statement] = {}
        for node, entry in table["nodes"].items():
            statements[node] = said = Statement.read(entry["says"])
            if (said.run, said.node, said.turn) != (self._run_id, node, table["turn"]):
                self._problems.append(f"{where}: node {node} has a statement of another run, node or turn")
            self._signature(node, entry, where)
        self._figures["turns"] += 1
        self._figures["statements"] += len(statements)
        self._figures["drawn"] += len(table["drawn"])
        steps = {said.steps for said in statements.values()}
        if len(steps) != 1:
            raise IntegrityError(f"the nodes {', '.join(statements)} speak of different steps")
        first, stop = steps.pop()
        self._members(statements, where)
        self._links(statements, where)
        self._chain(statements, first, stop, where)

    def _signature(self, node: str, entry: Mapping[str, str], where: str) -> None:
        if not self._authorities:
            return
        from ringtune.transport.identity import fingerprint, is_issued_by, signature_problem

        if "certificate" in entry:
            self._certificates[node] = entry["certificate"].encode()
        signature, certificate = bytes.fromhex(entry["signature"]), self._certificates.get(node, b"")
        says, who = entry["says"].encode(), node_party(node)
        if why := signature_problem(says, signature, certificate, self._authorities, who):
            self._problems.append(f"{where}: node {node} has not signed what it says: {why}")
            return
        self._figures["signatures"] += 1
        issuers = [fingerprint(authority) for authority in self._authorities if is_issued_by(certificate, authority)]
        if self._own is not None and self._own.isdisjoint(issuers):
            self._foreign.update(issuers[:1])

    def _members(self, statements: Mapping[str, Statement], where: str) -> None:
        """Compare the nodes and their blocks with the plan."""
        plan, numbers = self._plan, {said.placement for said in statements.values()}
        if plan is None:
            return
        known = {placement.placement_number: placement for placement in plan.placements}
        if len(numbers) != 1 or not numbers <= known.keys():
            self._problems.append(f"{where}: the nodes speak of placements {sorted(numbers)}, plan.json has {[*known]}")
            return
        placement = known[numbers.pop()]
        members = {*placement.members}
        owners = {owner.node for owner in (*plan.course.owners, *(left.owner for left in plan.course.left_out))}
        for node in statements.keys() - members - owners:
            self._problems.append(f"{where}: node {node} has no part in plan.json")
        for node, said in statements.items():
            expected = blocks_with_state(placement, node, self._adapters)
            ends = {plan.course.head} if node in owners else set()
            if node in members | owners and sorted({*said.begin} - ends) != expected:
                self._problems.append(f"{where}: node {node} speaks of blocks {sorted(said.begin)}, not of {expected}")
        for node in members - statements.keys():
            self._problems.append(f"{where}: node {node}, which trains blocks in plan.json, says nothing")

    def _links(self, statements: Mapping[str, Statement], where: str) -> None:
        for node, said in statements.items():
            for peer in said.peers:
                if peer not in statements:
                    self._problems.append(f"{where}: node {peer}, with which {node} exchanged tensors, says nothing")
                elif statements[peer].links.get(node) != said.links.get(peer) and node < peer:
                    self._problems.append(f"{where}: nodes {node} and {peer} say different things of their link")

    def _chain(self, statements: Mapping[str, Statement], first: int, stop: int, where: str) -> None:
        for block in sorted({block for said in statements.values() for block in (*said.begin, *said.end)}):
            named = [node for node, said in statements.items() if block in said.begin or block in said.end]
            if len(named) > 1:
                self._problems.append(f"{where}: the nodes {', '.join(named)} all say what block {block} was")
        begin = {block: (node, digest) for node, said in statements.items() for block, digest in said.begin.items()}
        end = {block: both for said in statements.values() for block, both in said.end.items()}
        before = self._ends.get(first)
        if before is None and self._ends and not self._is_first:
            self._problems.append(f"{where} begins at step {first}, and the turn before it ends at {self._last}")
        elif before is None:
            self._facts.append(f"the states at step {first}, with which the ledger begins, are not checked")
            self._first = first
        elif not self._is_first and first != self._last:
            self._problems.append(f"{where} begins at step {first}, and the turn before it ends at {self._last}")
        for block, both in (before or {}).items():
            node, digest = begin.get(block, ("", ""))
            if not node:
                self._problems.append(f"{where}: nobody says what block {block} was")
            elif digest != state_digest(*both):
                self._problems.append(f"{where}: node {node} began with another state of block {block}")
        self._ends = {step: ends for step, ends in self._ends.items() if step <= first} | {stop: end}
        self._last, self._is_first = stop, False

    def compare(
        self,
        weights: Mapping[str, Path],
        *,
        steps: int,
        keeps_best: bool,
        head: int,
        private_blocks: int = 0,
        heads: Collection[Collection[str]] = (),
    ) -> None:
        """Compare the weights of the run's result with the states at the end of a turn, which has to have all of them.

        Args:
            weights: files of the result with the tensors of the blocks, as for ``weights_of``.
            steps: of the run by its metrics.
            keeps_best: whether the result may be of an earlier step, of the best evaluation.
            head: number of the head's unit, above those of the blocks.
            private_blocks: number of first blocks that never train, and of which nobody says anything.
            heads: of each saved head its digests under the names of each family (``head_digests``).
        """
        self._is_done = True
        if steps != self._last:
            self._problems.append(f"the ledger ends at step {self._last}, and the run has {steps} steps")
        saved = weights_of({user: TensorFile(FilePieces(path), where=str(path)) for user, path in weights.items()})
        digests = {block: digest for block, digest in saved.items() if block >= private_blocks}
        wrong: dict[int, list[int]] = {}
        for step, ends in self._ends.items():
            said = {block: weights for block, (weights, _) in ends.items() if block < head}
            wrong[step] = sorted(block for block in {*digests, *said} if digests.get(block) != said.get(block))
            digest = ends.get(head, ("", ""))[0]
            if digest and any(digest not in known for known in heads):
                wrong[step].append(head)
        fitting = [step for step, differ in wrong.items() if not differ]
        if heads and not any(head in ends for ends in self._ends.values()):
            self._facts.append("nobody says what the head was, so that of the result is not compared")
        if self._last in fitting:
            self._facts.append(f"the result has the weights of step {self._last}, the last one")
        elif fitting and keeps_best:
            self._facts.append(f"the result has the weights of step {max(fitting)}, the best one")
        else:
            named = ", ".join("head" if block == head else str(block) for block in wrong.get(self._last, []))
            self._problems.append(f"the result has other weights than at step {self._last}, of block {named}")

    def compare_length(self, planned_steps: int) -> None:
        """Tell where a ledger with a result ends before the planned steps: who changes both may leave out the end."""
        if self._last < planned_steps:
            self._facts.append(
                f"the ledger and the metrics end at step {self._last:,} of {planned_steps:,} planned ones: the run "
                "stopped early, or what came after it was left out"
            )

    def checked(self) -> CheckedLedger:
        """Return what was found.

        Who changes a ledger can name an authority of his own in its head, so what another one than the user's has
        signed is told: some of it is in a run during which the authority was rotated.
        """
        if self._foreign:
            named, count = ", ".join(sorted(self._foreign)), self._foreign.total()
            if count == self._figures["signatures"]:
                self._problems.append(f"the certificates are of another authority than yours, {named}")
            else:
                self._facts.append(
                    f"{count:,} of the signatures are of the authority {named}, which you do not trust; compare it "
                    "with that of your coordinator before it was rotated"
                )
        figures = {**self._figures, "first": self._first, "last": self._last}
        return CheckedLedger(tuple(self._problems), tuple(dict.fromkeys(self._facts)), figures, self._is_done)


def weights_of(files: Mapping[str, TensorFile]) -> dict[int, str]:
    """Return by block the digest of its tensors in a result, which is that of its weights in the state of a node.

    ``files`` are by ``NAME/`` of users with adapters of their own; else there is one, named ``""``. Raises
    ``IntegrityError``: two tensors have one name but for what is before the block, and either may be loaded.
    """
    blocks: dict[int, dict[str, TensorPieces]] = {}
    for user, name in ((user, name) for user, file in files.items() for name in file.infos):
        if (block := block_of(name)) is not None:
            part = f"{user}{name[name.index(f'.{block}.') + 1 :]}"
            tensors = blocks.setdefault(block, {})
            if part in tensors:
                raise IntegrityError(f"the result has {shown(part)} twice, once as {shown(name)}; train it anew")
            tensors[part] = files[user].tensor(name)
    return {block: tensors_digest(_without_twins(tensors)) for block, tensors in blocks.items()}


def head_digests(path: Path, task: str) -> set[str]:
    """Return the digests that an owner of any family may tell of a head with the tensors of a file; none without it.

    An owner names them as AdapterHub does, a file of some families as their architecture.
    """
    if not path.is_file():
        return set()
    digests, file = set[str](), TensorFile(FilePieces(path), where=str(path))
    forms = (None, *(architecture_head(name, task) for name in FAMILIES))
    for form in {str(form and form.layers): form for form in forms}.values():
        names = {(form.library_name(name) if form else name).removeprefix(HEAD_PREFIX): name for name in file.infos}
        digest = hashlib.sha256()
        for own, name in sorted(names.items()):
            digest.update(own.encode())
            for piece in file.tensor(name).data:
                digest.update(piece)
        is_read = len(names) == len(file.infos) and {info.dtype for info in file.infos.values()} <= {"F32", "F64"}
        digests |= {digest.hexdigest()} if is_read else set()  # which has no types: whole numbers have their bytes too
    return digests


def _without_twins(tensors: Mapping[str, TensorPieces]) -> dict[str, TensorPieces]:
    """Leave out the second name of a norm before a bottleneck (``ln_before``), which the library saves twice."""

    def is_twin(name: str) -> bool:
        other = tensors.get(name.replace(".adapter_down.0.", ".adapter_norm_before."))
        return ".adapter_down.0." in name and other is not None and bytes(other.data) == bytes(tensors[name].data)

    return {name: tensor for name, tensor in tensors.items() if not is_twin(name)}


def sentences(ledger: CheckedLedger) -> Iterator[str]:
    """Yield the lines for a user."""
    turns, says, signed, drawn = (ledger.figures[name] for name in ("turns", "statements", "signatures", "drawn"))
    yield (
        f"{turns:,} turns of steps {ledger.figures['first']:,} to {ledger.figures['last']:,}, {says:,} statements, "
        f"{signed:,} of them signed; {drawn:,} micro-batches were drawn and repeated by other hosts"
    )
    yield from map(one_line, (*ledger.facts, *ledger.problems))
    yield (
        "not shown: that what was not drawn was computed rightly; what an owner says of its rows, embedding and loss; "
        "what the result has beside the hosts' blocks and the head (invertible adapter, private blocks)"
    )
    if not ledger.is_done:
        yield f"the run has no result yet, so its ledger is checked up to step {ledger.figures['last']:,} only"
    yield "fine" if not ledger.problems else f"wrong: {len(ledger.problems)} of the lines above"
