"""Splits, map and |: what is made of a dataset, and what it says of itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnx_jax.core.errors import ConfigError, DataError
from nnx_jax.core.operator import Operator, Sequential
from nnx_jax.core.registry import register
from nnx_jax.data import (
    ArrayDataset,
    DigitsDataset,
    Feed,
    IterableDataset,
    PartitionedDataset,
    SplitDataset,
    StreamingDataset,
    TrainingDataset,
    tenths,
)
from nnx_jax.data.identity import identity_of, object_hash

X, Y = np.arange(60.0).reshape(20, 3), np.arange(20)


@register("shift_for_tests")
class Shift(Operator):
    """x + by."""

    by: float = 0.0

    def _apply(self, x: Any) -> Any:
        return x + self.by


class Ramp(StreamingDataset):
    """Pairs (i, 2 i)."""

    rows: int = 3

    def __iter__(self) -> Iterator[tuple[np.ndarray, ...]]:
        for row in range(self.rows):
            yield np.array([row]), np.array([2.0 * row])


class Nothing(StreamingDataset):
    """Does not say what its rows are."""


def test_a_dataset_is_iterated_and_not_called() -> None:
    """Calling one says what to do instead (pipekit:B1)."""
    with pytest.raises(TypeError, match=r"ArrayDataset is not called, it is iterated: `for x, y in dataset`"):
        ArrayDataset(X, Y)()
    x, y = next(iter(ArrayDataset(X, Y)))
    np.testing.assert_array_equal(x, [0, 1, 2])
    assert y == 0


def test_a_dataset_cannot_stand_in_a_sequence() -> None:
    for make in (lambda: Sequential([ArrayDataset(X, Y), Shift()]), lambda: Shift() | ArrayDataset(X, Y)):
        with pytest.raises(TypeError, match=r"a dataset is iterated, not called; .* dataset.map\(op\)"):
            make()


def test_a_class_that_does_not_say_what_its_rows_are() -> None:
    """(pipekit:B2) a stream needs __iter__; a dataset with row numbers cannot even be made without its methods."""
    with pytest.raises(NotImplementedError, match="Nothing must define __iter__"):
        iter(Nothing())

    class NoRows(TrainingDataset):
        """Lacks both."""

    with pytest.raises(TypeError, match="__len__.*take"):
        NoRows()  # type: ignore[abstract]


def test_split_names_are_checked_everywhere() -> None:
    """(pipekit:B3) at construction and in with_split, for datasets with a split of their own and without."""
    with pytest.raises(ValueError, match=r"split: got 'invalid'"):
        Ramp(split="invalid")  # type: ignore[arg-type]
    for dataset in (Ramp(), ArrayDataset(X, Y), DigitsDataset()):
        with pytest.raises(ValueError, match="split must be one of train, val, test, found 'invalid'"):
            dataset.with_split("invalid")


def test_another_split_is_another_dataset() -> None:
    """(pipekit:B4)"""
    train = Ramp(seed=7)
    val: Any = train.with_split("val")
    assert (val.seed, val.split, train.split) == (7, "val", "train")
    assert val is not train
    assert len({part.content_hash() for part in (train, val, train.with_split("test"))}) == 3
    assert len({part.content_hash() for part in ArrayDataset(X, Y).splits()}) == 3


def test_the_default_hash_is_of_the_configuration() -> None:
    """(pipekit:B5) also in another process."""
    assert Ramp(rows=3).content_hash() == Ramp().content_hash()
    assert len({Ramp(rows=3).content_hash(), Ramp(rows=4).content_hash(), Nothing().content_hash()}) == 3
    source = IterableDataset(source=list, data_id="a", seed=3)
    program = "from nnx_jax.data import *; print(IterableDataset(source=list, data_id='a', seed=3).content_hash())"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == source.content_hash()


@pytest.mark.parametrize("rows", [0, 1, 3, 7, 10, 20, 101])
@pytest.mark.parametrize("seed", [None, 5])
def test_three_parts_are_the_whole(rows: int, seed: int | None) -> None:
    """Every row is in exactly one of the three splits (pipekit:B26)."""
    data = ArrayDataset(np.arange(rows, dtype=np.float32)[:, None])
    parts = data.splits(seed=seed)
    found = [int(x[0]) for part in parts for (x,) in part]
    assert sorted(found) == list(range(rows))
    assert [len(part) for part in parts] == [len(tenths(rows, split)) for split in ("train", "val", "test")]
    if seed is None:
        assert found == list(range(rows))
    elif rows > 7:
        assert found != list(range(rows))
        assert found == [int(x[0]) for part in data.splits(seed=seed) for (x,) in part]


def test_a_part_of_a_dataset_is_a_dataset() -> None:
    data = ArrayDataset(X, Y)
    val: Any = data.with_split("val")
    assert isinstance(val, SplitDataset)
    assert val.arrays()["y"].tolist() == [16, 17]
    assert val.info["n_classes"] == 20  # of the whole: a class that one part lacks is still a class
    assert val.with_split("test").arrays()["y"].tolist() == [18, 19]
    assert len(next(Feed(val, batch_size=2).batches())["x"]) == 2
    assert data.widened().with_split("val").take(np.array([0]))["x"].dtype == np.float64
    assert val.widened().wide
    assert val.widened().widened(False) == val
    assert TrainingDataset.from_state({"kind": "split", "source": "digits", "split": "test"}) == SplitDataset(
        source=DigitsDataset(), split="test"
    )
    with pytest.raises(ConfigError, match="the rows of Ramp have no numbers"):
        Ramp().splits()


def test_negative_indices_and_the_end() -> None:
    data = ArrayDataset(X, Y)
    assert data[-1][1] == 19
    assert data[0][1] == 0
    with pytest.raises(IndexError):
        data[20]


def test_map_and_the_or_operator() -> None:
    data = ArrayDataset(X, Y)
    mapped = data | Shift(by=1.0)
    assert mapped == data.map(Shift(by=1.0))
    np.testing.assert_array_equal(mapped[3][0], X[3] + 1)
    assert mapped[3][1] == 3
    twice = mapped | (Shift(by=1.0) | Shift(by=2.0))
    np.testing.assert_array_equal(twice.take(np.array([2, 0]))["x"], X[[2, 0]] + 4)
    assert mapped.info == data.info
    assert (
        len({d.content_hash() for d in (data, mapped, twice, data | Shift(by=2.0), data.map(Shift(by=1.0), on="y"))})
        == 5
    )
    assert TrainingDataset.from_state({"kind": "map", "source": "digits", "op": "shift_for_tests"})[0][0].shape == (64,)
    back = TrainingDataset.from_state(DigitsDataset().map(Shift(by=2.0)).state())
    assert back == DigitsDataset().map(Shift(by=2.0))
    assert back.content_hash() == DigitsDataset().map(Shift(by=2.0)).content_hash()


def test_map_of_targets_pairs_batches_and_parts() -> None:
    data = ArrayDataset(X, Y)
    assert data.map(Shift(by=0.5), on="y")[2][1] == 2.5
    assert "n_classes" not in data.map(Shift(by=0.5), on="y").info
    swapped = data.map(lambda x, y: (np.array([y]), x), on="pair", op_id="swap")
    x, y = swapped[4]
    assert (x.tolist(), y.tolist()) == ([4], X[4].tolist())
    assert swapped.info == {"input_shape": (1,), "input_dim": 1, "target_shape": (3,), "output_dim": 3}
    sums = data.map(lambda x: x.sum(axis=-1, keepdims=True), batched=True, op_id="sum")
    np.testing.assert_array_equal(sums.take(np.arange(2))["x"], X[:2].sum(axis=1, keepdims=True))
    val = sums.with_split("val")
    assert [float(x[0]) for x, _ in val] == [float(X[row].sum()) for row in (16, 17)]
    assert sums.take(np.arange(0))["x"].shape == (0, 1)
    assert [float(x[0]) for x, _ in Ramp().map(Shift(by=1.0))] == [1, 2, 3]


def test_what_cannot_be_mapped() -> None:
    data = ArrayDataset(X, Y)
    with pytest.raises(ValueError, match=r"<lambda> is no name that finds .*; or name what it does with op_id"):
        data.map(lambda x: x)
    with pytest.raises(TypeError, match="a dataset cannot come after another one"):
        data | data
    with pytest.raises(TypeError, match="unsupported operand"):
        data | 5
    with pytest.raises(ValueError, match="a int cannot be applied to rows"):
        data.map(5)
    ragged = data.map(lambda x: np.zeros(1 + int(x[0] > 9)), op_id="ragged")
    with pytest.raises(DataError, match=r"gave shape \(2,\) for row 4, and \(1,\) for row 2"):
        ragged.take(np.array([2, 3, 4]))
    with pytest.raises(DataError, match=r"gave x of shape \(3,\) for 20 rows"):
        data.map(lambda x: x.sum(axis=0), batched=True, op_id="s").take(np.arange(20))
    with pytest.raises(DataError, match=r"gave ndarray for row 0; on='pair' needs \(x, y\)"):
        data.map(lambda x, y: x, on="pair", op_id="p").take(np.arange(1))

    class Noisy(ArrayDataset):
        """Augments."""

        def augment(self, batch: Any, rng: Any) -> Any:
            return batch

    with pytest.raises(ValueError, match="Noisy augments its batches, which would come after x was mapped"):
        Noisy(X, Y).map(Shift())
    assert Noisy(X, Y).with_split("val").augments


class Holder:
    """Any object."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


