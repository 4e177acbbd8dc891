"""The backend "numpyro-mcmc": the posterior of a probabilistic model by NUTS or HMC, in one run over all rows."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np

from nnx_jax.backends.base import Trained
from nnx_jax.backends.carry import TrainerCarryState
from nnx_jax.backends.facts import Stopwatch, about, peak_memory
from nnx_jax.core.errors import ConfigError
from nnx_jax.engines.bayes import NumpyroTask, model_args, require_numpyro, require_task
from nnx_jax.engines.numpyro_mcmc import Draws, sample
from nnx_jax.engines.predictive import NumpyroPredictiveOp
from nnx_jax.loop import callbacks as own
from nnx_jax.loop.context import TrainContext
from nnx_jax.loop.step_callbacks import StepCallbacks

UNUSED = (
    "loss", "optimizer_config", "batch_size", "accumulate", "steps_per_epoch", "eval_every_n_steps",
    "log_every_n_steps", "checkpoint_every_n_steps", "max_checkpoints_to_keep", "checkpoint_dir", "metric_writer",
    "val_dataset", "metrics", "hooks", "on_nonfinite", "resume", "debug", "sharding", "distributed",
)  # fmt: skip
"""Fields of a loop that mean nothing to one blocking run over all rows."""


def run(loop: Any, state: TrainerCarryState | None) -> Trained:
    """Sample the posterior of the loop's task; see `TrainingLoop`.

    Of callbacks only `on_train_begin` and `on_train_end` are called. `final_step` is the number of draws.

    Warns:
        UserWarning: fields are set that do not apply, naming them.

    Raises:
        ConfigError: (a ValueError) there is no task, or a precision in which no log density is accurate.
        TypeError: the task is no NumpyroTask.
        DataError, ModelError: (ValueErrors) see `engines.numpyro_mcmc.sample`.
        SiteError: (a KeyError) the model has no such site as the task predicts.
        ImportError: NumPyro is not installed.
    """
    task = require_task(loop.task, loop.loss, loop.backend)
    require_numpyro()
    if loop.precision not in ("float32", "float64"):
        raise ConfigError(f"got '{loop.precision}', but a log density needs float32 or float64", path="precision")
    warn_unused(loop, task)
    dataset, watch = loop.dataset.widened(loop.precision == "float64"), Stopwatch()
    args = model_args(dataset.take(np.arange(len(dataset))))
    shape = tuple(args[0].shape[1:])
    ended = _Ended()
    mine = [each for each in loop.callbacks if isinstance(each, own.Callback)]
    others = [each for each in loop.callbacks if not isinstance(each, own.Callback)]
    callbacks = own.CallbackList([*mine, StepCallbacks(loop, others, loop.metric_writer, make_model=ended)])
    ctx, error = TrainContext("0" * 16), None
    try:
        callbacks.train_begin(ctx)
        draws = sample(task, args, loop.seed)
        made = NumpyroPredictiveOp(task, seed=loop.seed, input_shape=shape)
        ended.operator, ctx.step = made.with_samples(draws.flat), int(draws.diverging.size)
    except BaseException as failure:
        ctx.error = error = failure
        raise
    finally:
        callbacks.train_end(ctx, error)
    return _trained(loop, state, ended.operator, draws, watch)


class _Ended:
    """Shows callbacks the posterior, once there is one."""

    operator: Any = None

    def __call__(self, ctx: TrainContext) -> Any:
        return self.operator


def warn_unused(loop: Any, task: NumpyroTask) -> None:
    """Name the fields that are set and mean nothing here."""
    named = [name for name in UNUSED if name in loop.changed() or _given(loop, name)]
    if loop.max_steps not in (task.num_samples, task.num_samples * task.num_chains):
        named.insert(0, "max_steps")  # which every loop has to have; the number of draws is no contradiction
    if named:
        warnings.warn(
            f"backend {loop.backend!r} is one run over all rows, to which {', '.join(named)} do not apply; its length "
            "is NumpyroTask(num_warmup=, num_samples=, num_chains=)",
            UserWarning,
            stacklevel=2,
        )


def _given(loop: Any, name: str) -> bool:
    """A field for Python only, which no state has, is set."""
    return bool(type(loop).model_fields[name].exclude) and getattr(loop, name) is not None


def _trained(loop: Any, before: Any, operator: Any, draws: Draws, watch: Stopwatch) -> Trained:
    told, count = draws.diagnostics(), int(draws.diverging.size)
    metrics = {"acceptance_rate": told["acceptance_rate"], "num_divergences": float(told["num_divergences"])}
    state = TrainerCarryState(
        model=operator,
        step=count + (0 if before is None else before.step),
        metrics=metrics,
        rng=np.asarray(jax.random.key_data(jax.random.key(loop.seed)), np.uint32),
        loop=loop.identity(),
    )
    info = {
        **about("numpyro-mcmc", ("numpyro",)),
        **watch.facts(count),
        **peak_memory(),
        **told,
        "kernel": loop.task.kernel,
        "final_step": count,
        "final_metrics": metrics,
        "sharding": None,
        "stop_reason": None,
        "seed": loop.seed,
        "run_id": None,
    }
    return Trained(operator, state, info)
