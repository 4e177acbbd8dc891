"""Toys of the case book as whole runs: one weight, a loss with a known gradient, every number worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_jax.data import ArrayDataset
from nnx_jax.loop.callbacks import Callback, TrainContext
from nnx_jax.loop.progress import QuietProgress
from nnx_jax.model import NNModel
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.scheduler import NNSchedulerParams
from nnx_jax.params.train import CheckpointParams, NNTrainParams
from nnx_jax.runs.layout import RunPaths
from nnx_jax.runs.resume import read_point
from nnx_jax.runs.run import NNRun

SAME = NNSchedulerParams(kind="constant")
ON_UPDATES = NNSchedulerParams(kind="constant", clock="optimizer_update")


class Target(nnx.Module):
    """T1: one weight, the output for every row."""

    def __init__(self, w: float = 0.0) -> None:
        self.w = nnx.Param(jnp.float32(w))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(self.w[...], x.shape[:1])


class Slope(nnx.Module):
    """Weights beside their gradients: output x * w, and `slope` makes the batch itself the gradient (T0: minus one)."""

    def __init__(self, *w: float) -> None:
        self.w = nnx.Param(jnp.asarray(w or (0.0,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.w[...]


def half(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Half the squared distance: its gradient is output minus target."""
    return 0.5 * (outputs - targets) ** 2


