"""Metric writers: records as other tools read them, whole after a kill, and no second one of a run."""

from __future__ import annotations

import csv
import json
import math
import struct
import sys
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nnx_jax.core.errors import ConfigError
from nnx_jax.loop.writers import (
    CSVWriter,
    JSONLWriter,
    MetricWriter,
    MLflowWriter,
    MultiWriter,
    Sink,
    TensorBoardWriter,
    WandbWriter,
)


def rows(path: Path) -> list[dict[str, Any]]:
    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_one_line_a_record(tmp_path: Path) -> None:
    """(pipekit:E1)"""
    writer = JSONLWriter(tmp_path / "a" / "b" / "log.jsonl")
    writer.write(1, {"loss": 7})
    writer.write(2, {"loss": 0.5})
    writer.close()
    writer.close()
    first, second = rows(tmp_path / "a" / "b" / "log.jsonl")
    assert (first["step"], first["metrics"], second["step"]) == (1, {"loss": 7.0}, 2)
    assert '"loss":7.0' in (tmp_path / "a" / "b" / "log.jsonl").read_text().splitlines()[0]
    assert datetime.fromisoformat(first["timestamp"]).utcoffset() == timedelta(0)
    writer.write(3, {"loss": 0.25})
    writer.close()
    assert [row["step"] for row in rows(tmp_path / "a" / "b" / "log.jsonl")] == [1, 2, 3]


def test_records_are_on_the_disk_after_so_many(tmp_path: Path) -> None:
    """(pipekit:E2)"""
    writer = JSONLWriter(tmp_path / "log.jsonl", flush_every=2)
    writer.write(1, {"loss": 1.0})
    assert not (tmp_path / "log.jsonl").exists()
    writer.write(2, {"loss": 1.0})
    assert [row["step"] for row in rows(tmp_path / "log.jsonl")] == [1, 2]


def test_what_is_open_is_no_part_of_a_writer(tmp_path: Path) -> None:
    """(pipekit:E3)"""
    used, fresh = JSONLWriter(tmp_path / "log.jsonl"), JSONLWriter(tmp_path / "log.jsonl")
    text = repr(fresh)
    used.write(1, {"loss": 1.0})
    assert used == fresh
    assert repr(used) == text
    assert hash(used) == hash(fresh)
    assert Sink.from_state(used.state()) == used


def test_numbers_that_are_none_stay_json(tmp_path: Path) -> None:
    """(pipekit:E4)"""
    with_nan = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0}
    writer = JSONLWriter(tmp_path / "log.jsonl", flush_every=1)
    writer.write(1, with_nan)
    assert rows(tmp_path / "log.jsonl")[0]["metrics"] == {"a": None, "b": None, "c": None, "d": 1.0}


@pytest.mark.parametrize("make", [JSONLWriter, CSVWriter])
def test_a_torn_last_line_is_cut_off(tmp_path: Path, make: Any) -> None:
    path = tmp_path / "log"
    writer = make(path)
    writer.write(1, {"loss": 1.0})
    writer.close()
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[-1][:7])
    make(path, flush_every=1).write(2, {"loss": 2.0})
    assert path.read_bytes().startswith(whole)
    assert len(path.read_bytes().splitlines()) == len(whole.splitlines()) + 1


