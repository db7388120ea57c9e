"""Predict by formulas how long a job takes on a ring, from the tables of ``ring_costs``.

At depth d a step takes the larger of

a. *busy*: for every node what it computes in a step (frozen forward, trainable forward and backward, update, and as
   the owner embedding and head), and for every link, uplink and downlink how long its bytes take: frozen stages work
   for later steps meanwhile, so no step is shorter than the busiest resource needs;
b. *critical*: the trainable part is strictly sequential between steps. M micro-batches pass from the lowest trainable
   stage up to the head and back. One of them takes the *path* (all forwards, backwards, transfers and the head), the
   others follow at the pace of the slowest single action: ``path + (M - 1) * slowest``. And a node that does both
   directions needs ``below + M * (forward + backward)``, where *below* is the way from the lowest stage to it and back.
   Then the lowest stage updates.

::

    depth 3 of 4 blocks, slices a [0,2) b [2,4), M = 2, head at o

    a | F0 F1 .  .  .  .  B0 B1 U |      path: F0 of a, F0 of b, H0, B0 of b, B0 of a
    b | .  F0 F1 .  B0 B1 .  .  . |      below b: F and B of a, and both transfers
    o | .  .  H0 H1 .  .  .  .  . |

PipeAdapter's batches overlap everywhere within a turn, so it pays (b) once a turn only. The job is the sum over
depths of steps times the step's time, averaged over the owners' turns. Hand-overs of the head, evaluations and the
first filling of the ring are left out: they hardly depend on the slices.

Source: RingAda, section III-B.2 (which parts overlap); the bounds are those of re-entrant flow shops (one job's path,
and a machine with head and tail).
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.planner.predict.ring_costs import RingCosts
from coordinator.planner.predict.stages import at_the_head, frozen_s, place


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring:
    """The hosts in ring order, each with its number of blocks.

    Attributes:
        nodes: indices into the names of ``RingCosts``.
        counts: blocks of each, at least 1.
    """

    nodes: tuple[int, ...]
    counts: tuple[int, ...]


def job_s(costs: RingCosts, ring: Ring) -> float:
    """Predicted seconds of the whole job."""
    times = step_times(costs, ring)
    return sum(costs.steps_at[at] * times[at] for at in costs.depths)


def step_times(costs: RingCosts, ring: Ring) -> dict[int, float]:
    """Predicted seconds of a step at every depth that the job reaches, averaged over the owners by their weights."""
    above = at_the_head(costs, ring.nodes[-1])
    num_owners = len(costs.owners)
    stage_rows: list[list[list[float]]] = []
    frozen: list[list[float]] = []
    for index in range(len(ring.nodes) - 1, -1, -1):
        node, count = ring.nodes[index], ring.counts[index]
        frozen.append(frozen_s(costs, above, node, count, is_bottom=index == 0))
        rows, above = place(costs, above, node, count, is_bottom=index == 0)
        stage_rows.append(rows)
    below = [0.0] * num_owners
    at = costs.stop - costs.first
    times: dict[int, float] = {}
    weights = [owner.weight for owner in costs.owners]
    for rows, busy in zip(reversed(stage_rows), reversed(frozen), strict=True):
        for row in reversed(rows):
            if row:
                times[at] = sum(weight * max(one, two) for weight, one, two in zip(weights, row, below, strict=True))
            at -= 1
        below = list(map(max, below, busy))
    if costs.steps_at[0]:  # only the head trains: its micro-batches follow each other, all blocks work ahead
        heads = (costs.num_micro * (owner.embed_s + owner.head_s) + owner.update_s for owner in costs.owners)
        times[0] = sum(weight * max(one, two) for weight, one, two in zip(weights, below, heads, strict=True))
    return times
