"""Job: one run checked and built, before anything is on the disk."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nnx_jax.core.errors import ConfigError
from nnx_jax.core.hook_registry import HookRegistry
from nnx_jax.data.loader import LoaderFeed
from nnx_jax.data.pipeline import Feed
from nnx_jax.engines.feeds import check_group, data_info, make_feeds, sizes_for
from nnx_jax.engines.flax import FlaxEngine
from nnx_jax.engines.hook_plan import CONCRETE, carries, plan_hooks, window_length
from nnx_jax.engines.work import delegates, name_of
from nnx_jax.fit.call import Given, TrainCall, checked
from nnx_jax.fit.schedules import RunSchedules, make_schedules
from nnx_jax.hooks.finetune import left_out
from nnx_jax.loop.hook_events import HookEvents
from nnx_jax.objectives.losses import Loss, build_loss
from nnx_jax.objectives.metrics import metric_mode
from nnx_jax.params.metrics import MetricSpec
from nnx_jax.params.run import RunSpec
from nnx_jax.params.train import MonitorSpec
from nnx_jax.spmd.mesh import make_sharding
from nnx_jax.spmd.world import ALONE, World
from nnx_jax.step.plan import HookPlan


@dataclass
class Job:
    """One run ready to start: everything that can be wrong has been checked, and nothing is on the disk yet.

    Attributes:
        spec: the configuration, with the window that a hook decides.
        run_id: 16 hex digits.
        geometry: processes and devices, as generations hold them; None for one device.
    """

    spec: RunSpec
    engine: Any
    schedules: RunSchedules
    run_id: str
    geometry: dict[str, Any] | None = None


def register_hooks(model: Any, spec: RunSpec, hooks: Sequence[Any] = ()) -> HookEvents:
    """Return the hooks of the run, those of the configuration first, checked and ready to be entered."""
    return HookEvents(HookRegistry([*spec.hooks, *hooks], owner=model), workflow=model)


def prepare(
    model: Any,
    spec: RunSpec,
    events: HookEvents | None = None,
    call: TrainCall | None = None,
    world: World = ALONE,
) -> Job:
    """Check and build everything that needs no run directory; fires SETUP before anything is built from the network.

    Args:
        model: an NNModel: `build(info, seed)`, `loss`, `identity(seed)`, `frozen_patterns` and `framework` are asked.
        events: from `register_hooks`; by default the hooks of `spec`.
        call: what `train` was given beside the configuration; by default nothing.
        world: the processes that train together.

    Raises:
        ConfigError, DataError, ModelError: whatever is wrong, before anything is compiled or written.
    """
    check_modes(spec)
    make_sharding(spec.mesh, rules=spec.sharding)  # refuses devices that are not there
    given = checked(call, spec)
    events = events or register_hooks(model, spec)
    run_id = identify(model, spec, events, call)
    feeds = make_feeds(spec)
    check_group(feeds, world)
    loss: Loss = build_loss(model.loss)
    module = model.build(sizes_for(loss, data_info(feeds)), spec.training.seed)
    events.setup({"main": module})
    observer = lambda stage, ctx: events.observe(stage, ctx)  # noqa: E731
    names = {f"main.{name}": name for name in model.framework.parameters(module)}
    frozen, still = (frozenset(names[name] for name in part) for part in left_out(events.registry, names))
    plan = plan_hooks(
        events.registry,
        spec,
        taps=events.taps,
        observer=observer,
        own_step=given.step is not None,
        adds_rows=loss.by_rows and spec.training.reduction == "fast",
    )
    if given.step is not None:
        _check_beside_step(name_of(given.step), spec, plan)
    events.world = 1 if plan is None else plan.world
    spec = spec.with_training(spec.training.with_window(window_length(plan, spec)))
    freeze = (*model.frozen_patterns, *frozen)
    several = spec.trainer is not None  # whose steps always make their own updates
    owns = given.step is None or (not several and delegates(module, spec, given.step, feeds["train"], freeze=freeze))
    schedules = make_schedules(
        spec,
        batches_of(spec, feeds["train"]),
        direction=None if spec.training.monitor is None else metric_direction(spec),
        carries=carries(plan),
        owns_windows=owns,
    )
    if call is not None and call.schedule is not None:
        schedules = RunSchedules(updates={"main": call.schedule})
    engine = model.framework.engine_class(
        spec,
        module,
        loss,
        feeds,
        schedules=schedules.updates,
        schedule_state=schedules.state(spec),
        net_state=model.net_state,
        freeze=freeze,
        still=still,
        hooks=plan,
        nonfinite=None if given.objective is None else given.objective.policy(spec.training.nonfinite),
        objective=given.objective,
        train_step=given.step,
        eval_step=given.validation,
        world=world,
        optimizer=None if call is None else call.optimizer,
    )
    if given.objective is not None:
        given.objective.check_run(spec)
    check_updates(spec, given, engine)
    return Job(spec, engine, schedules, run_id, _geometry(engine, world))


def check_updates(spec: RunSpec, given: Given, engine: Any) -> None:
    """Look at the updates that a run will make, as its engine is built.

    Raises:
        ConfigError: its length is a number of updates, and it makes none.

    Warns:
        UserWarning: an epoch is too short for a window.
    """
    if spec.training.max_steps is not None and engine.never_updates:
        raise ConfigError(
            f"{name_of(given.step)} reports no update, so max_steps would never be reached; call ctx.report_update(), "
            "or give n_epochs",
            path=f"{spec.block}.max_steps",
        )
    if engine.accumulate > engine.n_batches and not engine.carries:
        warnings.warn(
            f"train.optim.accumulate_grad_batches is {engine.accumulate}, an epoch has {engine.n_batches} batches: "
            "every epoch is one update, divided by what it saw",
            UserWarning,
            stacklevel=3,
        )


def _geometry(engine: FlaxEngine, world: World) -> dict[str, Any] | None:
    """Processes and devices of the run; None for one device."""
    sharding = engine.place.sharding
    if sharding is None:
        return None
    return {"processes": world.size, "mesh": sharding.geometry()["axes"], "sharding": sharding.placing()}


def _check_beside_step(step: str, spec: RunSpec, plan: HookPlan | None) -> None:
    """Refuse what has no place in a step of the user's own.

    Raises:
        ConfigError: naming the step.
    """
    if spec.training.dispatch in CONCRETE:
        message = (
            f"got '{spec.training.dispatch}', but {step} is a step of your own, which is always compiled; write auto"
        )
        raise ConfigError(message, path=f"{spec.block}.dispatch")
    if plan is not None and not plan.empty:
        raise ConfigError(f"hooks take no part in a step of your own ({step}); do it in the step", path="hooks")


def identify(model: Any, spec: RunSpec, events: HookEvents, call: TrainCall | None = None) -> str:
    """Return the run's id: the configuration, the network as it is, and what is given that is no configuration."""
    hooks = events.registry.identity(known=spec.hooks)
    net = model.identity(spec.training.seed, call)
    return spec.run_id(net=net, data=loader_identity(spec), hooks=hooks)


