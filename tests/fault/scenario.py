"""The commit under test: open a run, commit one more epoch, finish. Run in forked children of the fault server.

Every array and row is a function of the epoch, so a stored state is recognised by its numbers alone.
"""

from __future__ import annotations

import os
import resource
import shutil
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint  # noqa: F401  imported before the fork: it takes seconds

from nnx_jax.core import fsio
from nnx_jax.params.history import HistoryJournal
from nnx_jax.runs.arrays import ArrayWriter
from nnx_jax.runs.commit import CommitPoint, MakeWriter
from nnx_jax.runs.layout import RunPaths
from nnx_jax.runs.pointers import Pointer, read_pointer
from nnx_jax.runs.resume import read_point
from nnx_jax.runs.run import NNRun
from nnx_jax.runs.store import RunStore
from tools.fault.ops import Fault, Shim

RUN = "0123456789abcdef"
COLUMNS = ("epoch", "step", "loss")
ROWS_PER_EPOCH = 3
SPEC = {"train": {"n_epochs": 8}}
JOURNAL: HistoryJournal | None = None
"""How the history is kept; set by `journal_scenario.py`."""
MAKE_WRITER: MakeWriter = ArrayWriter
"""How arrays are stored; set by `tensors_scenario.py`."""


def expected_arrays(epoch: int) -> dict[str, np.ndarray]:
    """Return the state at the end of an epoch: a matrix, a counter, a random key."""
    return {
        "dense.kernel": np.arange(12, dtype=np.float32).reshape(3, 4) * (epoch + 1),
        "count": np.array(ROWS_PER_EPOCH * (epoch + 1), np.int32),
        "rng": np.array([7, epoch], np.uint32),
    }


