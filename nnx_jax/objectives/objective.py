"""Objective: what makes the loss terms of a microbatch when a loss of (outputs, batch) is not enough."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast

import jax
import jax.numpy as jnp

from nnx_jax.core.errors import ConfigError, ModelError
from nnx_jax.core.precision import widened
from nnx_jax.objectives.frozen import Frozen
from nnx_jax.objectives.losses import Loss, build_loss
from nnx_jax.objectives.targets import item_weight, weighted_sum
from nnx_jax.objectives.terms import LossTerm, check_terms

Average = tuple[Any, Any]
"""(sum, count): what a record adds up over a window and an epoch, before it is divided."""


@dataclass(frozen=True)
class ObjectiveContext:
    """What an objective sees of one microbatch. It is called while the step is traced, so every array is a tracer.

    Attributes:
        model: the Flax NNX module with this update's weights; call it as often as you like.
        batch: columns by name, each [B, ...]; "mask" float32 [B] is 0 on padded rows.
        rng: key of this microbatch, for noise of your own; never the same twice in a run.
        epoch_idx: int32 scalar, 0-based.
        batch_idx: int32 scalar, microbatches of this epoch before this one.
        train: False when the objective scores a validation split.
        precision: name of the number format the model computes in.
    """

    model: Any
    batch: Mapping[str, jax.Array]
    rng: jax.Array
    epoch_idx: Any
    batch_idx: Any
    train: bool
    precision: str
    extra_metrics: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    @property
    def mask(self) -> jax.Array:
        """float32 [B], 1 for a real row and 0 for padding."""
        return self.batch["mask"]

    def apply(self, x: Any = None) -> Any:
        """Outputs of the model for the batch's "x" (or another x with as many rows), float32 where 16 bits.

        It is called as without an objective: one whose `__call__` has a parameter `mask` gets the mask, and one whose
        class says `takes_batch = True` the whole batch.
        """
        kind, given = type(self.model), self.batch["x"] if x is None else x
        given = {**self.batch, "x": given} if getattr(kind, "takes_batch", False) else given
        takes_mask = "mask" in inspect.signature(kind.__call__).parameters
        outputs = self.model(given, mask=self.mask) if takes_mask else self.model(given)
        wide = lambda leaf: leaf.astype(jnp.float32) if leaf.dtype in (jnp.bfloat16, jnp.float16) else leaf  # noqa: E731
        return jax.tree.map(wide, outputs)

    def mean(self, name: str, per_row: Any, *, weight: float = 1.0) -> LossTerm:
        """The mean over real rows as a loss term: `per_row` is [B] or [B, ...].

        Each row counts with its "weight", where the batch has that column, as in the built-in losses.
        """
        per_row = widened(jnp.asarray(per_row))
        rows = item_weight(self.batch, per_row.shape, per_row.dtype)
        return LossTerm(name, weighted_sum(per_row, rows), jnp.sum(rows), weight=weight)


@dataclass(frozen=True)
class ObjectiveResult:
    """What an objective returns.

    Attributes:
        terms: the loss terms, sums with denominators; their weighted quotients add up to the loss.
        record: more values to record, by name: a scalar (averaged over microbatches) or (sum, count).
        outputs: what the model's declared metrics are computed from; None where there is nothing to compare.
    """

    terms: LossTerm | Sequence[LossTerm]
    record: Mapping[str, Any] | None = None
    outputs: Any = None


class Objective:
    """Base of objectives: override `__call__`; or give a function of the context.

    Args:
        function: (ObjectiveContext) -> ObjectiveResult, when `__call__` is not overridden.
        nonfinite: "fail" ends the run at a loss or gradient that is not finite, "skip" leaves that window out.

    Raises:
        ConfigError: (a ValueError) another `nonfinite`.
        TypeError: a function that cannot be called.
    """

    scores: ClassVar[Literal["objective", "loss"]] = "objective"
    """What validation computes: the objective itself, in evaluation mode, or the model's loss."""
    labels: ClassVar[bool] = False
    """Its outputs are the model's, so labels that the model's loss cannot use end the run."""

    def __init__(self, function: Callable[[Any], ObjectiveResult] | None = None, *, nonfinite: str = "fail") -> None:
        if nonfinite not in ("fail", "skip"):
            raise ConfigError(f"Objective.nonfinite is {nonfinite!r}; write 'fail' or 'skip'")
        if function is not None and not callable(function):
            raise TypeError(f"an objective is a function of an ObjectiveContext, got {type(function).__name__}")
        self.nonfinite, self.function = nonfinite, function

    def __call__(self, ctx: ObjectiveContext) -> ObjectiveResult:
        """Return the loss terms of one microbatch; called while the step is traced."""
        if self.function is None:
            raise TypeError(f"{type(self).__name__} overrides no __call__(ctx), and was given no function")
        return self.function(ctx)

    def bind(self, loss: Loss) -> Objective:
        """The objective as a model with this loss trains by it: itself, unless it takes the model's loss."""
        return self

    def policy(self, of_run: str) -> str:
        """What a loss that is not finite does: "skip" where the objective or the run says so."""
        return "skip" if "skip" in (self.nonfinite, of_run) else "fail"

    def check_run(self, run: Any) -> None:
        """Refuse what this objective cannot be trained with: raise ValueError. `run` is the run's specification."""

    def after_update(self, events: Sequence[Any]) -> None:
        """Called on the host after every committed update, with its UpdateEvents, before any callback sees them.

        Overriding it makes the host read the device at every update.
        """

    def identity(self) -> Any:
        """What the run id knows of this objective besides its code: plain values; None for nothing."""
        return None


