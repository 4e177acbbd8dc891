"""BlackjaxTask and its Target: what a BlackJAX sampler is to sample, from a log density or from a NumPyro model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax.core.errors import ConfigError, nearest
from nnx_jax.engines.bayes import ModelBridge, NumpyroTask, model_args, predictive_args

SAMPLERS = ("nuts", "hmc", "mclmc", "sgld", "sghmc", "pathfinder", "svgd", "tempered_smc")
MINIBATCH = ("sgld", "sghmc")
"""Samplers that see a minibatch a step, in place of all rows."""
PARTICLES = ("svgd", "tempered_smc")
"""Samplers whose step moves an ensemble; the posterior is where its particles stand at the end."""

_RAW = ("logdensity_fn", "logprior_fn", "loglikelihood_fn", "grad_estimator", "init_position", "init_fn")
_COUNTS = {"num_warmup": 0, "num_chains": 1, "num_particles": 2, "num_integration_steps": 1}


@dataclass(frozen=True)
class BlackjaxTask:
    """What is sampled, and by which sampler. One of two sources says what: a log density, or a NumPyro model.

    A log density is `logdensity_fn`, or `logprior_fn` with `loglikelihood_fn` over the rows of the loop's dataset. The
    samplers "sgld" and "sghmc" take minibatches, so they need the second form or a `grad_estimator`; "tempered_smc"
    needs the second form and an `init_fn` that draws from the prior. A NumPyro model serves them all.

    Args:
        logdensity_fn: position -> log density up to a constant, a scalar. The dataset is not touched.
        logprior_fn: position -> log density of the prior.
        loglikelihood_fn: (position, row) -> log likelihood of one row, as BlackJAX has it: `row` is (x, y) without the
            row axis, or x alone for a dataset without y. Sums over rows are made here; a minibatch's is scaled by
            rows / rows of the batch.
        grad_estimator: (position, batch) -> estimate of the gradient of the log density, like the position; `batch` is
            (x, y) [rows, ...]. In place of prior and likelihood; the log density is then not recorded.
        init_position: where every chain starts: an array, or any pytree of arrays.
        init_fn: key -> a position, drawn anew for each chain or particle; in place of `init_position`.
        predict_fn: (position, x) -> prediction for x [N, ...]; what the trained operator averages over the draws.
        numpyro_task: the NumPyro source; it comes with its own prediction. Of its settings for samplers `num_warmup`,
            `num_chains` and `predictive_site` are defaults here; its `num_samples` and `kernel_options` have no effect,
            and `kernel` has one only where the loop is given the NumpyroTask itself.
        sampler: one of SAMPLERS.
        num_warmup: steps of each chain before the first draw, which adapt step size and mass matrix ("nuts", "hmc",
            "mclmc") or are thrown away ("sgld", "sghmc"). Default: the NumPyro task's, else 1000.
        num_chains: chains, run at once by vmap. Default: the NumPyro task's, else 1.
        num_particles: of "svgd" and "tempered_smc".
        num_integration_steps: of "hmc", "sghmc", and the HMC moves inside "tempered_smc". Default: 10.
        step_size: of "sgld", "sghmc"; the rate of Adam for "svgd"; the HMC step for "tempered_smc", in standard
            deviations of the particles; without warmup that of the others. Default: 1e-3, or 0.1 for the ensembles.
        target_acceptance_rate: that the warmup of "nuts" and "hmc" aims at.
        predictive_site: name of what is predicted. Default: the NumPyro task's, else "obs".

    Raises:
        ConfigError: (a ValueError) no source, two, half of one, an unknown sampler, or a source that the sampler cannot
            use.
        TypeError: `numpyro_task` is no NumpyroTask, or a function cannot be called.
    """

    logdensity_fn: Callable[[Any], Any] | None = None
    init_position: Any = None
    predict_fn: Callable[[Any, Any], Any] | None = None
    numpyro_task: NumpyroTask | None = None
    sampler: str = "nuts"
    num_warmup: int | None = None
    num_chains: int | None = None
    num_integration_steps: int | None = None
    grad_estimator: Callable[[Any, Any], Any] | None = None
    step_size: float | None = None
    predictive_site: str | None = None
    logprior_fn: Callable[[Any], Any] | None = None
    loglikelihood_fn: Callable[[Any, Any], Any] | None = None
    init_fn: Callable[[Any], Any] | None = None
    num_particles: int = 100
    target_acceptance_rate: float = 0.8

    def __post_init__(self) -> None:
        if self.sampler not in SAMPLERS:
            told = f"there is no sampler {self.sampler!r}{nearest(self.sampler, SAMPLERS)}"
            raise ConfigError(f"{told} (there are: {', '.join(SAMPLERS)})", path="task.sampler")
        for name in (*(n for n in _RAW if n != "init_position"), "predict_fn"):
            given = getattr(self, name)
            if given is not None and not callable(given):
                raise TypeError(f"BlackjaxTask.{name} must be a function, got {type(given).__name__}")
        if self.numpyro_task is not None and not isinstance(self.numpyro_task, NumpyroTask):
            raise TypeError(f"BlackjaxTask.numpyro_task must be a NumpyroTask, got {type(self.numpyro_task).__name__}")
        self._check_source()
        for name, least in _COUNTS.items():
            given = getattr(self, name)
            if given is not None and (not isinstance(given, int) or isinstance(given, bool) or given < least):
                raise ConfigError(f"got {given!r}; write a whole number of {least} or more", path=f"task.{name}")
        if self.step_size is not None and not (isinstance(self.step_size, int | float) and self.step_size > 0):
            raise ConfigError(f"got {self.step_size!r}; write a number above 0", path="task.step_size")
        if not 0 < self.target_acceptance_rate < 1:
            told = f"got {self.target_acceptance_rate!r}; write a number between 0 and 1"
            raise ConfigError(told, path="task.target_acceptance_rate")

    def _check_source(self) -> None:
        raw = [name for name in _RAW if getattr(self, name) is not None]
        if self.numpyro_task is not None:
            if raw or self.predict_fn is not None:
                more = ", ".join([*raw, *(["predict_fn"] if self.predict_fn is not None else [])])
                raise ConfigError(f"BlackjaxTask is over-specified: numpyro_task says it all, drop {more}")
            return
        if not raw:
            raise ConfigError("BlackjaxTask needs a source: logdensity_fn with init_position, or numpyro_task")
        if (self.init_position is None) == (self.init_fn is None):
            given = "neither is given" if self.init_fn is None else "both are given"
            raise ConfigError(f"BlackjaxTask.init_position and init_fn: {given}; give one, where chains start")
        if (self.logprior_fn is None) != (self.loglikelihood_fn is None):
            missing = "logprior_fn" if self.logprior_fn is None else "loglikelihood_fn"
            raise ConfigError(f"BlackjaxTask.{missing} is missing; prior and likelihood belong together")
        forms = [name for name in ("logdensity_fn", "logprior_fn", "grad_estimator") if name in raw]
        if len(forms) > 1:
            both = " and ".join(forms)
            raise ConfigError(f"BlackjaxTask is over-specified: {both} each say what is sampled; give one")
        needed = _forms(self.sampler)
        if not forms or forms[0] not in needed:
            given = f"{forms[0]} alone does not serve it" if forms else "none is given"
            raise ConfigError(f"BlackjaxTask: the sampler {self.sampler!r} needs {' or '.join(needed)}; {given}")
        if self.sampler == "tempered_smc" and self.init_fn is None:
            raise ConfigError("BlackjaxTask: tempered_smc starts from draws of the prior; give them by init_fn")

    @property
    def uses_data(self) -> bool:
        """The rows of the loop's dataset are looked at."""
        return self.logdensity_fn is None

    @property
    def minibatches(self) -> bool:
        """A step sees a minibatch."""
        return self.sampler in MINIBATCH

    def settled(self) -> BlackjaxTask:
        """The task with every default filled in."""
        source, ensemble = self.numpyro_task, self.sampler in PARTICLES
        defaults: dict[str, Any] = {
            "num_warmup": 1000 if source is None else source.num_warmup,
            "num_chains": 1 if source is None else source.num_chains,
            "num_integration_steps": 10,
            "step_size": 0.1 if ensemble else 1e-3,
            "predictive_site": "obs" if source is None else source.predictive_site,
        }
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return BlackjaxTask(**values | {name: value for name, value in defaults.items() if values[name] is None})