def expected_rows(epochs: int) -> list[dict[str, Any]]:
    """Return the history up to and without epoch `epochs`."""
    steps = range(ROWS_PER_EPOCH * epochs)
    return [{"epoch": step // ROWS_PER_EPOCH, "step": step, "loss": 1.0 / (step + 1)} for step in steps]


def commit_epoch(store: RunStore, epoch: int, *, on_device: bool = False) -> None:
    """Commit one epoch with everything a commit can carry, and wait until it is reported."""
    rows = expected_rows(epoch + 1)
    store.history.append(rows[store.history.rows :])
    arrays = expected_arrays(epoch)
    steps = ROWS_PER_EPOCH * (epoch + 1)
    store.committer.commit(
        CommitPoint(
            epoch=epoch,
            step=steps,
            batch=steps,
            arrays={name: jnp.asarray(a) for name, a in arrays.items()} if on_device else arrays,
            host={"position": {"epoch": epoch + 1, "batch": 0}},
            names={0: ("FIRST",), 3: ("Q1",)}.get(epoch, ()),
            best=True,
            score=1.0 / (epoch + 1),
            deferred=(f"tag-{epoch}",) if epoch == 3 else (),
        )
    )
    store.committer.drain()


def open_store(root: Path) -> RunStore:
    return RunStore.open(root, RUN, SPEC, COLUMNS, keep=1, journal=JOURNAL, make_writer=MAKE_WRITER)


def prepare(root: Path, epochs: int) -> None:
    """Make a run with `epochs` committed epochs."""
    with open_store(root) as store:
        for epoch in range(epochs):
            commit_epoch(store, epoch)


def commit(shim: Shim, argument: dict[str, Any]) -> dict[str, Any]:
    """Copy `base` to `root` and commit the next epoch there under the fault, from opening the run to closing it.

    Returns what was reported: "committed" is the epoch whose commit returned without an error, else None.
    """
    root, base = Path(argument["root"]), argument.get("base")
    if base is not None:
        shutil.copytree(base, root, symlinks=True)
    fsio.make_dir(root)
    epoch = argument["epoch"]
    for mutant in argument.get("mutants", ()):
        MUTANTS[mutant]()
    on_device = argument.get("on_device", False)
    if on_device:
        jax.block_until_ready([jnp.asarray(a) for a in expected_arrays(epoch).values()])
    if "file_bytes" in argument:
        resource.setrlimit(resource.RLIMIT_FSIZE, (argument["file_bytes"], resource.RLIM_INFINITY))
    shim.arm(root, Fault.from_json(argument["fault"]), Path(argument["log"]), data=argument.get("data", False))
    reported: dict[str, Any] = {"committed": None, "raised": [], "message": ""}
    try:
        with open_store(root) as store:
            try:
                commit_epoch(store, epoch, on_device=on_device)
            except Exception as error:
                if argument.get("retry"):
                    shim.disarm()
                    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                    reported["retried"], reported["committed"] = _try_again(store, epoch)
                raise error
            reported["committed"] = epoch
            if argument.get("finish"):
                store.finish({"format": "none"})
    except Exception as error:
        reported["raised"] = [kind.__name__ for kind in type(error).__mro__]
        reported["message"] = f"{type(error).__name__}: {error}"
    shim.disarm()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return reported


def _try_again(store: RunStore, epoch: int) -> tuple[str, int | None]:
    """Once the fault is gone the same open store must be able to commit: this epoch, or the next if LAST has it."""
    last = store.committer.last
    number = epoch if last is None or last.epoch < epoch else epoch + 1
    try:
        commit_epoch(store, number)
    except Exception as error:
        return f"{type(error).__name__}: {error}", None
    return "committed", number


def serve(shim: Shim, request: dict[str, Any]) -> Any:
    """Entry point of the server: which of the scenarios, and its argument."""
    return {"commit": commit, "prepare": _prepare}[request["what"]](shim, request["with"])


def _prepare(shim: Shim, argument: dict[str, Any]) -> None:
    prepare(Path(argument["root"]), argument["epochs"])


def _skip_fsync(wanted: str) -> None:
    """Let fsync lie about files or directories."""
    real = os.fsync

    def fsync(fd: int) -> None:
        if (wanted == "dir") != stat.S_ISDIR(os.fstat(fd).st_mode):
            real(fd)

    fsio.os.fsync = fsync  # type: ignore[assignment]


MUTANTS: dict[str, Callable[[], None]] = {
    "no fsync walk": lambda: setattr(fsio, "sync_tree", lambda root: None),
    "no file is synced": lambda: _skip_fsync("file"),
    "no directory is synced": lambda: _skip_fsync("dir"),
}


def standing(root: Path) -> Pointer | None:
    """Return LAST; a damaged one raises."""
    return read_pointer(RunPaths(root, RUN)) if root.exists() else None


def check(root: Path, epoch: int, *, committed: int | None = None, go_on: bool = True) -> str | None:
    """Check the invariants of a run that was interrupted while committing `epoch`; return the first broken one.

    I1 LAST is absent or names a complete generation that verifies, with the numbers of its epoch. I2 it is not behind
    the epoch before, nor behind what was reported (I7). I3 the history up to LAST has no gap. I9 the next start works:
    it continues, commits the epoch after LAST, and that state verifies too.
    """
    paths = RunPaths(root, RUN)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # taking over the lease of a dead process
            last = standing(root)
            problem = _judge(paths, last, epoch, committed)
            if problem is None and go_on:
                problem = _continue(root, paths, last)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return problem


def _judge(paths: RunPaths, last: Pointer | None, epoch: int, committed: int | None) -> str | None:
    found = -1 if last is None else last.epoch
    if found not in (epoch - 1, epoch):
        return f"I2: LAST is at epoch {found}, expected {epoch - 1} or {epoch}"
    if committed is not None and found != committed:
        return f"I7: epoch {committed} was reported as committed, LAST is at epoch {found}"
    if last is None:
        return None
    point = read_point(paths)
    wanted = expected_arrays(found)
    loaded = point.load(wanted)
    for name, array in wanted.items():
        if loaded[name].tobytes() != array.tobytes():
            return f"I1: {name} of epoch {found} is {loaded[name]}"
    if point.host["position"]["epoch"] != found + 1:
        return f"I1: host state of epoch {found} is {point.host}"
    rows = list(NNRun.load(RUN, paths.root).rows())
    if rows != expected_rows(found + 1):
        return f"I3: history up to epoch {found} is {rows}"
    return None


def _continue(root: Path, paths: RunPaths, before: Pointer | None) -> str | None:
    with open_store(root) as store:
        if store.point is not None and store.point.pointer != before:
            return "I8: LAST changed by reading it"
        if before is not None and before.final:
            return None if store.status == "finished" else f"a finished run is taken as {store.status}"
        number = 0 if before is None else before.epoch + 1
        commit_epoch(store, number)
    after = standing(root)
    if after is None or before is not None and (after.fencing, after.epoch) <= (before.fencing, before.epoch):
        return f"I2: LAST went from {before} to {after}"
    return _judge(paths, after, number, number)
