"""Work: what one microbatch does and what is measured of it: a loss, an objective, or a step of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax.core.errors import ConfigError
from nnx_jax.engines.nnx_forward import Arrays, PureModule, variables_of
from nnx_jax.engines.rates import Rates
from nnx_jax.objectives.losses import Loss
from nnx_jax.objectives.metrics import Metric
from nnx_jax.objectives.objective import Objective, ObjectiveContext, check_result
from nnx_jax.objectives.terms import LossTerm
from nnx_jax.objectives.traced import explained
from nnx_jax.params.run import RunSpec
from nnx_jax.step import state
from nnx_jax.step.custom import RATES, UPDATES, look_at
from nnx_jax.step.own import SINGLE, OwnStep


@dataclass
class Work:
    """The parts of a step that depend on how a loss comes about.

    Attributes:
        forward: (params, model_state, batch, key, train) -> (outputs, new model_state).
        terms: (outputs, batch) -> loss terms.
        metrics: measured in every microbatch of the training.
        invalid: (outputs, batch) -> int32, impossible labels; None where there are no labels to judge.
        score_forward, score_terms, score_metrics: the same for a validation.
        custom: the step of the user's own, None for one that is made of the parts above.
    """

    forward: Any
    terms: Any
    metrics: list[Metric]
    invalid: Callable[[Any, Any], Any] | None
    score_forward: Any
    score_terms: Any
    score_metrics: list[Metric]
    custom: Any = None


def built_in(pure: PureModule, loss: Loss, metrics: Sequence[Metric]) -> Work:
    """The model's outputs, its loss and its metrics."""
    listed = list(metrics)
    return Work(pure.forward, loss, listed, loss.invalid_labels, pure.forward, loss, listed)


def by_objective(
    pure: PureModule,
    objective: Objective,
    loss: Loss,
    metrics: Callable[[Any], Sequence[Metric]],
    batch: Mapping[str, Any],
    *,
    precision: str,
    extra_metrics: Mapping[str, Callable[..., Any]],
) -> Work:
    """The terms, record and outputs of an objective.

    Args:
        metrics: (shapes of outputs) -> the declared metrics; computed from the outputs the objective gives.
        batch: shapes of a batch's columns.

    Raises:
        TypeError: the objective returns no ObjectiveResult.
        ConfigError: it gives no outputs although there are metrics, or records a name that is taken.
    """
    forward = ObjectiveForward(pure, objective, precision=precision, extra_metrics=extra_metrics)
    params = {**pure.params, **pure.frozen}
    key = jax.eval_shape(lambda: jax.random.key(0))
    shapes, _ = jax.eval_shape(lambda p, s, b, k: forward(p, s, b, k, True), params, pure.model_state, batch, key)
    declared = list(metrics(shapes["outputs"]))
    taken = {"loss", *(metric.name for metric in declared)}
    if again := taken & set(shapes["record"]):
        raise ConfigError(f"objective {name_of(objective)} records {sorted(again)}, which the run records itself")
    listed = [replace(metric, update=_of_outputs(metric.update)) for metric in declared]
    listed += [_recorded(name) for name in shapes["record"]]
    invalid = None if not objective.labels else _of_outputs(loss.invalid_labels)
    if objective.scores == "loss":
        return Work(forward, _terms, listed, invalid, pure.forward, loss, declared)
    return Work(forward, _terms, listed, invalid, forward, _terms, listed)


class ObjectiveForward:
    """An objective as a forward pass: its outputs are the terms, the record and the outputs it returned."""

    def __init__(
        self,
        pure: PureModule,
        objective: Objective,
        *,
        precision: str,
        extra_metrics: Mapping[str, Callable[..., Any]],
        counters: Any = None,
    ) -> None:
        self.pure, self.objective, self.precision = pure, objective, precision
        self.extra_metrics, self.counters = extra_metrics, counters

    def at(self, counters: Any) -> ObjectiveForward:
        """The same at these counters."""
        options = {"precision": self.precision, "extra_metrics": self.extra_metrics}
        return ObjectiveForward(self.pure, self.objective, counters=counters, **options)

    def __call__(
        self, params: Arrays, model_state: Arrays, batch: Mapping[str, jax.Array], key: jax.Array, train: bool
    ) -> tuple[Any, Arrays]:
        module = self.pure.opened(params, model_state, key, train=train)
        zero, at = jnp.int32(0), self.counters
        ctx = ObjectiveContext(
            model=module,
            batch=self.pure.narrowed(batch),
            rng=jax.random.fold_in(key, 0x0B),
            epoch_idx=zero if at is None else at[state.EPOCH],
            batch_idx=zero if at is None else at[state.EPOCH_BATCH],
            train=train,
            precision=self.precision,
            extra_metrics=self.extra_metrics,
        )
        called = name_of(self.objective)
        with self.pure.masked(module, batch.get("mask"), train=train), explained(called):
            result = self.objective(ctx)
        terms, record, outputs = check_result(result, called)
        found = {"terms": terms, "record": record, "outputs": outputs}
        return found, self.pure.closed(module, model_state)[1]


