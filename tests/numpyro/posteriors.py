"""Models whose posterior is known in closed form, and their data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpyro
import numpyro.distributions as dist

from nnx_jax.backends import load_backend
from nnx_jax.backends.base import Trained
from nnx_jax.data.arrays import ArrayDataset
from nnx_jax.training_loop import TrainingLoop

ROWS, NOISE = 64, 0.05
X = np.linspace(-1.0, 1.0, ROWS, dtype=np.float32)
TRUE = 2.0 * X + 1.0
Y = (TRUE + NOISE * np.random.default_rng(0).normal(size=ROWS)).astype(np.float32)
DATA = ArrayDataset(X, Y)


def line(x: Any, y: Any = None) -> None:
    """y = w x + b with unknown noise; rows that are a part of all are scaled to all."""
    w = numpyro.sample("w", dist.Normal(0.0, 10.0))
    b = numpyro.sample("b", dist.Normal(0.0, 10.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("rows", ROWS, subsample_size=x.shape[0]):
        numpyro.sample("obs", dist.Normal(w * x + b, sigma), obs=y)


def unscaled(x: Any, y: Any = None) -> None:
    """The same with a plate of whatever rows it is given."""
    w = numpyro.sample("w", dist.Normal(0.0, 10.0))
    b = numpyro.sample("b", dist.Normal(0.0, 10.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("obs", dist.Normal(w * x + b, sigma), obs=y)


def known_line(x: Any, y: Any = None) -> None:
    """y = w x + b with known noise: the posterior of (w, b) is a normal distribution."""
    w = numpyro.sample("w", dist.Normal(0.0, 10.0))
    b = numpyro.sample("b", dist.Normal(0.0, 10.0))
    with numpyro.plate("rows", ROWS, subsample_size=x.shape[0]):
        numpyro.sample("obs", dist.Normal(w * x + b, NOISE), obs=y)


@dataclass(frozen=True)
class Exact:
    """Mean [2] and covariance [2, 2] of (w, b)."""

    mean: np.ndarray
    cov: np.ndarray

    @property
    def sd(self) -> np.ndarray:
        return np.sqrt(np.diag(self.cov))


def exact_line(x: np.ndarray, y: np.ndarray) -> Exact:
    """The posterior of `known_line`: precision X'X / noise^2 + I / 10^2, mean cov X'y / noise^2; in float64."""
    design = np.stack([x, np.ones_like(x)], axis=1).astype(np.float64)
    cov = np.linalg.inv(design.T @ design / NOISE**2 + np.eye(2) / 100.0)
    return Exact(cov @ design.T @ y.astype(np.float64) / NOISE**2, cov)


def loop_of(task: Any, backend: str = "numpyro-svi", max_steps: int = 10, **fields: Any) -> TrainingLoop:
    given = {"dataset": DATA, "task": task, "backend": backend, "max_steps": max_steps, "quiet": True}
    if backend == "numpyro-svi":
        given["optimizer_config"] = {"name": "adam", "lr": 1e-2}
    return TrainingLoop(**{**given, **fields})


def fit(loop: TrainingLoop, state: Any = None) -> Trained:
    return load_backend(loop.backend).run(loop, state)
