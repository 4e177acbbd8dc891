"""Denoising diffusion: the model learns which noise was added to a row, and new rows are made by taking it away."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax.core.errors import ConfigError, ModelError, nearest
from nnx_jax.core.precision import widened
from nnx_jax.objectives.frozen import Frozen
from nnx_jax.objectives.objective import Objective, ObjectiveContext, ObjectiveResult
from nnx_jax.objectives.paradigms.rows import column, floats, positive, row_keys

_SCHEDULES = ("linear", "cosine")


def noise_schedule(n_steps: int = 1000, schedule: str = "linear") -> np.ndarray:
    """Return beta_1 ... beta_T, the variance of the noise that each step adds: float64 [n_steps], at most 0.999.

    Args:
        n_steps: T.
        schedule: "linear" rises from 1e-4 to 0.02 as in Ho et al. 2020, times 1000 / T, so that as much noise is added
            in all by any number of steps; "cosine" is that of Nichol and Dhariwal 2021 (arXiv:2102.09672).

    Raises:
        ConfigError: (a ValueError) no such schedule, or a number of steps below 1.
    """
    if isinstance(n_steps, bool) or not isinstance(n_steps, int) or n_steps < 1:
        raise ConfigError(f"diffusion: n_steps is {n_steps!r}; give a whole number of 1 or more")
    if schedule == "linear":
        return np.minimum(np.linspace(1e-4, 0.02, n_steps) * 1000.0 / n_steps, 0.999)
    if schedule != "cosine":
        raise ConfigError(f"diffusion: there is no schedule {schedule!r}{nearest(schedule, _SCHEDULES)}")
    kept = np.cos((np.arange(n_steps + 1) / n_steps + 0.008) / 1.008 * np.pi / 2) ** 2
    return np.minimum(1.0 - kept[1:] / kept[:-1], 0.999)


def ddpm_objective(n_steps: int = 1000, schedule: str = "linear", *, nonfinite: str = "fail") -> Objective:
    """Denoising diffusion with noise prediction (Ho et al. 2020, arXiv:2006.11239), their L_simple.

    For every row a step t and noise e ~ N(0, 1) are drawn, and the loss is the mean over real rows (each with its
    "weight", where the batch has that column) of `mean((e - model(x_t, t))^2)` with
    `x_t = sqrt(a_t) x + sqrt(1 - a_t) e`, a_t the product of 1 - beta up to t. Every row stands for itself: padded rows
    are left out, and a window of two microbatches is one of twice the rows, but for the noise it draws. Validation
    scores the same loss, with the same noise for every batch and at every time.

    The model is called as `model(x_t, t)`: x_t like `batch["x"]`, t int32 [B] from 0 to n_steps - 1; it returns the
    noise in the shape of x_t. Bring x to a scale near 1 before. `ddpm_sample` with the same settings makes new rows.

    Args:
        n_steps, schedule: see `noise_schedule`.

    Raises:
        ConfigError: (a ValueError) as `noise_schedule`.
    """
    return _Diffusion(n_steps, schedule, nonfinite)


class _Diffusion(Objective):
    def __init__(self, n_steps: int, schedule: str, nonfinite: str) -> None:
        super().__init__(nonfinite=nonfinite)
        kept = np.cumprod(1.0 - noise_schedule(n_steps, schedule))
        self.n_steps = n_steps
        self._tables = np.sqrt(kept), np.sqrt(1.0 - kept)
        self.signal, self.noise = (table.astype(np.float32) for table in self._tables)  # what run ids know of them

    def __call__(self, ctx: ObjectiveContext) -> ObjectiveResult:
        given = column(ctx.batch, "x", "ddpm_objective")
        x = floats(given, "ddpm_objective")
        for_step, for_noise = (row_keys(key, x.shape[0]) for key in jax.random.split(ctx.rng))
        t = jax.vmap(lambda key: jax.random.randint(key, (), 0, self.n_steps, jnp.int32))(for_step)
        noise = jax.vmap(lambda key: jax.random.normal(key, x.shape[1:], x.dtype))(for_noise)
        signal, spread = (jnp.asarray(table, x.dtype)[t].reshape(-1, *(1,) * (x.ndim - 1)) for table in self._tables)
        noisy = signal * x + spread * noise
        predicted = widened(jnp.asarray(ctx.model(noisy.astype(given.dtype), t)))
        _check_shape(predicted, noisy)
        error = jnp.mean(jnp.square(noise - predicted).reshape(x.shape[0], -1), axis=-1)
        return ObjectiveResult(ctx.mean("noise_mse", error))


def ddpm_sample(
    model: Any,
    shape: tuple[int, ...],
    key: Any,
    *,
    n_steps: int = 1000,
    schedule: str = "linear",
    clip: float | None = None,
) -> jax.Array:
    """Return new rows, float32 of `shape` = (rows, ...), by ancestral sampling (Ho et al. 2020, algorithm 2).

    From x_T ~ N(0, 1) down to t = 1: the row that the predicted noise implies, `x_0 = (x_t - sqrt(1 - a_t) e) /
    sqrt(a_t)`, then x_{t-1} drawn from q(x_{t-1} | x_t, x_0), whose variance is their beta~_t; the last step adds none.

    Args:
        model: an NNModel, a module or a function, called as `model(x_t, t)`; in evaluation mode.
        key: a JAX random key, or a whole number as its seed.
        n_steps, schedule: those of the objective it was trained with.
        clip: x_0 is kept within -clip and clip at every step, as images want it; None for no bounds.

    Raises:
        ConfigError: (a ValueError) as `noise_schedule`, or a clip that is not above 0.
        ModelError: (a ValueError) the model does not return the shape it was given.
    """
    betas = noise_schedule(n_steps, schedule)
    bound = None if clip is None else positive(clip, "clip", "ddpm_sample")
    start = jax.random.key(key) if isinstance(key, int | np.integer) else key
    kind, state = Frozen(model, "the model of ddpm_sample").parts()
    return _sampled(kind, tuple(shape), bound, state, start, backwards(betas))


class _Step(NamedTuple):
    """Numbers of one step back; float32 [T] each, and t int32."""

    t: Any
    signal: Any
    noise: Any
    of_start: Any
    of_now: Any
    spread: Any


def backwards(betas: np.ndarray) -> _Step:
    """The steps from T to 1, in float64 before they are narrowed: q(x_{t-1} | x_t, x_0) of Ho et al., equation 7."""
    kept = np.cumprod(1.0 - betas)
    before = np.concatenate([[1.0], kept[:-1]])
    lost = 1.0 - kept
    rows = (
        np.sqrt(kept),
        np.sqrt(lost),
        np.sqrt(before) * betas / lost,
        np.sqrt(1.0 - betas) * (1.0 - before) / lost,
        np.sqrt((1.0 - before) / lost * betas),
    )
    return _Step(np.arange(len(betas), dtype=np.int32)[::-1], *(row.astype(np.float32)[::-1] for row in rows))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _sampled(kind: Any, shape: tuple[int, ...], bound: float | None, state: Any, key: Any, steps: _Step) -> jax.Array:
    def back(x: jax.Array, step: _Step) -> tuple[jax.Array, None]:
        t = jnp.full(shape[:1], step.t, jnp.int32)
        predicted = jnp.asarray(Frozen.ask(kind, state, x, t), jnp.float32)
        _check_shape(predicted, x)
        start = (x - step.noise * predicted) / step.signal
        start = start if bound is None else jnp.clip(start, -bound, bound)
        drawn = jax.random.normal(jax.random.fold_in(key, step.t), shape, jnp.float32)
        return step.of_start * start + step.of_now * x + step.spread * drawn, None

    first = jax.random.normal(jax.random.fold_in(key, len(steps.t)), shape, jnp.float32)
    return jax.lax.scan(back, first, steps)[0]


def _check_shape(predicted: jax.Array, x: jax.Array) -> None:
    if predicted.shape != x.shape:
        raise ModelError(
            f"model(x_t, t) returned shape {list(predicted.shape)} for x_t {list(x.shape)}; it predicts the noise, "
            "which has the shape of x_t"
        )
