"""The batches of a strategy: a loader's, epoch after epoch, or one that is handed over at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from nnx_jax.core.errors import DataError
from nnx_jax.data.dataset import ColumnInfo
from nnx_jax.data.loader import LoaderFeed, LoaderIterator

ENDLESS = 1 << 30
"""Batches of an epoch whose end is not known."""


class StrategyFeed(LoaderFeed):
    """A loader's batches, which may begin in the middle of an epoch.

    Args:
        loader: as LoaderFeed takes it. One with `set_epoch_step(n)` is told where to begin; of any other the first
            batches are passed over.
        epoch, start: where the first pass begins.
        pad: see LoaderFeed.
    """

    def __init__(self, loader: Iterable[Any], *, epoch: int = 0, start: int = 0, pad: bool = True) -> None:
        super().__init__(loader, pad=pad)
        self._begin = (epoch, start)
        self._told: tuple[int, int] | None = None

    def signature(self, epoch: int = 0) -> dict[str, ColumnInfo]:
        """Shapes of the first batch; its first pass begins where this feed begins."""
        return super().signature(self._begin[0])

    def batches(self, epoch: int = 0, start: int = 0) -> LoaderIterator:
        """Batches `start`.. of `epoch`."""
        if start and callable(getattr(self._loader, "set_epoch_step", None)):
            if self._told != (epoch, start) or self._opened is None:
                self._opened, self._begin = None, (epoch, start)
            iterator = _Pass(self, epoch, 0)
            iterator._next = start  # the loader itself passed over what came before
            return iterator
        return _Pass(self, epoch, start)

    def _announce(self, epoch: int) -> None:
        super()._announce(epoch)
        skip = getattr(self._loader, "set_epoch_step", None)
        if callable(skip) and self._begin[0] == epoch and self._begin[1]:
            self._told, self._begin = self._begin, (epoch, 0)
            skip(self._told[1])


class _Pass(LoaderIterator):
    """A pass of a loader; where one without length ends, nobody could know."""

    def __next__(self) -> Any:
        try:
            return super().__next__()
        except StopIteration:
            loader = self._feed._loader
            if self._feed.n_batches is None and not isinstance(loader, Iterator):
                raise DataError(
                    f"the loader has no length; give it __len__ (epoch {self._epoch} ended after {self._next} batches)"
                ) from None
            raise


class Pushed:
    """A feed of batches that are handed over one by one."""

    rows: int | None = None
    n_batches = ENDLESS

    def __init__(self, first: Any, *, pad: bool) -> None:
        self._read, self.pad = LoaderFeed([first], pad=pad), pad
        self._signature = self._read.signature()
        self.current: dict[str, Any] = {}

    def push(self, item: Any, index: int) -> None:
        """Hand over the next batch, as a loader would give it."""
        self.current = self._read._batch(item, 0, index)

    def signature(self, epoch: int = 0) -> dict[str, ColumnInfo]:
        """Shapes of the first batch."""
        return dict(self._signature)

    def arrays(self) -> None:
        """Nothing is in memory beforehand."""

    def batches(self, epoch: int = 0, start: int = 0) -> Any:
        """There is no pass over batches that are handed over."""
        raise DataError("batches are handed over one by one here; give run() a loader")

    def descriptor(self) -> dict[str, Any]:
        """Nothing is known of what is handed over."""
        return {"data_id": None, "n_batches": None}
