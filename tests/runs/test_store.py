"""The open run: what a start finds and continues from, `runs/best`, provenance, and a source run left alone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnx_jax.core import fsio
from nnx_jax.core.errors import CheckpointError, ConfigError, LeaseHeldError, ResumePointError
from nnx_jax.runs import audit, best, history, lease, pointers, provenance, resume
from nnx_jax.runs.layout import RunPaths
from nnx_jax.runs.provenance import ResumeStatus
from nnx_jax.runs.resume import find_point, read_point, require_same
from nnx_jax.runs.run import NNRun
from nnx_jax.runs.store import RunStore
from tests.runs import scenario
from tests.runs.scenario import RUN_ID, commit_epoch, leaves, open_store, row
from tests.runs.test_damage import snapshot

REPOSITORY = Path(__file__).parents[2]


def test_a_run_is_read_back_as_written(pristine: Path) -> None:
    """nnx:B098 same id, same configuration, bit-equal records."""
    run = NNRun.load(RUN_ID, pristine)
    assert (run.id, run.state, run.status) == (RUN_ID, scenario.SPEC, "interrupted")
    assert run.records == [row(0), row(1)]
    assert run.columns == scenario.COLUMNS
    assert run.column("loss") == [1.0, 0.5]
    assert run.checkpoints() == ["LAST", "BEST", "FIRST", "Q2"]
    with pytest.raises(ResumePointError, match="no history column 'los'; did you mean 'loss'"):
        run.column("los")


def test_the_history_is_read_on_first_use_and_kept(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading, listing, comparing and printing runs reads no history, however long."""
    reads = []
    real = history.read_prefix
    monkeypatch.setattr(history, "read_prefix", lambda *args: (reads.append(args), real(*args))[1])
    run = NNRun.load(RUN_ID, root)
    assert [run] == NNRun.all(root)
    assert "loss" not in repr(run)
    assert run.status == "interrupted"
    assert reads == []
    scenario.run(root, 3)
    assert NNRun.load(RUN_ID, root) != run
    reads.clear()
    assert run.records == [row(0), row(1)]  # where LAST stood when it was loaded
    assert run.records is run.records
    assert run.columns == scenario.COLUMNS
    assert len(reads) == 1


def test_interrupted_then_continued_is_the_straight_run(tmp_path: Path) -> None:
    """Two starts of two epochs give the history bytes and the arrays of one start of four."""
    scenario.run(tmp_path / "split", 2)
    scenario.run(tmp_path / "split", 4)
    scenario.run(tmp_path / "straight", 4)
    split, straight = (RunPaths(tmp_path / name, RUN_ID) for name in ("split", "straight"))
    assert split.history.read_bytes() == straight.history.read_bytes()
    a, b = read_point(split), read_point(straight)
    assert a.host == b.host
    arrays_a, arrays_b = a.load_all(), b.load_all()
    assert arrays_a.keys() == arrays_b.keys() == leaves(3).keys()
    for name, expected in leaves(3).items():
        assert arrays_a[name].tobytes() == arrays_b[name].tobytes() == expected.tobytes()
        assert arrays_a[name].dtype == expected.dtype


def test_status_of_a_start(tmp_path: Path) -> None:
    """fresh, then interrupted at the verified point, then finished, which the next start says without writing."""
    with open_store(tmp_path) as store:
        assert (store.status, store.point) == ("fresh", None)
        assert NNRun.load(RUN_ID, tmp_path).status == "running"
        commit_epoch(store, 0)
    with open_store(tmp_path) as store:
        assert store.status == "interrupted"
        assert store.point is not None
        assert (store.point.epoch, store.point.step, store.point.batch) == (0, 5, 5)
        assert store.point.host == {"position": {"epoch": 1, "batch": 0}, "components": {}}
        commit_epoch(store, 1)
        store.finish({"val": {"loss": 0.5}})
        assert store.status == "finished"
    before = snapshot(tmp_path)
    with open_store(tmp_path) as store:
        assert store.status == "finished"
    assert snapshot(tmp_path) == before
    run = NNRun.load(RUN_ID, tmp_path)
    assert (run.status, run.artifact) == ("finished", {"val": {"loss": 0.5}})
    assert audit.verify(tmp_path, RUN_ID) == []
    (tmp_path / RUN_ID / "artifact.json").write_text("{}")
    faults = audit.verify(tmp_path, RUN_ID)
    assert any("artifact.json: is not the file the finished run wrote" in line for line in faults)


