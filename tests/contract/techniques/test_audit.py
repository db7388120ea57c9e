"""Which work an audit draws, who repeats it, whom a comparison names, and how soon a wrong number is found."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from typing import Any, Final

import pytest

from ringtune.errors import IntegrityError, PlanError
from ringtune.job.job import Job, Model
from ringtune.schedule.actions import Payload, TensorKey, format_action
from ringtune.schedule.course import FrozenWeights, HelperSettings
from ringtune.schedule.placement import ActivationCacheSettings
from ringtune.schedule.plan import Plan
from ringtune.schedule.saved_activations import Velora
from ringtune.schedule.turns import Turn, turn_sequence
from ringtune.schedule.units import Range
from ringtune.techniques.audit import (
    EQUAL_BITS,
    MAX_TRAIL_BYTES,
    NOTHING,
    TAG_KEY,
    AuditSettings,
    Cell,
    Finding,
    RepeatResult,
    RepeatTask,
    Tolerance,
    Trail,
    cell_exchanges,
    cells,
    check_plan,
    checked_by,
    checkers_of,
    draw,
    ends_differ,
    fit_cells,
    fit_checkers_of,
    fits_checked_by,
    held_differ,
    judge,
    keys_to_keep,
    longest_trail_bytes,
    micro_order,
    own_tensors,
    question,
    read_results,
    read_trail,
    settle,
    state_name,
    statement,
    tag_name,
    tag_text,
    tensor_name,
    tolerance,
    trail_problem,
    vectors_around,
    work_of,
)
from ringtune.techniques.offload import helped
from ringtune.transport.endpoints import MAX_MESSAGE_BYTES
from tests.support import audit_trails
from tests.support.cases import cases
from tests.support.plans import changed, make_plan

PLAN: Final = make_plan(
    [("a", 0, 1), ("b", 1, 2), ("c", 2, 3), ("d", 3, 4)],
    ["a", "b", "c", "d"],
    num_steps=4000,
    local_iterations=10,
    microbatches=4,
    method="all",
    train_rows=400,
)
SMALL: Final = make_plan([("a", 0, 2), ("b", 2, 4)], ["o"], microbatches=2, method="all", eval_rows=0)


def first_turn(plan: Plan) -> Turn:
    """The first turn of a plan."""
    return next(turn_sequence(plan.course))


def test_next_two_hosts_in_the_ring_repeat_the_work_of_each_host() -> None:
    """Never the host itself; a host that is alone has none, and an owner without blocks neither has nor does any."""
    assert ["".join(checkers_of(PLAN.placement, node)) for node in "abcd"] == ["bc", "cd", "da", "ab"]
    assert ["".join(checked_by(PLAN.placement, node)) for node in "abcd"] == ["dc", "ad", "ba", "cb"]
    assert checkers_of(SMALL.placement, "a") == checked_by(SMALL.placement, "a") == ("b",)
    assert checkers_of(SMALL.placement, "o") == checked_by(SMALL.placement, "o") == ()
    alone = make_plan([("a", 0, 4)], ["o"])
    assert not checkers_of(alone.placement, "a") and not draw(alone, first_turn(alone), 1.0, random.Random(0))


def test_cells_of_a_turn_are_those_of_all_hosts() -> None:
    """Each micro-batch of each item, at each host; none at an owner without blocks, whose loss nobody can repeat."""
    turn = first_turn(SMALL)
    assert cells(SMALL, turn, "a") == (Cell("a", 0, 0), Cell("a", 0, 1), Cell("a", 1, 0), Cell("a", 1, 1))
    assert cells(SMALL, turn, "o") == () and len(cells(PLAN, first_turn(PLAN), "a")) == 40
    cell = Cell("b", 1, 0)
    found = [(one.key, one.peer, one.comes) for one in cell_exchanges(SMALL, turn, cell)]
    assert found == [
        (TensorKey(Payload.HIDDEN, 1, 0, 2), "a", True),
        (TensorKey(Payload.HIDDEN, 1, 0, 4), "o", False),
        (TensorKey(Payload.GRAD, 1, 0, 4), "o", True),
        (TensorKey(Payload.GRAD, 1, 0, 2), "a", False),
    ]
    kept = keys_to_keep(SMALL, turn, (cell,))
    assert {node: len(keys) for node, keys in kept.items()} == {"a": 2, "o": 2}  # b is not told what is drawn of it


def test_owner_hands_in_what_passes_no_link_in_its_own_turns() -> None:
    """Between its slice and embedding or head; it keeps all of them, as it must not know what is drawn of it."""
    for owner, names in (("a", ["h 0.0 0 E0.0"]), ("b", []), ("d", ["h 0.0 4 F0.0[3,4)", "g 0.0 4 H0.0"])):
        turn = next(turn for turn in turn_sequence(PLAN.course) if turn.owner == owner)
        own = own_tensors(PLAN, turn, owner)
        first = [one for one in own if (one.key.seq, one.key.micro) == (turn.first_seq, 0)]
        told = [f"{tensor_name(one.key)} {format_action(one.after, 4)}" for one in first]
        assert told == [name.replace("0.0", f"{turn.first_seq}.0") for name in names]
        assert len(own) == 40 * len(names) and not own_tensors(PLAN, turn, "c")
        drawn = cells(PLAN, turn, owner)[:1]
        assert len(keys_to_keep(PLAN, turn, drawn).get(owner, ())) == len(own)
        assert not keys_to_keep(PLAN, turn, cells(PLAN, turn, "c")[:1]).keys() - {"b", "d"}
        trail = audit_trails.trail_of(PLAN, turn, owner)
        trails = {node: audit_trails.trail_of(PLAN, turn, node) for node in PLAN.nodes}
        asked = question(PLAN, turn, drawn[0], work_of(PLAN, turn, owner), trails)
        assert [*asked.peers.values()].count(owner) == len(names)
        for one in own:
            less = {name: digest for name, digest in trail.items() if name != tensor_name(one.key)}
            assert "against the plan" in trail_problem(PLAN, work_of(PLAN, turn, owner), less, owner, adapters=["lora"])


def test_share_of_the_cells_is_drawn_in_the_mean_and_at_least_one() -> None:
    """3 % of 40 cells are 1.2: one or two; all with share 1; a host's draws say nothing of those of another one."""
    turns = [turn for _, turn in zip(range(400), turn_sequence(PLAN.course), strict=False)]
    source = random.Random(1)
    for share, sizes, mean in ((0.001, {1}, 1.0), (0.02, {1}, 1.0), (0.03, {1, 2}, 1.2)):
        counts = [[cell for cell in draw(PLAN, turn, share, source) if cell.node == "b"] for turn in turns]
        assert {len(found) for found in counts} == sizes
        assert sum(map(len, counts)) / len(counts) == pytest.approx(mean, abs=0.1)
        assert {cell.micro for found in counts for cell in found} == {0, 1, 2, 3}
        assert {cell.seq % 10 for found in counts for cell in found} == {*range(10)}
    assert len(draw(SMALL, first_turn(SMALL), 1.0, source)) == 8
    same = [len({cell[1:] for cell in draw(PLAN, turn, 0.02, source) if cell.node in "bc"}) == 1 for turn in turns]
    assert 0 < sum(same) < 0.1 * len(same)  # b and c at once: the same cell by chance, of one in 40


