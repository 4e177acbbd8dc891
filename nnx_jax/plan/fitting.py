"""One fit of a plan: refuse, validate, seed, call the factories once, look at what they returned, train."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from nnx_jax.core.errors import ProcessGroupError, UnsafePathError
from nnx_jax.core.fsio import safe_name
from nnx_jax.core.spec import Spec
from nnx_jax.distributed.joined import group_size
from nnx_jax.loop.builtin import build_callback
from nnx_jax.loop.progress import Progress
from nnx_jax.model import NNModel
from nnx_jax.params.callbacks import CallbackParams
from nnx_jax.params.run import RunSpec
from nnx_jax.plan import checks
from nnx_jax.plan.results import Diagnostic, FitResult, PlanError, read_metrics
from nnx_jax.plan.seeding import seeded
from nnx_jax.plan.settings import SPLITS, Settings

SALT = "plan-attempt:"
"""What stands before the attempt in the salt of a fit's run."""


def fit(
    settings: Settings,
    attempt: str | None,
    *,
    runs_dir: str | Path,
    quiet: bool,
    progress: Progress | None,
    wait_seconds: float,
) -> FitResult:
    """Train as `settings` say; see `ExperimentPlan.fit`."""
    refuse_group("ExperimentPlan.fit")
    problems = [*checks.validate(settings), *_attempt_problems(attempt)]
    if problems:
        raise PlanError(problems)
    name = secrets.token_hex(8) if attempt is None else attempt
    planned, _ = checks.read(settings)
    assert planned is not None
    with seeded(planned.train.seed):
        spec, callbacks = _made(settings)
        model = build_model(settings, spec)
        run = model.train(
            spec.train,
            callbacks,
            train_step_fn=settings.train_step_fn,
            eval_step_fn=settings.eval_step_fn,
            salt=f"{SALT}{name}",
            components=settings.components,
            objective=settings.objective,
            provenance=settings.provenance,
            history=settings.history,
            hooks=[hook.replace() if isinstance(hook, Spec) else hook for hook in settings.hooks],
            data=spec.data,
            checkpoint=settings.checkpoint,
            mesh=settings.mesh,
            sharding=settings.sharding,
            elastic=settings.elastic,
            runs_dir=runs_dir,
            wait_seconds=wait_seconds,
            quiet=quiet,
            progress=progress,
        )
    return FitResult(model, run, read_metrics(run), name)


def build_model(settings: Settings, spec: RunSpec) -> NNModel:
    """Return the untrained model of a plan; a network function is called with the plan's seed."""
    if settings.module is None:
        return NNModel(params=spec.model, loss=settings.loss)
    module = settings.module(rngs=nnx.Rngs(spec.train.seed))
    if not isinstance(module, nnx.Module):
        raise PlanError(
            [Diagnostic("net", f"the function returned {_named(module)}; it must return a flax.nnx.Module")]
        )
    return NNModel(params=spec.model, module=module, loss=settings.loss)


def refuse_group(what: str) -> None:
    """Refuse to run as one of several processes.

    Raises:
        ProcessGroupError: (a RuntimeError) naming how many there are.
    """
    world = max(group_size(), jax.process_count())
    if world > 1:
        raise ProcessGroupError(
            f"{what} trains in one process, and this is one of {world}; start it once, or train with NNModel.train "
            "and distributed=DDP()"
        )


def _attempt_problems(attempt: Any) -> list[Diagnostic]:
    if attempt is None:
        return []
    try:
        safe_name(attempt, "an attempt")
    except UnsafePathError as error:
        return [Diagnostic("attempt", str(error.args[0]))]
    return []


def _made(settings: Settings) -> tuple[RunSpec, list[Any]]:
    """Call every factory once, in order, and return the specification with their data, and the callbacks.

    Raises:
        PlanError: listing everything they returned that is of no use.
    """
    made = {split: give() for split, give in checks.data_of(settings).items() if checks.kind_of(give) == "factory"}
    built = [factory() for factory in settings.callback_factories]
    problems = [*_data_problems(made)]
    for index, callback in enumerate(built):
        for problem in checks.check_callback(callback, f"callback_factories[{index}]"):
            problems.append(Diagnostic(problem.path, f"the function returned {_named(callback)}; {problem.message}"))
    spec, found = (None, []) if problems else checks.read(settings, made)
    problems += found
    if problems or spec is None:
        raise PlanError(problems)
    given = [
        build_callback(each) if isinstance(each, CallbackParams) else each for each in (*settings.callbacks, *built)
    ]
    return spec, given


def _data_problems(made: Mapping[str, Any]) -> list[Diagnostic]:
    found = []
    for split in SPLITS:
        if split in made and checks.kind_of(made[split]) not in ("dataset", "loader"):
            text = f"the function returned {_named(made[split])}; it must return a dataset or a loader of batches"
            found.append(Diagnostic(f"data.{split}", text))
    return found


def _named(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
