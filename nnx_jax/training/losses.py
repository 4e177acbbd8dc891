"""Losses of a strategy: built in, composed, or any function of predictions and batch, as one kind of thing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from nnx_jax.core.errors import ConfigError
from nnx_jax.objectives.compose import BaseLossFunction, ComposedLossFunction, KeyedLoss, name_of, to_terms
from nnx_jax.objectives.losses import Loss, build_loss
from nnx_jax.objectives.terms import LossTerm, term_value
from nnx_jax.objectives.weights import ConstantWeight, CosineWeight, LinearWeight, PiecewiseWeight, WeightSchedule
from nnx_jax.params.losses import LossParams

__all__ = [
    "BaseLossFunction",
    "ComposedLossFunction",
    "ConstantWeight",
    "CosineWeight",
    "KeyedLoss",
    "LinearWeight",
    "PiecewiseWeight",
    "StrategyLoss",
    "WeightSchedule",
    "as_loss",
]

Assembler = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class StrategyLoss:
    """A loss as the step and the validation take it: `(predictions, batch) -> terms`.

    Args:
        loss: returns LossTerm objects, or a float scalar. A scalar counts as one item of weight 1 while training, so
            that a window's gradient is the mean of its microbatches'; in a validation it counts for the batch's rows.
        assembler: `batch -> columns` that are added to the batch before the loss sees it.

    Attributes:
        masked: the loss leaves rows of mask 0 out, so short batches may be filled up.
    """

    task = "own"
    ignore_index: int | None = None

    def __init__(self, loss: Callable[..., Any], assembler: Assembler | None = None) -> None:
        self.loss, self.assembler, self.name = loss, assembler, name_of(loss)
        self.masked = _masked(loss)
        if getattr(loss, "scheduled", False):
            self.at = self._at

    def __call__(self, outputs: Any, batch: Any) -> tuple[LossTerm, ...]:
        return to_terms(self.loss(outputs, self._assembled(batch)), self.name)

    def _at(self, step: Any, epoch: Any) -> Callable[[Any, Any], tuple[LossTerm, ...]]:
        now: Any = self.loss
        terms = now.at(step, epoch)
        return lambda outputs, batch: terms(outputs, self._assembled(batch))

    def invalid_labels(self, outputs: Any, batch: Any) -> Any:
        """How many items have an illegal label, where the loss counts them."""
        count = getattr(self.loss, "invalid_labels", None)
        return jnp.int32(0) if count is None else count(outputs, self._assembled(batch))

    # -- in a validation ---------------------------------------------------------------------------------------

    def measured(self, outputs: Any, batch: Any, *, batch_mean: bool = False) -> tuple[LossTerm, ...]:
        """Terms without the weights of a composition: every item counts once, or every batch does."""
        rows = jnp.sum(batch["mask"] > 0, dtype=jnp.float32)
        batch = self._assembled(batch)
        if isinstance(self.loss, ComposedLossFunction):
            terms = self.loss.bare(outputs, batch, rows)
        else:
            terms = to_terms(self.loss(outputs, batch), self.name, rows)
        if not batch_mean:
            return terms
        return tuple(LossTerm(t.name, term_value(t), jnp.float32(1.0), weight=t.weight) for t in terms)

    def weight_of(self, term: str, step: int, epoch: int, *, raw: bool = False) -> float:
        """The composition's weight of a term at an update and epoch; 1 where there is no composition."""
        if not isinstance(self.loss, ComposedLossFunction):
            return 1.0
        weights = self.loss.raw_weights(step, epoch) if raw else self.loss.effective_weights(step, epoch)
        return float(weights[self.loss.component_of(term)])

    def _assembled(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.assembler is None:
            return batch
        added = self.assembler(batch)
        if not isinstance(added, Mapping):
            raise ConfigError(f"loss_target_assembler returned {type(added).__name__}; return a mapping of columns")
        return {**batch, **added}


def as_loss(given: Any, assembler: Assembler | None = None) -> StrategyLoss:
    """A StrategyLoss of a loss's name or parameters, a built loss, a composition, or a function.

    Raises:
        ConfigError: for anything else.
    """
    if isinstance(given, StrategyLoss):
        return given
    if isinstance(given, str | LossParams):
        given = build_loss(given)
    if not callable(given):
        raise ConfigError(
            f"loss_fn is {type(given).__name__}; give a loss's name such as 'mse', a composition, or a function of "
            "(predictions, batch)"
        )
    return StrategyLoss(given, assembler)


def _masked(loss: Any) -> bool:
    if isinstance(loss, ComposedLossFunction):
        return all(_masked(component) for component in loss.components)
    return _masked(loss.loss) if isinstance(loss, KeyedLoss) else isinstance(loss, Loss)
