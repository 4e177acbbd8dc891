"""Named arrays to and from disk through Orbax; no other module of the project imports it.

A generation directory gets `arrays.json` (our own names, shapes, dtypes) and `state/` (Orbax, under plain keys `a0`,
`a1`, ...). Arrays that no process of a group holds whole are in `shards/`, in the same form; every process writes its
part. A restore compares three descriptions before it allocates: what the caller expects, what `arrays.json` says, and
what the array files say of themselves. What a framework with other arrays wrote, see `tensors`, is read here too.

Orbax is never left to wait for another process here: a group agrees by itself, with bounds and names (see `commit`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from nnx_jax.core import fsio
from nnx_jax.core.errors import CheckpointError, NnxError, ResumePointError
from nnx_jax.runs import tensors
from nnx_jax.runs.leaves import FORMAT, INDEX, SHARDED, Leaf, check_leaves, describe, dtype_of, index_bytes, read_index
from nnx_jax.runs.spread import host_copy, present_everywhere, whole_on
from nnx_jax.spmd.world import ALONE, World

STATE, SHARDS = "state", "shards"
_PROCESS = "ocdbt.process_"
"""Orbax's own name of the directory of one process, before the number of the process."""


class SaveHandle:
    """A save under way.

    `wait` returns once this process has written its files (not yet synced), or raises what went wrong; `digests` tells
    the writer of shared ones, and after every process has waited, the writer's `merge` makes them one.
    """

    def __init__(self, writer: ArrayWriter, directory: Path, items: Mapping[str, Any], index: bytes | None) -> None:
        self._writer, self._directory, self._items, self._index = writer, directory, items, index
        self.shards: Shards | None = None

    def wait(self) -> None:
        """Write the arrays that were copied to the host, and wait for those that Orbax took over."""
        if self._items:
            self._writer.start(self._directory, self._items)
            self._items = {}
        try:
            self._writer.wait()
        finally:
            if self.shards is not None:
                self.shards.wait()
        if self._index is not None:
            fsio.create_file(self._directory / INDEX, self._index)

    def digests(self) -> dict[str, tuple[str, int]]:
        """Sync what this process wrote of shared arrays; return (SHA-256, size) by path below the directory."""
        return {} if self.shards is None else self.shards.digests(self._directory)

    def merge(self) -> None:
        """Put the shards of all processes together."""
        if self.shards is not None:
            self.shards.merge()


class Shards:
    """Arrays that no process holds whole: every process writes its part, without waiting for the others.

    Args:
        directory: made by the writer before.
        items: the same arrays on every process.
        primary: the process that describes them.
        timeout_seconds: bound of the wait for one process's own files.
    """

    def __init__(self, directory: Path, items: Mapping[str, Any], primary: int, timeout_seconds: int) -> None:
        from etils import epath

        self._directory, self._timeout = epath.Path(directory), timeout_seconds
        self._handler = _handler(primary=primary, replica=0)
        save = self._handler.async_save(self._directory, args=_orbax().args.PyTreeSave(dict(items)))
        with ThreadPoolExecutor(1) as pool:  # a notebook has a loop of its own in this thread
            self._futures = pool.submit(asyncio.run, save).result() or []

    def wait(self) -> None:
        """Wait for this process's files; after an error, too, no thread is left that still writes."""
        failures: list[BaseException] = []
        for future in self._futures:
            try:
                future.result(timeout=self._timeout)
            except BaseException as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def digests(self, root: Path) -> dict[str, tuple[str, int]]:
        """Sync this process's files and return their digests by path below `root`."""
        own = Path(self._directory) / f"{_PROCESS}{_process()}"
        if not own.is_dir():
            return {}  # it holds copies of what others write
        fsio.sync_tree(own)
        place = own.relative_to(root).as_posix()
        return {f"{place}/{name}": digest for name, digest in fsio.digest_tree(own).items()}

    def merge(self) -> None:
        """Let the directory name the files of all processes."""
        self._handler.finalize(self._directory)


class ArrayWriter:
    """Saves array mappings in the background, one at a time.

    Args:
        timeout_seconds: bound of one background save.
        world: the processes that save together; of one that is not the writer only its shards are written.
    """

    def __init__(self, timeout_seconds: int = 600, world: World = ALONE) -> None:
        self._timeout, self._world = timeout_seconds, world
        self._checkpointer: Any = None
        self._shards: Shards | None = None

    def save(self, directory: Path, arrays: Mapping[str, Any]) -> SaveHandle:
        """Start saving into the existing `directory`; on return the arrays may be donated, changed or deleted.

        Arrays that the writer holds whole it copies to the host, which is all its caller waits for: the thread that
        waits on the handle saves them. Of the others Orbax copies this process's part.

        Raises:
            CheckpointError: a value is no plain array, or is one of other processes, which do not take part.
        """
        world, leaves = self._world, describe(arrays)
        keys = _keys(leaves)
        spread = sorted(name for name in keys if not whole_on(arrays[name], world.writer_rank))
        if spread and world.alone:
            raise CheckpointError(f"leaf {spread[0]!r} is split over processes that take no part in this save")
        copies: dict[str, Any] = {}
        if world.writes:
            copies = {key: host_copy(arrays[name]) for name, key in keys.items() if name not in spread}
        index = index_bytes(leaves, SHARDED if spread else FORMAT, spread) if world.writes else None
        handle = SaveHandle(self, directory, copies, index)
        if spread:
            parts = {keys[name]: arrays[name] for name in spread}
            handle.shards = self._shards = Shards(directory / SHARDS, parts, world.writer_rank, self._timeout)
        return handle

    def settle(self) -> None:
        """Wait until nothing of a save that failed is written any more; its error is known."""
        shards, self._shards = self._shards, None
        if shards is not None:
            with contextlib.suppress(Exception):
                shards.wait()

    def start(self, directory: Path, items: Mapping[str, Any]) -> None:
        """Give the arrays to Orbax; on return it has its own copies."""
        self.prepare()
        if _process() != 0:
            items = {key: present_everywhere(value) for key, value in items.items()}
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
                _handler(primary=_process(), replica=None), async_options=options, **_by_itself()
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
        self.settle()
        if self._checkpointer is not None:
            checkpointer, self._checkpointer = self._checkpointer, None
            checkpointer.close()


