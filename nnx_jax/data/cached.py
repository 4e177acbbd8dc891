"""A cache of a dataset's rows: computed once, written whole or not at all, read from the disk from then on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from pydantic import PrivateAttr, field_validator

from nnx_jax.core.errors import DataError, OperatorTypeError
from nnx_jax.core.registry import register
from nnx_jax.core.spec import ENVIRONMENT
from nnx_jax.data.cache_stores import FORMATS, Manifest, NpyStore, ZarrStore, is_remote, local_path
from nnx_jax.data.dataset import ColumnInfo, TrainingDataset
from nnx_jax.data.dtypes import Columns, settle_columns
from nnx_jax.data.splits import with_source_widened

_ROWS, _BYTES = 4096, 2**25  # computed and written at a time: the fewer of both
_IN_MEMORY = 2**28  # bytes; what is larger is not offered whole


@register("cached")
class CachedDataset(TrainingDataset):
    """The rows of another dataset, kept in a folder under its hash: the second pass does not ask the source.

    The cache is written on first use, into a temporary that takes its place by one rename once every byte is on the
    disk. So a cache that is there is whole; one that is not (a process was killed, a file was cut) is computed again.
    Two processes that write at once both write all of it, and one of them is kept. The split and the parameters of the
    source are in its hash, hence every one has a folder of its own. So is the code of functions and operators given in
    Python (see `identity_of`); what they read elsewhere, and the code of a dataset class of your own, is not: after
    such a change call `invalidate()`, or give `map` another `op_id`.

    Args:
        source: a dataset whose rows can be asked for by number. Its hash should be cheaper than its rows (that of a
            `SimulationDataset` is): the hash is asked for in every process.
        cache_dir: folder of the caches; with "zarr" also the address of a store of fsspec (`s3://bucket/caches`). It is
            part of no hash.
        format: "npy", one memory-mapped file a column; or "zarr", compressed chunks, which needs the extra `cache`.

    Raises:
        OperatorTypeError: (a TypeError) `source` is no TrainingDataset, or not indexable.
        NotImplementedError: another format.
        ConfigError: "npy" at an address that is no local folder.
        DataError: an empty source, or rows of different shapes (naming the row); nothing is left behind.
        ImportError: "zarr" without zarr, or an address without fsspec; names the extra.
    """

    source: TrainingDataset
    cache_dir: Annotated[str, ENVIRONMENT]
    format: Annotated[str, ENVIRONMENT] = "npy"

    _kept: dict[str, Any] = PrivateAttr(default_factory=dict)

    @field_validator("cache_dir", mode="before")
    @classmethod
    def _plain_path(cls, cache_dir: Any) -> Any:
        return str(cache_dir) if isinstance(cache_dir, Path) else cache_dir

    @field_validator("format")
    @classmethod
    def _check_format(cls, format: str) -> str:
        if format not in FORMATS:
            raise NotImplementedError(f"there is no cache format {format!r}; choose one of {', '.join(FORMATS)}")
        return format

    def problems(self) -> Iterator[tuple[str, str]]:
        """The source must have row numbers, and the format must suit the place."""
        yield from super().problems()
        if not self.source.indexable:
            name = type(self.source).__name__
            raise OperatorTypeError(
                f"a cache needs an indexable source, and the rows of {name} have no numbers", path="source"
            )
        if self.format == "npy" and is_remote(self.cache_dir):
            yield "format", f"'npy' is for local folders, and {self.cache_dir} is none; use format='zarr'"

    @property
    def cache_path(self) -> str:
        """Where the rows are: the folder or address of this very source, in this format."""
        kind = ("-float64" if self.wide else "") + (".zarr" if self.format == "zarr" else "")
        name = self.source.content_hash() + kind
        if is_remote(self.cache_dir):
            return f"{self.cache_dir.rstrip('/')}/{name}"
        return str(Path(local_path(self.cache_dir), name))

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._kept["manifest"].rows if "manifest" in self._kept else len(self.source)

    @property
    def columns(self) -> dict[str, ColumnInfo]:
        """Name -> shape and dtype of one row; writes the cache if there is none."""
        return self._opened()[0].columns

    def take(self, indices: np.ndarray) -> Columns:
        """Return the rows `indices` [B] from the cache, which is written if there is none.

        Raises:
            DataError: the cache was removed since it was opened; the next call opens it, or writes it, anew.
        """
        manifest, stored = self._opened()
        rows = np.arange(manifest.rows)[indices]  # checks the range, and resolves negative ones
        try:
            return {name: self._store.rows(array, rows) for name, array in stored.items()}
        except DataError:
            self._kept.pop("stored", None)
            raise

    def arrays(self) -> Columns | None:
        """Return every column whole where they are memory-mapped and of no more than 256 MiB together, else None."""
        manifest, stored = self._opened()
        if self.format != "npy" or manifest.nbytes > _IN_MEMORY:
            return None
        return {name: np.asarray(array) for name, array in stored.items()}

    @property
    def info(self) -> dict[str, Any]:
        """As of the source when the cache was written."""
        return dict(self._opened()[0].info)

    @property
    def augments(self) -> bool:
        """As of the source."""
        return self.source.augments

    def augment(self, batch: Columns, rng: np.random.Generator) -> Columns:
        """As of the source."""
        return self.source.augment(batch, rng)

    def with_split(self, split: str) -> TrainingDataset:
        """Return a cache of the source's split, beside this one."""
        return self.replace(source=self.source.with_split(split)).widened(self.wide)

    def widened(self, wide: bool = True) -> Self:
        """See `TrainingDataset.widened`; the other one has a cache of its own."""
        return with_source_widened(self, wide)

    def content_hash(self) -> str:
        """Return the source's hash: the rows are the same."""
        if "hash" not in self._kept:
            self._kept["hash"] = self.source.content_hash()
        return self._kept["hash"]

    def invalidate(self) -> bool:
        """Remove the cache, so that the next use asks the source again; return whether there was one."""
        self._kept.clear()
        return self._store.remove()

    # -- writing --------------------------------------------------------------------------------------------------

    @property
    def _store(self) -> NpyStore | ZarrStore:
        if "store" not in self._kept:
            path = self.cache_path
            self._kept["store"] = NpyStore(path) if self.format == "npy" else ZarrStore(path)
        return self._kept["store"]

    def _opened(self) -> tuple[Manifest, Mapping[str, Any]]:
        """The stored columns; written first where there are none, or none that are whole."""
        if "stored" not in self._kept:
            found = self._store.open()
            if found is None:
                self._store.discard()
                found = self._store.open()  # another process may have written it meanwhile
            if found is None:
                self._materialise()
                found = self._store.open()
            if found is None:
                raise DataError(f"the cache {self.cache_path} was written and cannot be read back; remove the folder")
            self._kept["manifest"], self._kept["stored"] = found
        return self._kept["manifest"], self._kept["stored"]

    def _materialise(self) -> None:
        """Write all rows, or nothing."""
        rows = len(self.source)
        if rows == 0:
            raise DataError(f"{type(self.source).__name__} is empty (0 rows); there is nothing to cache")
        manifest = Manifest.of(rows, self._settled(np.arange(1)), self.source.info)
        each = max(1, min(_ROWS, _BYTES // max(manifest.nbytes // rows, 1)))
        numbers = (np.arange(start, min(start + each, rows)) for start in range(0, rows, each))
        self._store.write(manifest, (self._read(some, manifest.columns) for some in numbers))

    def _read(self, rows: np.ndarray, wanted: Mapping[str, ColumnInfo]) -> Columns:
        """Rows of the source as they are stored; where they do not fit together, the error names the first such row."""
        try:
            found = self._settled(rows)
            self._compare(found, wanted, int(rows[0]))
        except (ValueError, TypeError):
            for row in rows:
                self._compare(self._settled(np.array([row])), wanted, int(row))
            raise
        return found

    def _compare(self, found: Columns, wanted: Mapping[str, ColumnInfo], row: int) -> None:
        kinds = {name: ColumnInfo(column.shape[1:], column.dtype) for name, column in found.items()}
        if kinds != wanted:
            told, first = ({name: (c.shape, c.dtype.name) for name, c in each.items()} for each in (kinds, wanted))
            raise DataError(f"{type(self.source).__name__}: row {row} is {told}, the first row {first}")

    def _settled(self, rows: np.ndarray) -> Columns:
        return settle_columns(self.source.take(rows), type(self.source).__name__, wide=self.wide)