def listener(given: Any) -> Callable[[Sequence[Any]], None] | None:
    """Return `after_update` of an objective that has one of its own; None for any other."""
    own = isinstance(given, Objective) and type(given).after_update is not Objective.after_update
    return given.after_update if own else None


def as_objective(given: Any) -> Objective:
    """Return an Objective of `given`.

    Raises:
        TypeError: neither an Objective nor a function.
    """
    if isinstance(given, Objective):
        return given
    if isinstance(given, type):
        raise TypeError(f"objective is the class {given.__name__}; pass an instance: {given.__name__}()")
    if not callable(given):
        raise TypeError(f"objective must be an Objective or a function of a context, got {type(given).__name__}")
    return Objective(cast(Callable[[ObjectiveContext], ObjectiveResult], given))


def check_result(
    result: Any, who: str, averaged: Callable[[Any, str, str], Average] | None = None
) -> tuple[tuple[LossTerm, ...], dict[str, Average], Any]:
    """Return (terms, sums to record by name, outputs) of what an objective returned.

    Args:
        averaged: (sum, count) of a recorded value, in another framework; see `average`.

    Raises:
        TypeError: no ObjectiveResult.
        ConfigError: (a ValueError) no terms, a repeated name, or a record that is not made of numbers.
    """
    if not isinstance(result, ObjectiveResult):
        found = "an array" if isinstance(result, jax.Array) else type(result).__name__
        raise TypeError(
            f"objective {who} returned {found}; return ObjectiveResult(terms=[LossTerm(name, sum, count), ...])"
        )
    record = {name: (averaged or average)(value, name, who) for name, value in (result.record or {}).items()}
    return check_terms(result.terms), record, result.outputs


def average(value: Any, name: str, who: str) -> Average:
    """(sum, count) of a recorded value: a pair as it is, a scalar with count 1; float32 or float64 scalars.

    Raises:
        ConfigError: neither a scalar nor a pair of scalars.
    """
    pair = value if isinstance(value, tuple) and len(value) == 2 else (value, 1.0)
    found = tuple(widened(jnp.asarray(jax.lax.stop_gradient(part))) for part in pair)
    check_scalars(found, name, who)
    return found[0], found[1]


def check_scalars(pair: Sequence[Any], name: str, who: str) -> None:
    """A recorded value is one number, or two.

    Raises:
        ConfigError: giving the shapes.
    """
    if any(part.shape != () for part in pair):
        shapes = [list(part.shape) for part in pair]
        raise ConfigError(f"{who} records {name!r} of shape {shapes}; give one number, or (sum, count)")


