"""The commit: its order, its one moment of truth, and what every failure before and after that moment leaves behind."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnx_jax.core import fsio
from nnx_jax.core.errors import CheckpointError, CommitError, ConfigError, LeaseLostError, UnsafePathError
from nnx_jax.runs import audit, lease, pointers, retain
from nnx_jax.runs.layout import RunPaths
from nnx_jax.runs.resume import read_point
from nnx_jax.runs.run import NNRun
from nnx_jax.runs.store import RunStore
from tests.runs import scenario
from tests.runs.scenario import RUN_ID, commit_epoch, open_store, row


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    opened = open_store(tmp_path, keep=None)
    yield opened
    opened.lease.release()


def on_disk(root: Path) -> set[int]:
    return {int(path.name) for path in (root / RUN_ID / "checkpoints" / "generations").iterdir() if path.name.isdigit()}


def rows(root: Path) -> list[Any]:
    return [record["epoch"] for record in NNRun.load(RUN_ID, root).records]


# Order ---------------------------------------------------------------------------------------------------------------


def test_the_order_of_a_commit(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """nnx:B003 nnx:S21 nnx:B119 history, generation, manifest, LAST, phase, BEST, deferred tag, retention."""
    events: list[str] = []
    root = store.paths.run

    def spy(name: str, label: Callable[..., str]) -> None:
        real = getattr(fsio, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            events.append(label(*args))
            return real(*args, **kwargs)

        monkeypatch.setattr(fsio, name, wrapped)

    spy("append_bytes", lambda path, data: Path(path).name)
    spy("sync_tree", lambda path: "sync")
    spy("replace_dir", lambda source, target: str(Path(target).relative_to(root)))
    spy("atomic_write", lambda path, data: str(Path(path).name))
    spy("create_file", lambda path, data: str(Path(path).name))
    spy("remove_tree", lambda path: f"remove {Path(path).name}")
    store.committer._keep = 1
    commit_epoch(store, 0, best=False)
    events.clear()
    commit_epoch(store, 1, names=("Q1",), deferred=("snap_e1",))
    assert events == [
        "idps.csv",
        "arrays.json",
        "host.json",
        "sync",
        "checkpoints/generations/2",
        "2.json",
        "LAST",
        "Q1",
        "BEST",
        "snap_e1",
    ]
    commit_epoch(store, 2, names=(), best=False)
    commit_epoch(store, 3, names=(), best=False)
    assert events[-2:] == ["LAST", "remove 3"]


def test_nothing_is_reported_before_last_is_in_place(tmp_path: Path) -> None:
    """The caller hears of a commit only when LAST on disk already names it."""
    heard: list[tuple[int, int]] = []

    def report(pointer: pointers.Pointer) -> None:
        standing = pointers.read_pointer(RunPaths(tmp_path, RUN_ID))
        assert standing is not None
        heard.append((pointer.generation, standing.generation))

    with open_store(tmp_path, on_committed=report) as store:
        commit_epoch(store, 0)
        commit_epoch(store, 1)
    assert heard == [(1, 1), (2, 2)]


def test_every_byte_has_a_digest(pristine: Path) -> None:
    """nnx:B115 the manifest's digests are the files' SHA-256, and LAST carries the manifest's own."""
    paths = RunPaths(pristine, RUN_ID)
    last = pointers.read_pointer(paths)
    assert last is not None
    data = paths.manifest(last.generation).read_bytes()
    assert hashlib.sha256(data).hexdigest() == last.manifest
    listed = {name: entry["sha256"] for name, entry in json.loads(data)["files"].items()}
    directory = paths.generation(last.generation)
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert listed == {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }
    assert {"host.json", "arrays.json", "state/_METADATA"} <= listed.keys()


