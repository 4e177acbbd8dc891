"""Rows that come one after another, and whatever yields pairs as a dataset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grain
import numpy as np
import pytest

from nnx_jax.core.errors import ConfigError, DataError
from nnx_jax.data import (
    ArrayDataset,
    Feed,
    GrainDataset,
    IterableDataset,
    SequenceDataset,
    StreamingDataset,
    TrainingDataset,
    adapt,
)

PAIRS = [(np.array([float(i), -float(i)]), 2 * i) for i in range(7)]


def pairs() -> Iterator[Any]:
    return iter(PAIRS)


def firsts(dataset: Any) -> list[float]:
    return [float(x[0]) for x, *_ in dataset]


def test_what_is_refused() -> None:
    """(pipekit:B6)"""
    with pytest.raises(ValueError, match="data_id"):
        IterableDataset(source=pairs, data_id="")
    with pytest.raises(ValueError, match="data_id"):
        IterableDataset(source=pairs)  # type: ignore[call-arg]
    for source in (42, "text", None):
        with pytest.raises(TypeError, match="expected an iterable of rows, or a function that returns one"):
            IterableDataset(source=source, data_id="a")


def test_a_function_is_called_for_every_pass() -> None:
    """Two passes give the same; an iterator has one (pipekit:B6)."""
    data = IterableDataset(source=pairs, data_id="pairs")
    assert firsts(data) == firsts(data) == [0, 1, 2, 3, 4, 5, 6]
    assert [int(y) for _, y in data] == [0, 2, 4, 6, 8, 10, 12]
    once = IterableDataset(source=pairs(), data_id="pairs")
    mapped = once.with_split("val").map(lambda x: x * 2, op_id="twice")
    assert mapped.columns["x"].shape == (2,)
    assert once.columns == data.columns  # looking at the first row does not lose it
    assert firsts(mapped) == [0, 2, 4, 6, 8, 10, 12]  # nor does a copy lose what another one has looked at
    assert once.columns == data.columns
    with pytest.raises(DataError, match=r"'pairs': its source is an iterator, which was read before"):
        firsts(once)
    assert once == data
    begun = IterableDataset(source=pairs(), data_id="pairs")
    rest = iter(begun)
    assert float(next(rest)[0][0]) == 0
    assert begun.columns == data.columns  # nor does looking in the middle of the pass take a row from it
    assert firsts(rest) == [1, 2, 3, 4, 5, 6]
    assert data.info == {"input_shape": (2,), "input_dim": 2, "target_shape": ()}


def test_identity_is_the_name_the_seed_and_the_split() -> None:
    base = IterableDataset(source=pairs, data_id="a")
    others = [base.replace(data_id="b"), base.replace(seed=1), base.with_split("val"), base.replace(batched=True)]
    assert len({data.content_hash() for data in (base, *others)}) == 5
    assert base.content_hash() == IterableDataset(source=PAIRS, data_id="a").content_hash()
    with pytest.raises(ConfigError, match="source"):
        TrainingDataset.from_state(base.state())


def test_rows_have_no_numbers() -> None:
    data = IterableDataset(source=pairs, data_id="pairs")
    assert not data.indexable
    assert data
    for asked in (
        lambda: len(data),
        lambda: data.take(np.arange(1)),
        lambda: data[0],
        lambda: Feed(data, batch_size=2),
    ):
        with pytest.raises(TypeError, match="not indexable"):
            asked()


def test_batches_of_any_size_are_rows() -> None:
    batches = [{"x": np.arange(3.0)[:, None], "y": np.arange(3)}, {"x": np.arange(3.0, 4)[:, None], "y": np.array([3])}]
    data = IterableDataset(source=batches, data_id="batches", batched=True)
    assert [(float(x[0]), int(y)) for x, y in data] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert [float(x) for chunk in data.chunks(2) for x in chunk["x"][:, 0]] == [2, 3]
    bad = IterableDataset(source=[{"x": np.zeros((2, 1)), "y": np.zeros(3)}], data_id="bad", batched=True)
    with pytest.raises(DataError, match=r"item 0 is no batch; .* x \(2, 1\), y \(3,\)"):
        list(bad)
    with pytest.raises(DataError, match="item 1 is str"):
        list(IterableDataset(source=[(1, 2), "no"], data_id="bad"))
    for source in (list, iter([])):
        with pytest.raises(DataError, match="gave no row"):
            IterableDataset(source=source, data_id="empty").columns  # noqa: B018


class Length:
    """Rows by number."""

    def __init__(self, rows: int = 7, odd: int | None = None) -> None:
        self.rows, self.odd = rows, odd

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Any:
        return np.zeros(2) if index == self.odd else PAIRS[index]


def sources() -> dict[str, Any]:
    x, y = np.stack([x for x, _ in PAIRS]), np.array([y for _, y in PAIRS])
    mapped = grain.MapDataset.source(PAIRS)
    return {
        "list of pairs": PAIRS,
        "tuple of arrays": (x, y),
        "dict of arrays": {"x": x, "y": y},
        "list of dicts": [{"x": x, "y": y} for x, y in PAIRS],
        "list of dict batches": ([{"x": x[:4], "y": y[:4]}, {"x": x[4:], "y": y[4:]}], {"batched": True}),
        "grain map": mapped,
        "grain iter": (mapped.to_iter_dataset(), {"data_id": "pairs"}),
        "grain iter of batches": (mapped.to_iter_dataset().batch(4), {"data_id": "pairs", "batched": True}),
        "sequence": Length(),
        "function": (pairs, {"data_id": "pairs"}),
        "generator": (pairs(), {"data_id": "pairs"}),
        "dataset": ArrayDataset(x, y),
    }


@pytest.mark.parametrize("name", list(sources()))
def test_anything_that_yields_pairs(name: str) -> None:
    """The same seven rows in twelve forms (pipekit:B24)."""
    source = sources()[name]
    given, options = source if isinstance(source, tuple) and isinstance(source[1], dict) else (source, {})
    data = adapt(given, **options)
    rows = list(data)
    for (x, y), (wanted_x, wanted_y) in zip(rows, PAIRS, strict=True):
        np.testing.assert_array_equal(x, wanted_x)
        assert y == wanted_y
    assert len(data.content_hash()) == 64
    assert data.indexable == ("data_id" not in options)
    if data.indexable:  # the content is the identity
        assert data.content_hash() != adapt([*PAIRS[:-1], PAIRS[0]]).content_hash()
        assert [int(y) for y in data.take(np.array([3, -1]))["y"]] == [6, 12]
        assert len(list(Feed(data, batch_size=4).batches(0))) == 2


def test_what_cannot_be_adapted() -> None:
    for source in (pairs, pairs()):
        with pytest.raises(ConfigError, match="cannot be hashed; give data_id, a name of the data"):
            adapt(source)
    with pytest.raises(TypeError, match="expected an iterable"):
        adapt(42)
    with pytest.raises(DataError, match="an empty list has no rows"):
        adapt([])
    with pytest.raises(DataError, match=r"the list: row 2 has shapes"):
        adapt([*PAIRS[:2], (np.zeros(3), 1)])
    with pytest.raises(DataError, match=r"the list: item 1 has rows of shapes"):
        adapt([{"x": np.zeros((2, 1))}, {"x": np.zeros((2, 2))}], batched=True)


def test_rows_of_a_sequence() -> None:
    data = SequenceDataset(source=Length())
    assert data.content_hash() == SequenceDataset(source=PAIRS).content_hash()
    assert SequenceDataset(source=Length(), data_id="a").content_hash() != data.content_hash()
    assert SequenceDataset(source=Length(), data_id="a") != SequenceDataset(source=Length(), data_id="b")
    assert [len(part) for part in data.splits()] == [5, 1, 1]
    assert data.take(np.arange(0))["x"].shape == (0, 2)
    with pytest.raises(DataError, match="SequenceDataset: row 4 has shapes"):
        SequenceDataset(source=Length(odd=4)).content_hash()
    for source in (42, {"x": 1}, "text"):
        with pytest.raises(TypeError, match="expected an object with a length and rows by number"):
            SequenceDataset(source=source)


def test_grain_datasets() -> None:
    mapped = grain.MapDataset.source(PAIRS)
    data = GrainDataset(source=mapped.map(lambda row: (row[0] * 2, row[1])))
    assert data.indexable
    assert firsts(data) == [0, 2, 4, 6, 8, 10, 12]
    assert data.content_hash() != GrainDataset(source=mapped).content_hash()
    assert len(data.with_split("train")) == 5
    assert len(Feed(data, batch_size=3).signature()) == 3
    stream = GrainDataset(source=mapped.to_iter_dataset(), data_id="a")
    assert not stream.indexable
    assert firsts(stream) == firsts(stream) == [0, 1, 2, 3, 4, 5, 6]
    assert [float(chunk["x"][0, 0]) for chunk in stream.chunks(5)] == [5, 6]
    assert stream.with_split("val").content_hash() != stream.content_hash()
    with pytest.raises(TypeError, match="not indexable"):
        len(stream)
    with pytest.raises(ConfigError, match="cannot be hashed; give a name"):
        GrainDataset(source=mapped.to_iter_dataset())
    with pytest.raises(TypeError, match="expected a grain MapDataset or IterDataset; got a int"):
        GrainDataset(source=5)
    with pytest.raises(ConfigError, match="give it before `batch`"):
        GrainDataset(source=mapped.batch(2), batched=True)
    with pytest.raises(DataError, match="row 0 is None, as of a source that filters"):
        list(GrainDataset(source=mapped.filter(lambda row: row[1] > 4)))
    with pytest.raises(DataError, match="has no end; give it before it is repeated"):
        len(GrainDataset(source=mapped.repeat()))


def test_a_stream_of_ones_own() -> None:
    class Squares(StreamingDataset):
        """Pairs (i, i**2)."""

        rows: int = 4

        def __iter__(self) -> Iterator[Any]:
            return ((np.array([i]), i**2) for i in range(self.rows))

    data = Squares()
    assert [int(y) for _, y in data] == [0, 1, 4, 9]
    assert [int(chunk["y"][0]) for chunk in data.chunks(2)] == [4, 9]
    assert data.content_hash() != Squares(rows=5).content_hash()
    assert not list(data.chunks(9))