def test_probing_an_absent_run_creates_nothing(tmp_path: Path) -> None:
    """nnx:B110"""
    assert resume.probe(tmp_path / "runs", "abc") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_while_saving(tmp_path: Path, kills: int) -> None:
    """case:I01 SIGKILL at random moments of a run that commits all the time; each start verifies and continues."""
    rng = np.random.default_rng(7)
    command = [sys.executable, "-m", "tests.runs.scenario", str(tmp_path), "100000"]
    reached = -1
    for _ in range(kills):
        process = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 120  # a start imports jax and orbax; on a busy machine that is slow
            while time.monotonic() < deadline and epoch_of(tmp_path) <= reached and process.poll() is None:
                time.sleep(0.01)
            time.sleep(float(rng.uniform(0.0, 0.3)))
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert epoch_of(tmp_path) > reached
        reached = epoch_of(tmp_path)
        assert audit.verify(tmp_path, RUN_ID) == []
        run = NNRun.load(RUN_ID, tmp_path)
        assert [record["epoch"] for record in run.records] == list(range(reached + 1))
        found = run.checkpoint().load_all()
        assert all(found[name].tobytes() == value.tobytes() for name, value in leaves(reached).items())
    with pytest.warns(RuntimeWarning, match="taking over"):
        scenario.run(tmp_path, reached + 3)
    assert epoch_of(tmp_path) == reached + 2
    strays = [path.name for path in (tmp_path / RUN_ID).rglob(".*")]
    assert strays == []


def epoch_of(root: Path) -> int:
    try:
        last = resume.probe(root, RUN_ID)
    except FileNotFoundError:
        return -1
    return last.epoch if last else -1


def test_two_starts_of_one_run(tmp_path: Path) -> None:
    """case:I14 nnx:B111 a second process on the same run is refused while the first lives, and nothing is mixed."""
    with open_store(tmp_path) as store:
        commit_epoch(store, 0)
        command = [sys.executable, "-m", "tests.runs.scenario", str(tmp_path), "3"]
        other = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert other.returncode == 1
        assert f"LeaseHeldError: checkpoint: run '{RUN_ID}' is held by process {os.getpid()} on host" in other.stderr
        commit_epoch(store, 1)
    assert [record["epoch"] for record in NNRun.load(RUN_ID, tmp_path).records] == [0, 1]


