"""The Bayesian seam: the task that every Bayesian engine takes, and a NumPyro model as a log density.

A model is a function of the rows: `model(x, y)` while it is fitted, `model(x)` (or `model(x, None)`, where `y` has no
default) when it predicts. A dataset without a column `y` is given as `model(x)`. Everything else a model needs it
closes over. NumPyro is imported by what uses it, never by this file.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax.core.errors import ConfigError, DataError, ModelError

Args = tuple[Any, ...]
"""What a model is called with: (x, y), or (x,) for a dataset that has no `y`; each [rows, ...]."""


@dataclass(frozen=True)
class NumpyroTask:
    """A probabilistic model and how it is to be inferred; the engine is chosen by the loop's `backend` alone.

    Args:
        model: `model(x, y)` of NumPyro primitives; `y` is None, or left out, in prediction.
        guide: for "numpyro-svi": a guide `guide(x, y)`, an AutoGuide, or a class of one, called with the model.
            Default: AutoNormal.
        loss: for "numpyro-svi": the objective. Default: Trace_ELBO of one particle.
        predictive_site: the site whose posterior-predictive mean the trained operator returns.
        predictive_samples: draws from a guide when predicting, at least 1; a sampler predicts with all its draws.
        num_warmup: for samplers: draws of each chain that adapt the kernel and are thrown away.
        num_samples: for samplers: draws of each chain that are kept, at least 1.
        num_chains: for samplers: chains, run at once on one device by vmap.
        kernel: for "numpyro-mcmc": "nuts" or "hmc".
        kernel_options: for "numpyro-mcmc": what NumPyro's NUTS or HMC takes, as in {"target_accept_prob": 0.9}.

    Raises:
        ConfigError: (a ValueError) a count out of range, or an unknown kernel.
        TypeError: model or guide cannot be called, or the loss is no ELBO.
    """

    model: Callable[..., Any]
    guide: Any = None
    loss: Any = None
    predictive_site: str = "obs"
    predictive_samples: int = 200
    num_warmup: int = 1000
    num_samples: int = 1000
    num_chains: int = 1
    kernel: Literal["nuts", "hmc"] = "nuts"
    kernel_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("model", "guide"):
            given = getattr(self, name)
            if not callable(given) and (name == "model" or given is not None):
                raise TypeError(f"NumpyroTask.{name} must be a function of (x, y), got {type(given).__name__}")
        if self.loss is not None and not callable(getattr(self.loss, "loss", None)):
            raise TypeError(f"NumpyroTask.loss must be an ELBO of numpyro.infer, got {type(self.loss).__name__}")
        for name, least in {"predictive_samples": 1, "num_warmup": 0, "num_samples": 1, "num_chains": 1}.items():
            given = getattr(self, name)
            if not isinstance(given, int) or isinstance(given, bool) or given < least:
                raise ConfigError(f"NumpyroTask.{name} must be a whole number of {least} or more, got {given!r}")
        if self.kernel not in ("nuts", "hmc"):
            raise ConfigError(f"NumpyroTask.kernel must be 'nuts' or 'hmc', got {self.kernel!r}")

    def state(self) -> dict[str, Any]:
        """Plain values of every field that is not at its default; functions and objects by their names."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        plain["kernel_options"] = {name: _plain(value) for name, value in self.kernel_options.items()}
        defaults = {f.name: f.default for f in fields(self)} | {"kernel_options": {}}
        return {name: _plain(value) for name, value in plain.items() if value != defaults[name]}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str, dict)):
        return value
    return getattr(value, "__qualname__", None) or type(value).__qualname__


def require_task(task: Any, loss: Any, backend: str) -> NumpyroTask:
    """Return the task of a loop.

    Raises:
        ValueError: there is only a loss: a Bayesian engine is task-first.
        TypeError: the task is of another type.
    """
    if task is None:
        told = "; a loss of (predicted, target) says nothing of priors" if loss is not None else ""
        raise ConfigError(
            f"backend {backend!r} is task-first: its objective comes from a probabilistic model{told}; give "
            "task=NumpyroTask(model=...)"
        )
    if not isinstance(task, NumpyroTask):
        raise TypeError(f"backend {backend!r} needs task=NumpyroTask(model=...), got {type(task).__name__}")
    return task


