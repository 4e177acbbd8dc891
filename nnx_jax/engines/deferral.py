"""Deferral: where each device may add up its own rows' gradients over a window, and where that would not be the sum."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax

from nnx_jax.core.hooks import runs_on
from nnx_jax.core.stages import TrainingStage as Stage
from nnx_jax.engines.work import Work
from nnx_jax.params.run import RunSpec
from nnx_jax.step.apart import apart
from nnx_jax.step.plan import HookPlan

_BY_ROWS = (Stage.AFTER_FORWARD, Stage.BEFORE_LOSS, Stage.AFTER_LOSS, Stage.BEFORE_BACKWARD, Stage.DO_BACKWARD)
"""Stages at which a hook of a deferred reduction sees one device's rows."""


def settle(hooks: HookPlan | None, pure: Any, work: Work, feed: Any, spec: RunSpec) -> HookPlan | None:
    """The plan with a deferred reduction only where every device can do without the others' rows inside a window.

    BatchNorm needs the statistics of the whole batch, dropout draws its noise over the whole batch, so that it is the
    same on any number of devices, and a model or an objective may compare rows: these reduce every microbatch, with a
    warning where the deferred one was asked for. Where nobody asked, it is done only if nothing at all speaks against
    it: what hooks and metrics of the user's own do with rows is not known, nor what some models do.
    """
    if hooks is None or hooks.mesh is None:
        return hooks
    signature, without = feed.signature(), dataclasses.replace(hooks, mesh=None)
    rows_apart = _rows_apart(pure, work.forward, signature, hooks.sharding)
    why = next(_reasons(pure, work, signature, rows_apart), None)
    if hooks.by_default:
        unsure = why is not None or rows_apart is None or any(_unsure(hooks, feed, spec))
        return without if unsure else hooks
    if why is None:
        return hooks
    warnings.warn(
        f"defer_reduce does nothing here: the model {why}, so gradients are reduced at every microbatch; the numbers "
        "are the same",
        UserWarning,
        stacklevel=2,
    )
    return without


def _reasons(pure: Any, work: Work, signature: Mapping[str, Any], rows_apart: bool | None) -> Iterator[str]:
    if pure.model_state:
        yield "keeps statistics of whole batches (BatchNorm)"
    if draws_noise(pure, work.forward, signature):
        yield "draws noise over whole batches (dropout)"
    if work.forward != pure.forward:
        yield "is trained by an objective, which may compare rows of a batch with each other"
    if rows_apart is False:
        yield "compares rows of a batch with each other"


def _unsure(hooks: HookPlan, feed: Any, spec: RunSpec) -> Iterator[bool]:
    """What a user of the deferred reduction answers for, and nobody does where it is not asked for."""
    for hook in hooks.update:  # one of the user's own may look at the rows of a batch, and decide when windows begin
        yield not type(hook).__module__.startswith("nnx_jax.")
    for hook in hooks.traced:
        yield any(runs_on(hook, stage) for stage in _BY_ROWS)
    yield "predictions" in hooks.taps
    yield bool(spec.training.extra_metrics)
    yield any(metric.kind == "registered" for metric in spec.model.metrics)
    yield not getattr(feed, "pad", getattr(feed, "tail", "pad") == "pad")  # a last batch may not split


def _rows_apart(pure: Any, forward: Any, signature: Mapping[str, Any], sharding: Any) -> bool | None:
    """Whether the outputs of a row depend on that row alone; None where it cannot be told."""
    full = sharding.padded(signature["mask"].shape[0])
    batch = {name: jax.ShapeDtypeStruct((full, *c.shape[1:]), c.dtype) for name, c in signature.items()}
    given = {**pure.params, **pure.frozen}, pure.model_state, jax.eval_shape(partial(jax.random.key, 0))
    return apart(lambda given, batch: forward(*given[:2], batch, given[2], True)[0], given, batch, sharding.parts)


def draws_noise(pure: Any, forward: Any, signature: Mapping[str, Any]) -> bool:
    """Whether the outputs of a training forward pass depend on its key; found by tracing, nothing is computed."""
    batch = {name: jax.ShapeDtypeStruct(column.shape, column.dtype) for name, column in signature.items()}
    params = {**pure.params, **pure.frozen}
    key = jax.eval_shape(partial(jax.random.key, 0))

    def outputs(key: Any, params: Any, state: Any, batch: Any) -> Any:
        return forward(params, state, batch, key, True)[0]

    traced = jax.make_jaxpr(outputs)(key, params, pure.model_state, batch).jaxpr
    reached = {id(traced.invars[0])}
    for equation in traced.eqns:  # in order, so that one pass follows the key wherever it goes
        if any(id(value) in reached for value in equation.invars):
            reached.update(id(value) for value in equation.outvars)
    return any(id(value) in reached for value in traced.outvars)
