"""What a plan is, as plain values: equal for equal plans in every process, so that a study knows its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnx_jax.core.errors import NnxError
from nnx_jax.core.spec import Spec
from nnx_jax.fit.identity import describe_function
from nnx_jax.params.run import RunSpec
from nnx_jax.plan import checks
from nnx_jax.plan.settings import SPLITS, Settings

_OTHERS = (
    "module", "loss", "callbacks", "callback_factories", "hooks", "train_step_fn", "eval_step_fn", "objective",
    "components",
)  # fmt: skip


def identity(settings: Settings, spec: RunSpec) -> dict[str, Any]:
    """Return what tells this plan from another, as JSON values.

    Datasets count by their rows, specifications by their state, functions by their text and the values they were made
    with, callbacks by their class. What only says how to run or what to keep (checkpoints, provenance, history) does
    not count.

    Args:
        spec: the plan read as one specification (`checks.read`).
    """
    fields = settings.state_of("data")
    data = {name: value for name, value in fields.items() if name not in SPLITS}
    data |= {split: _data(given, spec, split) for split, given in checks.data_of(settings).items() if given is not None}
    found: dict[str, Any] = {"model": spec.model.state(), "train": spec.train.state(), "data": describe(data)}
    if spec.train.extra_metrics:
        found["extra_metrics"] = describe(spec.train.extra_metrics)
    others = {name: getattr(settings, name) for name in _OTHERS}
    return found | {name: describe(value) for name, value in others.items() if value not in (None, ())}


def describe(value: Any) -> Any:
    """Return JSON values that stand for `value`: itself, its state, or its name and digest (`describe_function`)."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Spec):
        try:
            return value.state()
        except NnxError:
            return type(value).__qualname__
    if isinstance(value, Mapping):
        return {str(name): describe(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    return describe_function(value if callable(value) else type(value))


def _data(given: Any, spec: RunSpec, split: str) -> Any:
    if checks.kind_of(given) != "dataset":
        return describe(given if checks.kind_of(given) == "factory" else type(given))
    assert spec.data is not None
    return getattr(spec.data, split).content_hash()
