"""One writes, the others take part: opening, committing and failing together. Processes are threads here."""

from __future__ import annotations

import errno
import re
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnx_jax.core import fsio
from nnx_jax.core.errors import (
    CommitError,
    ConfigError,
    DistributedFailure,
    LeaseHeldError,
    ProcessGroupError,
    ResumePointError,
    UnsafePathError,
)
from nnx_jax.params.history import HistoryJournal
from nnx_jax.runs import arrays, attempt, best, lease, pointers
from nnx_jax.runs.experiment import ExperimentManifest
from nnx_jax.runs.layout import RunPaths
from nnx_jax.runs.resume import find_point
from nnx_jax.runs.run import NNRun
from nnx_jax.runs.store import RunStore
from nnx_jax.runs.together import share_point
from nnx_jax.spmd.world import World
from tests.runs.scenario import RUN_ID, SPEC, commit_epoch, leaves, open_store, point, row
from tests.runs.threads import together


def counted(monkeypatch: pytest.MonkeyPatch, where: Any, name: str) -> Counter[str]:
    """Count calls of a function by process: rank-0, rank-1, or the thread that waits for commits of either."""
    real, calls = getattr(where, name), Counter[str]()

    def call(*args: Any, **options: Any) -> Any:
        calls[re.sub(r"(?<=^commit).*", "", threading.current_thread().name)] += 1
        return real(*args, **options)

    monkeypatch.setattr(where, name, call)
    return calls


def failing(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, when: Callable[..., bool]) -> list[int]:
    """Let a function of the file layer fail once, as a full disk does, for arguments that `when` picks."""
    real, done = getattr(where, name), []

    def call(*args: Any, **options: Any) -> Any:
        if not done and when(*args):
            done.append(1)
            raise OSError(errno.ENOSPC, "No space left on device", str(args[0]))
        return real(*args, **options)

    monkeypatch.setattr(where, name, call)
    return done


# Opening --------------------------------------------------------------------------------------------------------------


def test_one_process_opens_and_all_have_the_run(tmp_path: Path) -> None:
    """A fresh run, two commits, the end: every process sees the same LAST at every moment, one has files to show."""

    def work(world: World) -> Any:
        seen = []
        with open_store(tmp_path, world=world) as store:
            assert (store.status, store.point, store.world, store.writes) == ("fresh", None, world, world.writes)
            for epoch in (0, 1):
                commit_epoch(store, epoch)
                seen.append(store.committer.last)
            seen.append(store.finish({"format": "none"}))
            assert store.status == "finished"
        return seen

    one, other, _ = together(work, writer_rank=1)
    assert one == other
    assert [last.epoch for last in one] == [0, 1, 1]
    run = NNRun.load(RUN_ID, tmp_path)
    assert run.last == one[-1]
    assert run.records == [row(0), row(1)]
    loaded = run.checkpoint().load_all()
    assert all(np.array_equal(loaded[name], array) for name, array in leaves(1).items())
    assert sorted(path.name for path in tmp_path.iterdir()) == [".leases", RUN_ID, "best"]


def test_only_the_writer_takes_the_lease_and_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nnx:B213 nnx:S65 nnx:S66 nnx:S78

    Lease, arrays, history and pointers are the writer's; the other one's counts are 0.
    """
    names = {lease: "acquire", arrays.ArrayWriter: "start", best: "propose"}
    calls = [counted(monkeypatch, where, name) for where, name in names.items()]
    calls += [counted(monkeypatch, fsio, name) for name in ("atomic_write", "append_bytes", "replace_dir", "make_dir")]

    def work(world: World) -> Any:
        with open_store(tmp_path, world=world) as store:
            commit_epoch(store, 0)

    assert together(work)[:2] == [None, None]
    assert all(calls)
    assert {thread for each in calls for thread in each} == {"rank-0", "commit"}


def test_a_run_that_is_held_elsewhere(root: Path) -> None:
    """The writer says who holds it, the other process names the writer's error; nothing is changed."""
    before = pointers.read_pointer(RunPaths(root, RUN_ID))
    with open_store(root):
        one, other, _ = together(lambda world: open_store(root, world=world))
    assert isinstance(one, LeaseHeldError)
    assert isinstance(other, DistributedFailure)
    assert (other.rank, other.stage, other.kind) == (0, "opening the run", "LeaseHeldError")
    assert str(one) in str(other)
    assert pointers.read_pointer(RunPaths(root, RUN_ID)) == before


