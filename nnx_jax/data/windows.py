"""Windows over a long array, cut lazily: some steps in, some steps out, and no window across two splits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field, PrivateAttr

from nnx_jax.core.errors import DataError, OperatorTypeError
from nnx_jax.core.hashing import content_hash, hash_array
from nnx_jax.core.registry import register
from nnx_jax.core.spec import Spec
from nnx_jax.data.dataset import ColumnInfo, describe_row
from nnx_jax.data.dtypes import Columns
from nnx_jax.data.identity import Given, full_name
from nnx_jax.data.iterable import DataId
from nnx_jax.data.splits import PartitionedDataset, tenths

Steps = Annotated[int, Field(ge=1)]
_HASH_BYTES = 2**24  # read at a time


@register("windows")
class WindowDataset(PartitionedDataset):
    """Row i is a window over steps: x the `input_steps` from an origin on, y the `target_steps` after `lead` more.

    The origins are 0, stride, 2 * stride ... as long as the whole window fits. They are cut into three parts in order,
    as `splits.tenths` says. A window reaches `input_steps + lead + target_steps - 1` steps beyond its origin, so the
    last origins of train and val would reach into the next part: they are left out (the guard). A part that is shorter
    than its guard has no rows.

    Args:
        data: array [T, ...] with slices by step: numpy, memory-mapped, zarr, or the path of an `.npy` file, which is
            memory-mapped. What is not in memory stays where it is; a numpy array is copied.
        target: array [T, ...] that y is cut from; `data` when left out.
        input_steps, target_steps: steps of x [input_steps, ...] and y [target_steps, ...].
        lead: steps between the last of x and the first of y.
        stride: steps from one origin to the next.
        split_guard: steps before the next part in which no origin lies, at least the reach of a window, which is what
            null means. More keeps the parts further apart.
        data_id: a name of the data for the hash; without one the arrays are read for it, once.
        split: train, val or test.

    Raises:
        OperatorTypeError: (a TypeError) `data` that is no array.
        ConfigError: a guard that windows would cross.
        DataError: a file that cannot be read, data and target of different length.
    """

    parts: ClassVar[tuple[str, ...]] = ("data", "target")

    data: Given
    input_steps: Steps
    target_steps: Steps = 1
    target: Given = None
    lead: Annotated[int, Field(ge=0)] = 0
    stride: Steps = 1
    split_guard: Annotated[int, Field(ge=0)] | None = None
    data_id: DataId | None = None

    _kept: dict[str, Any] = PrivateAttr(default_factory=dict)

    def _complete(self) -> None:
        """Copy arrays that could be changed in place later: the hash would lie."""
        for name in self.parts:
            array = getattr(self, name)
            if isinstance(array, np.ndarray) and array.flags.writeable:
                array = array.copy()
                array.setflags(write=False)
                self._set(name, array)

    def problems(self) -> Iterator[tuple[str, str]]:
        """The rules about several fields."""
        yield from super().problems()
        for name in self.parts:
            value = getattr(self, name)
            sliced = hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "__getitem__")
            if not (isinstance(value, str) or (sliced and len(value.shape))) and (value is not None or name == "data"):
                found = type(value).__name__
                raise OperatorTypeError(f"expected an array [T, ...] or the path of an .npy; got a {found}", path=name)
        if self.split_guard is not None and self.split_guard < self.reach:
            yield (
                "split_guard",
                f"{self.split_guard} steps are fewer than a window reaches, {self.reach}, so windows would cross into "
                "the next split; give more, or null",
            )

    @property
    def reach(self) -> int:
        """Steps from the origin of a window to its last step."""
        return self.input_steps + self.lead + self.target_steps - 1

    @property
    def origins(self) -> np.ndarray:
        """First steps of the windows of this split, int64 [n]."""
        if "origins" not in self._kept:
            every = np.arange(0, max(self._steps() - self.reach, 0), self.stride)
            place = tenths(len(every), self.split)
            mine = every[place.start : place.stop]
            if place.stop < len(every):  # another split follows, and begins with the window at its first origin
                guard = self.reach if self.split_guard is None else self.split_guard
                mine = mine[mine + guard < every[place.stop]]
            self._kept["origins"] = mine
        return self._kept["origins"]

    def __len__(self) -> int:
        """Return the number of windows of this split."""
        return len(self.origins)

    def take(self, indices: np.ndarray) -> Columns:
        """Return the windows `indices` [B]: x [B, input_steps, ...] and y [B, target_steps, ...]."""
        origins = self.origins[indices]
        data, target = self._arrays()
        return {
            "x": _windows(data, origins, self.input_steps),
            "y": _windows(target, origins + self.input_steps + self.lead, self.target_steps),
        }

    @property
    def columns(self) -> dict[str, ColumnInfo]:
        """Name -> shape and dtype of one window; also of a split without windows."""
        data, target = self._arrays()
        return {
            "x": ColumnInfo((self.input_steps, *data.shape[1:]), np.dtype(data.dtype)),
            "y": ColumnInfo((self.target_steps, *target.shape[1:]), np.dtype(target.dtype)),
        }

    @property
    def info(self) -> dict[str, Any]:
        """What a network needs to know of sizes."""
        return describe_row(self.columns)

    def with_split(self, split: str) -> WindowDataset:
        """Return the windows of another split over the same arrays."""
        other: Any = super().with_split(split)
        other._kept.update({name: value for name, value in self._kept.items() if name != "origins"})
        return other

    def state(self, *, environment: bool = False) -> dict[str, Any]:
        """Return the plain values of this dataset; an array given in Python as its class and hash."""
        return Spec.state(self._shown(self._written_array), environment=environment)

    def content_hash(self) -> str:
        """Return 64 hex digits of the arrays (or their `data_id`), how windows are cut, and the split."""
        cut = Spec.state(self._shown(lambda array: None))
        cut.pop("data_id", None)
        data, target = self._arrays()
        arrays = self.data_id or [self._digest(data), self._digest(target)]
        return content_hash({"windows": cut, "arrays": arrays, "wide": self.wide})

    def _written_array(self, value: Any) -> Any:
        if value is None or isinstance(value, str):
            return value
        return {"python": full_name(type(value)), "digest": self.data_id or self._digest(value)}

    def _digest(self, array: Any) -> str:
        """Hash of an array, which is read once for it."""
        known = self._kept.setdefault("digests", {})
        if id(array) not in known:
            known[id(array)] = _digest(array)
        return known[id(array)]

    def _steps(self) -> int:
        return int(self._arrays()[0].shape[0])

    def _arrays(self) -> tuple[Any, Any]:
        if "arrays" not in self._kept:
            data = _opened(self.data)
            target = data if self.target is None else _opened(self.target)
            if data.shape[0] != target.shape[0]:
                raise DataError(f"windows: data has {data.shape[0]} steps, target has {target.shape[0]}")
            self._kept["arrays"] = data, target
        return self._kept["arrays"]


def _opened(array: Any) -> Any:
    if not isinstance(array, str):
        return array
    try:
        found = np.load(array, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{array} is not an .npy of numbers that can be mapped: {error}") from error
    if not isinstance(found, np.ndarray) or found.ndim == 0:
        raise DataError(f"{array} holds no array [T, ...]; write one with numpy.save")
    return found


def _windows(array: Any, starts: np.ndarray, steps: int) -> np.ndarray:
    """Steps `start` .. `start + steps - 1` of every start, [B, steps, ...]."""
    if isinstance(array, np.ndarray):
        return np.asarray(array[starts[:, None] + np.arange(steps)])
    if not len(starts):
        return np.zeros((0, steps, *array.shape[1:]), array.dtype)
    return np.stack([np.asarray(array[start : start + steps]) for start in map(int, starts)])


def _digest(array: Any) -> str:
    """Hash of an array, read some steps at a time."""
    steps = int(array.shape[0])
    row = int(np.prod(array.shape[1:], dtype=np.int64)) * np.dtype(array.dtype).itemsize
    many = max(1, _HASH_BYTES // max(row, 1))
    parts = [hash_array(np.asarray(array[start : start + many])) for start in range(0, steps, many)]
    return content_hash({"steps": steps, "parts": parts})