def require_numpyro() -> None:
    """Import NumPyro, or say which extra has it.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import numpyro  # noqa: F401
    except ImportError as error:
        raise ImportError("NumPyro is not installed; pip install 'nnx_jax[numpyro]'", name="numpyro") from error


# -- rows ----------------------------------------------------------------------------------------------------------


def model_args(columns: Mapping[str, Any]) -> Args:
    """What a model is called with for these columns.

    Raises:
        DataError: there is no `x`, or a column that no model would see.
    """
    if "x" not in columns:
        raise DataError(f"a probabilistic model is called with x and y; the columns are {sorted(columns)}")
    if unseen := sorted(set(columns) - {"x", "y", "mask"}):
        raise DataError(f"a probabilistic model is called with x and y alone; put {unseen} into x, or leave it out")
    return tuple(columns[name] for name in ("x", "y") if name in columns)


def predictive_args(model: Callable[..., Any], x: Any) -> Args:
    """What a model is called with when it predicts: (x,), or (x, None) where its second argument has no default."""
    free = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = [p for p in inspect.signature(model).parameters.values() if p.kind in free]
    return (x, None) if len(known) > 1 and known[1].default is inspect.Parameter.empty else (x,)


def by_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """A model or guide whose subsampled plates stand for the rows it is called with.

    `numpyro.plate(name, N, subsample_size=len(x))` says that these are some of N rows, and scales their log density by
    N / len(x). Which of the N they are, a plate draws at random; here the rows are already chosen, so it gets their
    places in the batch, and `x[index]` in the model is x.
    """

    def called(*args: Any) -> Any:
        from numpyro.handlers import substitute

        rows = np.shape(args[0])[0] if args and np.ndim(args[0]) else 0
        return substitute(function, substitute_fn=partial(_own_places, rows=rows))(*args)

    return called


def _own_places(message: Mapping[str, Any], rows: int) -> Any:
    if message["type"] == "plate" and message["args"][1] == rows != message["args"][0]:
        return jnp.arange(rows)
    return None


def check_scales(model: Callable[..., Any], args: Args, total: int) -> None:
    """Check that a model counts the rows it is called with for the `total` rows they come from.

    Every site whose log density depends on the rows must be scaled by total / rows. Without that a posterior from
    minibatches is too wide: batches of 16 out of 64 rows gave 2.2 times the standard deviation (measured).

    Args:
        model: as `by_rows` gives it.
        args: one batch.

    Raises:
        DataError: giving the sites, and what to write.
    """
    from numpyro.handlers import seed, trace
    from numpyro.ops.provenance import eval_provenance

    rows, scales = len(args[0]), {}

    def densities(**batch: Any) -> dict[str, Any]:
        found = trace(seed(model, jax.random.key(0))).get_trace(*(batch[name] for name in sorted(batch)))
        sites = {name: site for name, site in found.items() if site["type"] == "sample"}
        scales.update({name: 1.0 if site["scale"] is None else site["scale"] for name, site in sites.items()})
        return {name: site["fn"].log_prob(site["value"]) for name, site in sites.items()}

    seen = eval_provenance(densities, **{f"column{place}": column for place, column in enumerate(args)})
    depend = [name for name, inputs in seen.items() if inputs]
    wrong = {name: scales[name] for name in depend if not _equal(scales[name], total / rows)}
    if not wrong:
        return
    name, scale = next(iter(wrong.items()))
    line = f'numpyro.plate("rows", {total}, subsample_size=x.shape[0])'
    if rows == total:
        raise DataError(
            f"all {total} rows are given at once, but site {name!r} counts each of them {float(scale):g} times: its "
            f"plate says otherwise; write `with {line}:` around it"
        )
    raise DataError(
        f"batches of {rows} out of {total} rows need a log density scaled by {total / rows:g}, but site {name!r} is "
        f"scaled by {float(scale):g}, so the posterior would be of other data; write `with {line}:` around it, or give "
        f"batch_size={total}"
    )


def _equal(scale: Any, wanted: float) -> bool:
    return np.ndim(scale) == 0 and math.isclose(float(scale), wanted, rel_tol=1e-6)


def latent_sites(model: Callable[..., Any], args: Args) -> list[str]:
    """Names of the sites that a model draws when it is called with these rows; found without computing."""
    from numpyro.handlers import seed, trace

    names: list[str] = []

    def run(*columns: Any) -> None:
        found = trace(seed(model, jax.random.key(0))).get_trace(*columns)
        names.extend(name for name, site in found.items() if site["type"] == "sample" and not site["is_observed"])

    jax.eval_shape(run, *args)
    return names


def fresh_guide(task: NumpyroTask, model: Callable[..., Any]) -> Any:
    """The task's guide, not yet set up for any data: two loops with one task share nothing."""
    from numpyro.infer.autoguide import AutoGuide, AutoNormal

    if task.guide is None or isinstance(task.guide, type):
        return (task.guide or AutoNormal)(model)
    if not isinstance(task.guide, AutoGuide):
        return task.guide
    guide = copy.deepcopy(task.guide)
    guide.prototype_trace = None
    return guide


