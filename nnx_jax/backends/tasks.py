"""A TrainTask under the loop: its `loss_fn` as an objective, its `eval_fn` as the validation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax.core.errors import ConfigError
from nnx_jax.fit.identity import describe_function
from nnx_jax.objectives.objective import Objective, ObjectiveContext, ObjectiveResult
from nnx_jax.objectives.terms import LossTerm

Split = Callable[[Any], tuple[Any, Callable[[Any], Any]]]
"""A model -> (its arrays as a pytree, a function that puts arrays of this structure into such a model)."""

_EVALUATION = 0x0E7A1
"""Keeps the keys of validations apart from those of the training."""


def task_objective(task: Any) -> Objective:
    """The `loss_fn` of a task, called with (model, (x, y) or the batch's columns, key), as an objective.

    A scalar is the mean over the rows of its batch, so windows and devices weigh it by rows. Metrics are recorded as
    means over microbatches. Where it returns LossTerm objects, their sums are added as they are. Its class, the text of
    it and its attributes tell the run from others; attributes that begin with `_` are its own affair.
    """

    class TaskObjective(Objective):
        def __call__(self, ctx: ObjectiveContext) -> ObjectiveResult:
            loss, metrics = split_result(task.loss_fn(ctx.model, as_pair(ctx.batch), ctx.rng))
            if isinstance(loss, LossTerm | tuple | list):
                return ObjectiveResult(loss, metrics)
            rows = jnp.sum(ctx.mask)
            return ObjectiveResult(LossTerm("loss", one_number(loss, task) * rows, rows), metrics)

        def identity(self) -> Any:
            return describe_function(task)

    TaskObjective.__name__ = type(task).__name__
    return TaskObjective()


def task_evaluation(task: Any, seed: int, split: Split) -> Callable[[Any], Mapping[str, Any]]:
    """The validation of a task: `eval_fn`, or the loss and metrics of `loss_fn`; a mean over samples.

    It is compiled, runs in evaluation mode, and draws its keys from `seed` and the batch's place alone.

    Args:
        split: takes a model apart.
    """
    function = getattr(task, "eval_fn", None)

    def measured(model: Any, batch: Any, key: jax.Array) -> dict[str, Any]:
        if function is not None:
            return {name: jnp.mean(value) for name, value in function(model, batch, key).items()}
        loss, metrics = split_result(task.loss_fn(model, batch, key))
        return {"loss": one_number(loss, task), **metrics}

    compiled: dict[str, Any] = {}

    def evaluate(ctx: Any) -> dict[str, float]:
        weights, merge = split(ctx.model)
        if "step" not in compiled:
            compiled["step"] = jax.jit(lambda leaves, batch, key: measured(merge(leaves), batch, key))
        key = jax.random.fold_in(jax.random.key(seed), _EVALUATION)
        totals: dict[str, float] = {}
        rows = 0
        for place, batch in enumerate(ctx.val_loader):
            real = np.asarray(batch["mask"]) > 0
            part = {name: np.asarray(column)[real] for name, column in batch.items()}
            found = compiled["step"](weights, as_pair(part), jax.random.fold_in(key, place))
            rows += int(real.sum())
            for name, value in found.items():
                totals[name] = totals.get(name, 0.0) + float(value) * int(real.sum())
        return {name: value / rows for name, value in totals.items()}

    return evaluate


def as_pair(batch: Mapping[str, Any]) -> Any:
    """(x, y) of a batch that has these columns and no other; else its columns by name."""
    names = {name for name in batch if name != "mask"}
    return (batch["x"], batch["y"]) if names == {"x", "y"} else {name: batch[name] for name in sorted(names)}


def split_result(result: Any) -> tuple[Any, dict[str, Any]]:
    """(loss, metrics) of what a `loss_fn` returned: the loss alone, or with a mapping of metrics."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        return result[0], {name: jnp.mean(value) for name, value in result[1].items() if name != "loss"}
    return result, {}


def one_number(loss: Any, task: Any) -> jax.Array:
    """A loss as a scalar.

    Raises:
        ConfigError: (a ValueError) it has axes.
    """
    loss = jnp.asarray(loss)
    if loss.shape != ():
        told = f"{type(task).__name__}.loss_fn returned a loss of shape {list(loss.shape)}; return one number"
        raise ConfigError(told, path="task")
    return loss
