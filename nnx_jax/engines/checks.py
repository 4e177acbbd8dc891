"""What the data must fit before anything is compiled: the length of an epoch, and batches BatchNorm can use."""

from __future__ import annotations

from typing import Any

from nnx_jax.core.errors import DataError
from nnx_jax.engines.nnx_forward import PureModule


def epoch_batches(feed: Any, steps_per_epoch: int | None, accumulate: int) -> int:
    """Return the microbatches of an epoch: one pass, or so many windows.

    Raises:
        DataError: a pass has no length, or fewer microbatches than asked for.
    """
    one_pass = feed.n_batches
    if steps_per_epoch is None and one_pass is None:
        raise DataError("the loader has no length; give it __len__, or set train.steps_per_epoch")
    wanted = one_pass if steps_per_epoch is None else steps_per_epoch * accumulate
    if one_pass is not None and wanted > one_pass:
        raise DataError(f"train.steps_per_epoch needs {wanted} batches, one pass has {one_pass}; lower it")
    return wanted


def check_tail(pure: PureModule, feed: Any) -> None:
    """Check that no batch leaves BatchNorm a single row.

    Raises:
        DataError: naming the layer and the sizes.
    """
    rows, size = feed.rows, getattr(feed, "batch_size", None)
    if not (pure.batch_norms and rows and size) or feed.descriptor().get("tail") in ("drop", "straddle"):
        return
    if rows % size == 1 or size == 1:
        raise DataError(
            f"BatchNorm ({pure.batch_norms[0]}) needs two rows or more, but {rows} rows in batches of {size} "
            "leave a batch of one; use data.tail: drop or another batch_size"
        )