# -- the bridge ----------------------------------------------------------------------------------------------------


class ModelBridge:
    """A NumPyro model with its rows as a log density over unconstrained values.

    A position is a dict, latent site -> array over all real numbers: what a sampler moves. The density is that of the
    unconstrained values, so it holds the log determinants of the transforms back to each site's support.

    Args:
        task: its model is used.
        args: all rows, (x, y) or (x,); () for a model that is called without any.

    Attributes:
        task: as given.
        names: the latent sites.

    Raises:
        ModelError: no latent site, or no position of finite density is found.
        DataError: a plate of the model says that these are not all rows.
        ImportError: NumPyro is not installed.
    """

    def __init__(self, task: NumpyroTask, args: Args = ()) -> None:
        require_numpyro()
        self.task, self.args = task, tuple(jnp.asarray(column) for column in args)
        self.rows = len(self.args[0]) if self.args else 0
        self.model = by_rows(task.model)
        if self.args:
            check_scales(self.model, self.args, self.rows)
        info = self._initialized(jax.random.key(0))
        self._potential = info.potential_fn
        self.names = tuple(info.param_info.z)
        if not self.names:
            raise ModelError("the model has no latent site to infer; every numpyro.sample of it is observed")

    def _initialized(self, key: Any) -> Any:
        from numpyro.infer.util import initialize_model

        try:
            return initialize_model(key, self.model, dynamic_args=True, model_args=self.args)
        except RuntimeError as error:
            raise ModelError(f"no position of finite density was found for the model: {error}") from error

    def initial(self, key: Any, chains: int | None = None) -> dict[str, jax.Array]:
        """A random position of finite density, uniform in (-2, 2); with `chains`, one each, [chains, ...]."""
        return dict(self._initialized(key if chains is None else jax.random.split(key, chains)).param_info.z)

    def logdensity(self, position: Mapping[str, Any], batch: Args | None = None) -> jax.Array:
        """Log joint density of the unconstrained position and the rows; a scalar.

        Args:
            batch: some of the rows in place of all; an unbiased estimate where `check_batches` passed.
        """
        return -self._potential(*(self.args if batch is None else batch))(dict(position))

    def check_batches(self, size: int) -> None:
        """Check that batches of `size` rows are scaled to all of them, see `check_scales`.

        Raises:
            DataError: they are not, or there are fewer rows.
        """
        if not 1 <= size <= self.rows:
            raise DataError(f"batches of {size} rows cannot be cut from {self.rows}")
        check_scales(self.model, tuple(column[:size] for column in self.args), self.rows)

    def constrain(self, position: Mapping[str, Any], batch_ndims: int = 0) -> dict[str, jax.Array]:
        """The sites' own values for a position; with `batch_ndims` leading axes (draws, or chains and draws)."""
        from numpyro.infer.util import constrain_fn

        return constrain_fn(self._seeded, self.args, {}, dict(position), batch_ndims=batch_ndims)

    def unconstrain(self, values: Mapping[str, Any]) -> dict[str, jax.Array]:
        """The position for values that lie in the sites' supports: `constrain` backwards."""
        from numpyro.infer.util import unconstrain_fn

        return unconstrain_fn(self._seeded, self.args, {}, dict(values))

    @property
    def _seeded(self) -> Any:
        from numpyro.handlers import seed

        return seed(self.model, jax.random.key(0))
