"""Minibatches by the number of the draw that sees them, whatever epochs the loop counts in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax.core.errors import DataError
from nnx_jax.data.dtypes import MASK
from nnx_jax.data.pipeline import Feed

RESIDENT_BYTES = 256 * 1024**2
"""Columns of at most so many bytes live on the device, and a call brings row numbers alone."""


class Minibatches:
    """Draw i sees batch `i % n` of pass `i // n` over the feed, n being the batches of a pass.

    Args:
        feed: batches of one shape.
        weighs_rows: whoever sees them leaves out rows of weight 0; else there must be none.

    Attributes:
        held: what every call needs on the device: the columns, or nothing.

    Raises:
        DataError: a loader without a length.
    """

    def __init__(self, feed: Any, *, weighs_rows: bool) -> None:
        self.feed, self.weighs_rows = feed, weighs_rows
        if feed.n_batches is None:
            raise DataError("the loader has no length, so no pass over it ends; give it __len__")
        self.per_pass = int(feed.n_batches)
        columns = feed.arrays() if isinstance(feed, Feed) else None
        small = columns is not None and sum(column.nbytes for column in columns.values()) <= RESIDENT_BYTES
        self.held = {name: jnp.asarray(column) for name, column in columns.items()} if columns and small else {}
        self._order: tuple[int, np.ndarray] | None = None
        self._open: tuple[int, Iterator[Any]] | None = None

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """One batch as shapes."""
        return {name: jax.ShapeDtypeStruct(c.shape, c.dtype) for name, c in self.feed.signature().items()}

    def block(self, first: int, count: int, size: int) -> Any:
        """What a call for draws `first .. first + count - 1` needs: [size, ...] each, `size` at least `count`."""
        if self.held:
            return _padded(np.stack([self._rows(draw) for draw in range(first, first + count)]), size)
        batches = [self._next(draw) for draw in range(first, first + count)]
        if not self.weighs_rows and any((batch[MASK] != 1).any() for batch in batches):
            raise DataError(
                "a batch has rows of weight 0, which the estimate of this log density cannot leave out; give batches "
                "of equal size"
            )
        return {name: _padded(np.stack([batch[name] for batch in batches]), size) for name in batches[0]}

    def pick(self, held: Any, block: Any, place: Any) -> Any:
        """The columns of one batch of a block, traced."""
        if not held:
            return jax.tree.map(lambda column: column[place], block)
        rows = block[place]
        found = {name: column[jnp.maximum(rows, 0)] for name, column in held.items()}
        return found | {MASK: (rows >= 0).astype(jnp.float32)}

    def _rows(self, draw: int) -> np.ndarray:
        """Row numbers of one batch; -1 is padding."""
        lap, place = divmod(draw, self.per_pass)
        if self._order is None or self._order[0] != lap:
            self._order = lap, self.feed.order(lap)
        return self._order[1][place]

    def _next(self, draw: int) -> Any:
        """The columns of one batch, from the iterator that stands there or from a fresh one."""
        lap, place = divmod(draw, self.per_pass)
        if place == 0 or self._open is None or self._open[0] != draw:
            self._open = draw, self.feed.batches(lap, place)
        source = self._open[1]
        self._open = draw + 1, source
        return next(source)


def _padded(array: np.ndarray, size: int) -> np.ndarray:
    """With zeros up to `size` lines, so that one program serves every count."""
    return np.concatenate([array, np.zeros((size - len(array), *array.shape[1:]), array.dtype)])