def _forms(sampler: str) -> tuple[str, ...]:
    if sampler in MINIBATCH:
        return ("logprior_fn", "grad_estimator")
    return ("logprior_fn",) if sampler == "tempered_smc" else ("logdensity_fn", "logprior_fn")


def as_blackjax_task(task: Any, loss: Any = None) -> BlackjaxTask:
    """Return what a loop was given as a BlackjaxTask with every default filled in.

    A bare NumpyroTask is one: its `kernel` is the sampler, and its warmup, chains and site are taken. Its `num_samples`
    and `kernel_options` say nothing here: `max_steps` are the draws, and options are those of a BlackjaxTask.

    Raises:
        ConfigError: (a ValueError) there is none: samplers are task-first.
        TypeError: something else.
    """
    if task is None:
        told = "; a loss of (predicted, target) says nothing of priors" if loss is not None else ""
        raise ConfigError(
            f"backend 'blackjax' is task-first: it samples a log density{told}; give task=BlackjaxTask(...) or "
            "task=NumpyroTask(model=...)"
        )
    if isinstance(task, NumpyroTask):
        task = BlackjaxTask(numpyro_task=task, sampler=task.kernel)
    if not isinstance(task, BlackjaxTask):
        given = type(task).__name__
        raise TypeError(f"backend 'blackjax' needs task=BlackjaxTask(...) or task=NumpyroTask(...), got {given}")
    return task.settled()