# Names of places -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["runs/x", "runs/with space/", "./a/../b"])
def test_a_relative_root_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """case:I17 a relative directory, spaces, a trailing slash, and a chdir between start and save."""
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path)
    with open_store(given) as store:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        commit_epoch(store, 0)
    assert read_point(RunPaths(tmp_path / given, RUN_ID)).epoch == 0
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_the_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """case:I17 `~` means the home directory, not a directory of that name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with open_store("~/runs") as store:
        commit_epoch(store, 0)
    assert NNRun.load(RUN_ID, tmp_path / "runs").status == "interrupted"
    assert not (tmp_path / "~").exists()


# Continuing from another run -----------------------------------------------------------------------------------------


def test_a_new_run_from_an_old_one_leaves_it_alone(root: Path) -> None:
    """nnx:B136 case:I16 go back to an earlier step, retrain with other data: a new lineage; the source is untouched."""
    source = find_point(root, f"{RUN_ID}@5")
    assert (source.name, source.epoch, source.generation) == ("5", 0, 1)
    before = {name: data for name, data in snapshot(root).items() if name.startswith(RUN_ID)}
    status = ResumeStatus(
        mode="stateful",
        source_run_id=source.run_id,
        source_checkpoint=source.name,
        source_epoch=source.epoch,
        source_generation=source.generation,
        source_checkpoint_id=source.manifest_sha256,
    )
    restored = source.load_all()
    with open_store(root, "branch", resume=status) as store:
        for epoch in range(1, 4):
            commit_epoch(store, epoch, arrays={**leaves(epoch), "rng": restored["rng"]}, best=False)
    assert {name: data for name, data in snapshot(root).items() if name.startswith(RUN_ID)} == before
    branch = NNRun.load("branch", root)
    assert [record["epoch"] for record in branch.records] == [1, 2, 3]
    assert branch.checkpoint().load_all()["rng"].tobytes() == restored["rng"].tobytes()
    assert branch.resume_status == status
    assert status.source_checkpoint_id == NNRun.load(RUN_ID, root).pointers["FIRST"].manifest


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing", f"there is no run 'missing'.*{RUN_ID}"),
        (f"{RUN_ID[:-1]}9@LAST", f"did you mean '{RUN_ID}'"),
        (f"{RUN_ID}@snap", "has no checkpoint 'snap'; other checkpoints of this run: LAST, BEST, FIRST, Q2"),
        (f"{RUN_ID}@7", "keeps no checkpoint of step 7; kept steps: 5, 10"),
    ],
)
def test_a_missing_source_is_an_error(pristine: Path, source: str, message: str) -> None:
    """nnx:B130 a ValueError that says what there is instead."""
    with pytest.raises(ResumePointError, match=message):
        find_point(pristine, source)


def test_no_last_is_an_error_for_an_explicit_resume(tmp_path: Path) -> None:
    """nnx:B130 case:I03 nothing complete: a start is fresh, an explicit resume is refused."""
    with open_store(tmp_path) as store:
        assert store.status == "fresh"
    with pytest.raises(ResumePointError, match=f"run '{RUN_ID}' in .* has no checkpoint 'LAST'"):
        find_point(tmp_path, RUN_ID)


DIFFERENCES: list[tuple[Any, Any, str]] = [
    ({"kind": "adam", "b": None}, {"kind": "sgd", "b": None}, r"optimizer\.kind: .* has 'adam', this run has 'sgd'"),
    ({"groups": [{"lr": 0.1}]}, {"groups": [{"lr": 0.2}]}, r"optimizer\.groups\[0\]\.lr: .* has 0\.1, .* has 0\.2"),
    ({"a": 1}, {"a": 1, "clip": 1.0}, r"optimizer\.clip: .* has nothing, this run has 1\.0"),
    ({"n": [1, 2]}, {"n": [1]}, r"optimizer\.n\[1\]: .* has 2, this run has nothing"),
    ({"n": 1}, {"n": True}, r"optimizer\.n: .* has 1, this run has True"),
    ({"n": 1}, {"n": 1.0}, r"optimizer\.n: .* has 1, this run has 1\.0"),
]


@pytest.mark.parametrize(("stored", "wanted", "message"), DIFFERENCES)
def test_the_first_difference_is_named_with_both_sides(stored: Any, wanted: Any, message: str) -> None:
    """nnx:B129 case:I10 another optimizer, an added clip, another rate: path and both sides."""
    with pytest.raises(ResumePointError, match=message):
        require_same(stored, wanted, "optimizer")


def test_equal_descriptions_pass() -> None:
    require_same({"a": [1, {"b": None}]}, {"a": (1, {"b": None})}, "optimizer")


# runs/best, overwrite ------------------------------------------------------------------------------------------------


def scored(root: Path, run_id: str, *scores: float | None) -> None:
    """A run whose BEST moves at every given score."""
    with open_store(root, run_id) as store:
        for epoch, score in enumerate(scores):
            commit_epoch(store, epoch, names=(), score=score)


def test_best_follows_the_lowest_score_and_ties_keep_the_holder(tmp_path: Path) -> None:
    """nnx:B113 equal scores: the incumbent stays; a strictly lower one takes over; a link to the sibling's name."""
    scored(tmp_path, "b", 0.5)
    assert os.readlink(tmp_path / "best") == "b"
    scored(tmp_path, "a", 0.5)
    assert best.read_best(tmp_path) == "b"
    scored(tmp_path, "c", 0.6, 0.4)
    assert best.read_best(tmp_path) == "c"
    assert (tmp_path / "best" / "run.yaml").is_file()


