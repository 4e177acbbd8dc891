"""Optimizers of named models: their configuration, one optimizer over all of them, and the acts a step is made of."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from nnx_jax.core.errors import ConfigError, nearest
from nnx_jax.optim.build import Optimizer, OptState, make_optimizer, optimizer_names
from nnx_jax.optim.epochs import PlateauSchedule
from nnx_jax.optim.named import NamedOptimizers, set_rates
from nnx_jax.optim.schedules import SCHEDULES, make_schedule
from nnx_jax.optim.specs import build_optimizer
from nnx_jax.params.optim import OPTAX_NAMES, NNOptimParams

_RATE_NAMES = ("learning_rate", "lr", "max_lr")
_NOT_HERE = ("grad_clip_norm", "accumulate_grad_batches")
PLATEAU = "reduce_on_plateau"


@dataclass(frozen=True)
class OptimizerConfig:
    """One model's optimizer and the schedule of its rate; wrong settings are refused here, before anything is built.

    Attributes:
        optimizer_cls: a kind of `NNOptimParams` ("adamw", with that class's defaults), or an optax factory
            (`optax.adamw`, with optax's).
        optimizer_kwargs: its settings; the rate is `learning_rate`, or `lr`.
        scheduler_cls: a kind of schedule ("cosine"), an optax schedule factory (`optax.exponential_decay`; its
            `init_value` is the rate unless given), or "reduce_on_plateau". Schedules advance with committed updates
            only; a plateau moves after validations.
        scheduler_kwargs: its settings.
        scheduler_metric_adapter: which value of the validation's summary a plateau follows: a key, or a function of the
            summary; default "total_loss".

    Raises:
        ConfigError: (a ValueError) naming the setting.
    """

    optimizer_cls: str | Callable[..., Any]
    optimizer_kwargs: Mapping[str, Any] = field(default_factory=dict)
    scheduler_cls: str | Callable[..., Any] | None = None
    scheduler_kwargs: Mapping[str, Any] = field(default_factory=dict)
    scheduler_metric_adapter: str | Callable[[Mapping[str, Any]], float] | None = None

    def __post_init__(self) -> None:
        rate, settings = self._split()
        self._build(rate, settings, None, {"w": jax.ShapeDtypeStruct((1, 1), jnp.float32)}, trial=True)
        if self.scheduler_cls is None:
            if self.scheduler_kwargs or self.scheduler_metric_adapter is not None:
                given = "scheduler_kwargs" if self.scheduler_kwargs else "scheduler_metric_adapter"
                raise ConfigError(f"{given} is given without a schedule; name one in scheduler_cls")
            return
        if rate is None or callable(rate):
            raise ConfigError("a schedule needs an optimizer with a learning_rate that is a number")
        if self.scheduler_metric_adapter is not None and not self.follows_metric:
            raise ConfigError(f"scheduler_metric_adapter is for {PLATEAU}; the other schedules follow no value")
        self._check_schedule(rate)

    @property
    def rate(self) -> float | None:
        """The rate at the start; None for an optimizer that knows its own."""
        rate = self._split()[0]
        return None if rate is None or callable(rate) else float(rate)

    @property
    def follows_metric(self) -> bool:
        """The schedule moves after a validation, by a value of it."""
        return self.scheduler_cls == PLATEAU or self.scheduler_cls is PlateauSchedule

    def build(self, params: Mapping[str, Any], horizon: int | None = None) -> Optimizer:
        """The optimizer for these parameters (path -> array or shape); `horizon` is the planned number of updates."""
        rate, settings = self._split()
        return self._build(rate, settings, self.schedule(horizon), params)

    def schedule(self, horizon: int | None = None) -> Callable[[Any], Any] | None:
        """Count of committed updates -> rate; None for a rate that stays, or that a plateau sets."""
        rate = self._split()[0]
        if self.scheduler_cls is not None and not self.follows_metric:
            return self._schedule(float(rate), horizon)
        return rate if callable(rate) else None

    def plateau(self) -> PlateauSchedule | None:
        """A fresh plateau schedule, where the config has one."""
        return PlateauSchedule(self.rate or 0.0, **self.scheduler_kwargs) if self.follows_metric else None

    def metric(self, summary: Mapping[str, Any]) -> float:
        """The value a plateau follows.

        Raises:
            KeyError: the summary has no such value.
        """
        adapter = self.scheduler_metric_adapter or "total_loss"
        if callable(adapter):
            return float(adapter(summary))
        if adapter not in summary:
            raise KeyError(
                f"the plateau follows {adapter!r}, which the validation does not give{nearest(adapter, summary)}"
            )
        return float(summary[adapter])

    def state(self) -> dict[str, Any]:
        """The config as plain values, functions by their name."""
        return {
            "optimizer": _named(self.optimizer_cls),
            "settings": {name: _named(value) for name, value in self.optimizer_kwargs.items()},
            "schedule": _named(self.scheduler_cls),
            "schedule_settings": {name: _named(value) for name, value in self.scheduler_kwargs.items()},
        }

    # -- parts -------------------------------------------------------------------------------------------------

    def _split(self) -> tuple[Any, dict[str, Any]]:
        """(rate, the other settings)."""
        settings = dict(self.optimizer_kwargs)
        given = [name for name in _RATE_NAMES if name in settings]
        if len(given) > 1:
            raise ConfigError(f"the rate is given twice, as {' and '.join(given)}; write one of them")
        rate = settings.pop(given[0]) if given else None
        if rate is not None and not callable(rate) and (isinstance(rate, bool) or not isinstance(rate, int | float)):
            raise ConfigError(f"{given[0]} is {rate!r}; give a number, or an optax schedule")
        return rate, settings

    def _build(
        self, rate: Any, settings: dict[str, Any], schedule: Any, params: Mapping[str, Any], *, trial: bool = False
    ) -> Optimizer:
        number = 0.0 if rate is None or callable(rate) else float(rate)
        if isinstance(self.optimizer_cls, str):
            wrong = [name for name in settings if name in _NOT_HERE]
            if wrong:
                raise ConfigError(f"{wrong[0]} is not the optimizer's; use GradientClipHook, GradientAccumulationHook")
            own = {"max_lr": number} if rate is not None else {}
            fields = dict(settings)
            if self.optimizer_cls in OPTAX_NAMES and "options" not in fields:
                known = ("weight_decay", "decay_mask", "param_groups")
                options = {name: fields.pop(name) for name in list(fields) if name not in known}
                fields["options"] = options
            spec = NNOptimParams(kind=self.optimizer_cls, **own, **fields)
            if trial:
                spec = spec.replace(decay_mask="all", param_groups=())  # patterns are checked against real parameters
            return build_optimizer(spec, schedule, params)
        if not callable(self.optimizer_cls):
            legal = nearest("", optimizer_names())
            raise ConfigError(f"optimizer_cls is {self.optimizer_cls!r}; give an optax factory or a name{legal}")
        self._check_factory(rate, number, settings)
        return make_optimizer(self.optimizer_cls, params, rate=number, schedule=schedule, options=settings)

    def _check_factory(self, rate: Any, number: float, settings: dict[str, Any]) -> None:
        """Call the factory once, so that what it cannot take is told now."""
        factory: Any = self.optimizer_cls
        name = getattr(factory, "__name__", type(factory).__name__)
        parameters = inspect.signature(factory).parameters
        if "learning_rate" not in parameters:
            if rate is not None:
                raise ConfigError(f"{name} takes no learning_rate; leave the rate out")
            given = settings
        else:
            if rate is None and parameters["learning_rate"].default is inspect.Parameter.empty:
                raise ConfigError(f"{name} needs a learning_rate in optimizer_kwargs")
            given = {**settings, "learning_rate": number}
        try:
            made = factory(**given)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{name} does not take {settings}: {error}") from error
        if not (hasattr(made, "init") and hasattr(made, "update")):
            raise ConfigError(
                f"{name} returned {type(made).__name__}; an optax factory returns a GradientTransformation"
            )

    def _check_schedule(self, rate: float) -> None:
        kwargs, which = dict(self.scheduler_kwargs), self.scheduler_cls
        try:
            if self.follows_metric:
                PlateauSchedule(rate, **kwargs)
            elif isinstance(which, str):
                legal = [name for name in inspect.signature(make_schedule).parameters][3:]
                if which not in SCHEDULES:
                    raise ConfigError(f"there is no schedule {which!r}{nearest(which, SCHEDULES)}")
                for name in kwargs:
                    if name not in legal:
                        raise ConfigError(f"schedule '{which}' has no setting {name!r}{nearest(name, legal)}")
                make_schedule(which, rate, 1 << 30, **kwargs)
            else:
                self._schedule(rate, None)
        except (TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"schedule {_named(which)} does not take {kwargs}: {error}") from error

    def _schedule(self, rate: float, horizon: int | None) -> Any:
        kwargs, which = dict(self.scheduler_kwargs), self.scheduler_cls
        if isinstance(which, str):
            return make_schedule(which, rate, horizon, **kwargs)
        if not callable(which):
            raise ConfigError(f"scheduler_cls is {which!r}; give an optax schedule factory or a name")
        if "init_value" in inspect.signature(which).parameters:
            kwargs.setdefault("init_value", rate)
        made = which(**kwargs)
        if not callable(made):
            raise ConfigError(f"{_named(which)} returned {type(made).__name__}; a schedule is a function of the count")
        return made


def of_model(named: Mapping[str, Any], model: str) -> dict[str, Any]:
    """The entries of one model, under their full paths."""
    return {path: value for path, value in named.items() if path.startswith(f"{model}.")}


def as_configs(given: Any, models: Sequence[str]) -> dict[str, OptimizerConfig]:
    """Optimizer configs by model: one config is the single model's, or "main"'s.

    Raises:
        ConfigError: a name that is no model, or several optimizers for one model.
    """
    if isinstance(given, OptimizerConfig):
        given = {"main" if "main" in models else models[0]: given}
        if len(models) > 1 and "main" not in models:
            raise ConfigError(
                f"one optimizer config and several models; write {{name: config}} for {', '.join(models)}"
            )
    if not isinstance(given, Mapping) or not given:
        raise ConfigError("optimizer_configs is empty; give an OptimizerConfig, or {model name: OptimizerConfig}")
    found: dict[str, OptimizerConfig] = {}
    for name, config in given.items():
        if name not in models:
            raise ConfigError(f"optimizer_configs names {name!r}, which is no model{nearest(name, models)}")
        if isinstance(config, list | tuple) and len(config) == 1:
            config = config[0]
        if not isinstance(config, OptimizerConfig):
            raise ConfigError(
                f"optimizer_configs[{name!r}] is {type(config).__name__}; give one OptimizerConfig a model"
            )
        found[name] = config
    return {name: found[name] for name in models if name in found}


# -- the acts of a step, each by itself ----------------------------------------------------------------------------


def setup_optimizers(
    configs: Mapping[str, OptimizerConfig], params: Mapping[str, Any], horizon: int | None = None
) -> tuple[NamedOptimizers, dict[str, PlateauSchedule]]:
    """Build what the configs say for these parameters: one optimizer over all, and the plateaus by model.

    Args:
        params: path -> array or its shape, paths beginning with the model's name.
        horizon: planned updates, for schedules that end with the run.

    Raises:
        ConfigError: a model whose parameters are all frozen, or a setting that does not fit its parameters.
    """
    parts: dict[str, Optimizer] = {}
    owned: dict[str, tuple[str, ...]] = {}
    for name, config in configs.items():
        own = of_model(params, name)
        if not own:
            raise ConfigError(f"model {name!r} has an optimizer but no parameter to train; drop its config")
        parts[name], owned[name] = config.build(own, horizon), tuple(own)
    plateaus = {name: made for name, config in configs.items() if (made := config.plateau()) is not None}
    return NamedOptimizers(parts, owned), plateaus


def zero_gradients(grads: Any) -> Any:
    """The same tree of zeros: what a window starts from. (A step's own accumulator is zeroed inside the step.)"""
    return jax.tree.map(jnp.zeros_like, grads)


def step_optimizers(optimizer: Any, grads: Any, opt_state: OptState, params: Any) -> tuple[Any, OptState]:
    """One update, as the step makes it when no hook vetoes: (new params, new state). Pure; the arguments stay.

    Schedules of the rate advance with it, because they read the count in `opt_state`.
    """
    return optimizer.update(grads, opt_state, params)


def step_lr_schedulers(
    configs: Mapping[str, OptimizerConfig],
    plateaus: Mapping[str, PlateauSchedule],
    summary: Mapping[str, Any],
    opt_state: OptState,
) -> OptState:
    """Move the plateaus by a validation's summary and return the state with their rates.

    The other schedules are functions of the count of committed updates and need no step.

    Raises:
        KeyError: the summary lacks the value a plateau follows; nothing has moved.
    """
    values = {name: configs[name].metric(summary) for name in plateaus}
    rates = {name: plateau.step(values[name]) for name, plateau in plateaus.items()}
    return set_rates(opt_state, rates) if rates else opt_state


def _named(value: Any) -> Any:
    """A value as it can be written down: a function by its dotted name."""
    if callable(value):
        name = getattr(value, "__qualname__", type(value).__qualname__)
        return f"{getattr(value, '__module__', '')}:{name}"
    return value
