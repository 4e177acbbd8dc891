"""A linear model on small whole numbers: products and sums of a few updates are exact, whatever adds them up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_jax.data import ArrayDataset
from nnx_jax.loop.progress import QuietProgress
from nnx_jax.model import NNModel
from nnx_jax.objectives import LossTerm
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.scheduler import NNSchedulerParams
from nnx_jax.params.train import CheckpointParams, NNTrainParams
from nnx_jax.runs.layout import RunPaths
from nnx_jax.runs.resume import read_point
from nnx_jax.runs.run import NNRun

BATCH, WIDTH, RATE, ROWS = 8, 3, 0.5, 36
VALID = np.array([1] * 8 + [0] * 4 + [1] * 4 + [1, 1] + [0] * 6 + [0] * 6 + [1, 1] + [1] * 4, np.float32)
"""Weights of the rows: 8, 4, 2, 2 and 4 count in the five batches, so every divisor is a power of two; of four devices
two or three see nothing but masked rows, and in the last batch half of the rows fill it up."""


class Linear(nnx.Module):
    """x w."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros(WIDTH))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w[...]


def halves(outputs: Any, batch: Any) -> tuple[LossTerm, ...]:
    """Half squared error over rows whose own weight is not 0, whatever stands in the others."""
    valid = batch["mask"] * batch["weight"]
    error = 0.5 * (outputs - batch["y"]) ** 2
    return (LossTerm("half", jnp.sum(jnp.where(valid > 0, error, 0.0)), jnp.sum(valid)),)


def columns() -> dict[str, np.ndarray]:
    """Rows of -1, 0 and 1; those of weight 0 hold what would be seen."""
    draw = np.random.default_rng(3)
    x = draw.integers(-1, 2, (ROWS, WIDTH)).astype(np.float32)
    y = draw.integers(-2, 3, ROWS).astype(np.float32)
    x[VALID == 0] = 1e6
    return {"x": x, "y": y, "weight": VALID}


def by_hand(window: int, epochs: int = 1) -> np.ndarray:
    """The weights after `epochs`, in float64 on the union of each window's rows."""
    table, w = columns(), np.zeros(WIDTH)
    cuts = [np.arange(at, min(at + BATCH * window, ROWS)) for at in range(0, ROWS, BATCH * window)]
    for rows in cuts * epochs:
        rows = rows[table["weight"][rows] > 0]
        x, y = table["x"][rows].astype(np.float64), table["y"][rows]
        w = w - RATE * x.T @ (x @ w - y) / len(rows)
    return w


def fit(
    runs: Path,
    *,
    window: int = 1,
    loader: bool = False,
    hooks: Sequence[Any] = (),
    callbacks: Sequence[Any] = (),
    module: Any = None,
    loss: Any = halves,
    data: dict[str, Any] | None = None,
    mesh: dict[str, int] | None = None,
    sharding: dict[str, Any] | None = None,
    elastic: bool = False,
    distributed: Any = None,
    optim: dict[str, Any] | None = None,
    progress: Any = None,
    **train: Any,
) -> NNRun:
    """One epoch of the toy, plain SGD, rows in order; validated on its first 13 rows."""
    table = columns()
    settings = {"kind": "sgd", "max_lr": RATE, "momentum": 0.0, "accumulate_grad_batches": window, **(optim or {})}
    given: Any = None
    if loader:
        train["train_loader"] = [{n: c[at : at + BATCH] for n, c in table.items()} for at in range(0, ROWS, BATCH)]
    else:
        val = ArrayDataset({name: column[:13] for name, column in table.items()})
        cut = {"train": ArrayDataset(table), "val": val, "batch_size": BATCH, "shuffle": False, **(data or {})}
        given = NNDataParams(**cut)
    if "max_steps" not in train:
        train.setdefault("n_epochs", 1)
    schedule = NNSchedulerParams(kind="constant", clock="optimizer_update")
    return NNModel(module=module or Linear(), loss=loss).train(
        NNTrainParams(optim=NNOptimParams(**settings), scheduler=schedule, **train),
        callbacks,
        hooks=hooks,
        data=given,
        mesh=mesh,
        sharding=sharding,
        elastic=elastic,
        distributed=distributed,
        checkpoint=CheckpointParams(),
        runs_dir=runs,
        progress=progress or QuietProgress(),
    )


def arrays(run: NNRun, name: str = "LAST") -> dict[str, np.ndarray]:
    """Every stored array of a checkpoint."""
    return read_point(RunPaths(run.root, run.id), name).load_all()


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    """Equal names, shapes, types and bits."""
    return left.keys() == right.keys() and all(
        left[n].dtype == right[n].dtype and left[n].tobytes() == right[n].tobytes() for n in left
    )


def history(run: NNRun) -> list[dict[str, Any]]:
    """What the run recorded, without times."""
    return [{k: v for k, v in row.items() if k not in ("seconds", "time", "wall_time")} for row in run.records]
