"""What is looked at before a torch run: the updates it will make, and the loader whose order it draws."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from nnx_jax.core.errors import ConfigError
from nnx_jax.engines.feeds import make_feeds
from nnx_jax.loop.callbacks import Callback
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.scheduler import NNSchedulerParams
from nnx_jax.params.train import NNTrainParams
from nnx_jax.runs.run import NNRun
from nnx_jax.step.own import default_train_step
from nnx_jax.torch import NNModel
from nnx_jax.torch.own_step import delegates
from tests.torch.engines import columns, mlp, spec_of

ONE_CYCLE = NNSchedulerParams(kind="one_cycle", clock="optimizer_update")


def train(runs: Path, *, loader: Any = None, **more: Any) -> NNRun:
    """Two epochs of four batches."""
    data = columns(16)
    given = loader or [{name: column[at : at + 4] for name, column in data.items()} for at in range(0, 16, 4)]
    names = ("train_step_fn", "callbacks")
    call = {name: more.pop(name) for name in names if name in more}
    settings: dict[str, Any] = {"optim": NNOptimParams(kind="sgd", max_lr=0.1), "train_loader": given, **more}
    if "max_steps" not in settings:
        settings.setdefault("n_epochs", 2)
    model = NNModel(module=mlp(), params=NNModelParams.from_state({"loss": "mse"}))
    return model.train(NNTrainParams(**settings), runs_dir=runs, quiet=True, **call)


def by_itself(ctx: Any) -> dict[str, Any]:
    """Two updates of a microbatch."""
    loss = torch.zeros(())
    for _ in range(2):
        loss = ctx.mean((ctx.model(ctx.batch["x"]) - ctx.batch["y"]).square())
        ctx.backward(loss)
        ctx.update()
        ctx.report_update()
    return {"loss": loss.detach()}


def unreported(ctx: Any) -> dict[str, Any]:
    loss = ctx.mean((ctx.model(ctx.batch["x"]) - ctx.batch["y"]).square())
    ctx.backward(loss)
    ctx.update()
    return {"loss": loss.detach()}


def test_updates_are_planned_where_the_run_makes_them(tmp_path: Path) -> None:
    """A step of one's own decides when it steps, so a schedule that ends is told its length; the rate is followed."""
    with pytest.raises(ConfigError, match="length of this run is not known beforehand; give total_steps"):
        train(tmp_path, train_step_fn=by_itself, scheduler=ONE_CYCLE)
    assert not list(tmp_path.iterdir())
    train(tmp_path / "own", train_step_fn=by_itself, scheduler=ONE_CYCLE.replace(total_steps=16))
    with pytest.raises(ValueError, match="one_cycle ends after 15 updates"):
        train(tmp_path / "short", train_step_fn=by_itself, scheduler=ONE_CYCLE.replace(total_steps=15))
    plain = train(tmp_path / "plain", scheduler=ONE_CYCLE)
    own = train(tmp_path / "default", train_step_fn=default_train_step, scheduler=ONE_CYCLE)
    assert [row["lr"] for row in own.records] == [row["lr"] for row in plain.records]


def test_lazy_layers_are_settled_before_a_step_is_looked_at() -> None:
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(5), torch.nn.ReLU(), torch.nn.Linear(5, 1))
    spec = spec_of(columns())
    assert delegates(spec, default_train_step, lazy, make_feeds(spec)["train"], device=torch.device("cpu"))


def test_a_length_in_updates_needs_updates(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_steps: .*reports no update"):
        train(tmp_path, train_step_fn=unreported, max_steps=3)
    assert not list(tmp_path.iterdir())


def test_a_window_longer_than_an_epoch_is_told(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="accumulate_grad_batches is 6, an epoch has 4 batches"):
        found = train(tmp_path, optim=NNOptimParams(kind="sgd", max_lr=0.1, accumulate_grad_batches=6))
    assert found.epochs[-1]["step"] == 2


class Stops(Callback):
    """A signal after the second update of the first epoch."""

    def on_optimizer_update(self, ctx: Any, event: Any) -> None:
        if event.update_idx == 2:
            signal.raise_signal(signal.SIGTERM)


def test_a_run_stopped_in_its_first_epoch_goes_on_in_the_order_it_drew(tmp_path: Path) -> None:
    """Nobody seeds anything where it goes on; the loader has no generator of its own."""

    def shuffled(seed: int) -> Any:
        torch.manual_seed(seed)
        return DataLoader(TensorDataset(*map(torch.from_numpy, columns(16).values())), batch_size=4, shuffle=True)

    whole = train(tmp_path / "whole", loader=shuffled(1))
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        train(tmp_path / "parts", loader=shuffled(1), callbacks=[Stops()])
    found = train(tmp_path / "parts", loader=shuffled(2))
    assert found.id == whole.id
    losses = [[row["train_loss"] for row in run.records if row["kind"] == "update"] for run in (found, whole)]
    assert len(losses[0]) == 8
    np.testing.assert_array_equal(losses[0], losses[1])
