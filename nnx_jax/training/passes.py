"""A strategy's validation passes: whose weights, in which precision, through which hooks; compiled once each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from nnx_jax.core.hooks import owns, runs_on
from nnx_jax.core.stages import TrainingStage
from nnx_jax.engines.nnx_forward import PureModule
from nnx_jax.step import rng
from nnx_jax.step import state as step_state
from nnx_jax.step.calls import HookCalls
from nnx_jax.step.context import StepContext
from nnx_jax.step.plan import HookPlan
from nnx_jax.training.checkpoints import nested_slots
from nnx_jax.training.losses import as_loss
from nnx_jax.training.models import NamedModels, leaves_of
from nnx_jax.training.validation import Pass, ValidationConfig, ValidationError, model_source

_AROUND = (TrainingStage.BEFORE_FORWARD, TrainingStage.AFTER_FORWARD)


class Passes:
    """Runs the validation of one strategy; nothing of its training is changed."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self._made: dict[str, Pass] = {}

    def forget(self) -> None:
        """The step was built anew."""
        self._made = {}

    def run(self, engine: Any, state: Any, step: int, epoch: int) -> dict[str, Any]:
        """One pass with the weights of `state`, or of the models where nothing was trained yet.

        Raises:
            ValidationError: (a RuntimeError) use_ema or use_mixed_precision is "always" and there is none.
        """
        config: ValidationConfig = self.strategy.validation_config
        precision = self._precision(config)
        if precision not in self._made:
            self._made[precision] = self._build(config, precision, engine)
        params, model_state, slots, counters = self._live(engine, state)
        keys = self._averaged(config, self._plan(engine), slots, params, model_state)
        bundle = {"model_state": model_state, "slots": slots, "counters": counters}
        return self._made[precision].run(
            params,
            bundle,
            step=step,
            epoch=epoch,
            model_source=model_source(keys, tuple(self.strategy.models)),
            ema_model_keys=keys,
            precision=precision,
        )

    def _precision(self, config: ValidationConfig) -> str:
        hooked = [h for h in self.strategy.registry if getattr(h, "exclusive_key", "") == "mixed_precision"]
        if config.use_mixed_precision == "always" and not hooked:
            raise ValidationError("use_mixed_precision is 'always', but there is no MixedPrecisionHook; register one")
        return "float32" if config.use_mixed_precision == "never" else self.strategy.precision

    def _build(self, config: ValidationConfig, precision: str, engine: Any) -> Pass:
        strategy = self.strategy
        function = config.validation_fn or strategy.training_fn
        module = NamedModels(strategy.models, function, single=strategy.single_model, resting=())
        kept = next(
            (h.keep_fp32 for h in strategy.registry if getattr(h, "exclusive_key", "") == "mixed_precision"), ()
        )
        pure = PureModule(module, compute_dtype=jnp.dtype(precision), keep_float32=kept, mask_rows=True)
        loss = strategy.loss if config.loss_fn is None else as_loss(config.loss_fn)

        def forward(params: Any, bundle: Any, batch: Any, key: Any, train: bool) -> tuple[Any, Any]:
            return pure.forward(params, bundle["model_state"], batch, key, train)

        return Pass(forward, loss, config, _around(None if engine is None else engine.hooks))

    def _live(self, engine: Any, state: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], Any]:
        """(parameters, model_state, slots, counters) as they are."""
        if engine is not None:
            train = engine.programs.state(state)
            return {**train.frozen, **train.params}, dict(train.model_state), dict(train.slots), train.counters
        params: dict[str, Any] = {}
        rest: dict[str, Any] = {}
        for key, model in self.strategy.models.items():
            own, more = leaves_of(key, model)
            params.update(own)
            rest.update(more)
        plan, slots = self._plan(None), {}
        if plan is not None:
            slots = nested_slots(self.strategy._loaded, plan, params, rest)
        return params, rest, slots, jnp.zeros(len(step_state.COUNTERS), jnp.int32)

    def _plan(self, engine: Any) -> HookPlan | None:
        """The hooks whose slots there are: of the step, or of a checkpoint that no step took over yet."""
        if engine is not None:
            return engine.hooks
        if self.strategy._loaded is None:
            return None
        registry = self.strategy.registry
        update = () if registry.update is None else tuple(registry.update.iter_hooks())
        return HookPlan(update=update, traced=registry.traced, model_keys=tuple(self.strategy.models))

    def _averaged(
        self,
        config: ValidationConfig,
        plan: HookPlan | None,
        slots: Mapping[str, Any],
        params: dict[str, Any],
        rest: dict[str, Any],
    ) -> tuple[str, ...]:
        """Put averaged and published weights into `params` and `rest`; returns the models that have some."""
        if config.use_ema == "never":
            return ()
        keys: list[str] = []
        for hook in plan.update if plan is not None else ():
            averages: Any = getattr(hook, "averages", None)
            slot = slots.get(plan.key(hook)) if plan is not None else None
            found = averages(slot) if averages is not None and slot is not None else None
            if found is not None:
                params.update(found[0])
                rest.update(found[1])
                keys.append(hook.model_key)  # type: ignore[attr-defined]  # a hook with averages has one
        for key, module in self.strategy.inference_models.items():
            own, more = leaves_of(key, module)
            params.update({name: value for name, value in own.items() if name in params})
            rest.update({name: value for name, value in more.items() if name in rest})
            keys.append(key)
        if config.use_ema == "always" and not keys:
            raise ValidationError(
                "use_ema is 'always', but there are no averaged weights yet; register an EMAHook, or validate after "
                "its first update"
            )
        return tuple(dict.fromkeys(keys))


def _around(plan: HookPlan | None) -> Any:
    """Traced hooks around the forward pass take part in validation, too; what they keep in slots is not kept here."""
    hooks = [h for h in (plan.traced if plan is not None else ()) if any(_at(h, stage) for stage in _AROUND)]
    if plan is None or not hooks:
        return None
    calls = HookCalls(plan)

    def adapt(params: Any, bundle: Any, batch: Any, forward: Any) -> tuple[Any, Any]:
        at = bundle["counters"]
        ctx = StepContext(
            batch=dict(batch),
            params=params,
            frozen={},
            model_state=bundle["model_state"],
            batch_count=at[step_state.BATCH],
            step_count=at[step_state.STEP],
            global_step_count=at[step_state.STEP] * plan.world,
            epoch_step_count=at[step_state.EPOCH_BATCH],
            epoch=at[step_state.EPOCH],
            window_starts=True,
            window_closes=True,
            compute_dtype=plan.compute_dtype,
            model_keys=plan.model_keys,
            state=(),
        )
        key = rng.stream_key(rng.run_key(0), rng.EVALUATION)
        ctx.enter(slots=dict(bundle["slots"]), make_rng=lambda index: jax.random.fold_in(key, index))
        calls.at(ctx, TrainingStage.BEFORE_FORWARD)
        outputs = forward(ctx.batch)
        ctx.enter(predictions=outputs)
        calls.at(ctx, TrainingStage.AFTER_FORWARD)
        return ctx.predictions, ctx.batch

    return adapt


def _at(hook: Any, stage: TrainingStage) -> bool:
    return runs_on(hook, stage) and not owns(hook, stage)