def test_overwriting_the_holder_moves_best_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nnx:B112 the pointer goes to the best survivor before the deletion, and back only when the new BEST commits."""
    for run_id, score in (("b", 0.3), ("c", 0.2), ("a", 0.3)):
        scored(tmp_path, run_id, score)
    assert best.read_best(tmp_path) == "c"
    seen = []
    real = fsio.remove_tree
    monkeypatch.setattr(fsio, "remove_tree", lambda path: (seen.append(best.read_best(tmp_path)), real(path))[1])
    with open_store(tmp_path, "c") as store:
        store.finish({"status": "finished"})
    with open_store(tmp_path, "c", overwrite=True) as store:
        assert seen == ["a"]
        assert (store.status, best.read_best(tmp_path)) == ("fresh", "a")
        commit_epoch(store, 0, names=(), best=False, score=0.1)
        assert best.read_best(tmp_path) == "a"
        commit_epoch(store, 1, names=(), best=True, score=0.1)
        assert best.read_best(tmp_path) == "c"
        assert store.lease.fencing == 3


def test_a_run_ranked_by_a_monitor_takes_no_part(tmp_path: Path) -> None:
    """nnx.md 4.7: only BEST of a run without a monitor counts for `runs/best`."""
    scored(tmp_path, "a", None)
    assert best.read_best(tmp_path) is None
    assert not os.path.lexists(tmp_path / "best")
    assert "BEST" in NNRun.load("a", tmp_path).checkpoints()


def test_a_link_that_leads_elsewhere_is_no_best(tmp_path: Path) -> None:
    """H5: `runs/best` pointing outside is not believed, and the next election replaces the link itself."""
    outside = tmp_path / "outside"
    outside.mkdir()
    root = tmp_path / "runs"
    root.mkdir()
    (root / "best").symlink_to(outside)
    assert best.read_best(root) is None
    scored(root, "a", 0.5)
    assert os.readlink(root / "best") == "a"
    assert list(outside.iterdir()) == []


def test_overwrite_needs_the_lease(tmp_path: Path) -> None:
    """nnx:B112 a run that is being written is not removed under its writer."""
    with open_store(tmp_path) as store:
        commit_epoch(store, 0)
        with pytest.raises(LeaseHeldError, match="this very process"):
            open_store(tmp_path, overwrite=True)
        assert read_point(store.paths).epoch == 0


def test_overwrite_continues_an_interrupted_run(root: Path) -> None:
    """Only a finished run is replaced: work that nobody has seen the end of is not thrown away."""
    with open_store(root, overwrite=True) as store:
        assert store.status == "interrupted"
        assert store.point is not None
        assert store.point.epoch == 1
        store.finish({"status": "finished"})
    with open_store(root) as store:
        assert store.status == "finished"
    with open_store(root, overwrite=True) as store:
        assert (store.status, store.point) == ("fresh", None)


DAMAGED_STARTS: dict[str, tuple[Callable[[RunPaths], object], str]] = {
    "LAST empty": (lambda paths: paths.pointer("LAST").write_text(""), "start over with overwrite_existing"),
    "LAST gone": (lambda paths: paths.pointer("LAST").unlink(), "or overwrite the run explicitly"),
    "host gone": (lambda paths: (paths.generation(2) / "host.json").unlink(), r"host\.json: is missing"),
}


@pytest.mark.parametrize("damage", DAMAGED_STARTS)
def test_overwrite_replaces_a_damaged_run(root: Path, damage: str) -> None:
    """The way out that the error names works, and the fencing number goes on growing."""
    spoil, message = DAMAGED_STARTS[damage]
    spoil(RunPaths(root, RUN_ID))
    with pytest.raises(ResumePointError, match=message):
        open_store(root)
    with open_store(root, overwrite=True) as store:
        assert store.status == "fresh"
        assert store.lease.fencing > 2
        commit_epoch(store, 0)
    assert audit.verify(root, RUN_ID) == []


def test_metric_names_with_slashes_are_only_column_names(tmp_path: Path) -> None:
    """case:H12 "val/loss" as a column, keep 1, three saves, a resume: one flat set of checkpoints."""
    columns = ("epoch", "val/loss")
    for start, stop in ((0, 3), (3, 4)):
        with RunStore.open(tmp_path, RUN_ID, {"monitor": "val/loss"}, columns, keep=1) as store:
            for epoch in range(start, stop):
                store.history.append([{"epoch": epoch, "val/loss": 0.5 - epoch}])
                store.committer.commit(scenario.point(epoch, names=(), host={"monitor": "val/loss"}))
    run = NNRun.load(RUN_ID, tmp_path)
    assert run.column("val/loss") == [0.5, -0.5, -1.5, -2.5]
    assert run.checkpoints() == ["LAST", "BEST"]
    checkpoints = tmp_path / RUN_ID / "checkpoints"
    assert [path.name for path in (checkpoints / "generations").iterdir()] == ["4"]
    assert {path.name for path in checkpoints.iterdir()} == {"BEST", "LAST", "generations", "manifests"}


# Provenance ----------------------------------------------------------------------------------------------------------


def test_metadata_says_where_it_ran_and_never_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nnx:B118 versions, platform, git state, resume status; no environment value; the id is the caller's."""
    monkeypatch.setenv("API_TOKEN", "planted-secret-4711")
    monkeypatch.chdir(REPOSITORY)
    with open_store(tmp_path, metadata={"precision": "float32"}) as store:
        commit_epoch(store, 0)
    run = NNRun.load(RUN_ID, tmp_path)
    versions = run.metadata["versions"]
    assert {"nnx_jax", "jax", "flax", "optax", "orbax-checkpoint", "grain", "numpy"} <= versions.keys()
    assert versions["numpy"] == np.__version__
    assert run.metadata["python"] == ".".join(map(str, sys.version_info[:3]))
    assert run.metadata["precision"] == "float32"
    assert run.resume_status == ResumeStatus(mode="fresh")
    assert run.id == RUN_ID
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert b"planted-secret-4711" not in path.read_bytes(), path