def test_host_that_is_wrong_in_a_twentieth_of_its_turns_is_found_within_100_turns() -> None:
    """In 99 % of 1,000 runs, by formula 99.4: each turn is wrong by lot, and then so are all its updates.

    A quarter of the turns are its own.
    """
    rng = random.Random(3)
    turns = [*itertools.islice(turn_sequence(PLAN.course), 100)]
    assert sum(turn.owner == "b" for turn in turns) == 25

    def is_found(turn: Turn) -> bool:
        return rng.random() < 0.05 and any(cell.node == "b" for cell in draw(PLAN, turn, 0.02, rng))

    assert sum(any(map(is_found, turns)) for _ in range(1000)) >= 990


TURN: Final = first_turn(SMALL)
CELL: Final = Cell("b", 1, 0)
WORKS: Final = {node: work_of(SMALL, TURN, node) for node in SMALL.nodes}


def trail_of(node: str) -> dict[str, str]:
    """A trail of the turn in which all is right."""
    return audit_trails.trail_of(SMALL, TURN, node)


def test_trail_has_to_have_what_the_plan_says() -> None:
    """Nothing less and nothing more; the end of a block is that after its last update; both ends of links are equal."""
    trails = {node: trail_of(node) for node in SMALL.nodes}

    def problem(trail: Trail, node: str = "b", adapter: str = "lora") -> str:
        return trail_problem(SMALL, WORKS[node], trail, node, adapters=[adapter])

    assert not any(problem(trail, node) for node, trail in trails.items())
    assert ends_differ(WORKS, trails) is None
    for name in trails["b"]:
        less = {key: value for key, value in trails["b"].items() if key != name}
        assert "node b" in problem(less), name
    assert "against the plan" in problem({**trails["b"], "sum 9.9": "s"})
    assert "two states of block 2" in problem({**trails["b"], state_name(1, 2): "x"})
    stateless = {key: value for key, value in trails["b"].items() if key[-2:] not in (" 2", " 3") or key[0] in "hg"}
    assert "no 'begin 2'" in problem(stateless)
    third = {key: value for key, value in trails["b"].items() if key[-2:] != " 3"}
    assert "no 'begin 3'" in problem(third) and not problem(third, adapter="lora[leave_out=[3]]")
    assert "reports 'begin 3'" in problem(trails["b"], adapter="lora[leave_out=[3]]")
    name, peer = next(iter(WORKS["b"].peers.items()))
    found = ends_differ(WORKS, {**trails, "b": {**trails["b"], name: "x"}})
    assert found is not None and {*found.nodes} == {"b", peer} and name in found.text
    tagged = {**trails["b"], name: "tag x"}
    assert not problem(tagged) and ends_differ(WORKS, {**trails, "b": tagged}) is None
    kept = trail_problem(SMALL, WORKS["b"], tagged, "b", adapters=["lora"], kept=(name,))
    assert f"no digest of {name!r}" in kept  # which it knows, as it keeps the tensor
    assert "no digest of 'sum 1.0'" in problem({**trails["b"], "sum 1.0": "tag x"})


