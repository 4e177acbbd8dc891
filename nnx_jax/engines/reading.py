"""Reading: the batches of a feed in turn, made ready ahead by a thread if asked; one that fails halts every process."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from nnx_jax.core.errors import DataError
from nnx_jax.data.pipeline import Feed
from nnx_jax.engines.placement import Placement


class Ready(NamedTuple):
    """One batch to be handed over.

    Attributes:
        batch: its columns on the host; of several processes' batch, the rows of this one.
        rows: rows of the whole batch where `batch` holds some of them.
        placed: the columns on the devices, where they were put there ahead.
    """

    batch: dict[str, Any]
    rows: int | None = None
    placed: Any = None


class Reader:
    """The batches of one feed, from any position on.

    Among several processes a batch that cannot be read is not missing: the others wait for its rows inside the step.
    So its place is taken by one that says so (`step.batches.LOST`), which halts all of them at that update, and the
    error is kept for this process.

    Args:
        place: where the batches go.
        feed: the batches.
        ahead: batches that a thread makes ready before they are asked for; 0 reads when asked.
        places: whether the thread also puts them on the devices.
        length: batches of an epoch, which a thread must not read beyond; None for the feed's.

    Attributes:
        failure: why this process could not read, among several; None as long as it can.
        waited: seconds that callers waited here for a batch.
    """

    def __init__(
        self, place: Placement, feed: Any, *, ahead: int = 0, places: bool = False, length: int | None = None
    ) -> None:
        self.place, self.feed = place, feed
        self.ahead = 0 if getattr(feed, "one_shot", False) else ahead
        self._places, self._length = places, length
        self.failure: Exception | None = None
        self.waited = 0.0
        self._iterator: Any = None
        self._source: Iterator[Ready] | None = None
        self._at: tuple[int, int] | None = None  # of the source: the batch it gives next

    def read(self, epoch: int, index: int) -> Ready:
        """Batch `index` of `epoch`.

        Raises:
            DataError: the epoch has no such batch; and whatever the data raises. Not among several processes.
        """
        began = time.perf_counter()
        try:
            if self.failure is None:
                return self._read(epoch, index)
        except Exception as failure:
            self._source = None
            if not self.place.shared:
                raise
            self.failure = failure
        finally:
            self.waited += time.perf_counter() - began
        return Ready(*self.place.lost(self.feed, index))

    def state(self, epoch: int, index: int) -> dict[str, Any]:
        """The position before batch `index` of `epoch`, as JSON."""
        if self._iterator is not None and self._at == (epoch, index) and not self.ahead:
            return dict(self._iterator.state())
        return {"epoch": epoch, "next": index}

    def _read(self, epoch: int, index: int) -> Ready:
        if self._source is None or self._at != (epoch, index):
            self._open(epoch, index)
        assert self._source is not None
        try:
            ready = next(self._source)
        except StopIteration:
            raise DataError(f"epoch {epoch} ended after {index} batches; every epoch must give as many") from None
        self._at = epoch, index + 1
        return ready

    def _open(self, epoch: int, index: int) -> None:
        for each in (self._source, self._iterator):
            if hasattr(each, "close"):
                each.close()  # type: ignore[union-attr]
        self._source = self._iterator = self._at = None
        self._iterator = self.place.open(self.feed, epoch, index)
        length = self._length or self.feed.n_batches
        made = _made(
            self.place, self.feed, self._iterator, epoch, index,
            ahead=bool(self.ahead), places=self._places, length=length,
        )  # fmt: skip
        self._source = Ahead(made, self.ahead) if self.ahead else made
        self._at = epoch, index


def _made(
    place: Placement, feed: Any, iterator: Iterator[Any], epoch: int, index: int, *, ahead: bool, places: bool,
    length: int | None,
) -> Iterator[Ready]:  # fmt: skip
    """The rest of an epoch, each batch checked; ahead of the reader, also copied, and placed if so asked."""
    while not ahead or length is None or index < length:
        batch = next(iterator, None)
        if batch is None:
            return
        rows, placed = place.rows(feed, index), None
        place.check(feed, batch, rows, f"batch {index} of epoch {epoch}")
        if ahead and not isinstance(feed, Feed):  # a loader may fill the same arrays again
            batch = {name: np.array(column) for name, column in batch.items()}
        if ahead and places:
            placed = place.ahead(batch, rows)
        yield Ready(batch, rows, placed)
        index += 1


class Ahead:
    """The items of an iterator, taken from it by a thread before they are asked for.

    An error of the iterator comes out at the item it belongs to. The thread ends with the iterator, with `close`, and
    when nobody holds this object any more.

    Args:
        source: the iterator; from now on only the thread touches it.
        depth: how many items may wait.
    """

    def __init__(self, source: Iterator[Any], depth: int) -> None:
        self._items: queue.Queue[tuple[str, Any]] = queue.Queue(depth)
        self._stop = threading.Event()
        self._ended = False
        self._thread = threading.Thread(
            target=_take_ahead, args=(source, self._items, self._stop), name="nnx_jax batches", daemon=True
        )
        self._finalizer = weakref.finalize(self, _release, self._stop, self._items)
        self._thread.start()

    def __iter__(self) -> Ahead:
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        kind, item = self._items.get()
        if kind == "item":
            return item
        self._ended = True
        if kind == "error":
            raise item
        raise StopIteration

    def close(self) -> None:
        """End the thread, once it has the item it is at."""
        self._ended = True
        self._finalizer()
        self._thread.join()


def _take_ahead(source: Iterator[Any], items: queue.Queue[tuple[str, Any]], stop: threading.Event) -> None:
    """Put every item of the source on the queue, and at last how it ended."""
    last: tuple[str, Any] = "end", None
    try:
        for item in source:
            items.put(("item", item))
            if stop.is_set():
                break
    except BaseException as error:  # it is raised where the item is asked for
        last = "error", error
    finally:
        close: Callable[[], Any] | None = getattr(source, "close", None)
        if close is not None:
            close()
    if not stop.is_set():
        items.put(last)


def _release(stop: threading.Event, items: queue.Queue[tuple[str, Any]]) -> None:
    """Let a thread go on to its end that waits for room."""
    stop.set()
    while True:
        try:
            items.get_nowait()
        except queue.Empty:
            return
