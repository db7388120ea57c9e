"""What-if changes of who takes part: a node leaves, or one like another joins; pure, as ``sim.what_ifs.changes``."""

from __future__ import annotations

import dataclasses

from ringtune.costs.profile import LinkFacts, Profile
from ringtune.errors import PlanError
from ringtune.files.strict import nearest
from ringtune.ids import check_node_name
from ringtune.schedule.helped import helped, helpers_by_host
from ringtune.schedule.helping.offload import IN_STEP
from ringtune.schedule.placement import Slice
from ringtune.schedule.plan import Plan


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
    """The plan without a node, whose blocks go to the host before it in the ring.

    The blocks of the first host go to the next host.

    The data of the node is not trained on any more; the number of steps stays. Hosts that it helped fit their own
    adapters; the helper of a host fits those of the blocks that the host gets, too.

    Raises:
        PlanError: no host or no owner is left, or users have adapters of their own and a host is left without a helper.
    """
    course, placement = plan.course, plan.placement
    owners = tuple(owner for owner in course.owners if owner.node != name)
    if not owners:
        raise PlanError(f"--drop {name}: it is the only owner of data; nothing would be left to train on")
    left = [piece for piece in placement.slices if piece.node != name]
    gone = plan.slice_of(name)
    if gone.num_blocks:
        if not left:
            raise PlanError(f"--drop {name}: it hosts all blocks; give --replan JOB to share them out anew")
        before = [index for index, piece in enumerate(left) if piece.num_blocks and piece.stop == gone.start]
        after = [index for index, piece in enumerate(left) if piece.num_blocks and piece.start == gone.stop]
        heir = (before or after or [0])[0]
        start, stop = (gone.start, gone.stop)
        if left[heir].num_blocks:
            start, stop = min(start, left[heir].start), max(stop, left[heir].stop)
        left[heir] = Slice(node=left[heir].node, start=start, stop=stop)
    helper_of = {host: helper for host, helper in helpers_by_host(plan).items() if name not in (host, helper)}
    manner = course.offload.manner if course.offload else IN_STEP
    lone = [
        one.node for one in left if one.node not in helper_of and course.trainable.ranges_within(one.start, one.stop)
    ]
    if manner.has_users and lone:
        raise PlanError(
            f"--drop {name}: node {lone[0]} has no helper then, and helpers fit the adapters of users; "
            "give --replan JOB"
        )
    course = dataclasses.replace(course, owners=owners, offload=None)
    return helped(Plan.of(course, dataclasses.replace(placement, slices=tuple(left), helpers=())), helper_of, manner)


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