def restore(directory: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays of a generation, exactly as stored.

    Args:
        directory: a verified generation directory.
        wanted: name -> (shape, dtype), or anything with `.shape` and `.dtype`. With a `.sharding` that is not None the
            leaf comes back as a jax.Array placed so (any number of devices), else as a numpy array.

    Raises:
        ResumePointError: a leaf is missing, left over, or of another shape or dtype; found before any allocation.
    """
    stored, leaves = read_index(directory), describe(wanted)
    check_leaves(stored, leaves, str(directory))
    if (directory / tensors.FILE).exists():
        held = tensors.restore(directory, stored)
        return {name: _place(held[name], getattr(wanted[name], "sharding", None)) for name in wanted}
    keys, found = _keys(leaves), {}
    for folder, shards in ((STATE, False), (SHARDS, True)):
        if here := {name: key for name, key in keys.items() if stored[name].shards is shards}:
            found |= _restore_state(directory / folder, here, leaves, wanted)
    for name, leaf in leaves.items():
        if name not in found:
            found[name] = _place(np.zeros(leaf.shape, dtype_of(leaf.dtype)), getattr(wanted[name], "sharding", None))
    return {name: found[name] for name in wanted}


def _restore_state(
    state: Path, keys: Mapping[str, str], leaves: Mapping[str, Leaf], wanted: Mapping[str, Any]
) -> dict[str, Any]:
    jax, ocp = _jax(), _orbax()
    item, arguments = {}, {}
    for name, key in keys.items():
        shape, dtype = leaves[name].shape, dtype_of(leaves[name].dtype)
        sharding = getattr(wanted[name], "sharding", None)
        item[key] = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        arguments[key] = (
            ocp.RestoreArgs(restore_type=np.ndarray)
            if sharding is None
            else ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding, global_shape=shape, dtype=dtype)
        )
    try:
        with _Reader(state) as reader:
            in_files = {key: Leaf(tuple(entry.shape), str(np.dtype(entry.dtype))) for key, entry in reader.metadata()}
            check_leaves(in_files, {key: leaves[name] for name, key in keys.items()}, str(state))
            tree = reader.restore(ocp.args.PyTreeRestore(item=item, restore_args=arguments))
    except NnxError:
        raise
    except Exception as error:
        raise ResumePointError(f"{state}: the arrays cannot be read: {type(error).__name__}: {error}") from error
    return {name: tree[key] for name, key in keys.items()}


class _Reader:
    """Reads one directory of Orbax; a context manager. What this project itself finished has no mark of Orbax's."""

    def __init__(self, state: Path) -> None:
        ocp = _orbax()
        from etils import epath

        self._state, self._whole = epath.Path(state), state.name == STATE
        handler = ocp.PyTreeCheckpointHandler(**_by_itself())
        self._by: Any = ocp.Checkpointer(handler, **_by_itself()) if self._whole else handler

    def metadata(self) -> Any:
        """(key, entry with shape and dtype) of every array."""
        found = self._by.metadata(self._state)
        return (found.item_metadata if self._whole else found).tree.items()

    def restore(self, args: Any) -> Any:
        """The arrays by key."""
        return self._by.restore(self._state, args=args)

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._by.close()


def _handler(*, primary: int, replica: int | None) -> Any:
    """Orbax's writer of arrays; in a group `primary` describes them, and copies of number `replica` are written."""
    ocp = _orbax()
    if not (options := _by_itself(primary)):
        return ocp.PyTreeCheckpointHandler(use_compression=False)
    types = ocp.type_handlers
    by_type = types.ArrayHandler(
        primary_host=primary,
        replica_id=replica,
        use_replica_parallel=False,
        enable_write_sharding_file=False,
        array_metadata_store=None,
    )
    registry = types.create_type_handler_registry((_jax().Array, by_type), (np.ndarray, types.NumpyHandler()))
    return ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry, **options)


def _by_itself(primary: int | None = None) -> dict[str, Any]:
    """Options under which Orbax waits for no other process; none where there is no other."""
    if _jax().process_count() == 1:
        return {}
    own = _process()
    options = _orbax().options.MultiprocessingOptions(
        primary_host=own if primary is None else primary,
        active_processes={own},
        barrier_sync_key_prefix=f"process-{own}",
    )
    return {"multiprocessing_options": options}


def _process() -> int:
    return int(_jax().process_index())


def _place(array: np.ndarray, sharding: Any) -> Any:
    if sharding is None:
        return array
    if not sharding.is_fully_addressable:  # placing it would ask the other processes whether they have the same
        return _jax().make_array_from_callback(array.shape, sharding, lambda index: array[index])
    return _jax().device_put(array, sharding)


def _keys(leaves: Mapping[str, Leaf]) -> dict[str, str]:
    """Orbax's key of every array it gets: it refuses empty ones, and the index alone restores them."""
    return {name: f"a{number}" for number, name in enumerate(sorted(leaves)) if leaves[name].nbytes}


def _orbax() -> Any:
    import orbax.checkpoint as ocp

    return ocp


def _jax() -> Any:
    import jax

    return jax
