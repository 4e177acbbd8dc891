"""The `optimizer_config` of a TrainingLoop: a name with optax's arguments, or an optax transformation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nnx_jax.core.errors import ConfigError, nearest
from nnx_jax.core.spec import FrozenDict
from nnx_jax.params.optim import NNOptimParams, optimizer_kinds

if TYPE_CHECKING:
    from nnx_jax.optim.optax_schedules import OptaxSchedule

DEFAULT: Mapping[str, Any] = FrozenDict({"name": "adamw", "lr": 3e-4})
"""What no `optimizer_config`, or an empty one, means."""
RATES = ("lr", "learning_rate", "max_lr")
PLACE = "optimizer_config"
_OWN = ("sgd", "adam", "adamw", "lion")
_RENAMED = {"clip_norm": "grad_clip_norm", "mask": "decay_mask"}
_FIELDS = ("weight_decay", "momentum", "nesterov", "betas", "eps", "grad_clip_norm", "decay_mask", "param_groups")
_OPTAX: Mapping[str, Mapping[str, Any]] = {
    "sgd": {"momentum": 0.0},
    "adamw": {"weight_decay": 1e-4, "decay_mask": "all"},
    "lion": {"decay_mask": "all"},
}
"""Where optax's defaults are others than those of an NNOptimParams."""


def settle_optimizer(config: Any) -> Any:
    """Return an `optimizer_config` as a loop keeps it: a mapping, or an optax transformation.

    Raises:
        TypeError: something else.
    """
    if config is None or (isinstance(config, Mapping) and not config):
        return DEFAULT
    if isinstance(config, NNOptimParams):
        return _as_mapping(config)
    if isinstance(config, Mapping):
        return dict(config)
    if callable(getattr(config, "init", None)) and callable(getattr(config, "update", None)):
        return config
    raise TypeError(f"{PLACE} is {type(config).__name__}; give a mapping or an optax transformation")


def _accumulates(transformation: Any) -> bool:
    """Whether an optax transformation makes one step of several gradients by itself."""
    import jax.numpy as jnp
    import optax

    return isinstance(transformation.init({"": jnp.zeros(())}), optax.MultiStepsState)


def _as_mapping(params: NNOptimParams) -> dict[str, Any]:
    """An NNOptimParams with every setting written out, since a mapping's defaults are optax's."""
    if params.accumulate_grad_batches != 1:
        told = f"says accumulate_grad_batches={params.accumulate_grad_batches}; give accumulate= to the loop instead"
        raise ConfigError(told, path=PLACE)
    fields = {name: getattr(params, name) for name in _FIELDS if getattr(params, name) is not None}
    groups = [group.state() for group in params.param_groups]
    return {"name": params.kind, "lr": params.max_lr, **fields, "param_groups": groups, **params.options}


def read_optimizer(config: Any, accumulate: int = 1) -> tuple[NNOptimParams, OptaxSchedule | None, Any]:
    """Return (the optimizer's configuration, its schedule if the rate is one, the transformation if it is given).

    Args:
        config: a mapping `{"name": ..., "lr": ..., ...}`, an `NNOptimParams`, an `optax.GradientTransformation`, or
            None. `lr` is a number, or a mapping `{"name": "cosine", **arguments of optax's schedule}`. Besides the
            optimizer's own arguments, by optax's names and with optax's defaults, it takes `clip_norm` (of the whole
            gradient), `mask` (which parameters decay: "all", "auto" or glob patterns) and `param_groups`.
        accumulate: microbatches of an update.

    Raises:
        ConfigError: (a ValueError) an unknown name or option, two rates, or none.
        TypeError: something else.
    """
    config = settle_optimizer(config)
    if not isinstance(config, Mapping):
        if accumulate > 1 and _accumulates(config):
            told = f"is optax.MultiSteps, which accumulates, and so does accumulate={accumulate}; use one of them"
            raise ConfigError(told, path=PLACE)
        return NNOptimParams(kind="sgd", max_lr=1.0, momentum=0.0, accumulate_grad_batches=accumulate), None, config
    given = dict(config)
    name = given.pop("name", given.pop("kind", None))
    if name not in optimizer_kinds():
        known = ", ".join(sorted(optimizer_kinds()))
        close = nearest(name, optimizer_kinds())
        told = f"Unknown optimizer {name!r}{close if 'did you mean' in close else ''} (there are: {known})"
        raise ConfigError(told, path=f"{PLACE}.name")
    rate, schedule = _rate(given)
    fields: dict[str, Any] = {"kind": name, "max_lr": rate, "accumulate_grad_batches": accumulate}
    params = _built({**fields, **_OPTAX.get(name, {}), **_settings(name, given)})
    if schedule is not None and any(group.max_lr is not None for group in params.param_groups):
        told = "a group's max_lr says nothing beside a schedule; give lr_scale, a factor on the schedule's rate"
        raise ConfigError(told, path=f"{PLACE}.param_groups")
    _check_options(params)
    return params, schedule, None


