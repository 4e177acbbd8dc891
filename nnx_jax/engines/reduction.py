"""Reduction: `train.reduction`, and where the canonical one computes whole batches, said before any compiling."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax.core.errors import ConfigError, StepError
from nnx_jax.core.precision import sum_dtype
from nnx_jax.data.pipeline import Feed
from nnx_jax.engines.hook_plan import CONCRETE
from nnx_jax.engines.placement import full_rows
from nnx_jax.engines.work import Work
from nnx_jax.params.run import RunSpec
from nnx_jax.step import rng, state
from nnx_jax.step.plan import HookPlan
from nnx_jax.step.shard_noise import ShardNoise
from nnx_jax.step.shards import Shards, tell_whole
from nnx_jax.step.window import forward_at, terms_at

_FAST = "write reduction: fast"
_TOLERANCES = {8: 1e-5, 4: 1e-3}
_TOLERANCE_16 = 5e-2
"""Largest relative difference between the loss of a batch and that of its shards that is rounding; by bytes of the type
that is computed in."""


def make_shards(
    spec: RunSpec, hooks: HookPlan | None, pure: Any, work: Work, feed: Any
) -> tuple[Shards | None, Shards | None, HookPlan | None]:
    """The shards of `reduction: canonical` in training and in validation, and the plan of the hooks beside them.

    Where a microbatch is more than the sum of its rows, every device computes all of it, which is told in a warning.

    Args:
        pure: the module, `engines.nnx_forward.PureModule`.
        feed: of the training.

    Returns:
        None and None for the fast reduction.

    Raises:
        ConfigError: operations that are computed one by one, or more devices than shards.
    """
    if spec.training.reduction == "fast":
        return None, None, hooks
    at = f"{spec.block}.reduction"
    if spec.training.dispatch in CONCRETE:
        raise ConfigError(
            f"got 'canonical', but dispatch: {spec.training.dispatch} computes operations one by one and rounds after "
            f"each, which a compiled step does not; write dispatch: auto, or {_FAST}",
            path=at,
        )
    sharding = None if hooks is None else hooks.sharding
    pads = getattr(feed, "pad", getattr(feed, "tail", "pad") == "pad")
    rows = full_rows(feed, sharding)
    make = partial(Shards, spec.training.reduction_shards, sharding, pads=pads, rows=rows)
    why = next(_reasons(hooks, pure, work, feed), "")
    try:
        shards = make(whole=why)
    except StepError as error:
        raise ConfigError(error.args[0], path=f"{at}_shards") from error
    if not why:
        why = _not_cut(shards, feed) or _not_summed(shards, pure, work.forward, work.terms, feed)
    scoring = shards
    if why:
        shards = tell_whole(shards.as_whole(why))
        scoring = _scoring(make, shards, pure, work, feed)
    if hooks is not None and hooks.mesh is not None:
        warnings.warn(
            "defer_reduce does nothing here: with reduction: canonical the order of the sums is that of the rows, so "
            "gradients are reduced at every microbatch; the numbers are the same",
            UserWarning,
            stacklevel=3,
        )
        hooks = dataclasses.replace(hooks, mesh=None)
    return shards, scoring, hooks


def _scoring(make: Any, whole: Shards, pure: Any, work: Work, feed: Any) -> Shards:
    """The shards of a validation, whose loss may be a sum over rows where that of the training is not."""
    try:
        shards = make(pads=True)
    except StepError:  # more devices than shards
        return whole
    found = _not_summed(shards, pure, work.score_forward, work.score_terms, feed, train=False)
    return whole if found else shards


def _reasons(hooks: HookPlan | None, pure: Any, work: Work, feed: Any) -> Iterator[str]:
    """Why a microbatch is not to be computed in shards, as far as it can be told without computing."""
    if work.custom is not None:
        yield "a step of your own computes its gradients itself"
    if hooks is not None and hooks.adds_means:
        yield "a hook adds up the microbatches' means, each divided by itself, instead of their sums"
    changed = changed_state(pure, work.forward, feed.signature())
    if changed:
        norm = f", as the BatchNorm '{pure.batch_norms[0]}' does" if pure.batch_norms else ""
        yield f"the model keeps statistics of whole batches ('{changed[0]}'){norm}, which no shard sees"


def _not_cut(shards: Shards, feed: Any) -> str:
    """Why batches cannot be cut into equal shards; nothing where they can."""
    if shards.pads:
        return ""
    sizes = (feed.size(0), feed.size(feed.n_batches - 1)) if isinstance(feed, Feed) else (1,)
    uneven = [size for size in sizes if size % shards.count]
    cut = f"a batch of {uneven[0]} rows" if uneven and isinstance(feed, Feed) else "not every batch of a loader"
    return f"{cut} can be cut into {shards.count} equal parts, and no rows may be added" if uneven else ""


def changed_state(pure: Any, forward: Any, signature: Mapping[str, Any]) -> list[str]:
    """Names of the model's state that a training forward pass changes; found by tracing, nothing is computed."""
    batch = {name: jax.ShapeDtypeStruct(column.shape, column.dtype) for name, column in signature.items()}
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = {**pure.params, **pure.frozen}
    trace = jax.make_jaxpr(lambda old, params, batch, key: forward(params, old, batch, key, True)[1])
    jaxpr = trace(pure.model_state, params, batch, key).jaxpr
    names = sorted(pure.model_state)
    return [name for name, old, new in zip(names, jaxpr.invars, jaxpr.outvars, strict=False) if old is not new]