def check_modes(spec: RunSpec) -> None:
    """Refuse what no engine would follow.

    Raises:
        ConfigError: weights of another run, which is not named.
    """
    if spec.training.resume_mode == "weights_only" and spec.training.resume_from_run_id is None:
        message = "'weights_only' takes weights from another run; name it with resume_from_run_id (--from RUN)"
        raise ConfigError(message, path="train.resume_mode")


def metric_direction(spec: RunSpec, monitor: MonitorSpec | None = None) -> Any:
    """Return the better direction of a monitor, by default the run's: its own, the metric's, or "min" for a loss."""
    monitor = monitor or spec.training.monitor
    if monitor is None or (monitor.metric == "loss" and monitor.mode is None):
        return "min"
    metric: Any = {metric.key: metric for metric in spec.model.metrics}.get(monitor.metric)
    known = metric.resolve() if isinstance(metric, MetricSpec) else metric
    return monitor.mode or getattr(known, "mode", None) or metric_mode(monitor.metric)


def batches_of(spec: RunSpec, feed: Feed | LoaderFeed) -> int | None:
    """Return the microbatches of an epoch, None when they cannot be known."""
    steps = spec.training.steps_per_epoch
    return feed.n_batches if steps is None else steps * spec.training.window


def loader_identity(spec: RunSpec) -> dict[str, Any] | None:
    """Return what the run id knows of loaders: only the name the user gave, since their rows cannot be hashed."""
    return None if spec.training.train_loader is None else {"data_id": spec.training.data_id}
