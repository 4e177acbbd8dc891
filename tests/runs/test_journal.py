"""The journal: immutable chunks, one manifest before LAST, a bounded window, and roll-back without a gap."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnx_jax.core import fsio
from nnx_jax.core.errors import (
    CheckpointError,
    CommitError,
    ConfigError,
    HistoryCorruptionError,
    LeaseLostError,
)
from nnx_jax.params.history import HistoryJournal
from nnx_jax.runs import audit, pointers
from nnx_jax.runs.journal import JournalWriter
from nnx_jax.runs.journal_read import JournalReader
from nnx_jax.runs.journal_views import iter_history
from nnx_jax.runs.layout import RunPaths
from nnx_jax.runs.run import NNRun
from tests.runs import journals
from tests.runs.journals import BATCHES, COLUMNS, JOURNAL, RUN_ID, commit_epoch, fill, open_store


def manifest(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "journal.json").read_text())


def index(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "index.jsonl").read_text().splitlines()]


def tree(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# The settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"retention": 0}, "retention"),
        ({"retention": 4, "chunk_size": 5}, "chunk_size: got 5, more than retention=4"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"retention": 2.5}, "retention"),
    ],
)
def test_settings_that_cannot_be(given: dict[str, Any], message: str) -> None:
    """nnx:B148 a ValueError that names the field."""
    with pytest.raises(ConfigError, match=message) as caught:
        HistoryJournal(**given)
    assert isinstance(caught.value, ValueError)


def test_a_chunk_is_250_records_or_the_window() -> None:
    assert [HistoryJournal(**given).chunk for given in ({}, {"retention": 7}, {"chunk_size": 3})] == [250, 7, 3]


# Files ---------------------------------------------------------------------------------------------------------------


def test_chunks_end_with_the_epoch(tmp_path: Path) -> None:
    """nnx:S34 nnx:S33 full chunks inside the epoch, the rest at its end; the newest 6 of 12 stay in memory."""
    writer = JournalWriter(tmp_path / "history", COLUMNS, JOURNAL)
    for epoch in range(3):
        fill(writer, epoch)
        writer.flush()
    directory = tmp_path / "history"
    assert [line["records"] for line in index(directory)] == [3, 1, 3, 1, 3, 1]
    assert [len((directory / line["file"]).read_bytes().splitlines()) for line in index(directory)] == [3, 1] * 3
    assert [(line["seq"], line["first"], line["first_epoch"], line["last_step"]) for line in index(directory)] == [
        (0, 0, 0, 3),
        (1, 3, 0, 4),
        (2, 4, 1, 7),
        (3, 7, 1, 8),
        (4, 8, 2, 11),
        (5, 11, 2, 12),
    ]
    found = manifest(directory)
    assert (found["format"], found["version"]) == ("nnx_jax.history-journal", 1)
    assert (found["records"], found["chunks"], found["epochs"]) == (12, 6, 3)
    assert (found["retention"], found["chunk_size"], found["columns"]) == (6, 3, list(COLUMNS))
    assert list(writer.window) == journals.records(0, 1, 2)[-6:]
    assert (directory / "epochs.jsonl").read_text().splitlines()[1] == (
        '{"at":8,"row":{"kind":"epoch","epoch":1,"step":8,"val_loss":1.0}}'
    )


def test_the_newest_record_waits(tmp_path: Path) -> None:
    """nnx:S34 a chunk is written when more than its size wait, so the last record of a moment is in memory only."""
    writer = JournalWriter(tmp_path / "history", COLUMNS, JOURNAL)
    seen = []
    for batch in range(7):
        writer.append([{"kind": "batch", "epoch": 0, "batch": batch}])
        seen.append(len(list((tmp_path / "history").glob("chunk-*"))))
    assert seen == [0, 0, 0, 1, 1, 1, 2]


def test_the_index_is_chained(tmp_path: Path) -> None:
    """The chain in the manifest follows from the lines alone, from 64 zeros on."""
    from hashlib import sha256

    journals.write(tmp_path / "history", 2)
    chain = "0" * 64
    for line in (tmp_path / "history" / "index.jsonl").read_bytes().splitlines(keepends=True):
        chain = sha256(chain.encode() + line).hexdigest()
    assert manifest(tmp_path / "history")["index_chain"] == chain


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
)


@given(rows=st.lists(st.tuples(values, values), max_size=8))
def test_values_come_back_as_written(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[Any, Any]]) -> None:
    """Any mix of numbers, not finite ones too, text that looks like a number, and None, equal and of the same type."""
    directory = tmp_path_factory.mktemp("journal") / "history"
    writer = JournalWriter(directory, ("a", 'b "c"'), HistoryJournal(retention=3))
    writer.append({"a": a, 'b "c"': b} for a, b in rows)
    found = [tuple(row.values()) for row in JournalReader(directory, writer.flush()).records()]
    assert [list(map(repr, row)) for row in found] == [list(map(repr, row)) for row in rows]


def test_numbers_of_arrays_are_stored_exactly(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "history", ("a", "b"), JOURNAL)
    writer.append([{"a": np.int64(3), "b": np.float32(0.1)}, {"a": np.bool_(True), "b": np.float64("nan")}])
    first, second = JournalReader(tmp_path / "history", writer.flush()).records()
    assert first == {"a": 3, "b": float(np.float32(0.1))}
    assert second["a"] is True
    assert math.isnan(second["b"])


@pytest.mark.parametrize("value", [object(), {"a": 1}, [1, 2], np.zeros(2), 10**50, "\ud800"])
def test_what_cannot_be_stored_fails_at_its_own_batch(tmp_path: Path, value: Any) -> None:
    """nnx:B157 the append raises, not the end of the epoch; rows and files are as before."""
    writer = JournalWriter(tmp_path / "history", COLUMNS, JOURNAL)
    writer.append([{"kind": "batch", "epoch": 0, "train_loss": 1.0}])
    for bad in ([{"kind": "batch", "epoch": 0, "train_loss": value}], [{"kind": "epoch", "monitor": value}]):
        with pytest.raises((CheckpointError, ConfigError)):
            writer.append(bad)
    with pytest.raises((CheckpointError, ConfigError)):
        writer.append_table({"kind": "batch", "train_loss": [value]}, 1)
    assert (writer.rows, len(writer.window), writer.flush().records) == (1, 1, 1)


def test_unknown_columns_and_torn_tables_are_refused(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "history", COLUMNS, JOURNAL)
    with pytest.raises(CheckpointError, match="'train_los' was not declared.*train_loss"):
        writer.append([{"train_los": 1.0}])
    with pytest.raises(CheckpointError, match="'step' has 1 values for 2 rows"):
        writer.append_table({"step": [1]}, 2)
    with pytest.raises(CheckpointError, match="distinct"):
        JournalWriter(tmp_path / "other", ("a", "a"), JOURNAL)


# The window ----------------------------------------------------------------------------------------------------------


def test_the_window_is_live_and_read_only(tmp_path: Path) -> None:
    """nnx:B146 length, index, slices, iteration; no item assignment, no append; it follows what is appended."""
    writer = JournalWriter(tmp_path / "history", COLUMNS, JOURNAL)
    window: Any = writer.window
    assert (len(window), list(window)) == (0, [])
    fill(writer, 0)
    fill(writer, 1)
    expected = journals.records(0, 1)[-6:]
    assert (len(window), window[0], window[-1], window[1:3]) == (6, expected[0], expected[-1], expected[1:3])
    assert list(window) == expected
    with pytest.raises(IndexError):
        window[6]
    with pytest.raises(TypeError, match="item assignment"):
        window[0] = {}
    assert not hasattr(window, "append")


def test_memory_is_the_window_and_bytes_grow_with_the_records(tmp_path: Path) -> None:
    """nnx:B154 ten times the records: the same memory, ten times the bytes."""
    written, kept = [], []
    for epochs in (10, 100):
        directory = tmp_path / str(epochs)
        writer = JournalWriter(directory, COLUMNS, HistoryJournal(retention=100, chunk_size=50))
        tracemalloc.start()
        for epoch in range(epochs):
            steps = [epoch * 100 + batch for batch in range(100)]
            writer.append_table({"kind": "batch", "epoch": epoch, "step": steps, "train_loss": 0.123456}, 100)
            writer.append([journals.epoch_row(epoch)])
            writer.flush()
            writer.settle()
        kept.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        written.append(sum(path.stat().st_size for path in directory.iterdir()))
        assert writer.committed.records == epochs * 100
        assert len(writer.window) == 100
    assert abs(kept[1] - kept[0]) < 30_000, kept  # 9,000 records would be more than 2,000,000
    assert 9 < written[1] / written[0] < 11


# Commits -------------------------------------------------------------------------------------------------------------


def test_one_pass_of_syncs_then_the_manifest_then_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nnx:B155 nnx:S35 every new file is synced once, before the manifest, which is durable before LAST."""
    events: list[str] = []
    with open_store(tmp_path) as store:
        commit_epoch(store, 0)
        for name in ("create_file", "sync_file", "append_bytes", "atomic_write"):
            real = getattr(fsio, name)

            def wrapped(path: Any, *args: Any, name: str = name, real: Any = real, **kwargs: Any) -> Any:
                events.append(f"{name} {Path(path).name}")
                return real(path, *args, **kwargs)

            monkeypatch.setattr(fsio, name, wrapped)
        fill(store.history, 1)
        assert events == ["create_file chunk-00000002.jsonl", "create_file chunk-00000003.jsonl"]
        store.committer.commit(journals.point(1))
        store.committer.drain()
        ours = [event for event in events[2:] if not event.endswith((".json", "BEST"))]
        assert ours == [
            "sync_file chunk-00000002.jsonl",
            "sync_file chunk-00000003.jsonl",
            "append_bytes index.jsonl",
            "append_bytes epochs.jsonl",
            "atomic_write LAST",
        ]
        assert events.index("atomic_write journal.json") == events.index("append_bytes epochs.jsonl") + 1
        assert events.index("atomic_write journal.json") < events.index("atomic_write LAST")


