"""Batches made ready ahead: the same ones, errors where they belong, exact positions, and the time that was waited."""

from __future__ import annotations

import gc
import io
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnx_jax.core.errors import DataError
from nnx_jax.data import ArrayDataset, Feed, LoaderFeed, TrainingDataset
from nnx_jax.engines.placement import Placement
from nnx_jax.engines.reading import Ahead, Reader
from nnx_jax.loop.callbacks import Callback
from nnx_jax.loop.progress import PlainProgress
from nnx_jax.params.data import NNDataParams
from tests.spmd.toy import BATCH, ROWS, Linear, arrays, columns, fit, history, same


def rows(count: int = 20) -> Feed:
    return Feed(ArrayDataset(np.arange(count)), batch_size=2, seed=3)


def read(reader: Reader, epoch: int, start: int = 0, count: int = 10) -> list[list[int]]:
    return [reader.read(epoch, index).batch["x"].tolist() for index in range(start, count)]


@pytest.mark.parametrize("places", [False, True])
@pytest.mark.parametrize("ahead", [1, 3, 50])
def test_a_thread_changes_no_batch(ahead: int, places: bool) -> None:
    """Whole epochs, and from any place on; a batch that was placed ahead holds the same rows."""
    plain, early = Reader(Placement(), rows()), Reader(Placement(), rows(), ahead=ahead, places=places)
    for epoch, start in [(0, 0), (1, 0), (1, 4), (0, 9), (0, 2)]:
        assert read(early, epoch, start) == read(plain, epoch, start)
    ready = early.read(0, 5)
    assert (ready.placed is not None) == places
    if places:
        assert np.array_equal(ready.placed["x"], ready.batch["x"])


def test_a_position_is_of_what_was_handed_over() -> None:
    """Not of what the thread has read: batches that wait are read again after a resume."""
    early = Reader(Placement(), rows(), ahead=5)
    early.read(1, 0)
    early.read(1, 1)
    assert early.state(1, 2) == {"epoch": 1, "next": 2}
    assert read(Reader(Placement(), rows()), 1, 2) == read(early, 1, 2)


def torn(bad: int) -> Iterator[np.ndarray]:
    for number in range(10):
        if number == bad:
            raise OSError(f"batch {number} is torn")
        yield np.full(2, number)


class Torn:
    """A loader that fails at one batch."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[np.ndarray]:
        return torn(6)


@pytest.mark.parametrize("ahead", [0, 2, 50])
def test_an_error_comes_out_at_its_batch(ahead: int) -> None:
    """Batches before it are served, however far ahead the thread was; after it one begins anew."""
    reader = Reader(Placement(), LoaderFeed(Torn()), ahead=ahead)
    assert read(reader, 0, 0, 6) == [[number] * 2 for number in range(6)]
    with pytest.raises(OSError, match="batch 6 is torn"):
        reader.read(0, 6)
    assert read(reader, 1, 0, 6) == [[number] * 2 for number in range(6)]


def test_an_epoch_that_ends_early() -> None:
    reader = Reader(Placement(), LoaderFeed([np.zeros(2)] * 3), ahead=2)
    read(reader, 0, 0, 3)
    with pytest.raises(DataError, match="epoch 0 ended after 3 batches"):
        reader.read(0, 3)


class Buffered:
    """A loader that fills one array again and again."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[np.ndarray]:
        buffer = np.zeros(2, np.float32)
        for number in range(100):
            buffer[:] = number
            self.given += 1
            yield buffer


def test_a_loader_may_fill_its_arrays_again() -> None:
    """And it is asked for no batch beyond the epoch's, which a longer one would miss in the next."""
    loader = Buffered()
    reader = Reader(Placement(), LoaderFeed(loader), ahead=4, places=True, length=8)
    found = [reader.read(0, index) for index in range(8)]
    assert [ready.batch["x"].tolist() for ready in found] == [[number] * 2 for number in range(8)]
    assert [ready.placed["x"].tolist() for ready in found] == [[number] * 2 for number in range(8)]
    assert loader.given == 8


