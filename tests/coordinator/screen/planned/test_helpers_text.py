"""Who helps whom is said before a run begins, with what it does to the result."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest

from coordinator.records.offload_facts import offload_facts
from coordinator.screen.planned.helpers_text import helper_lines
from coordinator.screen.planned.plan_text import plan_text
from coordinator.screen.progress import PlainProgress
from ringtune.costs.kind_facts import KindFacts
from ringtune.schedule.extent import Owner, UserRows
from ringtune.schedule.helped import helped
from ringtune.schedule.helping.offload import Manner
from tests.support.plans import changed, make_plan
from tests.support.profiles import node

PLAN = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_blocks=4, method="all")


def test_helpers_in_step_leave_the_result_as_it_is() -> None:
    """The placement alone knows them."""
    lines = helper_lines(helped(PLAN, {"a": "z"}))
    assert lines[0] == "z fits the adapters of a's blocks [0, 2)"
    assert lines[1].endswith("the result is that of a run without helpers")
    assert helper_lines(PLAN) == []


@pytest.mark.parametrize(
    ("manner", "words"),
    [
        ({"interval": 3}, "add up 3 steps for one update"),
        ({"pairs": "bfloat16"}, "rounded to 16 bits"),
        ({"merged": True}, "inside matrices"),
        ({"overlap": True}, "one step behind within a turn"),
    ],
)
def test_helpers_in_another_manner_say_what_they_change(manner: dict[str, Any], words: str) -> None:
    """Each word of the job has a sentence, and the report its fact."""
    plan = helped(PLAN, {"a": "z"}, Manner(**manner))
    assert words in helper_lines(plan)[-1]
    assert helper_lines(plan)[-1].endswith("the result is not that of a run without helpers")
    facts = offload_facts(plan)["offload"]
    assert {name: facts[name] for name in manner} == manner
    assert (facts["staleness"] == "none") is not ("overlap" in manner)


@pytest.mark.parametrize(
    ("manner", "words"),
    [
        (Manner(users="alone"), "2 users train adapters of their own, which only their rows go through: the result"),
        (
            Manner(users="collaboration", merged=True),
            "2 users train adapters of their own, and every row goes through the sum of all; hosts hold",
        ),
    ],
)
def test_users_with_adapters_of_their_own_are_counted_and_say_what_a_row_goes_through(
    manner: Manner, words: str
) -> None:
    """Before the run begins; a user is an owner where nothing else is said."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], num_blocks=4, method="all")
    found = helped(plan, {"a": "z", "b": "z"}, manner)
    assert helper_lines(found)[-1].startswith(words)
    rows = {owner.node: {"train": owner.train_rows, "eval": owner.eval_rows} for owner in plan.course.owners}
    assert offload_facts(found)["offload"]["rows_by_user"] == rows
    assert "rows_by_user" not in offload_facts(helped(plan, {"a": "z"}))["offload"]


def test_users_are_named_with_their_rows_and_many_are_cut_short() -> None:
    """Rows of a user at two owners are told together."""
    mixed = (UserRows(name="anna", train_rows=3, eval_rows=1), UserRows(name="ben", train_rows=5))
    plan = make_plan([("a", 0, 4)], ["a", "b"], num_blocks=4, method="all")
    first = Owner(node="a", train_rows=8, eval_rows=1, users=mixed)
    second = Owner(node="b", train_rows=4, users=(UserRows(name="ben", train_rows=4),))
    several = changed(plan, owners=(first, second))
    lines = helper_lines(helped(several, {"a": "z"}, Manner(users="alone")))
    assert "users, with training and evaluation rows: anna (3 and 1), ben (9 and 0)" in lines
    crowd = tuple(UserRows(name=f"u{at}", train_rows=1) for at in range(10))
    many = changed(plan, owners=(Owner(node="a", train_rows=10, users=crowd),))
    assert helper_lines(helped(many, {"a": "z"}, Manner(users="alone")))[1].endswith("u7 (1 and 0), and 2 more")


def test_helpers_are_shown_when_a_run_begins() -> None:
    """As hosts and owners are."""
    shown = io.StringIO()
    PlainProgress(shown).plan(helped(PLAN, {"a": "b"}), {"a": 1, "b": 1})
    assert "b fits the adapters of a's blocks [0, 2)" in shown.getvalue()


@pytest.mark.parametrize("private", [0, 1])
def test_plan_says_what_helpers_see(private: int) -> None:
    """They count among those that see hidden states, but never those of private blocks; of block 0 tokens are told."""
    plan = make_plan([("a", private, 2), ("b", 2, 4)], ["a"], method="all", private_blocks=private)
    words = "; helpers see the hidden states inside the blocks that they help with: z of "
    tells = "" if private else "; z can tell the tokens from those of block 0"
    found = [line for line in plan_text(helped(plan, {"a": "z"}), {}, measured=True, num_steps=0) if words in line]
    assert len(found) == 1 and found[0].endswith(f"{words}[{private}, 2){tells}")
    assert not any(words in line for line in plan_text(plan, {}, measured=True, num_steps=0))


def test_users_who_chose_another_adapter_are_named_with_it() -> None:
    """Where the sizes of nodes are known; who chose and is none of the run is not told."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], num_blocks=4, method="all")
    found = helped(plan, {"a": "z", "b": "z"}, Manner(users="alone"))
    kind = KindFacts(
        config="linear",
        users=("b", "zoe"),
        adapter_block_bytes=1,
        adapter_block_factor_bytes=1,
        pair_token_bytes=1,
        pair_rounded_token_bytes=1,
        pair_projected_token_bytes=1,
        more_activation_token_bytes=0.0,
    )
    facts = node(plan, "a")
    facts = dataclasses.replace(facts, model=dataclasses.replace(facts.model, kinds=(kind,)))
    assert "adapters in place of the job's: linear: b" in helper_lines(found, facts)