def test_statement_names_peers_and_says_nothing_of_the_other_turns() -> None:
    """Its bytes are those of one run, turn and trail."""
    told = {node: json.loads(statement("r", SMALL, TURN, node, trail_of(node))) for node in SMALL.nodes}
    assert {node: "".join(one["peers"]) for node, one in told.items()} == {"a": "bo", "b": "ao", "o": "ab"}
    assert told["b"]["end"] == {"2": ["w", "r"], "3": ["w", "r"]} and told["b"]["steps"] == [0, 2]
    changed = {**trail_of("b"), next(iter(WORKS["b"].peers)): "x"}
    assert statement("r", SMALL, TURN, "b", changed) != statement("r", SMALL, TURN, "b", trail_of("b"))
    assert statement("s", SMALL, TURN, "b", trail_of("b")) != statement("r", SMALL, TURN, "b", trail_of("b"))


HELPED: Final = helped(SMALL, {"a": "z", "b": "z"})


@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        SMALL,
        changed(PLAN, invertible=True),
        changed(SMALL, velora=Velora(blocks=(Range(0, 4),), layers=("down",))),
        HELPED,
        helped(PLAN, {"a": "b", "b": "z", "c": "d"}, HelperSettings(pairs="velora")),
    ],
    ids=["owners-host", "owner-apart", "invertible", "velora", "helpers", "projected-pairs"],
)
def test_trail_of_no_node_is_longer_than_the_course_says(plan: Plan) -> None:
    """In the turns of each owner, with the longest names that there are; and it is not far from the longest one."""
    longest, has_helpers = 0, bool(plan.placement.helpers)
    for turn in itertools.islice(turn_sequence(plan.course), len(plan.course.owners)):
        late = dataclasses.replace(turn, first_seq=123_000_000)
        for node in plan.nodes:
            trail = dict.fromkeys(audit_trails.trail_of(plan, late, node), "ab" * 32)
            longest = max(longest, len(json.dumps(trail, separators=(",", ":"))))
    most = longest_trail_bytes(plan.course, turn.num_items, has_helpers=has_helpers)
    assert longest <= most <= 4 * longest


