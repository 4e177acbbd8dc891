"""Windows on several devices that nobody asked to be reduced once: the numbers are those of one device all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from nnx_jax.core.hooks import TracedHook, TrainingUpdateHook
from nnx_jax.core.stages import TrainingStage as Stage
from nnx_jax.data import ArrayDataset
from nnx_jax.engines.nnx_forward import PureModule
from nnx_jax.engines.placement import SplitRows
from nnx_jax.hooks import GradientAccumulationHook, MixedPrecisionHook
from nnx_jax.loop.progress import QuietProgress
from nnx_jax.model import NNModel
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.train import NNTrainParams
from nnx_jax.runs.run import NNRun


class Centred(nnx.Module):
    """Knows the mean of the batch, and keeps nothing of it; `alone` leaves that out."""

    def __init__(self, alone: bool = False) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.last, self.alone = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs), alone

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = nnx.tanh(self.first(x))
        return self.last(hidden if self.alone else hidden - hidden.mean(axis=0))


class LooksAround(TracedHook):
    """Takes the batch's mean from the predictions."""

    frequency, stage = 1, Stage.AFTER_FORWARD

    def __call__(self, ctx: Any, stage: Stage) -> None:
        ctx.predictions = ctx.predictions - 0.5 * ctx.predictions.mean(axis=0)


class PullsBack(TrainingUpdateHook):
    """Adds the squared mean of the batch's predictions to the loss."""

    def __call__(self, ctx: Any, stage: Stage, will_skip: Any) -> tuple[Any, Any]:
        if stage is Stage.DO_BACKWARD:
            return True, ctx.loss + ctx.xp.sum(ctx.predictions.mean(axis=0) ** 2)
        return True, ctx.loss


class Decides(TrainingUpdateHook):
    """Begins a window with every other microbatch."""

    def __call__(self, ctx: Any, stage: Stage, will_skip: Any) -> tuple[Any, Any]:
        return (ctx.batch_count % 2 == 0 if stage is Stage.BEFORE_BATCH else True), ctx.loss


def train(runs: Path, mesh: dict[str, int], *hooks: Any, module: Any = None, window: int = 2, **more: Any) -> Any:
    """(run, parameters) of an epoch of three windows, the last one shorter and filled up."""
    x = np.random.default_rng(0).normal(size=(38, 4)).astype(np.float32)
    rows = ArrayDataset(x=x, y=(x[:, 0] > 0).astype(np.int32) + (x[:, 1] > 0.5))
    optim = NNOptimParams(kind="sgd", max_lr=0.5, accumulate_grad_batches=window)
    model = NNModel(params=NNModelParams(), module=module or Centred(alone=True))
    run: NNRun = model.train(
        NNTrainParams(n_epochs=1, optim=optim, **more.pop("train", {})), hooks=hooks, mesh=mesh, runs_dir=runs,
        data=NNDataParams(train=rows, batch_size=8, **more), progress=QuietProgress(),
    )  # fmt: skip
    return run, PureModule(model.net).params


def deferred(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether runs are made with a deferred reduction, one after the other; filled while they are made."""
    found, init = [], SplitRows.__init__
    monkeypatch.setattr(SplitRows, "__init__", lambda self, *a, **k: (found.append(k["must"]), init(self, *a, **k))[1])
    return found


FOUR = {"data": 4}
SAME: dict[str, Callable[[], dict[str, Any]]] = {
    "a model that compares rows": lambda: {"module": Centred()},
    "hooks that compare rows": lambda: {"hooks": [LooksAround(), PullsBack()]},
    "a hook that begins windows": lambda: {"hooks": [Decides()]},
    "a last batch that does not split": lambda: {"tail": "keep"},
}


@pytest.mark.filterwarnings("ignore:apply is compiled again")
@pytest.mark.parametrize("name", SAME)
def test_what_knows_other_rows_is_reduced_at_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default nothing changes a number: where rows may know of each other each microbatch is reduced."""
    found, results = deferred(monkeypatch), []
    for mesh in ({}, {"data": 4}):
        given = SAME[name]()
        results.append(train(tmp_path / str(len(results)), mesh, *given.pop("hooks", ()), **given))
    (one, weights), (four, others) = results
    assert found == [False]
    for column in ("train_loss", "grad_norm"):
        told = [[value for value in run.column(column) if value is not None] for run in (one, four)]
        assert told[1] == pytest.approx(told[0], rel=2e-5), column
    for key, value in weights.items():
        np.testing.assert_allclose(np.asarray(others[key]), np.asarray(value), rtol=2e-4, atol=1e-6)


def test_rows_that_are_apart_are_reduced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the user's own, as its trace shows; the numbers are those of one device."""
    found = deferred(monkeypatch)
    (one, weights), (four, others) = train(tmp_path / "1", {}), train(tmp_path / "4", {"data": 4})
    assert found == [True]
    assert four.column("train_loss") == pytest.approx(one.column("train_loss"), rel=1e-5)
    for key, value in weights.items():
        np.testing.assert_allclose(np.asarray(others[key]), np.asarray(value), rtol=1e-5, atol=1e-6)


def test_a_model_that_compares_rows_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for a deferred reduction is told why there is none."""
    found = deferred(monkeypatch)
    with pytest.warns(UserWarning, match="defer_reduce does nothing here: the model compares rows of a batch"):
        train(tmp_path, {"data": 4}, GradientAccumulationHook(k=2, defer_reduce=True), module=Centred(), window=1)
    assert found == [False]


def test_a_loss_scale_is_that_of_the_whole_batch(tmp_path: Path) -> None:
    """In float16 four devices skip what one skips: each scales its own rows as they are scaled in the batch."""
    results = [train(tmp_path / str(len(mesh)), mesh, MixedPrecisionHook(precision="float16")) for mesh in ({}, FOUR)]
    (one, weights), (four, others) = results
    assert four.column("skipped") == one.column("skipped")
    for key, value in weights.items():
        np.testing.assert_allclose(np.asarray(others[key]), np.asarray(value), rtol=5e-3, atol=2e-3)