def _not_summed(shards: Shards, pure: Any, forward: Any, terms: Any, feed: Any, *, train: bool = True) -> str:
    """Why the loss of a batch is not the sum over its shards; nothing where it is. One batch is computed both ways."""
    batch = shards.filled(_rows(feed))
    part, whole = shards.on_one().shapes(batch)
    parts = {name: column.reshape(shards.count, -1, *column.shape[1:]) for name, column in batch.items()}
    sums = partial(_terms, pure, forward, terms, train=train)
    try:
        noise = ShardNoise(lambda key, rows: sums(rows, key), part, whole, shards.count)
    except StepError as error:
        return error.args[0]
    key = rng.stream_key(rng.run_key(0), rng.DROPOUT)
    alone = jax.jit(lambda rows, number: sums(rows, noise.key(key, number)))
    found = [alone({n: c[i] for n, c in parts.items()}, np.int32(i)) for i in range(shards.count)]
    found = np.asarray([np.asarray(each, np.float64) for each in found])
    wanted = np.asarray(jax.jit(lambda rows: sums(rows, key))(batch), np.float64)
    scale = np.abs(found).sum(axis=0) + np.finfo(np.float32).tiny
    tolerance = _TOLERANCES.get(pure.compute_dtype.itemsize, _TOLERANCE_16)
    off = np.abs(found.sum(axis=0) - wanted) / scale
    if not np.isfinite(wanted).all() or off.max() <= tolerance:
        return ""
    return (
        f"the loss of a batch is not the sum over its rows: in {shards.count} parts it is off by {off.max():.1%}, so "
        "the model or the loss compares rows with each other"
    )


def _terms(pure: Any, forward: Any, terms: Any, rows: Any, key: Any, *, train: bool) -> jax.Array:
    """[terms, 2]: numerators and denominators, as wide as the parameters are added up."""
    counters = jnp.zeros(len(state.COUNTERS), jnp.int32)
    params = {**pure.params, **pure.frozen}
    outputs, _ = forward_at(forward, counters)(params, pure.model_state, rows, key, train)
    found = terms_at(terms, counters[state.STEP], counters[state.EPOCH])(outputs, rows)
    sums = [[term.scaled, 0.0 if term.denominator is None else term.denominator] for term in found]
    return jnp.asarray(sums, sum_dtype(*(value.dtype for value in params.values())))


def _rows(feed: Any) -> dict[str, jax.Array]:
    """One batch: the first rows of the data, or drawn ones where the data is not in memory."""
    signature, columns = feed.signature(), feed.arrays()
    rows = signature["mask"].shape[0]
    if columns is not None and len(next(iter(columns.values()))) >= rows:
        return {"mask": jnp.ones(rows, jnp.float32)} | {n: jnp.asarray(c[:rows]) for n, c in columns.items()}
    draw = np.random.default_rng(0)
    drawn = {
        name: draw.normal(size=column.shape) if np.issubdtype(column.dtype, np.floating) else np.zeros(column.shape)
        for name, column in signature.items()
    }
    drawn["mask"] = np.ones(rows)
    return {name: jnp.asarray(drawn[name], column.dtype) for name, column in signature.items()}