def test_waiting_for_a_run_longer_than_for_each_other(root: Path) -> None:
    """`wait_seconds` is not cut by the bound of waits inside the group: the writer says that it still waits."""
    holder = open_store(root)
    release = threading.Timer(2.5, holder.close)
    release.start()
    found = together(lambda world: waited(root, world, 20.0), timeout_seconds=1)
    assert found[:2] == ["interrupted", "interrupted"]
    with open_store(root):
        one, other, seconds = together(lambda world: waited(root, world, 1.5), timeout_seconds=1)
    assert isinstance(one, LeaseHeldError)
    assert isinstance(other, DistributedFailure)
    assert other.kind == "LeaseHeldError"
    assert seconds < 5


def waited(root: Path, world: World, seconds: float) -> str:
    with open_store(root, world=world, wait_seconds=seconds) as store:
        return store.status


def test_a_run_that_other_columns_ask_for(root: Path) -> None:
    """What is wrong with the call and not with stored files is the writer's error; its lease is free again."""
    one, other, _ = together(lambda world: open_store_with(root, ("epoch", "loss"), world))
    assert "columns were fixed" in str(one)
    assert isinstance(other, DistributedFailure)
    with open_store(root) as store:
        assert store.status == "interrupted"


def open_store_with(root: Path, columns: tuple[str, ...], world: World) -> Any:
    return RunStore.open(root, RUN_ID, SPEC, columns, world=world)


def test_a_directory_that_is_not_shared(tmp_path: Path) -> None:
    """Both names are in the message, no run was begun, and the file that was looked for is gone."""
    roots = [tmp_path / "here", tmp_path / "there"]
    one, other, seconds = together(lambda world: open_store(roots[world.rank], world=world), timeout_seconds=1.5)
    assert type(other) is ProcessGroupError
    assert f"does not see in {roots[1]} what rank 0" in str(other)
    assert f"wrote in {roots[0]}; runs_dir must be one directory that all processes share" in str(other)
    assert isinstance(one, DistributedFailure)
    assert (one.rank, one.stage) == (1, "runs_dir")
    assert seconds < 5
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert not (roots[0] / RUN_ID).exists()


def test_the_directory_as_each_process_sees_it(tmp_path: Path) -> None:
    """One directory under two names, as on two machines, is shared."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    roots = [tmp_path / "real", tmp_path / "link"]

    def work(world: World) -> Any:
        with open_store(roots[world.rank], world=world) as store:
            commit_epoch(store, 0)
            return store.committer.last

    one, other, _ = together(work)
    assert one == other
    assert one.epoch == 0


# Resuming -------------------------------------------------------------------------------------------------------------


def test_only_the_writer_verifies(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nnx:S73 nnx:S74: the writer hashes every file of the point; the other process has an equal point, and hashed
    none. Both restore the same arrays and know what follows LAST."""
    files = counted(monkeypatch, fsio, "digest_file")

    def work(world: World) -> Any:
        with open_store(root, world=world) as store:
            assert store.point is not None
            arrays = {name: array.tobytes() for name, array in store.point.load_all().items()}
            return store.status, store.ignored, store.point, arrays

    one, other, _ = together(work)
    assert one == other
    assert one[0] == "interrupted"
    assert one[2].host["position"]["epoch"] == 2
    assert one[3] == {name: array.tobytes() for name, array in leaves(1).items()}
    assert list(files) == ["rank-0"]
    assert files["rank-0"] >= len(one[2].manifest.files)


@pytest.mark.parametrize("ways", ["own", "from another run"])
def test_a_damaged_point_is_refused_alike(root: Path, monkeypatch: pytest.MonkeyPatch, ways: str) -> None:
    """nnx:B227 nnx:S75: every process raises the same ResumePointError text, and the writer alone hashed files."""
    paths = RunPaths(root, RUN_ID)
    newest = max(int(path.name) for path in paths.generations.iterdir())
    victim = next(path for path in paths.generation(newest).rglob("d/*") if path.is_file())
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(bytes(data))
    files = counted(monkeypatch, fsio, "digest_file")

    def work(world: World) -> Any:
        if ways == "own":
            return open_store(root, world=world)
        return share_point(world, root, lambda: find_point(root, f"{RUN_ID}@LAST"))

    one, other, _ = together(work, writer_rank=1)
    assert type(one) is type(other) is ResumePointError
    assert str(one) == str(other)
    assert "SHA-256 differs" in str(one)
    assert list(files) == ["rank-1"]


