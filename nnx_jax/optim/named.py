"""Several optimizers as one: each moves the parameters that are its own, by its own norm, schedule and count."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from nnx_jax.core.errors import ConfigError, StepError, nearest
from nnx_jax.optim.build import Optimizer, OptState, Params, Schedule, set_rate
from nnx_jax.optim.clip import clipped
from nnx_jax.optim.paths import matches
from nnx_jax.optim.specs import build_optimizer
from nnx_jax.params.optim import NNOptimParams

_AT = "trainer.optims"


@dataclass(frozen=True)
class Ownership:
    """Which parameters belong to which optimizer.

    Attributes:
        owned: paths by optimizer, the optimizers in alphabetical order, the paths in the order they came in.
        unowned: paths that no optimizer claims; they are not trained.
    """

    owned: Mapping[str, tuple[str, ...]]
    unowned: tuple[str, ...]


def find_owners(optims: Mapping[str, NNOptimParams], paths: Iterable[str]) -> Ownership:
    """Give every trainable parameter to the one optimizer whose groups match it.

    One optimizer alone without `param_groups` owns everything.

    Args:
        optims: the optimizers by name.
        paths: dotted paths of the trainable parameters; frozen ones are not among them.

    Raises:
        ConfigError: two optimizers claim one parameter, a pattern matches nothing, or an optimizer owns nothing.

    Warns:
        UserWarning: parameters that nobody claims, which stay as they are.
    """
    known, names = list(paths), sorted(optims)
    if len(names) == 1 and not optims[names[0]].param_groups:
        return Ownership({names[0]: tuple(known)}, ())
    for name in names:
        _check_groups(name, optims[name], known)
    claims = {path: [name for name in names if optims[name].group_of(path) is not None] for path in known}
    for path, claimants in claims.items():
        if len(claimants) > 1:
            told = " and ".join(f"'{name}' (by {_pattern(optims[name], path)!r})" for name in claimants)
            raise ConfigError(f"parameter '{path}' is claimed by {told}; narrow the patterns of one", path=_AT)
    unowned = tuple(path for path, claimants in claims.items() if not claimants)
    if unowned:
        more = f" and {len(unowned) - 1} more" if unowned[1:] else ""
        warnings.warn(
            f"no optimizer owns parameter '{next(iter(unowned))}'{more}, so it is not trained; add a pattern to the "
            f"param_groups of {' or '.join(names)}, or freeze it to say that this is meant",
            UserWarning,
            stacklevel=2,
        )
    return Ownership({name: tuple(path for path in known if name in claims[path]) for name in names}, unowned)


def named_optimizers(
    optims: Mapping[str, NNOptimParams], schedules: Mapping[str, Schedule], params: Mapping[str, Any]
) -> NamedOptimizers:
    """Build the optimizers of a Trainer for its trainable parameters.

    Args:
        optims: the optimizers by name; each clips its own parameters by its own `grad_clip_norm`.
        schedules: rate from an optimizer's own count, for those on the update clock. The rate of the others starts at
            their `max_lr` and is set by the host.
        params: path -> anything with `shape` and `dtype`.

    Raises:
        ConfigError: see `find_owners` and `build_optimizer`; the error names the optimizer.
    """
    owners = find_owners(optims, params)
    parts = {}
    for name, paths in owners.owned.items():
        try:
            parts[name] = build_optimizer(optims[name], schedules.get(name), {path: params[path] for path in paths})
        except ConfigError as error:
            raise ConfigError(str(error.args[0]), path=f"{_AT}.{name}") from error
    return NamedOptimizers(parts, owners.owned, {name: optims[name].grad_clip_norm for name in parts})


class NamedOptimizers:
    """Optimizers by name that keep the contract of one `Optimizer`; all functions are pure.

    Their state is an OptState: `inner` holds the OptState of every optimizer by name, `count` the calls that moved
    something, `rate` that of the alphabetically first. Gradients arrive already divided and not yet clipped.

    Args:
        parts: the optimizers, each built for its own parameters.
        owned: the paths of each; no path is in two of them.
        clip_norms: largest global norm of the gradient of each one's parameters; none for no clipping.
    """

    def __init__(
        self,
        parts: Mapping[str, Optimizer],
        owned: Mapping[str, Sequence[str]],
        clip_norms: Mapping[str, float | None] | None = None,
    ) -> None:
        self.names = tuple(sorted(parts))
        self.parts = {name: parts[name] for name in self.names}
        self.owned = {name: tuple(owned[name]) for name in self.names}
        self.clip_norms = {name: (clip_norms or {}).get(name) for name in self.names}

    def init(self, params: Params) -> OptState:
        """First state; parameters that nobody owns have none."""
        inner = {name: part.init(self._own(name, params)) for name, part in self.parts.items()}
        return joined(jnp.zeros((), jnp.int32), inner)

    def update(self, grads: Params, opt_state: OptState, params: Params) -> tuple[Params, OptState]:
        """One commit: every optimizer moves its own parameters; what nobody owns stays as it is."""
        return self._step(self.names, grads, opt_state, params)

    def update_one(self, name: str, grads: Params, opt_state: OptState, params: Params) -> tuple[Params, OptState]:
        """One commit of one optimizer; the others, their counts and rates stay as they are.

        Args:
            grads: at least the gradients of its own parameters; others are not looked at.

        Raises:
            ConfigError: there is no optimizer of that name.
            StepError: one of its parameters has no gradient.
        """
        self._check(name)
        return self._step((name,), grads, opt_state, params)

    def rates(self, opt_state: OptState) -> dict[str, jax.Array]:
        """The rate of every optimizer, scalars; see `OptState.rate`."""
        return {name: opt_state.inner[name].rate for name in self.names}

    def set_rates(self, opt_state: OptState, rates: Mapping[str, float]) -> OptState:
        """The same state with other rates for the named ones (epoch clock); shapes stay, nothing is compiled again.

        Raises:
            ConfigError: there is no optimizer of that name.
        """
        for name in rates:
            self._check(name)
        return set_rates(opt_state, rates)

    def _step(
        self, names: Sequence[str], grads: Params, opt_state: OptState, params: Params
    ) -> tuple[Params, OptState]:
        new, inner = dict(params), dict(opt_state.inner)
        for name in names:
            own = clipped(self._own(name, grads), self.clip_norms[name])
            moved, inner[name] = self.parts[name].update(own, inner[name], self._own(name, params))
            new.update(moved)
        return new, joined(opt_state.count + 1, inner)

    def _own(self, name: str, values: Params) -> Params:
        try:
            return {path: values[path] for path in self.owned[name]}
        except KeyError as error:
            raise StepError(
                f"parameter {error} of optimizer '{name}' has no value here; give one for each of its own"
            ) from error

    def _check(self, name: str) -> None:
        if name not in self.parts:
            raise ConfigError(f"there is no optimizer '{name}'; the optimizers are {', '.join(self.names)}")


def joined(count: jax.Array, inner: Mapping[str, OptState]) -> OptState:
    """The state of several optimizers as one."""
    # A copy: the state is donated as a whole, and no buffer may be in it twice.
    return OptState(count, jnp.copy(inner[min(inner)].rate), dict(inner))


def set_rates(opt_state: OptState, rates: Mapping[str, float]) -> OptState:
    """The same state with other rates for the named optimizers; see `NamedOptimizers.set_rates`."""
    inner = dict(opt_state.inner) | {name: set_rate(opt_state.inner[name], rate) for name, rate in rates.items()}
    return joined(opt_state.count, inner)


def _check_groups(name: str, optim: NNOptimParams, known: Sequence[str]) -> None:
    at = f"{_AT}.{name}.param_groups"
    if not optim.param_groups:
        raise ConfigError("is empty, but there are several optimizers; give the patterns of its parameters", path=at)
    for index, group in enumerate(optim.param_groups):
        for pattern in group.patterns:
            if not any(matches(path, pattern) for path in known):
                told = f"pattern {pattern!r} matches no parameter that is trained{nearest(pattern, known)}"
                raise ConfigError(told, path=f"{at}[{index}]")


def _pattern(optim: NNOptimParams, path: str) -> str:
    group = optim.param_groups[optim.group_of(path) or 0]
    return next(pattern for pattern in group.patterns if matches(path, pattern))
