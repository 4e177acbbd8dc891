"""Training on streams: every row in every pass, full batches, bounded shuffle, exact positions, and no hang."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from nnx_jax.core.errors import DataError
from nnx_jax.data import (
    ArrayDataset,
    BatchFeed,
    IterableDataset,
    StreamDataset,
    StreamLoader,
    compare_descriptors,
    stream_feed,
)


def rows(first: int, last: int) -> Iterator[Any]:
    return ((np.array([float(i)]), 2.0 * i) for i in range(first, last))


def resumable(n: int | None = 10, *, asked: list[int] | None = None, **fields: Any) -> StreamDataset:
    """Rows 0 .. n-1 (for ever without n); notes where the source was begun, and counts what it gave."""

    def source(start: int) -> Iterator[Any]:
        if asked is not None:
            asked.append(start)
        return rows(start, 10**9 if n is None else n)

    return StreamDataset(source_fn=source, **({"data_id": f"rows {n}"} | fields))


def repeatable(n: int = 10, **fields: Any) -> IterableDataset:
    return IterableDataset(source=lambda: rows(0, n), **({"data_id": f"rows {n}"} | fields))


def numbers(batch: dict[str, np.ndarray]) -> list[int]:
    np.testing.assert_array_equal(batch["y"], 2 * batch["x"][:, 0])
    return [int(x) for x in batch["x"][:, 0]]


def take(feed: Any, count: int, epoch: int = 0, start: int = 0) -> list[list[int]]:
    return [numbers(batch) for batch in itertools.islice(feed.batches(epoch, start), count)]


def within(seconds: float, function: Callable[[], Any]) -> Any:
    """Return what the function does, which must not take long."""
    found: list[Any] = []

    def call() -> None:
        try:
            found.append(function())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "it hangs"
    return found[0]


@pytest.mark.parametrize("make", [resumable, repeatable])
@pytest.mark.parametrize("buffer", [0, 3])
def test_every_row_in_every_pass(make: Any, buffer: int) -> None:
    """Ten rows in batches of 4: five batches are every row twice, the tail included (pipekit:G10)."""
    feed = stream_feed(make(shuffle_buffer=buffer), batch_size=4, n_batches=5, seed=1)
    assert isinstance(feed, BatchFeed)
    batches = take(feed, 5)
    flat = list(itertools.chain(*batches))
    assert Counter(flat) == dict.fromkeys(range(10), 2)
    assert sorted(flat[:10]) == list(range(10))  # pass by pass, across the border inside the third batch
    if not buffer:
        assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], [2, 3, 4, 5], [6, 7, 8, 9]]
    assert feed.n_batches == 5
    assert take(feed, 9) == batches  # an epoch ends


def test_every_batch_is_full() -> None:
    """No batch has another shape, however passes and items are cut: nothing to compile again (pipekit:G11)."""
    batches = [{"x": np.arange(n, dtype=float)[:, None], "y": np.arange(n)} for n in (3, 1, 5, 2)]
    feed = stream_feed(IterableDataset(source=batches, data_id="b", batched=True), batch_size=4)
    shapes = [{n: v.shape for n, v in batch.items()} for batch in itertools.islice(feed.batches(0), 23)]
    assert shapes == [{"x": (4, 1), "y": (4,), "mask": (4,)}] * 23
    assert {name: info.shape for name, info in feed.signature().items()} == shapes[0]
    assert all(batch["mask"].all() for batch in itertools.islice(feed.batches(0), 23))


@pytest.mark.parametrize(
    ("dataset", "told"),
    [
        (repeatable(3), "gave 3 rows in a pass, fewer than batch_size 4"),
        (resumable(3), "gave 3 rows in a pass, fewer than batch_size 4"),
        (resumable(3, shuffle_buffer=2), "gave 3 rows in a pass, fewer than batch_size 4"),
        (repeatable(0), "gave no rows in pass 0"),
        (IterableDataset(source=rows(0, 10), data_id="one pass"), "is used up after 10 rows, and it can be read once"),
        (IterableDataset(source=rows(0, 3), data_id="one pass"), "is used up after 3 rows, and it can be read once"),
    ],
)
def test_a_stream_that_ends_is_an_error_and_no_hang(dataset: Any, told: str) -> None:
    """Shorter than a batch, or used up (pipekit:G9)."""
    found = within(10, lambda: take(stream_feed(dataset, batch_size=4), 20))
    assert isinstance(found, ValueError)
    assert told in str(found)


def test_a_function_that_returns_the_same_iterator() -> None:
    """(pipekit:G9) the second pass would be empty for ever."""
    one = rows(0, 10)
    found = within(10, lambda: take(stream_feed(IterableDataset(source=lambda: one, data_id="a"), batch_size=4), 20))
    assert isinstance(found, DataError)
    assert "gave no rows in pass 1" in str(found)


def test_passes_must_have_the_same_rows() -> None:
    lengths = iter([10, 9])
    data = IterableDataset(source=lambda: rows(0, next(lengths)), data_id="shrinking")
    with pytest.raises(DataError, match="gave 9 rows in pass 1, and 10 are a pass"):
        take(stream_feed(data, batch_size=4), 20)
    with pytest.raises(DataError, match="gave 10 rows in pass 0, and 12 are a pass"):
        take(stream_feed(resumable(10, rows=12), batch_size=4), 20)


@pytest.mark.parametrize("buffer", [0, 1, 3, 4, 10, 64])
@pytest.mark.parametrize("kind", ["known", "unknown", "repeatable"])
def test_resume_at_every_batch(kind: str, buffer: int) -> None:
    """From every position, a new process goes on with exactly the rows that are due (pipekit:H18, pipekit:N16)."""

    def make() -> Any:
        if kind == "repeatable":
            return repeatable(shuffle_buffer=buffer)
        return resumable(rows=10 if kind == "known" else None, shuffle_buffer=buffer)

    def feed() -> Any:
        return stream_feed(make(), batch_size=4, n_batches=3, seed=5)

    live = feed()
    whole = [*take(live, 3, 0), *take(live, 3, 1), *take(live, 3, 2)]
    for position in range(9):
        epoch, start = divmod(position, 3)
        again = feed()
        again.signature(epoch)  # what a run asks first
        assert take(again, 3, epoch, start) == whole[position : 3 * (epoch + 1)], position
        assert take(again, 3, epoch + 1)[:1] == take(live, 3, epoch + 1)[:1]
        assert take(again, 1, 0) == whole[:1]  # and back


def test_resume_reads_only_what_it_must() -> None:
    """(pipekit:H18) with its length known, or in an endless stream, a source is begun at the position itself."""
    asked: list[int] = []
    feed = stream_feed(resumable(None, asked=asked), batch_size=4, n_batches=100)
    assert take(feed, 1, 3, 7) == [[1228, 1229, 1230, 1231]]
    assert asked == [1228]
    asked.clear()
    feed = stream_feed(resumable(1000, asked=asked, rows=1000, shuffle_buffer=32), batch_size=4, n_batches=100)
    take(feed, 1, 3, 7)
    assert asked == [224]  # row 1228 is row 228 of the second pass, in the block that begins at 224
    asked.clear()
    take(feed, 3, 3, 8)
    take(feed, 2, 3, 11)
    assert asked == []  # going on begins nothing anew


def test_an_iterator_is_read_up_to_the_position_or_refused() -> None:
    """(pipekit:H18) never silently from the head."""
    assert take(stream_feed(IterableDataset(source=rows(0, 99), data_id="a"), batch_size=4, n_batches=3), 1, 2, 1) == [
        [28, 29, 30, 31]
    ]
    feed = stream_feed(IterableDataset(source=rows(0, 99), data_id="a"), batch_size=4, n_batches=3)
    feed.signature()
    feed.forget()
    assert take(feed, 1) == [[0, 1, 2, 3]]  # what was looked at is not lost
    assert take(feed, 1, 0, 2) == [[8, 9, 10, 11]]
    with pytest.raises(DataError, match="which was read before, and what was read is gone"):
        take(feed, 1)
    short = stream_feed(IterableDataset(source=rows(0, 9), data_id="a"), batch_size=4, n_batches=3)
    with pytest.raises(DataError, match=r"fewer rows than the position asked for, 12; is it the same\?"):
        take(short, 1, 1)


def test_another_stream_is_refused() -> None:
    """(pipekit:H18) the position is kept with what it depends on."""
    base = stream_feed(resumable(shuffle_buffer=4), batch_size=4, n_batches=5, seed=1).descriptor()
    compare_descriptors(base, stream_feed(resumable(shuffle_buffer=4), batch_size=4, n_batches=5, seed=1).descriptor())
    for options, name in [
        ({"seed": 2}, "seed"),
        ({"batch_size": 2}, "batch_size"),
        ({"n_batches": 6}, "n_batches"),
        ({"shuffle": False}, "shuffle_buffer"),
    ]:
        other = stream_feed(resumable(shuffle_buffer=4), **({"batch_size": 4, "n_batches": 5, "seed": 1} | options))
        with pytest.raises(DataError, match=f"'{name}'"):
            compare_descriptors(base, other.descriptor())
    other = stream_feed(resumable(11, shuffle_buffer=4), batch_size=4, n_batches=5, seed=1)
    with pytest.raises(DataError, match="does not fit this data"):
        compare_descriptors(base, other.descriptor())


def test_the_shuffle_is_a_function_of_the_seed() -> None:
    """Another seed, pass or block, another order; never further than the buffer; also without an end (pipekit:N16)."""

    def order(seed: int, buffer: int = 8) -> list[int]:
        feed = stream_feed(resumable(32, shuffle_buffer=buffer), batch_size=4, seed=seed)
        return list(itertools.chain(*take(feed, 16)))

    assert order(1) == order(1)
    assert order(1) != order(2)
    found = order(1)
    assert found[:32] != found[32:]
    assert Counter(found) == dict.fromkeys(range(32), 2)
    blocks = [found[i : i + 8] for i in range(0, 64, 8)]
    assert [sorted(block) for block in blocks] == [list(range(i, i + 8)) for i in (0, 8, 16, 24)] * 2
    assert len({tuple(np.argsort(block)) for block in blocks}) == 8
    assert order(1, buffer=64)[:32] != sorted(order(1, buffer=64)[:32])
    assert order(3, buffer=0)[:32] == list(range(32))


def test_the_buffer_holds_a_bounded_number_of_rows() -> None:
    """Of a stream without end, no more is read ahead of what was handed on than the buffer holds (pipekit:N16)."""
    given, ahead = 0, []

    def source(start: int) -> Iterator[Any]:
        nonlocal given
        for number in itertools.count(start):
            given += 1
            yield np.array([float(number)]), 2.0 * number

    feed = stream_feed(StreamDataset(source_fn=source, data_id="a", shuffle_buffer=16), batch_size=3)
    for count, _ in enumerate(itertools.islice(feed.batches(0), 50), 1):
        ahead.append(given - 3 * count)
    assert max(ahead) < 16
    assert min(ahead) >= 0


def test_rows_that_do_not_fit_are_named() -> None:
    bad = [*rows(0, 5), (np.zeros(2), 0.0), *rows(6, 9)]
    for buffer in (0, 4):
        data = IterableDataset(source=bad, data_id="ragged", shuffle_buffer=buffer)
        with pytest.raises(DataError, match=r"ragged: row 5 of pass 0 has rows of shapes {'x': \(2,\), 'y': \(\)}"):
            take(stream_feed(data, batch_size=3), 3)
    nan = [*rows(0, 5), (np.array([np.nan]), 0.0), *rows(6, 9)]
    with pytest.raises(DataError, match="column 'x', row 5: nan is not a finite number"):
        take(stream_feed(IterableDataset(source=nan, data_id="nan"), batch_size=3), 3)


@pytest.mark.parametrize("buffer", [0, 5])
def test_a_source_that_fills_one_array_again_and_again(buffer: int) -> None:
    def source() -> Iterator[Any]:
        x = np.zeros(1)
        for number in range(8):
            x[0] = number
            yield x, 2.0 * number

    feed = stream_feed(IterableDataset(source=source, data_id="a", shuffle_buffer=buffer), batch_size=4)
    assert sorted(itertools.chain(*take(feed, 2))) == list(range(8))


def test_what_a_loader_refuses() -> None:
    with pytest.raises(DataError, match="batch_size must be a whole number of at least 1, found 0"):
        StreamLoader(resumable(), 0)
    with pytest.raises(DataError, match="n_batches must be 1 or more, found 0"):
        StreamLoader(resumable(), 4, n_batches=0)
    with pytest.raises(DataError, match="batch 6 of epoch 1: an epoch has 5 batches"):
        take(stream_feed(resumable(), batch_size=4, n_batches=5), 1, 1, 6)
    with pytest.raises(DataError, match="epoch 1 comes after one without end"):
        take(stream_feed(resumable(), batch_size=4), 1, 1)
    with pytest.raises(TypeError, match="a stream has no end; give n_batches"):
        len(StreamLoader(resumable(), 4))
    assert stream_feed(resumable(), batch_size=4).n_batches is None
    with pytest.raises(TypeError, match="expected a function of the first row's number; got a list"):
        StreamDataset(source_fn=[], data_id="a")


@pytest.mark.parametrize("known", [True, False])
def test_an_evaluation_reads_every_row_once(known: bool) -> None:
    feed = stream_feed(resumable(rows=10 if known else None, shuffle_buffer=4), batch_size=4, once=True)
    assert feed.n_batches == 3
    for _ in range(2):
        batches = list(feed.batches(0))
        assert [batch["mask"].tolist() for batch in batches] == [[1] * 4, [1] * 4, [1, 1, 0, 0]]
        assert [int(x) for batch in batches for x in batch["x"][batch["mask"] > 0, 0]] == list(range(10))
    with pytest.raises(DataError, match="can be read once only, and an evaluation reads it every time"):
        stream_feed(IterableDataset(source=rows(0, 9), data_id="a"), batch_size=4, once=True)


def test_wide_mapped_and_augmented_streams() -> None:
    third = IterableDataset(source=[(1 / 3, 1 / 3)] * 5, data_id="third")
    (batch,) = itertools.islice(stream_feed(third.widened(), batch_size=2).batches(), 1)
    assert batch["x"].dtype == np.float64
    assert batch["x"][0] == 1 / 3
    mapped = resumable(shuffle_buffer=3).map(lambda x, y: (x + 1, y + 2), on="pair", op_id="next")
    assert take(stream_feed(mapped, batch_size=4, shuffle=False), 3)[2] == [9, 10, 1, 2]
    assert (
        take(stream_feed(mapped, batch_size=4, seed=3), 1, 0, 7)
        == take(stream_feed(mapped, batch_size=4, seed=3), 8)[7:]
    )

    class Jitter(IterableDataset):
        """Adds noise."""

        def augment(self, batch: Any, rng: np.random.Generator) -> Any:
            return batch | {"x": batch["x"] + rng.normal(size=batch["x"].shape).astype(np.float32)}

    def noisy(start: int) -> np.ndarray:
        data = Jitter(source=lambda: rows(0, 10), data_id="a")
        return next(stream_feed(data, batch_size=4, n_batches=9, seed=2).batches(0, start))["x"]

    assert noisy(2).tobytes() == noisy(2).tobytes()
    live = stream_feed(Jitter(source=lambda: rows(0, 10), data_id="a"), batch_size=4, n_batches=9, seed=2)
    assert list(live.batches(0))[2]["x"].tobytes() == noisy(2).tobytes()
    assert abs(noisy(2)[:2, 0] - [8, 9]).max() < 5


def test_a_dataset_with_row_numbers_streams_too() -> None:
    data = ArrayDataset(np.arange(10.0)[:, None], 2 * np.arange(10.0))
    assert take(stream_feed(data, batch_size=4), 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
