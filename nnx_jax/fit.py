"""From a model and a specification to a finished run: check, open, resume, loop, score, finish."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnx_jax.core.errors import ConfigError, NnxError, RunExistsError, nearest
from nnx_jax.core.hook_registry import HookRegistry
from nnx_jax.core.spec import Spec
from nnx_jax.data.loader import LoaderFeed
from nnx_jax.data.pipeline import Feed
from nnx_jax.engines.compile_cache import enable_compile_cache
from nnx_jax.engines.feeds import data_info, make_feeds, sizes_for
from nnx_jax.engines.flax import WEIGHTS, FlaxEngine
from nnx_jax.engines.hook_plan import carries, plan_hooks, window_length
from nnx_jax.engines.nnx_forward import PureModule
from nnx_jax.hooks.finetune import left_out
from nnx_jax.loop.builtin import build_callback
from nnx_jax.loop.callbacks import Callback, CallbackList, EarlyStopping
from nnx_jax.loop.hook_events import HookEvents
from nnx_jax.loop.lifecycle import LoopPlan, LoopResult, StartPoint, restored, train
from nnx_jax.loop.monitors import MonitorTracker
from nnx_jax.loop.progress import Progress
from nnx_jax.loop.records import Rows, history_columns
from nnx_jax.loop.signals import Interrupted
from nnx_jax.objectives.losses import Loss, build_loss
from nnx_jax.objectives.metrics import metric_mode
from nnx_jax.optim.epochs import EpochSchedule, FormulaSchedule
from nnx_jax.optim.schedules import Schedule
from nnx_jax.optim.specs import build_epoch_schedule, build_schedule
from nnx_jax.params.run import RunSpec
from nnx_jax.params.train import MonitorSpec
from nnx_jax.runs.provenance import ResumeStatus
from nnx_jax.runs.resume import ResumePoint, find_point, probe, require_same
from nnx_jax.runs.run import NNRun
from nnx_jax.runs.store import RunStore, remove


@dataclass
class Job:
    """One run ready to start: everything that can be wrong has been checked, and nothing is on the disk yet.

    Attributes:
        spec: the configuration, with the window that a hook decides.
        clock: the schedule on the epoch clock; None on the update clock.
        schedule: the schedule on the update clock; None on the epoch clock.
        run_id: 16 hex digits.
    """

    spec: RunSpec
    engine: FlaxEngine
    clock: EpochSchedule | None
    schedule: Schedule | None
    run_id: str


def register_hooks(model: Any, spec: RunSpec, hooks: Sequence[Any] = ()) -> HookEvents:
    """Return the hooks of the run, those of the configuration first, checked and ready to be entered."""
    return HookEvents(HookRegistry([*spec.hooks, *hooks], owner=model), workflow=model)


def prepare(model: Any, spec: RunSpec, events: HookEvents | None = None) -> Job:
    """Check and build everything that needs no run directory; fires SETUP before anything is built from the network.

    Args:
        model: an NNModel: `build(info, seed)`, `loss`, `identity(seed)` and `frozen_patterns` are asked.
        events: from `register_hooks`; by default the hooks of `spec`.

    Raises:
        ConfigError, DataError, ModelError: whatever is wrong, before anything is compiled or written.
    """
    _check_supported(spec)
    events = events or register_hooks(model, spec)
    run_id = identify(model, spec, events)
    feeds = make_feeds(spec)
    loss: Loss = build_loss(model.loss)
    module = model.build(sizes_for(loss, data_info(feeds)), spec.train.seed)
    events.setup({"main": module})
    observer = lambda stage, ctx: events.observe(stage, ctx)  # noqa: E731
    names = {f"main.{name}": name for name in PureModule(module).params}
    frozen, still = (frozenset(names[name] for name in part) for part in left_out(events.registry, names))
    plan = plan_hooks(events.registry, spec, taps=events.taps, world=events.world, observer=observer)
    spec = _with_window(spec, window_length(plan, spec))
    per_epoch = _batches(spec, feeds["train"])
    clock, schedule = make_schedules(spec, per_epoch, carries=carries(plan))
    engine = FlaxEngine(
        spec,
        module,
        loss,
        feeds,
        schedule=schedule,
        schedule_state=_schedule_state(spec, clock, schedule),
        net_state=model.net_state,
        freeze=(*model.frozen_patterns, *frozen),
        still=still,
        hooks=plan,
    )
    if engine.accumulate > engine.n_batches and not engine.carries:
        warnings.warn(
            f"train.optim.accumulate_grad_batches is {engine.accumulate}, an epoch has {engine.n_batches} batches: "
            "every epoch is one update, divided by what it saw",
            UserWarning,
            stacklevel=2,
        )
    return Job(spec, engine, clock, schedule, run_id)


def identify(model: Any, spec: RunSpec, events: HookEvents) -> str:
    """Return the run's id: the configuration, the network as it is, and hooks that are no configuration."""
    hooks = events.registry.identity(known=spec.hooks)
    return spec.run_id(net=model.identity(spec.train.seed), data=_loader_identity(spec), hooks=hooks)


