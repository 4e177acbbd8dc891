"""Where a run starts: afresh, from its own last commit, or from another run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nnx_jax.core.errors import ConfigError, ResumePointError
from nnx_jax.engines.flax import WEIGHTS
from nnx_jax.fit.framework import Framework
from nnx_jax.fit.job import Job
from nnx_jax.loop.committing import restored
from nnx_jax.loop.components import Components
from nnx_jax.loop.lifecycle import StartPoint
from nnx_jax.loop.monitors import MonitorTracker
from nnx_jax.nets.opened import ENGINES
from nnx_jax.params.net import NNParams
from nnx_jax.params.run import RunSpec
from nnx_jax.runs.geometry import check_geometry
from nnx_jax.runs.leaves import describe
from nnx_jax.runs.provenance import ResumeStatus
from nnx_jax.runs.resume import ResumePoint, find_point, require_same
from nnx_jax.runs.run import NNRun
from nnx_jax.runs.transforms import training_arrays

PARAMETERS = ("params/", "frozen/")
"""What the names of a network's parameters begin with, whether they are trained or not."""


def planned_length(spec: RunSpec, source: ResumePoint | None) -> tuple[int | None, int | None]:
    """Return (epoch to end before, update to end at), counted from the beginning of the first run of the line."""
    end, steps = spec.training.n_epochs, spec.training.max_steps
    if source is None or spec.training.resume_epochs != "additional":
        return end, steps
    if end is not None:
        end += _next_epoch(source.host)
    if steps is not None and resume_mode(spec, source) == "stateful":
        steps += source.step
    return end, steps


def check_plan(spec: RunSpec, source: ResumePoint, runs_dir: str | Path) -> None:
    """Check that `resume_epochs: planned` continues the very plan of its source.

    Raises:
        ConfigError: weights only, another length, or a plan that is done.
    """
    if spec.training.resume_epochs != "planned":
        return
    path = f"{spec.block}.resume_epochs"
    if resume_mode(spec, source) == "weights_only":
        raise ConfigError("'planned' needs the whole state, not weights_only; write additional", path=path)
    planned = NNRun.load(source.run_id, runs_dir).state.get(spec.block, {})
    for name in ("n_epochs", "max_steps"):
        now, then = getattr(spec.training, name), planned.get(name)
        if now != then:
            message = f"'planned' needs the length of run {source.run_id}: {name} was {then}, is {now}"
            raise ConfigError(message, path=path)
    done = source.host["position"]["epoch"]
    if (spec.training.n_epochs or done + 1) <= done or (spec.training.max_steps or source.step + 1) <= source.step:
        raise ConfigError(f"the plan of run {source.run_id} is done at {source.name}; write additional", path=path)


def check_reach(job: Job, source: ResumePoint) -> None:
    """Check a schedule up to where a continued run ends, which its own plan does not tell."""
    if resume_mode(job.spec, source) != "stateful":
        return
    end, steps = planned_length(job.spec, source)
    if end is not None:
        job.schedules.check_epochs(end)
    if steps is None and end is not None:
        window, position = job.engine.accumulate, source.host["position"]
        if job.engine.carries:
            left = ((end - position["epoch"]) * job.engine.n_batches - position["batch"]) // window
        else:
            left = (end - position["epoch"]) * -(-job.engine.n_batches // window) - -(-position["batch"] // window)
        steps = source.step + left
    if steps is not None and job.engine.owns_windows:
        job.schedules.check_updates(steps)


def check_engine(spec: RunSpec, source: ResumePoint, framework: Framework) -> None:
    """Check that what another engine wrote is asked for its weights alone, and that they can be opened.

    Raises:
        ResumePointError: (a ValueError) the whole state, or the weights of a network of the user's own.
    """
    written_by = _engine_of(source, framework)
    if written_by == framework.backend:
        return
    if resume_mode(spec, source) == "stateful":
        raise ResumePointError(
            f"{source.name} of run {source.run_id} holds the training state of the engine '{written_by}'; this run's "
            f"is '{framework.backend}'. Nothing was restored; take the weights alone with resume_mode='weights_only'"
        )
    framework.check_opens(_net_of(source), written_by, f"{source.run_id}@{source.name}")


def restore(
    job: Job, state: Any, point: ResumePoint, mode: str, tracker: MonitorTracker, framework: Framework
) -> tuple[Any, StartPoint]:
    """Put a verified point into the engine; everything is compared before anything is loaded.

    Args:
        framework: of the engine; weights that another one wrote are first brought under its names.
    """
    host, engine = point.host, job.engine
    if mode == "weights_only":
        state = engine.restore(state, _weights(engine.abstract(state), point, framework), weights_only=True)
        return state, StartPoint(epoch=_next_epoch(host))
    check_geometry(host.get("geometry"), job.geometry, elastic=job.spec.elastic, what=point.name)
    _check_optimizers(host["topology"]["optimizer"], engine.topology["optimizer"], point.name)
    require_same(host["topology"], engine.topology, "topology")
    require_same(host["monitor"]["rule"], tracker.rule(), "monitor")
    state = engine.restore(state, training_arrays(point, engine.abstract(state, point.leaves)))
    if job.schedules.clock is not None:
        job.schedules.clock.restore(host["clock"])
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
        updates=host.get("updates", {}),
    )