def test_csv_takes_new_values_in_new_columns(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "log.csv"
    writer = CSVWriter(path, flush_every=1)
    for step, metrics in ((1, {"loss": 1.5}), (2, {"loss": 2.0, "eval/val, loss": math.nan}), (3, {"loss": 3})):
        writer.write(step, metrics)
    writer.close()
    again = CSVWriter(path)
    again.write(4, {"loss": 4.0})
    again.close()
    with path.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert list(found[0]) == ["step", "timestamp", "loss", "eval/val, loss"]
    assert [(row["step"], row["loss"], row["eval/val, loss"]) for row in found] == [
        ("1", "1.5", ""), ("2", "2.0", "nan"), ("3", "3.0", ""), ("4", "4.0", ""),
    ]  # fmt: skip
    assert datetime.fromisoformat(found[0]["timestamp"].strip('"'))


@pytest.mark.parametrize("text", ["a,b\n1,2\n", '"torn\n'])
def test_csv_leaves_foreign_files_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "log.csv"
    path.write_text(text)
    writer = CSVWriter(path, flush_every=1)
    with pytest.raises(ConfigError, match="another path"):
        writer.write(1, {"loss": 1.0})
    assert path.read_text() == text


def test_what_could_not_be_written_is_written_later(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.mkdir()
    writer = JSONLWriter(path, flush_every=1)
    with pytest.raises(OSError, match="log.jsonl"):
        writer.write(1, {"loss": 1.0})
    path.rmdir()
    writer.write(2, {"loss": 1.0})
    assert [row["step"] for row in rows(path)] == [1, 2]


def test_who_is_a_writer() -> None:
    """(pipekit:E13)"""

    class Half:
        def write(self, step: int, metrics: Any) -> None: ...

    class Whole(Half):
        def close(self) -> None: ...

    assert isinstance(JSONLWriter("log.jsonl"), MetricWriter)
    assert isinstance(Whole(), MetricWriter)
    assert not isinstance(Half(), MetricWriter)
    for writer in (CSVWriter("a"), TensorBoardWriter("b"), WandbWriter(), MLflowWriter(), MultiWriter((Whole(),))):
        assert isinstance(writer, MetricWriter)


@pytest.mark.parametrize("wrong", [{"path": ""}, {"path": 3}, {"path": "x", "flush_every": 0}])
def test_wrong_settings_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError):
        JSONLWriter(**wrong)
    with pytest.raises(TypeError, match="place"):
        JSONLWriter("a", path="b")  # type: ignore[misc]
    with pytest.raises(TypeError, match="3 values"):
        JSONLWriter("a", 1, 2)  # type: ignore[misc]


def scalars(path: Path) -> list[bytes]:
    """The payloads of a file's records, by their lengths."""
    data, found, at = path.read_bytes(), [], 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        found.append(data[at + 12 : at + 12 + size])
        at += 16 + size
    return found


def test_tensorboard_writes_every_value_under_its_name(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path, flush_every=2)
    writer.write(3, {"loss": 0.25})
    assert not list(tmp_path.iterdir())
    writer.write(4, {"eval/val_loss": 0.5})
    (file,) = tmp_path.iterdir()
    version, _session, first, second = scalars(file)
    assert b"brain.Event:2" in version
    assert b"\x10\x03" in first  # step 3
    assert b"loss\x15" + struct.pack("<f", 0.25) in first
    assert b"eval/val_loss\x15" + struct.pack("<f", 0.5) in second
    writer.close()
    writer.close()
    assert len(scalars(file)) == 4


class Recorder:
    """Stands for a service: notes what is called."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, *args, *((kwargs,) if kwargs else ())))
            return {"get_experiment_by_name": None, "create_experiment": "7"}.get(
                name, SimpleNamespace(info=SimpleNamespace(run_id="r1"))
            )

        return call


def test_wandb_begins_at_the_first_record_and_finishes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run, inits = Recorder(), []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **given: inits.append(given) or run))
    writer = WandbWriter("mine", settings={"mode": "offline"})
    assert not inits
    writer.write(5, {"loss": 1})
    writer.close()
    writer.close()
    assert inits == [{"project": "mine", "mode": "offline"}]
    assert run.calls == [("log", {"loss": 1.0}, {"step": 5}), ("finish",)]


def test_mlflow_begins_at_the_first_record_and_ends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Recorder()
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda tracking_uri: client))
    writer = MLflowWriter("mine", run_name="first")
    writer.write(5, {"loss": 1, "mse": 2})
    writer.close()
    writer.close()
    assert client.calls == [
        ("get_experiment_by_name", "mine"),
        ("create_experiment", "mine"),
        ("create_run", "7", {"run_name": "first"}),
        ("log_metric", "r1", "loss", 1.0, {"step": 5}),
        ("log_metric", "r1", "mse", 2.0, {"step": 5}),
        ("set_terminated", "r1"),
    ]


@pytest.mark.parametrize("writer, extra", [(WandbWriter(), "wandb"), (MLflowWriter(), "mlflow")])
def test_without_the_package_the_first_record_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, writer: Any, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(ImportError, match=rf"nnx_jax\[{extra}\]"):
        writer.write(1, {"loss": 1.0})
    writer.close()


def test_several_writers_get_every_record_and_are_all_closed(tmp_path: Path) -> None:
    closed: list[str] = []

    class Bad:
        def write(self, step: int, metrics: dict[str, float]) -> None:
            metrics["loss"] = -1.0

        def close(self) -> None:
            closed.append("bad")
            raise OSError("disk full")

    writer = MultiWriter((Bad(), JSONLWriter(tmp_path / "log.jsonl")))
    writer.write(1, {"loss": 1.0})
    with pytest.raises(OSError, match="disk full"):
        writer.close()
    assert rows(tmp_path / "log.jsonl")[0]["metrics"] == {"loss": 1.0}
    plain = MultiWriter((JSONLWriter("a"), CSVWriter("b")))
    assert Sink.from_state(plain.state()) == plain
    for wrong in ((), (3,)):
        with pytest.raises((TypeError, ValueError), match="(?i)metric ?writer"):
            MultiWriter(wrong)
