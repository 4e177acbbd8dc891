"""Validation: every row of a set once, added up and divided at the end, by a strategy or by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_jax.core.errors import ConfigError, StepError
from nnx_jax.core.precision import precision_name
from nnx_jax.data.loader import LoaderFeed
from nnx_jax.engines.nnx_forward import PureModule
from nnx_jax.step import rng
from nnx_jax.step.evaluate import build_eval
from nnx_jax.training.losses import StrategyLoss, as_loss
from nnx_jax.training.models import NamedModels, as_models, leaves_of

Use = Literal["auto", "always", "never"]
Named = Mapping[str, Any]


class ValidationError(StepError, RuntimeError):
    """A validation was asked for what is not there."""


@dataclass(frozen=True)
class ValidationConfig:
    """What a strategy validates on, and when.

    Attributes:
        validation_data: batches, iterated anew at every pass.
        validation_fn: in place of the strategy's `training_fn`.
        loss_fn: in place of the strategy's.
        every_n_epochs, every_n_steps: at most one; neither: after training and by `validate()` only. Steps are
            committed updates.
        set_eval: dropout off, BatchNorm by its statistics.
        use_ema: averaged weights; "auto" where there are some, "always" fails without.
        use_mixed_precision: a MixedPrecisionHook's precision; "auto" where there is one, "always" fails without.
        aggregation: "sample" counts every item once; "batch_mean" is the mean of the batches' means.
        grad_mode: a function may differentiate inside whatever this says; "auto", "enabled" or "disabled".
        batch_preparation_callback: called with `batch`, `batch_count`, `step_count` and `epoch` before each batch; may
            return another one.
        batch_callback: called with `batch`, `predictions`, `loss`, `batch_count`, `step_count` and `epoch` after each.
        name: in the summary.

    Raises:
        ConfigError: (a ValueError) data that can be iterated only once, two cadences, an unknown mode.
    """

    validation_data: Iterable[Any]
    validation_fn: Callable[..., Any] | None = None
    loss_fn: Any = None
    every_n_epochs: int | None = None
    every_n_steps: int | None = None
    grad_mode: Literal["auto", "enabled", "disabled"] = "auto"
    set_eval: bool = True
    use_ema: Use = "auto"
    use_mixed_precision: Use = "auto"
    aggregation: Literal["sample", "batch_mean"] = "sample"
    batch_preparation_callback: Callable[..., Any] | None = None
    batch_callback: Callable[..., None] | None = None
    name: str = "validation"

    def __post_init__(self) -> None:
        check_data(self.validation_data)
        if self.every_n_epochs is not None and self.every_n_steps is not None:
            raise ConfigError("every_n_epochs and every_n_steps are both given; give at most one")
        for name in ("every_n_epochs", "every_n_steps"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} is {value!r}; give a whole number from 1")
        modes = {
            "use_ema": ("auto", "always", "never"),
            "use_mixed_precision": ("auto", "always", "never"),
            "grad_mode": ("auto", "enabled", "disabled"),
            "aggregation": ("sample", "batch_mean"),
        }
        for name, legal in modes.items():
            if getattr(self, name) not in legal:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; write {', '.join(legal)}")
        if not self.name:
            raise ConfigError("name is empty; a summary needs one")
        if self.loss_fn is not None:
            object.__setattr__(self, "loss_fn", as_loss(self.loss_fn))


def check_data(data: Any) -> None:
    """Raise ConfigError unless `data` can be iterated again and again."""
    if not isinstance(data, Iterable):
        raise ConfigError(f"validation_data is {type(data).__name__}; give batches, such as a list of them")
    if isinstance(data, Iterator):
        raise ConfigError("validation_data can be iterated only once; every pass begins anew: give a list or a loader")


class Pass:
    """One compiled validation: a forward pass, a loss, a set; run again and again with other weights.

    Args:
        forward: `(params, model_state, batch, key, train) -> (outputs, model_state)`.
        adapt: `(params, model_state, batch, forward) -> (outputs, batch)`, around the forward pass; None for none.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        loss: StrategyLoss,
        config: ValidationConfig,
        adapt: Callable[..., Any] | None = None,
    ) -> None:
        self.loss, self.config = loss, config
        self._forward, self._adapt = forward, adapt
        self._evaluator = build_eval(self._outputs, self._terms, invalid=lambda seen, _: loss.invalid_labels(*seen))
        self._look = jax.jit(self._inspect)

    def run(self, params: Named, model_state: Any, *, step: int, epoch: int, **source: Any) -> dict[str, Any]:
        """The summary of one pass; `source` is added to it.

        Raises:
            ValidationError: the set gave no batch.
        """
        counted = [0]
        batches = self._batches(params, model_state, counted, step, epoch)
        sums = self._evaluator.host(params, model_state, batches)
        values, weights, raw, total = {}, {}, {}, 0.0
        for term, (num, den, own) in sums.terms.items():
            values[term] = num if den is None else num / den if den > 0 else float("nan")
            weights[term] = own * self.loss.weight_of(term, step, epoch)
            raw[term] = own * self.loss.weight_of(term, step, epoch, raw=True)
            if den is None or den > 0:
                total += weights[term] * values[term]
        return {
            "name": self.config.name,
            "total_loss": total,
            "per_component_unweighted": values,
            "per_component_weight": weights,
            "per_component_raw_weight": raw,
            "num_batches": counted[0],
            "num_samples": sums.rows,
            **source,
            "distributed_reduced": False,
        }

    def _batches(self, params: Any, model_state: Any, counted: list[int], step: int, epoch: int) -> Iterator[Any]:
        feed = LoaderFeed(self.config.validation_data, pad=self.loss.masked)
        prepare, look = self.config.batch_preparation_callback, self.config.batch_callback
        at = {"step_count": step, "epoch": epoch}
        for number, batch in enumerate(feed.batches()):
            if prepare is not None:
                found = prepare(batch=batch, batch_count=number, **at)
                batch = batch if found is None else found
            yield batch
            counted[0] = number + 1
            if look is not None:
                outputs, terms = self._look(dict(params), model_state, dict(batch))
                loss = {term.name: term for term in terms}
                look(batch=batch, predictions=outputs, loss=loss, batch_count=number, **at)

    def _outputs(self, params: Any, model_state: Any, batch: Any, key: Any, train: bool) -> tuple[Any, Any]:
        del train
        forward = lambda seen: self._forward(params, model_state, seen, key, not self.config.set_eval)[0]  # noqa: E731
        if self._adapt is None:
            return (forward(batch), batch), model_state
        return self._adapt(params, model_state, batch, forward), model_state

    def _terms(self, seen: Any, _: Any) -> Any:
        return self.loss.measured(*seen, batch_mean=self.config.aggregation == "batch_mean")

    def _inspect(self, params: Any, model_state: Any, batch: Any) -> tuple[Any, Any]:
        key = rng.stream_key(rng.run_key(0), rng.EVALUATION)
        seen, _ = self._outputs(params, model_state, batch, key, False)
        return seen[0], self._terms(seen, batch)