def test_git_state_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commit and dirtiness inside a checkout, nothing outside one."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance.collect()["git"] is None
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    (tmp_path / "file").write_text("1")
    for arguments in (["init", "-q"], ["add", "file"], [*identity, "commit", "-q", "-m", "x"]):
        subprocess.run(["git", *arguments], check=True, cwd=tmp_path)
    state = provenance.collect()["git"]
    assert (len(state["commit"]), state["dirty"]) == (40, False)
    (tmp_path / "file").write_text("2")
    assert provenance.collect()["git"]["dirty"] is True


def test_an_unknown_resume_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="'sideways'; legal: fresh, stateful, weights_only"):
        ResumeStatus(mode="sideways")


def test_stranded_temporaries_are_removed_at_the_next_start(root: Path) -> None:
    """nnx:B107 nnx:S32 a temporary left by a kill is ignored by readers, never reused, and swept by the next writer."""
    stray = root / RUN_ID / "checkpoints" / ".LAST.0123456789ab"
    stray.write_text("half")
    foreign = root / RUN_ID / "checkpoints" / ".keep-me"
    foreign.write_text("mine")
    assert NNRun.load(RUN_ID, root).checkpoints() == ["LAST", "BEST", "FIRST", "Q2"]
    open_store(root).close()
    assert not stray.exists()
    assert foreign.exists()


def test_a_configuration_that_could_not_be_read_back_is_refused_first(root: Path) -> None:
    """Neither a new directory nor the end of a finished run comes of it, and the lease is free again."""
    with open_store(root) as store:
        store.finish({"status": "finished"})
    before = snapshot(root)
    message = r"run\.yaml: model: has 10002 of 10004 values; at most 10000 are read back, so nothing is written"
    for run_id in (RUN_ID, "new"):
        with pytest.raises(ConfigError, match=message):
            RunStore.open(root, run_id, {"model": [0] * 10_001}, scenario.COLUMNS, overwrite=True)
    with pytest.raises(ConfigError, match=r"metadata\.yaml: would be \d+ bytes long; at most 1048576 are read back"):
        open_store(root, overwrite=True, metadata={"devices": "x" * 2**20})
    assert not (root / "new").exists()
    assert {name: data for name, data in snapshot(root).items() if name in before} == before
    assert NNRun.load(RUN_ID, root).status == "finished"


def test_a_failed_text_write_leaves_the_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nnx:B108 nnx:S30 nnx:S32 run.yaml, metadata.yaml and idps.csv are replaced one by one; earlier ones stay."""
    real = fsio.atomic_write

    def broken(path: Path, data: bytes, **kwargs: Any) -> None:
        if Path(path).name == "metadata.yaml":
            raise OSError(5, "injected", str(path))
        real(path, data, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(fsio, "atomic_write", broken)
        with pytest.raises(OSError, match="injected"):
            open_store(tmp_path)
    assert (tmp_path / RUN_ID / "run.yaml").is_file()
    assert not (tmp_path / RUN_ID / "metadata.yaml").exists()
    lease.acquire(RunPaths(tmp_path, RUN_ID)).release()
    scenario.run(tmp_path, 1)
    assert pointers.read_pointer(RunPaths(tmp_path, RUN_ID)) is not None


def test_other_columns_on_the_second_start_are_refused(root: Path) -> None:
    """case:L03 nothing is changed when the columns differ, and the lease is free again."""
    before = snapshot(root)
    with pytest.raises(CheckpointError, match="fixed at its first start"):
        RunStore.open(root, RUN_ID, scenario.SPEC, ("epoch", "loss"))
    assert snapshot(root) == before
    open_store(root).close()
