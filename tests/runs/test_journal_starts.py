"""A journal started again: what LAST covers goes on, under other settings too; what no commit covers is gone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nnx_jax.core.errors import (
    CheckpointError,
    UnsafePathError,
)
from nnx_jax.params.history import HistoryJournal
from nnx_jax.runs.journal import JournalWriter
from nnx_jax.runs.journal_format import JournalExtent
from nnx_jax.runs.journal_read import JournalReader
from nnx_jax.runs.layout import RunPaths
from nnx_jax.runs.run import NNRun
from tests.runs import journals, scenario
from tests.runs.journals import BATCHES, COLUMNS, JOURNAL, RUN_ID, commit_epoch, fill, open_store


def manifest(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "journal.json").read_text())


def tree(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_start_goes_on_with_the_window_of_last(tmp_path: Path) -> None:
    """nnx:B143 the window after a restart is what was committed; other settings take effect from the next commit on."""
    journals.run(tmp_path, 2)
    with open_store(tmp_path, journal=None) as store:  # whoever leaves the journal out keeps it
        assert isinstance(store.history, JournalWriter)
        assert list(store.history.window) == journals.records(0, 1)[-6:]
        assert (store.history.first_epoch, store.history.spec) == (0, JOURNAL)
    with open_store(tmp_path, journal=HistoryJournal(retention=2)) as store:
        assert isinstance(store.history, JournalWriter)
        assert list(store.history.window) == journals.records(1)[-2:]
        assert len(NNRun.load(RUN_ID, tmp_path).records) == 6
        commit_epoch(store, 2)
    assert NNRun.load(RUN_ID, tmp_path).records == journals.records(2)[-2:]


def test_a_kill_right_after_other_settings_were_published(tmp_path: Path) -> None:
    """LAST still names the settings before, and both a reader and the next start find them in the newer manifest."""
    directory = tmp_path / "history"
    extent = journals.write(directory, 1)
    for retention in (20, 30):  # a second start changes them again, and is killed at the same place
        writer = JournalWriter(directory, COLUMNS, HistoryJournal(retention=retention), extent=extent)
        fill(writer, 1)
        end = writer.flush()
        assert JournalReader(directory, extent).spec == JOURNAL
        assert JournalReader(directory, end).spec.retention == retention
    writer.settle()
    fill(writer, 2)
    writer.flush()
    assert "was" not in manifest(directory)
    assert JournalReader(directory, end).spec.retention == 30


def test_files_of_others_stay(tmp_path: Path) -> None:
    """A start removes temporaries of its own, not every hidden file; a link in place of the directory is refused."""
    journals.run(tmp_path, 1)
    directory = tmp_path / RUN_ID / "history"
    (directory / ".notes").write_text("mine")
    (directory / ".journal.json.0123456789ab").write_text("torn")
    open_store(tmp_path).close()
    assert {path.name for path in directory.iterdir() if path.name.startswith(".")} == {".notes"}
    directory.rename(tmp_path / "moved")
    directory.symlink_to(tmp_path / "moved")
    with pytest.raises(UnsafePathError, match="history is a symbolic link"):
        open_store(tmp_path)
    assert (tmp_path / "moved" / ".notes").read_text() == "mine"


def test_other_columns_are_refused(tmp_path: Path) -> None:
    extent = journals.write(tmp_path / "history", 1)
    before = tree(tmp_path / "history")
    with pytest.raises(CheckpointError, match="columns were fixed at its first start"):
        JournalWriter(tmp_path / "history", (*COLUMNS, "more"), extent=extent)
    assert tree(tmp_path / "history") == before


def test_a_run_has_one_form(tmp_path: Path) -> None:
    """nnx:B144 with a journal there is no idps.csv; a run that has the file says how to move it."""
    journals.run(tmp_path, 1)
    assert sorted(path.name for path in (tmp_path / RUN_ID).iterdir()) == [
        "checkpoints",
        "history",
        "metadata.yaml",
        "run.yaml",
    ]
    scenario.run(tmp_path, 1, "eager")
    with pytest.raises(CheckpointError, match=r"history in idps\.csv.*migrate_history\('eager'"):
        scenario.open_store(tmp_path, "eager", journal=JOURNAL)
    assert not (tmp_path / "eager" / "history").exists()


def test_a_start_that_never_committed_may_change_its_mind(tmp_path: Path) -> None:
    """Nothing is committed, so nothing is kept of either form."""
    open_store(tmp_path).close()
    open_store(tmp_path, journal=None).close()
    assert sorted(path.name for path in (tmp_path / RUN_ID).iterdir() if path.is_file()) == [
        "idps.csv",
        "metadata.yaml",
        "run.yaml",
    ]
    assert not RunPaths(tmp_path, RUN_ID).journal.exists()
    open_store(tmp_path).close()
    assert not RunPaths(tmp_path, RUN_ID).history.exists()
    run = NNRun.load(RUN_ID, tmp_path)
    assert (run.history, run.records, run.epochs) == (RunPaths(tmp_path, RUN_ID).journal, [], [])


def test_what_no_commit_covers_can_be_given_up(tmp_path: Path) -> None:
    """nnx:B143 after a stop in the middle of an epoch the window is the committed one, and so are the files."""
    writer = JournalWriter(tmp_path / "history", COLUMNS, JOURNAL)
    fill(writer, 0)
    writer.discard()
    assert (writer.rows, list(writer.window), writer.first_epoch) == (0, [], None)
    for epoch in range(2):
        fill(writer, epoch)
    writer.flush()
    writer.settle()
    before, window = tree(tmp_path / "history"), writer.window
    writer.append_table(journals.table(2), BATCHES)
    assert len(tree(tmp_path / "history")) == len(before) + 1
    writer.discard()
    assert tree(tmp_path / "history") == before
    assert list(window) == journals.records(0, 1)[-6:]
    fill(writer, 2)
    assert list(JournalReader(tmp_path / "history", writer.flush()).records()) == journals.records(0, 1, 2)


def test_an_extent_of_nothing_has_a_manifest(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "history", COLUMNS, JOURNAL)
    extent = writer.flush()
    assert (extent.rows, extent.manifest) == (0, writer.committed.manifest)
    assert list(JournalReader(tmp_path / "history", extent).rows()) == []
    assert extent != JournalExtent()