def test_turns_of_which_a_trail_is_longer_than_a_report_are_refused() -> None:
    """With the number of steps that fits; also where the planner chooses the micro-batches."""
    assert MAX_TRAIL_BYTES + (1 << 20) < MAX_MESSAGE_BYTES  # with signature, certificate, and short entries
    long = changed(PLAN, local_iterations=4000, num_steps=4000)
    with pytest.raises(PlanError, match=r"of 4,000 steps takes 15.\d MiB, one report .* 6.0 MiB; .* to 1,572 at most"):
        check_plan(job(), long, None)
    with pytest.raises(PlanError, match="to 1,572 at most"):
        check_plan(job(), changed(PLAN, local_iterations=1573), None)
    check_plan(job(), changed(PLAN, local_iterations=1572), None)
    with pytest.raises(PlanError, match=r"set train\.local_iterations to \d{3} "):
        check_plan(job(placement__microbatches="auto"), changed(PLAN, local_iterations=1572, batch_size=16), None)
    with pytest.raises(PlanError, match=r"of 1 steps .*; lower train\.microbatches, or leave \[audit\] out"):
        check_plan(job(), changed(PLAN, local_iterations=1, batch_size=8000, microbatches=8000), None)
    check_plan(Job(model=Model(path="m")), long, None)


def test_work_of_a_helper_is_drawn_by_micro_batch_and_repeated_by_other_hosts() -> None:
    """All blocks of a drawn micro-batch; by the hosts after that of the block, which is last; never by the helper."""
    assert [fit_checkers_of(HELPED.placement, block) for block in range(4)] == [("b", "a")] * 2 + [("a", "b")] * 2
    ring = helped(PLAN, {"a": "b", "b": "z"})
    assert [fit_checkers_of(ring.placement, block) for block in (0, 1)] == [("c", "d"), ("c", "d")]
    assert fits_checked_by(ring.placement, "c") == (0, 1) and not fits_checked_by(ring.placement, "b")
    turn = first_turn(HELPED)
    fits = fit_cells(HELPED, turn, "z")
    assert [(cell.seq, cell.micro, cell.block) for cell in fits[:5]] == [
        *((0, 0, block) for block in (3, 2, 1, 0)),
        (0, 1, 3),
    ]
    drawn = [cell for cell in draw(HELPED, turn, 0.01, random.Random(4)) if cell.is_fit]
    assert len({cell[1:3] for cell in drawn}) == 1 and [cell.block for cell in drawn] == [0, 1, 2, 3]
    kept = keys_to_keep(HELPED, turn, tuple(drawn))
    assert {node: {key.payload for key in keys} for node, keys in kept.items()} == {"a": {"c"}, "b": {"c"}}


