"""The backend "blackjax": chains of a sampler under a TrainingLoop, a step of which is one draw of every chain."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nnx_jax.backends.base import Trained
from nnx_jax.backends.carried import WEIGHT_NAMES
from nnx_jax.backends.carry import TrainerCarryState
from nnx_jax.backends.facts import Stopwatch, about, peak_memory
from nnx_jax.backends.gradient import Last, Recipe, Stage
from nnx_jax.backends.parts import split_callbacks
from nnx_jax.backends.stored import LoopMark, stage_before, writing
from nnx_jax.core.errors import ConfigError, ModelError
from nnx_jax.data.dataset import TrainingDataset
from nnx_jax.engines.bayes import NumpyroTask
from nnx_jax.engines.blackjax import BlackjaxEngine
from nnx_jax.engines.blackjax_batches import Minibatches
from nnx_jax.engines.blackjax_samplers import make_sampler, require_blackjax
from nnx_jax.engines.blackjax_task import BlackjaxTask, Target, as_blackjax_task, make_target
from nnx_jax.engines.chains import BlackjaxPredictiveOp, Posterior
from nnx_jax.engines.compile_cache import enable_compile_cache
from nnx_jax.engines.feeds import make_feeds
from nnx_jax.engines.predictive import NumpyroPredictiveOp, check_site
from nnx_jax.fit import fit
from nnx_jax.fit.call import TrainCall
from nnx_jax.fit.framework import Framework
from nnx_jax.fit.identity import describe_function
from nnx_jax.fit.job import Job, identify
from nnx_jax.fit.schedules import RunSchedules
from nnx_jax.loop.hook_events import HookEvents
from nnx_jax.loop.progress import make_progress
from nnx_jax.loop.step_callbacks import StepCallbacks
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.run import RunSpec
from nnx_jax.params.train import CheckpointParams, NNTrainParams
from nnx_jax.runs.resume import ResumePoint
from nnx_jax.runs.run import NNRun
from nnx_jax.spmd.world import ALONE, World

EPOCH = 2**16
"""Draws of an epoch where `steps_per_epoch` does not say how many. No pass over minibatches is one: it may be short."""
UNUSED = ("optimizer_config", "loss", "metrics", "val_dataset", "eval_every_n_steps")
"""Settings of a loop that say nothing to a sampler."""


def run(loop: Any, state: TrainerCarryState | None) -> Trained:
    """Sample `max_steps` draws of every chain as the loop's task says; see `BlackjaxTask`.

    Raises:
        ImportError: BlackJAX is not installed; it names the extra.
        ConfigError: (a ValueError) no task, or a setting that no sampler can follow.
        TypeError: the task is neither a BlackjaxTask nor a NumpyroTask.
        NonFiniteError: (a FloatingPointError) a draw is not finite and `on_nonfinite` is "raise".

    Warns:
        UserWarning: settings of loop or task were given that say nothing to a sampler; or tempered SMC has not reached
            temperature 1.
    """
    task = as_blackjax_task(loop.task, loop.loss)
    require_blackjax()
    _check_settings(loop, task)
    with contextlib.ExitStack() as stack:
        folder = loop.directory or stack.enter_context(tempfile.TemporaryDirectory(prefix="nnx_jax-"))
        if loop.directory is not None:
            stack.enter_context(writing(folder))
        return _Sampling(loop, state, task, folder).run()


def _check_settings(loop: Any, task: BlackjaxTask) -> None:
    for name, plain in {"accumulate": 1, "sharding": None, "distributed": None, "precision": "float32"}.items():
        if getattr(loop, name) != plain:
            told = f"backend 'blackjax' samples with {name}={plain!r}"
            raise ConfigError(f"got {getattr(loop, name)!r}; {told}", path=f"TrainingLoop.{name}")
    if loop.on_nonfinite == "skip":
        told = "got 'skip', but a chain without its draw is another chain; write 'raise' or 'stop'"
        raise ConfigError(told, path="TrainingLoop.on_nonfinite")
    if loop.resume == "weights_only":
        told = "got 'weights_only', but chains have no weights; write 'auto' or 'full'"
        raise ConfigError(told, path="TrainingLoop.resume")
    unused = [*UNUSED, *(() if task.minibatches else ("batch_size",))]
    given = [name for name in unused if name in loop.model_fields_set and getattr(loop, name) != loop.default_of(name)]
    if given:
        told = f"backend 'blackjax' with sampler {task.sampler!r} does not use {', '.join(given)}"
        warnings.warn(told, UserWarning, stacklevel=6)
    for told in _unused_of(task.numpyro_task, loop.max_steps):
        warnings.warn(f"backend 'blackjax' does not use NumpyroTask.{told}", UserWarning, stacklevel=6)


def _unused_of(source: NumpyroTask | None, draws: int) -> Iterator[str]:
    """What a NumPyro source asks for in vain: NumPyro's own options, and another number of draws than the loop's."""
    if source is None:
        return
    if source.kernel_options:
        yield "kernel_options; give BlackjaxTask(numpyro_task=..., target_acceptance_rate=...) for its own"
    if source.num_samples not in (NumpyroTask.num_samples, draws):
        yield f"num_samples, {source.num_samples}; max_steps={draws} are the draws of each chain"


class BlackjaxFramework(Framework):
    """What the loop asks of BlackJAX. There is no network: what is trained is a posterior."""

    backend = "blackjax"
    kind = "BlackjaxTask"
    has_mesh = False

    def prepare(self, model: Any, spec: RunSpec, events: HookEvents | None, call: TrainCall, world: World) -> Job:
        """Check and build everything that needs no run directory.

        Raises:
            ConfigError, DataError, ModelError: (ValueErrors) before anything is compiled or written.
        """
        self.check(spec)
        enable_compile_cache()
        assert events is not None
        if events.registry.update is not None or events.registry.traced:
            raise ConfigError("a sampler makes no update that hooks could take part in; give host hooks", path="hooks")
        run_id = identify(model, spec, events, call)
        engine = build_engine(model.task, spec, model.description)
        model.engine = engine
        return Job(spec, engine, RunSchedules(), run_id)


def build_engine(task: BlackjaxTask, spec: RunSpec, description: str = "") -> BlackjaxEngine:
    """Return the engine of a settled task over the data of a specification."""
    dataset = None if spec.data is None else spec.data.train
    rows = 0 if dataset is None else len(dataset)
    target = make_target(task, lambda: _columns(dataset), rows)
    batches = _minibatches(spec, target) if task.minibatches else None
    per_epoch = spec.training.steps_per_epoch or EPOCH
    return BlackjaxEngine(spec, make_sampler(task, target), per_epoch, batches, description)


def _columns(dataset: Any) -> Mapping[str, Any]:
    """All rows of a dataset by column."""
    if dataset is None:
        raise ConfigError("this log density is of the rows of a dataset; give one", path="data.train")
    whole = dataset.arrays()
    return dataset.take(np.arange(len(dataset))) if whole is None else whole


def _minibatches(spec: RunSpec, target: Target) -> Minibatches:
    """The batches of a sampler that takes them, all of one size.

    Rows that fill no batch are padded where the estimate weighs rows, else left out of that pass.
    """
    if spec.data is None:
        raise ConfigError("this sampler takes minibatches of a dataset; give one", path="data.train")
    data, weighs = spec.data, target.weighs_rows
    if data.tail == "keep" or (data.tail == "pad" and not weighs):
        data = data.replace(tail="pad" if weighs else "drop")
    feed = make_feeds(spec.replace(data=data))["train"]
    target.check_batches(data.batch_size)
    return Minibatches(feed, weighs_rows=weighs)


class BlackjaxModel:
    """A task as the loop's model: it has an identity and, after training, a posterior.

    Args:
        task: with every default filled in.

    Attributes:
        engine: of the last training.
    """

    framework = BlackjaxFramework()
    models: Mapping[str, Any] = {}
    transforms: tuple[Any, ...] = ()

    def __init__(self, task: BlackjaxTask, input_shape: tuple[int, ...] | None = None) -> None:
        self.task, self.input_shape = task, input_shape
        self.engine: BlackjaxEngine | None = None
        parts = {n: value for n, value in vars(task).items() if value is not None and n != "numpyro_task"}
        if task.numpyro_task is not None:
            parts["numpyro_model"] = task.numpyro_task.model
        self.description = describe_function(parts)

    def identity(self, seed: int, call: TrainCall | None = None) -> dict[str, Any]:
        """What the run id knows beyond the configuration: the task, with the text of its functions."""
        del seed, call
        return {"task": self.description}

    def interrupted_run(self, spec: RunSpec, call: TrainCall, hooks: Sequence[Mapping[str, Any]] = ()) -> str | None:
        """A task is the same before and after a training, so the same call has the same id anyway."""
        return None

    def interrupt(self, run_id: str, seed: int) -> None:
        """Nothing changed that the same call would not find again."""

    def transformed(self, transforms: Sequence[Any]) -> None:
        """A posterior has no topology."""

    def train_spec(self, spec: RunSpec, call: TrainCall) -> NNRun:
        """Sample as a whole specification says."""
        return fit(self, spec, call)

    def operator(self, posterior: Posterior) -> Any:
        """The posterior-predictive operator of these draws.

        Raises:
            ModelError: (a ValueError) there is no draw.
        """
        if posterior.positions is None:
            raise ModelError("there is no draw yet, so there is no posterior to predict from")
        shape = {} if self.input_shape is None else {"input_shape": self.input_shape}
        if self.task.numpyro_task is not None:
            op = NumpyroPredictiveOp(self.task.numpyro_task, site=self.task.predictive_site, **shape)
            return op.with_samples(posterior.flat(dict(posterior.values)))
        positions = posterior.flat(posterior.positions)
        return BlackjaxPredictiveOp(self.task.predict_fn, positions, str(self.task.predictive_site), **shape)


class _Sampling(Stage):
    """One sampling of one loop: the stages of a training by gradients, with chains in place of weights."""

    def __init__(self, loop: Any, state: TrainerCarryState | None, task: BlackjaxTask, folder: str | Path) -> None:
        self.loop, self.folder, self.before, self.task = loop, folder, state, task
        self.watch, self.op, self.val, self.parent, self.world = Stopwatch(), None, None, None, ALONE
        self.whole = state is not None and state.host is not None and self._takes_all(state)
        packages = ("blackjax",) if task.numpyro_task is None else ("blackjax", "numpyro")
        untyped: Any = BlackjaxModel
        nothing: Any = None
        self.recipe = Recipe("blackjax", untyped, packages, nothing, nothing, nothing, nothing)
        used = task.uses_data and isinstance(loop.dataset, TrainingDataset)
        info = loop.dataset.info if used else {}
        self.shape = tuple(info["input_shape"]) if "input_shape" in info else None
        if task.numpyro_task is not None:
            check_site(task.numpyro_task, loop.dataset.take(np.arange(1))["x"])
        self.model: Any = BlackjaxModel(task, self.shape)
        self.last, self.known = Last(), None
        self.mark = LoopMark(loop, None, stage_before(loop, state), self._told)
        mine, step_form = split_callbacks(loop.callbacks)
        self.steps = StepCallbacks(
            loop,
            step_form,
            loop.metric_writer,
            loop.log_every_n_steps,
            self._shown,
            steps_per_epoch=loop.steps_per_epoch,
            read_every=loop.log_every_n_steps,
        )
        self.callbacks = [self.last, *mine, self.steps]

    def _spec(self, point: Any, steps: int) -> RunSpec:
        loop = self.loop
        return RunSpec(
            backend="blackjax",
            data=self._data() if self.task.uses_data else None,
            train=NNTrainParams(
                max_steps=steps,
                seed=loop.seed,
                log_every_n_steps=loop.log_every_n_steps,
                eval_every_n_epochs=None,
                monitor=self._monitor(),
                save_phase_checkpoints=False,
                dispatch="step" if loop.debug else "auto",
                resume_from_run_id=point.run_id if isinstance(point, ResumePoint) else None,
                salt=self._salt(point),
            ),
            hooks=tuple(hook for hook in loop.hooks if getattr(hook, "family", "") == "hook"),
            checkpoint=CheckpointParams(every_n_steps=loop.commit_every, every_n_epochs=None, keep=loop.keep),
        )

    def _data(self) -> NNDataParams:
        loop = self.loop
        return NNDataParams(train=loop.dataset, batch_size=loop.batch_size, tail="straddle", seed=loop.seed)

    def _call(self, point: Any) -> TrainCall:
        return TrainCall(
            progress=make_progress(self.loop.quiet),
            callbacks=tuple(self.callbacks),
            hooks=tuple(hook for hook in self.loop.hooks if getattr(hook, "family", "") != "hook"),
            runs_dir=self.folder,
            components=(self.mark,),
            start=point,
        )

    def _weights(self) -> dict[str, np.ndarray]:
        return {}

    def _shown(self, ctx: Any) -> Any:
        return self.known if self.known is not None else self.model.operator(ctx.sync())

    def _operator_of(self, point: Any) -> Any:
        engine = self.model.engine = build_engine(self.task, self._spec(None, 1), self.model.description)
        leaves = point.leaves
        state = engine.restore(engine.start(), point.load(engine.abstract(engine.start(), leaves)))
        self.known = self.model.operator(engine.trained(state))
        return self.known

    def _trained(self, point: Any, operator: Any, reason: str | None, done: int) -> Trained:
        posterior: Posterior = self.model.engine.posterior
        metrics = dict(self.steps.state.metrics) | self.last.values
        goes_on = self.before is not None and self.whole and self._same(self.before)
        stages = 0 if self.before is None or goes_on else self.before.step
        carried = self.before.step if self.before is not None and self.whole and not goes_on else 0
        state = TrainerCarryState(
            model=operator,
            opt_state={name: np.asarray(array) for name, array in point.load_all().items()},
            step=point.step + stages - carried,
            epoch=0 if self.loop.steps_per_epoch is None else point.step // self.loop.steps_per_epoch,
            metrics=metrics,
            loop=self.loop.identity(),
            host={**point.host, WEIGHT_NAMES: []},
        )
        divergent = posterior.stats.get("is_divergent")
        sites = posterior.diagnostics()
        info = {
            **about("blackjax", self.recipe.packages),
            **{name: value for name, value in self.watch.facts(0).items() if value is not None},
            **peak_memory(),
            "final_step": point.step,
            "final_metrics": {name: value if np.isfinite(value) else None for name, value in metrics.items()},
            "sharding": None,
            "stop_reason": reason,
            "seed": self.loop.seed,
            "run_id": point.run_id if self.loop.directory is not None else None,
            "sampler": self.task.sampler,
            "num_chains": self.task.num_chains,
            "num_draws": int(np.shape(next(iter(posterior.values.values())))[1]),
            "num_divergences": 0 if divergent is None else int(divergent.sum()),
            "sites": sites,
            "r_hat": {name: told.get("r_hat") for name, told in sites.items()},
            "ess": {name: told.get("ess") for name, told in sites.items()},
            **posterior.facts,
        }
        temperature = posterior.facts.get("tempering_param", 1.0)
        if temperature < 1.0:
            told = f"the particles are of temperature {temperature:.3g}, not yet of the posterior (1); raise max_steps"
            warnings.warn(told, UserWarning, stacklevel=7)
        return Trained(operator, state, info)
