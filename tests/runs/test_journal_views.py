"""Reading journals: streams, lines of runs, the CSV file back, damage, and moving a run to a journal."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nnx_jax.core import codec, fsio
from nnx_jax.core.durable import durable_yaml
from nnx_jax.core.errors import (
    CheckpointError,
    HistoryCorruptionError,
    LeaseHeldError,
    ResumePointError,
    UnsafePathError,
)
from nnx_jax.params.history import HistoryJournal
from nnx_jax.runs import audit, journal_migrate, pointers
from nnx_jax.runs.__main__ import main
from nnx_jax.runs.journal_migrate import migrate_history
from nnx_jax.runs.journal_read import JournalReader
from nnx_jax.runs.journal_views import export_history_csv, iter_history
from nnx_jax.runs.layout import RunPaths
from nnx_jax.runs.provenance import ResumeStatus
from nnx_jax.runs.resume import read_point
from nnx_jax.runs.run import NNRun
from tests.runs import journals
from tests.runs.journals import JOURNAL, RUN_ID

EPOCHS = 3


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runs directory with a run of three epochs with a journal, and the same run with idps.csv as "eager"."""
    root = tmp_path_factory.mktemp("journals")
    journals.run(root, EPOCHS, keep=None)
    journals.run(root, EPOCHS, "eager", journal=None, keep=None)
    return root


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "runs", symlinks=True)


