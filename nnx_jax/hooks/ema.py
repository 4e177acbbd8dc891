"""Exponential moving average of one model's weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from pydantic import Field, field_validator

from nnx_jax.core.errors import ConfigError, HookError, StepError
from nnx_jax.core.registry import register
from nnx_jax.core.stages import TrainingStage
from nnx_jax.hooks.base import StatefulHookSpec


class UnknownModelError(HookError, KeyError):
    """No model is called as the hook says."""


class NoAverageError(StepError, RuntimeError):
    """The averages were asked for before there are any."""


class Models(Protocol):
    """The models of a run, as the hook needs them to hand out an averaged one."""

    def copy(self, key: str) -> Any:
        """A copy of the model that shares no array with it."""
        ...

    def write(self, key: str, module: Any, params: Mapping[str, Any], buffers: Mapping[str, Any]) -> None:
        """Put copies of these arrays, named as in the training state, into a module of that model's structure."""
        ...


class AveragedModel:
    """What `get_averaged_model` returns; called, it calls `module`.

    Attributes:
        module: a copy of the model with the averaged weights; it shares no memory with the one that is trained.
        n_averaged: updates of the average so far.
    """

    def __init__(self, module: Any, n_averaged: int) -> None:
        self.module, self.n_averaged = module, n_averaged

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the averaged model."""
        return self.module(*args, **kwargs)


@register("ema")
class EMAHook(StatefulHookSpec):
    """Averages the weights of one model: e <- decay e + (1 - decay) w, after updates that really happened.

    The first average is a copy of the weights, so nothing needs a correction for its start. Validation and prediction
    see the averages only once there are any.

    Attributes:
        model_key: the model; a single one is "main".
        decay: share of the old average that is kept.
        update_every: averages at updates whose number is a multiple of this.
        start_step: number of the first update that may be averaged.
        use_buffers: average what the model itself keeps (BatchNorm statistics) too; else it is copied.
        num_updates: averages counted as made already.

    Slot: {"average": the parameters, "buffers": the model's own state, "updates": int32 averages made, "held": int32,
    1 once there is an average}.
    """

    priority = 50

    model_key: str = "main"
    decay: float = Field(default=0.999, ge=0, lt=1)
    update_every: int = Field(default=1, ge=1)
    start_step: int = Field(default=0, ge=0)
    use_buffers: bool = True
    num_updates: int = Field(default=0, ge=0)

    _models: Models | None = None
    _module: Any = None

    @field_validator("model_key")
    @classmethod
    def _stripped(cls, value: str) -> str:
        if not value.strip():
            raise ValueError(f"got {value!r}; expected the name of a model, 'main' for a single one")
        return value.strip()

    # -- in the step ---------------------------------------------------------------------------------------------------

    def init_slot(self, params: Mapping[str, Any], model_state: Any, model_keys: Sequence[str]) -> Any:
        """Room for the averages of this hook's model.

        Raises:
            UnknownModelError: (a KeyError) there is no model of this name.
        """
        return {
            "average": self._own(params, model_keys),
            "buffers": self._own(model_state, model_keys) if isinstance(model_state, Mapping) else {},
            "updates": np.int32(self.num_updates),
            "held": np.int32(0),
        }

    def _own(self, named: Mapping[str, Any], model_keys: Sequence[str]) -> dict[str, Any]:
        """The leaves of this hook's model."""
        if self.model_key not in (model_keys or ("main",)):
            known = ", ".join(sorted(model_keys or ("main",)))
            raise UnknownModelError(f"EMAHook.model_key is '{self.model_key}', but the models are: {known}")
        return {n: v for n, v in named.items() if not model_keys or n.startswith(f"{self.model_key}.")}

    def __call__(self, ctx: Any, stage: TrainingStage, will_skip: Any) -> tuple[Any, Any]:
        """Average the weights the update left behind."""
        if stage is not TrainingStage.AFTER_OPTIMIZER_STEP or will_skip is True:
            return True, ctx.loss
        xp, slot, done = ctx.xp, ctx.state, ctx.step_count + 1
        fires = xp.logical_not(will_skip) & (done >= self.start_step) & (done % self.update_every == 0)
        old = {"average": slot["average"], "buffers": slot["buffers"]}
        new = ctx.when(fires, lambda: self._moved(ctx, old, slot["held"] == 0), old)
        updates, held = slot["updates"] + fires, xp.where(fires, 1, slot["held"])
        ctx.state = {**new, "updates": updates, "held": held}
        return True, ctx.loss

    def _moved(self, ctx: Any, old: Mapping[str, Any], first: Any) -> dict[str, Any]:
        xp = ctx.xp

        def average(mean: Any, now: Any) -> Any:
            if not xp.issubdtype(mean.dtype, xp.floating):
                return now
            return xp.astype(xp.where(first, now, self.decay * mean + (1 - self.decay) * now), mean.dtype)

        params = {name: ctx.params[name] for name in old["average"]}
        buffers = {name: ctx.model_state[name] for name in old["buffers"]}
        if self.use_buffers:
            buffers = ctx.tree_map(average, old["buffers"], buffers)
        return {"average": ctx.tree_map(average, old["average"], params), "buffers": buffers}

    # -- for the host --------------------------------------------------------------------------------------------------

    def averages(self, slot: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
        """(parameters, buffers) of a slot by name, or None before the first average; reads one number."""
        return (slot["average"], slot["buffers"]) if int(slot["held"]) else None

    def attach(self, models: Models) -> None:
        """Called by the run: where averaged models are made from."""
        self._models, self._module = models, None

    def get_averaged_model(self) -> AveragedModel:
        """The model with the averaged weights.

        `modify_ema_methods()` of the copied module is called once, before any weights are put into it.

        Raises:
            NoAverageError: (a RuntimeError) no run has started, or no update was averaged yet.
        """
        if self._slot is None or self._models is None:
            raise NoAverageError("EMAHook has no averages: it takes part in no run yet; train first")
        slot = self._slot.read()
        found = self.averages(slot)
        if found is None:
            raise NoAverageError(
                f"EMAHook has no averages yet: the first update averaged is number {max(self.start_step, 1)} or later "
                f"and a multiple of {self.update_every}; train further"
            )
        if self._module is None:
            self._module = self._models.copy(self.model_key)
            adapt: Callable[[], Any] | Any = getattr(self._module, "modify_ema_methods", None)
            if callable(adapt):
                adapt()
        self._models.write(self.model_key, self._module, *found)
        return AveragedModel(self._module, int(slot["updates"]))

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Fields, `num_updates`, and `averaged_model_state` (arrays by name) once there is one."""
        state = {name: getattr(self, name) for name in type(self).model_fields}
        if self._slot is None:
            return {**state, **(self._pending or {})}
        slot = self._slot.read()
        state["num_updates"] = int(slot["updates"])
        if int(slot["held"]):
            state["averaged_model_state"] = {**slot["average"], **slot["buffers"]}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a stored state: in the run there is, and in the next if this one does not go on.

        Missing fields are not compared, a missing count is kept, and missing averages are none.

        Raises:
            ConfigError: (a ValueError) a field differs from this hook's; names both values.
        """
        for name in type(self).model_fields:
            if name != "num_updates" and name in state and state[name] != getattr(self, name):
                raise ConfigError(
                    f"EMAHook checkpoint conflict: {name} is {state[name]!r} in the checkpoint and "
                    f"{getattr(self, name)!r} here; build the hook with the checkpoint's value, or start without it"
                )
        kept = {name: state[name] for name in ("num_updates", "averaged_model_state") if name in state}
        self._load(kept)

    def _merged(self, slot: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
        """The slot with a stored state in it."""
        updates = np.int32(state.get("num_updates", slot["updates"]))
        stored = state.get("averaged_model_state")
        if stored is None:
            return {**slot, "updates": updates, "held": np.int32(0)}
        wanted = {*slot["average"], *slot["buffers"]}
        if set(stored) != wanted:
            name = sorted(set(stored) ^ wanted)[0]
            where = "the checkpoint" if name in stored else "the model"
            raise ConfigError(f"EMAHook checkpoint conflict: only {where} has '{name}'; load it into the same model")
        return {
            "average": {name: stored[name] for name in slot["average"]},
            "buffers": {name: stored[name] for name in slot["buffers"]},
            "updates": updates,
            "held": np.int32(1),
        }
