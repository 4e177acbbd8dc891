"""What the processes of `test_case_group.py` do: small runs whose right values are known by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_jax import distributed
from nnx_jax.data import ArrayDataset
from nnx_jax.data.pipeline import Feed
from nnx_jax.engines.nnx_forward import PureModule
from nnx_jax.fit import prepare
from nnx_jax.loop.builtin import EarlyStopping
from nnx_jax.loop.callbacks import Callback
from nnx_jax.loop.progress import QuietProgress
from nnx_jax.model import NNModel
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.net import NNParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.run import RunSpec
from nnx_jax.params.train import CheckpointParams, MonitorSpec, NNTrainParams

SGD = NNOptimParams(kind="sgd", max_lr=1.0, momentum=0.0)


def options() -> dict[str, Any]:
    together = {} if jax.process_count() == 1 else {"distributed": distributed.DDP()}
    return {"progress": QuietProgress(), **together}


class OneFeature(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(1, momentum=0.9, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(x)


def statistics(runs: Path, **call: Any) -> dict[str, list[float]]:
    """One update on the values 0, 2, 4, 6."""
    x = np.array([[0.0], [2.0], [4.0], [6.0]], np.float32)
    data = NNDataParams(train=ArrayDataset(x=x, y=x), batch_size=4, shuffle=False)
    model = NNModel(module=OneFeature(nnx.Rngs(0)), loss=lambda outputs, y: (outputs - y)[:, 0] ** 2)
    model.train(NNTrainParams(n_epochs=1, optim=SGD), data=data, runs_dir=runs, **{**options(), **call})
    return {name: np.asarray(value).tolist() for name, value in PureModule(model.net).model_state.items()}


class Rows(nnx.Module):
    """A parameter for each row, seen through dropout: its gradient is the row's mask."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.w = nnx.Param(jnp.zeros((8, 4)))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.w[...][x[:, 0].astype(jnp.int32)])


def masks(runs: Path, **call: Any) -> list[list[bool]]:
    """What dropout kept of eight rows in one update."""
    x = np.arange(8, dtype=np.float32)[:, None]
    data = NNDataParams(train=ArrayDataset(x=x, y=np.ones((8, 4), np.float32)), batch_size=8, shuffle=False)
    model = NNModel(module=Rows(nnx.Rngs(0)), loss=lambda outputs, y: ((outputs - y) ** 2).sum(-1))
    model.train(NNTrainParams(n_epochs=1, optim=SGD), data=data, runs_dir=runs, **{**options(), **call})
    return (np.asarray(PureModule(model.net).params["w"]) != 0).tolist()


def counts() -> list[int]:
    """Rows that a validation scored: of 8 in batches of 2, of 512 in batches of 16."""
    found = []
    for rows, batch in ((8, 2), (512, 16)):
        split = ArrayDataset(x=np.ones((rows, 3), np.float32), y=(np.arange(rows) % 2).astype(np.int32))
        net = NNParams(kind="feed_forward", input_dim=3, output_dim=2, hidden_dims=[2])
        mesh = {} if jax.process_count() == 1 else {"data": -1}
        model = NNModel(params=NNModelParams(net=net))
        spec = RunSpec(
            model=model.params,
            data=NNDataParams(train=split, val=split, batch_size=batch),
            train=NNTrainParams(n_epochs=1),
            mesh=mesh,
        )
        world = distributed.current_world() if mesh else None
        engine = prepare(model, spec, **({} if world is None else {"world": world})).engine
        scored = engine.evaluate(engine.start(), "val")
        found.append(0 if scored is None else scored.count)
    return found


def dropped() -> float:
    """Rows that nine rows in batches of five give when the tail is dropped."""
    split = ArrayDataset(x=np.ones((9, 3), np.float32), y=np.zeros(9, np.int32))
    return sum(float(batch["mask"].sum()) for batch in Feed(split, batch_size=5, tail="drop").batches(0))


class Counter(nnx.Module):
    """One weight, which every update raises by 1."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(self.w[...], x.shape[:1])


def told_losses(outputs: jax.Array, y: jax.Array) -> jax.Array:
    """A row's loss after update n is y[n - 1]; where y[3] is 1 its gradient moves the weight by 1."""
    at = jnp.clip(jax.lax.stop_gradient(outputs).astype(jnp.int32) - 1, 0, 2)
    return jnp.take_along_axis(y, at[:, None], axis=1)[:, 0] - y[:, 3] * (outputs - jax.lax.stop_gradient(outputs))