def _weights(wanted: Mapping[str, Any], point: ResumePoint, framework: Framework) -> Mapping[str, Any]:
    """The weights of a point by the engine's names; those stored as they are `wanted` come placed so.

    Whether a parameter is trained is this run's to say, whatever the run was that stored it.
    """
    stored = {name: (leaf.shape, leaf.dtype) for name, leaf in point.leaves.items()}
    now = {_bare(name): name for name in wanted if name.startswith(PARAMETERS)}
    found: Mapping[str, Any]
    if (written_by := _engine_of(point, framework)) == framework.backend:
        fits = {name: wanted.get(now.get(_bare(name), name)) for name in stored if name.startswith(WEIGHTS)}
        fits = {name: value for name, value in fits.items() if _alike(value, stored[name])}
        found = {name: value for name, value in point.load(stored | fits).items() if name.startswith(WEIGHTS)}
    else:
        source = f"{point.run_id}@{point.name}"
        found = framework.own_arrays(point.load(stored), _net_of(point), written_by, source)
    return {now.get(_bare(n), n) if n.startswith(PARAMETERS) else n: value for n, value in found.items()}


def _bare(name: str) -> str:
    return name.partition("/")[2]


def _engine_of(point: ResumePoint, framework: Framework) -> str:
    """The engine that wrote a point: of two that exchange weights, else this one, which then compares the names."""
    found = point.host["topology"].get("engine")
    return found if found in ENGINES else framework.backend


def _net_of(point: ResumePoint) -> NNParams | None:
    """The built-in network that a point was trained with; None for one of the user's own."""
    state = point.host["topology"]["net"]
    return None if state is None else NNParams.from_state(state)


def _alike(wanted: Any, stored: tuple[Any, Any]) -> bool:
    """An array is stored with the shape and dtype that it is wanted with, if it is."""
    return wanted is not None and describe({"": wanted}) == describe({"": stored})


def _check_optimizers(stored: Mapping[str, Any], wanted: Mapping[str, Any], name: str) -> None:
    """Refuse the state of other optimizers than these, by their names.

    Raises:
        ResumePointError: (a ValueError) naming both sides; nothing is loaded.
    """
    then, now = (tuple(each["kinds"]) if "kinds" in each else None for each in (stored, wanted))
    if then != now:
        told = [f"a Trainer's with {', '.join(n)}" if n else "NNModel.train's only one" for n in (then, now)]
        raise ResumePointError(
            f"{name} holds the state of another set of optimizers: {told[0]}; this run's are {told[1]}. Nothing was "
            "restored; name the same optimizers, or take the weights alone with resume_mode='weights_only'"
        )


def _next_epoch(host: Mapping[str, Any]) -> int:
    return host["position"]["epoch"] + (host["position"]["batch"] > 0)


def source_point(spec: RunSpec, runs_dir: str | Path) -> ResumePoint | None:
    run_id = spec.training.resume_from_run_id
    return None if run_id is None else find_point(runs_dir, f"{run_id}@{spec.training.resume_from_checkpoint}")


def resume_mode(spec: RunSpec, source: ResumePoint | None) -> str:
    if source is None:
        return "fresh"
    return "weights_only" if spec.training.resume_mode == "weights_only" else "stateful"


def resume_status(spec: RunSpec, source: ResumePoint | None, components: Components) -> ResumeStatus:
    if source is None:
        return ResumeStatus()
    stored = source.host["components"] if resume_mode(spec, source) == "stateful" else {}
    names = tuple(components)
    return ResumeStatus(
        mode=resume_mode(spec, source),
        source_run_id=source.run_id,
        source_checkpoint=source.name,
        restored_components=tuple(name for name in names if name in stored),
        fresh_components=tuple(name for name in names if name not in stored),
        source_epoch=source.epoch,
        source_generation=source.generation,
        source_checkpoint_id=source.manifest_sha256,
    )
