"""Flax NNX modules under a TrainingLoop: the default backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from nnx_jax.backends.base import Trained
from nnx_jax.backends.carry import TrainerCarryState
from nnx_jax.backends.gradient import Recipe, train
from nnx_jax.engines.operators import NNXModelOp
from nnx_jax.fit.framework import FLAX
from nnx_jax.model import NNModel


def run(loop: Any, state: TrainerCarryState | None) -> Trained:
    """Train the operator's Flax NNX module as the loop says; see `TrainingLoop`.

    Raises:
        TypeError: `model_op` has no Flax NNX module.
    """
    return train(loop, state, RECIPE)


def _take(op: Any, info: Mapping[str, Any]) -> nnx.Module:
    if isinstance(op, NNXModelOp):
        return nnx.clone(op.module) if op.weights else op.build(info)
    if not isinstance(module := getattr(op, "module", None), nnx.Module):
        told = f"model_op is {type(op).__name__}; the backend 'nnx' trains an NNXModelOp(module)"
        raise TypeError(f"{told}, or any operator whose `module` is a flax.nnx.Module")
    return nnx.clone(module)


def _give(op: Any, module: nnx.Module, input_shape: tuple[int, ...] | None) -> NNXModelOp:
    shape = {} if input_shape is None else {"input_shape": input_shape}
    return op.of(module, **shape) if isinstance(op, NNXModelOp) else NNXModelOp(module, **shape)


def _load(module: nnx.Module, arrays: Mapping[str, Any], source: str) -> None:
    FLAX.load(module, arrays, None, FLAX.backend, source)


def _split(model: nnx.Module) -> tuple[Any, Callable[[Any], nnx.Module]]:
    graph, leaves = nnx.split(model)
    return leaves, lambda held: nnx.merge(graph, held)


RECIPE = Recipe("nnx", NNModel, ("flax", "optax"), _take, _give, _load, _split)
