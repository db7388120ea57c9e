"""``[recovery]``: what is refused where it is read."""

from __future__ import annotations

import pytest

from ringtune.errors import JobError
from ringtune.jobs.parts.recovery import RecoverySettings


def test_owners_can_not_be_left_out_without_copies() -> None:
    """Both keys are named; with copies, or where the run waits, all is well."""
    with pytest.raises(JobError, match=r"recovery\.owners = 'skip' .* recovery\.copies = 'none'"):
        RecoverySettings(copies="none", owners="skip")
    assert RecoverySettings(copies="next", owners="skip").owners == "skip"
    assert RecoverySettings(copies="none").owners == "wait"
    with pytest.raises(JobError, match=r"recovery\.owners"):
        RecoverySettings(owners="drop")


@pytest.mark.parametrize("wait_s", [-1.0, 1e9, float("nan")])
def test_time_to_wait_for_a_lost_node_has_bounds(wait_s: float) -> None:
    """The key is named; 0 is how a run that waits for nobody says it."""
    with pytest.raises(JobError, match=r"recovery\.wait_s is"):
        RecoverySettings(wait_s=wait_s)
    assert RecoverySettings(wait_s=0.0).wait_s == 0
