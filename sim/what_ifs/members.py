"""What-if changes of who takes part: a node leaves, or one like another joins; pure, as ``sim.what_ifs.changes``."""

from __future__ import annotations

import dataclasses

from ringtune.costs.profile import LinkFacts, Profile
from ringtune.errors import PlanError
from ringtune.files.strict import nearest
from ringtune.ids import check_node_name
from ringtune.schedule.helped import helped, helpers_by_host
from ringtune.schedule.helping.offload import IN_STEP
from ringtune.schedule.operations.table import Operations
from ringtune.schedule.placement import Placement, Slice
from ringtune.schedule.plan import Plan
from sim.what_ifs.changes import replaced


def drop_from_profile(profile: Profile, name: str) -> Profile:
    """The profile without a node and its links.

    Raises:
        PlanError: the profile has no such node.
    """
    if name not in profile.by_name:
        raise PlanError(f"--drop {name}: the profile has no such node; {nearest(name, profile.by_name)}")
    return dataclasses.replace(
        profile,
        nodes=tuple(node for node in profile.nodes if node.node != name),
        links=tuple(link for link in profile.links if name not in (link.source, link.target)),
    )


def drop_from_plan(plan: Plan, name: str) -> Plan:
    """The plan without a node, in every placement.

    Its blocks stay with the other hosts of its stage. Where it has none, they go to all hosts of the stage below; those
    of the lowest stage go to the stage above::

        a [0, 2)  b [2, 6)  c [2, 6)       without c: a [0, 2)  b [2, 6)       without a: b [0, 6)  c [0, 6)

    The data of the node is not trained on any more; the number of steps stays. Hosts that it helped fit their own
    adapters; the helper of a host fits those of the blocks that the host gets, too.

    Raises:
        PlanError: no host or no owner is left, or users have adapters of their own and a host is left without a helper.
    """
    course = plan.course
    owners = tuple(owner for owner in course.owners if owner.node != name)
    if not owners:
        raise PlanError(f"--drop {name}: it is the only owner of data; nothing would be left to train on")
    placements = [dataclasses.replace(one, slices=_slices_without(one, name), helpers=()) for one in plan.placements]
    helper_of = {host: helper for host, helper in helpers_by_host(plan).items() if name not in (host, helper)}
    manner = course.offload.manner if course.offload else IN_STEP
    lone = [
        one.node
        for one in placements[0].slices
        if one.node not in helper_of and course.trainable.ranges_within(one.start, one.stop)
    ]
    if manner.has_users and lone:
        raise PlanError(
            f"--drop {name}: node {lone[0]} has no helper then, and helpers fit the adapters of users; "
            "give --replan JOB"
        )
    operations, choice = course.operations and _of_others(course.operations, name), course.choice
    if choice is not None:
        tables = (dataclasses.replace(one, operations=_of_others(one.operations, name)) for one in choice.tables)
        choice = dataclasses.replace(choice, tables=tuple(tables))
    course = dataclasses.replace(course, owners=owners, offload=None, operations=operations, choice=choice)
    left = replaced(plan, course, placements)
    return left if left.moves else helped(left, helper_of, manner)


def _of_others(table: Operations, name: str) -> Operations:
    """An operation table without the batches of an owner."""
    return dataclasses.replace(table, batches=tuple(one for one in table.batches if one.owner != name))


def _slices_without(placement: Placement, name: str) -> tuple[Slice, ...]:
    """The slices of a placement without a node, whose blocks others host."""
    gone = placement.slice_of(name)
    left = [piece for piece in placement.slices if piece.node != name]
    if not gone.num_blocks:
        return tuple(left)
    stages = placement.stages
    at = next(index for index, stage in enumerate(stages) if gone in stage)
    mates = [piece.node for piece in stages[at] if piece is not gone]
    if len(mates) == 1:
        return tuple(dataclasses.replace(piece, share=1) if piece.node == mates[0] else piece for piece in left)
    if mates:
        return tuple(left)
    if len(stages) == 1:
        if not left:
            raise PlanError(f"--drop {name}: it hosts all blocks; give --replan JOB to share them out anew")
        heirs = {left[0].node}  # it hosted nothing until now
    else:
        heirs = {piece.node for piece in stages[at - 1 if at else 1]}
    return tuple(
        dataclasses.replace(
            piece,
            start=min(gone.start, piece.start) if piece.num_blocks else gone.start,
            stop=max(gone.stop, piece.stop) if piece.num_blocks else gone.stop,
        )
        if piece.node in heirs
        else piece
        for piece in left
    )


def add_node(profile: Profile, name: str, like: str) -> Profile:
    """A further node with the speed, memory and links of ``like``, but without data.

    Links between ``name`` and ``like`` have the lower rate of the fastest link out of ``like`` and the fastest into it,
    and the longer latency of those two links.

    Raises:
        PlanError: ``like`` is not there, or ``name`` is already.
        UsageError: no node may be called so.
    """
    check_node_name(name)
    if name in profile.by_name:
        raise PlanError(f"--add {name}: the profile has a node of that name already; choose another")
    if like not in profile.by_name:
        raise PlanError(f"--like {like}: the profile has no such node; {nearest(like, profile.by_name)}")
    twin = dataclasses.replace(
        profile.by_name[like], node=name, train_rows=0, eval_rows=0, labels=(), eval_labels=(), skipped_rows=0, users=()
    )
    links = list(profile.links)
    links += [dataclasses.replace(link, source=name) for link in profile.links if link.source == like]
    links += [dataclasses.replace(link, target=name) for link in profile.links if link.target == like]
    out = [link for link in profile.links if link.source == like]
    into = [link for link in profile.links if link.target == like]
    if out and into:
        ways = [max(way, key=lambda link: link.rate_bytes_per_s) for way in (out, into)]
        rate, latency_s = min(way.rate_bytes_per_s for way in ways), max(way.latency_s for way in ways)
        for source, target in ((like, name), (name, like)):
            links.append(LinkFacts(source=source, target=target, rate_bytes_per_s=rate, latency_s=latency_s))
    nodes = tuple(sorted((*profile.nodes, twin), key=lambda node: node.node))
    return dataclasses.replace(profile, nodes=nodes, links=tuple(links))
