"""TOY: one weight, prediction w x, loss mean((w x - t)^2), SGD of rate 0.1: 0.8, 0.64, 0.512, 0.4096."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from nnx_jax.core.stages import TrainingStage
from nnx_jax.training import OptimizerConfig, TrainingStrategy

S = TrainingStage
SGD = OptimizerConfig(optax.sgd, {"learning_rate": 0.1})
ADAM = OptimizerConfig(optax.adam, {"learning_rate": 0.1})


class Toy(nnx.Module):
    """w x."""

    def __init__(self, w: float = 1.0) -> None:
        self.w = nnx.Param(jnp.float32(w))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.w[...] * x


def toy() -> Toy:
    """A model that a checkpoint can name."""
    return Toy()


def squared(predictions: Any, batch: Any) -> Any:
    """mean((w x - t)^2)."""
    return jnp.mean((predictions - batch["y"]) ** 2)


def per_item(predictions: Any, batch: Any) -> Any:
    """The same as sums: rows of mask 0 are left out."""
    from nnx_jax.objectives import LossTerm

    mask = batch["mask"]
    return LossTerm("squared", jnp.sum((predictions - batch["y"]) ** 2 * mask), jnp.sum(mask))


def batches(*xs: Any) -> list[dict[str, np.ndarray]]:
    """One batch for each x (a number, or the rows of one), targets 0."""
    rows = [np.atleast_1d(np.asarray(x, np.float32)) for x in xs]
    return [{"x": row, "y": np.zeros_like(row)} for row in rows]


def strategy(config: Any = SGD, **given: Any) -> TrainingStrategy:
    """A strategy of the toy, four updates long unless told otherwise."""
    given.setdefault("models", Toy())
    given.setdefault("loss_fn", squared)
    if "num_epochs" not in given:
        given.setdefault("num_steps", 4)
    return TrainingStrategy(optimizer_configs=config, **given)


def w(made: TrainingStrategy, model: str = "main") -> float:
    """The weight."""
    made.sync_models()
    return float(made.models[model].w[...])  # type: ignore[attr-defined]


class Watch:
    """A host hook that notes what it sees at some stages."""

    frequency = 1
    stage = None

    def __init__(self, *stages: TrainingStage, look: Any = None) -> None:
        self.stages = stages or tuple(s for s in S if s not in (S.DO_BACKWARD, S.DO_OPTIMIZER_STEP))
        self.look = look or (lambda ctx: (ctx.step_count, ctx.batch_count, ctx.epoch_step_count, ctx.epoch))
        self.seen: list[tuple[TrainingStage, Any]] = []

    def _runs_on_stage(self, stage: TrainingStage) -> bool:
        return stage in self.stages

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        self.seen.append((stage, self.look(ctx)))

    def values(self) -> list[int]:
        """Numbers of the stages seen."""
        return [stage.value for stage, _ in self.seen]

    def at(self, stage: TrainingStage) -> list[Any]:
        """What was looked at there."""
        return [found for seen, found in self.seen if seen is stage]


class Loader:
    """Batches of the toy that note what is asked of them."""

    def __init__(self, n: int) -> None:
        self.n, self.epochs, self.used = n, [], []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.n):
            self.used.append(index)
            yield batches(1)[0]
