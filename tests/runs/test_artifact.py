"""Artifacts and trackers: one valid JSON file each, equal after a load, and never a word about memory addresses."""

from __future__ import annotations

import importlib.metadata
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nnx_jax.core.errors import ConfigError, UnsafePathError
from nnx_jax.core.operator import Operator
from nnx_jax.core.registry import register
from nnx_jax.loop.step_builtin import LogToExperiment, StepCallback
from nnx_jax.loop.step_callbacks import StepState
from nnx_jax.runs import artifact as module
from nnx_jax.runs.artifact import InferenceArtifact, TrainingArtifact, deps_lock
from nnx_jax.runs.registry import LocalModelRegistry
from nnx_jax.runs.tracker import ExperimentTracker, FileTracker, Run


@register("artifact_shift")
class Shift(Operator):
    """An operator with a weight."""

    by: float = 0.0

    def _apply(self, x: Any) -> Any:
        return x + self.by

    def serialize_weights(self) -> bytes:
        return b"weights"

    def with_weights(self, blob: bytes) -> Shift:
        assert blob == b"weights"
        return self


def made(**more: Any) -> TrainingArtifact:
    return TrainingArtifact("kind: training_loop\n", "abc", **more)


def test_an_artifact_is_the_same_after_a_load(tmp_path: Path) -> None:
    """(pipekit:I2)"""
    info = {"final_step": 3, "a": (1, 2.5), "path": Path("x"), "np": np.float32(0.5), "inf": math.inf, "none": None}
    whole = made(trained_model_hash="h", tracker_run_id="r", model_registry_uri="registry://h", backend_info=info)
    path = whole.save(tmp_path / "runs" / "artifact.json")
    loaded = TrainingArtifact.load(path)
    assert loaded == whole
    assert loaded.backend_info == {
        "final_step": 3, "a": [1, 2.5], "path": "x", "np": 0.5, "inf": math.inf, "none": None,
    }  # fmt: skip
    text = path.read_text()

    def ordered(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        assert names == sorted(names)
        return dict(pairs)

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is not JSON")

    json.loads(text, object_pairs_hook=ordered, parse_constant=refuse)
    assert text.startswith('{\n  "')


def test_a_number_that_is_none_comes_back(tmp_path: Path) -> None:
    loaded = TrainingArtifact.load(made(backend_info={"loss": math.nan}).save(tmp_path / "a.json"))
    assert math.isnan(loaded.backend_info["loss"])


def test_the_fields_as_a_dict() -> None:
    """(pipekit:I11)"""
    fields = made().to_dict()
    assert set(fields) == {
        "training_pipeline_yaml", "dataset_hash", "trained_model_hash", "tracker_run_id", "model_registry_uri",
        "backend_info", "deps_lock", "environment", "metadata",
    }  # fmt: skip
    assert TrainingArtifact.from_dict(fields) == made()
    for wrong in ({**fields, "more": 1}, {"dataset_hash": "x"}):
        with pytest.raises(ConfigError, match="TrainingArtifact"):
            TrainingArtifact.from_dict(wrong)


def test_what_no_file_can_hold_is_refused_with_its_place() -> None:
    with pytest.raises(ConfigError, match=r"backend_info.a\[1\]"):
        made(backend_info={"a": [1, object()]})


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ConfigError, match="list.json"):
        TrainingArtifact.load(tmp_path / "list.json")
    with pytest.raises(FileNotFoundError):
        TrainingArtifact.load(tmp_path / "none.json")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made().save(tmp_path / "a.json")
    before = path.read_bytes()

    def full(*args: Any) -> None:
        raise OSError(28, "disk full")

    monkeypatch.setattr("nnx_jax.core.fsio.os.fsync", full)
    with pytest.raises(OSError, match="full"):
        made(tracker_run_id="other").save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_installed_is_known_without_an_installer(monkeypatch: pytest.MonkeyPatch) -> None:
    """(pipekit:I12)"""
    monkeypatch.setenv("PATH", "")  # no command can be asked
    deps_lock.cache_clear()
    lines = made().deps_lock.splitlines()
    assert f"jax=={importlib.metadata.version('jax')}" in lines
    assert lines == sorted(lines, key=lambda line: line.split("==")[0].lower())
    assert made().environment["versions"]["jax"] == importlib.metadata.version("jax")


def test_a_broken_package_does_not_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """(pipekit:I12)"""

    def broken() -> Any:
        raise OSError("no metadata")

    monkeypatch.setattr(module.importlib.metadata, "distributions", broken)
    deps_lock.cache_clear()
    assert made().deps_lock == ""
    deps_lock.cache_clear()


