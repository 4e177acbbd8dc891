"""Named arrays to and from disk through Orbax; no other module of the project imports it.

A generation directory gets `arrays.json` (our own names, shapes, dtypes) and `state/` (Orbax, under plain keys `a0`,
`a1`, ...). A restore compares three descriptions before it allocates: what the caller expects, what `arrays.json`
says, and what the array files say of themselves.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nnx_jax.core import codec, fsio
from nnx_jax.core.durable import durable_json
from nnx_jax.core.errors import CheckpointError, NnxError, ResumePointError

INDEX, STATE = "arrays.json", "state"
FORMAT = "nnx_jax.arrays/1"
_LIMITS = codec.Limits(64 * 1024**2, 1_000_000)  # of the index: a leaf takes 3 values and one for each axis


@dataclass(frozen=True)
class Leaf:
    """Shape and dtype name of one stored array."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _itemsize(self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def describe(arrays: Mapping[str, Any]) -> dict[str, Leaf]:
    """Return the Leaf of everything with a shape and a dtype, or given as a (shape, dtype) pair."""
    return {name: _leaf(name, value) for name, value in arrays.items()}


class SaveHandle:
    """A save under way. `wait` returns once every file is written (not yet synced), or raises what went wrong."""

    def __init__(self, writer: ArrayWriter, directory: Path, items: Mapping[str, Any], index_bytes: bytes) -> None:
        self._writer, self._directory, self._items, self._index_bytes = writer, directory, items, index_bytes

    def wait(self) -> None:
        """Write the arrays that were copied to the host, and wait for those that Orbax took over."""
        if self._items:
            self._writer.start(self._directory, self._items)
            self._items = {}
        self._writer.wait()
        fsio.atomic_write(self._directory / INDEX, self._index_bytes)


class ArrayWriter:
    """Saves array mappings in the background, one at a time.

    Args:
        timeout_seconds: bound of one background save, and of its barriers when several processes write.
    """

    def __init__(self, timeout_seconds: int = 600) -> None:
        self._timeout = timeout_seconds
        self._checkpointer: Any = None

    def save(self, directory: Path, arrays: Mapping[str, Any]) -> SaveHandle:
        """Start saving into the existing `directory`; on return the arrays may be donated, changed or deleted.

        Arrays this process holds whole are copied to the host, which is all the caller waits for: the thread that
        waits on the handle saves them. Orbax itself copies the others, those shared with other processes.

        Raises:
            CheckpointError: a value is no plain array.
        """
        leaves = describe(arrays)
        items = {
            f"a{number}": arrays[name]
            for number, name in enumerate(sorted(leaves))
            if leaves[name].nbytes  # Orbax refuses empty arrays; the index alone restores them
        }
        index = _index_bytes(leaves)
        if all(getattr(value, "is_fully_addressable", True) for value in items.values()):
            return SaveHandle(self, directory, {key: np.array(value) for key, value in items.items()}, index)
        self.start(directory, items)
        return SaveHandle(self, directory, {}, index)

    def start(self, directory: Path, items: Mapping[str, Any]) -> None:
        """Give the arrays to Orbax; on return it has its own copies."""
        self.prepare()
        try:
            self._checkpointer.save(directory / STATE, args=_orbax().args.PyTreeSave(dict(items)))
        except BaseException:
            self._discard()
            raise

    def prepare(self) -> None:
        """Import Orbax and start its threads (about a second, once), so that the first save need not."""
        if self._checkpointer is None:
            ocp = _orbax()
            # Directories are made before `save` returns: when that fails in the background, Orbax leaves threads that
            # wait for them until the time limit and keep the process from ending (seen, 600 s).
            options = ocp.AsyncOptions(timeout_secs=self._timeout, create_directories_asynchronously=False)
            self._checkpointer = ocp.AsyncCheckpointer(
                ocp.PyTreeCheckpointHandler(use_compression=False), async_options=options
            )

    def wait(self) -> None:
        """Wait for the save under way; see `SaveHandle`."""
        if self._checkpointer is None:
            return
        try:
            self._checkpointer.wait_until_finished()
        except BaseException:
            self._discard()
            raise

    def _discard(self) -> None:
        """Drop a checkpointer whose save failed: Orbax would raise the old error again at the next save."""
        checkpointer, self._checkpointer = self._checkpointer, None
        with contextlib.suppress(Exception):  # the first error is on its way already
            checkpointer.close()

    def close(self) -> None:
        """Wait for a save under way and free its threads."""
        if self._checkpointer is not None:
            checkpointer, self._checkpointer = self._checkpointer, None
            checkpointer.close()


