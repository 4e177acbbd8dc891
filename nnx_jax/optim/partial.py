"""An optimizer that leaves some parameters alone: they have gradients, but neither state nor updates."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from nnx_jax.optim.build import Optimizer, OptState, Params


def hold(optimizer: Optimizer, still: Collection[str]) -> Optimizer:
    """Return `optimizer`, built for the other parameters, as one for all: those in `still` stay as they are."""

    def moving(named: Mapping[str, Any]) -> Params:
        return {name: value for name, value in named.items() if name not in still}

    def init(params: Params) -> OptState:
        return optimizer.init(moving(params))

    def update(grads: Params, opt_state: OptState, params: Params) -> tuple[Params, OptState]:
        moved, opt_state = optimizer.update(moving(grads), opt_state, moving(params))
        return {name: moved.get(name, value) for name, value in params.items()}, opt_state

    return Optimizer(init, update)
