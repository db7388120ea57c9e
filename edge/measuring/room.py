"""What a measurement needs of memory and disk: refused before anything is built, and left as it was found."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ringtune.costs.memory.terms import MemoryEstimate
from ringtune.errors import CapacityError, StorageError
from ringtune.files.durable import make_folder
from ringtune.quantities import format_bytes


def check_room(needs: MemoryEstimate, memory_bytes: int) -> None:
    """Refuse a measurement that does not fit.

    Raises:
        CapacityError: names both figures.
    """
    if needs.total_bytes > memory_bytes:
        raise CapacityError(
            f"measuring one block needs {needs} but there are {format_bytes(memory_bytes)}; lower train.batch_size or "
            "train.max_length, or raise train.microbatches"
        )


@contextmanager
def folder_in(disk: Path, *, is_needed: bool) -> Iterator[Path]:
    """Make a temporary folder inside ``disk`` and remove it in the end; missing room counts only where it is needed.

    Raises:
        StorageError: there is no room, and it is needed.
    """
    make_folder(disk)
    folder = Path(tempfile.mkdtemp(prefix=".measure-", dir=disk))
    try:
        yield folder
    except StorageError as error:
        if is_needed:
            raise StorageError(
                f"a block's part of a checkpoint can't be written in {disk}, where "
                f"{format_bytes(shutil.disk_usage(disk).free)} are free; make room, or give another --state"
            ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
