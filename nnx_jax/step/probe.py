"""Build the body of a step with hooks; asks the hooks once what they decide, to know what the state must keep."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from nnx_jax.core.errors import TraceBoundaryError, TraceStateError
from nnx_jax.step import state
from nnx_jax.step.hooked import HookedBody
from nnx_jax.step.local import LocalBody
from nnx_jax.step.plan import HookPlan
from nnx_jax.step.state import TrainState


def hooked_body(
    hooks: HookPlan, given: Any, batch: Any, forward: Any, terms: Any, optimizer: Any, plan: Any, layout: Any,
    options: Mapping[str, Any],
) -> HookedBody:  # fmt: skip
    """The body for these hooks; traces what they decide at BEFORE_BATCH to see whether the accumulator must live on."""
    params, frozen, model_state, slots = given
    quiet = replace(hooks, observer=None, concrete=False)
    make = HookedBody
    if hooks.mesh is not None:
        make = LocalBody
    body = make(forward, terms, optimizer, plan, layout, hooks=quiet, **options)

    def start(params: Any, frozen: Any, model_state: Any, key: Any) -> TrainState:
        counters = jnp.zeros(len(state.COUNTERS), jnp.int32)
        return TrainState(params, frozen, model_state, (), {}, hooks.init(params, model_state), key, counters)

    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    train = jax.eval_shape(start, params, frozen, model_state, key)
    every = (*hooks.update, *hooks.traced)
    keeps = _keeps(body, every, train, batch, hooks.concrete)
    body = make(forward, terms, optimizer, plan, layout, hooks=hooks, keeps=keeps, **options)
    if hooks.taps:
        shapes = partial(_concrete, every) if hooks.concrete else _abstract

        def tapped(train: TrainState, batch: Any) -> Any:
            ctx = body.begin(train, batch, closes=True)
            seen, _, _ = body.measured(train, ctx)
            body.after_backward(ctx, seen, seen, closes=True)
            return body.taps(ctx)

        body.tapped = shapes(tapped, train, batch)
    return body


def _keeps(body: HookedBody, hooks: Sequence[Any], train: TrainState, batch: Any, concrete: bool) -> bool:
    """Whether a hook may let the accumulator go on from one microbatch to the next, by its own decision."""
    found: list[bool] = []

    def look(train: TrainState, batch: Any) -> None:
        ctx = body.begin(train, batch, closes=True)
        kept = body.keep_or_zero(ctx)
        found.append(kept is not True and kept is not ctx.window_starts)

    try:
        with _untouched(hooks):
            jax.eval_shape(look, train, batch)
    except (TraceBoundaryError, TraceStateError):
        if not concrete:
            raise
        return True  # it decides in Python, by values
    return found[0]


def _abstract(function: Callable[..., Any], *shapes: Any) -> Any:
    return jax.eval_shape(function, *shapes)


def _concrete(hooks: Sequence[Any], function: Callable[..., Any], *shapes: Any) -> Any:
    """Shapes of `function(*shapes)`, called once with zeros, because the Python of its hooks may need values."""
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    with _untouched(hooks), jax.disable_jit():
        found = function(*zeros)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), found)


@contextlib.contextmanager
def _untouched(hooks: Sequence[Any]) -> Iterator[None]:
    """Let hooks be called for a look; what they change of themselves is undone."""
    held = (dict, list, set)
    before = [
        {name: copy.copy(value) if isinstance(value, held) else value for name, value in vars(hook).items()}
        if hasattr(hook, "__dict__")
        else None
        for hook in hooks
    ]
    try:
        yield
    finally:
        for hook, kept in zip(hooks, before, strict=True):
            if kept is not None:
                hook.__dict__.clear()
                hook.__dict__.update(kept)
