"""NNModel: train this model for N epochs; predict, evaluate, export."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from nnx_jax.core import fsio
from nnx_jax.core.errors import ConfigError, ModelError, ResumePointError, RunExistsError
from nnx_jax.core.hashing import content_hash, hash_arrays
from nnx_jax.data.dataset import TrainingDataset
from nnx_jax.data.loader import LoaderFeed
from nnx_jax.data.pipeline import Feed
from nnx_jax.engines.compile_cache import enable_compile_cache
from nnx_jax.engines.inference import (
    Inference,
    PredictionResult,
    PredictResult,
    ProbabilitySpec,
    decide,
    probabilities,
    weights_of,
)
from nnx_jax.engines.nnx_forward import PureModule, matching
from nnx_jax.engines.scoring import ModelScorer
from nnx_jax.fit import fit, prepare
from nnx_jax.loop.callbacks import Callback
from nnx_jax.loop.progress import Progress, make_progress
from nnx_jax.nets import build_net
from nnx_jax.nets.resolve import resolve
from nnx_jax.objectives.losses import Loss, build_loss
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.net import NNParams
from nnx_jax.params.run import RunSpec
from nnx_jax.params.train import CheckpointParams, NNTrainParams
from nnx_jax.runs.resume import find_point
from nnx_jax.runs.run import NNRun

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

    def __init__(
        self,
        net_params: NNParams | None = None,
        params: NNModelParams | None = None,
        *,
        module: nnx.Module | None = None,
        loss: Callable[..., Any] | Loss | None = None,
        seed: int = 0,
    ) -> None:
        params = params or NNModelParams()
        if not isinstance(params, NNModelParams):
            raise ConfigError(f"params must be NNModelParams, got {type(params).__name__}")
        nets = [net for net in (net_params, params.net, module) if net is not None]
        if len(nets) != 1:
            raise ConfigError(f"give one network: net_params, params.net or module; got {len(nets)}", path="model.net")
        if module is not None and not isinstance(module, nnx.Module):
            raise ConfigError(f"module must be a flax.nnx.Module, got {type(module).__name__}", path="model.net")
        self.params = params if net_params is None else params.replace(net=net_params)
        self.loss: Any = self.params.loss if loss is None else loss
        self._own_loss = loss
        self._module, self._wrapped, self._seed = module, module is not None, seed
        self._fresh_seed: int | None = None
        self._resolved = self.params.net
        self._frozen: tuple[str, ...] = tuple(self.params.freeze)
        self._inference: Inference | None = None
        self._scorer: ModelScorer | None = None
        self._interrupted: tuple[str, dict[str, Any] | None, tuple[str, ...]] | None = None
        self._began_as: dict[str, Any] | None = None

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
        """Glob patterns of the parameters that are not trained."""
        return self._frozen

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
            self._module = build_net(self._resolved, rngs=nnx.Rngs(seed), info=info)
            self._fresh_seed = seed
        return self._module

    def identity(self, seed: int) -> dict[str, Any] | None:
        """Return what the run id must know beyond the configuration; None when the configuration says it all.

        Weights that are not the ones `seed` makes (a module of your own, a trained or loaded network), a loss of your
        own and frozen patterns given from Python change the numbers, so they change the id.
        """
        known: dict[str, Any] = {}
        if self._own_loss is not None:
            known["loss"] = _describe_function(self._own_loss)
        if self._frozen != tuple(self.params.freeze):
            known["freeze"] = list(self._frozen)
        if self._module is not None and self._fresh_seed != seed:
            known["weights"] = hash_arrays(dict(weights_of(self._module)))
        if self._wrapped:
            known["module"] = type(self._module).__qualname__
        if not known:
            self._began_as = None
            return None
        self._began_as = {**(self.params.net.state() if self.params.net is not None else {}), **known}
        return self._began_as

    def adopt(self, module: nnx.Module) -> None:
        """Take over trained weights: the module is the model's own from now on, and no longer a fresh one."""
        self._module, self._fresh_seed = module, None

    def interrupt(self, run_id: str, seed: int) -> None:
        """Remember which run a signal stopped, so that the same call continues it from its last commit."""
        self._interrupted = (run_id, self._began_as, self._frozen)
        self._module, self._fresh_seed = self.net, None

    def interrupted_run(self, spec: RunSpec, hooks: Sequence[Mapping[str, Any]] = ()) -> str | None:
        """Return the run that a signal stopped in this process, when `spec` and `hooks` describe that very run."""
        if self._interrupted is None:
            return None
        run_id, identity, frozen = self._interrupted
        same = self._frozen == frozen and spec.run_id(net=identity, hooks=hooks) == run_id
        return run_id if same else None

    def freeze(self, *patterns: str) -> None:
        """Leave the parameters that match out of training: glob patterns of names such as `layers.0.*`.

        Raises:
            ModelError: a pattern that matches nothing.
        """
        if self._module is not None:
            matching(patterns, PureModule(self._module).params)
        self._frozen = tuple(dict.fromkeys((*self._frozen, *patterns)))

    def unfreeze(self, *patterns: str) -> None:
        """Train these again: patterns given to `freeze`, or all of them when none is given.

        Raises:
            ModelError: a pattern that was not frozen.
        """
        for pattern in patterns:
            if pattern not in self._frozen:
                raise ModelError(f"pattern {pattern!r} is not frozen; frozen are: {', '.join(self._frozen) or 'none'}")
        self._frozen = tuple(p for p in self._frozen if patterns and p not in patterns)

    # -- training ----------------------------------------------------------------------------------------------

    def train(
        self,
        params: NNTrainParams,
        callbacks: Sequence[Callback | Callable[..., Any]] | None = (),
        *,
        hooks: Sequence[Any] = (),
        data: NNDataParams | None = None,
        checkpoint: CheckpointParams | None = None,
        salt: str | None = None,
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
            callbacks: Callback objects, or functions of the history rows, called at each epoch's end.
            hooks: what takes part in the step, or watches it stage by stage; see `nnx_jax.hooks`.
            data: datasets, batch size and tail rule; not needed with loaders.
            checkpoint: when to commit and what to keep; default: every epoch.
            salt: any text, for another run of the same configuration.
            runs_dir: where runs live.
            wait_seconds: how long to wait while another process writes this very run.
            quiet: no progress.
            progress: a display of your own.

        Raises:
            RunExistsError: (a FileExistsError) this very run is finished; nothing is changed.
            ConfigError, DataError, ModelError: (ValueErrors) before anything is written.
            NonFiniteError: (a FloatingPointError) naming update, microbatch and leaf.
            KeyboardInterrupt: Ctrl-C; the last finished update is committed and the model has its weights.
        """
        if not isinstance(params, NNTrainParams):
            raise ConfigError(f"params must be NNTrainParams, got {type(params).__name__}", path="train")
        if salt is not None:
            params = params.replace(salt=salt)
        spec = RunSpec(model=self.params, data=data, train=params, checkpoint=checkpoint or CheckpointParams())
        progress = progress or make_progress(quiet)
        return self.train_spec(spec, callbacks or (), runs_dir, progress, hooks=hooks, wait_seconds=wait_seconds)

    def train_spec(
        self,
        spec: RunSpec,
        callbacks: Sequence[Callback | Callable[..., Any]],
        runs_dir: str | Path,
        progress: Progress,
        *,
        hooks: Sequence[Any] = (),
        wait_seconds: float = 0.0,
    ) -> NNRun:
        """Train as a whole specification says; see `train`."""
        if self.params.precision != spec.precision:  # prediction computes as training did
            self.params = self.params.replace(precision=spec.precision)
        run = fit(
            self,
            spec,
            callbacks=callbacks,
            hooks=hooks,
            runs_dir=runs_dir,
            wait_seconds=wait_seconds,
            progress=progress,
        )
        self.adopt(self.net)
        progress.message(f"Run saved to {_shown(run.path)}")
        return run

    # -- asking ------------------------------------------------------------------------------------------------

    def predict(self, x: Any, *, batch_size: int = 256) -> PredictResult:
        """Return outputs and decided classes for rows x [N, ...]; the module's modes are not touched."""
        logits = self._outputs(x, batch_size)
        return PredictResult(logits, decide(build_loss(self.loss).task, logits))

    def predict_proba(self, x: Any, spec: ProbabilitySpec | None = None, *, batch_size: int = 256) -> PredictionResult:
        """Return probabilities for rows x [N, ...], or for a dataset or feed of them.

        Args:
            spec: how to read the outputs; default: by the loss (softmax for cross entropy, sigmoid for yes/no).

        Raises:
            TypeError: no spec, and the loss does not say how to read outputs.
            PredictionValidationError: (a ValueError) the outputs are no probabilities as asked.
        """
        if spec is None:
            kind = _TASKS.get(build_loss(self.loss).task)
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
        known = isinstance(data, TrainingDataset)
        feed = Feed.evaluation(data, batch_size=min(batch_size, len(data)) or 1) if known else LoaderFeed(data)
        if self._scorer is None or self._scorer.module is not self.net or self._scorer.params != self.params:
            self._scorer = ModelScorer(self.net, build_loss(self.loss), self.params)
        return self._scorer.score(feed)

    def _outputs(self, x: Any, batch_size: int) -> np.ndarray:
        if isinstance(x, TrainingDataset):
            columns = x.arrays()
            x = columns["x"] if columns is not None else x.take(np.arange(len(x)))["x"]
        elif isinstance(x, Feed):
            x = np.concatenate([batch["x"][batch["mask"] > 0] for batch in x.batches(0)])
        if self._inference is None or self._inference.module is not self.net:
            self._inference = Inference(self.net, self.params.precision)
        return self._inference.outputs(x, batch_size)

    # -- storing -----------------------------------------------------------------------------------------------

    def export_state_dict(self, path: str | Path) -> Path:
        """Write every weight and statistic by name to a safetensors file; return its path. No pickle."""
        from safetensors.numpy import save

        target = Path(path)
        weights = {name: np.ascontiguousarray(value) for name, value in weights_of(self.net).items()}
        fsio.atomic_write(target, save(weights))
        return target

    @classmethod
    def from_checkpoint(
        cls, source: str, *, runs_dir: str | Path = "runs", module: nnx.Module | None = None
    ) -> NNModel:
        """Return the model of a stored run, with the weights of `RUN[@LAST|BEST|tag|step]`.

        Args:
            module: the module a run of your own module was trained with; its weights are replaced.

        Raises:
            ResumePointError: (a ValueError) no such checkpoint, or any byte of it is not what was committed.
            ModelError: the run has a module of your own and none is given.
        """
        point = find_point(runs_dir, source)
        run = NNRun.load(point.run_id, runs_dir)
        params = NNModelParams.from_state(run.state.get("model", {}), source=str(run.path / "run.yaml"))
        params = params.replace(precision=point.host["topology"]["precision"])
        if module is None:
            net = point.host["topology"]["net"]
            if net is None:
                raise ModelError(f"run {point.run_id} trained a module of your own; give it as module=")
            model = cls(params=params.replace(net=NNParams.from_state(net)))
        else:
            model = cls(params=params.replace(net=None), module=module)
        pure, stored = PureModule(model.net), point.load_all()
        weights = {n.split("/", 1)[1]: value for n, value in stored.items() if n.startswith(("params/", "frozen/"))}
        state = {n.removeprefix("model_state/"): value for n, value in stored.items() if n.startswith("model_state/")}
        if set(weights) != set(pure.params) or set(state) != set(pure.model_state):
            raise ResumePointError(f"the weights of {source} do not fit {type(model.net).__name__}")
        pure.write(model.net, weights, state)
        model.adopt(model.net)
        return model


def train_spec(spec: RunSpec, *, runs_dir: str | Path = "runs", quiet: bool = False) -> dict[str, Any]:
    """Train what a configuration file describes; return the result as plain values.

    A run that is finished already is left alone and its result returned.
    """
    model = NNModel(params=spec.model)
    progress = make_progress(quiet)
    try:
        run = model.train_spec(spec, (), runs_dir, progress)
    except RunExistsError as finished:
        run = NNRun.load(finished.run_id, runs_dir)
        progress.message(f"run {run.id} is finished already; nothing to do (another --salt trains it again)")
    artifact = run.artifact or {}
    return {"run_id": run.id, **artifact, "run_dir": _shown(run.path)}


def dry_run(spec: RunSpec) -> dict[str, Any]:
    """Check, trace and compile one update; return parameters, FLOPs and memory. Nothing is trained or written."""
    enable_compile_cache()
    job = prepare(NNModel(params=spec.model), spec)
    return {"run_id": job.run_id, **job.engine.costs()}


def _describe_function(function: Any) -> str:
    """Name and digest of a loss given from Python: another text is another loss, so another run."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    try:
        text = inspect.getsource(type(function) if code is None else function)
    except (OSError, TypeError):
        text = "" if code is None else code.co_code.hex() + repr(code.co_names)
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    held = [value if isinstance(value, str | int | float | bool) else type(value).__name__ for value in cells]
    return f"{name}:{content_hash([text, repr(held), repr(getattr(function, '__defaults__', None))])[:16]}"


def _shown(path: Path) -> str:
    """The run's directory relative to the working directory where it lies below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
