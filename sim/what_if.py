"""What-if changes as pure functions on profile and plan: of nodes, links, members, and plan keys.

``KEY=VALUE``, where KEY is one of::

    NODE.compute                  speed of a node: 0.5 = half as fast, all its times are divided by 0.5
    NODE.memory                   its memory budget: 512MiB, 2GB or bytes
    link.SOURCE.TARGET.rate       of a directed link, per second: 100Mbit, 5MB/s or 20e6 (bytes)
    link.SOURCE.TARGET.latency    seconds, one way
    microbatches, batch_size ...  a key of the plan (``PLAN_KEYS``)

``*`` in place of a name means every node. In a profile without links (nodes of one machine) ``link.*.*.rate`` creates
all links, without latency. A node may also leave, or join as a copy of another.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringtune.costs.profile import LinkFacts, NodeFacts, Profile
from ringtune.errors import PlanError, UsageError
from ringtune.ids import check_node_name
from ringtune.plan_keys import PLAN_KEYS
from ringtune.quantities import parse_bytes, parse_rate
from ringtune.schedule.methods import Method, method_class
from ringtune.schedule.placement import Placement, Slice
from ringtune.schedule.plan import Plan
from ringtune.storage.strict import nearest
from ringtune.techniques import TECHNIQUES

_OF_PLACEMENT = ("credits",)
_OF_METHOD = ("method", "every_steps")
_OF_OTHERS = {*_OF_PLACEMENT, *_OF_METHOD, *(key for technique in TECHNIQUES for key in technique.plan_keys)}
_NODE_KEYS = ("compute", "memory")
_LINK_KEYS = ("rate", "latency")
_ALL = "*"


def split_change(text: str) -> tuple[str, str]:
    """Split ``KEY=VALUE`` into key and value; raises ``UsageError``."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not (equals and key and value):
        raise UsageError(f"{text!r} is not KEY=VALUE, e.g. pi-3.compute=0.5 or link.pi-1.pi-2.rate=100Mbit")
    return key, value


def change_all(profile: Profile, plan: Plan, changes: Sequence[str]) -> tuple[Profile, Plan]:
    """Apply ``KEY=VALUE`` changes in order; plan keys all at once, so that they may be consistent.

    Raises ``UsageError`` or ``PlanError``; see ``change_nodes``.
    """
    profile, values = change_nodes(profile, changes)
    return change_plan(profile, plan, values) if values else (profile, plan)


def change_nodes(profile: Profile, changes: Sequence[str]) -> tuple[Profile, dict[str, int | str]]:
    """Apply changes of nodes and links; return the profile, and the values of plan keys.

    Raises:
        UsageError: another form.
        PlanError: an unknown node, link or key, with the nearest known; a value out of range.
    """
    values: dict[str, int | str] = {}
    for key, value in map(split_change, changes):
        if "." in key:
            profile = _change_profile(profile, key, value)
        else:
            values[key] = _plan_value(key, value)
    return profile, values


# ---- nodes and links -----------------------------------------------------------------------------


def _change_profile(profile: Profile, key: str, value: str) -> Profile:
    """Change one figure of a node or a link; raises ``PlanError``.

    Example: with the key ``pi.compute`` and the value ``0.5`` all times of node pi are doubled.
    """
    target, _, last = key.rpartition(".")
    if target.startswith("link.") and target not in profile.by_name:
        return _change_link(profile, target.removeprefix("link."), last, value)
    if last not in _NODE_KEYS:
        raise PlanError(f"--change {key}: unknown key {last!r}; {nearest(last, _NODE_KEYS)}")
    if target != _ALL and target not in profile.by_name:
        raise PlanError(f"--change {key}: the profile has no node {target!r}; {nearest(target, profile.by_name)}")

    def changed(change: Callable[[NodeFacts], NodeFacts]) -> tuple[NodeFacts, ...]:
        return tuple(change(node) if target in (node.node, _ALL) else node for node in profile.nodes)

    if last == "memory":
        budget = int(_number(key, value, parse=parse_bytes, above=0.0))
        return dataclasses.replace(profile, nodes=changed(lambda node: dataclasses.replace(node, memory_bytes=budget)))
    speed = _number(key, value, above=0.0)
    links = _with_processors(profile.links, target, speed)
    return dataclasses.replace(profile, nodes=changed(lambda node: node.at_pace(1 / speed)), links=links)


