"""Training on data that comes one row after another: passes without end, a bounded shuffle, an exact position.

The position in a stream is the number of rows consumed, and nothing else. Passes follow each other without a seam, so
every batch is full and every row is used in every pass. The shuffle holds a bounded number of rows: the stream is cut
into blocks of that many, and each block has an order that is a function of (seed, pass, block). So whatever was in the
buffer at a position can be read again from the source, and a checkpoint holds no rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
from pydantic import Field, field_validator

from nnx_jax.core.errors import DataError, OperatorTypeError
from nnx_jax.core.registry import register
from nnx_jax.data.checks import check_batching
from nnx_jax.data.dataset import TrainingDataset
from nnx_jax.data.deal import ONCE
from nnx_jax.data.dtypes import Columns, check_finite, settle_columns
from nnx_jax.data.iterable import DataId, StreamingDataset, check_shapes, chunks_of, joined, row_shapes
from nnx_jax.data.loader import LoaderFeed

BLOCK_ORDER = "philox4x64-argsort-blocks"
_SHUFFLE = 2**63  # in the key: a stream that no augmentation draws from, whose keys are batch numbers


@register("stream")
class StreamDataset(StreamingDataset):
    """Rows of a source that can begin anywhere: `source_fn(start_index)` gives the rows from that one on.

    Resuming is as cheap as the source makes it: nothing before the position is read again.

    Args:
        source_fn: a function of the number of the first row wanted, 0 or more, that returns an iterable of rows, each
            `(x, y)`, a dict of columns or an array x; of none when there are no rows from there on. The same number
            must give the same rows every time.
        data_id: which data this is, for the run's identity and for resume.
        rows: rows of one pass, where they are known; otherwise they are counted when a pass ends.
        batched: what comes are batches, every column [n, ...]; the first one begins at `start_index`.
    """

    source_fn: Any = Field(exclude=True)
    data_id: DataId
    rows: Annotated[int, Field(ge=1)] | None = None
    batched: bool = False

    @field_validator("source_fn")
    @classmethod
    def _check_source(cls, source: Any) -> Any:
        if not callable(source):
            raise OperatorTypeError(f"expected a function of the first row's number; got a {type(source).__name__}")
        return source

    @property
    def pass_rows(self) -> int | None:
        """Rows of one pass, where they are known."""
        return self.rows

    def chunks(self, start: int = 0) -> Iterator[Columns]:
        """Yield the rows of one pass from row `start` on."""
        return chunks_of(self.source_fn(start), f"stream {self.data_id!r} from row {start}", batched=self.batched)


class Passes:
    """The rows of a dataset, pass after pass without a seam, from any position on.

    Args:
        dataset: any dataset; of one with row numbers the rows come in their order.
        buffer: rows of a block that is shuffled; 0 for the order of the source.
        seed: of the shuffle.
        least: rows that a pass must have.

    Attributes:
        position: rows consumed since the beginning of the first pass.
    """

    def __init__(self, dataset: Any, *, buffer: int = 0, seed: int = 0, least: int = 1) -> None:
        self._dataset, self._buffer, self._seed, self._least = dataset, buffer, seed, least
        self._name = f"{type(dataset).__name__} {getattr(dataset, 'data_id', None) or ''}".strip()
        self._length: int | None = len(dataset) if dataset.indexable else dataset.pass_rows
        self._chunks: Iterator[Columns] | None = None
        self._number = 0  # of the pass
        self._read = 0  # rows of the pass that came from the source, or were passed over
        self._loaded = 0  # those of them that were in a block
        self._shapes: dict[str, tuple[int, ...]] = {}  # of a row
        self._spare: Columns | None = None  # read beyond the end of a block
        self._block: Columns = {}  # what is handed on next
        self._size = 0  # rows of the block
        self._at = 0  # those of them that were handed on
        self.position = 0

    def read(self, rows: int, *, on: bool = True) -> Columns | None:
        """Return the next `rows` rows of every column, [rows, ...]; without `on` the rest of this pass at most.

        Returns None when there is none left, which never happens with `on`.

        Raises:
            DataError: the pass is over and it was the only one; a pass of no row, of fewer than `least`, or of another
                number than the one before; rows that do not fit together.
        """
        parts, missing = [], rows
        while missing:
            part, many = self._next(missing)
            if many:
                missing -= many
                parts.append(part)
            elif on:
                self._begin_next_pass()
            else:
                break
        if not parts:
            return None
        self.position += rows - missing
        return joined(parts)

    def seek(self, position: int) -> None:
        """Go to a position: rows before it are not handed on, and not read where the source can begin anywhere.

        Raises:
            DataError: a source that can be read once only and was; or that has fewer rows.
        """
        number, offset = divmod(position, self._length) if self._length else (0, position)
        if not self._open(number, offset):
            if getattr(self._dataset, "one_shot", False):
                raise DataError(
                    f"{self._name} gave fewer rows than the position asked for, {position}; is it the same?"
                )
            length = self._length or self._loaded_at_end()
            number, offset = divmod(position, length)
            if not self._open(number, offset):
                raise DataError(f"{self._name} gave fewer than {offset} of {length} rows; the data must not change")
        self.position = position

    def _open(self, number: int, offset: int) -> bool:
        """Begin pass `number` at row `offset`; return whether the pass has that row."""
        start = offset - offset % self._buffer if self._buffer else offset
        self._chunks, self._spare, self._size, self._at = self._dataset.chunks(start), None, 0, 0
        self._number, self._loaded, self._read = number, start, start
        if offset == 0:
            return True
        if not self._load():
            return False
        self._at = offset - start
        return self._at < self._size

    def _loaded_at_end(self) -> int:
        """Rows of one pass, counted."""
        if 0 < self._size < self._buffer:
            self._length = self._loaded  # a block that is not full is the last one
            return self._length
        self._length = sum(map(_rows, self._dataset.chunks()))
        self._check_length(self._length)
        return self._length

    def _next(self, rows: int) -> tuple[Columns, int]:
        """Up to `rows` rows of the block at hand, or of the next one, and how many; 0 at the end of the pass."""
        if self._chunks is None:
            self._open(0, 0)
        if self._at >= self._size and not self._load():
            return {}, 0
        first, last = self._at, min(self._at + rows, self._size)
        self._at = last
        if last - first == self._size:
            return self._block, self._size
        return {name: column[first:last] for name, column in self._block.items()}, last - first

    def _load(self) -> bool:
        """Make the next block ready; False at the end of the pass."""
        place = self._loaded // self._buffer if self._buffer else 0
        block = self._gathered(self._buffer) if self._buffer else self._chunk()
        if block is None:
            return False
        rows = _rows(block)
        self._loaded += rows
        if self._buffer:
            key = np.array([self._seed, _SHUFFLE + (self._number << 32) + place], np.uint64)  # a list would be floats
            order = np.argsort(np.random.Philox(key=key).random_raw(rows), kind="stable")
            block = {name: column[order] for name, column in block.items()}
        self._block, self._size, self._at = block, rows, 0
        return True

    def _gathered(self, rows: int) -> Columns | None:
        """The next `rows` rows of the source, fewer at the end of the pass, None where there is none."""
        parts, missing = [], rows
        while missing and (chunk := self._chunk()) is not None:
            if _rows(chunk) > missing:
                self._spare = {name: column[missing:] for name, column in chunk.items()}
                chunk = {name: column[:missing] for name, column in chunk.items()}
            missing -= _rows(chunk)
            parts.append(chunk)
        return joined(parts) if parts else None

    def _chunk(self) -> Columns | None:
        """The next rows of the source that are some."""
        chunk, self._spare = self._spare, None
        while chunk is None:
            found = next(self._chunks, None)  # type: ignore[arg-type]
            if found is None:
                return None
            shapes, rows = row_shapes(found), _rows(found)
            if shapes != self._shapes:
                self._shapes = self._shapes or shapes
                check_shapes(found, self._shapes, f"{self._name}: row {self._read} of pass {self._number}")
            self._read += rows
            chunk = found if rows else None
        return chunk

    def _begin_next_pass(self) -> None:
        if getattr(self._dataset, "one_shot", False):
            raise DataError(
                f"{self._name} is used up after {self._loaded} rows, and it can be read once only; give a function "
                "that returns a new iterator, or ask for fewer steps"
            )
        self._check_length(self._loaded)
        if self._length not in (None, self._loaded):
            raise DataError(
                f"{self._name} gave {self._loaded} rows in pass {self._number}, and {self._length} are a pass; a "
                "position in it could not be found again, so every pass must have the same rows"
            )
        self._length = self._loaded
        self._open(self._number + 1, 0)

    def _check_length(self, rows: int) -> None:
        if rows == 0:
            raise DataError(f"{self._name} gave no rows in pass {self._number}; give a source that can be read again")
        if rows < self._least:
            raise DataError(f"{self._name} gave {rows} rows in a pass, fewer than batch_size {self._least}")


def _rows(columns: Columns) -> int:
    return len(next(iter(columns.values())))


class StreamLoader:
    """The batches of a streaming dataset; `stream_feed` makes a feed of it.

    Every batch has `batch_size` rows: where a pass ends, the next one goes on in the same batch. With `once` there is
    one pass, its last batch may be shorter, and iterating begins it again: what an evaluation needs.

    Args:
        dataset: the rows; its `shuffle_buffer` says how many are shuffled at a time.
        batch_size: rows a batch.
        n_batches: batches of an epoch: epoch e begins at batch e * n_batches. Without it one epoch goes on without end.
        seed: of the shuffle.
        shuffle: False keeps the order of the source.
        once: see above.

    Raises:
        DataError: a batch size that is none, an evaluation of a source that can be read once only.
    """

    def __init__(
        self, dataset: Any, batch_size: int, *, n_batches: int | None = None, seed: int = 0, shuffle: bool = True,
        once: bool = False,
    ) -> None:  # fmt: skip
        check_batching(1, batch_size, "pad", type(dataset).__name__)
        if n_batches is not None and n_batches < 1:
            raise DataError(f"n_batches must be 1 or more, found {n_batches}")
        if once and getattr(dataset, "one_shot", False):
            raise DataError(
                f"{type(dataset).__name__} can be read once only, and an evaluation reads it every time; give a "
                "function that returns a new iterator"
            )
        self.dataset, self.batch_size, self.once = dataset, int(batch_size), once
        self.seed, self.shuffle = seed, shuffle and not once
        self._n_batches, self._epoch = n_batches, 0
        self._passes = self._new_passes()
        self._next = 0  # batch that the passes give next
        self._last: Columns | None = None  # the one before it: a feed looks at its first batch before it hands it on

    def _new_passes(self) -> Passes:
        buffer = getattr(self.dataset, "shuffle_buffer", 0) if self.shuffle else 0
        return Passes(self.dataset, buffer=buffer, seed=self.seed, least=1 if self.once else self.batch_size)

    def widened(self, wide: bool = True) -> StreamLoader:
        """Return the same batches with columns of float64 as they are; see `TrainingDataset.widened`."""
        options: Any = {"n_batches": self._n_batches, "seed": self.seed, "shuffle": self.shuffle, "once": self.once}
        return StreamLoader(self.dataset.widened(wide), self.batch_size, **options)

    def __len__(self) -> int:
        """Return the batches of an epoch; with `once` those of the pass, which is read to count them if need be."""
        if self.once and self._n_batches is None:
            known = len(self.dataset) if self.dataset.indexable else self.dataset.pass_rows
            rows = sum(map(_rows, self.dataset.chunks())) if known is None else known
            self._n_batches = -(-rows // self.batch_size)
        if self._n_batches is None:
            raise TypeError("a stream has no end; give n_batches, the batches of an epoch (train.steps_per_epoch)")
        return self._n_batches

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that is iterated next.

        Raises:
            DataError: an epoch after one without end.
        """
        if epoch and not self.once and self._n_batches is None:
            raise DataError(f"epoch {epoch} comes after one without end; give n_batches, the batches of an epoch")
        self._epoch = epoch

    def __iter__(self) -> StreamBatches:
        return self.batches_from(self._epoch, 0)

    def batches_from(self, epoch: int, start: int) -> StreamBatches:
        """Return batches `start`.. of an epoch; what comes before is not read where the source can begin anywhere.

        Raises:
            DataError: an epoch after one without end, a batch that no epoch has.
        """
        self.set_epoch(epoch)
        if self.once or self._n_batches is None:
            return StreamBatches(self, start, None)
        if start > self._n_batches:
            raise DataError(f"batch {start} of epoch {epoch}: an epoch has {self._n_batches} batches")
        first = epoch * self._n_batches
        return StreamBatches(self, first + start, first + self._n_batches)

    @property
    def info(self) -> dict[str, Any]:
        """What a network needs to know, as far as the dataset tells."""
        return self.dataset.info

    @property
    def partition(self) -> dict[str, Any]:
        """What a position depends on, as JSON; kept with it, so that a run never continues in another stream."""
        told: dict[str, Any] = {
            "batch_size": self.batch_size,
            "policy": ONCE if self.once else "stream",
            "seed": self.seed if self._passes._buffer else None,
            "order": BLOCK_ORDER if self._passes._buffer else "rows",
            "shuffle_buffer": self._passes._buffer,
            "n_batches": self._n_batches,
            "world": 1,
            "dataset": self.dataset.content_hash(),
        }
        return told | ({"batches": len(self)} if self.once else {})

    def batch(self, index: int) -> Columns | None:
        """Return batch `index` counted from the beginning of the stream; None behind the end, with `once`.

        Raises:
            DataError: see `Passes`; a value that is not finite, naming the row of the stream.
        """
        if self._last is not None and index == self._next - 1:
            return self._last
        if index != self._next:
            self._last = None
            if not self._passes_can_go_on(index):
                self._passes.seek(index * self.batch_size)
            self._next = index
        first = self._passes.position
        columns = self._passes.read(self.batch_size, on=not self.once)
        if columns is None:
            return None
        where = f"{type(self.dataset).__name__} (rows counted from the beginning of the stream)"
        columns = settle_columns(columns, where, wide=self.dataset.wide)
        check_finite(columns, where, first_row=first)
        if self.dataset.augments and not self.once:
            columns = self.dataset.augment(columns, np.random.Generator(np.random.Philox(key=[self.seed, index])))
        self._next, self._last = index + 1, columns
        return columns

    def _passes_can_go_on(self, index: int) -> bool:
        """Read over what lies before batch `index`, where the source cannot be begun anew."""
        if not getattr(self.dataset, "one_shot", False) or self._passes.position == 0 or index < self._next:
            return False
        while self._passes.position < index * self.batch_size:
            self._passes.read(self.batch_size)
        return True


class StreamBatches:
    """The batches of one epoch of a `StreamLoader`; several share the loader's one place in the stream."""

    def __init__(self, loader: StreamLoader, first: int, last: int | None) -> None:
        self._loader, self._next, self._last = loader, first, last

    def __iter__(self) -> StreamBatches:
        return self

    def __next__(self) -> Columns:
        batch = None if self._next == self._last else self._loader.batch(self._next)
        if batch is None:
            raise StopIteration
        self._next += 1
        return dict(batch)


def stream_feed(
    dataset: TrainingDataset, *, batch_size: int, n_batches: int | None = None, seed: int = 0, shuffle: bool = True,
    once: bool = False,
) -> LoaderFeed:  # fmt: skip
    """Return the feed of a streaming dataset; arguments and errors as of `StreamLoader`."""
    loader: Any = StreamLoader(dataset, batch_size, n_batches=n_batches, seed=seed, shuffle=shuffle, once=once)
    return LoaderFeed(loader, wide=dataset.wide)
