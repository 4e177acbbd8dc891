"""Where a cache lies: plain `.npy` files in a local folder, or a zarr group in a folder or at an address of fsspec."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from nnx_jax.core import fsio
from nnx_jax.core.codec import canonical_json, parse_json
from nnx_jax.core.errors import ConfigError, DataError
from nnx_jax.data.dataset import ColumnInfo
from nnx_jax.data.dtypes import Columns

FORMATS = ("npy", "zarr")
_MANIFEST, _VERSION = "cache.json", 1
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def is_remote(path: str) -> bool:
    """Return whether a path is an address of fsspec (`s3://`, `gcs://`, `memory://`); `file://` is a local folder."""
    return _SCHEME.match(path) is not None and not path.startswith("file://")


def local_path(path: str) -> str:
    """Return a local path without its `file://`."""
    return unquote(urlsplit(path).path) if path.startswith("file://") else path


@dataclass(frozen=True)
class Manifest:
    """What a cache holds; it is written last.

    Attributes:
        rows: how many.
        columns: name -> shape and dtype of one row.
        info: of the source.
    """

    rows: int
    columns: dict[str, ColumnInfo]
    info: dict[str, Any]

    @classmethod
    def of(cls, rows: int, row: Columns, info: Mapping[str, Any]) -> Manifest:
        """Return the manifest of `rows` rows like `row`.

        Raises:
            DataError: a dtype that numpy has no file format for (bfloat16).
        """
        for name, column in row.items():
            if column.dtype.kind not in "biuf":
                raise DataError(f"column {name!r} of dtype {column.dtype} cannot be cached; make it float16 or float32")
        columns = {name: ColumnInfo(row[name].shape[1:], row[name].dtype) for name in sorted(row)}  # as JSON sorts them
        return cls(rows, columns, dict(info))

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        row = sum(int(np.prod(c.shape, dtype=np.int64)) * c.dtype.itemsize for c in self.columns.values())
        return self.rows * row

    def written(self) -> dict[str, Any]:
        """Return it as JSON values."""
        columns = {name: [list(column.shape), column.dtype.name] for name, column in self.columns.items()}
        info = {
            name: {"shape": list(value)} if isinstance(value, tuple) else value for name, value in self.info.items()
        }
        return {"version": _VERSION, "rows": self.rows, "columns": columns, "info": info}

    @classmethod
    def read(cls, value: Any) -> Manifest | None:
        """Return what `written` gave, or None for anything else."""
        try:
            if value["version"] != _VERSION:
                return None
            columns = {n: ColumnInfo(tuple(shape), np.dtype(dtype)) for n, (shape, dtype) in value["columns"].items()}
            info = {n: tuple(v["shape"]) if isinstance(v, Mapping) else v for n, v in value["info"].items()}
            return cls(int(value["rows"]), columns, info)
        except (KeyError, TypeError, ValueError, AttributeError):
            return None

    def fits(self, name: str, array: Any) -> bool:
        """Return whether a stored column is the whole one."""
        column = self.columns[name]
        return tuple(array.shape) == (self.rows, *column.shape) and array.dtype == column.dtype


class NpyStore:
    """A folder with one `.npy` file a column, memory-mapped, and `cache.json`.

    Args:
        path: the folder; its name is the cache's.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def open(self) -> tuple[Manifest, dict[str, np.ndarray]] | None:
        """Return the manifest and the mapped columns, or None when there is no cache, or none that is whole."""
        try:
            manifest = Manifest.read(parse_json(fsio.read_bytes(self._path / _MANIFEST)))
            if manifest is None:
                return None
            stored = {name: self._mapped(index) for index, name in enumerate(manifest.columns)}
        except (OSError, EOFError, ConfigError, ValueError):
            return None
        return (manifest, stored) if all(manifest.fits(name, array) for name, array in stored.items()) else None

    def write(self, manifest: Manifest, chunks: Iterable[Columns]) -> None:
        """Write all columns and the manifest into a temporary folder, sync them, and rename it into place."""
        fsio.make_dir(self._path.parent)
        temporary = self._path.with_name(f".{self._path.name[:200]}.{secrets.token_hex(6)}")
        try:
            fsio.make_dir(temporary)
            files = [temporary / _file(index) for index in range(len(manifest.columns))]
            for file, column in zip(files, manifest.columns.values(), strict=True):
                fsio.create_file(file, _header((manifest.rows, *column.shape), column.dtype))
            for chunk in chunks:
                for file, name in zip(files, manifest.columns, strict=True):
                    fsio.append_bytes(file, np.ascontiguousarray(chunk[name]).tobytes())
            fsio.create_file(temporary / _MANIFEST, canonical_json(manifest.written()))
            fsio.sync_tree(temporary)
            with contextlib.suppress(FileExistsError):  # another process was faster; both have the same rows
                fsio.replace_dir(temporary, self._path)
        finally:
            fsio.remove_tree(temporary)

    def remove(self) -> bool:
        """Remove the cache; return whether there was one."""
        return fsio.remove_tree(self._path)

    def discard(self) -> None:
        """Remove what is there and is not whole; see `_discard`."""
        _discard(self._path, lambda aside: NpyStore(str(aside)).open() is not None)

    @staticmethod
    def rows(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return rows of a mapped column, in memory; a folder that was removed since stays readable."""
        return np.asarray(array[rows])

    def _mapped(self, index: int) -> np.ndarray:
        path = self._path / _file(index)
        if path.is_symlink():
            raise OSError(f"{path} is a symbolic link")
        return np.load(path, mmap_mode="r", allow_pickle=False)


def _file(index: int) -> str:
    """File of a column by its place, since a name may hold what a file's cannot."""
    return f"column{index}.npy"


def _header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    head = io.BytesIO()
    described = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_2_0(head, {"descr": described, "fortran_order": False, "shape": shape})
    return head.getvalue()


class ZarrStore:
    """A zarr group with one array a column; its attribute `cache` is written last and makes it whole.

    A local group is made in a temporary folder and renamed. At an address there is no rename: a group without the
    attribute is half written, and is written anew.

    Args:
        path: the folder or address; its last part is the cache's name.
    """

    def __init__(self, path: str) -> None:
        self._path, self._remote = path, is_remote(path)
        self._zarr = _imported("zarr")
        if self._remote:
            _imported("fsspec")

    def open(self) -> tuple[Manifest, dict[str, Any]] | None:
        """Return the manifest and the arrays, or None when there is no cache, or none that is whole."""
        try:
            group = self._group(self._path, "r")
            manifest = Manifest.read(group.attrs.get("cache"))
            stored = {} if manifest is None else {n: group[_array(i)] for i, n in enumerate(manifest.columns)}
        except (OSError, KeyError, ValueError):  # zarr's own errors are ValueErrors
            return None
        if manifest is None or not all(manifest.fits(name, array) for name, array in stored.items()):
            return None
        if any(array.nchunks_initialized != array.nchunks for array in stored.values()):
            return None  # zarr reads a chunk that is missing as zeros
        return manifest, stored

    def write(self, manifest: Manifest, chunks: Iterable[Columns]) -> None:
        """Write all columns, then the manifest; a failure leaves nothing."""
        if self._remote:
            try:
                self._fill(self._path, manifest, chunks)
            except BaseException:
                with contextlib.suppress(OSError):  # the first error is the one to report
                    self.remove()
                raise
            return
        path = Path(self._path)
        fsio.make_dir(path.parent)
        temporary = path.with_name(f".{path.name[:200]}.{secrets.token_hex(6)}")
        try:
            self._fill(str(temporary), manifest, chunks)
            fsio.sync_tree(temporary)
            with contextlib.suppress(FileExistsError):  # another process was faster; both have the same rows
                fsio.replace_dir(temporary, path)
        finally:
            fsio.remove_tree(temporary)

    def remove(self) -> bool:
        """Remove the cache; return whether there was one."""
        if not self._remote:
            return fsio.remove_tree(self._path)
        files, path = _imported("fsspec.core").url_to_fs(self._path)
        if not files.exists(path):
            return False
        files.rm(path, recursive=True)
        return True

    def discard(self) -> None:
        """Remove what is there and is not whole; see `_discard`. At an address there is no rename to move it with."""
        if not self._remote:
            _discard(Path(self._path), lambda aside: ZarrStore(str(aside)).open() is not None)
        elif self.open() is None:
            self.remove()

    def rows(self, array: Any, rows: np.ndarray) -> np.ndarray:
        """Return rows of a stored column, in the order asked for.

        Raises:
            DataError: a chunk is gone since the cache was opened; zarr reads it as zeros.
        """
        found = np.asarray(array.get_orthogonal_selection((rows,)))
        if found.size:
            blank = ~found.reshape(len(rows), -1).any(axis=1)
            for chunk in np.unique(rows[blank] // array.chunks[0]).tolist():
                self._check_there(array, chunk)
        return found

    def _check_there(self, array: Any, chunk: int) -> None:
        """Check that the rows' zeros are stored ones. A chunk has whole rows, so only its first number varies."""
        key = array.metadata.encode_chunk_key((chunk, *(0,) * (array.ndim - 1)))
        if not _imported("zarr.core.sync").sync((array.store_path / key).exists()):
            raise DataError(f"{array.store_path}/{key} is gone: the cache was removed while it was read; ask again")

    def _group(self, path: str, mode: str) -> Any:
        storage = self._zarr.storage
        store = storage.FsspecStore.from_url(path) if self._remote else storage.LocalStore(path)
        return self._zarr.open_group(store=store, mode=mode)

    def _fill(self, path: str, manifest: Manifest, chunks: Iterable[Columns]) -> None:
        group, start, arrays = self._group(path, "w"), 0, {}
        for chunk in chunks:
            rows = len(next(iter(chunk.values())))
            for index, (name, column) in enumerate(manifest.columns.items()):
                if not start:  # the first chunk is the largest
                    whole, part = (manifest.rows, *column.shape), (rows, *(max(size, 1) for size in column.shape))
                    arrays[name] = group.create_array(
                        _array(index), shape=whole, dtype=column.dtype, chunks=part, config={"write_empty_chunks": True}
                    )
                arrays[name][start : start + rows] = chunk[name]
            start += rows
        group.attrs["cache"] = manifest.written()


def _discard(path: Path, is_whole: Callable[[Path], bool]) -> None:
    """Remove a folder that is no whole cache, unless another process has put a whole one there meanwhile.

    It is moved aside first and judged where nobody else can change it.
    """
    if path.is_symlink() or not path.is_dir():
        fsio.remove_tree(path)  # which says what is wrong with it
        return
    if is_whole(path):
        return
    aside = path.with_name(f".{path.name[:200]}.{secrets.token_hex(6)}")
    with contextlib.suppress(FileNotFoundError):  # another process removes it, too
        fsio.replace_dir(path, aside)
        if is_whole(aside):
            with contextlib.suppress(FileExistsError):
                fsio.replace_dir(aside, path)
        fsio.remove_tree(aside)


def _array(index: int) -> str:
    return f"column{index}"


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"a cache of format 'zarr' needs {name.split('.')[0]}: pip install 'nnx_jax[cache]'"
        ) from error
