"""The Flax engine as a strategy uses it: named models and optimizers, batches from a loader or handed over."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_jax.core.errors import ModelError
from nnx_jax.engines.flax import FlaxEngine
from nnx_jax.loop.engine import Evaluation, Poll, Snapshot, Span
from nnx_jax.optim.build import describe
from nnx_jax.params.run import RunSpec
from nnx_jax.step import state as step_state
from nnx_jax.step.plan import HookPlan
from nnx_jax.step.programs import Carry
from nnx_jax.training.feed import ENDLESS, Pushed, StrategyFeed
from nnx_jax.training.losses import StrategyLoss
from nnx_jax.training.models import ModelCopies, NamedModels
from nnx_jax.training.optimizers import OptimizerConfig, setup_optimizers


class StrategyEngine(FlaxEngine):
    """Trains the models of one strategy.

    Args:
        configs: optimizer of each trained model.
        freeze, still, hooks: see FlaxEngine.
        horizon: planned updates, for schedules that end with the run.

    Windows go on over an epoch's end unless their hook says "flush".
    """

    most_rows = 1024

    def __init__(
        self,
        spec: RunSpec,
        module: NamedModels,
        loss: StrategyLoss,
        feed: StrategyFeed | Pushed,
        configs: Mapping[str, OptimizerConfig],
        *,
        freeze: tuple[str, ...] = (),
        still: frozenset[str] = frozenset(),
        horizon: int | None = None,
        hooks: HookPlan | None = None,
    ) -> None:
        self.configs, self.horizon = dict(configs), horizon
        self.plateaus: dict[str, Any] = {}
        untyped: Any = loss
        super().__init__(
            spec, module, untyped, {"train": feed}, freeze=freeze, still=still, hooks=hooks, nonfinite="ignore"
        )
        window = [hook for hook in hooks.update if hook.exclusive_key == "accumulation"] if hooks is not None else []
        self.carries = bool(window) and getattr(window[0], "on_partial", None) != "flush"

    # -- data --------------------------------------------------------------------------------------------------

    def use(self, feed: StrategyFeed | Pushed) -> None:
        """Take batches from here from now on."""
        self.feed = self.feeds["train"] = feed
        self.n_batches = self._epoch_batches()
        self._batches = None

    def _epoch_batches(self) -> int:
        return self.feed.n_batches or ENDLESS

    def run_span(self, state: Carry, span: Span, poll: Poll) -> tuple[Carry, int]:
        """As FlaxEngine does; a batch that was handed over is run alone."""
        if not isinstance(self.feed, Pushed):
            return super().run_span(state, span, poll)
        if span.first_batch == 0:
            self.programs.start_epoch(state, span.epoch)
        if self.programs.room(state) < self._rows(1):
            self._early.append(self.programs.read_records(state, check=False))
        self.programs.step(state, self.place.batch(self.feed.current), closes=span.closes)
        poll(1)
        return state, 1

    def batch(self, epoch: int, place: int) -> Any:
        """Columns of the microbatch to come, or of the last one."""
        if isinstance(self.feed, Pushed):
            return {name: _read_only(column) for name, column in self.feed.current.items()}
        return super().batch(epoch, place)

    # -- building ----------------------------------------------------------------------------------------------

    def _optimizer(self, params: Mapping[str, Any]) -> Any:
        optimizer, self.plateaus = setup_optimizers(self.configs, params, self.horizon)
        return optimizer

    def _untaken(self, batch: Mapping[str, Any], error: Exception) -> ModelError:
        columns = ", ".join(f"{name} {spec.dtype}{list(spec.shape)}" for name, spec in batch.items())
        return ModelError(f"training_fn does not take a batch of {columns}: {error}")

    def _check_tail(self) -> None:
        """Batches of a loader are taken as they come."""

    @cached_property
    def topology(self) -> dict[str, Any]:
        """Plain description of what a stored state fits."""
        like = jax.eval_shape(self.optimizer.init, self.pure.params)
        found = {"engine": "strategy", "precision": self.spec.precision, "accumulate": self.accumulate}
        settings = {name: config.state() for name, config in self.configs.items()}
        return {**found, "optimizers": settings, "state": describe(like)}

    # -- state -------------------------------------------------------------------------------------------------

    def start_at(self, *, batch: int, step: int, epoch: int, epoch_batch: int) -> Carry:
        """A first state whose counters stand where an earlier training ended."""
        carry = self.start()
        counters = np.array(self.programs.state(carry).counters)
        counters[[step_state.BATCH, step_state.STEP, step_state.EPOCH]] = batch, step, epoch
        counters[step_state.EPOCH_BATCH] = epoch_batch
        self.programs.put(carry, dataclasses.replace(self.programs.state(carry), counters=jnp.asarray(counters)))
        carry.batch, self.rows.counters = batch, counters
        return carry

    def take_over(self, old: Mapping[str, Any]) -> Carry:
        """A state with what another engine of these models held: every array whose name and shape are the same."""
        carry = self.start()
        fresh = self.programs.named(carry)
        kept = {name: old[name] for name, leaf in fresh.items() if name in old and old[name].shape == leaf.shape}
        return self.restore(carry, {**fresh, **kept})

    def next_rates(self, state: Carry) -> dict[str, float]:
        """The rate of every model's next update."""
        inner = self.programs.state(state).opt_state.inner
        found = {}
        for name, config in self.configs.items():
            schedule = config.schedule(self.horizon)
            found[name] = float(inner[name].rate if schedule is None else schedule(inner[name].count))
        return found

    def put_optimizer(self, state: Carry, opt_state: Any) -> None:
        """Put another optimizer state of the same shapes."""
        train = self.programs.state(state)
        self.programs.put(state, dataclasses.replace(train, opt_state=opt_state))

    def snapshot(self, state: Carry, epoch: int, batch: int) -> Snapshot:
        """The state's arrays by name, and the strategy's own description beside what they fit."""
        position = {"epoch": epoch, "next": batch}
        return Snapshot(self.programs.named(state), position, {**self.topology, "recipe": self.recipe()})

    def evaluate(self, state: Carry, split: str) -> Evaluation | None:
        """A strategy validates by itself."""
        return None

    def look(self, state: Carry, name: str) -> Any:
        """A value for hooks that watch."""
        if name == "models":
            self.trained(state)
            return self.models
        return super().look(state, name)

    def trained(self, state: Carry) -> nnx.Module:
        """Write copies of the state's weights into the models, and remember them."""
        module = super().trained(state)
        self._written = state.batch, _leaves(module)
        return module

    def take_edits(self, state: Carry) -> None:
        """Take over weights that were put into the models since they were brought up to date."""
        if self._written is None or self._written[0] != state.batch:
            return
        now = _leaves(self.module)
        if len(now) != len(self._written[1]) or any(a is not b for a, b in zip(now, self._written[1], strict=True)):
            self.absorb(state)
            self._written = state.batch, now

    _written: tuple[int, list[Any]] | None = None

    models: Mapping[str, Any] = {}
    recipe: Callable[[], Mapping[str, Any]] = dict
    """Both are set by the strategy."""

    def parts(self) -> dict[str, Any]:
        """Optimizers by model, and their schedules."""
        schedules = [self.plateaus.get(name, config.scheduler_cls) for name, config in self.configs.items()]
        return {"optimizers": [self.configs[name] for name in self.configs], "lr_schedulers": schedules}

    def copies(self) -> Any:
        """What an average makes its model from."""
        return ModelCopies(self.models)


def _leaves(module: nnx.Module) -> list[Any]:
    return jax.tree.leaves(nnx.state(module))


def _read_only(column: Any) -> Any:
    view = column.view()
    view.flags.writeable = False
    return view
