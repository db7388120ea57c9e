"""Whether a message takes longer over a link than nodes wait for it."""

from __future__ import annotations

from ringtune.costs.measured.measuring import hidden_bytes
from ringtune.costs.profile import Profile
from ringtune.errors import PlanError
from ringtune.jobs.job import Job
from ringtune.quantities import format_bytes, format_seconds
from ringtune.schedule.lowering import links
from ringtune.schedule.plan import Plan


def check_waits(job: Job, plan: Plan, profile: Profile) -> None:
    """Refuse a plan with a link over which one hidden state takes longer than ``runtime.wait_s``.

    A run of it would end with its first step. Links that nobody measured are not judged.

    Example: 3 MB over 0.05 Mbit/s take 8 minutes; nodes wait for 5 minutes by default.

    Raises:
        PlanError: names the link, both times, and what can be done.
    """
    known = {pair: link for pair, link in profile.link_by_pair.items() if not link.is_assumed}
    course, wait_s = plan.course, job.runtime.wait_s
    job = job.with_overrides({"train.microbatches": course.microbatches, "wire.dtype": course.wire_dtype})
    num_bytes = hidden_bytes(job, profile.nodes[0].model)
    for source, target in sorted(pair for part in plan.parts for pair in links(part)):
        link = known.get((source, target))
        if link is not None and link.seconds(num_bytes) > wait_s:
            raise PlanError(
                f"a hidden state of {format_bytes(num_bytes)} takes {format_seconds(link.seconds(num_bytes))} from "
                f"{source} to {target} ({link.rate_bytes_per_s * 8e-6:.3g} Mbit/s), but nodes wait for no more than "
                f"runtime.wait_s = {wait_s:g} s; raise it, raise train.microbatches, lower train.batch_size, or set "
                "wire.dtype = 'bfloat16'"
            )