def square(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """The squared distance: with target 0 and rate 0.1, `Slope(1.0)` on rows of 1 is multiplied by 0.8."""
    return jnp.sum((outputs - targets) ** 2, axis=-1)


def inputs(*values: float) -> ArrayDataset:
    """Rows of `Slope` with these inputs and target 0."""
    x = np.array(values, np.float32)[:, None]
    return ArrayDataset(x=x, y=np.zeros_like(x))


def slope(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """The gradient is x / sqrt(target): x for target 1, NaN for target -1, infinite for target 0."""
    return jnp.sum(outputs * jax.lax.rsqrt(targets), axis=-1)


def targets(*values: float, weight: Sequence[float] | None = None) -> ArrayDataset:
    """Rows of T1; `weight` 0 masks a row."""
    columns = {} if weight is None else {"weight": np.array(weight, np.float32)}
    return ArrayDataset(x=np.zeros((len(values), 1), np.float32), y=np.array(values, np.float32), **columns)


def gradients(*rows: Any, bad: Sequence[int] = (), sign: float = -1.0) -> ArrayDataset:
    """Rows of `Slope` with these gradients; rows numbered in `bad` give NaN (`sign` 0: infinity)."""
    x = np.array([np.atleast_1d(row) for row in rows], np.float32)
    y = np.ones_like(x)
    y[list(bad)] = sign
    return ArrayDataset(x=x, y=y)


def steps(count: int, **more: Any) -> ArrayDataset:
    """T0: `count` rows whose gradient is -1."""
    return gradients(*[-1.0] * count, **more)


def fit(
    runs: Path,
    module: nnx.Module,
    loss: Callable[..., Any],
    train: Any,
    *,
    val: Any = None,
    test: Any = None,
    callbacks: Sequence[Any] = (),
    hooks: Sequence[Any] = (),
    checkpoint: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    progress: Any = None,
    data: dict[str, Any] | None = None,
    optim: dict[str, Any] | None = None,
    accumulate: int = 1,
    scheduler: NNSchedulerParams = ON_UPDATES,
    **params: Any,
) -> NNRun:
    """One run of a toy: batches of 1 in order, plain SGD of rate 0.1, one epoch, unless told otherwise."""
    settings = {"kind": "sgd", "max_lr": 0.1, "momentum": 0.0, "accumulate_grad_batches": accumulate, **(optim or {})}
    if "max_steps" not in params:
        params.setdefault("n_epochs", 1)
    cut = {"train": train, "val": val, "test": test, "batch_size": 1, "shuffle": False, **(data or {})}
    return NNModel(params=NNModelParams(**(model or {})), module=module, loss=loss).train(
        NNTrainParams(optim=NNOptimParams(**settings), scheduler=scheduler, **params),
        callbacks,
        hooks=hooks,
        data=None if train is None else NNDataParams(**cut),
        checkpoint=CheckpointParams(**(checkpoint or {})),
        runs_dir=runs,
        progress=progress or QuietProgress(),
    )


class Scripted:
    """A run whose validation loss after epoch e is `values[e]`: one update of +1 an epoch, so the weight counts epochs.

    Args:
        before: the value a validation before any training would give.
        marks: the weight after each epoch, where the rate is not 1.
        broken_from: the first epoch whose gradient is NaN.
    """

    def __init__(
        self, *values: float, before: float = 0.0, marks: Sequence[float] = (), broken_from: int = 10**6
    ) -> None:
        self.values, table = values, jnp.asarray([before, *values], jnp.float32)
        reached = jnp.asarray(marks or range(1, len(values) + 1), jnp.float32) - 1e-3

        def scripted(outputs: jax.Array, targets: jax.Array) -> jax.Array:
            w = outputs[:, 0]
            weight = jax.lax.stop_gradient(w)
            down = jnp.where(weight >= broken_from, jnp.nan, -1.0) * w
            return jnp.where(targets > 0, table[jnp.sum(weight[:, None] >= reached, axis=1)], down)

        self.loss = scripted

    def fit(self, runs: Path, **more: Any) -> NNRun:
        one = np.ones((1, 1), np.float32)
        data = {"train": ArrayDataset(x=one, y=one[0] * 0), "val": ArrayDataset(x=one, y=one[0])}
        more = {"scheduler": SAME, "optim": {"max_lr": 1.0}, "n_epochs": len(self.values), **more}
        return fit(runs, Slope(), self.loss, **data, **more)


def rows(run: NNRun, kind: str) -> list[dict[str, Any]]:
    """History rows of one kind: "update", "batch", "eval", "epoch"."""
    return [row for row in run.records if row["kind"] == kind]


def column(run: NNRun, kind: str, name: str) -> list[Any]:
    """One column of the rows of one kind."""
    return [row[name] for row in rows(run, kind)]


def arrays(run: NNRun, name: str = "LAST") -> dict[str, np.ndarray]:
    """Every stored array of a checkpoint."""
    return read_point(RunPaths(run.root, run.id), name).load_all()


def weight(run: NNRun, name: str = "LAST") -> np.ndarray:
    """The toy's weight in a checkpoint, as stored."""
    return arrays(run, name)["params/w"]


def only_run(runs: Path) -> NNRun:
    """The one run below `runs`, whatever became of it."""
    (found,) = NNRun.all(runs)
    return found


class Killed(Exception):
    """Stands for a process that dies: nothing after it is committed."""


class KillAt(Callback):
    """Dies when a hook is called for the `n`-th time (from 1), as a crash there would."""

    def __init__(self, hook: str, n: int = 1) -> None:
        self.n = n
        setattr(self, hook, self._count)

    def _count(self, ctx: TrainContext) -> None:
        self.n -= 1
        if self.n == 0:
            raise Killed


class Watch(Callback):
    """Notes what `look(ctx)` returns whenever `hook` is called."""

    def __init__(self, hook: str, look: Callable[[TrainContext], Any]) -> None:
        self.seen: list[Any] = []
        setattr(self, hook, lambda ctx: self.seen.append(look(ctx)))


class Batches:
    """A loader of (x, y) batches that notes which were handed out, and may call `at(index)` before one."""

    def __init__(self, batches: Sequence[Any], at: Callable[[int], Any] = lambda index: None) -> None:
        self.batches, self.at, self.served, self.epochs = list(batches), at, [], []

    def __len__(self) -> int:
        return len(self.batches)

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self.batches):
            self.at(index)
            self.served.append(index)
            yield batch