class ValidationLoop:
    """A validation by itself: models, data, a loss and a precision, and no hook.

    Use it as a context and call `execute()`. The models are only read, so nothing has to be put back.

    Args:
        model, models: exactly one of them.
        validation_fn: `(model or models, batch) -> predictions`.
        inference_model: modules by name (or one) whose weights are used in place of the models'.
        precision: what the models compute in.

    Raises:
        ConfigError: (a ValueError) both or neither of model and models, no validation_fn, no loss_fn.
    """

    def __init__(
        self,
        validation_data: Iterable[Any] | None = None,
        *,
        config: ValidationConfig | None = None,
        model: nnx.Module | None = None,
        models: Mapping[str, nnx.Module] | None = None,
        loss_fn: Any = None,
        validation_fn: Callable[..., Any] | None = None,
        inference_model: Any = None,
        precision: Any = "float32",
        step_count: int = 0,
        epoch: int = 0,
    ) -> None:
        if (model is None) == (models is None):
            raise ConfigError(f"{'neither' if model is None else 'both'} of model and models given; give exactly one")
        if config is None:
            if validation_data is None:
                raise ConfigError("there is no data; give validation_data, or a ValidationConfig")
            config = ValidationConfig(validation_data)
        function = validation_fn or config.validation_fn
        if function is None:
            raise ConfigError("there is no validation_fn; give a function (model, batch) -> predictions")
        if loss_fn is None and config.loss_fn is None:
            raise ConfigError("there is no loss_fn; give one")
        self.models, single = as_models(model if models is None else models)
        module = NamedModels(self.models, function, single=single, resting=())
        self.precision = precision_name(precision)
        self.pure = PureModule(module, compute_dtype=jnp.dtype(self.precision), mask_rows=True)
        self._pass = Pass(self.pure.forward, as_loss(loss_fn if loss_fn is not None else config.loss_fn), config)
        self.inference = inference_model
        self.step_count, self.epoch = step_count, epoch
        self._open = False

    def __enter__(self) -> ValidationLoop:
        self._open = True
        return self

    def __exit__(self, *error: object) -> None:
        self._open = False

    def execute(self) -> dict[str, Any]:
        """Score the whole set once and return the summary.

        Raises:
            ValidationError: (a RuntimeError) called outside of `with`.
        """
        if not self._open:
            raise ValidationError("execute() is called outside of the loop's context; write: with loop: loop.execute()")
        params, state = {**self.pure.params, **self.pure.frozen}, dict(self.pure.model_state)
        keys = ()
        if self.inference is not None:
            replaced, _ = as_models(self.inference)
            keys = tuple(replaced)
            for key, module in replaced.items():
                own, rest = leaves_of(key, module)
                params.update(own)
                state.update(rest)
        return self._pass.run(
            params,
            state,
            step=self.step_count,
            epoch=self.epoch,
            model_source=model_source(keys, tuple(self.models)),
            ema_model_keys=keys,
            precision=self.precision,
        )

    @classmethod
    def from_training_strategy(cls, strategy: Any) -> ValidationLoop:
        """The validation of a strategy as it stands, without its hooks; in the precision it trains in.

        Raises:
            ValidationError: (a RuntimeError) the strategy has no validation_config.
        """
        config = strategy.validation_config
        if config is None:
            raise ValidationError("the strategy has no validation_config; give it one")
        strategy.sync_models()
        single = strategy.single_model
        return cls(
            config=config,
            model=next(iter(strategy.models.values())) if single else None,
            models=None if single else strategy.models,
            loss_fn=strategy.loss if config.loss_fn is None else config.loss_fn,
            validation_fn=config.validation_fn or strategy.training_fn,
            precision=strategy.precision,
            step_count=strategy.step_count,
            epoch=strategy.epoch_count,
        )


def model_source(averaged: tuple[str, ...], models: tuple[str, ...]) -> str:
    """Whose weights a validation saw: "live", "ema", or "mixed"."""
    if not averaged:
        return "live"
    return "ema" if set(averaged) >= set(models) else "mixed"
