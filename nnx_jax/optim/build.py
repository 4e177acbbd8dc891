"""Optimizers over flat parameter dictionaries: optax's arithmetic in float32, the rate in our hands."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from nnx_jax.core.errors import ConfigError, ModelError, nearest
from nnx_jax.core.precision import sum_dtype, widened
from nnx_jax.optim.paths import check_patterns, decay_mask, group_of, matches
from nnx_jax.params.optim import OPTAX_NAMES, OWN_KINDS, add_optimizer_kind

Params = dict[str, jax.Array]
Schedule = Callable[[jax.Array], jax.Array]
Direction = Callable[[Any], optax.GradientTransformation]


class OptState(NamedTuple):
    """State of an optimizer.

    Attributes:
        count: int32 scalar, committed updates so far.
        rate: scalar, float32 or as wide as the parameters. Update clock: the rate of the last update. Epoch clock: the
            rate of the next ones, set by the host with `set_rate`.
        inner: optax's own state (moments in float32, of float64 parameters in float64).
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    rate: jax.Array
    inner: Any


class Optimizer(NamedTuple):
    """`init(params) -> OptState` and `update(grads, opt_state, params) -> (new params, new OptState)`; both pure."""

    init: Callable[[Params], OptState]
    update: Callable[[Params, OptState, Params], tuple[Params, OptState]]


@dataclass(frozen=True)
class Group:
    """A rule for the parameters whose path matches one of `patterns`; the first matching group wins, none merge.

    Attributes:
        lr_scale: factor on the rate.
        weight_decay: applies to every parameter of the group, whatever the mask says; None keeps the optimizer's.
    """

    patterns: tuple[str, ...]
    lr_scale: float = 1.0
    weight_decay: float | None = None


_FACTORIES: dict[str, Callable[..., optax.GradientTransformation]] = {
    name: getattr(optax, name) for name in OPTAX_NAMES
}
_COUPLED = frozenset({"sgd", "adam"})


def register_optimizer(name: str, factory: Callable[..., optax.GradientTransformation]) -> None:
    """Make an optax-like `factory(learning_rate, **options)` usable as `kind: name`.

    The factory is called while tracing, with a traced rate, so the layout of its state must not depend on the rate.

    Raises:
        ConfigError: when the name is taken.
    """
    if name in _FACTORIES or name in OWN_KINDS:
        raise ConfigError(f"optimizer name '{name}' is taken; choose another")
    _FACTORIES[name] = factory
    add_optimizer_kind(name)


def optimizer_names() -> tuple[str, ...]:
    """Every kind that `make_optimizer` knows."""
    return (*OWN_KINDS, *sorted(_FACTORIES))


def make_optimizer(
    kind: str | Callable[..., optax.GradientTransformation],
    params: Mapping[str, Any],
    *,
    rate: float = 0.0,
    schedule: Schedule | None = None,
    weight_decay: float = 0.0,
    mask: str | Sequence[str] = "auto",
    groups: Sequence[Group] = (),
    momentum: float = 0.0,
    nesterov: bool = False,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    options: Mapping[str, Any] | None = None,
) -> Optimizer:
    """Build an optimizer for exactly these parameters (frozen ones are simply not among them).

    Weight decay is coupled for sgd and adam (added to the gradient, as torch does) and decoupled for adamw and lion.
    The results are bit for bit those of the optax chain of the same pieces; a 16-bit parameter is updated in float32
    and rounded once. Gradients arrive already divided and clipped.

    Args:
        kind: sgd, adam, adamw, lion, a name of `params.optim.OPTAX_NAMES`, a registered one, or such a factory itself.
        params: path -> anything with `shape` and `dtype`.
        rate: the rate until `set_rate` (epoch clock).
        schedule: count of committed updates -> rate (update clock); read from the optimizer's own count.
        mask: "auto", "all" or glob patterns, see `paths.decay_mask`.

    Raises:
        ConfigError: for an unknown kind or option, or a pattern that matches nothing.
        ModelError: for a parameter that is not floating point.
    """
    for path, value in params.items():
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise ModelError(f"parameter '{path}' is {value.dtype}; only floating-point parameters can be trained")
    check_patterns([p for group in groups for p in group.patterns], params, "param_groups")
    found = {path: group_of(path, [group.patterns for group in groups]) for path in params}
    scale = {path: 1.0 if at is None else groups[at].lr_scale for path, at in found.items()}
    decay = _leaf_decay(weight_decay, mask, groups, found, params)
    if isinstance(kind, str) and kind in OWN_KINDS:
        if options:
            raise ConfigError(f"optimizer '{kind}' takes its settings as fields, not in options: {sorted(options)}")
        direction = _direction(kind, momentum, nesterov, betas, eps)
        before, after = (decay, None) if kind in _COUPLED else (None, decay)
        return _assemble(lambda _: direction, rate, schedule, before, after, scale, negate=True)
    if isinstance(kind, str) and kind not in _FACTORIES:
        raise ConfigError(f"there is no optimizer '{kind}'{nearest(kind, optimizer_names())}")
    if any(group.weight_decay is not None for group in groups):
        raise ConfigError(
            f"optimizer '{kind}' has one weight decay for all; sgd, adam, adamw and lion take it by group"
        )
    make = _optax_factory(kind, dict(options or {}), weight_decay, {path: value > 0 for path, value in decay.items()})
    return _assemble(make, rate, schedule, None, None, scale, negate=False)


