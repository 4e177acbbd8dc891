"""May this dataset be used, in batches of this size? Every answer but yes is a `DataError`, before any compile."""

from __future__ import annotations

import numpy as np

from nnx_jax.core.errors import DataError
from nnx_jax.data.dataset import TrainingDataset, require_columns
from nnx_jax.data.dtypes import MASK, check_finite, settle

TAILS = ("pad", "drop", "keep", "straddle")

_CHUNK = 4096  # rows looked at together when the dataset is not in memory


def check_batching(rows: int, batch_size: int, tail: str, where: str) -> None:
    """Raise `DataError` when this many rows cannot be cut into batches of `batch_size` under policy `tail`."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer) or batch_size < 1:
        raise DataError(f"batch_size must be a whole number of at least 1, found {batch_size!r}")
    if tail not in TAILS:
        raise DataError(f"tail must be one of {', '.join(TAILS)}, found {tail!r}")
    if rows == 0:
        raise DataError(f"{where} is empty (0 rows); there is nothing to train or evaluate on")
    if tail in ("drop", "straddle") and batch_size > rows:
        done = "drops them all" if tail == "drop" else "fills a batch with several passes"
        raise DataError(
            f"{where} has {rows} rows, fewer than batch_size {batch_size}, and tail='{tail}' {done}; "
            + ("use tail='pad', or a smaller batch_size" if tail == "drop" else "use a smaller batch_size")
        )


def check(
    dataset: TrainingDataset,
    *,
    batch_size: int,
    tail: str = "pad",
    wanted: tuple[str, ...] = (),
    finite: bool = True,
    where: str | None = None,
) -> None:
    """Raise `DataError` for a dataset a run cannot use; nothing has been compiled yet.

    Args:
        dataset: the rows. In-memory columns are checked whole, others chunk by chunk (every row once).
        batch_size: rows a batch.
        tail: what happens to the last, incomplete batch: `pad`, `drop`, `keep` or `straddle`.
        wanted: columns that must exist.
        finite: whether NaN and infinity are refused.
        where: how messages call the dataset; its class name when left out.
    """
    where = where or type(dataset).__name__
    rows = len(dataset)
    check_batching(rows, batch_size, tail, where)
    columns = dataset.columns
    require_columns(wanted, columns, where)
    for name, info in columns.items():
        settle(name, np.zeros((0, *info.shape), info.dtype), where)
    if MASK in columns:
        raise DataError(f"{where}: {MASK!r} cannot be a column's name (it is the row weight the feed adds)")
    if not finite:
        return
    whole = dataset.arrays()
    if whole is not None:
        check_finite(whole, where)
        return
    for start in range(0, rows, _CHUNK):
        check_finite(dataset.take(np.arange(start, min(start + _CHUNK, rows))), where, first_row=start)
