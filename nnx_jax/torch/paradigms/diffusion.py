"""Denoising diffusion over torch modules: the added noise is learned, and taken away to make new rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nnx_jax.core.errors import DataError, ModelError
from nnx_jax.objectives.objective import Objective, ObjectiveResult
from nnx_jax.objectives.paradigms.diffusion import backwards, noise_schedule
from nnx_jax.objectives.paradigms.rows import column, positive
from nnx_jax.torch.objectives import Frozen
from nnx_jax.torch.targets import as_tensor, widened

__all__ = ["ddpm_objective", "ddpm_sample", "noise_schedule"]


def ddpm_objective(n_steps: int = 1000, schedule: str = "linear", *, nonfinite: str = "fail") -> Objective:
    """Denoising diffusion with noise prediction (Ho et al. 2020, arXiv:2006.11239), their L_simple.

    The loss is that of `objectives.paradigms.diffusion.ddpm_objective`; the draws are torch's. The model is called as
    `model(x_t, t)`: x_t like `batch["x"]`, t int64 [B] from 0 to n_steps - 1; it returns the noise in the shape of x_t.

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
        self.n_steps, self.signal, self.noise = n_steps, np.sqrt(kept), np.sqrt(1.0 - kept)
        self._tables: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def __call__(self, ctx: Any) -> ObjectiveResult:
        given: Any = column(ctx.batch, "x", "ddpm_objective")
        if not given.is_floating_point():
            kind = str(given.dtype).removeprefix("torch.")
            told = f"computes with real numbers, but column 'x' is {kind}; scale it to floats first"
            raise DataError(f"ddpm_objective {told}")
        x = widened(given)
        t = torch.randint(0, self.n_steps, (len(x),), generator=ctx.rng, device=x.device)
        noise = torch.randn(x.shape, generator=ctx.rng, device=x.device, dtype=x.dtype)
        signal, spread = self._table(x)[:, t].reshape(2, -1, *(1,) * (x.ndim - 1))
        noisy = signal * x + spread * noise
        predicted = widened(as_tensor(ctx.model(noisy.to(given.dtype), t), "the model's outputs"))
        _check_shape(predicted, noisy)
        return ObjectiveResult(ctx.mean("noise_mse", (noise - predicted).square().reshape(len(x), -1).mean(-1)))

    def _table(self, like: Tensor) -> Tensor:
        """[2, n_steps]: what is kept of a row, and of its noise; copied to a device once."""
        key = like.dtype, like.device
        if key not in self._tables:
            self._tables[key] = torch.tensor(np.stack([self.signal, self.noise]), dtype=key[0], device=key[1])
        return self._tables[key]


@torch.no_grad()
def ddpm_sample(
    model: Any,
    shape: tuple[int, ...],
    key: torch.Generator | int,
    *,
    n_steps: int = 1000,
    schedule: str = "linear",
    clip: float | None = None,
) -> Tensor:
    """Return new rows, float32 of `shape` = (rows, ...), by ancestral sampling (Ho et al. 2020, algorithm 2).

    The steps are those of `objectives.paradigms.diffusion.ddpm_sample`.

    Args:
        model: an NNModel, a module or a function, called as `model(x_t, t)`; in evaluation mode.
        key: a generator, on whose device the rows are made, or a whole number as the seed of one on the CPU.
        n_steps, schedule: those of the objective it was trained with.
        clip: x_0 is kept within -clip and clip at every step, as images want it; None for no bounds.

    Raises:
        ConfigError: (a ValueError) as `noise_schedule`, or a clip that is not above 0.
        ModelError: (a ValueError) the model does not return the shape it was given.
    """
    steps = backwards(noise_schedule(n_steps, schedule))
    bound = None if clip is None else positive(clip, "clip", "ddpm_sample")
    rng = key if isinstance(key, torch.Generator) else torch.Generator().manual_seed(int(key))
    asked = Frozen(model, "the model of ddpm_sample")
    x = torch.randn(shape, generator=rng, device=rng.device)
    numbers = zip(*(column.tolist() for column in steps), strict=True)
    for t, signal, noise, of_start, of_now, spread in numbers:
        predicted = asked(x, torch.full(shape[:1], t, device=rng.device))
        _check_shape(predicted, x)
        start = (x - noise * predicted) / signal
        start = start if bound is None else start.clamp(-bound, bound)
        x = of_start * start + of_now * x + spread * torch.randn(shape, generator=rng, device=rng.device)
    return x


def _check_shape(predicted: Tensor, x: Tensor) -> None:
    if predicted.shape != x.shape:
        raise ModelError(
            f"model(x_t, t) returned shape {list(predicted.shape)} for x_t {list(x.shape)}; it predicts the noise, "
            "which has the shape of x_t"
        )