def test_first_pairs_that_are_projected_are_drawn_until_a_closed_turn_has_their_vectors() -> None:
    """Their vectors come from them, and stay. A question has those before and after, and a trail at the beginning."""
    plan = helped(SMALL, {"b": "z"}, HelperSettings(pairs="velora"))
    turn = first_turn(plan)

    def drawn(shown: tuple[int, ...], seed: int) -> list[tuple[int, int]]:
        return [cell[1:3] for cell in draw(plan, turn, 0.01, random.Random(seed), shown=shown) if cell.node == "b"]

    assert all({(0, 0), (0, 1)} <= {*drawn(shown, seed)} for seed in range(8) for shown in ((), (2,)))
    assert not all((0, 0) in drawn((2, 3), seed) for seed in range(8))
    trails = {node: audit_trails.trail_of(plan, TURN, node) for node in plan.nodes}
    work = work_of(plan, TURN, "b")
    shown = {name for name in work.sums if name.startswith("shown ")}
    assert shown == {f"shown {at} {block}" for at in ("begin", "0.0", "0.1", "1.0", "1.1") for block in (2, 3)}
    assert trail_problem(plan, work, {**trails["b"], "shown 1.1 1": "s"}, "b", adapters=["lora"])
    for cell, before in ((CELL, "1.1"), (CELL._replace(micro=1), "begin"), (CELL._replace(seq=0, micro=1), "1.0")):
        asked = question(plan, TURN, cell, work, trails)
        here = {f"shown {cell.seq}.{cell.micro} {block}" for block in (2, 3)}
        assert {name for name in asked.told if name.startswith("shown")} == here
        given = {name for name in asked.given if name.startswith("shown")}
        assert given == here | {f"shown {before} {block}" for block in (2, 3)}


@pytest.mark.parametrize(
    ("shown", "is_good"),
    [
        ("begin=- 0.0=v 0.1=v 1.0=v 1.1=v", True),
        ("begin=- 0.1=v 0.0=v 1.0=v 1.1=v", True),  # any micro-batch of the first item is the first
        ("begin=v 1.1=v 1.0=v 0.0=v 0.1=v", True),
        ("begin=v 0.0=v 0.1=v 1.0=x 1.1=x", False),  # one micro-batch with other ones, and all that follow
        ("begin=v 0.0=x 0.1=x 1.0=x 1.1=x", False),
        ("begin=- 1.1=x 0.0=x 0.1=x 1.0=x", False),  # so none of the first item would have begun with none
        ("begin=- 0.0=v 0.1=x 1.0=x 1.1=x", False),
        ("begin=- 0.0=v 0.1=v 1.0=- 1.1=v", False),
    ],
)
def test_vectors_of_pairs_change_once_in_the_first_item(shown: str, is_good: bool) -> None:
    """A host tells in which order it shipped its pairs, and could tell one in which no drawn cell has the change."""
    plan = helped(SMALL, {"b": "z"}, HelperSettings(pairs="velora"))
    trail = {
        name: one for name, one in audit_trails.trail_of(plan, TURN, "b").items() if name[:5] + name[-1] != "shown3"
    }
    trail |= {
        f"shown {at} 3": NOTHING if one == "-" else one for at, one in (each.split("=") for each in shown.split())
    }
    problem = trail_problem(plan, work_of(plan, TURN, "b"), trail, "b", adapters=["lora"])
    assert (problem == "") is is_good and ("vectors of the pairs of block 3" in problem) is not is_good


