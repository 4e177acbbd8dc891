"""Build the compiled step: accumulate, apply, and many windows per call, over one flat list of donated leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from nnx_jax.core.errors import StepError
from nnx_jax.core.precision import sum_dtype
from nnx_jax.step import rng, state
from nnx_jax.step.body import State, StepBody
from nnx_jax.step.canonical import Alone, CanonicalBody
from nnx_jax.step.concrete import ConcretePrograms
from nnx_jax.step.everywhere import Everywhere
from nnx_jax.step.lost import halting
from nnx_jax.step.places import gathering
from nnx_jax.step.plan import HookPlan
from nnx_jax.step.probe import hooked_body
from nnx_jax.step.programs import StepPrograms
from nnx_jax.step.records import RecordLayout
from nnx_jax.step.shards import Shards
from nnx_jax.step.split_update import split_update
from nnx_jax.step.state import TrainState, describe_leaf, leaf_paths, strong
from nnx_jax.step.window import (
    Forward,
    Plan,
    Terms,
    plan_terms,
)


def build_step(
    forward: Forward,
    terms: Terms,
    optimizer: Any,
    *,
    params: Mapping[str, Any],
    model_state: Any,
    signature: Mapping[str, tuple[tuple[int, ...], Any]],
    frozen: Mapping[str, Any] | None = None,
    slots: Mapping[str, Any] | None = None,
    metrics: Sequence[Any] = (),
    invalid: Callable[[Any, Any], Any] | None = None,
    accumulate: int = 1,
    clip_norm: float | None = None,
    nonfinite: str = "fail",
    max_consecutive: int = 10,
    record_every: str = "batch",
    capacity: int = 4096,
    hooks: HookPlan | None = None,
    executor: str = "compiled",
    sharding: Any = None,
    make_body: Callable[..., StepBody] = StepBody,
    shards: Shards | None = None,
) -> StepPrograms:
    """Check that the parts fit and return the programs; nothing is compiled before its first call.

    Args:
        forward: `(params, model_state, batch, key, train) -> (outputs, new model_state)`; gets trainable and frozen
            parameters in one dict.
        terms: `(outputs, batch) -> tuple[LossTerm, ...]`, see `objectives.terms`.
        optimizer: `init(params) -> OptState`, `update(grads, opt_state, params) -> (new params, new OptState)`; gets
            gradients in float32 (float64 where parameters are), already divided and clipped.
        params, model_state, frozen, slots: the arrays, or anything with their shapes and dtypes.
        signature: shape and dtype of every batch column by name, with "mask" (float32 [B]) among them.
        metrics: objects with `name`, `size` and `update(outputs, batch) -> [size]`.
        invalid: `(outputs, batch) -> int32`, count of impossible labels; any stops the run. Default: the loss's own
            `invalid_labels`, if it has one.
        accumulate: microbatches in a full window.
        clip_norm: largest global gradient norm; None or inf for no clipping.
        nonfinite: "fail" stops at the first non-finite window, "skip" drops such windows, "ignore" applies them.
        max_consecutive: under "skip", how many in a row are dropped before the run stops.
        record_every: "batch" writes a record row for every microbatch, "update" one for every window.
        capacity: rows the device keeps between two `read_records`.
        hooks: what takes part in the step; their slots are made here.
        executor: "compiled", or "staged" and "eager", which run Python with concrete values; see `step/concrete.py`.
        sharding: a ShardingSpec; None for one device. The batches handed over lie as it says (`spmd/mesh.py`).

        make_body: what the programs are put together from, without hooks; see `step/custom.py`.
        shards: of a canonical reduction; None for the fast one. With another `make_body` every device computes whole
            microbatches.

    Raises:
        StepError: an option is out of range, or forward, loss or optimizer change the shape, dtype or structure of
            what they update.
        ConfigError: a rule of `sharding` does not fit the parameters.
    """
    _check_options(accumulate, clip_norm, nonfinite, max_consecutive, record_every, capacity)
    batch = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in signature.items()}
    given = jax.tree.map(_spec, (dict(params), dict(frozen or {}), model_state, dict(slots or {})))
    key = jax.eval_shape(partial(rng.stream_key, rng.run_key(0), rng.DROPOUT))
    outputs, new_model_state = jax.eval_shape(
        lambda p, f, m, b, k: forward({**f, **p}, m, b, k, True), given[0], given[1], given[2], batch, key
    )
    _check_same("model_state", given[2], new_model_state, "the forward pass")
    fused = 1 if shards is None else 2  # a shard must not divide by its own denominators
    dtype = sum_dtype(*(leaf.dtype for leaf in given[0].values()))
    plan = _plan(terms, outputs, batch, max(accumulate, fused), hooks is not None and hooks.adds_means, dtype)
    plan = plan if shards is None else dataclasses.replace(plan, norm_divided=True)
    names = tuple((m.name, m.size) for m in metrics)
    layout = RecordLayout(plan.terms, plan.weights, plan.additive, names, capacity, record_every, dtype)
    options: dict[str, Any] = {
        "metrics": metrics,
        "invalid": getattr(terms, "invalid_labels", None) if invalid is None else invalid,
        "accumulate": accumulate,
        "clip_norm": clip_norm,
        "nonfinite": nonfinite,
        "max_consecutive": max_consecutive,
    }
    if executor != "compiled":
        if sharding is not None:
            raise StepError(f"the executor '{executor}' runs on one device; leave the mesh out, or use 'compiled'")
        if shards is not None:
            raise StepError(f"the executor '{executor}' computes no shards; use 'compiled', or the fast reduction")
        hooks = dataclasses.replace(hooks or HookPlan(), concrete=True)
    used, split = optimizer, None
    if shards is None:
        forward = gathering(forward, sharding)
    else:
        if make_body is StepBody:
            make_body, split = partial(CanonicalBody, shards=shards), split_update(optimizer, given, sharding)
        used = Alone(split or optimizer)
    body: Any = make_body(forward, terms, used, plan, layout, **options)
    if hooks is not None and not hooks.empty:
        body = hooked_body(hooks, given, batch, forward, terms, used, plan, layout, options, shards)
    if shards is not None:
        body = Everywhere(body, getattr(body, "shards", shards), sharding, split)
    grads = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), given[0])
    opt_state = jax.eval_shape(optimizer.init, given[0])
    new_params, new_opt_state = jax.eval_shape(optimizer.update, grads, opt_state, given[0])
    _check_same("opt_state", opt_state, new_opt_state, "the optimizer")
    _check_same("params", given[0], new_params, "the optimizer", dtypes=False)

    def init(parts: Any, key_data: Any) -> State:
        params, frozen, model_state, slots = parts
        slots = {**(hooks.init(params, model_state) if hooks is not None else {}), **slots}
        counters = jnp.zeros(len(state.COUNTERS), jnp.int32)
        accum = body.accumulator(params, model_state)
        train = TrainState(params, frozen, model_state, optimizer.init(params), accum, slots, key_data, counters)
        return strong((train, jnp.zeros((capacity, layout.width), jnp.int32), jnp.zeros(2, jnp.int32)))

    if executor != "compiled":
        return ConcretePrograms(body, init, given, compiled=executor == "staged")  # type: ignore[arg-type]
    return StepPrograms(halting(body, sharding), init, given, sharding=sharding)


def _plan(terms: Terms, outputs: Any, batch: Any, accumulate: int, means: bool, dtype: Any) -> Plan:
    found: list[Plan] = []

    def look(outputs: Any, batch: Any) -> None:
        found.append(plan_terms(terms(outputs, batch), accumulate, means=means, dtype=dtype))

    jax.eval_shape(look, outputs, batch)
    return found[0]


def _check_options(
    accumulate: int, clip_norm: float | None, nonfinite: str, max_consecutive: int, record_every: str, capacity: int
) -> None:
    if accumulate < 1:
        raise StepError(f"accumulate is {accumulate}; a window has at least one microbatch")
    if clip_norm is not None and not clip_norm > 0:
        raise StepError(f"clip_norm is {clip_norm}; give a norm above 0, or None for no clipping")
    if nonfinite not in ("fail", "skip", "ignore"):
        raise StepError(f"nonfinite is {nonfinite!r}; write 'fail', 'skip' or 'ignore'")
    if max_consecutive < 0:
        raise StepError(f"max_consecutive is {max_consecutive}; it counts windows, from 0")
    if record_every not in ("batch", "update"):
        raise StepError(f"record_every is {record_every!r}; write 'batch' or 'update'")
    if capacity < 1:
        raise StepError(f"capacity is {capacity}; the ring holds at least one row")


def _check_same(what: str, before: Any, after: Any, who: str, *, dtypes: bool = True) -> None:
    old = dict(zip(leaf_paths(before), jax.tree.leaves(before), strict=True))
    new = dict(zip(leaf_paths(after), jax.tree.leaves(after), strict=True))
    for path in [*old, *(path for path in new if path not in old)]:
        a, b = old.get(path), new.get(path)
        if a is None or b is None or a.shape != b.shape or (dtypes and a.dtype != b.dtype):
            told = [("nothing" if leaf is None else describe_leaf(leaf)) for leaf in (a, b)]
            raise StepError(f"{who} turns {what}/{path} from {told[0]} into {told[1]}; an update keeps shape and dtype")
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise StepError(f"{who} changes the structure of {what}; an update keeps it")


def _spec(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))