def patience(runs: Path, **call: Any) -> dict[str, Any]:
    """Validation losses 1, .9, .8 of one row and 1, 1.1, 1.15 of another, patience 2."""
    train = ArrayDataset(x=np.zeros((2, 1), np.float32), y=np.array([[0, 0, 0, 1]] * 2, np.float32))
    val = ArrayDataset(x=np.zeros((2, 1), np.float32), y=np.array([[1, 0.9, 0.8, 0], [1, 1.1, 1.15, 0]], np.float32))
    stopping = EarlyStopping(patience=2)
    params = NNTrainParams(n_epochs=3, optim=SGD, monitor=MonitorSpec(metric="loss", split="val"))
    data = NNDataParams(train=train, val=val, batch_size=2, shuffle=False)
    model = NNModel(module=Counter(), loss=told_losses)
    run = model.train(params, [stopping], data=data, runs_dir=runs, **{**options(), **call})
    best = None if run.best is None else run.best.epoch
    return {"losses": [row["val_loss"] for row in run.epochs], "stopped": stopping.stopped_epoch, "best": best}


class Slope(nnx.Module):
    """y = w x, from w = 0."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.w[...] * x[:, 0]


def line(runs: Path, **call: Any) -> list[float]:
    """Loss and weight of one update of rate 1 on the rows 0, 8 | 1, 9 of y = 2 x + 1."""
    x = np.array([0, 8, 1, 9, *range(2, 8), *range(10, 16)], np.float32)[:, None]
    data = NNDataParams(train=ArrayDataset(x=x, y=2 * x[:, 0] + 1), batch_size=4, shuffle=False)
    model = NNModel(module=Slope(), loss=lambda outputs, y: (outputs - y) ** 2)
    run = model.train(NNTrainParams(max_steps=1, optim=SGD), data=data, runs_dir=runs, **{**options(), **call})
    return [run.records[0]["train_loss"], float(np.asarray(PureModule(model.net).params["w"]))]


class Broken(Callback):
    """Ends a run at its third update, in the middle of the first epoch."""

    distributed = "all"

    def on_optimizer_update(self, ctx: Any, event: Any) -> None:
        if event.update_idx == 3:
            raise InterruptedError("enough")


def signs(runs: Path, *callbacks: Callback, **call: Any) -> dict[str, Any]:
    """Two epochs of four updates on rows of 1 and -1 with whole targets, in an order that the seed draws.

    The weight has one binary place more after every update, eight at the end, and no sum of squares needs more than
    the 24 of float32: every sum is exact, whatever its order.
    """
    x = np.array([1, -1, -1, 1, 1, 1, -1, 1] * 2, np.float32)[:, None]
    y = np.array([3, 1, -2, 0, 5, -1, 2, 4, 1, 1, -3, 2, 0, 6, -5, 7], np.float32)
    data = NNDataParams(train=ArrayDataset(x=x, y=y), batch_size=4)
    params = NNTrainParams(n_epochs=2, optim=NNOptimParams(kind="sgd", max_lr=0.25, momentum=0.0))
    model = NNModel(module=Slope(), loss=lambda outputs, y: (outputs - y) ** 2)
    every = CheckpointParams(every_n_steps=1)
    call = {**options(), "data": data, "checkpoint": every, "runs_dir": runs, "elastic": True, **call}
    try:
        run = model.train(params, list(callbacks), **call)
    except InterruptedError:
        return {}
    return {"w": float(np.asarray(PureModule(model.net).params["w"])), "records": run.records}


def all_cases(folder: str) -> dict[str, Any]:
    """Every case, in this process of the group."""
    root = Path(folder)
    return {
        "statistics": statistics(root / "statistics"),
        "masks": masks(root / "masks"),
        "counts": counts(),
        "patience": patience(root / "patience"),
        "line": line(root / "line"),
        "begun": signs(root / "begun by two", Broken()),
        "continued": signs(root / "begun by one"),
    }