class _Supervised(Objective):
    """A loss of the model's outputs; see `supervised_objective`."""

    scores, labels = "loss", True

    def __init__(self, loss: Any = None, *, nonfinite: str = "fail") -> None:
        super().__init__(nonfinite=nonfinite)
        self.loss: Loss | None = None if loss is None else self.build(loss)

    def build(self, loss: Any) -> Loss:
        """A loss of what was given as one."""
        return build_loss(loss)

    def __call__(self, ctx: ObjectiveContext) -> ObjectiveResult:
        if self.loss is None:
            raise ConfigError("supervised_objective() takes the model's loss when it is trained; give one to call it")
        outputs = ctx.apply()
        return ObjectiveResult(self.loss(outputs, ctx.batch), outputs=outputs)

    def bind(self, loss: Loss) -> Objective:
        return self if self.loss is not None else type(self)(loss, nonfinite=self.nonfinite)

    def identity(self) -> Any:
        return None if self.loss is None else self.loss.name


def supervised_objective(loss: Any = None, *, nonfinite: str = "fail") -> Objective:
    """The model's own loss (or another) as an objective: trains bit for bit as without one."""
    return _Supervised(loss, nonfinite=nonfinite)


class _Distillation(Objective):
    """Cross entropy and a divergence from a teacher; see `kd_objective`."""

    scores, labels = "loss", True

    def __init__(self, teacher: Any, alpha: float, temperature: float, nonfinite: str) -> None:
        super().__init__(nonfinite=nonfinite)
        if not 0.0 <= alpha <= 1.0:
            raise ConfigError(f"kd_objective: alpha is {alpha}; it is a share, from 0 to 1")
        if not 0.0 < temperature < float("inf"):
            raise ConfigError(f"kd_objective: temperature is {temperature}; give a number above 0")
        self.teacher = self.freeze(teacher, "the teacher of kd_objective")
        self.alpha, self.temperature = float(alpha), float(temperature)
        self.loss = self.build("cross_entropy")

    def build(self, loss: Any) -> Loss:
        """A loss of a name or specification."""
        return build_loss(loss)

    def freeze(self, teacher: Any, who: str) -> Any:
        """The teacher as something that is asked and not taught."""
        return Frozen(teacher, who)

    def divergence(self, soft: Any, outputs: Any) -> Any:
        """KL(teacher || student) of two batches of logits, each row its own."""
        teacher, student = jax.nn.log_softmax(soft), jax.nn.log_softmax(outputs)
        return jnp.sum(jnp.exp(teacher) * (teacher - student), axis=-1)

    def __call__(self, ctx: ObjectiveContext) -> ObjectiveResult:
        outputs, t = ctx.apply(), self.temperature
        soft = self.teacher(ctx.batch["x"])
        if soft.shape != outputs.shape:
            shapes = f"{list(soft.shape)} and {list(outputs.shape)}"
            raise ModelError(f"kd_objective: logits of teacher and student have shapes {shapes}; they must be equal")
        apart = self.divergence(soft / t, outputs / t)
        hard = self.loss(outputs, ctx.batch)[0]
        hard = LossTerm("cross_entropy", hard.numerator, hard.denominator, weight=1.0 - self.alpha)
        return ObjectiveResult([hard, ctx.mean("distillation", apart, weight=self.alpha * t * t)], outputs=outputs)

    def identity(self) -> Any:
        return {"alpha": self.alpha, "temperature": self.temperature}


def kd_objective(teacher: Any, alpha: float = 0.5, temperature: float = 4.0, *, nonfinite: str = "fail") -> Objective:
    """Knowledge distillation (Hinton et al. 2015, arXiv:1503.02531) for classifiers.

    The loss is (1 - alpha) * cross entropy + alpha * T^2 * KL(teacher || student), both softened by T; the gradient of
    the second then keeps its size as T grows. Rows without a label (`ignore_index`) learn from the teacher alone. Every
    row stands for itself: padded rows are left out, and a window of two microbatches is one of twice the rows.
    Validation scores the model's loss.

    Args:
        teacher: an NNModel, or a module called as `teacher(x)` that gives logits [B, C]; asked in evaluation mode, with
            its weights of now, which become constants of the compiled step: see `frozen.Frozen` for large ones.
        alpha: share of the teacher, 0 to 1.
        temperature: T, above 0.

    Raises:
        ConfigError: (a ValueError) alpha or temperature out of range.
    """
    return _Distillation(teacher, alpha, temperature, nonfinite)
