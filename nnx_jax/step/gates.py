"""Bools that are Python's while they can be and the step's where they must be, and the fold of vetoes over hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from nnx_jax.core.errors import HookTypeError
from nnx_jax.core.hooks import describe
from nnx_jax.core.stages import TrainingStage

Flag = Any
"""A Python bool, known while tracing, or a bool scalar of the step."""


def not_(flag: Flag) -> Flag:
    """Not, staying a Python bool where it was one (`~True` is -2, which is true)."""
    return not flag if isinstance(flag, bool) else jnp.logical_not(flag)


def and_(a: Flag, b: Flag) -> Flag:
    """Both, staying a Python bool where that is enough to know."""
    if isinstance(a, bool):
        return b if a else False
    if isinstance(b, bool):
        return a if b else False
    return jnp.logical_and(a, b)


def pick(flag: Flag, new: Any, old: Any) -> Any:
    """`new` where `flag`, else `old`, leaf by leaf; a select, never a product, so that NaN stays where it was."""
    if isinstance(flag, bool):
        return new if flag else old
    return jax.tree.map(lambda n, o: o if n is o else jnp.where(flag, n, o), new, old)


def check_flag(value: Any, hook: Any, stage: TrainingStage) -> Flag:
    """`value` if it is a Python bool or a bool scalar of the step.

    Raises:
        HookTypeError: naming the hook and the stage.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, jax.Array) and value.dtype == jnp.bool_ and value.ndim == 0:
        return value
    raise HookTypeError(
        f"{type(hook).__name__} returned proceed = {describe(value)} at {stage.name}; return True, False or a bool "
        "scalar of the step"
    )


def check_loss(value: Any, hook: Any, stage: str = "DO_BACKWARD") -> Any:
    """`value` if it is a float scalar of the step.

    Raises:
        HookTypeError: naming the hook and the stage.
    """
    if isinstance(value, jax.Array) and value.ndim == 0 and jnp.issubdtype(value.dtype, jnp.floating):
        return value
    found = f"an array of shape {list(value.shape)}" if isinstance(value, jax.Array) else describe(value)
    raise HookTypeError(
        f"{type(hook).__name__} returned loss = {found} at {stage}; return ctx.loss, or a float scalar made of it"
    )


def fold(hooks: tuple[Any, ...], stage: TrainingStage, call: Callable[[Any, Flag], Any]) -> tuple[Flag, Any]:
    """Ask every hook; any False vetoes, and the hooks after it are still asked and see `will_skip`.

    Args:
        call: `(hook, will_skip) -> (proceed, loss)`.

    Returns:
        Whether to proceed, and the index (int32) of the first hook that vetoed, -1 for none.
    """
    proceed: Flag = True
    first: Any = -1
    for index, hook in enumerate(hooks):
        go = check_flag(call(hook, not_(proceed))[0], hook, stage)
        vetoes = and_(proceed, not_(go))
        first = pick(vetoes, jnp.int32(index), jnp.int32(first))
        proceed = and_(proceed, go)
    return proceed, first
