"""Loggers: files that other tools read, complete after a kill, and no read of the device for their sake."""

from __future__ import annotations

import csv
import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnx_jax.core.errors import ConfigError
from nnx_jax.loop.callbacks import Callback, CallbackList, overrides
from nnx_jax.loop.context import OptimizerView, TrainContext
from nnx_jax.loop.loggers.base import Logger
from nnx_jax.loop.loggers.event_files import EventFile, crc32c
from nnx_jax.loop.loggers.tables import CSVLogger, JSONLLogger
from nnx_jax.loop.loggers.tensorboard import TensorBoardCallback
from nnx_jax.loop.loggers.weights_and_biases import WandbCallback
from nnx_jax.loop.monitors import MonitorTracker
from nnx_jax.loop.updates import UpdateEvent

RUN = "0123456789abcdef"
FIRST_RECORD = "1800000000000000a37f4b2209000000000000f83f1a0d627261696e2e4576656e743a322a28646c"
SCALAR_RECORD = "1a00000000000000129bd82d09000000000000f83f10ac022a0c0a0a0a03612f62150000803ef9cde7ed"


def context(step: int = 0, epoch: int = 0, run: str = RUN) -> TrainContext:
    ctx = TrainContext(run, epoch=epoch, step=step)
    ctx.optimizers = {"main": OptimizerView("main", None, rate=0.5)}
    return ctx


def event(update: int, epoch: int, *, optimizer: str = "main", lr: float = 0.5, **losses: float) -> UpdateEvent:
    losses = losses or {"loss": 1.0 / update}
    return UpdateEvent(optimizer, update, epoch, update, 1, losses, sum(losses.values()), lr)


def run_epochs(
    logger: Logger, ctx: TrainContext, epochs: Sequence[int], *, scored: Callable[[int], bool] = bool
) -> None:
    """Two updates an epoch; a validation where `scored(epoch)`."""
    tracker = MonitorTracker(None)
    for epoch in epochs:
        ctx.epoch = epoch
        ctx.step = 2 * epoch + 2
        CallbackList([logger]).updates(ctx, [event(ctx.step - 1, epoch), event(ctx.step, epoch)])
        ctx.values["train_loss"] = 1.0 + epoch
        if scored(epoch):
            ctx.values["val_loss"] = 10.0 + epoch
            ctx.decision = tracker.decide(ctx.values)
            logger.on_validation(ctx)
        logger.on_epoch_end(ctx)


def session(logger: Logger, epochs: Sequence[int], *, step: int = 0, run: str = RUN, **more: Any) -> None:
    ctx = context(step, epochs[0] if epochs else 0, run)
    logger.on_train_begin(ctx)
    run_epochs(logger, ctx, epochs, **more)
    logger.on_train_end(ctx)


def csv_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def json_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- all of them ------------------------------------------------------------------------------------------------


def test_every_logger_runs_on_the_writer_alone(tmp_path: Path) -> None:
    """nnx:S79 nnx:S81 (declared, and without state to restore)"""
    loggers: list[Callback] = [TensorBoardCallback(), WandbCallback(), CSVLogger("a"), JSONLLogger("b")]
    assert [logger.distributed for logger in loggers] == ["writer"] * 4
    assert [logger.component_spec() for logger in loggers] == [None] * 4


def test_a_logger_of_epochs_asks_for_no_events(tmp_path: Path) -> None:
    assert not overrides(CSVLogger(tmp_path / "a"), "on_updates")
    assert overrides(CSVLogger(tmp_path / "a", every="update"), "on_updates")
    assert not overrides(CSVLogger(tmp_path / "a", every="update"), "on_optimizer_update")
    with pytest.raises(ConfigError, match="CSVLogger.every is 'step'"):
        CSVLogger(tmp_path / "a", every="step")


# -- tables -----------------------------------------------------------------------------------------------------


def test_a_row_an_epoch(tmp_path: Path) -> None:
    """As csv and json of the standard library read it; an epoch without a validation has no old values of one."""
    session(CSVLogger(tmp_path / "new" / "log.csv"), [0, 1, 2], scored=lambda epoch: epoch != 1)
    rows = csv_rows(tmp_path / "new" / "log.csv")
    assert list(rows[0]) == [
        "run", "kind", "epoch", "step", "train/loss", "val/loss", "monitor/val_loss", "monitor/improved", "lr",
    ]  # fmt: skip
    assert [(r["run"], r["kind"], r["epoch"], r["step"]) for r in rows] == [
        (RUN, "epoch", str(epoch), str(2 * epoch + 2)) for epoch in range(3)
    ]
    assert [row["val/loss"] for row in rows] == ["10.0", "", "12.0"]
    assert [row["train/loss"] for row in rows] == ["1.0", "2.0", "3.0"]
    session(JSONLLogger(tmp_path / "log.jsonl"), [0, 1], scored=lambda epoch: epoch == 1)
    assert json_rows(tmp_path / "log.jsonl") == [
        {"run": RUN, "kind": "epoch", "epoch": 0, "step": 2, "train/loss": 1.0, "lr": 0.5},
        {
            "run": RUN, "kind": "epoch", "epoch": 1, "step": 4, "train/loss": 2.0, "lr": 0.5, "val/loss": 11.0,
            "monitor/val_loss": 11.0, "monitor/improved": 1.0,
        },
    ]  # fmt: skip