def test_a_commit_inside_an_epoch_covers_what_was_there(tmp_path: Path) -> None:
    """nnx:B143 records that came while the commit was written are not part of it, and not lost."""
    writer = JournalWriter(tmp_path / "history", COLUMNS, JOURNAL)
    writer.append_table({"kind": "batch", "epoch": 0, "batch": [0, 1]}, 2)
    place = writer.mark()
    writer.append_table({"kind": "batch", "epoch": 0, "batch": [2, 3, 4, 5, 6]}, 5)
    writer.append([{"kind": "eval", "epoch": 0}])
    extent = writer.flush(place)
    writer.settle()
    assert [row["batch"] for row in JournalReader(tmp_path / "history", extent).records()] == [0, 1]
    again = JournalWriter(shutil.copytree(tmp_path / "history", tmp_path / "copy"), COLUMNS, extent=extent)
    assert [row["batch"] for row in again.window] == [0, 1]
    writer.append([{"kind": "epoch", "epoch": 0}])
    rows = list(JournalReader(tmp_path / "history", writer.flush()).rows())
    assert [row["batch"] if row["kind"] == "batch" else row["kind"] for row in rows] == [*range(7), "eval", "epoch"]


def test_a_failing_last_puts_the_manifest_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nnx:B151 nnx:S38 the manifest says 4 records again, and the next commit has all 12: no gap, no chunk twice."""
    with open_store(tmp_path) as store:
        commit_epoch(store, 0)
        real = pointers.write_pointer
        seen = []

        def failing(paths: RunPaths, name: str, pointer: pointers.Pointer) -> None:
            seen.append(manifest(paths.journal)["records"])
            raise OSError(errno.EIO, "injected")

        with monkeypatch.context() as patch:
            patch.setattr(pointers, "write_pointer", failing)
            with pytest.raises(CommitError, match="injected"):
                commit_epoch(store, 1)
        assert pointers.write_pointer is real
        assert seen == [8]
        assert manifest(store.paths.journal)["records"] == 4
        assert [line["seq"] for line in index(store.paths.journal)] == [0, 1]
        assert audit.verify(tmp_path, RUN_ID) == []
        commit_epoch(store, 2)
    assert list(iter_history(RUN_ID, tmp_path)) == journals.records(0, 1, 2)
    assert [line["records"] for line in index(RunPaths(tmp_path, RUN_ID).journal)] == [3, 1] * 3


@pytest.mark.parametrize("moment", journals.MOMENTS)
def test_a_kill_before_last_leaves_a_tail_nobody_reads(tmp_path: Path, moment: str) -> None:
    """nnx:B150 nnx:S36 nnx:S37 readers yield epoch 0, LAST is epoch 0, and the next start cuts the tail and goes on."""
    command = [sys.executable, "-m", "tests.runs.journals", str(tmp_path), "2", moment]
    killed = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, check=False)
    assert killed.returncode == -9, killed.stderr
    paths = RunPaths(tmp_path, RUN_ID)
    last = pointers.read_pointer(paths)
    assert last is not None
    assert last.epoch == 0
    assert list(iter_history(RUN_ID, tmp_path)) == journals.records(0)
    assert NNRun.load(RUN_ID, tmp_path).epochs == [journals.epoch_row(0)]
    assert audit.verify(tmp_path, RUN_ID) == []
    if moment == "LAST":
        assert manifest(paths.journal)["records"] == 8
    with pytest.warns(RuntimeWarning, match="taking over"):
        journals.run(tmp_path, 2)
    journals.run(tmp_path / "whole", 2)
    assert tree(paths.journal) == tree(RunPaths(tmp_path / "whole", RUN_ID).journal)


def test_a_crash_at_any_operation_of_a_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nnx:S37 the directory as it is before every call of the system: readers see LAST's part, and a start goes on."""
    directory, base = tmp_path / "history", journals.write(tmp_path / "history", 1)
    writer = JournalWriter(directory, COLUMNS, extent=base)
    moments: list[str] = []

    def watch(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            monkeypatch.setattr(os, name, real)
            shutil.copytree(directory, tmp_path / f"copy-{len(moments)}")
            monkeypatch.setattr(os, name, call)
            moments.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)

    with monkeypatch.context():
        for name in ("write", "fsync", "replace", "ftruncate"):
            watch(name)
        fill(writer, 1)
        writer.flush()
        monkeypatch.undo()
    assert moments.count("fsync") == 7  # two chunks, the directory, index, rows, manifest and its name
    whole = tree(directory)
    for number in range(len(moments)):
        copy = tmp_path / f"copy-{number}"
        assert list(JournalReader(copy, base).rows()) == [*journals.records(0), journals.epoch_row(0)]
        again = JournalWriter(copy, COLUMNS, extent=base)
        assert len(tree(copy)) == 5
        fill(again, 1)
        again.flush()
        assert tree(copy) == whole, (number, moments[number])