def test_a_one_shot_iterator_is_not_read_ahead() -> None:
    """What a thread took from it would be lost at the end of the epoch."""
    assert Reader(Placement(), LoaderFeed(iter([np.zeros(2)])), ahead=4).ahead == 0


def threads() -> int:
    return sum(thread.name == "nnx_jax batches" for thread in threading.enumerate())


@pytest.mark.parametrize("way", ["close", "forget", "finish"])
def test_no_thread_is_left(way: str) -> None:
    """Closed, forgotten in the middle, or read to the end."""
    before = threads()
    ahead: Any = Ahead(iter(range(100)), 2)
    assert next(ahead) == 0
    assert threads() == before + 1
    if way == "close":
        ahead.close()
        with pytest.raises(StopIteration):
            next(ahead)
    elif way == "finish":
        assert list(ahead) == list(range(1, 100))
    del ahead
    gc.collect()
    end = time.monotonic() + 5
    while threads() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threads() == before


def test_a_forgotten_reader_ends_its_thread() -> None:
    before = threads()
    reader: Any = Reader(Placement(), rows(), ahead=2)
    reader.read(0, 0)
    del reader
    gc.collect()
    end = time.monotonic() + 5
    while threads() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threads() == before


# -- in a run --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dispatch", "mesh"), [("step", {}), ("span", {}), ("step", {"data": 4})])
def test_prefetch_changes_no_bit_of_a_run(tmp_path: Path, dispatch: str, mesh: dict[str, int]) -> None:
    """Weights, records and the run's name; no second compile either."""
    held: dict[str, Any] = {"data": {"train": Slow(), "val": None}, "dispatch": dispatch, "mesh": mesh, "n_epochs": 2}
    plain = fit(tmp_path / "plain", **held)
    early = fit(tmp_path / "early", **{**held, "data": {**held["data"], "prefetch": 3}})
    assert plain.id == early.id
    assert same(arrays(plain), arrays(early))
    assert history(plain) == history(early)


def test_prefetch_is_no_part_of_the_identity() -> None:
    data: dict[str, Any] = {"train": ArrayDataset(columns()), "batch_size": 4}
    assert NNDataParams(**data).identity(0) == NNDataParams(**data, prefetch=7).identity(0)
    assert NNDataParams(**data, prefetch=7).state(environment=True)["prefetch"] == 7


class Slow(TrainingDataset):
    """The toy's rows, not in memory, each batch after a while."""

    pause: float = 0.0

    def __len__(self) -> int:
        return ROWS

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        if len(indices) == BATCH:
            time.sleep(self.pause)
        return {name: column[indices] for name, column in columns().items()}


class Noting(Callback):
    """Keeps what it was told of the wait for data."""

    def __init__(self) -> None:
        self.waited: list[float] = []

    def on_epoch_end(self, ctx: Any) -> None:
        self.waited.append(ctx.data_seconds)


def test_a_slow_loader_shows(tmp_path: Path) -> None:
    """Five batches of 0.3 s an epoch: callbacks see 1.5 s an epoch, and the progress line names it."""
    noting, stream = Noting(), io.StringIO()
    fit(
        tmp_path, module=Linear(), data={"train": Slow(pause=0.3), "val": None}, callbacks=[noting], n_epochs=2,
        progress=PlainProgress(stream),
    )  # fmt: skip
    assert 1.5 <= noting.waited[0] < noting.waited[1]
    assert noting.waited[1] >= 3.0
    assert re.search(r"epoch 2/2 .* \d+\.\d s, data \d+\.\d s$", stream.getvalue(), re.MULTILINE)


def test_data_in_memory_does_not(tmp_path: Path) -> None:
    stream, noting = io.StringIO(), Noting()
    fit(tmp_path, callbacks=[noting], progress=PlainProgress(stream))
    assert noting.waited == [0.0]
    assert ", data" not in stream.getvalue()
