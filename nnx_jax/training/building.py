"""From a strategy to the engine that trains it, and to the place in the data where its next run begins."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from nnx_jax.core.errors import ConfigError
from nnx_jax.core.hook_registry import HookRegistry
from nnx_jax.engines.hook_plan import plan_hooks
from nnx_jax.hooks.finetune import left_out
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.run import RunSpec
from nnx_jax.params.train import CheckpointParams, NNTrainParams
from nnx_jax.training.engine import StrategyEngine
from nnx_jax.training.feed import Pushed, StrategyFeed
from nnx_jax.training.models import NamedModels, parameter_names


def build_engine(strategy: Any, feed: StrategyFeed | Pushed, horizon: int | None) -> StrategyEngine:
    """The engine of a strategy's models, optimizers, loss and hooks, for batches like the feed's.

    Args:
        horizon: planned updates, for schedules that end with the run.
    """
    models, registry = strategy.models, strategy.registry
    resting = tuple(name for name in models if name not in strategy.configs)
    module = NamedModels(models, strategy.training_fn, single=strategy.single_model, resting=resting)
    names = parameter_names(models)
    frozen, still = left_out(registry, names)
    frozen = frozen.union(name for name in names if name.partition(".")[0] in resting)
    spec = run_spec(strategy)
    plan = plan_hooks(
        registry,
        spec,
        taps=strategy.events.taps,
        world=strategy.world,
        model_keys=tuple(models),
        observer=lambda stage, ctx: strategy.events.observe(stage, ctx),
    )
    freeze = tuple(sorted(frozen))
    return StrategyEngine(
        spec, module, strategy.loss, feed, strategy.configs, freeze=freeze, still=still, horizon=horizon, hooks=plan
    )


def run_spec(strategy: Any) -> RunSpec:
    """What the loop wants to know of a run, as far as a strategy has it."""
    config = strategy.validation_config
    train = NNTrainParams(
        n_epochs=1,
        seed=strategy.seed,
        optim=NNOptimParams(),
        dispatch=strategy.dispatch,
        eval_every_n_steps=None if config is None else config.every_n_steps,
        eval_every_n_epochs=1,
        save_phase_checkpoints=False,
    )
    return RunSpec(train=train, checkpoint=CheckpointParams(every_n_epochs=None))


def place(now: Mapping[str, Any], known: bool, length: int | None) -> tuple[int, int]:
    """(epoch, microbatch) at which a loader of this length begins.

    Args:
        now: "step", "batch", "epoch" and "epoch_batch" so far.
        known: "epoch_batch" was given, and is not to be found out.

    Raises:
        ConfigError: the counters fit no place of it.
    """
    epoch, batch = now["epoch"], now["epoch_batch"]
    if not length:
        return epoch, batch
    progress = now["batch"] or now["step"]
    if not known:
        batch = progress - epoch * length
    if batch < 0 or epoch * length + batch != progress:
        raise ConfigError(
            f"the restart counters are inconsistent: {progress} microbatches are done, but epoch_count={epoch} and "
            f"epoch_step_count={batch} with {length} batches an epoch make {epoch * length + batch}"
        )
    more, batch = divmod(batch, length)
    return epoch + more, batch


def planned(registry: HookRegistry, epochs: int | None, length: int | None) -> int:
    """Updates that so many passes give when nothing is vetoed."""
    passes, batches = epochs or 1, length or 1
    window = next((hook for hook in registry if getattr(hook, "exclusive_key", "") == "accumulation"), None)
    if window is None:
        return passes * batches
    if getattr(window, "on_partial", None) == "flush":
        return passes * math.ceil(batches / window.k)
    return math.ceil(passes * batches / window.k)


def target(strategy: Any, length: int | None) -> tuple[int | None, int | None]:
    """(epoch to end before, update to end at) of a run over a loader of this length."""
    if strategy.num_steps is not None:
        return None, strategy.num_steps
    if strategy.epoch_step_modifier == 1.0:
        return strategy.num_epochs, None
    updates = planned(strategy.registry, strategy.num_epochs, length)
    return None, math.ceil(updates * strategy.epoch_step_modifier)


def training_function(given: Any, single: bool) -> Callable[..., Any]:
    """The forward pass of a strategy: what is given, or a single model's own call.

    Raises:
        ConfigError: none is given for several models, or it is not called with (model, batch).
    """
    if given is None:
        if not single:
            raise ConfigError("several models need a training_fn: a function (models, batch) -> predictions")
        return call_with_x
    try:
        inspect.signature(given).bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"training_fn is called as training_fn(model, batch), which it does not take: {error}"
        ) from None
    return given


def call_with_x(model: Any, batch: Mapping[str, Any]) -> Any:
    """The predictions of a model that takes the batch's column x."""
    return model(batch["x"])


def asked(manager: Any, name: str) -> Any:
    """An attribute of a distributed manager, or what its method of that name returns; 0 without either."""
    found = getattr(manager, name, 0)
    return found() if callable(found) else found


def check_devices(devices: Any, hooks: Iterable[Any]) -> None:
    """A strategy trains on the default device, with a DDPHook on several; raise ConfigError for anything else."""
    if devices is None:
        return
    splits = any(hasattr(hook, "devices_for") for hook in hooks)
    if len(devices) != 1 and not (splits and len(devices)):
        raise ConfigError(
            f"{len(devices)} devices given; a strategy trains on one, and with DDPHook() among its hooks on several"
        )
    local = jax.local_devices()
    if len(devices) > 1:
        strange = [device for device in devices if device not in local]
        if strange or len(set(devices)) < len(devices):
            raise ConfigError(f"devices has {strange or list(devices)}; give jax.local_devices(), or some, each once")
        return
    default: Any = getattr(jax.config, "jax_default_device", None)
    if default is None or isinstance(default, str):
        default = jax.local_devices(backend=default)[0]
    if devices[0] not in (default, str(default), default.platform):
        raise ConfigError(
            f"devices is [{devices[0]}], but a strategy trains on JAX's default device, {default}; leave devices out, "
            "or set jax_default_device"
        )


def world_size(strategy: Any, hooks: Iterable[Any]) -> int:
    """What an update counts for in `global_step_count`: the manager's processes; without one, a DDPHook's devices."""
    manager = strategy.distributed_manager
    if manager is not None:
        return int(asked(manager, "world_size"))
    return max((len(hook.devices_for(strategy)) for hook in hooks if hasattr(hook, "devices_for")), default=1)


def workers(world: int, step: int, everywhere: int | None) -> int:
    """The number of processes or devices, each of which makes every update.

    Raises:
        ConfigError: the updates made by all of them together are not that many times those made here.
    """
    if everywhere is not None and everywhere != step * world:
        raise ConfigError(
            f"global_step_count is {everywhere}, but step_count={step} with {world} workers make {step * world}; "
            "leave global_step_count out, or give both"
        )
    return world


def checked(hooks: Any) -> list[Any]:
    if isinstance(hooks, str) or not isinstance(hooks, Iterable):
        raise ConfigError(f"hooks is {type(hooks).__name__}; give a list")
    return list(hooks)


def count(name: str, value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"{name} is {value!r}; give a whole number from 1")
    return value


def length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None
