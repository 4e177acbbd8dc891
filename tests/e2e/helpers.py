"""Small real runs for the end-to-end tests: a few dozen rows, a small net, everything else as a user has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from nnx_jax.data import ArrayDataset
from nnx_jax.loop.progress import QuietProgress
from nnx_jax.model import NNModel
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.net import NNParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.scheduler import NNSchedulerParams
from nnx_jax.params.train import CheckpointParams, NNTrainParams
from nnx_jax.runs.layout import RunPaths
from nnx_jax.runs.resume import read_point
from nnx_jax.runs.run import NNRun


def dataset(rows: int = 23, classes: int = 3, seed: int = 0) -> ArrayDataset:
    """Gaussian rows of 4 columns whose label is the largest of the first `classes` columns."""
    x = np.random.default_rng(seed).normal(size=(rows, 4)).astype(np.float32)
    return ArrayDataset(x=x, y=x[:, :classes].argmax(axis=1).astype(np.int32))


def data_params(**changes: Any) -> NNDataParams:
    given = {"train": dataset(), "val": dataset(9, seed=1), "batch_size": 4, "tail": "pad"}
    return NNDataParams(**{**given, **changes})


def net_params(**changes: Any) -> NNParams:
    return NNParams(**{"kind": "feed_forward", "hidden_dims": (6,), "dropout_prob": 0.25, "norm": "batch", **changes})


def train_params(**changes: Any) -> NNTrainParams:
    optim = {"kind": "adamw", "max_lr": 1e-2, "grad_clip_norm": 1.0, **changes.pop("optim", {})}
    scheduler = {"kind": "cosine", "clock": "optimizer_update", **changes.pop("scheduler", {})}
    if "max_steps" not in changes:
        changes.setdefault("n_epochs", 3)
    return NNTrainParams(optim=NNOptimParams(**optim), scheduler=NNSchedulerParams(**scheduler), **changes)


def model(**net: Any) -> NNModel:
    return NNModel(net_params(**net), NNModelParams(metrics=("accuracy",)))


def fit(
    runs: Path,
    *,
    callbacks: Any = (),
    data: NNDataParams | None = None,
    checkpoint: CheckpointParams | None = None,
    net: dict[str, Any] | None = None,
    of: NNModel | None = None,
    **train: Any,
) -> NNRun:
    """Train the small model, quietly."""
    return (of or model(**(net or {}))).train(
        train_params(**train),
        callbacks,
        data=data or data_params(),
        checkpoint=checkpoint,
        runs_dir=runs,
        progress=QuietProgress(),
    )


def stored(run: NNRun, name: str = "LAST") -> dict[str, np.ndarray]:
    """Every array of a checkpoint, by name."""
    return read_point(RunPaths(run.root, run.id), name).load_all()


def assert_same_run(left: NNRun, right: NNRun) -> None:
    """Bit for bit: every stored array, and every byte of the history."""
    one, two = stored(left), stored(right)
    assert set(one) == set(two)
    for name in one:
        assert one[name].tobytes() == two[name].tobytes(), name
    assert (left.path / "idps.csv").read_bytes() == (right.path / "idps.csv").read_bytes()