def test_a_row_of_every_update_and_validation(tmp_path: Path) -> None:
    session(JSONLLogger(tmp_path / "log.jsonl", every="update"), [0, 1])
    rows = json_rows(tmp_path / "log.jsonl")
    assert [(row["kind"], row["step"]) for row in rows] == [
        ("update", 1), ("update", 2), ("epoch", 2), ("update", 3), ("update", 4), ("validation", 4), ("epoch", 4),
    ]  # fmt: skip
    assert rows[1] == {"run": RUN, "kind": "update", "epoch": 0, "step": 2, "update/loss": 0.5, "lr": 0.5}


def test_terms_and_optimizers_have_values_of_their_own(tmp_path: Path) -> None:
    logger = JSONLLogger(tmp_path / "log.jsonl", every="update")
    ctx = context()
    logger.on_train_begin(ctx)
    both = [event(1, 0, optimizer=name, lr=lr, a=1.0, b=2.0) for name, lr in (("d", 0.1), ("g", 0.2))]
    CallbackList([logger]).updates(ctx, both)
    logger.on_train_end(ctx)
    (row,) = json_rows(tmp_path / "log.jsonl")
    assert {name: row[name] for name in row if name not in ("run", "kind", "epoch", "step")} == {
        "update/loss": 3.0, "update/loss/a": 1.0, "update/loss/b": 2.0, "lr/d": 0.1, "lr/g": 0.2,
    }  # fmt: skip


@pytest.mark.parametrize("form", [CSVLogger, JSONLLogger])
def test_a_resumed_session_begins_where_the_run_does(tmp_path: Path, form: Any) -> None:
    """Rows beyond the last commit and a torn line are gone, those before and those of other runs stay."""
    path, read = tmp_path / "log", csv_rows if form is CSVLogger else json_rows
    session(form(path), [0], run="f" * 16)
    session(form(path), [0, 1, 2])
    with path.open("ab") as file:
        file.write(b'{"epoch": 9, "ki' if form is JSONLLogger else b'"0123')
    session(form(path), [1, 2], step=2)
    whole = [(row["run"][0], int(row["epoch"]), int(row["step"])) for row in read(path)]
    assert whole == [("f", 0, 2), ("0", 0, 2), ("0", 1, 4), ("0", 2, 6)]
    session(form(path), [0])
    assert [(row["run"][0], int(row["epoch"])) for row in read(path)] == [("f", 0), ("0", 0)]


@pytest.mark.parametrize("form", [CSVLogger, JSONLLogger])
def test_an_epoch_without_an_update_comes_once(tmp_path: Path, form: Any) -> None:
    """It has the count of updates of the epoch before, and a session that does it again leaves one row of it."""
    path, read = tmp_path / "log", csv_rows if form is CSVLogger else json_rows
    session(form(path), [0, 1])
    for _ in range(2):
        logger, ctx = form(path), context(4, 2)
        logger.on_train_begin(ctx)
        logger.on_epoch_end(ctx)
        logger.on_train_end(ctx)
    assert [(int(row["epoch"]), int(row["step"])) for row in read(path)] == [(0, 2), (1, 4), (2, 4)]


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    for logger in (CSVLogger(tmp_path / "log.csv"), JSONLLogger(tmp_path / "log.jsonl")):
        ctx = context()
        logger.on_train_begin(ctx)
        ctx.values = {"train_loss": float("nan"), "train_mse": float("inf")}
        logger.on_epoch_end(ctx)
        logger.on_train_end(ctx)
    (row,) = csv_rows(tmp_path / "log.csv")
    assert (float(row["train/loss"]), float(row["train/mse"])) == (pytest.approx(float("nan"), nan_ok=True), np.inf)
    (row,) = json_rows(tmp_path / "log.jsonl")
    assert (row["train/loss"], row["train/mse"]) == (None, None)


@pytest.mark.parametrize("form", [CSVLogger, JSONLLogger])
@pytest.mark.parametrize("text", ["a,b\n1,2\n", "[1]\n", '{"run": 3}\n', "\xff\n"])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, form: Any, text: str) -> None:
    path = tmp_path / "other"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="is not a file of this logger"):
        form(path).on_train_begin(context())
    assert path.read_bytes() == text.encode("latin-1")


# -- TensorBoard ------------------------------------------------------------------------------------------------


