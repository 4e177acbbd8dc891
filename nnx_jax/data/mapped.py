"""A dataset whose rows go through an operator on their way: `dataset.map(op)` and `dataset | op`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field

from nnx_jax.core.errors import ConfigError, DataError
from nnx_jax.core.hashing import content_hash
from nnx_jax.core.registry import register
from nnx_jax.core.spec import Spec
from nnx_jax.data.dataset import ColumnInfo, TrainingDataset, describe_row, require_columns
from nnx_jax.data.dtypes import Columns
from nnx_jax.data.identity import Part, identity_of, part_state
from nnx_jax.data.splits import with_source_widened

_TOLD_BY = {
    "x": ("input_shape", "input_dim", "vocab_size", "context_length"),
    "y": ("target_shape", "n_classes", "output_dim"),
}


@register("map")
class MappedDataset(TrainingDataset):
    """The rows of another dataset, each through an operator when it is asked for.

    Args:
        source: the dataset; its rows come in its order.
        op: what is called. It is to give the same for the same row every time: what it gives is not stored (a
            `CachedDataset` around this one does that).
        on: `x` (the default): `op(x)` takes the place of x. `y`: `op(y)` that of y. `pair`: `op(x, y)` gives the new
            `(x, y)`. Other columns pass through.
        batched: `op` takes whole batches, [B, ...] in and out; else it is called once a row.
        op_id: a name of what `op` does, for the hash, where `op` is a function that cannot be told from another one.

    Raises:
        ConfigError: `op` cannot be called; or its content cannot be told and there is no `op_id`.
        DataError: rows of different shapes, a batch with another number of rows, `augment` of the source.
    """

    source: TrainingDataset
    op: Part
    on: Literal["x", "y", "pair"] = "x"
    batched: bool = False
    op_id: str | None = Field(default=None, min_length=1)

    def problems(self) -> Iterator[tuple[str, str]]:
        """The rules about the operator."""
        if isinstance(self.op, TrainingDataset) or not callable(self.op):
            yield "op", f"a {type(self.op).__name__} cannot be applied to rows; give an operator or a function"
        elif self.op_id is None:
            try:
                identity_of(self.op)
            except (ConfigError, DataError) as error:
                yield "op", f"{error.args[0]}; or name what it does with op_id"
        if self.source.augments:
            name = type(self.source).__name__
            yield "source", f"{name} augments its batches, which would come after {self.on} was mapped; map first"

    def state(self, *, environment: bool = False) -> dict[str, Any]:
        """Return the plain values of this dataset; an operator given in Python as its class and hash, or its id."""
        shown = self.model_copy()
        shown._set("op", part_state(self.op) if self.op_id is None else {"python": self.op_id, "digest": ""})
        return Spec.state(shown, environment=environment)

    @property
    def indexable(self) -> bool:
        """As of the source."""
        return self.source.indexable

    @property
    def shuffle_buffer(self) -> int:
        """As of the source, where it is a stream."""
        return getattr(self.source, "shuffle_buffer", 0)

    @property
    def one_shot(self) -> bool:
        """As of the source."""
        return getattr(self.source, "one_shot", False)

    @property
    def pass_rows(self) -> int | None:
        """As of the source."""
        return getattr(self.source, "pass_rows", None)

    def __len__(self) -> int:
        """Return the number of rows of the source."""
        return len(self.source)

    def take(self, indices: np.ndarray) -> Columns:
        """Return the rows `indices` [B], through the operator."""
        return self._mapped(self.source.take(indices), lambda row: f"row {int(np.asarray(indices)[row])}")

    def chunks(self, start: int = 0) -> Iterator[Columns]:
        """Yield the rows of one pass from `start` on, through the operator."""
        first = start
        for chunk in self.source.chunks(start):
            yield self._mapped(chunk, lambda row, first=first: f"row {first + row}")
            first += len(next(iter(chunk.values())))

    def first_rows(self) -> Columns:
        """Return the first rows of a stream through the operator, without taking them away from it."""
        source: Any = self.source
        return self._mapped(source.first_rows(), lambda row: f"row {row}")

    @property
    def columns(self) -> dict[str, ColumnInfo]:
        """Name -> shape and dtype of one row, of the first one."""
        if self.indexable:
            return super().columns
        return {name: ColumnInfo(value.shape[1:], value.dtype) for name, value in self.first_rows().items()}

    def _mapped(self, columns: Columns, name_of: Callable[[int], str]) -> Columns:
        """Return the columns with those that the operator gives in place of those it took."""
        taken = ("x", "y") if self.on == "pair" else (self.on,)
        require_columns(taken, columns, type(self.source).__name__)
        given = [columns[name] for name in taken]
        rows = len(given[0])
        if not rows and self.indexable and len(self.source):
            return {name: column[:0] for name, column in self.take(np.arange(1)).items()}
        if not rows:
            return columns
        if self.batched:
            found = self._called(given, "the batch")
        else:
            each = [self._called([column[row] for column in given], name_of(row)) for row in range(rows)]
            found = [_stacked([row[place] for row in each], self._name, name_of) for place in range(len(taken))]
        for name, column in zip(taken, found, strict=True):
            if column.ndim == 0 or len(column) != rows:
                raise DataError(
                    f"{self._name} gave {name} of shape {column.shape} for {rows} rows; batched=True is for an "
                    "operator that takes [B, ...] and gives [B, ...]"
                )
        return columns | dict(zip(taken, found, strict=True))

    def _called(self, given: list[np.ndarray], where: str) -> list[np.ndarray]:
        result = self.op(*given)
        if self.on != "pair":
            return [np.asarray(result)]
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise DataError(f"{self._name} gave {type(result).__name__} for {where}; on='pair' needs (x, y)")
        return [np.asarray(part) for part in result]

    @property
    def _name(self) -> str:
        return self.op_id or getattr(self.op, "__qualname__", type(self.op).__name__)

    @property
    def info(self) -> dict[str, Any]:
        """What a network needs to know: of the columns that were not mapped as of the source, else their shapes."""
        mapped = {"x": ("x",), "y": ("y",), "pair": ("x", "y")}[self.on]
        gone = {name for column in mapped for name in _TOLD_BY[column]}
        columns = self.columns
        own = describe_row({name: columns[name] for name in mapped})
        return {name: value for name, value in self.source.info.items() if name not in gone} | own

    def with_split(self, split: str) -> TrainingDataset:
        """Return the same operator over the part `split` of the source."""
        return self.replace(source=self.source.with_split(split)).widened(self.wide)

    def widened(self, wide: bool = True) -> Self:
        """See `TrainingDataset.widened`."""
        return with_source_widened(self, wide)

    def content_hash(self) -> str:
        """Return 64 hex digits of the source's hash and what the operator is; nothing is computed for it."""
        op = identity_of(self.op) if self.op_id is None else self.op_id
        told = {"of": self.source.content_hash(), "op": op, "on": self.on, "batched": self.batched, "wide": self.wide}
        return content_hash({"map": told})


def _stacked(rows: list[np.ndarray], name: str, name_of: Callable[[int], str]) -> np.ndarray:
    odd = next((row for row, value in enumerate(rows) if value.shape != rows[0].shape), None)
    if odd is not None:
        raise DataError(
            f"{name} gave shape {rows[odd].shape} for {name_of(odd)}, and {rows[0].shape} for {name_of(0)}; "
            "every row needs the same shape"
        )
    return np.stack(rows)
