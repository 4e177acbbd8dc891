"""NNModel: train this model for N epochs; predict, evaluate, export."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from flax import nnx

from nnx_jax.core import fsio
from nnx_jax.core.errors import ConfigError, ModelError, RunExistsError
from nnx_jax.core.hashing import hash_arrays
from nnx_jax.data.dataset import TrainingDataset
from nnx_jax.data.loader import LoaderFeed
from nnx_jax.data.pipeline import Feed
from nnx_jax.engines.compile_cache import enable_compile_cache
from nnx_jax.engines.inference import PredictionResult, PredictResult, ProbabilitySpec, decide, probabilities
from nnx_jax.engines.nnx_forward import matching
from nnx_jax.engines.transforms import check_transforms
from nnx_jax.fit import TrainCall, fit, given_parts, listed, prepare
from nnx_jax.fit.framework import FLAX
from nnx_jax.fit.identity import GIVEN, describe_call, describe_function
from nnx_jax.fit.job import loader_identity
from nnx_jax.loop.callbacks import Callback
from nnx_jax.loop.progress import Progress, make_progress, shown
from nnx_jax.nets.resolve import resolve
from nnx_jax.objectives.losses import Loss
from nnx_jax.objectives.objective import Objective, ObjectiveContext, ObjectiveResult
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.history import HistoryJournal
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.net import NNParams
from nnx_jax.params.run import RunSpec
from nnx_jax.params.train import CheckpointParams, NNTrainParams
from nnx_jax.runs.experiment import ExperimentManifest
from nnx_jax.runs.resume import find_point
from nnx_jax.runs.run import NNRun
from nnx_jax.runs.transforms import NNCheckpointTransform, model_arrays, recorded

_TASKS = {"classes": "categorical", "bernoulli": "bernoulli"}


class NNModel:
    """A network with its loss and metrics, ready to be trained, asked and stored.

    Args:
        net_params: shape of a built-in network; sizes left out are taken from the training data.
        params: loss, metrics, precision; `params.net` may hold the network instead of `net_params`.
        module: a Flax NNX module of your own instead of a built-in network; it is trained in place, never copied.
        loss: a loss of your own, `(outputs, batch)` or `(predicted, target)`; see `objectives.losses.wrap_user_loss`.
        seed: seed of the first weights when the network is needed before `train`, which otherwise uses its own seed.

    Raises:
        ConfigError: no network, or two.
    """

    framework: Any = FLAX
    """What stands for the library the network is written in, a `fit.framework.Framework`."""

    def __init__(
        self,
        net_params: NNParams | None = None,
        params: NNModelParams | None = None,
        *,
        module: Any = None,
        loss: Callable[..., Any] | Loss | None = None,
        seed: int = 0,
    ) -> None:
        params = params or NNModelParams()
        if not isinstance(params, NNModelParams):
            raise ConfigError(f"params must be NNModelParams, got {type(params).__name__}")
        nets = [net for net in (net_params, params.net, module) if net is not None]
        if len(nets) != 1:
            raise ConfigError(f"give one network: net_params, params.net or module; got {len(nets)}", path="model.net")
        if module is not None and not self.framework.is_module(module):
            told = f"module must be a {self.framework.kind}, got {type(module).__name__}"
            raise ConfigError(told, path="model.net")
        self.params = params if net_params is None else params.replace(net=net_params)
        self.loss: Any = self.params.loss if loss is None else loss
        self._own_loss = loss
        self._module, self._wrapped, self._seed = module, module is not None, seed
        self._fresh_seed: int | None = None
        self._resolved = self.params.net
        self._frozen: tuple[str, ...] = tuple(self.params.freeze)
        self._transforms: tuple[NNCheckpointTransform, ...] = ()
        self._inference: Any = None
        self._scorer: Any = None
        self._interrupted: tuple[str, dict[str, Any] | None, tuple[Any, ...]] | None = None
        self._began_as: dict[str, Any] | None = None
        self._training = False

    # -- the network -------------------------------------------------------------------------------------------

    @property
    def net(self) -> nnx.Module:
        """The Flax NNX module; built on first use from `seed` when its sizes are known without data.

        Raises:
            ModelError: a size is left to the data, and no data has been seen.
        """
        return self.build({}, self._seed)

    @property
    def models(self) -> dict[str, nnx.Module]:
        """The network by the name hooks call it; empty before it is built."""
        return {} if self._module is None else {"main": self._module}

    @property
    def frozen_patterns(self) -> tuple[str, ...]:
        """Glob patterns of the parameters that are not trained, by `freeze` or by a transform."""
        by_transforms = () if self._module is None else self.framework.frozen_by(self._module, self._transforms)
        return tuple(dict.fromkeys((*self._frozen, *by_transforms)))

    @property
    def net_state(self) -> dict[str, Any] | None:
        """The built network's configuration with every size filled in; None for a module of your own."""
        return None if self._wrapped or self._resolved is None else self._resolved.state()

    def build(self, info: Mapping[str, Any], seed: int) -> nnx.Module:
        """Return the module, building it once from `seed` and what the data says of its sizes."""
        if self._module is None:
            net = self.params.net
            if net is None:
                raise ModelError("there is no network; give model.net, or a module from Python")
            self._resolved = resolve(net, info)
            fresh = self.framework.build(self._resolved, seed, info)
            self._module = self.framework.transform(fresh, self._transforms)
            self._fresh_seed = seed
        return self._module

    def identity(self, seed: int, call: TrainCall | None = None) -> dict[str, Any] | None:
        """Return what the run id must know beyond the configuration; None when the configuration says it all.

        Weights that are not the ones `seed` makes (a module of your own, a trained or loaded network), a loss of your
        own, frozen patterns, and a step, objective or validation from Python change the numbers, so they change the id.
        """
        known: dict[str, Any] = {} if call is None else describe_call(call)
        if self._own_loss is not None:
            known["loss"] = describe_function(self._own_loss)
        if self._frozen != tuple(self.params.freeze):
            known["freeze"] = list(self._frozen)
        if self._transforms:
            known["transforms"] = [transform.state() for transform in self._transforms]
        if self._module is not None and self._fresh_seed != seed:
            known["weights"] = hash_arrays(dict(self.framework.weights(self._module)))
        if self._wrapped and self._module is not None:
            known["module"] = self.framework.describe(self._module)
        if not known:
            self._began_as = None
            return None
        self._began_as = {**(self.params.net.state() if self.params.net is not None else {}), **known}
        return self._began_as

    def adopt(self, module: nnx.Module) -> None:
        """Take over trained weights: the module is the model's own from now on, and no longer a fresh one."""
        self._module, self._fresh_seed = module, None

    @property
    def transforms(self) -> tuple[NNCheckpointTransform, ...]:
        """What was done to the network's topology, in order; every checkpoint records it."""
        return self._transforms

    def transform(self, name: str, version: int = 1, **options: Any) -> NNModel:
        """Change the network's topology, as by `transform("lora", rank=4)`; return the model.

        A network whose sizes are left to the data is changed once it is built.

        Args:
            name, version: a registered transform: "lora", "lora_merge", or one of your own, see `register_transform`.
            options: what it is called with.

        Raises:
            ModelError: (a ValueError) there is no such transform, it does not fit the network, or the model is being
                trained; at the end of a training `TransformAtEnd` does it.
        """
        self._check_idle("transform", "have TransformAtEnd do it at its end, ")
        asked = NNCheckpointTransform(name, version, options)
        check_transforms([asked])
        if self._module is not None:
            self._module = self.framework.transform(self._module, [asked])
        self._transforms += (asked,)
        return self

    def transformed(self, transforms: Sequence[NNCheckpointTransform]) -> None:
        """Note what was done to the network already."""
        self._transforms += tuple(transforms)

    def interrupt(self, run_id: str, seed: int) -> None:
        """Remember which run a signal or an error ended, so that the same call continues it from its last commit.

        The weights are those of somewhere in that run from now on, not those of a fresh network.
        """
        if self._interrupted is None or self._interrupted[0] != run_id:  # stopped again, it still is what it began as
            self._interrupted = (run_id, self._began_as, (self._frozen, self._transforms))
        self._module, self._fresh_seed = self.net, None

    def interrupted_run(self, spec: RunSpec, call: TrainCall, hooks: Sequence[Mapping[str, Any]] = ()) -> str | None:
        """Return the run that was cut short in this process, when all that is given describes that very run."""
        if self._interrupted is None:
            return None
        run_id, identity, done = self._interrupted
        given = {name: known for name, known in (identity or {}).items() if name in GIVEN}
        same = (self._frozen, self._transforms) == done and describe_call(call) == given
        began = spec.run_id(net=identity, data=loader_identity(spec), hooks=hooks)
        return run_id if same and began == run_id else None

    def freeze(self, *patterns: str) -> None:
        """Leave the parameters that match out of training: glob patterns of names such as `layers.0.*`.

        Raises:
            ModelError: a pattern that matches nothing; or the model is being trained.
        """
        self._check_idle("freeze")
        if self._module is not None:
            matching(patterns, self.framework.parameters(self._module))
        self._frozen = tuple(dict.fromkeys((*self._frozen, *patterns)))

    def unfreeze(self, *patterns: str) -> None:
        """Train these again: patterns given to `freeze`, or all of them when none is given.

        Raises:
            ModelError: a pattern that was not frozen; or the model is being trained.
        """
        self._check_idle("unfreeze")
        for pattern in patterns:
            if pattern not in self._frozen:
                raise ModelError(f"pattern {pattern!r} is not frozen; frozen are: {', '.join(self._frozen) or 'none'}")
        self._frozen = tuple(p for p in self._frozen if patterns and p not in patterns)

    def _check_idle(self, what: str, instead: str = "") -> None:
        if self._training:
            raise ModelError(
                f"{what} comes while the model is trained, where it would change nothing: what is trained is settled "
                f"when training starts; call {what} before, {instead}or end this run and continue from it with "
                "weights_only"
            )

    # -- training ----------------------------------------------------------------------------------------------

    def train(
        self,
        params: NNTrainParams,
        callbacks: Sequence[Callback | Callable[..., Any]] | Callback | None = (),
        train_step_fn: Callable[..., Any] | None = None,
        eval_step_fn: Callable[..., Mapping[str, Any]] | None = None,
        salt: str | None = None,
        components: Sequence[Any] | None = None,
        objective: Objective | Callable[[ObjectiveContext], ObjectiveResult] | None = None,
        provenance: ExperimentManifest | None = None,
        history: HistoryJournal | None = None,
        *,
        hooks: Sequence[Any] = (),
        data: NNDataParams | None = None,
        checkpoint: CheckpointParams | None = None,
        mesh: Mapping[str, int] | None = None,
        sharding: Mapping[str, Any] | None = None,
        elastic: bool = False,
        distributed: Any = None,
        runs_dir: str | Path = "runs",
        wait_seconds: float = 0.0,
        quiet: bool = False,
        progress: Progress | None = None,
    ) -> NNRun:
        """Train, or continue the same run where it was interrupted, and return the finished run.

        The model's weights are the trained ones afterwards. Another call with other parameters goes on from there as
        a run of its own; give `resume_from_run_id` to continue a run's epochs and optimizer.

        Args:
            params: how long, with which optimizer, schedule and monitor; `train_loader` and `val_loader` may be there.
            callbacks: Callback objects, or functions of the history rows, called at each epoch's end; one may be alone.
            train_step_fn: a traced step of your own, called with a TrainStepContext; see `nnx_jax.default_train_step`.
            eval_step_fn: a validation of your own, called on the host with an EvalStepContext once per validation.
            salt: any text, for another run of the same configuration.
            components: objects with state of your own that checkpoints hold; see `StatefulComponent`.
            objective: what makes the loss terms in place of the model's loss; see `Objective`.
            provenance: where the experiment comes from; see `ExperimentManifest`.
            history: a journal in bounded memory in place of `idps.csv`. Callbacks then see its newest records, and a
                run that has one keeps it.
            hooks: what takes part in the step, or watches it stage by stage; see `nnx_jax.hooks`.
            data: datasets, batch size and tail rule; not needed with loaders.
            checkpoint: when to commit and what to keep; default: every epoch.
            mesh: devices by axis: {"data": 4} splits the rows of every batch, {"fsdp": 4} rows and parameters,
                {"tensor": 2} the layers of a built-in net; -1 is the rest of those there are. Numbers and run id do not
                depend on it.
            sharding: rules of your own, patterns of parameter paths to the axis of each dimension, as in
                {"head.kernel": [None, "tensor"]}; the first that matches counts.
            elastic: the run may go on with another mesh than it was committed with.
            distributed: `nnx_jax.distributed.DDP()`, where the processes of a group train together, each on its rows;
                every process makes the same call.
            runs_dir: where runs live.
            wait_seconds: how long to wait while another process writes this very run.
            quiet: no progress.
            progress: a display of your own.

        Raises:
            RunExistsError: (a FileExistsError) this very run is finished; nothing is changed.
            ConfigError, DataError, ModelError: (ValueErrors) before anything is written.
            TypeError: `history` is no HistoryJournal, or `distributed` no DDP.
            ProcessGroupError: (a RuntimeError) `distributed` without a group, or a group without it.
            DistributedFailure: another process of the group failed; it raises its own error.
            NonFiniteError: (a FloatingPointError) naming update, microbatch and leaf.
            KeyboardInterrupt: Ctrl-C; the last finished update is committed and the model has its weights.
        """
        if not isinstance(params, NNTrainParams):
            raise ConfigError(f"params must be NNTrainParams, got {type(params).__name__}", path="train")
        if salt is not None:
            params = params.replace(salt=salt)
        commits = checkpoint or CheckpointParams()
        spec = RunSpec(
            backend=self.framework.backend,
            model=self.params,
            data=data,
            train=params,
            checkpoint=commits,
            mesh=mesh or {},
            sharding=sharding or {},
            elastic=elastic,
            given=given_parts(objective, train_step_fn, eval_step_fn),
        )
        call = TrainCall(
            progress=progress or make_progress(quiet),
            callbacks=listed(callbacks),
            hooks=hooks,
            train_step_fn=train_step_fn,
            eval_step_fn=eval_step_fn,
            objective=objective,
            components=tuple(components or ()),
            history=history,
            provenance=provenance,
            runs_dir=runs_dir,
            wait_seconds=wait_seconds,
            distributed=distributed,
        )
        return self.train_spec(spec, call)

    def train_spec(self, spec: RunSpec, call: TrainCall) -> NNRun:
        """Train as a whole specification says; see `train`."""
        if self.params.precision != spec.precision:  # prediction computes as training did
            self.params = self.params.replace(precision=spec.precision)
        self._training = True
        try:
            run = fit(self, spec, call)
        finally:
            self._training = False
        self.adopt(self.net)
        self._interrupted = None
        return run

    # -- asking ------------------------------------------------------------------------------------------------

    def predict(self, x: Any, *, batch_size: int = 256) -> PredictResult:
        """Return outputs and decided classes for rows x [N, ...]; the module's modes are not touched."""
        logits = self._outputs(x, batch_size)
        return PredictResult(logits, decide(self.framework.build_loss(self.loss).task, logits))

    def predict_proba(self, x: Any, spec: ProbabilitySpec | None = None, *, batch_size: int = 256) -> PredictionResult:
        """Return probabilities for rows x [N, ...], or for a dataset or feed of them.

        Args:
            spec: how to read the outputs; default: by the loss (softmax for cross entropy, sigmoid for yes/no).

        Raises:
            TypeError: no spec, and the loss does not say how to read outputs.
            PredictionValidationError: (a ValueError) the outputs are no probabilities as asked.
        """
        if spec is None:
            kind = _TASKS.get(self.framework.build_loss(self.loss).task)
            if kind is None:
                raise TypeError("the loss does not say how outputs become probabilities; give a ProbabilitySpec")
            spec = ProbabilitySpec(kind)
        if getattr(x, "shuffle", False):
            message = "the rows are shuffled, so sample_ids are positions in this order, not rows of the dataset"
            warnings.warn(message, UserWarning, stacklevel=2)
        return probabilities(self._outputs(x, batch_size), spec)

    def evaluate(self, data: Any, *, batch_size: int = 256) -> dict[str, float]:
        """Return loss and metrics over every row of a dataset (or loader of batches), each row once.

        Raises:
            DataError: (a ValueError) no rows, or labels that are no class.
        """
        wide = self.params.precision == "float64"
        if isinstance(data, TrainingDataset):
            feed: Any = Feed.evaluation(data.widened(wide), batch_size=min(batch_size, len(data)) or 1)
        else:
            feed = LoaderFeed(data, wide=wide)
        if self._scorer is None or self._scorer.module is not self.net or self._scorer.params != self.params:
            self._scorer = self.framework.scorer(self.net, self.framework.build_loss(self.loss), self.params)
        return self._scorer.score(feed)

    def _outputs(self, x: Any, batch_size: int) -> np.ndarray:
        if isinstance(x, TrainingDataset):
            x = x.widened(self.params.precision == "float64")
            columns = x.arrays()
            x = columns["x"] if columns is not None else x.take(np.arange(len(x)))["x"]
        elif isinstance(x, Feed):
            x = np.concatenate([batch["x"][batch["mask"] > 0] for batch in x.batches(0)])
        if self._inference is None or self._inference.module is not self.net:
            self._inference = self.framework.inference(self.net, self.params.precision)
        return self._inference.outputs(x, batch_size)

    # -- storing -----------------------------------------------------------------------------------------------

    def export_state_dict(self, path: str | Path) -> Path:
        """Write every weight and statistic by name to a safetensors file; return its path. No pickle."""
        from safetensors.numpy import save

        target = Path(path)
        weights = {name: np.asarray(value, order="C") for name, value in self.framework.weights(self.net).items()}
        fsio.atomic_write(target, save(weights))
        return target

    @classmethod
    def from_checkpoint(cls, source: str, *, runs_dir: str | Path = "runs", module: Any = None) -> Self:
        """Return the model of a stored run, with the weights of `RUN[@LAST|BEST|tag|step]`.

        A run that the other engine wrote opens too when its network is a built-in one.

        Args:
            module: the module a run of your own module was trained with, as it was before any transform; its weights
                are replaced.

        Raises:
            ResumePointError: (a ValueError) no such checkpoint, any byte of it is not what was committed, or the other
                engine wrote it for a module of your own.
            ModelError: (a ValueError) the run has a module of your own and none is given, or a transform it records is
                not registered; no weights are loaded.
        """
        point = find_point(runs_dir, source)
        run = NNRun.load(point.run_id, runs_dir)
        params = NNModelParams.from_state(run.state.get("model", {}), source=str(run.path / "run.yaml"))
        params = params.replace(precision=point.host["topology"]["precision"])
        net = None
        if module is None:
            state = point.host["topology"]["net"]
            if state is None:
                raise ModelError(f"run {point.run_id} trained a module of your own; give it as module=")
            net = NNParams.from_state(state)
            model = cls(params=params.replace(net=net))
        else:
            model = cls(params=params.replace(net=None), module=module)
        done = recorded(point)
        model.adopt(cls.framework.transform(model.net, done))
        model.transformed(done)
        written_by = point.host["topology"].get("engine", "flax")
        cls.framework.load(model.net, model_arrays(point), net, written_by, source)
        model.adopt(model.net)
        return model