def test_a_run_id_that_is_none_is_refused_alike(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nnx:B228: the same ValueError on every process, and nothing is hashed; the same for a run that is not there."""
    files = counted(monkeypatch, fsio, "digest_file")
    for source, kind in (("../other", UnsafePathError), ("0000000000000000", ResumePointError)):
        one, other, _ = together(lambda world, s=source: share_point(world, root, lambda: find_point(root, s)))
        assert type(one) is type(other) is kind
        assert isinstance(one, ValueError)
        assert str(one) == str(other)
    assert not files


def test_no_point_to_share(tmp_path: Path) -> None:
    """A run that starts afresh starts afresh everywhere."""
    assert together(lambda world: share_point(world, tmp_path, lambda: None))[:2] == [None, None]


# Failing --------------------------------------------------------------------------------------------------------------


def try_to_commit(root: Path, world: World) -> Any:
    """Commit epochs 2 and 3 of the run at `root`; the error of epoch 2 and the LAST after each."""
    with open_store(root, world=world) as store:
        try:
            commit_epoch(store, 2)
            error = None
        except Exception as failure:
            error = failure
        after = store.committer.last
        store.committer.commit(point(2))  # the history has its row already
        store.committer.drain()
        return error, after, store.committer.last


def last_fails(path: Any, *_: Any) -> bool:
    return Path(path).name == "LAST"


@pytest.mark.parametrize(
    "name, when",
    [
        ("atomic_write", last_fails),
        ("atomic_write", lambda path, *_: "manifests" in str(path)),
        ("append_bytes", lambda path, *_: True),
        ("sync_tree", lambda path, *_: True),
    ],
)
def test_what_fails_on_the_writer_fails_everywhere(
    root: Path, monkeypatch: pytest.MonkeyPatch, name: str, when: Callable[..., bool]
) -> None:
    """nnx:B216 nnx:S67: the writer raises its OSError, the others DistributedFailure naming the epoch, at once; LAST
    and history stand as they were, and the next commit works for all."""
    before = pointers.read_pointer(RunPaths(root, RUN_ID))
    failing(monkeypatch, fsio, name, when)
    one, other, seconds = together(lambda world: try_to_commit(root, world), timeout_seconds=60)
    assert isinstance(one[0], CommitError)
    assert isinstance(one[0], OSError)
    assert "No space left" in str(one[0])
    assert isinstance(other[0], DistributedFailure)
    assert (other[0].rank, other[0].stage) == (0, "commit of generation 3 (epoch 2)")
    assert seconds < 30
    assert one[1] == other[1] == before
    assert one[2] == other[2]
    assert one[2].generation == 4
    assert NNRun.load(RUN_ID, root).records == [row(0), row(1), row(2)]


def test_no_space_before_anything_is_written(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the writer finds at the begin of a commit is raised by that very call, on every process."""
    full = [True]
    real = fsio.disk_free
    monkeypatch.setattr(fsio, "disk_free", lambda path: 10 if full and full.pop() else real(path))
    one, other, _ = together(lambda world: try_to_commit(root, world))
    assert "no space left for a checkpoint" in str(one[0])
    assert isinstance(other[0], DistributedFailure)
    assert other[0].stage == "commit of epoch 2, step 15"
    assert one[2] == other[2]


def test_what_follows_a_commit_fails(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BEST cannot be written: LAST has moved for all, and all stop."""
    failing(monkeypatch, fsio, "atomic_write", lambda path, *_: Path(path).name == "BEST")
    one, other, _ = together(lambda world: try_to_commit(root, world))
    assert "is committed (LAST names it)" in str(one[0])
    assert isinstance(other[0], DistributedFailure)
    assert other[0].stage == "commit of generation 3 (epoch 2): what follows it"
    assert one[1] == other[1]
    assert one[1].generation == 3


@pytest.mark.parametrize("lost", [0, 1])
def test_a_process_that_stops_taking_part(root: Path, lost: int) -> None:
    """Nobody waits longer than the group's timeout for a process that is gone, LAST stands, and the run goes on."""
    before = pointers.read_pointer(RunPaths(root, RUN_ID))

    def work(world: World) -> Any:
        store = open_store(root, world=world)
        if world.rank != lost:
            try:
                commit_epoch(store, 2)
            finally:
                if world.writes:
                    store.close()
        elif world.writes:
            store.lease.release()
        return None

    *found, seconds = together(work, timeout_seconds=1.5)
    assert found[lost] is None
    failure = found[1 - lost]
    assert isinstance(failure, DistributedFailure)
    assert (failure.rank, failure.stage) == (lost, "commit of epoch 2, step 15")
    assert "did not come within 1.5 s" in str(failure)
    assert seconds < 10
    assert pointers.read_pointer(RunPaths(root, RUN_ID)) == before
    with open_store(root) as store:
        commit_epoch(store, 2)


def test_a_process_is_lost_after_last_has_moved(root: Path) -> None:
    """The commit stands, with the pointers the writer makes of it, and the writer says so with the error."""

    class Gone(Exception):
        pass

    def work(world: World) -> Any:
        with open_store(root, world=world) as store:
            if not world.writes:  # it answers for its files, and never asks what became of the commit
                conversation = store.committer._world  # type: ignore[attr-defined]
                _, told = conversation.agree_telling("commit of epoch 2, step 15", lambda: None)
                name = f"commit of generation {told[0]['generation']} (epoch 2)"
                conversation.agree(name, lambda: None)
                conversation.agree_telling(name, lambda: None, dict)
                raise Gone
            commit_epoch(store, 2)

    one, other, _ = together(work, timeout_seconds=1.5)
    assert isinstance(one, DistributedFailure)
    assert one.__notes__ == ["generation 3 is committed: LAST names it"]
    assert isinstance(other, Gone)
    run = NNRun.load(RUN_ID, root)
    assert run.last is not None
    assert run.best is not None
    assert (run.last.epoch, run.best.epoch) == (2, 2)


# Beside the arrays ----------------------------------------------------------------------------------------------------


def test_a_journal_is_the_writers_and_looks_alike(tmp_path: Path) -> None:
    """The live window, the run's first epoch and what is read back are the same everywhere, before and after commits,
    after records were given up, and after a restart; one process writes files."""

    def look(store: Any) -> Any:
        journal = store.history
        rows = [list(map(dict, journal.window)), journal.first_epoch, journal.rows]
        return [*rows, *map(list, (journal.read_back(), journal.read_back(1)))]

    def work(world: World) -> Any:
        seen = []
        journal = HistoryJournal(retention=3, chunk_size=2)
        for start in (0, 3):
            with open_store(tmp_path, journal=journal, world=world) as store:
                seen.append(look(store))
                for epoch in range(start, start + 3):
                    store.history.append_table({"epoch": epoch, "step": [epoch * 2, epoch * 2 + 1], "loss": 0.5}, 2)
                    seen.append(look(store))
                    commit_epoch(store, epoch)
                    seen.append(look(store))
                store.history.append([row(9)])
                seen.append(look(store))
                store.history.discard()
                seen.append(look(store))
        return seen

    one, other, _ = together(work)
    assert one == other
    assert one[-1][0][-1]["epoch"] == 5
    assert len(one[-1][3]) == 18
    assert NNRun.load(RUN_ID, tmp_path).committed_rows == 18


def test_rows_that_are_refused(tmp_path: Path) -> None:
    """A column that was not declared is refused on every process alike."""

    def work(world: World) -> Any:
        with open_store(tmp_path, world=world) as store:
            store.history.append([{"other": 1}])

    one, other, _ = together(work)
    assert type(one) is type(other)
    assert str(one) == str(other)


MANIFEST = ExperimentManifest(task={"kind": "multiclass"})


def test_one_record_of_the_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nnx:B231: every process reads the writer's fingerprint and attempt id, and one attempt.json was written."""
    written = counted(monkeypatch, attempt, "_write")

    def work(world: World) -> Any:
        with open_store(tmp_path, world=world) as store, attempt.recorded(store, MANIFEST, None):
            commit_epoch(store, 0)
            store.finish({"format": "none"})
        run = NNRun.load(RUN_ID, tmp_path)
        assert run.provenance is not None
        assert run.attempt is not None
        return run.provenance.fingerprint, run.attempt.attempt_id, run.attempt.status

    one, other, _ = together(work, writer_rank=1)
    assert one == other
    assert one[2] == "completed"
    assert written == {"rank-1": 2}


def test_an_attempt_at_another_experiment(root: Path) -> None:
    """The writer's refusal stops every process, and nothing is written."""
    other_task = ExperimentManifest(task={"kind": "regression"})
    for said, refused in ((MANIFEST, False), (other_task, True)):

        def work(world: World, said: ExperimentManifest = said) -> Any:
            with open_store(root, world=world) as store, attempt.recorded(store, said, None):
                return None

        one, other, _ = together(work)
        assert isinstance(one, ConfigError) is refused
        assert isinstance(other, DistributedFailure) is refused
    assert NNRun.load(RUN_ID, root).provenance.manifest == MANIFEST  # type: ignore[union-attr]