Columns = Mapping[str, Any]


class Target(ABC):
    """What a sampler asks of a task over one dataset.

    Attributes:
        data: the rows that a log density is computed from, arrays [N, ...]; () for none.
        weighs_rows: an estimate leaves out the padding of a batch; else a batch must have none.
        valued: an estimate has a value besides its gradient.
    """

    data: Any = ()
    weighs_rows: bool = False
    valued: bool = True

    @abstractmethod
    def initial(self, key: Any, count: int) -> Any:
        """Starting positions [count, ...]."""

    @abstractmethod
    def logdensity(self, position: Any, data: Any) -> Any:
        """Log density of a position; a scalar."""

    @abstractmethod
    def logprior(self, position: Any, data: Any) -> Any:
        """The part of it that knows no row."""

    @abstractmethod
    def loglikelihood(self, position: Any, data: Any) -> Any:
        """The part of it that comes from the rows."""

    @abstractmethod
    def estimate(self, position: Any, batch: Columns) -> Any:
        """An unbiased estimate of the log density from a minibatch."""

    def gradient(self, position: Any, batch: Columns) -> Any:
        """Its gradient, like the position."""
        return jax.grad(self.estimate)(position, batch)

    def constrain(self, position: Any) -> Any:
        """The values a position stands for."""
        return position

    def check_batches(self, size: int) -> None:
        """Check that minibatches of so many rows give an unbiased estimate; here every size does."""
        del size


class DensityTarget(Target):
    """A log density of the user's own.

    Args:
        task: with every default filled in.
        columns: the dataset's columns, [N, ...]; None where only minibatches are seen, or no rows at all.
        rows: N; 0 where no row is seen.
    """

    def __init__(self, task: BlackjaxTask, columns: Columns | None, rows: int) -> None:
        self.task, self.rows = task, rows
        self.weighs_rows, self.valued = task.grad_estimator is None, task.grad_estimator is None
        self.data = () if columns is None else tuple(jnp.asarray(column) for column in model_args(columns))

    def initial(self, key: Any, count: int) -> Any:
        if self.task.init_fn is not None:
            return jax.vmap(self.task.init_fn)(jax.random.split(key, count))
        start = jax.tree.map(_as_float, self.task.init_position)
        held = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), start)
        if self.task.sampler != "svgd":
            return held
        leaves, tree = jax.tree.flatten(held)  # particles at one place would stay together for ever
        keys = jax.random.split(key, len(leaves))
        noisy = [leaf + jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)]
        return jax.tree.unflatten(tree, noisy)

    def logdensity(self, position: Any, data: Any) -> Any:
        if self.task.logdensity_fn is not None:
            return self.task.logdensity_fn(position)
        return self.logprior(position, data) + self.loglikelihood(position, data)

    def logprior(self, position: Any, data: Any) -> Any:
        return _called(self.task.logprior_fn)(position)

    def loglikelihood(self, position: Any, data: Any) -> Any:
        return jnp.sum(self._each(position, data))

    def estimate(self, position: Any, batch: Columns) -> Any:
        weights = batch["mask"]
        each = jnp.where(weights > 0, self._each(position, model_args(batch)), 0.0)
        return self.logprior(position, ()) + self.rows * jnp.sum(weights * each) / jnp.sum(weights)

    def gradient(self, position: Any, batch: Columns) -> Any:
        if self.task.grad_estimator is None:
            return super().gradient(position, batch)
        rows = model_args(batch)
        return self.task.grad_estimator(position, _joined(rows))

    def _each(self, position: Any, data: Any) -> Any:
        one = _called(self.task.loglikelihood_fn)
        return jax.vmap(lambda *row: one(position, _joined(row)))(*data)


