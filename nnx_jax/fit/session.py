"""From a model and a specification to a finished run: check, open, resume, loop, score, finish."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

from nnx_jax.core.errors import ConfigError, NnxError, RunExistsError, nearest
from nnx_jax.core.spec import Spec
from nnx_jax.fit.call import TrainCall
from nnx_jax.fit.continuing import (
    check_engine,
    check_plan,
    check_reach,
    planned_length,
    restore,
    resume_mode,
    resume_status,
    source_point,
)
from nnx_jax.fit.group import check_callbacks, check_same, told_to_all
from nnx_jax.fit.history import open_records, with_journal
from nnx_jax.fit.job import Job, metric_direction, register_hooks
from nnx_jax.loop.builtin import EarlyStopping, build_callback
from nnx_jax.loop.callbacks import CallbackList
from nnx_jax.loop.components import Components
from nnx_jax.loop.hook_events import HookEvents
from nnx_jax.loop.lifecycle import LoopPlan, LoopResult, StartPoint, train
from nnx_jax.loop.monitors import MonitorTracker
from nnx_jax.loop.progress import make_progress, shown
from nnx_jax.loop.writer_only import made_where_written
from nnx_jax.objectives.objective import listener
from nnx_jax.params.run import RunSpec
from nnx_jax.runs.attempt import recorded
from nnx_jax.runs.resume import ResumePoint, probe
from nnx_jax.runs.run import NNRun
from nnx_jax.runs.store import RunStore
from nnx_jax.runs.together import share_point
from nnx_jax.spmd.world import World


def fit(model: Any, spec: RunSpec, call: TrainCall) -> NNRun:
    """Train `model` as `spec` says, or continue where the same run was interrupted; return the finished run.

    Raises:
        RunExistsError: the run is finished already; nothing is changed.
        Interrupted: a signal stopped it; its last finished update is committed.
        ConfigError, DataError, ModelError, CheckpointError, NonFiniteError: see their classes.
        ProcessGroupError, DistributedFailure: several processes do not go together, or another one failed.
    """
    world = model.framework.open_world(call.distributed, "NNModel.train" if spec.trainer is None else "Trainer.train")
    with told_to_all(world):
        return _fit_with_hooks(model, spec, call, world)


def _fit_with_hooks(model: Any, spec: RunSpec, call: TrainCall, world: World) -> NNRun:
    if not world.alone:
        if model.framework.has_mesh and not spec.mesh:
            spec = spec.replace(mesh={"data": -1})
        call = call if world.writes else dataclasses.replace(call, progress=make_progress(quiet=True))
    events = register_hooks(model, spec, call.hooks)
    events.global_rank = world.rank
    named = [hook for hook in events.registry if isinstance(hook, Spec)]
    if len(named) > len(spec.hooks):
        spec = spec.replace(hooks=(*spec.hooks, *(hook for hook in named if not _among(hook, spec.hooks))))
    with events:
        return _fit(model, spec, call, events, world)


def _fit(model: Any, spec: RunSpec, call: TrainCall, events: HookEvents, world: World) -> NNRun:
    job = world.agree("checks before the run", lambda: model.framework.prepare(model, spec, events, call, world))
    again = model.interrupted_run(spec, call, events.registry.identity(known=spec.hooks))
    if again is not None and probe(call.runs_dir, again) is not None:
        job.run_id = again
    given = world.agree("callbacks are made", lambda: made_where_written(call.callbacks, world.writes))
    callbacks = CallbackList([*(build_callback(params) for params in spec.callbacks), *given])
    check = lambda: _check_callbacks(job, callbacks, world)  # noqa: E731
    watches = lambda: callbacks.watched_each  # noqa: E731  # what only the writer makes may watch updates there alone
    callbacks.watched_each = any(world.agree_telling("checks of callbacks", check, watches)[1])
    check_same(world, job, _plain_spec(spec), callbacks, model.framework.around())
    parts = (*callbacks.callbacks, call.train_step_fn, call.eval_step_fn, call.objective)
    components = Components(parts, call.components)
    source = call.start or share_point(world, call.runs_dir, lambda: source_point(spec, call.runs_dir))
    if source is not None:
        check_engine(spec, source, model.framework)
        check_plan(spec, source, call.runs_dir)
        check_reach(job, source)
    if not world.writes:
        callbacks.leave_to_writer()
    spec = with_journal(spec, call, callbacks)
    with RunStore.open(
        call.runs_dir,
        job.run_id,
        {"id": job.run_id, **_plain_spec(spec)},
        job.engine.columns(),
        overwrite=spec.training.overwrite_existing,
        keep=spec.checkpoint.keep,
        journal=spec.history,
        wait_seconds=call.wait_seconds,
        resume=resume_status(spec, source, components),
        world=world,
        make_writer=model.framework.make_writer,
    ) as store:
        if store.status == "finished":
            raise RunExistsError(
                f"run {job.run_id} in {store.paths.root} is finished; load it with NNRun.load, or train another one: "
                "change the configuration, give a salt, or set train.overwrite_existing",
                run_id=job.run_id,
            )
        if store.ignored:
            call.progress.message(f"ignored, no commit stands behind them: {', '.join(store.ignored)}")
        try:
            with recorded(store, call.provenance, source):
                store.committer.prepare()
                result = _loop(model, job, store, source, callbacks, components, call, events, world)
                _finish(job, store, result)
            model.transformed(callbacks.transforms)
        except BaseException:
            with contextlib.suppress(NnxError):
                store.committer.drain()  # a second signal may have cut the wait for a commit in flight
            if store.committer.last is None and not callbacks.transforms:
                job.engine.undo()  # nothing has happened, to the model neither
            if job.engine.wrote:
                model.interrupt(job.run_id, spec.training.seed)
            model.transformed(callbacks.transforms)
            if store.status == "fresh" and store.committer.last is None and not store.paths.attempt.exists():
                store.abandon()  # nothing was committed: leave nothing behind
            raise
    run = world.agree("the run is read", lambda: NNRun.load(job.run_id, call.runs_dir))
    call.progress.message(f"Run saved to {shown(run.path)}")
    return run


def _loop(
    model: Any,
    job: Job,
    store: RunStore,
    source: ResumePoint | None,
    callbacks: CallbackList,
    components: Components,
    call: TrainCall,
    events: HookEvents,
    world: World,
) -> LoopResult:
    spec, engine, train_params = job.spec, job.engine, job.spec.training
    tracker = MonitorTracker(train_params.monitor, metric_direction(spec))
    state, start = engine.start(), StartPoint()
    point, mode = (store.point, "stateful") if store.point is not None else (source, resume_mode(spec, source))
    if point is not None:
        found, held = point, state
        state, start = world.agree("restore", lambda: restore(job, held, found, mode, tracker, model.framework))
        call.progress.message(f"continues {point.run_id}@{point.name}: epoch {start.epoch}, step {start.step}")
    end, steps = planned_length(spec, source)
    if store.point is not None:  # wherever the source stands by now, this run keeps the length it began with
        end, steps = store.point.host["length"]["end_epoch"], store.point.host["length"]["max_steps"]
    plan = LoopPlan(
        spec=spec,
        engine=engine,
        state=state,
        store=store,
        callbacks=callbacks,
        components=components,
        tracker=tracker,
        progress=call.progress,
        start=start,
        end_epoch=end,
        max_steps=steps,
        clock=job.schedules.clock,
        schedules={name: schedule.at for name, schedule in job.schedules.updates.items()},
        model=model,
        after_update=listener(call.objective),
        check_counts=None if engine.owns_windows else job.schedules.check_counts,
        hooks=events if len(events.registry) else None,
        records=open_records(store, callbacks),
        world=world,
        geometry=job.geometry,
    )
    return train(plan)


def _among(hook: Any, hooks: Sequence[Any]) -> bool:
    return any(hook is other for other in hooks)


def _finish(job: Job, store: RunStore, result: LoopResult) -> None:
    """Score the test split once, then mark the run finished.

    A run that a callback ended inside an epoch is what its last commit holds: its state now is scored by nobody, and
    without a commit there is nothing to finish.
    """
    if store.committer.last is None:
        return
    test = job.engine.evaluate(result.state, "test") if result.stopped_at is None else None
    values = dict(result.values)
    if test is not None:
        values.update({f"test_{name}": value for name, value in test.values.items()})
    artifact = {"status": "finished", "epoch": result.epoch, "step": result.step}
    if result.stopped_at is not None:
        artifact["stopped_at_update"] = result.stopped_at
    for split in ("train", "val", "test"):
        head = f"{split}_"
        found = {name.removeprefix(head): values[name] for name in sorted(values) if name.startswith(head)}
        artifact[split] = {
            name: value if value == value and abs(value) != float("inf") else None for name, value in found.items()
        }
    store.finish(artifact)


def _check_callbacks(job: Job, callbacks: CallbackList, world: World) -> None:
    _check_monitors(job, callbacks)
    if not world.alone:
        check_callbacks(callbacks)


def _check_monitors(job: Job, callbacks: CallbackList) -> None:
    """Check that the run's monitor, and every EarlyStopping with one of its own, watch a value this run records.

    A step of the user's own measures what it returns. A validation of the user's own may return anything, so what is
    watched there is asked for when it is called.

    Raises:
        ConfigError: with the names there are.
    """
    engine = job.engine
    legal = [f"train_{name}" for name in ("loss", *engine.metric_names)]
    if "val" in engine.feeds:
        legal += [f"val_{name}" for name in ("loss", *engine.score_names)]
    stopping = [each for each in callbacks.callbacks if isinstance(each, EarlyStopping) and each.monitor is not None]
    watched = [("EarlyStopping watches", "", each.monitor) for each in stopping]
    watched.insert(0, ("it follows", f"{job.spec.block}.monitor", job.spec.training.monitor))
    for who, path, monitor in watched:
        name = "" if monitor is None else f"{monitor.split}_{monitor.metric}"
        if monitor is not None and monitor.split == "val" and "val" in engine.feeds and engine.eval_step is not None:
            engine.watched += (monitor.metric,)
        elif name and name not in legal:
            message = f"{who} '{name}', which this run does not record{nearest(name, legal)}"
            raise ConfigError(message, path=path)
    for callback in stopping:
        callback.direction = metric_direction(job.spec, callback.monitor)


def _plain_spec(spec: RunSpec) -> dict[str, Any]:
    """Return the configuration as `run.yaml` keeps it; datasets made in Python are kept by their hash alone."""
    try:
        return spec.state(environment=True)
    except ConfigError:
        if spec.data is None:
            raise
    return {**spec.replace(data=None).state(environment=True), "data_identity": spec.data.identity(spec.training.seed)}