def read_index(directory: Path) -> dict[str, Leaf]:
    """Return what `arrays.json` of a generation says; raises ResumePointError when it is missing or damaged."""
    path = directory / INDEX
    try:
        obj = codec.load_json(path, limits=_LIMITS)
        if obj["format"] != FORMAT:
            raise ValueError(f"expected format {FORMAT!r}")
        leaves = {name: Leaf(tuple(entry["shape"]), entry["dtype"]) for name, entry in obj["arrays"].items()}
        if any(type(size) is not int or size < 0 for leaf in leaves.values() for size in leaf.shape):
            raise ValueError("a size is not a whole number >= 0")
        return leaves
    except (OSError, NnxError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ResumePointError(f"{path}: the array index cannot be read: {error}") from error


def check_leaves(stored: Mapping[str, Leaf], wanted: Mapping[str, Leaf], where: str) -> None:
    """Raise ResumePointError naming the first leaf (in name order) that differs, and both sides."""
    problems = [
        f"leaf {name!r}: stored {stored.get(name, 'nothing')}, this run needs {wanted.get(name, 'nothing')}"
        for name in sorted({*stored, *wanted})
        if stored.get(name) != wanted.get(name)
    ]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ResumePointError(f"{where}: {problems[0]}{more}; nothing was restored and nothing is cast")


def restore(directory: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays of a generation, exactly as stored.

    Args:
        directory: a verified generation directory.
        wanted: name -> (shape, dtype), or anything with `.shape` and `.dtype`. With a `.sharding` that is not None the
            leaf comes back as a jax.Array placed so (any number of devices), else as a numpy array.

    Raises:
        ResumePointError: a leaf is missing, left over, or of another shape or dtype; found before any allocation.
    """
    leaves = describe(wanted)
    check_leaves(read_index(directory), leaves, str(directory))
    keys = {name: f"a{number}" for number, name in enumerate(sorted(leaves)) if leaves[name].nbytes}
    found: dict[str, Any] = {}
    if keys:
        found = _restore_state(directory / STATE, keys, leaves, wanted)
    for name, leaf in leaves.items():
        if name not in found:
            found[name] = _place(np.zeros(leaf.shape, _dtype(leaf.dtype)), getattr(wanted[name], "sharding", None))
    return {name: found[name] for name in wanted}


def _restore_state(
    state: Path, keys: Mapping[str, str], leaves: Mapping[str, Leaf], wanted: Mapping[str, Any]
) -> dict[str, Any]:
    import jax

    ocp = _orbax()
    item, arguments = {}, {}
    for name, key in keys.items():
        shape, dtype = leaves[name].shape, _dtype(leaves[name].dtype)
        sharding = getattr(wanted[name], "sharding", None)
        item[key] = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        arguments[key] = (
            ocp.RestoreArgs(restore_type=np.ndarray)
            if sharding is None
            else ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding, global_shape=shape, dtype=dtype)
        )
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            metadata = checkpointer.metadata(state).item_metadata.tree
            in_files = {key: Leaf(tuple(entry.shape), str(np.dtype(entry.dtype))) for key, entry in metadata.items()}
            check_leaves(in_files, {key: leaves[name] for name, key in keys.items()}, str(state))
            tree = checkpointer.restore(state, args=ocp.args.PyTreeRestore(item=item, restore_args=arguments))
    except NnxError:
        raise
    except Exception as error:
        raise ResumePointError(f"{state}: the arrays cannot be read: {type(error).__name__}: {error}") from error
    return {name: tree[key] for name, key in keys.items()}


def _place(array: np.ndarray, sharding: Any) -> Any:
    if sharding is None:
        return array
    import jax

    return jax.device_put(array, sharding)


def _leaf(name: str, value: Any) -> Leaf:
    shape, dtype = value if isinstance(value, tuple) else (getattr(value, "shape", None), getattr(value, "dtype", None))
    try:
        if shape is None or dtype is None:
            raise TypeError("it has no shape and dtype")
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise TypeError("objects are never stored")
        return Leaf(tuple(int(size) for size in shape), str(kind))
    except TypeError as error:
        found = f"{type(value).__name__} of dtype {dtype}"
        raise CheckpointError(f"leaf {name!r} cannot be stored: found {found} ({error}); give a plain array") from error


def _dtype(name: str) -> np.dtype:
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))


def _itemsize(name: str) -> int:
    return _dtype(name).itemsize


def _index_bytes(leaves: Mapping[str, Leaf]) -> bytes:
    arrays = {name: {"shape": list(leaf.shape), "dtype": leaf.dtype} for name, leaf in leaves.items()}
    return durable_json({"format": FORMAT, "arrays": arrays}, source=INDEX, limits=_LIMITS)


def _orbax() -> Any:
    import orbax.checkpoint as ocp

    return ocp