def tree(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def epochs(rows: Any) -> list[int]:
    return [row["epoch"] for row in rows]


# Reading -------------------------------------------------------------------------------------------------------------


def test_a_run_shows_its_newest_records(pristine: Path) -> None:
    """nnx:B144 12 records are committed, the last 6 are `records`; the history is the directory."""
    run = NNRun.load(RUN_ID, pristine)
    assert run.records == journals.records(0, 1, 2)[-6:]
    assert (run.history, run.columns) == (pristine / RUN_ID / "history", journals.COLUMNS)
    assert run.summaries == run.epochs == [journals.epoch_row(epoch) for epoch in range(EPOCHS)]
    assert run.committed_rows == 15
    assert not (pristine / RUN_ID / "idps.csv").exists()
    eager = NNRun.load("eager", pristine)
    assert (eager.history, eager.epochs) == (pristine / "eager" / "idps.csv", run.epochs)


def test_the_tail_reads_only_its_chunks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window of a long run costs what the window costs."""
    read = []
    real = fsio.read_bytes
    monkeypatch.setattr(fsio, "read_bytes", lambda path, *args: (read.append(Path(path).name), real(path, *args))[1])
    assert len(NNRun.load(RUN_ID, root).records) == 6
    assert sorted(name for name in read if name.startswith("chunk")) == [
        f"chunk-0000000{n}.jsonl" for n in (2, 3, 4, 5)
    ]


@pytest.mark.parametrize("run_id", [RUN_ID, "eager"])
def test_the_stream_is_the_same_for_both_forms(pristine: Path, run_id: str) -> None:
    """nnx:B149 the same records with a journal and without; the summing rows come in their place when asked for."""
    assert list(iter_history(run_id, pristine)) == journals.records(0, 1, 2)
    every = [row for n in range(EPOCHS) for row in (*journals.records(n), journals.epoch_row(n))]
    assert list(iter_history(run_id, pristine, summaries=True)) == every


def test_a_stream_holds_one_chunk(root: Path) -> None:
    """Later chunks are not touched before they are due: damage there is met when the stream comes to it."""
    (root / RUN_ID / "history" / "chunk-00000005.jsonl").unlink()
    stream = iter_history(RUN_ID, root)
    assert [next(stream) for _ in range(11)] == journals.records(0, 1, 2)[:11]
    with pytest.raises(HistoryCorruptionError, match="chunk-00000005"):
        next(stream)


def test_the_csv_comes_back(pristine: Path, tmp_path: Path) -> None:
    """nnx:B156 byte for byte what the run without a journal wrote, and of that run its own file."""
    for run_id in (RUN_ID, "eager"):
        target = export_history_csv(run_id, tmp_path / f"{run_id}.csv", pristine)
        assert target.read_bytes() == (pristine / "eager" / "idps.csv").read_bytes()


def test_an_export_that_fails_keeps_the_old_file(root: Path, tmp_path: Path) -> None:
    (root / RUN_ID / "history" / "chunk-00000005.jsonl").write_bytes(b"")
    target = tmp_path / "out.csv"
    target.write_text("old")
    with pytest.raises(HistoryCorruptionError):
        export_history_csv(RUN_ID, target, root)
    assert target.read_text() == "old"
    journals.open_store(root, "fresh").close()
    with pytest.raises(ResumePointError, match="no commit"):
        export_history_csv("fresh", target, root)


def test_no_such_run(pristine: Path) -> None:
    """The call raises, not the first step of the stream."""
    with pytest.raises(ResumePointError, match="there is no run 'none'"):
        iter_history("none", pristine)
    with pytest.raises(UnsafePathError):
        iter_history("../x", pristine)


def test_a_copied_run_reads_under_any_root(root: Path, tmp_path: Path) -> None:
    """A run directory is whole: copied below another root its journal verifies and reads the same."""
    shutil.copytree(root / RUN_ID, tmp_path / "elsewhere" / RUN_ID)
    assert audit.verify(tmp_path / "elsewhere", RUN_ID) == []
    assert list(iter_history(RUN_ID, tmp_path / "elsewhere")) == journals.records(0, 1, 2)


# Damage --------------------------------------------------------------------------------------------------------------


def edit(name: str, old: bytes, new: bytes) -> Callable[[Path], Any]:
    def damage(directory: Path) -> None:
        path = directory / name
        data = path.read_bytes()
        assert old in data
        path.write_bytes(data.replace(old, new, 1))

    return damage


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "a byte of a chunk": edit("chunk-00000000.jsonl", b"0.5", b"0.6"),
    "a missing chunk": lambda directory: (directory / "chunk-00000002.jsonl").unlink(),
    "a chunk that ends early": lambda directory: fsio.truncate(directory / "chunk-00000001.jsonl", 10),
    "a chunk in place of another": lambda directory: shutil.copy(
        directory / "chunk-00000000.jsonl", directory / "chunk-00000002.jsonl"
    ),
    "an index line": edit("index.jsonl", b'"last_step":4', b'"last_step":9'),
    "an index line less": edit("index.jsonl", b"{", b"\n{"),
    "no index": lambda directory: (directory / "index.jsonl").unlink(),
    "a short index": lambda directory: fsio.truncate(directory / "index.jsonl", 100),
    "an epoch's row": edit("epochs.jsonl", b"1.0", b"0.1"),
    "no epochs": lambda directory: (directory / "epochs.jsonl").unlink(),
    "a column's name": edit("journal.json", b"train_loss", b"train_lots"),
    "the retention": edit("journal.json", b'"retention": 6', b'"retention": 7'),
    "no manifest": lambda directory: (directory / "journal.json").unlink(),
    "another format": edit("journal.json", b"history-journal", b"history-jungle!"),
    "a link": lambda directory: (
        (directory / "chunk-00000000.jsonl").rename(directory.parent / "x"),
        (directory / "chunk-00000000.jsonl").symlink_to(directory.parent / "x"),
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found(root: Path, damage: str) -> None:
    """nnx:B152 a HistoryCorruptionError (a ValueError) that names the file: in a stream, in `verify`, at a start."""
    directory = root / RUN_ID / "history"
    DAMAGE[damage](directory)
    with pytest.raises(HistoryCorruptionError, match="history/") as caught:
        list(iter_history(RUN_ID, root, summaries=True))
    assert isinstance(caught.value, ValueError)
    (fault,) = audit.verify(root, RUN_ID)
    assert "/history/" in fault
    before = tree(directory)
    with pytest.raises(HistoryCorruptionError):
        journals.open_store(root)
    assert tree(directory) == before


def test_a_newer_version_says_so(root: Path) -> None:
    edit("journal.json", b'"version": 1', b'"version": 2')(root / RUN_ID / "history")
    with pytest.raises(HistoryCorruptionError, match="version 2 is newer than 1.*upgrade"):
        list(iter_history(RUN_ID, root))


EXTENTS: dict[str, Any] = {
    "records": -1,
    "chunks": 1.0,
    "index_chain": "0" * 63,
    "manifest": None,
    "more": 1,
}


@pytest.mark.parametrize("name", EXTENTS)
def test_an_extent_that_cannot_be_is_a_damaged_last(root: Path, name: str) -> None:
    path = RunPaths(root, RUN_ID).pointer("LAST")
    obj = codec.load_json(path)
    obj["history"][name] = EXTENTS[name]
    path.write_bytes(codec.canonical_json(obj) + b"\n")
    with pytest.raises(ResumePointError, match="LAST: is damaged"):
        NNRun.load(RUN_ID, root)


# A line of runs ------------------------------------------------------------------------------------------------------


def origin(root: Path, source: str, name: str) -> ResumeStatus:
    point = read_point(RunPaths(root, source), name)
    return ResumeStatus(
        mode="stateful", source_run_id=source, source_checkpoint=name, source_epoch=point.epoch,
        source_generation=point.generation, source_checkpoint_id=point.manifest_sha256,
    )  # fmt: skip


def resumed(root: Path, run_id: str, source: str, name: str, first: int, last: int, **more: Any) -> None:
    """A run that went on from checkpoint `name` of `source`, with epochs `first` to `last`."""
    with journals.open_store(root, run_id, resume=origin(root, source, name), **more) as store:
        for epoch in range(first, last + 1):
            journals.commit_epoch(store, epoch)


def test_a_line_of_runs_has_every_epoch_once(root: Path) -> None:
    """nnx:B153 nnx:S40 the source's bytes stay, and its records end where the child's begin."""
    before = tree(root / RUN_ID)
    resumed(root, "child", RUN_ID, "8", 2, 3)  # from the end of epoch 1; the source itself went on to epoch 2
    assert tree(root / RUN_ID) == before
    assert epochs(iter_history("child", root)) == [2] * 4 + [3] * 4
    assert epochs(iter_history("child", root, lineage=True)) == [n for n in range(4) for _ in range(4)]
    rows = list(iter_history("child", root, lineage=True, summaries=True))
    assert [row["epoch"] for row in rows if row["kind"] == "epoch"] == [0, 1, 2, 3]
    resumed(root, "grandchild", "child", "LAST", 4, 4, journal=None)
    assert epochs(iter_history("grandchild", root, lineage=True)) == [n for n in range(5) for _ in range(4)]
    resumed(root, "mixed", "eager", "4", 1, 1)
    assert epochs(iter_history("mixed", root, lineage=True)) == [0] * 4 + [1] * 4


def test_a_line_that_begins_inside_an_epoch(root: Path) -> None:
    """A child that went on in the middle of an epoch: the source's records before that place, then its own."""
    with journals.open_store(root, "child", resume=origin(root, RUN_ID, "8")) as store:
        half = {name: value[2:] if isinstance(value, list) else value for name, value in journals.table(1).items()}
        store.history.append_table(half, 2)
        store.history.append([journals.epoch_row(1)])
        store.committer.commit(journals.point(1))
    assert list(iter_history("child", root, lineage=True)) == journals.records(0, 1)


def test_a_validation_inside_the_epoch_ends_no_line(root: Path) -> None:
    """The source validated between its records of the epoch in which the child goes on; none of them is lost."""
    first, rest = (
        {n: v[a:b] if isinstance(v, list) else v for n, v in journals.table(0).items()} for a, b in ((0, 2), (2, 4))
    )
    score = {"kind": "eval", "epoch": 0, "step": 2, "val_loss": 0.5}
    with journals.open_store(root, "early") as store:
        store.history.append_table({n: v[:1] if isinstance(v, list) else v for n, v in first.items()}, 1)
        store.history.append([score])
        store.history.append_table({n: v[1:] if isinstance(v, list) else v for n, v in first.items()}, 1)
        store.committer.commit(journals.point(0))
    with journals.open_store(root, "late", resume=origin(root, "early", "LAST")) as store:
        store.history.append_table(rest, 2)
        store.history.append([journals.epoch_row(0)])
        store.committer.commit(journals.point(0))
    assert list(iter_history("late", root, lineage=True)) == journals.records(0)
    kinds = [row["kind"] for row in iter_history("late", root, lineage=True, summaries=True)]
    assert kinds == ["batch", "eval", "batch", "batch", "batch", "epoch"]


def test_a_line_of_one_without_records(root: Path) -> None:
    """A child that has committed nothing yet shows its source up to the recorded epoch."""
    resumed(root, "child", RUN_ID, "4", 5, 4)
    assert epochs(iter_history("child", root)) == []
    assert epochs(iter_history("child", root, lineage=True)) == [0] * 4


def test_a_broken_line_is_said(root: Path) -> None:
    resumed(root, "child", RUN_ID, "8", 2, 2)
    shutil.rmtree(root / RUN_ID)
    with pytest.raises(ResumePointError, match=f"line of run 'child' goes back to '{RUN_ID}'.*there is no run"):
        iter_history("child", root, lineage=True)
    path = RunPaths(root, "child").metadata
    obj = codec.parse_yaml(path.read_bytes(), source="metadata.yaml")
    obj["resume"]["source_run_id"] = "child"
    path.write_bytes(durable_yaml(obj, source="metadata.yaml"))
    with pytest.raises(ResumePointError, match="descends from itself"):
        iter_history("child", root, lineage=True)


# Moving --------------------------------------------------------------------------------------------------------------


def test_a_moved_run_is_what_a_journal_would_have_been(root: Path) -> None:
    """Same chunks, same rows, same pointers but for the history; it goes on as a run with a journal."""
    before = pointers.list_pointers(RunPaths(root, "eager"))
    run = migrate_history("eager", spec=JOURNAL, runs_dir=root)
    assert tree(root / "eager" / "history") == tree(root / RUN_ID / "history")
    assert not (root / "eager" / "idps.csv").exists()
    assert (run.records, run.committed_rows) == (journals.records(0, 1, 2)[-6:], 15)
    after = pointers.list_pointers(RunPaths(root, "eager"))
    assert {name: (p.generation, p.step, p.manifest) for name, p in after.items()} == {
        name: (p.generation, p.step, p.manifest) for name, p in before.items()
    }
    assert {name: p.history.rows for name, p in after.items()} == {name: p.history.rows for name, p in before.items()}
    assert audit.verify(root, "eager") == []
    journals.run(root, 4, "eager", journal=None)
    assert epochs(iter_history("eager", root)) == [n for n in range(4) for _ in range(4)]
    assert migrate_history("eager", spec=JOURNAL, runs_dir=root).committed_rows == 20  # nothing left to do


def test_a_finished_run_stays_finished(root: Path) -> None:
    with journals.open_store(root, "eager", journal=None) as store:
        store.finish({"status": "finished"})
    run = migrate_history("eager", spec=HistoryJournal(retention=100), runs_dir=root)
    assert (run.status, run.artifact, len(run.records)) == ("finished", {"status": "finished"}, 12)
    assert audit.verify(root, "eager") == []


def test_rows_without_a_commit_are_dropped_only_when_asked(root: Path) -> None:
    with (root / "eager" / "idps.csv").open("ab") as file:
        file.write(b"3,")
    before = tree(root / "eager")
    with pytest.raises(CheckpointError, match="its last 2 bytes belong to no commit; give discard_uncommitted=True"):
        migrate_history("eager", spec=JOURNAL, runs_dir=root)
    assert tree(root / "eager") == before
    assert migrate_history("eager", spec=JOURNAL, runs_dir=root, discard_uncommitted=True).committed_rows == 15


def test_moves_that_cannot_be(root: Path) -> None:
    with pytest.raises(TypeError, match="must be a HistoryJournal, got int"):
        migrate_history("eager", spec=6, runs_dir=root)  # type: ignore[arg-type]
    with pytest.raises(ResumePointError, match="there is no run 'none'"):
        migrate_history("none", spec=JOURNAL, runs_dir=root)
    journals.open_store(root, "fresh", journal=None).close()
    with pytest.raises(CheckpointError, match="no commit; start it again with the journal"):
        migrate_history("fresh", spec=JOURNAL, runs_dir=root)
    with journals.open_store(root, "eager", journal=None), pytest.raises(LeaseHeldError):
        migrate_history("eager", spec=JOURNAL, runs_dir=root)


def test_a_move_stopped_anywhere_is_finished_by_another(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each pointer, LAST as the final one, the run verifies in one form or the other and shows the same rows."""
    with journals.open_store(root, "eager", journal=None) as store:
        journals.commit_epoch(store, 3, best=True, score=0.5, deferred=("tag",))
    real = pointers.write_pointer
    total = len(pointers.list_pointers(RunPaths(root, "eager")))
    assert total == 3
    for allowed in range(total + 1):
        copy = shutil.copytree(root, root.parent / f"copy-{allowed}", symlinks=True)
        done = []

        def stopping(*args: Any, done: list[Any] = done, allowed: int = allowed) -> None:
            if len(done) == allowed:
                raise KeyboardInterrupt
            done.append(args)
            real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(journal_migrate.pointers, "write_pointer", stopping)
            if allowed < total:
                with pytest.raises(KeyboardInterrupt):
                    migrate_history("eager", spec=JOURNAL, runs_dir=copy)
        for _ in range(2):
            assert audit.verify(copy, "eager") == []
            assert epochs(iter_history("eager", copy)) == [n for n in range(4) for _ in range(4)]
            migrate_history("eager", spec=JOURNAL, runs_dir=copy)
        assert not (copy / "eager" / "idps.csv").exists()


# The command ---------------------------------------------------------------------------------------------------------


def test_show_and_verify(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """nnx:S36 the command shows the newest records, the last epoch's row, and how long the history is."""
    assert main(["--runs-dir", str(root), "show", RUN_ID]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("  15 rows of history in history")
    assert [line.split()[:2] for line in lines[at + 1 : at + 4]] == [
        ["kind=batch", "epoch=2"],
        ["kind=batch", "epoch=2"],
        ["kind=epoch", "epoch=2"],
    ]
    assert main(["--runs-dir", str(root), "verify", RUN_ID]) == 0
    (root / RUN_ID / "history" / "chunk-00000000.jsonl").write_bytes(b"")
    assert main(["--runs-dir", str(root), "verify", RUN_ID]) == 1
    assert "chunk-00000000.jsonl: its bytes are not what was committed" in capsys.readouterr().out


def test_the_reader_gives_every_column(pristine: Path) -> None:
    last = NNRun.load(RUN_ID, pristine).last
    assert last is not None
    reader = JournalReader(pristine / RUN_ID / "history", last.history)  # type: ignore[arg-type]
    assert all(tuple(row) == journals.COLUMNS for row in reader.rows())
