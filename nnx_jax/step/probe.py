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
from nnx_jax.core.stages import TrainingStage as Stage
from nnx_jax.step import state
from nnx_jax.step.canonical import CanonicalHooks, TakesPartInside
from nnx_jax.step.hooked import HookedBody
from nnx_jax.step.local import LocalBody
from nnx_jax.step.plan import HookPlan
from nnx_jax.step.shards import Shards
from nnx_jax.step.state import TrainState


def hooked_body(
    hooks: HookPlan, given: Any, batch: Any, forward: Any, terms: Any, optimizer: Any, plan: Any, layout: Any,
    options: Mapping[str, Any], shards: Any = None,
) -> HookedBody:  # fmt: skip
    """The body for these hooks; traces what they decide at BEFORE_BATCH to see whether the accumulator must live on."""
    quiet = replace(hooks, observer=None, concrete=False)
    parts, make = (forward, terms, optimizer, plan, layout), HookedBody if hooks.mesh is None else LocalBody
    make_seen: Any = make
    if shards is not None:
        shards = _fitting(shards, parts, quiet, options, given, batch)
        make = partial(CanonicalHooks, shards=shards)
        make_seen = partial(CanonicalHooks, shards=shards.on_one())  # looked at outside of the devices
    body: Any = make_seen(*parts, hooks=quiet, **options)

    train = _first(hooks, given)
    every = (*hooks.update, *hooks.traced)
    keeps = _keeps(body, every, train, batch, hooks.concrete)
    body = make(*parts, hooks=hooks, keeps=keeps, **options)
    seen_body = make_seen(*parts, hooks=hooks, keeps=keeps, **options)
    if hooks.taps:
        shapes = partial(_concrete, every) if hooks.concrete else _abstract

        def tapped(train: TrainState, batch: Any) -> Any:
            ctx = seen_body.begin(train, batch, closes=True)
            seen, _, _ = seen_body.measured(train, ctx)
            seen_body.after_backward(ctx, seen, seen, closes=True)
            return seen_body.taps(ctx)

        body.tapped = shapes(tapped, train, batch)
    return body


def _first(hooks: HookPlan, given: Any) -> TrainState:
    """Shapes of the first state, as far as hooks see it."""

    def start(params: Any, frozen: Any, model_state: Any, key: Any) -> TrainState:
        counters = jnp.zeros(len(state.COUNTERS), jnp.int32)
        return TrainState(params, frozen, model_state, (), {}, hooks.init(params, model_state), key, counters)

    return jax.eval_shape(start, *given[:3], jax.ShapeDtypeStruct((2,), jnp.uint32))


def _fitting(
    shards: Shards, parts: Sequence[Any], hooks: HookPlan, options: Mapping[str, Any], given: Any, batch: Any
) -> Shards:
    """The shards as these hooks need them: all of a batch where one takes part in its loss or may look at its rows."""
    every = (*hooks.update, *hooks.traced)
    if any(not type(hook).__module__.startswith("nnx_jax.") for hook in every):
        shards = shards.of_all()

    def look(train: TrainState, batch: Any) -> None:
        body = CanonicalHooks(*parts, hooks=hooks, shards=shards.on_one(), **options)
        ctx = body.begin(train, batch, closes=True)
        ctx.enter(zeroed=body.keep_or_zero(ctx))
        body.calls.at(ctx, Stage.BEFORE_FORWARD)
        body.measured(train, ctx)

    try:
        with _untouched(every):
            jax.eval_shape(look, _first(hooks, given), batch)
    except TakesPartInside as found:
        return shards.with_hooks_inside(found.args[0])
    return shards


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
