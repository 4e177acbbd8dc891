"""What is checked of a TrainingLoop's parts when it is made, and of its rows before anything is compiled."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from typing import Any

from nnx_jax.core.errors import ConfigError
from nnx_jax.core.operator import Operator
from nnx_jax.data.dataset import TrainingDataset

TASK_FIRST = ("numpyro-svi", "numpyro-mcmc", "blackjax")
"""Backends that infer a posterior: they take a task, and no operator to begin with."""
GRADIENT = ("nnx", "equinox", "lightning", "keras")
"""Backends that train the operator they are given."""
TRAINS = {"nnx": ("nnx_jax.engines.operators", "NNXModelOp"), "equinox": ("nnx_jax.engines.equinox", "EquinoxModelOp")}
"""The operators that built-in backends train, by backend: module and class."""


def check_types(fields: Mapping[str, Any]) -> None:
    """Check what the parts of a loop are.

    Raises:
        TypeError: naming the field.
    """
    for name in ("model_op", "dataset", "val_dataset"):
        value = fields.get(name)
        if value is None and name != "dataset":
            continue
        wanted = Operator if name == "model_op" else TrainingDataset
        if not isinstance(value, wanted | Mapping | str):
            kind = "an Operator, such as NNXModelOp(module)" if name == "model_op" else "a TrainingDataset"
            raise TypeError(f"TrainingLoop.{name} is {type(value).__name__}; give {kind}")
    for hook in fields.get("hooks") or ():
        if not isinstance(hook, str | Mapping) and (isinstance(hook, type) or not callable(hook)):
            told = f"TrainingLoop.hooks has {getattr(hook, '__name__', type(hook).__name__)}"
            raise TypeError(f"{told}; a hook is an object that is called as hook(ctx, stage)")
    writer = fields.get("metric_writer")
    lacks = [name for name in ("write", "close") if not callable(getattr(writer, name, None))]
    if not (writer is None or isinstance(writer, str | Mapping)) and lacks:
        raise TypeError(f"TrainingLoop.metric_writer is {type(writer).__name__}; a MetricWriter has write and close")
    sharding = fields.get("sharding")
    if sharding is not None and not isinstance(sharding, Mapping) and parts_of(sharding) is None:
        raise TypeError(f"TrainingLoop.sharding is {type(sharding).__name__}; give a ShardingSpec, or devices by axis")
    task, backend = fields.get("task"), fields.get("backend", "nnx")
    if not (task is None or isinstance(task, str | Mapping)) and backend in GRADIENT:
        check_task(task)


def check_task(task: Any) -> None:
    """Check that a task has a `loss_fn`.

    Raises:
        TypeError: it is no TrainTask.
    """
    if not callable(getattr(task, "loss_fn", None)):
        told = f"TrainingLoop.task is {type(task).__name__}; a TrainTask has loss_fn(model, batch, key)"
        raise TypeError(f"{told} -> a scalar, or (scalar, metrics)")
    evaluate = getattr(task, "eval_fn", None)
    if evaluate is not None and not callable(evaluate):
        told = f"TrainingLoop.task: {type(task).__name__}.eval_fn is {type(evaluate).__name__}"
        raise TypeError(f"{told}; it is a function (model, batch, key) -> metrics, or None")


def check_metrics(metrics: Any) -> None:
    """Check that metrics are such.

    Raises:
        ConfigError: (a ValueError) an unknown one.
    """
    from nnx_jax.params.model import NNModelParams

    try:
        NNModelParams(metrics=metrics)
    except ConfigError as error:
        raise ConfigError(str(error.args[0]).replace("NNModelParams.metrics", "metrics"), path="metrics") from None


def check_operator(backend: str, operator: Any) -> None:
    """Check that a built-in backend can train an operator: one of its class, or any with a `module` of its library.

    Raises:
        TypeError: naming the class it trains.
    """
    module, name = TRAINS.get(backend, ("", ""))
    if operator is None or not module:
        return
    if isinstance(operator, getattr(importlib.import_module(module), name)):
        return
    others = {other for _, other in TRAINS.values()}
    of_another = any(each.__name__ in others for each in type(operator).__mro__)
    if of_another or getattr(operator, "module", None) is None:
        told = f"TrainingLoop.model_op is {type(operator).__name__}; the backend '{backend}' trains an {name}"
        raise TypeError(f"{told}: {name}(module)")


def check_loss(loss: Any) -> None:
    """Check that a loss is one.

    Raises:
        ConfigError: (a ValueError) it is none.
    """
    from nnx_jax.objectives.operators import as_loss

    try:
        as_loss(loss)
    except ConfigError as error:
        raise ConfigError(str(error.args[0]), path="loss") from None


def parts_of(sharding: Any) -> int | None:
    """Parts that a batch is cut into by a ShardingSpec or a mesh; None for neither, or when it is not known."""
    if isinstance(sharding, Mapping):
        sizes = [size for axis, size in sharding.items() if axis in ("data", "fsdp")]
        found = 1
        for size in sizes:
            found *= size
        return found if all(size > 0 for size in sizes) else None
    parts = getattr(sharding, "parts", None)
    return parts if isinstance(parts, int) and hasattr(sharding, "mesh") else None


def evaluation_rows(dataset: Any) -> Any:
    """Return a `val_dataset`, or None where it has no rows.

    Warns:
        UserWarning: it has none.
    """
    if dataset is None or not dataset.indexable or len(dataset):
        return dataset
    warnings.warn(f"val_dataset, a {type(dataset).__name__}, has no rows: nothing is evaluated", stacklevel=2)
    return None