def test_question_for_a_fit_has_the_state_before_and_what_the_host_holds() -> None:
    """And the host of the block is asked for its own work with what it holds since the item before."""
    works = {node: work_of(HELPED, TURN, node) for node in HELPED.nodes}
    trails = {node: audit_trails.trail_of(HELPED, TURN, node) for node in HELPED.nodes}
    assert not any(trail_problem(HELPED, works[node], trails[node], node, adapters=["lora"]) for node in works)
    for name in trails["z"]:
        less = {key: value for key, value in trails["z"].items() if key != name}
        assert trail_problem(HELPED, works["z"], less, "z", adapters=["lora"]), name
    asked = question(HELPED, TURN, Cell("z", 1, 0, True, 2), works["z"], trails)
    assert {*asked.told} == {"fit 1.0 2", "state 1 2", "held 0 2", "held 1 2"} and asked.peers == {"c 1.0 2": "b"}
    assert {*asked.given} == {*asked.told, "fit 1.1 2", "state 0 2", "c 1.0 2"}
    assert (asked.place.before, asked.place.last) == (1, 0)
    asked = question(HELPED, TURN, CELL, works["b"], trails)
    assert {*asked.told} == {"h 1.0 4", "g 1.0 2", "sum 1.0", "c 1.0 2", "c 1.0 3"}
    assert {*asked.given} - {*asked.told} == {"h 1.0 2", "g 1.0 4", "sum 1.1", "held 0 2", "held 0 3"}
    other = {**trails, "b": {**trails["b"], "held 1 3": "x"}}
    found = held_differ(HELPED.placement, works, other)
    assert found is not None and found.nodes == ("z", "b") and held_differ(HELPED.placement, works, trails) is None
    begun = {**trails, "b": {**trails["b"], "held begin 3": "x"}}
    assert held_differ(HELPED.placement, works, begun) and not held_differ(
        HELPED.placement, works, begun, but_begin={3}
    )


def asked_of(trail: Trail) -> RepeatTask:
    """The question for the cell of b."""
    return question(SMALL, TURN, CELL, WORKS["b"], {node: trail_of(node) for node in SMALL.nodes} | {"b": trail})


def test_question_names_all_that_goes_in_and_comes_out() -> None:
    """The sum before and the last one by the order in which the host added them up; micro-batch 1 is before 0."""
    asked = asked_of(trail_of("b"))
    assert (asked.place.before, asked.place.last) == (1, 0)
    assert {*asked.told} == {"h 1.0 4", "g 1.0 2", "sum 1.0", "state 1 2", "state 1 3"}
    assert {*asked.given} - {*asked.told} == {"h 1.0 2", "g 1.0 4", "sum 1.1", "state 0 2", "state 0 3"}
    assert asked.peers == {"h 1.0 2": "a", "h 1.0 4": "o", "g 1.0 4": "o", "g 1.0 2": "a"}


def test_cell_begins_with_the_vectors_before_it_and_its_update_has_the_last_ones() -> None:
    """Forwards are in ascending order, whatever that of the backwards; the first begins with those of the state."""
    projecting = dataclasses.replace(SMALL.course, velora=Velora(blocks=(Range(0, 4),), layers=("down",), parts=8))
    plan = Plan(projecting, SMALL.placements)
    work = work_of(plan, TURN, "b")
    trails = {node: audit_trails.trail_of(plan, TURN, node) for node in plan.nodes}
    assert not trail_problem(plan, work, trails["b"], "b", adapters=["lora"])
    assert trail_problem(SMALL, WORKS["b"], trails["b"], "b", adapters=["lora"])
    for micro, given in ((0, {"vectors 1.0", "vectors 1.1"}), (1, {"vectors 1.0", "vectors 1.1"})):
        asked = question(plan, TURN, Cell("b", 1, micro), work, trails)
        assert {name for name in asked.given if name.startswith("vectors ")} == given
        assert {name for name in asked.told if name.startswith("vectors ")} == {f"vectors 1.{micro}"}
    assert [vectors_around((0, 3, 2), micro) for micro in (0, 2, 3)] == [(-1, 3), (0, 3), (2, 3)]


