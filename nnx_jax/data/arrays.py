"""Datasets from arrays: numpy values given in Python, and `.npz` files."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from typing import Annotated, Any, Self

import numpy as np
from pydantic import Field, PrivateAttr

from nnx_jax.core.errors import ConfigError, DataError
from nnx_jax.core.hashing import hash_arrays
from nnx_jax.core.registry import register
from nnx_jax.data.dataset import InMemoryDataset, TrainingDataset, require_columns
from nnx_jax.data.dtypes import Columns, settle_columns

Classes = Annotated[int, Field(ge=1)] | None


@register("arrays")
class ArrayDataset(InMemoryDataset):
    """Rows from numpy arrays: `ArrayDataset(x, y)` or `ArrayDataset({"x": x, "y": y, "weight": w})`.

    Every array has one entry a row, [N, ...]. Dtypes are settled as in `dtypes.settle` (float64 -> float32, int64 ->
    int32 with a range check, uint8 inputs stay uint8). The values are copied, so that a later change in place cannot
    make the hash lie. (Training in float64 takes those of float64 anew, and refuses if they were changed.) Integer
    targets [N] are class labels, `n_classes` is `max + 1` unless given.

    The arrays are not part of `state()`, their digest is: two datasets of equal rows are equal, and a state cannot be
    turned back into rows (`ConfigError`); use `npz` where a YAML file must name the data.

    Raises:
        DataError: unequal lengths, objects or text, a value that does not fit the narrower dtype, no column.
    """

    digest: str
    n_classes: Classes = None
    _exact: dict[str, Any] = PrivateAttr(default_factory=dict)
    _narrow: Any = PrivateAttr(default=None)

    def __new__(cls, /, *args: Any, **columns: Any) -> ArrayDataset:
        """Allow the arrays by position, which other specifications do not."""
        return super().__new__(cls)

    def __init__(
        self, x: Any = None, y: Any = None, /, *, n_classes: int | None = None, digest: str = "", **columns: Any
    ) -> None:
        given = dict(x) if isinstance(x, Mapping) else {} if x is None else {"x": x}
        given |= ({} if y is None else {"y": y}) | columns
        if not given and digest:
            raise ConfigError("an `arrays` dataset is given in Python (its rows are not stored); in YAML use kind: npz")
        settled = settle_columns(given, type(self).__name__)
        settled = {
            name: np.array(a, order="C") if a is given[name] or a.base is not None else a for name, a in settled.items()
        }
        fields = {"digest": hash_arrays(settled), "n_classes": n_classes}
        super().__init__(**fields)
        self._kept.update(given=settled, digest=self.digest)  # large arrays are hashed once
        long = {name: np.asarray(value) for name, value in given.items() if settled[name].dtype == np.float32}
        self._exact = {name: array for name, array in long.items() if array.dtype.itemsize > 4}

    def load(self) -> Columns:
        """Return the arrays the constructor was given."""
        return self._kept.pop("given")

    def widened(self, wide: bool = True) -> Self:
        """See `TrainingDataset.widened`.

        Raises:
            DataError: an array was changed in place since it was given.
        """
        if wide == self._wide:
            return self
        if self._narrow is not None:
            return self._narrow
        columns = {**self._loaded(), **{n: np.array(c, np.float64, order="C") for n, c in self._exact.items()}}
        where = type(self).__name__
        if hash_arrays(settle_columns(columns, where)) != self.digest:
            raise DataError(
                f"{where}: an array was changed in place since the dataset was made of it, and float64 takes it as it "
                "is; make the dataset anew"
            )
        other = super().widened(wide)
        other._set("digest", hash_arrays(columns))
        other._kept, other._narrow = {"given": columns, "digest": other.digest}, self
        return other


@register("npz")
class NpzDataset(InMemoryDataset):
    """Rows from a `.npz` file (`numpy.savez(path, x=..., y=...)`).

    Args:
        path: the file. Object arrays and pickles in it are refused, never run.
        x: name of the input array in the file.
        y: name of the target array, or null for data without targets.
        n_classes: number of classes; `max + 1` of integer targets when left out.
    """

    path: str
    x: str = "x"
    y: str | None = "y"
    n_classes: Classes = None

    def load(self) -> Columns:
        """Read the columns."""
        return _read_npz(self.path, {"x": self.x} | ({} if self.y is None else {"y": self.y}))


def _read_npz(path: str, wanted: Mapping[str, str]) -> Columns:
    try:
        with open(path, "rb") as file:  # numpy does not close a file it cannot read
            stored = np.load(file, allow_pickle=False)
            if isinstance(stored, np.ndarray):
                raise DataError(f"{path} holds one bare array; write named ones with numpy.savez(path, x=..., y=...)")
            require_columns(tuple(wanted.values()), tuple(stored.files), path)
            return {name: stored[key] for name, key in wanted.items()}
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is not an .npz of plain arrays (no pickle or object is read): {error}") from error


def as_dataset(data: Any) -> TrainingDataset:
    """Return `data` as a dataset: one already, `{name: array}`, `(x, y)` arrays, or a bare input array.

    Raises:
        DataError: anything else.
    """
    if isinstance(data, TrainingDataset):
        return data
    if isinstance(data, Mapping):
        return ArrayDataset(data)
    if isinstance(data, tuple) and len(data) == 2 and all(hasattr(part, "shape") for part in data):
        return ArrayDataset(*data)
    if hasattr(data, "shape") and hasattr(data, "dtype"):
        return ArrayDataset(data)
    raise DataError(
        f"expected a dataset, a dict of arrays, an (x, y) pair of arrays or an array, found {type(data).__name__}"
    )
