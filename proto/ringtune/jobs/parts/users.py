"""``data.user``: the column that says whose a row is, and how a node sorts and counts its rows by it.

Only names of users and numbers of their rows leave a node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from ringtune.errors import DataError, JobError, PlanError
from ringtune.files.row_account import Problem, RowError
from ringtune.files.tables import Record
from ringtune.jobs.parts.offload import OffloadSettings
from ringtune.jobs.sections import Data
from ringtune.models.family import IMAGE_CLASSIFICATION
from ringtune.schedule.extent import UserRows, check_user_name
from ringtune.schedule.helping.offload import ALONE, JOINT


def check_user_column(data: Data, offload: OffloadSettings, *, task: str) -> None:
    """Refuse a column of users where rows have no columns, or where nobody has adapters of their own.

    Raises:
        JobError: names both keys, and the remedy.
    """
    if not data.user:
        return
    if not data.user.strip():
        raise JobError(f"data.user is {data.user!r}; name a column, or remove it")
    if task == IMAGE_CLASSIFICATION:
        raise JobError(
            f"data.user = {data.user!r} has no meaning for model.task = {task!r}, where rows have no columns; remove "
            "it, so that all rows of a node are of one user with the node's name"
        )
    if offload.users == JOINT:
        raise JobError(
            f"data.user = {data.user!r} has no meaning with offload.users = {JOINT!r}, where all users train the same "
            f"adapters; remove it, or set offload.users = {ALONE!r}"
        )


def user_column(data: Data) -> dict[str, str]:
    """The key and column of a job's users, as ``table_rows`` takes them; none where the job names no column."""
    return {"data.user": data.user} if data.user else {}


def user_of(record: Record, column: str) -> str:
    """The user in a column: a text, or a whole number; blanks around the name don't count.

    Raises:
        RowError: the value is something else, or no name of a user.
    """
    value = record[1][column]
    where = f"column {column!r} (data.user)"
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RowError(Problem(f"{where} is not a user name but a {type(value).__name__}", "give a text"))
    try:
        return check_user_name(str(value).strip())
    except PlanError as error:
        raise RowError(Problem(f"{where} is no name of a user: {error}")) from error


def refuse_plain_text(path: Path, data: Data) -> None:
    """Refuse a column of users for a plain text, which has no columns.

    Raises:
        DataError: names the file and the key.
    """
    if data.user:
        raise DataError(
            f"{path} is a plain text without columns, so data.user = {data.user!r} can't say whose a row is; give a "
            ".csv or .jsonl file, or remove data.user"
        )


def sorted_by_user(chosen: Iterable[int], users: Sequence[str]) -> list[int]:
    """Rows in the order of their users' names, and of one user in the order in which they come.

    Example: rows 0, 2, 3 of the users ben, anna, ben, anna become 3, 0, 2.

    Args:
        chosen: indices of rows.
        users: of every row; empty = the order stays.
    """
    return sorted(chosen, key=users.__getitem__) if users else list(chosen)


def count_users(train: Iterable[tuple[str, int]], evaluation: Iterable[tuple[str, int]] = ()) -> tuple[UserRows, ...]:
    """Count the examples of each user, in the order of their names.

    Args:
        train: user and number of examples of each training row.
        evaluation: the same of each evaluation row.
    """
    counted, held_out = Counter[str](), Counter[str]()
    for counter, rows in ((counted, train), (held_out, evaluation)):
        for user, examples in rows:
            counter[user] += examples
    found = (
        UserRows(name=name, train_rows=counted[name], eval_rows=held_out[name])
        for name in sorted({*counted, *held_out})
    )
    return tuple(user for user in found if user.train_rows + user.eval_rows)