def _with_processors(links: Sequence[LinkFacts], node: str, speed: float) -> tuple[LinkFacts, ...]:
    """Divide the processor time per byte of a node's links by ``speed``; rates stay."""
    return tuple(
        dataclasses.replace(
            link,
            send_cpu_s_per_byte=link.send_cpu_s_per_byte / (speed if node in (link.source, _ALL) else 1.0),
            receive_cpu_s_per_byte=link.receive_cpu_s_per_byte / (speed if node in (link.target, _ALL) else 1.0),
        )
        for link in links
    )


def _change_link(profile: Profile, pair: str, last: str, value: str) -> Profile:
    key = f"link.{pair}.{last}"
    if last not in _LINK_KEYS:
        raise PlanError(f"--change {key}: unknown key {last!r} of a link; {nearest(last, _LINK_KEYS)}")
    number = _number(key, value, parse=parse_rate, above=0.0) if last == "rate" else _number(key, value, least=0.0)
    if not profile.links and pair == "*.*" and last == "rate":
        pairs = itertools.permutations(sorted(profile.by_name), 2)
        made = (
            LinkFacts(source=source, target=target, rate_bytes_per_s=number, latency_s=0.0) for source, target in pairs
        )
        return dataclasses.replace(profile, links=tuple(made))
    source, target = _ends(profile, pair, key)
    links = tuple(
        _with(link, last, number) if source in (link.source, _ALL) and target in (link.target, _ALL) else link
        for link in profile.links
    )
    return dataclasses.replace(profile, links=links)


def _with(link: LinkFacts, key: str, number: float) -> LinkFacts:
    if key == "latency":
        return dataclasses.replace(link, latency_s=number)
    return dataclasses.replace(link, rate_bytes_per_s=number, rate_low_bytes_per_s=0.0, rate_high_bytes_per_s=0.0)


def _ends(profile: Profile, pair: str, key: str) -> tuple[str, str]:
    """Split ``SOURCE.TARGET`` at the dot that gives a known link; names may contain dots."""
    if not profile.links:
        raise PlanError(
            f"--change {key}: the profile has no links, messages take no time; measure them with 'ringtune measure', "
            "or give all of them a rate first: link.*.*.rate=100Mbit"
        )
    known = profile.link_by_pair
    for dot in (index for index, letter in enumerate(pair) if letter == "."):
        source, target = pair[:dot], pair[dot + 1 :]
        if any(source in (first, _ALL) and target in (second, _ALL) for first, second in known):
            return source, target
    raise PlanError(
        f"--change {key}: the profile has no link {pair!r}; {nearest(pair, [f'{s}.{t}' for s, t in known])}"
    )


# ---- the plan ------------------------------------------------------------------------------------


def _plan_value(key: str, value: str) -> int | str:
    """Convert the value of a plan key to its type; raises ``PlanError``."""
    if key not in PLAN_KEYS:
        raise PlanError(f"--change {key}: unknown key of the plan; {nearest(key, PLAN_KEYS)}")
    if PLAN_KEYS[key] is str:
        return value
    try:
        return int(value)
    except ValueError as error:
        raise PlanError(f"--change {key}={value}: {value!r} is no whole number") from error


def change_plan(profile: Profile, plan: Plan, values: Mapping[str, int | str]) -> tuple[Profile, Plan]:
    """Change keys of the plan: of its method, course and placements; raises ``PlanError``."""
    course = plan.course
    method = _changed_method(course.method, values)
    most_hosts = max(len(placement.hosts) for placement in plan.placements)
    if method.max_hosts and most_hosts > method.max_hosts:
        raise PlanError(
            f"--change method={method.name}: it wants {method.max_hosts} host at most, the plan has {most_hosts}; "
            "give --replan JOB"
        )
    of_placement = {key: value for key, value in values.items() if key in _OF_PLACEMENT}
    of_course = {key: value for key, value in values.items() if key not in _OF_OTHERS}
    for technique in TECHNIQUES:
        technique.check_changes(course, values)
    course = dataclasses.replace(course, method=method, **of_course)  # type: ignore[arg-type]
    placements = [dataclasses.replace(placement, **of_placement) for placement in plan.placements]  # type: ignore[arg-type]
    changed = plan.replaced(course, placements)
    for technique in TECHNIQUES:
        changed = technique.changed(changed, values, profile.nodes)
    check_rows(profile, course.microbatch_sizes()[0], plan.course.microbatch_sizes()[0])
    return profile, changed