class Slotted:
    """Keeps its values in slots."""

    __slots__ = ("a",)

    def __init__(self, a: Any) -> None:
        self.a = a


def test_what_an_object_holds_is_its_identity() -> None:
    values: list[Any] = [
        1, 1.0, True, None, "1", b"1", 1j, float("nan"), float("inf"), [1], {"a": 1}, {"a": 2}, {1}, {2},
        np.float32(1), np.ones(2), np.ones(3), np.ones(2, np.float32), np.tanh, np.sin, len, np,
        Holder(a=1), Holder(a=2), Holder(_a=1), Holder(a=Holder(a=1)), Holder(a=np.ones(2)), Slotted(1), Slotted(2),
        Holder, Slotted, Shift(by=1.0), Shift(by=2.0), Holder(a=1).__init__, Holder(a=2).__init__,
        Path("a"), object_hash, partial(object_hash, 1), partial(object_hash, 2), slice(1), slice(2), np.dtype("f4"),
    ]  # fmt: skip
    hashes = [object_hash(value) for value in values]
    assert len(set(hashes)) == len(values)
    assert hashes == [object_hash(value) for value in values]


def test_a_compiled_function_is_the_function() -> None:
    import jax

    assert object_hash(jax.jit(jax.numpy.tanh)) == object_hash(jax.numpy.tanh)
    assert object_hash(jax.nn.relu) != object_hash(jax.numpy.tanh)
    for other in (jax.vmap(jax.numpy.tanh), jax.grad(jax.numpy.tanh)):
        with pytest.raises(DataError, match="is no name that finds this very function"):
            object_hash(other)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (Holder(f=lambda: 0), r"Holder\.f: .*<lambda> is no name that finds this very function"),
        (
            Holder(a=[1, Holder(g=np.random.default_rng(0))]),
            r"Holder\.a\[1\]\.g is a numpy.random._generator.Generator",
        ),
        (Holder(a=(i for i in range(3))), r"Holder\.a"),
        (Holder(a=np.array([object()])), "cannot be hashed"),
        (Holder(f=wraps(object_hash)(lambda x: x)), r"identity\.object_hash is no name that finds this very function"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(value: Any, told: str) -> None:
    with pytest.raises(DataError, match=told):
        identity_of(value)


def test_a_circle_is_refused() -> None:
    holder = Holder()
    holder.me = holder
    with pytest.raises(DataError, match="holds itself"):
        identity_of(holder)


def test_a_partitioned_dataset_tells_parts_given_in_python_by_their_content() -> None:
    class Made(PartitionedDataset):
        """Rows of an object."""

        parts = ("holder",)
        holder: Any = None

        def __len__(self) -> int:
            return 1

        def take(self, indices: np.ndarray) -> Any:
            return {"x": np.zeros((len(indices), 1))}

    one = Made(holder=Holder(a=1))
    assert one == Made(holder=Holder(a=1))
    assert one != Made(holder=Holder(a=2))
    assert one.content_hash() != Made(holder=Holder(a=2)).content_hash()
    assert one.state()["holder"]["python"].endswith("Holder")