def test_tag_that_does_not_fit_names_both_ends_of_the_link() -> None:
    """Received or sent: the digest is that of the neighbour; the checker gets the secret of the host, not the tag."""
    tag = tag_text(b"\7" * 16)
    asked = asked_of({**trail_of("b"), "h 1.0 2": tag, "g 1.0 2": tag})
    assert asked.given[TAG_KEY] == "b" and asked.given["h 1.0 2"] == asked.given["g 1.0 2"] == "t"
    assert TAG_KEY not in asked_of(trail_of("b")).given and tag not in asked.given.values()
    assert asked.told["g 1.0 2"] == "t" and asked.told[tag_name("h 1.0 2")] == asked.told[tag_name("g 1.0 2")] == tag
    results: dict[str, list[Any]] = {name: [digest, 0.0] for name, digest in asked.told.items()}
    answers = {"": None, "h 1.0 2": ("b", "a"), "g 1.0 2": ("b", "a"), "h 1.0 4": None}  # the last one has no tag
    for name, named in answers.items():
        other = {**results, "sum 1.0": ["u", 1.0]} if named else results
        told = json.dumps({**other, tag_name(name): [tag_text(b"\6" * 16), 0.0]})
        found = judge(asked, read_results(told, "c", asked), EQUAL_BITS)
        assert (found and (found.nodes, found.is_computed)) == (named and (named, False))
    with pytest.raises(IntegrityError, match="has not repeated tag"):
        read_results(json.dumps({name: value for name, value in results.items() if name[:3] != "tag"}), "c", asked)


@cases(
    ["changes", "permitted", "named"],
    [
        ({}, EQUAL_BITS, None),
        ({"sum 1.0": ["t", 1e-9]}, EQUAL_BITS, ("b",)),  # computed_otherwise
        ({"sum 1.0": ["t", 3e-5]}, Tolerance(0.0, 5e-5, 0.0), None),  # within_what_classes_differ
        ({"sum 1.0": ["t", 1e-3]}, Tolerance(1.0, 5e-5, 1.0), ("b",)),  # beyond_what_classes_differ
        ({"g 1.0 2": ["z", 1e-3]}, Tolerance(2e-5, 1.0, 1.0), ("b",)),  # sends_another_gradient
        ({"state 1 2": ["z", 1e-3]}, Tolerance(1.0, 1.0, 2e-4), ("b",)),  # updates_otherwise
        ({"state 1 2": ["z", 1e-4], "g 1.0 2": ["z", 1e-6]}, Tolerance(2e-5, 0.0, 2e-4), None),
        ({"state 1 4": ["z", 1.0]}, Tolerance(1.0, 1.0, 2e-5), ("b",)),  # a_block_that_it_did_not_tell
    ],
)
def test_comparison_names_the_host(changes: dict[str, list[Any]], permitted: Tolerance, named: Any) -> None:
    """What two classes of machines round apart names nobody."""
    asked = asked_of(trail_of("b"))
    results = {name: [digest, 0.0] for name, digest in asked.told.items()}
    found = judge(asked, read_results(json.dumps(results | changes), "a", asked), permitted)
    assert (found and found.nodes) == named


def test_answers_are_read_strictly() -> None:
    """All that was asked, each a digest and a finite distance from 0 to 1: all else speaks against who answers."""
    asked = asked_of(trail_of("b"))
    right: dict[str, Any] = {name: [digest, 0.0] for name, digest in asked.told.items()}
    assert read_results(json.dumps(right), "a", asked)["sum 1.0"] == RepeatResult("s")
    for name in right:
        with pytest.raises(IntegrityError, match="node a has not repeated"):
            read_results(json.dumps({key: value for key, value in right.items() if key != name}), "a", asked)
    nan = float("nan")
    for value in ("x", [], [1], ["x"], ["x", "y"], ["x", 1], ["x", 0.5, 1], None, ["x", nan], ["x", -1.0], ["x", 2.0]):
        with pytest.raises(IntegrityError, match="node a"):
            read_results(json.dumps({**right, "sum 1.0": value}), "a", asked)


SAYS: Final = Finding(("b",), "b is wrong", is_computed=True)
WITHHELD: Final = Finding(("b",), "b hands in nothing")


