"""Plans that may be trained as one program: alike in everything but the rate and the seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nnx_jax.core.errors import ConfigError
from nnx_jax.params.run import RunSpec
from nnx_jax.plan import ExperimentPlan, PlanError
from nnx_jax.plan.checks import data_of, kind_of, read
from nnx_jax.plan.identity import identity
from nnx_jax.search.storage import differences

_NOT_TAKEN = {
    "callbacks": "a callback watches one run",
    "callback_factories": "a callback watches one run",
    "hooks": "a hook takes part in one run's step",
    "train_step_fn": "a step of your own trains one run",
    "eval_step_fn": "a validation of your own scores one run",
    "objective": "an objective trains one run",
    "mesh": "a mesh splits one run's rows",
    "components": "there are no checkpoints to hold them",
}


def specs_alike(plans: Sequence[ExperimentPlan]) -> list[RunSpec]:
    """Return the specifications of plans that can be trained together.

    Raises:
        PlanError: a plan with problems.
        ConfigError: (a ValueError) no plan, plans that differ in more than `train.optim.max_lr` and `train.seed`, or
            one that needs something a single run has (see `_NOT_TAKEN`), naming the field.
    """
    specs = [_spec(plan) for plan in plans]
    if not specs:
        raise ConfigError("there is no plan; give at least one")
    for plan, spec in zip(plans, specs, strict=True):
        _check_alone(plan, spec)
    first = _common(plans[0], specs[0])
    for number, (plan, spec) in enumerate(zip(plans, specs, strict=True)):
        different = next(differences(first, _common(plan, spec)), None)
        if different is not None:
            raise ConfigError(
                f"plan {number} differs from plan 0 in more than rate and seed: {different}; fit it by itself"
            )
    return specs


def _spec(plan: ExperimentPlan) -> RunSpec:
    problems = plan.validate()
    spec, _ = read(plan.settings)
    if problems or spec is None:
        raise PlanError(problems)
    return spec


def _common(plan: ExperimentPlan, spec: RunSpec) -> dict[str, Any]:
    """What all plans must have in common, as plain values."""
    found = identity(plan.settings, spec)
    optim = {name: value for name, value in found["train"].get("optim", {}).items() if name != "max_lr"}
    train = {name: value for name, value in found["train"].items() if name not in ("optim", "seed", "precision")}
    return {**found, "train": {**train, "optim": optim, "precision": spec.precision}}


def _check_alone(plan: ExperimentPlan, spec: RunSpec) -> None:
    for name, why in _NOT_TAKEN.items():
        if getattr(plan.settings, name) not in (None, ()):
            raise ConfigError(f"{why}, and these train as one program; leave it out, or fit one by one", path=name)
    for split, data in data_of(plan.settings).items():
        if kind_of(data) not in ("none", "dataset"):
            text = f"is a {kind_of(data)}; trials that train as one program share one dataset, give it itself"
            raise ConfigError(text, path=f"data.{split}")
    train = spec.train
    if train.n_epochs is None or train.eval_every_n_steps is not None:
        name = "n_epochs" if train.n_epochs is None else "eval_every_n_steps"
        raise ConfigError("trials that train as one program go by whole epochs", path=f"train.{name}")
    if train.resume_from_run_id is not None:
        raise ConfigError("trials that train as one program start afresh", path="train.resume_from_run_id")
    if any(group.max_lr is not None for group in train.optim.param_groups):
        text = "a group's own rate does not follow the trial's; give lr_scale"
        raise ConfigError(text, path="train.optim.param_groups")