def set_rate(opt_state: OptState, rate: float) -> OptState:
    """The same state with another rate (epoch clock); the array keeps type and shape, so nothing is compiled again."""
    return opt_state._replace(rate=jnp.asarray(rate, opt_state.rate.dtype))


def describe(opt_state: Any) -> dict[str, dict[str, Any]]:
    """The topology of a state: path -> {"shape": [...], "dtype": "float32"}, in the order of its leaves."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(opt_state)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
        for path, leaf in leaves
    }


def _leaf_decay(
    weight_decay: float,
    rule: str | Sequence[str],
    groups: Sequence[Group],
    found: Mapping[str, int | None],
    params: Mapping[str, Any],
) -> dict[str, float]:
    own = {path: None if at is None else groups[at].weight_decay for path, at in found.items()}
    rest = {path: value for path, value in params.items() if own[path] is None}
    if not isinstance(rule, str):
        check_patterns(rule, params, "decay_mask")
        allowed = {path: matches(path, rule) for path in params}
    else:
        allowed = decay_mask(rule, rest) if weight_decay else dict.fromkeys(rest, False)
    explicit = {path: value for path, value in own.items() if value is not None}
    return {path: weight_decay if allowed[path] else 0.0 for path in rest} | explicit


def _direction(
    kind: str, momentum: float, nesterov: bool, betas: tuple[float, float], eps: float
) -> optax.GradientTransformation:
    if kind == "sgd":
        return optax.trace(decay=momentum, nesterov=nesterov) if momentum else optax.identity()
    if kind == "lion":
        return optax.scale_by_lion(b1=betas[0], b2=betas[1])
    return optax.scale_by_adam(b1=betas[0], b2=betas[1], eps=eps)


def _optax_factory(kind: Any, options: dict[str, Any], weight_decay: float, mask: dict[str, bool]) -> Direction:
    factory = _FACTORIES[kind] if isinstance(kind, str) else kind
    if "learning_rate" not in inspect.signature(factory).parameters:
        return lambda rate: factory(**options)  # it knows its own rate
    legal = {name for name in inspect.signature(factory).parameters if name != "learning_rate"}
    for name in options:
        if name not in legal:
            raise ConfigError(f"optimizer '{kind}' has no option '{name}'{nearest(name, legal)}")
    if weight_decay:
        decay_name = _first(("weight_decay", "weight_decay_rate"), legal)
        mask_name = _first(("mask", "weight_decay_mask"), legal)
        if decay_name is None or mask_name is None:
            raise ConfigError(f"optimizer '{kind}' takes no masked weight decay; write weight_decay: 0")
        options = {**options, decay_name: weight_decay, mask_name: mask}
    return lambda rate: factory(learning_rate=rate, **options)


def _first(names: Iterable[str], legal: set[str]) -> str | None:
    return next((name for name in names if name in legal), None)


def _assemble(
    make: Direction,
    rate: float,
    schedule: Schedule | None,
    decay_before: dict[str, float] | None,
    decay_after: dict[str, float] | None,
    scale: dict[str, float],
    *,
    negate: bool,
) -> Optimizer:
    """Put the pieces together: decay, direction, decay, rate. `negate` says that the direction points uphill."""

    def current_rate(count: jax.Array, held: jax.Array) -> jax.Array:
        return held if schedule is None else jnp.asarray(schedule(count), held.dtype)

    def init(params: Params) -> OptState:
        count = jnp.zeros((), jnp.int32)
        dtype = sum_dtype(*(jnp.result_type(value) for value in params.values()))
        first = current_rate(count, jnp.asarray(rate, dtype))
        return OptState(count, first, make(first).init(_wide(params)))

    def update(grads: Params, opt_state: OptState, params: Params) -> tuple[Params, OptState]:
        now = current_rate(opt_state.count, opt_state.rate)
        wide = _wide(params)
        moved = _add_decay(_wide(grads), wide, decay_before)
        moved, inner = make(now).update(moved, opt_state.inner, wide)
        moved = _add_decay(moved, wide, decay_after)
        new = {}
        for path, value in moved.items():
            factor = (-now * scale[path] if scale[path] != 1.0 else -now) if negate else scale[path]
            new[path] = (wide[path] + factor * value).astype(params[path].dtype)
        return new, OptState(opt_state.count + 1, now, inner)

    return Optimizer(init, update)


def _wide(tree: Params) -> Params:
    return {path: widened(jnp.asarray(value)) for path, value in tree.items()}


def _add_decay(updates: Any, params: Params, decay: dict[str, float] | None) -> Any:
    if decay is None:
        return updates
    return {path: value + decay[path] * params[path] if decay[path] else value for path, value in updates.items()}