def test_the_model_comes_back_from_the_registry(tmp_path: Path) -> None:
    models = LocalModelRegistry(tmp_path)
    digest = models.store(Shift(by=2.0))
    artifact = made(trained_model_hash=digest, model_registry_uri=f"registry://{digest}")
    assert artifact.reload_model(models)(1.0) == 3.0
    assert artifact.reload_model(models, template=Shift(by=5.0))(1.0) == 6.0
    with pytest.raises(ConfigError, match="no registry"):
        made(trained_model_hash=digest).reload_model(models)
    with pytest.raises(KeyError):
        artifact.reload_model(LocalModelRegistry(tmp_path / "other"))


def test_a_serving_pipeline_pins_its_models(tmp_path: Path) -> None:
    models = LocalModelRegistry(tmp_path / "models")
    pinned = {name: models.store(Shift(by=by)) for name, by in (("a", 1.0), ("b", 2.0))}
    artifact = InferenceArtifact("kind: sequential\n", pinned)
    loaded = InferenceArtifact.load(artifact.save(tmp_path / "serving.json"))
    assert loaded == artifact
    found = loaded.reload_models(models, templates={"b": Shift(by=7.0)})
    assert {name: op(0.0) for name, op in found.items()} == {"a": 1.0, "b": 7.0}


# -- the tracker of files --------------------------------------------------------------------------------------


def test_a_tracked_run(tmp_path: Path) -> None:
    tracker = FileTracker(tmp_path / "tracked", flush_every=2)
    assert isinstance(tracker, ExperimentTracker)
    run = tracker.start_run("first", {"lr": 0.1})
    assert tracker.load_run(run.run_id).status == "running"
    tracker.log_metrics(run, {"loss": 0.5}, step=1)
    assert tracker.history(run.run_id) == []
    tracker.log_metrics(run, {"loss": 0.25, "bad": math.nan}, step=2)
    tracker.log_metrics(run, {"eval/val_loss": 0.75}, step=2)
    assert [row["step"] for row in tracker.history(run.run_id)] == [1, 2]
    (tmp_path / "notes.txt").write_text("hello")
    tracker.log_artifact(run, tmp_path / "notes.txt", "notes")
    tracker.end_run(run, status="completed")
    found = tracker.load_run(run.run_id)
    assert found == run
    assert (found.name, found.status, found.config) == ("first", "completed", {"lr": 0.1})
    assert found.metrics == {"loss": 0.25, "eval/val_loss": 0.75}
    assert found.ended_at is not None
    assert found.started_at <= found.ended_at
    assert (tmp_path / "tracked" / run.run_id / found.artifacts["notes"]).read_text() == "hello"
    assert tracker.history(run.run_id)[1:] == [
        {"step": 2, "metrics": {"loss": 0.25, "bad": None}},
        {"step": 2, "metrics": {"eval/val_loss": 0.75}},
    ]
    assert tracker.runs() == (run.run_id,)


def test_what_a_tracker_refuses(tmp_path: Path) -> None:
    tracker = FileTracker(tmp_path)
    run = tracker.start_run("first")
    with pytest.raises(ConfigError, match="done"):
        tracker.end_run(run, status="done")
    with pytest.raises(UnsafePathError):
        tracker.log_artifact(run, tmp_path / "x", "../x")
    with pytest.raises(ConfigError):
        tracker.start_run("second", {"f": print})
    with pytest.raises(KeyError):
        tracker.load_run("nothing")
    with pytest.raises(UnsafePathError):
        tracker.load_run("../x")


def test_a_line_that_a_kill_has_torn_is_left_out(tmp_path: Path) -> None:
    tracker = FileTracker(tmp_path, flush_every=1)
    run = tracker.start_run("first")
    tracker.log_metrics(run, {"loss": 1.0}, step=1)
    path = tmp_path / run.run_id / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 2, "me')
    assert [row["step"] for row in tracker.history(run.run_id)] == [1]


def test_the_artifact_gets_the_id_of_the_run(tmp_path: Path) -> None:
    """(pipekit:I10)"""
    tracker = FileTracker(tmp_path)
    callback = LogToExperiment(tracker, "first")
    state = StepState()
    callback.on_train_begin(SimpleNamespace(get_config=lambda: {"max_steps": 3}), state)
    assert isinstance(callback.run, Run)
    callback.on_train_end(None, state)
    (known,) = tracker.runs()
    assert made(tracker_run_id=callback.run_id).tracker_run_id == known == callback.run.run_id
    assert tracker.load_run(known).status == "completed"
    assert tracker.load_run(known).config == {"max_steps": 3}
    assert StepCallback.from_state(callback.state()) == callback
