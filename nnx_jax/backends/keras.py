"""The backend "keras": a Keras 3 model trained by Keras' own compiled training step."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from nnx_jax.backends.base import Trained
from nnx_jax.backends.carry import TrainerCarryState
from nnx_jax.backends.optimizers import read_optimizer
from nnx_jax.backends.outside import Outside, check_fields, counted, endless, scored, weighs_rows
from nnx_jax.core.errors import ConfigError
from nnx_jax.engines.keras import KerasModelOp, copied, keras_module
from nnx_jax.objectives.operators import as_loss
from nnx_jax.objectives.terms import total_value
from nnx_jax.params.optim import NNOptimParams

_OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "rmsprop": "RMSprop", "lion": "Lion"}


def run(loop: Any, state: TrainerCarryState | None) -> Trained:
    """Train the operator's Keras model; one call of Keras' compiled step is one microbatch.

    Raises:
        ImportError: Keras is missing; it names the extra.
        TypeError: `model_op` is no KerasModelOp.
        ConfigError: (a ValueError) a field that does not apply.
    """
    keras = keras_module()
    check_fields(loop)
    op = loop.model_op if state is None or state.model is None else state.model
    if not isinstance(op, KerasModelOp):
        raise TypeError(f"model_op is {type(op).__name__}; the backend 'keras' trains a KerasModelOp(model)")
    if loop.task is not None:
        raise ConfigError("Keras takes a loss of (outputs, targets); give loss=", path="TrainingLoop.task")
    keras.utils.set_random_seed(loop.seed)
    model = copied(op.module)
    optim, schedule, given = read_optimizer(loop.optimizer_config, loop.accumulate)
    if given is not None:
        told = "an optax transformation is no Keras optimizer; write {'name': 'adam', 'lr': ...}"
        raise ConfigError(told, path="TrainingLoop.optimizer_config")
    shape = loop.dataset.info.get("input_shape")
    show = lambda: op.of(model, input_shape=None if shape is None else tuple(shape))  # noqa: E731
    outside = Outside(loop, show, state)
    model.compile(optimizer=_optimizer(keras, optim, loop.accumulate), loss=_loss(keras, loop))
    error: BaseException | None = None
    try:
        outside.begin()
        losses: list[float] = []
        for batch in endless(loop):
            if outside.step >= loop.max_steps or outside.stops:
                break
            rate = optim.max_lr if schedule is None else schedule.at(outside.step)
            model.optimizer.learning_rate.assign(rate)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model.reset_metrics()
                losses.append(float(model.train_on_batch(batch["x"], batch["y"], sample_weight=batch.get("weight"))))
            if len(losses) == loop.accumulate:
                outside.updated(float(np.mean(losses)), rate)
                losses = []
                if outside.evaluates:
                    outside.validated(_evaluate(keras, loop, model))
    except BaseException as failure:
        error = failure
        raise
    finally:
        outside.end(error)
    return outside.trained(outside.steps.state.model or show(), ("keras",))


def _loss(keras: Any, loop: Any) -> Any:
    """The loss as Keras calls it, (targets, outputs, weights of the rows or None); a full batch, so a mean over rows.

    Raises:
        ConfigError: (a ValueError) the loss computes with JAX arrays, and Keras does not; or the rows have weights, and
            it is a function that knows none.
    """
    if keras.backend.backend() != "jax":
        if not callable(loop.loss):
            told = f"this loss computes with JAX arrays, Keras with {keras.backend.backend()}; set KERAS_BACKEND=jax"
            raise ConfigError(f"{told}, or give a function of its tensors", path="TrainingLoop.loss")
        if weighs_rows(loop):
            told = "a function (outputs, targets) says nothing of the column 'weight'; set KERAS_BACKEND=jax"
            raise ConfigError(f"{told}, or leave the column out", path="TrainingLoop.loss")
        return lambda y, outputs: keras.ops.mean(loop.loss(outputs, y))
    built = as_loss(loop.loss)

    class Built(keras.losses.Loss):
        def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            rows = {"y": y_true} if sample_weight is None else {"y": y_true, "weight": sample_weight}
            return total_value(built(y_pred, rows))

    return Built()


def _optimizer(keras: Any, optim: NNOptimParams, accumulate: int) -> Any:
    """The optimizer of Keras with the settings of a configuration.

    Raises:
        ConfigError: (a ValueError) it has none of this kind, or not this setting.
    """
    if optim.kind not in _OPTIMIZERS:
        told = f"Keras is asked for {', '.join(_OPTIMIZERS)} here, got {optim.kind!r}"
        raise ConfigError(told, path="TrainingLoop.optimizer_config.name")
    given: dict[str, Any] = {"learning_rate": optim.max_lr, "global_clipnorm": optim.grad_clip_norm}
    if accumulate > 1:
        given["gradient_accumulation_steps"] = accumulate
    if optim.kind == "sgd":
        given |= {"momentum": optim.momentum or 0.0, "nesterov": bool(optim.nesterov)}
    elif optim.betas is not None:
        given |= {"beta_1": optim.betas[0], "beta_2": optim.betas[1]}
    if optim.eps is not None:
        given["epsilon"] = optim.eps
    if optim.weight_decay:
        if optim.kind not in ("adamw", "lion"):
            told = f"the coupled weight decay of {optim.kind} is not Keras'; use adamw"
            raise ConfigError(told, path="TrainingLoop.optimizer_config.weight_decay")
        given["weight_decay"] = optim.weight_decay
    elif optim.kind == "adamw":
        given["weight_decay"] = 0.0
    if optim.param_groups or optim.decay_mask != "auto":
        told = "groups of parameters do not apply to the backend 'keras'; leave them out"
        raise ConfigError(told, path="TrainingLoop.optimizer_config")
    optimizer = getattr(keras.optimizers, _OPTIMIZERS[optim.kind])(**(given | dict(optim.options)))
    return optimizer


def _evaluate(keras: Any, loop: Any, model: Any) -> dict[str, float]:
    """The loss over the validation set, a mean over its rows by their weights, in evaluation mode."""
    total, rows = 0.0, 0.0
    loss = _loss(keras, loop)
    for batch in scored(loop):
        count = counted(batch)
        weight = {"sample_weight": batch["weight"]} if "weight" in batch else {}
        total += float(loss(batch["y"], model(batch["x"], training=False), **weight)) * count
        rows += count
    return {"loss": total / rows if rows else float("nan")}
