"""The job to begin with: what stands in it as a comment is a job too, once it is one."""

from __future__ import annotations

import re

from ringtune.job.job import parse_job
from ringtune.job.job_reference import job_template
from ringtune.models.family import TASKS
from tests.support.cases import cases


@cases("task", TASKS)
def test_template_has_the_settings_of_hift_to_be_uncommented(task: str) -> None:
    """With the method named, and without what the comment says to remove, they are read."""
    text = job_template(task, model="m", train="t", evaluate="e")
    assert parse_job(text, source="job").method.name == "ringada"
    text = text.replace('method = "ringada"', 'method = "hift"').replace('config = "seq_bn"\n', "")
    text = re.sub(r"\[unfreeze\].*\n(#.*\n)*every_steps = 40\n", "", text)
    text = text.replace("#   ", "").replace("group_size = 1", "group_size = 3")
    job = parse_job(text, source="job")
    assert (job.method.name, job.hift and job.hift.group_size) == ("hift", 3)