def test_everything_is_private(pristine: Path) -> None:
    """F12: Orbax writes 0644 and 0755; the store's directories are 0700 and its files 0600."""
    for path in [pristine / RUN_ID, *(pristine / RUN_ID).rglob("*")]:
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_one_commit_is_in_flight(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second commit waits for the first; neither is reordered."""
    gate, running = threading.Event(), []
    real = fsio.sync_tree

    def slow(path: Path) -> None:
        running.append(path.name)
        assert gate.wait(20)
        real(path)

    monkeypatch.setattr(fsio, "sync_tree", slow)
    commit_epoch(store, 0, drain=False)
    second = threading.Thread(target=commit_epoch, args=(store, 1), kwargs={"drain": False})
    second.start()
    second.join(0.3)
    assert second.is_alive()
    assert len(running) <= 1
    gate.set()
    second.join(20)
    store.committer.drain()
    assert store.committer.last is not None
    assert (store.committer.last.generation, rows(store.paths.root)) == (2, [0, 1])


# Failures up to LAST -------------------------------------------------------------------------------------------------


class Faults:
    """Fails the n-th operating-system call made while armed, with an error of the caller's choice."""

    CALLS = ("open", "write", "fsync", "replace", "fchmod")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.at, self.armed = 0, 0, False
        self.fired = ""
        for name in self.CALLS:
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.armed:
                self.count += 1
                if self.count == self.at:
                    self.fired = name
                    raise OSError(errno.EIO, "injected")
            return real(*args, **kwargs)

        return call


def arm_pointer(monkeypatch: pytest.MonkeyPatch, faults: Faults, wanted: str) -> None:
    real = pointers.write_pointer

    def write(paths: RunPaths, name: str, pointer: pointers.Pointer) -> None:
        faults.armed = name == wanted
        try:
            real(paths, name, pointer)
        finally:
            faults.armed = False

    monkeypatch.setattr(pointers, "write_pointer", write)


def test_last_fails_at_each_of_its_operations(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """nnx:B099 nnx:S28 nnx:B105 nnx:S31 D9: history on disk ends where the standing LAST ends, old bytes, no temporary.

    Whatever call fails, the run verifies, the error surfaces, and the next commit has no gap.
    """
    commit_epoch(store, 0)
    faults = Faults(monkeypatch)
    arm_pointer(monkeypatch, faults, "LAST")
    last = store.paths.pointer("LAST")
    seen = []
    for number in range(1, 20):
        before = last.read_bytes()
        faults.at, faults.count, faults.fired = number, 0, ""
        epoch = len(store.history.path.read_text().splitlines()) - 1
        store.history.append([row(epoch)] if store.history.rows == epoch else [])
        store.committer.commit(scenario.point(epoch))
        error = outcome(store.committer.drain)
        if error is None:
            break
        assert isinstance(error, OSError)
        assert "injected" in str(error)
        seen.append(faults.fired)
        standing = pointers.read_pointer(store.paths)
        assert standing is not None
        assert store.history.path.stat().st_size == standing.history.bytes
        assert standing == store.committer.last
        assert store.history.committed == standing.history
        assert (last.read_bytes() == before) == (standing.epoch < epoch)
        assert [path.name for path in store.paths.checkpoints.iterdir() if path.name.startswith(".")] == []
        assert audit.verify(store.paths.root, RUN_ID) == []
    assert seen == ["open", "open", "fchmod", "write", "fsync", "replace", "fsync"]
    assert rows(store.paths.root) == list(range(len(rows(store.paths.root))))
    assert audit.verify(store.paths.root, RUN_ID) == []


def outcome(call: Callable[[], object]) -> CommitError | None:
    try:
        call()
    except CommitError as error:
        return error
    return None


def test_the_very_first_last_fails_and_a_retry_is_not_blocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nnx:B100 nothing is loadable as committed, the history is empty, and the same start works afterwards."""
    with monkeypatch.context() as patch, open_store(tmp_path) as store:
        patch.setattr(pointers, "write_pointer", failing(pointers.write_pointer, "LAST"))
        with pytest.raises(CommitError, match="there is no LAST yet"):
            commit_epoch(store, 0)
        assert store.history.committed.rows == 0
    run = NNRun.load(RUN_ID, tmp_path)
    assert (run.status, run.records, run.checkpoints()) == ("fresh", [], [])
    assert (tmp_path / RUN_ID / "idps.csv").read_text() == "epoch,step,loss,note\n"
    scenario.run(tmp_path, 2)
    assert rows(tmp_path) == [0, 1]
    assert audit.verify(tmp_path, RUN_ID) == []


def failing(real: Callable[..., Any], *names: str) -> Callable[..., Any]:
    def write(paths: RunPaths, name: str, pointer: pointers.Pointer) -> None:
        if name in names:
            raise OSError(errno.EIO, f"injected into {name}")
        real(paths, name, pointer)

    return write


STAGES = {
    "history": (fsio, "append_bytes"),
    "host": (fsio, "atomic_write"),
    "sync": (fsio, "sync_tree"),
    "digest": (fsio, "digest_tree"),
    "rename": (fsio, "replace_dir"),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failure_before_last_keeps_the_old_commit(tmp_path: Path, stage: str, code: int) -> None:
    """nnx:B117 case:I02 case:I06 disk full or broken at any step: typed error, old commit intact, next start works."""
    scenario.run(tmp_path, 1)
    before = (tmp_path / RUN_ID / "checkpoints" / "LAST").read_bytes()
    module, name = STAGES[stage]

    def broken(path: Any, *_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code), str(path))

    with open_store(tmp_path) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, broken)
        with pytest.raises(CommitError, match=rf"LAST stays at generation 1.*{os.strerror(code)}.*{RUN_ID}"):
            commit_epoch(store, 1)
        assert store.committer.last is not None
        patch.undo()
        assert (tmp_path / RUN_ID / "checkpoints" / "LAST").read_bytes() == before
        assert rows(tmp_path) == [0]
        assert store.history.path.stat().st_size == store.committer.last.history.bytes
    assert audit.verify(tmp_path, RUN_ID) == []
    scenario.run(tmp_path, 2)
    assert rows(tmp_path) == [0, 1]


def test_a_later_commit_has_no_gap_after_a_failed_one(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """D1: once space returns, the next commit carries the rows of the failed one too."""
    commit_epoch(store, 0)
    with monkeypatch.context() as patch:
        patch.setattr(pointers, "write_pointer", failing(pointers.write_pointer, "LAST"))
        commit_epoch(store, 1, drain=False)
        with pytest.raises(CommitError, match="injected into LAST"):
            commit_epoch(store, 2)
    store.committer.commit(scenario.point(2))
    store.committer.drain()
    assert rows(store.paths.root) == [0, 1, 2]
    assert read_point(store.paths).generation > 2


def test_a_background_failure_surfaces_at_the_next_commit_and_at_the_end(tmp_path: Path) -> None:
    """case:I06 an Orbax save that fails in the background is raised by the next commit, or by closing the run."""
    store = open_store(tmp_path)
    commit_epoch(store, 0)
    for ending in ("commit", "close"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fsio, "digest_tree", fail)
            commit_epoch(store, 1, drain=False)
            assert store.committer._thread is not None
            store.committer._thread.join()
        with pytest.raises(CommitError, match="injected"):
            store.committer.commit(scenario.point(1)) if ending == "commit" else store.close()
    assert rows(tmp_path) == [0]
    scenario.run(tmp_path, 2)
    assert rows(tmp_path) == [0, 1]


def fail(*_: Any, **__: Any) -> Any:
    raise OSError(errno.EIO, "injected")


def test_orbax_failure_is_ours(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """case:I06 the directory vanishes under a running save: CommitError, LAST unmoved."""
    commit_epoch(store, 0)
    real = store.committer._writer.save

    def sabotage(directory: Path, arrays: Any) -> Any:
        shutil.rmtree(directory)
        directory.write_text("in the way")
        return real(directory, arrays)

    monkeypatch.setattr(store.committer._writer, "save", sabotage)
    with pytest.raises(CommitError, match="LAST stays at generation 1"):
        commit_epoch(store, 1)
    assert audit.verify(store.paths.root, RUN_ID) == []


def test_a_state_too_large_to_read_back_is_refused_before_anything_is_written(store: RunStore) -> None:
    """The reader of `host.json` has limits, so the writer has the same: LAST never names what cannot be read."""
    commit_epoch(store, 0)
    before = {path: path.stat().st_mtime_ns for path in store.paths.run.rglob("*")}
    large = {"components": {"small": [1, 2], "counter": {"seen": list(range(250_000))}}}
    message = r"host\.json: components\.counter\.seen: has 250001 of 250007 values; at most 200000 are read back"
    with pytest.raises(ConfigError, match=message):
        commit_epoch(store, 1, host=large)
    assert {path: path.stat().st_mtime_ns for path in store.paths.run.rglob("*")} == before
    assert read_point(store.paths).epoch == 0
    store.committer.commit(scenario.point(1, host={"components": {"counter": {"seen": list(range(190_000))}}}))
    store.committer.drain()
    assert len(read_point(store.paths).host["components"]["counter"]["seen"]) == 190_000
    assert rows(store.paths.root) == [0, 1]
    with pytest.raises(ConfigError, match=r"artifact\.json: has 200003 values; at most 200000"):
        store.finish({f"v{number}": None for number in range(200_002)})
    assert read_point(store.paths).pointer == store.committer.last


def test_no_space_is_said_before_anything_is_written(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """case:I02 the message names the path, what is needed and what is free; nothing was touched."""
    commit_epoch(store, 0)
    before = sorted(path for path in store.paths.run.rglob("*"))
    monkeypatch.setattr(fsio, "disk_free", lambda path: 100)
    with pytest.raises(CommitError, match=r"generations: no space left for a checkpoint of \d+ bytes, 100 bytes are"):
        commit_epoch(store, 1)
    assert [path for path in sorted(store.paths.run.rglob("*")) if not path.name.startswith(".partial")] == before


def mount_tmpfs(mount: Path, options: str) -> None:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(mount)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")


def test_a_really_full_disk(tmp_path: Path) -> None:
    """case:I02 D1 a tmpfs that fits one and a half checkpoints."""
    mount = tmp_path / "small"
    mount.mkdir()
    mount_tmpfs(mount, "size=3m")
    try:
        with open_store(mount) as store:
            commit_epoch(store, 0)
            big = {"w": np.random.default_rng(0).standard_normal(180_000)}
            commit_epoch(store, 1, arrays=big)
            with pytest.raises(CommitError, match="no space left|No space left"):
                commit_epoch(store, 2, arrays=big)
        assert audit.verify(mount, RUN_ID) == []
        assert rows(mount) == [0, 1]
        with open_store(mount) as store:
            assert store.point is not None
            np.testing.assert_array_equal(store.point.load_all()["w"], big["w"])
    finally:
        subprocess.run(["umount", str(mount)], check=True)


# Failures after LAST -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Q1", "BEST", "snap"])
def test_a_failure_after_last_keeps_the_pair(store: RunStore, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """nnx:B101 nnx:S28 D9: history and LAST keep the epoch, the error surfaces, the other names are still tried."""
    commit_epoch(store, 0)
    monkeypatch.setattr(pointers, "write_pointer", failing(pointers.write_pointer, name))
    with pytest.raises(CheckpointError, match=f"is committed .*but what follows failed.*injected into {name}"):
        commit_epoch(store, 1, names=("Q1",), deferred=("snap",))
    assert rows(store.paths.root) == [0, 1]
    assert read_point(store.paths).epoch == 1
    found = pointers.list_pointers(store.paths)
    assert {other: found[other].epoch for other in {"Q1", "BEST", "snap"} - {name}} == {
        other: 1 for other in {"Q1", "BEST", "snap"} - {name}
    }
    assert audit.verify(store.paths.root, RUN_ID) == []


def test_a_failing_retention_keeps_everything(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """D9: pruning fails last, and only that is reported."""
    store.committer._keep = 1
    commit_epoch(store, 0, names=(), best=False)
    monkeypatch.setattr(fsio, "remove_tree", fail)
    with pytest.raises(CheckpointError, match="is committed .*injected"):
        commit_epoch(store, 1, names=(), best=False)
    assert rows(store.paths.root) == [0, 1]
    monkeypatch.undo()
    commit_epoch(store, 2, names=(), best=False)
    assert on_disk(store.paths.root) == {3}


def test_closing_never_hides_the_first_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D9: the training's own error comes out; the failed commit is a note on it."""

    def train() -> None:
        with open_store(tmp_path) as store:
            monkeypatch.setattr(fsio, "sync_tree", fail)
            commit_epoch(store, 0, drain=False)
            raise RuntimeError("training broke")

    with pytest.raises(RuntimeError, match="training broke") as caught:
        train()
    assert any("closing the run failed too" in note for note in caught.value.__notes__)
    lease.acquire(RunPaths(tmp_path, RUN_ID)).release()


# Generations, retention ----------------------------------------------------------------------------------------------


def keep_run(root: Path, keep: int | None, best: list[bool]) -> list[set[int]]:
    found = []
    with open_store(root, keep=keep) as store:
        for epoch, improved in enumerate(best):
            commit_epoch(store, epoch, names=(), best=improved)
            found.append(on_disk(root))
    return found


def test_rotation_keeps_best(tmp_path: Path) -> None:
    """case:H09 metrics .1 .5 .4 .3 (lower is better), keep 2: after save 4 there are 1 (BEST), 3 and 4."""
    assert keep_run(tmp_path, 2, [True, False, False, False])[-1] == {1, 3, 4}


def test_rotation_keeps_the_newest(tmp_path: Path) -> None:
    """case:H10 it only gets worse: LAST is 5 and BEST is 1, whatever `keep` is."""
    assert keep_run(tmp_path, 3, [True, False, False, False, False])[-1] == {1, 3, 4, 5}
    found = pointers.list_pointers(RunPaths(tmp_path, RUN_ID))
    assert (found["LAST"].generation, found["BEST"].generation) == (5, 1)


@pytest.mark.parametrize("best", [False, True])
def test_keep_one(tmp_path: Path, best: bool) -> None:
    """case:H11 the newest is there after each save; with BEST also that."""
    expected = [{1}, {1, 2}, {1, 3}] if best else [{1}, {2}, {3}]
    assert keep_run(tmp_path, 1, [best, False, False]) == expected


def test_the_old_one_goes_only_after_the_new_one_is_complete(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """case:H11 while the new commit fails, the old generation stays."""
    store.committer._keep = 1
    commit_epoch(store, 0, names=(), best=False)
    monkeypatch.setattr(pointers, "write_pointer", failing(pointers.write_pointer, "LAST"))
    with pytest.raises(CommitError, match="injected"):
        commit_epoch(store, 1, names=(), best=False)
    assert 1 in on_disk(store.paths.root)
    assert read_point(store.paths).generation == 1


@pytest.mark.parametrize("keep", [0, -1, True, 1.5, "2"])
def test_impossible_keep_is_refused(tmp_path: Path, keep: Any) -> None:
    """case:H11 0, -1 and non-numbers are errors before any directory exists; None keeps all."""
    with pytest.raises(ConfigError, match=r"keep.*>= 1, or None"):
        open_store(tmp_path / "runs", keep=keep)
    assert not (tmp_path / "runs").exists()


def test_keep_none_keeps_all(tmp_path: Path) -> None:
    """case:H11 None is the documented way to keep everything."""
    assert keep_run(tmp_path, None, [False] * 3)[-1] == {1, 2, 3}


def test_a_damaged_pointer_stops_the_removal(store: RunStore) -> None:
    """I6: when it is unknown what a pointer names, nothing is removed."""
    store.committer._keep = 1
    commit_epoch(store, 0, names=("FIRST",), best=False)
    store.paths.pointer("FIRST").write_text("")
    with pytest.raises(CheckpointError, match="is committed .*FIRST: is empty"):
        commit_epoch(store, 1, names=(), best=False)
    assert on_disk(store.paths.root) == {1, 2}


def test_leavings_are_listed_ignored_and_not_in_the_way(root: Path) -> None:
    """case:I03 an empty directory 7, an Orbax temporary 9, junk: LAST is what it was, later saves get other numbers."""
    generations = root / RUN_ID / "checkpoints" / "generations"
    (generations / "7").mkdir()
    (generations / "9.orbax-checkpoint-tmp-0").mkdir()
    (generations / ".partial-8-1").mkdir()
    (generations / "junk").write_text("x")
    with open_store(root) as store:
        assert store.point is not None
        assert store.point.generation == 2
        assert store.ignored == (".partial-8-1", "7", "9.orbax-checkpoint-tmp-0", "junk")
        for epoch in range(2, 4):
            commit_epoch(store, epoch, names=())
        assert store.committer.last is not None
        assert store.committer.last.generation == 10
    left = {path.name for path in generations.iterdir()}
    assert left == {"1", "2", "10", "9.orbax-checkpoint-tmp-0", "junk"}
    assert audit.verify(root, RUN_ID) == []


def test_numbers_are_never_used_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed commit burns its number, also for the next process."""
    with open_store(root) as store:
        monkeypatch.setattr(fsio, "digest_tree", fail)
        for _ in range(2):
            with pytest.raises(CommitError, match="injected"):
                commit_epoch(store, 2)
        monkeypatch.undo()
    with open_store(root) as store:
        commit_epoch(store, 2)
        assert store.committer.last is not None
        assert store.committer.last.generation == 5


def test_newest_is_by_number(root: Path) -> None:
    """case:I18 9, 10, 100 with mixed times: the next number is 101 and retention keeps 100."""
    paths = RunPaths(root, RUN_ID)
    census = retain.take_census(paths)
    assert census.highest == 2
    for number in (100, 9, 10):
        paths.generation(number).mkdir()
        paths.manifest(number).write_text("{}")
    os.utime(paths.generation(9))
    census = retain.take_census(paths)
    assert (max(census.complete), census.highest) == (100, 100)
    assert sorted(census.complete) == [1, 2, 9, 10, 100]


def test_phase_names_of_eight_epochs() -> None:
    """nnx:B096 FIRST, Q1, Q2, Q3 fall on epochs 0, 1, 3, 5."""
    assert {name: epoch for epoch in range(8) for name in pointers.phase_names(epoch, 8)} == {
        "FIRST": 0,
        "Q1": 1,
        "Q2": 3,
        "Q3": 5,
    }


@pytest.mark.parametrize(
    ("n_epochs", "expected"),
    [
        (1, {0: "FIRST"}),
        (2, {0: "FIRST"}),
        (3, {0: "FIRST", 1: "Q3"}),
        (4, {0: "FIRST", 1: "Q2", 2: "Q3"}),
        (5, {0: "FIRST", 1: "Q2", 2: "Q3"}),
    ],
)
def test_phase_names_of_short_runs(n_epochs: int, expected: dict[int, str]) -> None:
    """nnx:B096 the first name wins where a short run makes them collide; by hand from floor(k n / 4) - 1."""
    found = {epoch: pointers.phase_names(epoch, n_epochs) for epoch in range(n_epochs)}
    assert {epoch: names[0] for epoch, names in found.items() if names} == expected
    assert all(len(names) <= 1 for names in found.values())


def test_without_phases_only_last_and_best(tmp_path: Path) -> None:
    """nnx:B097"""
    with open_store(tmp_path) as store:
        for epoch in range(3):
            commit_epoch(store, epoch, names=())
    assert NNRun.load(RUN_ID, tmp_path).checkpoints() == ["LAST", "BEST"]


@pytest.mark.parametrize("tag", ["a/b", "..", "", "x*", "\0", "generations", "last", "Best", "7", ".hidden", "é"])
def test_unsafe_tags_are_refused_before_the_commit(store: RunStore, tag: str) -> None:
    """nnx:B120 case:J06 a tag is one plain file name, and none of the store's own in any case."""
    with pytest.raises(UnsafePathError, match="tag"):
        commit_epoch(store, 0, deferred=(tag,))
    assert not store.paths.pointer("LAST").exists()


def test_a_reserved_tag_is_refused(store: RunStore) -> None:
    with pytest.raises(CheckpointError, match="'LAST' is written by the store itself"):
        commit_epoch(store, 0, deferred=("LAST",))


# Ownership -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["moved away", "replaced"])
def test_a_directory_moved_away_is_an_error_not_a_second_run(store: RunStore, what: str) -> None:
    """D5 case:I06: the run's directory is renamed, or replaced by another one, in the middle of the run."""
    commit_epoch(store, 0)
    moved = store.paths.root / "moved"
    store.paths.run.rename(moved)
    if what == "replaced":
        store.paths.run.mkdir()
    with pytest.raises(CommitError, match="is gone|was replaced by another"):
        commit_epoch(store, 1)
    assert not store.paths.run.exists() or list(store.paths.run.iterdir()) == []
    if what == "replaced":
        store.paths.run.rmdir()
    moved.rename(store.paths.run)
    assert audit.verify(store.paths.root, RUN_ID) == []
    assert rows(store.paths.root) == [0]


def test_a_read_only_disk_is_refused_at_the_start(tmp_path: Path) -> None:
    """D5: a read-only file system (root ignores mode bits, so a real mount)."""
    mount = tmp_path / "ro"
    mount.mkdir()
    mount_tmpfs(mount, "ro")
    try:
        with pytest.raises(OSError, match="Read-only file system"):
            open_store(mount / "runs")
    finally:
        subprocess.run(["umount", str(mount)], check=True)


ZOMBIE = """
import sys
from nnx_jax.core.errors import NnxError
from tests.runs import scenario
store = scenario.open_store(sys.argv[1], keep=None)
scenario.commit_epoch(store, 0)
print("ready", flush=True)
sys.stdin.readline()
try:
    scenario.commit_epoch(store, 1)
    print("committed", flush=True)
except NnxError as error:
    print(type(error).__name__, flush=True)
"""


def test_a_stopped_writer_cannot_commit_after_a_take_over(tmp_path: Path) -> None:
    """L4: SIGSTOP, take over by force and commit, SIGCONT: the old writer fails on its lease; LAST is the new one's."""
    process = subprocess.Popen(
        [sys.executable, "-c", ZOMBIE, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        paths = RunPaths(tmp_path, RUN_ID)
        with pytest.warns(RuntimeWarning, match="alive"):
            lease.acquire(paths, force=True).release()
        with open_store(tmp_path, keep=None) as store:
            commit_epoch(store, 1)
            last = paths.pointer("LAST").read_bytes()
            process.stdin.write("\n")
            process.stdin.flush()
            process.send_signal(signal.SIGCONT)
            assert process.stdout.readline() == "LeaseLostError\n"
            assert paths.pointer("LAST").read_bytes() == last
            commit_epoch(store, 2)
        assert audit.verify(tmp_path, RUN_ID) == []
        assert rows(tmp_path) == [0, 1, 2]
    finally:
        process.kill()
        process.communicate()


def test_a_lease_lost_during_the_save_stops_before_last(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """I5: the check is made again after the arrays are down, so a take-over in between is seen."""
    commit_epoch(store, 0)
    before = store.paths.pointer("LAST").read_bytes()
    real = fsio.digest_tree

    def stolen(path: Path) -> Any:
        with pytest.warns(RuntimeWarning, match="alive"):
            lease.acquire(store.paths, force=True)
        return real(path)

    monkeypatch.setattr(fsio, "digest_tree", stolen)
    with pytest.raises(LeaseLostError, match="removed or replaced|taken over"):
        commit_epoch(store, 1)
    assert store.paths.pointer("LAST").read_bytes() == before


def test_a_finished_run_takes_no_more_commits(store: RunStore) -> None:
    commit_epoch(store, 0)
    store.finish({"loss": 0.5})
    with pytest.raises(CheckpointError, match="is finished"):
        commit_epoch(store, 1)


def test_a_run_without_a_commit_cannot_finish(store: RunStore) -> None:
    with pytest.raises(CheckpointError, match="nothing was committed"):
        store.finish({})