@cases(
    ["first", "second", "nodes"],
    [
        (SAYS, SAYS, ("b",)),  # two_against_the_host
        (SAYS, WITHHELD, ("b",)),  # that_hides
        (SAYS, None, ("c",)),  # checker_lies
        (SAYS, Finding(("c",), "c hands in nothing"), ("c",)),  # checker_hides_what_it_exchanged
        (SAYS, Finding(("d",), "d hands in nothing"), ("b", "c", "d")),  # two_lie
        (WITHHELD, None, ()),  # handed_in_to_one_and_not_to_the_other
        (WITHHELD, WITHHELD, ("b",)),
    ],
)
def test_third_decides(first: Finding, second: Finding | None, nodes: tuple[str, ...]) -> None:
    """Of b, its checker c and the third; what can't be decided names all that it may be."""
    assert settle(first, second, "c").nodes == nodes


def test_tolerance_is_zero_within_a_class() -> None:
    """Equal bits on nodes of one class with equally many threads."""
    course = make_plan([("a", 0, 4)], ["a"]).course
    on_wire = dataclasses.replace(course, wire_dtype="bfloat16")
    assert tolerance("float32", on_wire, ("cpu", 2), ("cpu", 2)) == EQUAL_BITS
    plain = tolerance("float32", course, ("cpu", 2), ("cpu", 1))
    assert min(plain) > 0 and max(plain) < 1e-3  # a scale of 1.001
    rounded = tolerance("float32", on_wire, ("cpu", 2), ("cpu", 1))
    assert plain.tensors < rounded.tensors < 1e-3 and rounded[1:] == plain[1:]
    assert max(tolerance("float64", course, ("cpu", 2), ("cuda", 2))) < 1e-9
    for rounding in ({"compute": "bfloat16"}, {"frozen": FrozenWeights(dtype="int8", native=True)}):
        products = dataclasses.replace(course, **rounding)
        assert tolerance("float32", products, ("cpu", 2), ("cpu", 2)) == EQUAL_BITS
        across = tolerance("float32", products, ("cpu", 2), ("cpu", 1))
        assert across.states == plain.states and 1e-2 < across.tensors < across.sums < 0.2  # 1.2 times as much


def test_trail_is_read_strictly() -> None:
    """Names to digests, in their order; anything else is refused."""
    assert micro_order(read_trail('{"sum 1.1": "a", "sum 1.0": "b", "sum 11.0": "c"}', "a"), 1) == (1, 0)
    for text in ("[", "[]", '{"a": 1}', '{"a": "' + "f" * 65 + '"}', "[" * 100_000):
        with pytest.raises(IntegrityError, match="node a"):
            read_trail(text, "a")


def job(**keys: object) -> Job:
    """A job with an audit."""
    names = {name.replace("__", "."): value for name, value in keys.items()}
    return Job(model=Model(path="m")).with_overrides({"audit.share": 0.1, **names})


def test_job_without_audit_has_no_section() -> None:
    """It is written as before; with one the share has a default."""
    assert "audit" not in Job(model=Model(path="m")).to_toml()
    assert AuditSettings().share == 0.02 and job().audit == AuditSettings(share=0.1)


def test_plan_with_what_an_audit_does_not_have_is_refused_and_none_is_made() -> None:
    """Sums of several hosts are no work of one; a cache is left out."""
    plan = make_plan([("a", 0, 2), ("b", 0, 2), ("c", 2, 4)], ["a"], method="all")
    with pytest.raises(PlanError, match="replicas"):
        check_plan(job(), plan, None)
    stale = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], method="pipeadapter")
    with pytest.raises(PlanError, match="depends on the ring"):
        check_plan(job(), stale, None)
    cached = dataclasses.replace(PLAN.placement, cache=ActivationCacheSettings())
    with pytest.raises(PlanError, match="has a cache"):
        check_plan(job(), Plan(PLAN.course, (cached,)), None)
    check_plan(job(), PLAN, None)
    assert not job().may_have_replicas and Job(model=Model(path="m")).may_have_replicas