def name_of(given: Any) -> str:
    """What a function, or the class of an object, is called."""
    function = getattr(given, "function", None)
    return getattr(function or given, "__name__", type(given).__name__)


def _terms(outputs: Any, batch: Any) -> Any:
    return outputs["terms"]


def _of_outputs(update: Callable[..., Any]) -> Callable[..., Any]:
    return lambda found, batch: update(found["outputs"], batch)


def _recorded(name: str) -> Metric:
    """A recorded (sum, count) as a metric."""
    return Metric(name, 2, None, lambda found, batch: jnp.stack(found["record"][name]), divided)


def divided(sums: np.ndarray) -> float:
    """sum / count, NaN without a count."""
    return float(sums[0] / sums[1]) if sums[1] else float("nan")


# -- a step of the user's own ------------------------------------------------------------------------------------


def own_step(
    pure: PureModule,
    spec: RunSpec,
    function: Callable[..., Any],
    optimizer: Any,
    schedules: Mapping[str, Callable[[Any], Any]],
    n_batches: int,
) -> OwnStep:
    """What a step of the user's own works with.

    Args:
        schedules: rate from an optimizer's own count, by the optimizer's name, for those on the update clock.
    """
    training = spec.training
    names = tuple(training.optimizers) if spec.trainer is not None else ()
    return OwnStep(
        function,
        open=lambda params, model_state, key: pure.opened(params, model_state, key, train=True),
        variables=variables_of,
        masked=lambda module, mask: pure.masked(module, mask, train=True),
        narrowed=pure.narrowed,
        optimizer=optimizer,
        schedules=schedules if names else dict(zip([SINGLE], schedules.values(), strict=False)),
        names=names,
        accumulate=training.window,
        clip_norm=None if names else next(iter(training.optimizers.values())).grad_clip_norm,
        n_batches=n_batches,
        precision=spec.precision,
        extra_metrics=training.extra_metrics or {},
    )


def delegates(
    module: Any, spec: RunSpec, function: Callable[..., Any], feed: Any, *, freeze: Sequence[str] = ()
) -> bool:
    """Whether a step of the user's own calls `default_train_step`, so that the run makes its windows.

    Raises:
        StepError: see `look_at`.
    """
    pure = PureModule(module, freeze=freeze, compute_dtype=spec.precision, mask_rows=True)
    own = own_step(pure, spec, function, Rates(spec, {}).build(pure.params), {}, n_batches=1)
    batch = {name: jax.ShapeDtypeStruct(column.shape, column.dtype) for name, column in feed.signature().items()}
    return look_at(own, _shapes((pure.params, pure.frozen, pure.model_state)), batch).delegates


def by_step(pure: PureModule, own: OwnStep, loss: Loss, metrics: Sequence[Metric], batch: Mapping[str, Any]) -> Work:
    """A step of the user's own; one that calls `default_train_step` measures what the built-in one does.

    Raises:
        StepError: it cannot be traced, or returns no record.
        ConfigError: it records something under a name that history cannot have.
    """
    seen = look_at(own, _shapes((pure.params, pure.frozen, pure.model_state)), batch)
    if seen.delegates:
        return replace(built_in(pure, loss, metrics), custom=(own, seen))
    if bad := [name for name in seen.names if not name.isidentifier() or name in ("loss", "lr")]:
        raise ConfigError(f"{own.called} records {bad[0]!r}; a recorded name is an identifier, and not loss or lr")
    listed = [Metric(name, 2, None, _never, divided) for name in seen.names]
    for hidden in (UPDATES, RATES) if own.names else (UPDATES,):
        listed.append(Metric(hidden, len(own.keys), None, _never, divided))
    work = Work(_no_forward, _no_terms, listed, None, pure.forward, loss, list(metrics))
    return replace(work, custom=(own, seen))


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _no_forward(params: Arrays, model_state: Arrays, batch: Any, key: Any, train: bool) -> tuple[Any, Arrays]:
    return jnp.float32(0), model_state


def _no_terms(outputs: Any, batch: Any) -> tuple[LossTerm, ...]:
    return (LossTerm("loss", outputs, jnp.float32(1)),)


def _never(outputs: Any, batch: Any) -> jax.Array:
    raise AssertionError("the user's step measures itself")
