"""From a model and a specification to a torch engine, checked and built before anything is on the disk."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from nnx_jax.core.errors import ConfigError
from nnx_jax.engines.feeds import check_group, data_info, make_feeds, sizes_for
from nnx_jax.engines.hook_plan import carries, window_length
from nnx_jax.engines.work import name_of
from nnx_jax.fit.call import TrainCall, checked
from nnx_jax.fit.job import Job, batches_of, check_modes, check_updates, identify, metric_direction, register_hooks
from nnx_jax.fit.schedules import make_schedules
from nnx_jax.hooks.finetune import left_out
from nnx_jax.loop.hook_events import HookEvents
from nnx_jax.params.run import RunSpec
from nnx_jax.spmd.world import ALONE, World
from nnx_jax.torch.allowed import as_ddp, check_alike, check_alone, check_net
from nnx_jax.torch.compiled import Compiled
from nnx_jax.torch.ddp import Exchange
from nnx_jax.torch.engine import TorchEngine
from nnx_jax.torch.hooks.engine import HookedEngine
from nnx_jax.torch.hooks.plan import plan_torch
from nnx_jax.torch.hooks.samplers import hook_of, with_samplers, with_settings
from nnx_jax.torch.loaders import look
from nnx_jax.torch.losses import build_loss
from nnx_jax.torch.own_step import delegates


def prepare(
    model: Any,
    spec: RunSpec,
    events: HookEvents | None = None,
    call: TrainCall | None = None,
    world: World = ALONE,
    *,
    device: torch.device,
) -> Job:
    """Check and build everything that needs no run directory; see `nnx_jax.fit.job.prepare`.

    Args:
        device: where the model is trained.

    Raises:
        ConfigError, DataError, ModelError: whatever is wrong, before anything is written.
    """
    check_modes(spec)
    check_supported(spec)
    given = checked(call, spec)
    events = events or register_hooks(model, spec)
    run_id = identify(model, spec, events, call)
    parallel = hook_of(events.registry)
    feeds = with_samplers(make_feeds(spec), spec, parallel, world)
    check_group(feeds, world)
    look(feeds["train"], device)
    loss = build_loss(model.loss)
    module = model.build(sizes_for(loss, data_info(feeds)), spec.training.seed)
    events.setup({"main": module})
    names = {f"main.{name}": name for name, _ in module.named_parameters()}
    frozen, still = (frozenset(names[name] for name in part) for part in left_out(events.registry, names))
    hooks = plan_torch(
        events.registry,
        spec,
        taps=events.taps,
        observer=lambda stage, ctx: events.observe(stage, ctx),
        world=world.size,
        own_step=given.step is not None,
    )
    if given.step is not None and hooks is not None:
        raise ConfigError(
            f"hooks take no part in a step of your own ({name_of(given.step)}); do it in the step", path="hooks"
        )
    spec = spec.with_training(spec.training.with_window(window_length(hooks, spec)))
    sync = None
    if not world.alone:
        assert call is not None
        settings = with_settings(as_ddp(call.distributed), parallel)
        check_alike(world, settings, compile=model.compile)
        precision = spec.precision if hooks is None else hooks.precision
        check_alone(spec, given, settings, journal=call.history, precision=precision, compile=model.compile)
        check_net(module, settings)
        sync = Exchange(world, settings)
    events.world = world.size
    freeze = (*model.frozen_patterns, *frozen)
    several = spec.trainer is not None  # whose steps always make their own updates
    owns = given.step is None or (
        not several and delegates(spec, given.step, module, feeds["train"], device=device, freeze=freeze)
    )
    schedules = make_schedules(
        spec,
        batches_of(spec, feeds["train"]),
        direction=None if spec.training.monitor is None else metric_direction(spec),
        carries=carries(hooks),
        owns_windows=owns,
    )
    make: Any = TorchEngine if hooks is None else partial(HookedEngine, hooks=hooks)
    engine = make(
        spec,
        module,
        loss,
        feeds,
        schedules=schedules.updates,
        schedule_state=schedules.state(spec),
        net_state=model.net_state,
        freeze=freeze,
        still=still,
        nonfinite=None if given.objective is None else given.objective.policy(spec.training.nonfinite),
        objective=given.objective,
        train_step=given.step,
        eval_step=given.validation,
        world=world,
        device=device,
        sync=sync,
    )
    if model.compile is not None:
        engine.net.call = Compiled(module, model.compile)
    if given.objective is not None:
        given.objective.check_run(spec)
    check_updates(spec, given, engine)
    geometry = None if world.alone else {"processes": world.size, "mesh": {}}
    return Job(spec, engine, schedules, run_id, geometry)


def check_supported(spec: RunSpec) -> None:
    """Refuse what only compiled programs over a mesh have.

    Raises:
        ConfigError: naming the key and what to write.
    """
    training = spec.training
    if spec.mesh or spec.sharding:
        told = "a mesh is of the engine 'flax'; under torch every process has one device, started by torchrun"
        raise ConfigError(f"got {dict(spec.mesh)}, but {told}", path="mesh" if spec.mesh else "sharding")
    if training.reduction != "fast":
        told = "the canonical order of sums is of the engine 'flax'; write reduction: fast"
        raise ConfigError(f"got '{training.reduction}', but {told}", path=f"{spec.block}.reduction")
    if training.dispatch in ("span", "staged"):
        told = "torch computes one microbatch at a time; write auto, step or eager"
        raise ConfigError(f"got '{training.dispatch}', but {told}", path=f"{spec.block}.dispatch")