def records(path: Path) -> Iterator[bytes]:
    """The framed records of an event file; lengths are checked, checksums where they are made."""
    data = path.read_bytes()
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        yield data[12 : 12 + size]
        data = data[16 + size :]


def test_the_checksum_is_crc32c() -> None:
    """The check value of the algorithm, and RFC 3720's (B.4): 32 bytes of 0, of 0xff, and rising."""
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E


def test_a_record_is_what_tensorboards_own_writer_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that tensorboard 2.21 wrote for Event(wall_time=1.5, step=300, summary of a/b = 0.25), and its first."""
    monkeypatch.setattr("time.time", lambda: 1.5)
    file = EventFile(tmp_path, 0)
    file.add(300, {"a/b": 0.25})
    file.flush()
    data = file.path.read_bytes()
    assert data.startswith(bytes.fromhex(FIRST_RECORD))
    assert data.endswith(bytes.fromhex(SCALAR_RECORD))
    assert len(list(records(file.path))) == 3


def test_scalars_by_epoch_or_by_update(tmp_path: Path) -> None:
    """Read with tensorboard's own reader, where it is installed."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
        found = reader.EventAccumulator(str(directory))
        found.Reload()
        return {tag: [(s.step, s.value) for s in found.Scalars(tag)] for tag in found.Tags()["scalars"]}

    session(TensorBoardCallback(tmp_path / "a"), [0, 1, 2])
    by_epoch = scalars(tmp_path / "a")
    assert by_epoch["train/loss"] == [(0, 1.0), (1, 2.0), (2, 3.0)]
    assert by_epoch["val/loss"] == [(1, 11.0), (2, 12.0)]
    assert by_epoch.keys() == {"train/loss", "val/loss", "lr", "monitor/val_loss", "monitor/improved"}
    session(TensorBoardCallback(tmp_path / "a"), [1, 2], step=2)  # a resume: epochs 1 and 2 of the first are lost
    assert scalars(tmp_path / "a")["train/loss"] == [(0, 1.0), (1, 2.0), (2, 3.0)]
    session(TensorBoardCallback(tmp_path / "b", every="update"), [0, 1])
    by_update = scalars(tmp_path / "b")
    assert by_update["update/loss"] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)), (4, 0.25)]
    assert by_update["train/loss"] == [(2, 1.0), (4, 2.0)]
    session(TensorBoardCallback(tmp_path / "c"), [])
    assert scalars(tmp_path / "c") == {}


def test_event_files_are_flushed_each_epoch_or_at_the_end(tmp_path: Path) -> None:
    for name, each in (("each", True), ("end", False)):
        logger, ctx = TensorBoardCallback(tmp_path / name, each), context()
        logger.on_train_begin(ctx)
        run_epochs(logger, ctx, [0])
        written = [path.stat().st_size for path in (tmp_path / name).iterdir()]
        assert bool(written) is each
        logger.on_train_end(ctx)
        (path,) = (tmp_path / name).iterdir()
        assert len(list(records(path))) == 3


def test_the_default_directory_is_in_the_run(tmp_path: Path) -> None:
    ctx = context()
    ctx.runs_dir = tmp_path
    logger = TensorBoardCallback()
    logger.on_train_begin(ctx)
    logger.on_train_end(ctx)
    (path,) = (tmp_path / RUN / "tensorboard").iterdir()
    assert path.name.startswith("events.out.tfevents.")
    assert str(os.getpid()) in path.name


# -- Weights & Biases -------------------------------------------------------------------------------------------


class Borrowed:
    """A run of the user's, as far as it is used."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.ended = False

    def log(self, values: dict[str, Any], step: int) -> None:
        self.rows.append((step, values))

    def finish(self, exit_code: int = 0) -> None:
        self.ended = True


def test_a_borrowed_wandb_run_is_logged_to_and_not_finished() -> None:
    run = Borrowed()
    session(WandbCallback(wandb_run=run), [0, 1])
    assert [step for step, _ in run.rows] == [0, 1]
    assert run.rows[0][1] == {"epoch": 0, "updates": 2, "train/loss": 1.0, "lr": 0.5}
    assert not run.ended
    with pytest.raises(ConfigError, match="project, mode would be for one of its own"):
        WandbCallback("mine", run, mode="offline")


def test_an_own_wandb_run_offline(tmp_path: Path) -> None:
    """The real client, without a network; the run has the training's id."""
    pytest.importorskip("wandb")
    session(WandbCallback("project", mode="offline", dir=str(tmp_path)), [0, 1])
    (kept,) = (tmp_path / "wandb").glob("offline-run-*")
    assert list(kept.glob(f"run-{RUN}.wandb"))


def test_a_missing_wandb_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ImportError, match=r"pip install 'nnx_jax\[wandb\]'"):
        WandbCallback("project").on_train_begin(context())
