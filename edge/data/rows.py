"""An owner's labelled texts: read, shared out, and cut into batches of tensors.

Raw texts, token ids and labels stay in this object; a run only sees embedded batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edge.data.tokens import Batch
from ringtune.job import Job
from ringtune.plan import Plan
from ringtune.turns import Item


class OwnerDataset:
    """The training and evaluation rows of one owner.

    Attributes:
        labels: class names in its training rows, sorted.
        eval_labels: class names in its evaluation rows, sorted.
    """

    labels: tuple[str, ...]
    eval_labels: tuple[str, ...]

    @staticmethod
    def load(
        job: Job,
        path: Path,
        eval_path: Path | None,
        *,
        share: int = 0,
        num_owners: int = 1,
        tokenizer_folder: Path,
    ) -> OwnerDataset:
        """Read the files and keep one share of their rows.

        Args:
            job: names of the columns, the split and the seed.
            path: training rows, csv or jsonl.
            eval_path: evaluation rows; None = no evaluation.
            share: which share of the rows, in ``[0, num_owners)``.
            num_owners: number of shares; the split depends on (seed, number, rule) only.
            tokenizer_folder: the model's folder.

        Raises:
            DataError: no file, no such column, no rows, or an empty text.
            ModelError: the folder has no tokenizer.
        """
        raise NotImplementedError

    @property
    def train_rows(self) -> int:
        """Rows that it trains on."""
        raise NotImplementedError

    @property
    def eval_rows(self) -> int:
        """Rows that it evaluates on."""
        raise NotImplementedError

    def set_labels(self, labels: Sequence[str]) -> None:
        """Fix the classes of the run: the index of a name is its target.

        Raises:
            DataError: a row has a class outside ``labels``.
        """
        raise NotImplementedError

    def batch(self, plan: Plan, item: Item) -> Batch:
        """The whole batch of an item, padded to its longest row; the item has to be this owner's."""
        raise NotImplementedError