def _with_window(spec: RunSpec, window: int) -> RunSpec:
    """The specification with the window that an accumulation hook asks for."""
    train = spec.train
    if train.optim.accumulate_grad_batches == window:
        return spec
    optim = train.optim.replace(accumulate_grad_batches=window)
    return spec.replace(train=train.replace(optim=optim))


def _check_supported(spec: RunSpec) -> None:
    """Refuse what this engine would ignore."""
    if spec.backend != "flax":
        raise ConfigError(f"got '{spec.backend}'; this engine is 'flax'", path="backend")
    if spec.train.resume_mode == "weights_only" and spec.train.resume_from_run_id is None:
        message = "'weights_only' takes weights from another run; name it with resume_from_run_id (--from RUN)"
        raise ConfigError(message, path="train.resume_mode")
    if math.prod(spec.mesh.values()) > 1:
        raise ConfigError(f"got {dict(spec.mesh)}; this engine runs on one device, leave it out", path="mesh")


def make_schedules(
    spec: RunSpec, batches: int | None, *, carries: bool = False
) -> tuple[EpochSchedule | None, Schedule | None]:
    """Return (epoch clock, None) or (None, update clock) for the run's schedule."""
    train, scheduler = spec.train, spec.train.scheduler
    if scheduler.clock == "optimizer_update":
        horizon = train.planned_updates(batches, carries=carries)
        schedule = build_schedule(scheduler, train.optim.max_lr, horizon)
        if horizon is not None:
            schedule.check(horizon)
        return None, schedule
    monitor = train.monitor
    mode = None if monitor is None else metric_direction(spec)
    delta = None if monitor is None else monitor.min_delta
    epochs = train.n_epochs
    if epochs is None and train.max_steps is not None and batches is not None:
        updates = -(-batches // train.optim.accumulate_grad_batches)
        epochs = -(-train.max_steps // updates)
    clock = build_epoch_schedule(scheduler, train.optim.max_lr, epochs, monitor_mode=mode, min_delta=delta)
    return clock, None


def metric_direction(spec: RunSpec, monitor: MonitorSpec | None = None) -> Any:
    """Return the better direction of a monitor, by default the run's: its own, the metric's, or "min" for a loss."""
    monitor = monitor or spec.train.monitor
    if monitor is None or (monitor.metric == "loss" and monitor.mode is None):
        return "min"
    declared = {metric.key: metric for metric in spec.model.metrics}
    return monitor.mode or getattr(declared.get(monitor.metric), "mode", None) or metric_mode(monitor.metric)


def fit(
    model: Any,
    spec: RunSpec,
    *,
    callbacks: Sequence[Callback | Callable[..., Any]] = (),
    hooks: Sequence[Any] = (),
    runs_dir: str | Path = "runs",
    wait_seconds: float = 0.0,
    progress: Progress,
) -> NNRun:
    """Train `model` as `spec` says, or continue where the same run was interrupted; return the finished run.

    Raises:
        RunExistsError: the run is finished already; nothing is changed.
        Interrupted: a signal stopped it; its last finished update is committed.
        ConfigError, DataError, ModelError, CheckpointError, NonFiniteError: see their classes.
    """
    enable_compile_cache()
    events = register_hooks(model, spec, hooks)
    named = [hook for hook in events.registry if isinstance(hook, Spec)]
    if len(named) > len(spec.hooks):
        spec = spec.replace(hooks=(*spec.hooks, *(hook for hook in named if not _among(hook, spec.hooks))))
    with events:
        return _fit(model, spec, events, callbacks, runs_dir, wait_seconds, progress)


def _fit(
    model: Any,
    spec: RunSpec,
    events: HookEvents,
    callbacks: Sequence[Callback | Callable[..., Any]],
    runs_dir: str | Path,
    wait_seconds: float,
    progress: Progress,
) -> NNRun:
    job = prepare(model, spec, events)
    again = model.interrupted_run(spec, events.registry.identity(known=spec.hooks))
    if again is not None and probe(runs_dir, again) is not None:
        job.run_id = again
    every = CallbackList([*(build_callback(params) for params in spec.callbacks), *callbacks])
    _check_monitors(job, every)
    source = _source_point(spec, runs_dir)
    if source is not None:
        _check_plan(spec, source, runs_dir)
        _check_reach(job, source)
    columns = history_columns(job.engine.metric_names, validates="val" in job.engine.feeds)
    with RunStore.open(
        runs_dir,
        job.run_id,
        {"id": job.run_id, **_plain_spec(spec)},
        columns,
        overwrite=spec.train.overwrite_existing,
        keep=spec.checkpoint.keep,
        wait_seconds=wait_seconds,
        resume=_resume_status(spec, source, every),
    ) as store:
        if store.status == "finished":
            raise RunExistsError(
                f"run {job.run_id} in {store.paths.root} is finished; load it with NNRun.load, or train another one: "
                "change the configuration, give a salt, or set train.overwrite_existing",
                run_id=job.run_id,
            )
        if store.ignored:
            progress.message(f"ignored, no commit stands behind them: {', '.join(store.ignored)}")
        try:
            store.committer.prepare()
            result = _loop(model, job, store, source, every, progress, events)
            _finish(job, store, result)
        except BaseException:
            with contextlib.suppress(NnxError):
                store.committer.drain()  # a second signal may have cut the wait for a commit in flight
            if store.status == "fresh" and store.committer.last is None:
                remove(store.paths)  # nothing was committed: leave nothing behind
            raise
    return NNRun.load(job.run_id, runs_dir)


def _loop(
    model: Any,
    job: Job,
    store: RunStore,
    source: ResumePoint | None,
    callbacks: CallbackList,
    progress: Progress,
    events: HookEvents,
) -> LoopResult:
    spec, engine, train_params = job.spec, job.engine, job.spec.train
    tracker = MonitorTracker(train_params.monitor, metric_direction(spec))
    state, start = engine.start(), StartPoint()
    point, mode = (store.point, "stateful") if store.point is not None else (source, _mode(spec, source))
    if point is not None:
        state, start = _restore(job, state, point, mode, tracker)
        progress.message(f"continues {point.run_id}@{point.name}: epoch {start.epoch}, step {start.step}")
    end, steps = _length(spec, source)
    if store.point is not None:  # wherever the source stands by now, this run keeps the length it began with
        end, steps = store.point.host["length"]["end_epoch"], store.point.host["length"]["max_steps"]
    plan = LoopPlan(
        spec=spec,
        engine=engine,
        state=state,
        store=store,
        callbacks=callbacks,
        tracker=tracker,
        progress=progress,
        start=start,
        end_epoch=end,
        max_steps=steps,
        clock=job.clock,
        model=model,
        hooks=events if len(events.registry) else None,
        records=Rows(NNRun.load(job.run_id, store.paths.root).records if store.point is not None else ()),
    )
    try:
        return train(plan)
    except Interrupted:
        model.interrupt(job.run_id, spec.train.seed)
        raise


def _length(spec: RunSpec, source: ResumePoint | None) -> tuple[int | None, int | None]:
    """Return (epoch to end before, update to end at), counted from the beginning of the first run of the line."""
    end, steps = spec.train.n_epochs, spec.train.max_steps
    if source is None or spec.train.resume_epochs != "additional":
        return end, steps
    if end is not None:
        end += _next_epoch(source.host)
    if steps is not None and _mode(spec, source) == "stateful":
        steps += source.step
    return end, steps


def _check_plan(spec: RunSpec, source: ResumePoint, runs_dir: str | Path) -> None:
    """Check that `resume_epochs: planned` continues the very plan of its source.

    Raises:
        ConfigError: weights only, another length, or a plan that is done.
    """
    if spec.train.resume_epochs != "planned":
        return
    path = "train.resume_epochs"
    if _mode(spec, source) == "weights_only":
        raise ConfigError("'planned' needs the whole state, not weights_only; write additional", path=path)
    planned = NNRun.load(source.run_id, runs_dir).state.get("train", {})
    for name in ("n_epochs", "max_steps"):
        now, then = getattr(spec.train, name), planned.get(name)
        if now != then:
            message = f"'planned' needs the length of run {source.run_id}: {name} was {then}, is {now}"
            raise ConfigError(message, path=path)
    done = source.host["position"]["epoch"]
    if (spec.train.n_epochs or done + 1) <= done or (spec.train.max_steps or source.step + 1) <= source.step:
        raise ConfigError(f"the plan of run {source.run_id} is done at {source.name}; write additional", path=path)


def _check_reach(job: Job, source: ResumePoint) -> None:
    """Check a schedule up to where a continued run ends, which its own plan does not tell."""
    if _mode(job.spec, source) != "stateful":
        return
    end, steps = _length(job.spec, source)
    if isinstance(job.clock, FormulaSchedule) and end is not None:
        job.clock.schedule.check(end)
    if job.schedule is None:
        return
    if steps is None and end is not None:
        window, position = job.engine.accumulate, source.host["position"]
        if job.engine.carries:
            left = ((end - position["epoch"]) * job.engine.n_batches - position["batch"]) // window
        else:
            left = (end - position["epoch"]) * -(-job.engine.n_batches // window) - -(-position["batch"] // window)
        steps = source.step + left
    if steps is not None:
        job.schedule.check(steps)


def _restore(job: Job, state: Any, point: ResumePoint, mode: str, tracker: MonitorTracker) -> tuple[Any, StartPoint]:
    """Put a verified point into the engine; everything is compared before anything is loaded."""
    host, engine = point.host, job.engine
    if mode == "weights_only":
        weights = {name: value for name, value in point.load_all().items() if name.startswith(WEIGHTS)}
        state = engine.restore(state, weights, weights_only=True)
        return state, StartPoint(epoch=_next_epoch(host))
    require_same(host["topology"], engine.topology, "topology")
    require_same(host["monitor"]["rule"], tracker.rule(), "monitor")
    state = engine.restore(state, point.load(engine.abstract(state)))
    if job.clock is not None:
        job.clock.restore(host["clock"])
    position = host["position"]
    return state, StartPoint(
        epoch=position["epoch"],
        batch=position["batch"],
        step=host["step"],
        totals=restored(host["totals"]),
        components=host["components"],
        monitor=host["monitor"],
        values=restored(host["values"]),
        rate=host["rate"],
        seen=host["seen"],
        stopped=host["stopped"] and point.run_id == job.run_id,
        open_sums=restored(host.get("open", {})),
    )


def _among(hook: Any, hooks: Sequence[Any]) -> bool:
    return any(hook is other for other in hooks)


def _next_epoch(host: Mapping[str, Any]) -> int:
    return host["position"]["epoch"] + (host["position"]["batch"] > 0)


def _finish(job: Job, store: RunStore, result: LoopResult) -> None:
    """Score the test split once, then mark the run finished."""
    test = job.engine.evaluate(result.state, "test")
    values = dict(result.values)
    if test is not None:
        values.update({f"test_{name}": value for name, value in test.values.items()})
    artifact = {"status": "finished", "epoch": result.epoch, "step": result.step}
    for split in ("train", "val", "test"):
        head = f"{split}_"
        found = {name.removeprefix(head): values[name] for name in sorted(values) if name.startswith(head)}
        artifact[split] = {
            name: value if value == value and abs(value) != float("inf") else None for name, value in found.items()
        }
    store.finish(artifact)


def _check_monitors(job: Job, callbacks: CallbackList) -> None:
    """Check that every EarlyStopping with a monitor of its own watches a value this run records.

    Raises:
        ConfigError: with the names there are.
    """
    legal = [f"train_{name}" for name in ("loss", *job.engine.metric_names)]
    if "val" in job.engine.feeds:
        legal += [name.replace("train_", "val_", 1) for name in legal]
    for callback in callbacks.callbacks:
        if isinstance(callback, EarlyStopping) and callback.monitor is not None:
            name = f"{callback.monitor.split}_{callback.monitor.metric}"
            if name not in legal:
                raise ConfigError(
                    f"EarlyStopping watches '{name}', which this run does not record{nearest(name, legal)}"
                )
            callback.direction = metric_direction(job.spec, callback.monitor)


def _source_point(spec: RunSpec, runs_dir: str | Path) -> ResumePoint | None:
    run_id = spec.train.resume_from_run_id
    return None if run_id is None else find_point(runs_dir, f"{run_id}@{spec.train.resume_from_checkpoint}")


def _mode(spec: RunSpec, source: ResumePoint | None) -> str:
    if source is None:
        return "fresh"
    return "weights_only" if spec.train.resume_mode == "weights_only" else "stateful"


def _resume_status(spec: RunSpec, source: ResumePoint | None, callbacks: CallbackList) -> ResumeStatus:
    if source is None:
        return ResumeStatus()
    stored = source.host["components"] if _mode(spec, source) == "stateful" else {}
    names = tuple(callbacks.components())
    return ResumeStatus(
        mode=_mode(spec, source),
        source_run_id=source.run_id,
        source_checkpoint=source.name,
        restored_components=tuple(name for name in names if name in stored),
        fresh_components=tuple(name for name in names if name not in stored),
        source_epoch=source.epoch,
        source_generation=source.generation,
        source_checkpoint_id=source.manifest_sha256,
    )


def _batches(spec: RunSpec, feed: Feed | LoaderFeed) -> int | None:
    steps = spec.train.steps_per_epoch
    return feed.n_batches if steps is None else steps * spec.train.optim.accumulate_grad_batches


def _schedule_state(spec: RunSpec, clock: EpochSchedule | None, schedule: Schedule | None) -> dict[str, Any]:
    described = schedule.state() if schedule is not None else spec.train.scheduler.state()
    return {"clock": spec.train.scheduler.clock, "max_lr": spec.train.optim.max_lr, **described}


def _loader_identity(spec: RunSpec) -> dict[str, Any] | None:
    """Return what the run id knows of loaders: only the name the user gave, since their rows cannot be hashed."""
    return None if spec.train.train_loader is None else {"data_id": spec.train.data_id}


def _plain_spec(spec: RunSpec) -> dict[str, Any]:
    """Return the configuration as `run.yaml` keeps it; datasets made in Python are kept by their hash alone."""
    try:
        return spec.state(environment=True)
    except ConfigError:
        if spec.data is None:
            raise
    return {**spec.replace(data=None).state(environment=True), "data_identity": spec.data.identity(spec.train.seed)}