def _settings(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The settings besides name and rate, by the fields of an NNOptimParams.

    Raises:
        ConfigError: (a ValueError) an option that the optimizer does not have.
    """
    fields: dict[str, Any] = {}
    options = dict(given.pop("options", None) or {})
    if name in _OWN and {"b1", "b2"} & set(given):
        given["betas"] = (given.pop("b1", 0.9), given.pop("b2", 0.99 if name == "lion" else 0.999))
    for key, value in given.items():
        field = _RENAMED.get(key, key)
        if field in fields:
            raise ConfigError(f"{key} and {field} say the same; write one of them", path=f"{PLACE}.{key}")
        if field in _FIELDS and (name in _OWN or field not in ("momentum", "nesterov", "betas", "eps")):
            fields[field] = value
        elif name in _OWN:
            legal = ["name", *RATES[:2], *_RENAMED, *_FIELDS]
            raise ConfigError(f"{name} has no option {key!r}{nearest(key, legal)}", path=f"{PLACE}.{key}")
        else:
            options[key] = value
    return {**fields, "options": options} if options else fields


def _built(fields: Mapping[str, Any]) -> NNOptimParams:
    try:
        return NNOptimParams(**fields)
    except ConfigError as error:
        told = str(error.args[0]).replace("NNOptimParams.max_lr", "lr").replace("NNOptimParams.", "")
        raise ConfigError(told, path=PLACE) from None


def _check_options(params: NNOptimParams) -> None:
    """Build the optimizer for a parameter that stands for all, so that optax's own refusals come now.

    Raises:
        ConfigError: (a ValueError) an option that it does not have.
    """
    import jax
    import jax.numpy as jnp

    from nnx_jax.optim.specs import build_optimizer

    like = {"weight": jax.ShapeDtypeStruct((2, 2), jnp.float32)}
    alone = params.replace(param_groups=(), decay_mask="auto")
    try:
        jax.eval_shape(build_optimizer(alone, None, like).init, like)
    except (ConfigError, TypeError, ValueError) as error:
        told = str(error.args[0]) if isinstance(error, ConfigError) else f"{params.kind} does not take this: {error}"
        raise ConfigError(told, path=PLACE) from None


def _rate(given: dict[str, Any]) -> tuple[float, OptaxSchedule | None]:
    """Take the rate out of a configuration: a number, and the schedule where there is one.

    Raises:
        ConfigError: (a ValueError) no rate, or several.
    """
    names = [name for name in RATES if name in given]
    if len(names) != 1:
        what = "no rate is given" if not names else f"{' and '.join(names)} are given"
        raise ConfigError(f"{what}; write one of them: lr", path=f"{PLACE}.lr")
    rate = given.pop(names[0])
    if not isinstance(rate, Mapping):
        return rate, None
    from nnx_jax.optim.optax_schedules import OptaxSchedule

    options = dict(rate)
    kind = options.pop("name", options.pop("kind", None))
    schedule = OptaxSchedule(str(kind), options)
    return max(schedule.at(0), 1e-12), schedule