def train_spec(
    spec: RunSpec,
    *,
    runs_dir: str | Path = "runs",
    quiet: bool = False,
    distributed: Any = None,
    face: Callable[..., NNModel] = NNModel,
) -> dict[str, Any]:
    """Train what a configuration file describes; return the result as plain values.

    A run that is finished already is left alone and its result returned.

    Args:
        face: makes the NNModel of the backend that the configuration names.
    """
    model = face(params=spec.model)
    progress = make_progress(quiet)
    try:
        run = model.train_spec(spec, TrainCall(progress, runs_dir=runs_dir, distributed=distributed))
    except RunExistsError as finished:
        run = NNRun.load(finished.run_id, runs_dir)
        progress.message(f"run {run.id} is finished already; nothing to do (another --salt trains it again)")
    artifact = run.artifact or {}
    return {"run_id": run.id, **artifact, "run_dir": shown(run.path)}


class _Shapes(NNModel):
    """A model whose network is known by its shapes alone, so that it may be larger than this machine."""

    def build(self, info: Mapping[str, Any], seed: int) -> nnx.Module:
        if self._module is None:
            self._module = nnx.eval_shape(lambda: super(_Shapes, self).build(info, seed))
        return self._module


def dry_run(spec: RunSpec) -> dict[str, Any]:
    """Check, trace and compile one update; return parameters, FLOPs and memory. Nothing is trained or written."""
    enable_compile_cache()
    try:
        job = prepare(_Shapes(params=spec.model), spec)
    except (TypeError, jax.errors.JAXTypeError):  # a net or a hook of the user's that needs values
        job = prepare(NNModel(params=spec.model), spec)
    return {"run_id": job.run_id, **job.engine.costs()}