def _changed_method(method: Method, values: Mapping[str, int | str]) -> Method:
    kind = method_class(str(values.get("method", method.name)), where="--change method")
    if kind is not type(method):
        if method.max_hosts:
            raise PlanError(f"--change method: {method.name!r} has its own slices; give --replan JOB")
        if kind.full_parameters != method.full_parameters:
            raise PlanError(
                f"--change method={kind.name}: the sizes and times of {method.name} are of other trained weights; "
                "measure with a job of that method"
            )
        method = kind.from_settings(None)
    if "every_steps" not in values:
        return method
    if not getattr(method, "every_steps", 0):
        raise PlanError(
            f"--change every_steps has no effect: this plan of {method.name} does not unfreeze by it; leave it out"
        )
    return dataclasses.replace(method, every_steps=values["every_steps"])  # type: ignore[type-var]


def check_rows(profile: Profile, after: int, before: int) -> None:
    """Refuse micro-batches of other rows where a node has times of one size only."""
    for node in profile.nodes:
        if after != before and not node.work_times:
            raise PlanError(
                f"node {node.node} has times of micro-batches of {before} rows only, not of {after}; measure it with "
                "'ringtune measure'"
            )


# ---- numbers -------------------------------------------------------------------------------------


def _number(
    key: str,
    value: str,
    *,
    parse: Callable[[str], float] = float,
    above: float | None = None,
    least: float | None = None,
) -> float:
    try:
        number = float(parse(value))
    except UsageError as error:
        raise PlanError(f"--change {key}: {error}") from error
    except ValueError as error:
        raise PlanError(f"--change {key}={value}: {value!r} is no number") from error
    if not math.isfinite(number):
        raise PlanError(f"--change {key}={value}: it has to be a finite number")
    if above is not None and not number > above:
        raise PlanError(f"--change {key}={value}: it has to be above {above:g}")
    if least is not None and not number >= least:
        raise PlanError(f"--change {key}={value}: it has to be at least {least:g}")
    return number


def drop_from_profile(profile: Profile, name: str) -> Profile:
    """Remove a node and its links from a profile; raises ``PlanError``."""
    if name not in profile.by_name:
        raise PlanError(f"--drop {name}: the profile has no such node; {nearest(name, profile.by_name)}")
    return profile.without({name})


def drop_from_plan(plan: Plan, name: str) -> Plan:
    """Remove a node from every placement of a plan; raises ``PlanError``.

    Its blocks stay with the replicas of its stage. Without replicas they go to all hosts of the stage below; those of
    the lowest stage go to the stage above::

        a [0, 2)  b [2, 6)  c [2, 6)       without c: a [0, 2)  b [2, 6)       without a: b [0, 6)  c [0, 6)

    Its data is no longer trained on; the number of steps stays. Hosts that it helped fit their own adapters; helpers of
    other hosts also fit the adapters of the blocks that these hosts get.
    """
    course = plan.course
    owners = tuple(owner for owner in course.owners if owner.node != name)
    if not owners:
        raise PlanError(f"--drop {name}: it is the only owner of data; nothing would be left to train on")
    fields: dict[str, Any] = {"owners": owners}
    placements: Sequence[Placement] = [
        dataclasses.replace(placement, slices=_slices_without(placement, name), helpers=())
        for placement in plan.placements
    ]
    for technique in TECHNIQUES:
        more, placements = technique.without_node(plan, name, placements)
        fields |= more
    return plan.replaced(dataclasses.replace(course, **fields), placements)


def _slices_without(placement: Placement, name: str) -> tuple[Slice, ...]:
    """Remove a node from the slices of a placement; others host its blocks."""
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
    """Add a copy of node ``like``, with its speed, memory and links, but without data.

    Links between the two have the lower rate and the longer latency of the fastest link out of ``like`` and the fastest
    into it. Raises ``PlanError`` or ``UsageError``.
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
