"""Windows as runs with hooks: over the end of an epoch, committed in their middle, resumed bit for bit."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from nnx_jax.config import load_config
from nnx_jax.core.errors import NonFiniteError
from nnx_jax.core.stages import TrainingStage as Stage
from nnx_jax.hooks import GradientAccumulationHook
from nnx_jax.loop.signals import Interrupted
from nnx_jax.model import train_spec
from nnx_jax.runs.run import NNRun
from tests.e2e.helpers import assert_same_run
from tests.e2e.toys import (
    KillAt,
    Killed,
    Slope,
    arrays,
    column,
    fit,
    gradients,
    inputs,
    only_run,
    slope,
    square,
    weight,
)

SIX = (1.0, 0.5, 2.0, 0.3, 1.2, 0.7)


def toy(runs: Path, rows: Any, hooks: Any = (), **more: Any) -> NNRun:
    return fit(runs, Slope(1.0), square, inputs(*rows), hooks=hooks, **more)


class At:
    """Does something once, after the microbatch of a number."""

    stage, frequency = Stage.AFTER_BATCH, 1

    def __init__(self, batch: int = -1, act: Any = None) -> None:
        self.batch, self.act, self.seen = batch, act, []

    def __call__(self, ctx: Any, stage: Stage) -> None:
        self.seen.append((ctx.step_count, ctx.batch_count))
        if ctx.batch_count == self.batch:
            self.act(ctx)


def test_updates_are_counted_over_epochs(tmp_path: Path) -> None:
    """nvalchemi:62 nvalchemi:61: three updates of K = 4 out of epochs of six take twelve microbatches."""
    hook = At()
    run = toy(tmp_path, (1,) * 6, [GradientAccumulationHook(4, on_partial="carry"), hook], max_steps=3)
    assert hook.seen[-1] == (3, 12)
    assert weight(run) == pytest.approx([0.8**3], abs=1e-6)
    assert column(run, "update", "batch") == [3, 1, 5]
    assert column(run, "update", "epoch") == [0, 1, 1]


@pytest.mark.parametrize("every", ["update", "batch"])
@pytest.mark.parametrize("watched", [False, True])
def test_an_epoch_may_end_in_a_window(tmp_path: Path, every: str, watched: bool) -> None:
    """Stopped between the epochs, in the middle of a window: the same bits, and the same history."""

    def hooks() -> list[Any]:
        return [GradientAccumulationHook(4, on_partial="carry"), *([At()] if watched else [])]

    more: dict[str, Any] = {"n_epochs": 3, "record_every": every, "optim": {"momentum": 0.9}}
    whole = toy(tmp_path / "a", SIX, hooks(), **more)
    with pytest.raises(Killed):
        toy(tmp_path / "b", SIX, hooks(), callbacks=[KillAt("on_epoch_begin", 2)], **more)
    left = NNRun.all(tmp_path / "b")[0]
    assert arrays(left)["counters"][1] == 2
    assert_same_run(toy(tmp_path / "b", SIX, hooks(), **more), whole)
    # The window over the border belongs to the epoch it ends in: 1 update, then 2, then 1.
    assert [row["step"] for row in whole.records if row["kind"] == "epoch"] == [1, 3, 4]


@pytest.mark.parametrize("every", ["update", "batch"])
@pytest.mark.parametrize("by_hook", [True, False])
def test_a_commit_in_the_middle_of_a_window(tmp_path: Path, every: str, by_hook: bool) -> None:
    """nvalchemi:67: committed after two of four, dead after three: 0.25, as if nothing had happened."""

    def die(ctx: Any) -> None:
        raise Killed

    def made(*acts: At) -> Any:
        return [*([GradientAccumulationHook(4)] if by_hook else []), *acts]

    more: dict[str, Any] = {"record_every": every, "accumulate": 1 if by_hook else 4, "n_epochs": 2}
    commit = At(2, lambda ctx: ctx.request_commit())
    with pytest.raises(Killed):
        toy(tmp_path / "b", (1, 2, 1, 3), made(commit, At(3, die)), **more)
    left = NNRun.all(tmp_path / "b")[0]
    assert (arrays(left)["counters"][0], arrays(left)["counters"][1]) == (2, 2)
    again = At()
    run = toy(tmp_path / "b", (1, 2, 1, 3), made(again), **more)
    assert again.seen[:2] == [(0, 3), (1, 4)]
    whole = toy(tmp_path / "a", (1, 2, 1, 3), made(At()), **more)
    assert_same_run(run, whole)
    assert column(run, "epoch", "step") == [1, 2]
    assert weight(run) == pytest.approx([0.25**2], abs=1e-6)


def test_a_signal_in_the_middle_of_a_window(tmp_path: Path) -> None:
    """A run that goes batch by batch stops where it stands, and the same call goes on from there."""

    def made(act: At) -> Any:
        return [GradientAccumulationHook(4), act]

    with pytest.raises(Interrupted):
        toy(tmp_path, (1, 2, 1, 3), made(At(2, lambda ctx: signal.raise_signal(signal.SIGINT))))
    assert arrays(NNRun.all(tmp_path)[0])["counters"][1] == 2
    run = toy(tmp_path, (1, 2, 1, 3), made(At()))
    assert weight(run) == pytest.approx([0.25], abs=1e-6)


def test_evaluations_fall_on_updates(tmp_path: Path) -> None:
    """nvalchemi:68: twelve microbatches in windows of three, an evaluation every two updates."""
    watched = At()
    run = toy(tmp_path, (0.1,) * 12, [GradientAccumulationHook(3), watched], eval_every_n_steps=2, val=inputs(1.0, 2.0))
    assert column(run, "eval", "step") == [2]
    assert column(run, "epoch", "step") == [4]


def test_hooks_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration and Python make the same run: hooks by kind count in its id."""
    monkeypatch.chdir(tmp_path)
    text = """
model:
  net: {kind: feed_forward, hidden_dims: [4]}
data:
  train: {kind: digits, split: train}
  batch_size: 256
train:
  max_steps: 3
  optim: {kind: sgd, max_lr: 0.1}
hooks:
  - {kind: accumulation, k: 2, on_partial: carry}
  - {kind: gradient_clip, max_norm: 1.0}
"""
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    spec = load_config(tmp_path / "run.yaml")
    result = train_spec(spec, runs_dir=tmp_path / "runs", quiet=True)
    assert result["step"] == 3
    assert result["run_id"] != train_spec(spec.replace(hooks=()), runs_dir=tmp_path / "runs", quiet=True)["run_id"]
    run = NNRun.load(result["run_id"], tmp_path / "runs")
    assert run.last is not None
    assert [hook["kind"] for hook in run.state["hooks"]] == ["accumulation", "gradient_clip"]
    assert column(run, "update", "step") == [1, 2, 3]


@pytest.mark.parametrize("every", ["update", "batch"])
def test_a_window_that_fails_is_gone_whole(tmp_path: Path, every: str) -> None:
    """Microbatch 3 of (1, 1), (1, NaN) is not half done: the commit stands after the first window."""
    data = gradients(1.0, 1.0, 1.0, 1.0, bad=[3])
    with pytest.raises(NonFiniteError, match="update 2, microbatch 3"):
        fit(tmp_path, Slope(), slope, data, accumulate=2, record_every=every)
    left = only_run(tmp_path)
    assert left.last is not None
    assert (left.last.step, left.last.batch) == (1, 2)
    assert arrays(left)["counters"][:2].tolist() == [2, 0]
