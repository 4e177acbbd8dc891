"""The `optimizer_config` of a TrainingLoop: a name with optax's arguments, or an optax transformation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optax

from nnx_jax.core.errors import ConfigError, nearest
from nnx_jax.optim.optax_schedules import OptaxSchedule
from nnx_jax.params.optim import NNOptimParams, optimizer_kinds

DEFAULT: Mapping[str, Any] = {"name": "adamw", "lr": 3e-4}
"""What no `optimizer_config`, or an empty one, means."""
RATES = ("lr", "learning_rate", "max_lr")
_RENAMED = {"clip_norm": "grad_clip_norm", "grad_clip_norm": "grad_clip_norm", "mask": "decay_mask"}
_FIELDS = ("weight_decay", "momentum", "nesterov", "betas", "eps", "decay_mask", "param_groups", "options")


def read_optimizer(config: Any, accumulate: int = 1) -> tuple[NNOptimParams, OptaxSchedule | None, Any]:
    """Return (the optimizer's configuration, its schedule if the rate is one, the transformation if it is given).

    Args:
        config: a mapping `{"name": ..., "lr": ..., ...}`, an `NNOptimParams`, an `optax.GradientTransformation`, or
            None. `lr` is a number, or a mapping `{"name": "cosine", **arguments of optax's schedule}`.
        accumulate: microbatches of an update.

    Raises:
        ConfigError: (a ValueError) an unknown name or option, two rates, or none.
        TypeError: something else.
    """
    if isinstance(config, optax.GradientTransformation):
        return NNOptimParams(kind="sgd", max_lr=1.0, momentum=0.0, accumulate_grad_batches=accumulate), None, config
    if isinstance(config, NNOptimParams):
        if accumulate != 1:
            config = config.replace(accumulate_grad_batches=accumulate)
        return config, None, None
    if not (config is None or isinstance(config, Mapping)):
        raise TypeError(f"optimizer_config is {type(config).__name__}; give a mapping or an optax transformation")
    given = dict(config or DEFAULT)
    name = given.pop("name", given.pop("kind", None))
    if name not in optimizer_kinds():
        known = ", ".join(sorted(optimizer_kinds()))
        told = f"Unknown optimizer {name!r}{nearest(name, optimizer_kinds())} (there are: {known})"
        raise ConfigError(told, path="optimizer_config.name")
    rate, schedule = _rate(given)
    fields: dict[str, Any] = {"kind": name, "max_lr": rate, "accumulate_grad_batches": accumulate}
    options = dict(given.pop("options", None) or {})
    own = name in ("sgd", "adam", "adamw", "lion")
    if own and ({"b1", "b2"} & set(given)):
        given["betas"] = (given.pop("b1", 0.9), given.pop("b2", 0.99 if name == "lion" else 0.999))
    if name == "sgd":
        given.setdefault("momentum", 0.0)  # optax's default, which is none
    for key, value in given.items():
        field = _RENAMED.get(key, key)
        if field in ("grad_clip_norm", *_FIELDS):
            fields[field] = value
        elif own:
            legal = ["name", *RATES[:2], *_RENAMED, *_FIELDS]
            told = f"{name} has no option {key!r}{nearest(key, legal)}"
            raise ConfigError(told, path=f"optimizer_config.{key}")
        else:
            options[key] = value
    if options:
        fields["options"] = options
    return NNOptimParams(**fields), schedule, None


def _rate(given: dict[str, Any]) -> tuple[float, OptaxSchedule | None]:
    """Take the rate out of a configuration: a number, and the schedule where there is one.

    Raises:
        ConfigError: (a ValueError) no rate, or several.
    """
    names = [name for name in RATES if name in given]
    if len(names) != 1:
        what = "no rate is given" if not names else f"{' and '.join(names)} are given"
        raise ConfigError(f"{what}; write one of them: lr", path="optimizer_config.lr")
    rate = given.pop(names[0])
    if not isinstance(rate, Mapping):
        return rate, None
    options = dict(rate)
    kind = options.pop("name", options.pop("kind", None))
    schedule = OptaxSchedule(str(kind), options)
    return max(schedule.at(0), 1e-12), schedule