def test_a_chunk_that_may_be_lost_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync that failed may have dropped the bytes, and a second one succeeds without them: no chunk relies on it."""
    writer = JournalWriter(tmp_path / "history", COLUMNS, JOURNAL)
    fill(writer, 0)
    with monkeypatch.context() as patch:
        patch.setattr(fsio, "sync_file", lambda path: (_ for _ in ()).throw(OSError(errno.EIO, "injected")))
        with pytest.raises(OSError, match="injected"):
            writer.flush()
    path = tmp_path / "history" / "chunk-00000000.jsonl"
    before = path.stat().st_ino
    copy = path.read_bytes()
    path.write_bytes(copy.replace(b"0.5", b"0.6"))
    with pytest.raises(HistoryCorruptionError, match="lost before it was committed; start again from LAST"):
        writer.flush()
    path.write_bytes(copy)
    assert list(JournalReader(tmp_path / "history", writer.flush()).records()) == journals.records(0)
    assert path.stat().st_ino != before
    fill(writer, 1)
    with monkeypatch.context() as patch:
        patch.setattr(writer, "_write_again", lambda chunk: pytest.fail("the doubt is over"))
        writer.flush()


def test_a_full_disk_is_a_commit_error_and_the_records_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = JournalWriter(tmp_path / "history", COLUMNS, JOURNAL)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
        with pytest.raises(CommitError, match="next chunk cannot be written.*No space left.*chunk-00000000"):
            writer.append_table(journals.table(0), BATCHES)
    writer.append([journals.epoch_row(0)])
    assert list(JournalReader(tmp_path / "history", writer.flush()).records()) == journals.records(0)


def test_a_writer_that_lost_its_run_writes_nothing(tmp_path: Path) -> None:
    """A chunk in the middle of an epoch is not written into the directory of a successor."""

    def lost() -> None:
        raise LeaseLostError("gone")

    writer = JournalWriter(tmp_path / "history", COLUMNS, JOURNAL, check=lost)
    before = tree(tmp_path / "history")
    with pytest.raises(LeaseLostError):
        fill(writer, 0)
    writer.rollback(on_disk=False)
    assert tree(tmp_path / "history") == before