class ModelTarget(Target):
    """A NumPyro model over unconstrained values; see `bayes.ModelBridge`.

    Raises:
        ModelError, DataError, ImportError: see ModelBridge.
    """

    def __init__(self, task: BlackjaxTask, columns: Columns) -> None:
        assert task.numpyro_task is not None
        self.task = task
        self.bridge = ModelBridge(task.numpyro_task, model_args(columns))
        self.data: Any = self.bridge.args

    def initial(self, key: Any, count: int) -> Any:
        if self.task.sampler != "tempered_smc":
            return self.bridge.initial(key, count)
        return jax.jit(jax.vmap(self._from_prior))(jax.random.split(key, count))

    def _from_prior(self, key: Any) -> Any:
        from numpyro.handlers import seed, trace

        model = self.bridge.model
        args: Any = predictive_args(self.bridge.task.model, self.data[0]) if self.data else ()
        found = trace(seed(model, key)).get_trace(*args)
        return self.bridge.unconstrain({name: found[name]["value"] for name in self.bridge.names})

    def logdensity(self, position: Any, data: Any) -> Any:
        return self.bridge.logdensity(position, data)

    def logprior(self, position: Any, data: Any) -> Any:
        return self.logdensity(position, data) - self.loglikelihood(position, data)

    def loglikelihood(self, position: Any, data: Any) -> Any:
        from numpyro.handlers import seed, substitute, trace

        values = self.bridge.constrain(position)
        found = trace(substitute(seed(self.bridge.model, jax.random.key(0)), values)).get_trace(*data)
        observed = [site for site in found.values() if site["type"] == "sample" and site["is_observed"]]
        scaled = [(1.0 if s["scale"] is None else s["scale"]) * s["fn"].log_prob(s["value"]) for s in observed]
        return sum((jnp.sum(part) for part in scaled), jnp.zeros(()))

    def estimate(self, position: Any, batch: Columns) -> Any:
        return self.bridge.logdensity(position, model_args(batch))

    def constrain(self, position: Any) -> Any:
        values = self.bridge.constrain(position)
        return {name: values[name] for name in self.bridge.names}

    def check_batches(self, size: int) -> None:
        self.bridge.check_batches(size)


def make_target(task: BlackjaxTask, columns: Callable[[], Columns], rows: int) -> Target:
    """Return the target of a settled task.

    Args:
        columns: gives all rows; called only where they are needed at once.
        rows: of the dataset; 0 for none.
    """
    if task.numpyro_task is not None:
        return ModelTarget(task, columns())
    whole = task.uses_data and not task.minibatches
    return DensityTarget(task, columns() if whole else None, rows)


def named_leaves(tree: Any) -> dict[str, Any]:
    """The arrays of a pytree by name: the path to each, joined by dots; a bare array is called "position"."""
    named = jax.tree_util.tree_flatten_with_path(tree)[0]
    join = partial(jax.tree_util.keystr, simple=True, separator=".")
    return {join(path) or "position": leaf for path, leaf in named}


def _as_float(leaf: Any) -> Any:
    """A position is moved by real amounts, so whole numbers become floats."""
    found = jnp.asarray(leaf)
    return found if jnp.issubdtype(found.dtype, jnp.floating) else found.astype(np.float32)


def _called(function: Callable[..., Any] | None) -> Callable[..., Any]:
    assert function is not None  # a task of another form was refused when it was made
    return function


def _joined(row: Any) -> Any:
    """(x, y), or x alone, as the functions of a task take it."""
    return row if len(row) > 1 else row[0]
