"""Optimizers of a run, one or several by name: building them, setting and telling their rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from nnx_jax.optim.build import OptState, describe, make_optimizer, set_rate
from nnx_jax.optim.named import NamedOptimizers, named_optimizers
from nnx_jax.optim.specs import build_optimizer
from nnx_jax.params.run import RunSpec

Schedules = Mapping[str, Callable[[Any], Any]]
"""Rate from an optimizer's own count, by the optimizer's name, for those on the update clock."""


class Rates:
    """The optimizers' rates as the host knows them.

    Args:
        spec: the run.
        schedules: those on the update clock.
        optimizer: an `optax.GradientTransformation` in place of the one that the run's specification describes.
    """

    def __init__(self, spec: RunSpec, schedules: Schedules, optimizer: Any = None) -> None:
        self.spec, self.schedules, self.given = spec, dict(schedules), optimizer
        self.several = spec.trainer is not None
        self._dtype = np.dtype("float64" if spec.precision == "float64" else "float32")
        self.held = self._as_held({name: optim.max_lr for name, optim in spec.training.optimizers.items()})
        """Rates of the epoch clock as the device holds them."""

    def _as_held(self, rates: Mapping[str, float]) -> dict[str, float]:
        return {name: float(self._dtype.type(rate)) for name, rate in rates.items()}

    def build(self, params: Mapping[str, Any]) -> Any:
        """The optimizer for these parameters; a NamedOptimizers where there are several."""
        optims = self.spec.training.optimizers
        if self.several:
            return named_optimizers(optims, self.schedules, params)
        if self.given is not None:
            return make_optimizer(lambda: self.given, params)
        return build_optimizer(next(iter(optims.values())), next(iter(self.schedules.values()), None), params)

    def set(self, optimizer: Any, opt_state: OptState, rates: float | Mapping[str, float]) -> OptState:
        """The state with other rates on the epoch clock: one number, or one by optimizer."""
        if isinstance(rates, Mapping):
            self.held |= self._as_held(rates)
            assert isinstance(optimizer, NamedOptimizers)
            return optimizer.set_rates(opt_state, rates)
        return set_rate(opt_state, rates)

    def read(self, opt_state: OptState) -> None:
        """Take over the rates of a restored state: what the epoch clock set is then known again."""
        if self.several:
            self.held = {name: float(opt_state.inner[name].rate) for name in self.held}

    def used(self, step: np.ndarray) -> dict[str, np.ndarray] | None:
        """The rate of every named optimizer at the updates `step` (int [n], 1 for the first); None for a single one."""
        if not self.several:
            return None
        count = np.maximum(step - 1, 0)
        found = {}
        for name, held in self.held.items():
            schedule = self.schedules.get(name)
            rates = np.full(len(step), held) if schedule is None else np.asarray(jax.vmap(schedule)(count))
            found[name] = np.broadcast_to(rates, len(step)).astype(np.float64)
        return found

    def topology(self, like: Any) -> dict[str, Any]:
        """Plain description of the optimizers' state, compared on resume."""
        kinds = {name: optim.kind for name, optim in self.spec.training.optimizers.items()}
        only = "optax" if self.given is not None else next(iter(kinds.values()))
        kind = {"kinds": kinds} if self.several else {"kind": only}
        return {**kind, "state": describe(like)}
