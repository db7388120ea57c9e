"""Texts at evaluations: their turns, the order of tokens, a host that is lost, and jobs that can't have them."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from ringtune.costs.profile import Work
from ringtune.engine import events as ev
from ringtune.errors import PeerLostError
from ringtune.job.job import parse_job
from ringtune.run_control import events as rd
from ringtune.schedule.actions import Op
from ringtune.schedule.course import Generation
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StepKind, evaluation_turns, items, turn_sequence
from ringtune.techniques.generation import courses, generation_figures, generation_of
from sim.prediction import predict
from sim.ring import VirtualNode
from tests.suites.test_recovery_on_virtual_clock import placing, recoveries, ring_of, story
from tests.support.plans import changed, make_plan
from tests.support.profiles import TIMES, profile_of
from tests.support.recovering_ring import RecoveringRing

FIVE = Generation(rows=5, max_new_tokens=3, at_once=2)


def plan_of(generation: Generation, **values: Any) -> Plan:
    """Owners a and c of five evaluation rows; hosts x and y."""
    plan = make_plan([("x", 0, 2), ("y", 2, 4)], ["a", "c"], eval_rows=5, num_steps=4, eval_every=2, **values)
    return changed(plan, generation=generation)


def test_each_owner_evaluates_and_then_writes_its_texts() -> None:
    """Five sequences, two at once, three tokens each; without the loss the texts alone."""
    course = plan_of(FIVE).course
    turns = [turn for turn in turn_sequence(course) if turn.kind.evaluates and turn.first_step == 2]
    kinds = [StepKind.EVALUATE, *[StepKind.GENERATE] * 3]
    assert [(turn.owner, turn.kind) for turn in turns] == [(owner, kind) for owner in "ac" for kind in kinds]
    written = [items(course, turn) for turn in turns if turn.kind is StepKind.GENERATE][:3]
    assert [[(item.batch, item.rows) for item in each] for each in written] == [
        [(0, 2), (1, 2), (2, 2)],
        [(3, 2), (4, 2), (5, 2)],
        [(6, 1), (7, 1), (8, 1)],
    ]
    alone = changed(plan_of(FIVE), generation=Generation(rows=9, max_new_tokens=3, at_once=9, alone=True)).course
    assert evaluation_turns(course) == 8 and evaluation_turns(alone) == 2
    assert {turn.kind for turn in turn_sequence(alone) if turn.kind.evaluates} == {StepKind.GENERATE}


def test_a_run_that_only_writes_takes_the_longest_prompt_whole_if_it_fits() -> None:
    """A course for that, then the usual one, which needs less memory; the usual one alone where no prompt is longer."""
    plan = plan_of(FIVE)
    text = '[model]\npath = "m"\ntask = "causal-lm"\n[train]\nmax_length = 16\n[generation]\nloss = false\n'
    job, facts = parse_job(text, source="test"), profile_of(plan).by_name
    told = {"x": 99, "a": 40, "c": 17}  # x owns no rows
    nodes = [dataclasses.replace(facts[name], prompt_tokens=tokens) for name, tokens in told.items()]
    ways = courses(job, plan.course, nodes)
    assert [way.max_length for way in ways] == [40, 16]
    assert courses(job, ways[0], nodes) == ways
    assert [way.max_length for way in courses(job, plan.course, nodes[:1])] == [plan.course.max_length]
    trains = job.with_overrides({"generation.loss": True})
    assert [way.max_length for way in courses(trains, plan.course, nodes)] == [plan.course.max_length]


def test_a_token_is_embedded_after_the_head_has_chosen_it() -> None:
    """Also where other sequences and items are under way."""
    plan = plan_of(FIVE)
    result = ring_of(plan, random.Random(1)).run()
    assert result.finish == rd.Finish("", "")
    ends = {
        (span.action.op, span.action.seq, span.action.micro): (span.start_s, span.end_s)
        for node in ("a", "c")
        for span in result.spans[node]
    }
    checked = 0
    for turn in turn_sequence(plan.course):
        for item in items(plan.course, turn)[1:] if turn.kind is StepKind.GENERATE else ():
            for micro in range(item.rows):
                assert ends[Op.EMBED, item.seq, micro][0] >= ends[Op.HEAD, item.seq - 1, micro][1]
                checked += 1
    assert checked == 2 * 2 * 5 * 2


class Dying(RecoveringRing):
    """Loses host x at its third forward of a text."""

    forwards = 0

    def _run(self, node: VirtualNode, command: ev.RunAction) -> None:
        turn = next(turn for turn in self._turns.values() if turn.first_seq <= command.action.seq < turn.end_seq)
        self.forwards += turn.kind is StepKind.GENERATE and node.name == "x"
        if self.forwards == 3 and "x" not in self.lost:
            self.lose("x")
        super()._run(node, command)


def test_texts_are_written_again_where_a_host_is_lost() -> None:
    """What is logged is what an undisturbed run logs: nothing of the texts that were begun counts."""
    plan = plan_of(FIVE)
    wanted = ring_of(plan, random.Random(2)).run()
    ring = Dying(plan, place=placing(random.Random(2), plan.nodes))
    result = ring.run()
    assert result.finish == rd.Finish("", "") and ring.lost == ["x"] and len(recoveries(result)) == 1
    assert story(result) == story(wanted)


def test_texts_alone_end_with_an_error_where_a_host_is_lost() -> None:
    """A run of no steps keeps nothing to go back to."""
    plan = changed(plan_of(FIVE), num_steps=0, generation=Generation(rows=5, max_new_tokens=3, at_once=2, alone=True))
    result = Dying(plan, place=lambda asked: None, copies=False).run()
    assert result.finish is not None and result.finish.error == PeerLostError.__name__
    assert "node x is lost" in result.finish.message


def test_simulator_counts_a_token_as_a_forward_of_one_token() -> None:
    """Of each text all tokens, as if none ended early: seconds of blocks and bytes between nodes."""
    plan = plan_of(FIVE)
    pairs = {(source, target): (1e6, 0.0) for source in "acxy" for target in "acxy" if source != target}
    texts, bare = (predict(each, profile_of(each, links=pairs)) for each in (plan, changed(plan, generation=None)))
    number, prompt, width = 2 * 2 * 5, plan.course.max_length, 4 * plan.course.hidden_size
    sent = [sum(link.sent_bytes for link in found.links) for found in (texts, bare)]
    assert sent[0] - sent[1] == number * (prompt + 2) * (2 * (width + 1) + width)
    busy = [{node.node: node.busy_s for node in found.nodes} for found in (texts, bare)]
    assert busy[0]["x"] - busy[1]["x"] == pytest.approx(number * 3 * 2 * TIMES[Work.FORWARD])
    assert texts.evaluation_s - bare.evaluation_s > 2 * 2 * 5 * 3 * TIMES[Work.FORWARD], "tokens follow one another"


def test_figures_are_means_over_all_owners() -> None:
    """The sums of a run's owners; nothing where no text was written."""
    job = parse_job('[model]\npath = "m"\ntask = "chat"\n[generation]\nrows = 7\n', source="test")
    assert generation_of(job) == Generation(rows=7, max_new_tokens=64, at_once=4)
    sums = {"generated": 4.0, "new_tokens": 9.0, "judged_texts": 2.0, "rouge_l_sum": 0.5}
    assert generation_figures(sums) == {"generated": 4, "new_tokens": 9, "judged_texts": 2, "rouge_l": 0.25}
    assert generation_figures({"loss_sum": 1.0}) == {}
