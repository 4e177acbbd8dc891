"""Stochastic variational inference as a gradient engine: a guide's parameters are trained by the one compiled step.

The loss of a microbatch is NumPyro's own negative ELBO, at the key of that microbatch; a window is the mean over its
microbatches. Each is an unbiased estimate for all rows, because the model scales the rows it is given to all of them,
which `bayes.check_scales` checks before anything is compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp

from nnx_jax.core.errors import ConfigError, DataError, ModelError
from nnx_jax.engines import double
from nnx_jax.engines.bayes import (
    Args,
    NumpyroTask,
    by_rows,
    check_scales,
    fresh_guide,
    latent_sites,
    model_args,
    require_numpyro,
)
from nnx_jax.engines.flax import FlaxEngine
from nnx_jax.engines.nnx_forward import Arrays, matching
from nnx_jax.engines.operators import check_fit
from nnx_jax.engines.predictive import NumpyroPredictiveOp, check_site
from nnx_jax.engines.work import Work, divided
from nnx_jax.objectives.losses import Loss
from nnx_jax.objectives.metrics import Metric
from nnx_jax.objectives.terms import LossTerm


class Variational:
    """A model and a guide that was set up for its rows, with the parameters of both as named leaves.

    Args:
        task: model, guide and loss.
        args: the rows of one batch, (x, y) or (x,).
        rows: how many rows there are; the batch's own by default.
        seed: of the first parameters: those of NumPyro's `SVI.init(jax.random.key(seed), *args)`.

    Attributes:
        sites: names of the model's latent sites.
        params: unconstrained parameters by name; the leaves of a parameter that is a tree are joined by dots.
        model_state: leaves of `numpyro.mutable` sites by name.

    Raises:
        DataError: the batch is not all rows, and the model is not scaled to them.
        ModelError: nothing to train, or a guide with parameters of single rows where a batch is not all of them.
        SiteError: (a KeyError) the model has no such site as the task predicts.
        ImportError: NumPyro is not installed.
    """

    def __init__(self, task: NumpyroTask, args: Args, *, rows: int | None = None, seed: int = 0) -> None:
        require_numpyro()
        from numpyro.infer import SVI, Trace_ELBO
        from numpyro.optim import SGD

        args = tuple(jnp.asarray(column) for column in args)
        self.task, self.elbo = task, task.loss or Trace_ELBO()
        self.model = by_rows(task.model)
        check_site(task, args[0])
        check_scales(self.model, args, rows or len(args[0]))
        self.sites = latent_sites(self.model, args)
        self._plain_guide = fresh_guide(task, self.model)
        self.guide = by_rows(self._plain_guide)
        partial = rows is not None and rows != len(args[0])
        if partial:
            self._check_latents(args)
        svi = SVI(self.model, self.guide, SGD(0.0), self.elbo)
        state = svi.init(jax.random.key(seed), *args)
        self.constrained: Any = svi.constrain_fn
        self._params_tree, self.params = _named(svi.optim.get_params(state.optim_state))
        self._state_tree, self.model_state = _named(state.mutable_state)
        if not self.params:
            raise ModelError("neither guide nor model has a parameter to train (numpyro.param)")
        if partial:
            self._check_params(args)

    def loss(self, params: Mapping[str, Any], model_state: Mapping[str, Any], key: Any, args: Args) -> tuple[Any, Any]:
        """Return (negative ELBO of the rows, a scalar; new model_state); as `SVI.update` differentiates it."""
        given = self.constrain(params)
        if not model_state:
            return self.elbo.loss(key, given, self.model, self.guide, *args), {}
        given |= jax.lax.stop_gradient(_tree(self._state_tree, model_state))
        found = self.elbo.loss_with_mutable_state(key, given, self.model, self.guide, *args)
        return found["loss"], _named(found["mutable_state"])[1]

    def constrain(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The param sites' own values, pytrees by site."""
        return dict(self.constrained(_tree(self._params_tree, params)))

    def values(self, params: Mapping[str, Any], model_state: Mapping[str, Any]) -> dict[str, Any]:
        """The values of param and mutable sites, pytrees by site: what prediction puts into model and guide."""
        return self.constrain(params) | (_tree(self._state_tree, model_state) if model_state else {})

    def put(self, named: Mapping[str, Any]) -> None:
        """Take over parameters and mutable values by name.

        Raises:
            ModelError: (a ValueError) they are not those of this model and guide.
        """
        found = check_fit("this model and guide", {**self.params, **self.model_state}, named)
        self.params = {name: jnp.array(found[name], copy=True) for name in self.params}
        self.model_state = {name: jnp.array(found[name], copy=True) for name in self.model_state}

    def operator(self, **fields: Any) -> NumpyroPredictiveOp:
        """The posterior predictive with the parameters of now; `fields` are the operator's."""
        made = NumpyroPredictiveOp(self.task, **fields)
        return made.with_guide(self._plain_guide, self.values, self.params, self.model_state)

    def _check_latents(self, args: Args) -> None:
        """Refuse an AutoGuide for latent values of single rows, for each of which it has parameters."""
        from numpyro.handlers import seed, trace
        from numpyro.infer.autoguide import AutoGuide

        if isinstance(self._plain_guide, AutoGuide):
            self._refuse_single_rows(trace(seed(self.model, 0)).get_trace(*args), "sample", len(args[0]))

    def _check_params(self, args: Args) -> None:
        """Refuse a guide's parameters of single rows."""
        from numpyro.handlers import seed, substitute, trace

        guide = substitute(self.guide, data=self.constrain(self.params))
        self._refuse_single_rows(trace(seed(guide, 0)).get_trace(*args), "param", len(args[0]))

    def _refuse_single_rows(self, found: Mapping[str, Any], kind: str, rows: int) -> None:
        """Which of all rows a batch holds, no plate knows."""
        cut = {name for name, site in found.items() if site["type"] == "plate" and _cut(site)}
        for name, site in found.items():
            frames = {frame.name for frame in site.get("cond_indep_stack", [])}
            if site["type"] == kind and not site.get("is_observed", False) and frames & cut:
                raise ModelError(
                    f"site {name!r} has a value for every single row, and batches hold {rows} rows whose places no "
                    "plate knows; give an amortised guide, which computes it from x, or give all rows in one batch"
                )


def _cut(plate: Mapping[str, Any]) -> bool:
    size, rows = plate["args"]
    return rows is not None and rows != size


class VariationalPure:
    """A `Variational` as a pure function of its leaves: what `nnx_forward.PureModule` is to a Flax NNX module.

    Args:
        module: read, never changed.
        freeze: glob patterns of parameters that are not trained.
        compute_dtype: float32 or float64.

    Raises:
        ConfigError: a narrower format, in which no log density is accurate.
    """

    mask_rows = False
    batch_norms: Sequence[str] = ()

    def __init__(
        self,
        module: Variational,
        *,
        freeze: Sequence[str] = (),
        compute_dtype: Any = jnp.float32,
        keep_float32: Sequence[str] = (),
        mask_rows: bool = False,
    ) -> None:
        self.module, self.compute_dtype = module, jnp.dtype(compute_dtype)
        double.check_enabled(self.compute_dtype)
        if self.compute_dtype not in (jnp.float32, jnp.float64):
            told = f"got '{self.compute_dtype}', but a log density of many rows needs float32 or float64"
            raise ConfigError(told, path="precision")
        named, self.model_state = dict(module.params), dict(module.model_state)
        self.held = {**named, **self.model_state}
        if self.compute_dtype == jnp.float64:
            named, self.model_state = double.widened(named), double.widened(self.model_state)
        frozen = matching(freeze, named)
        self.params = {name: value for name, value in named.items() if name not in frozen}
        self.frozen = {name: value for name, value in named.items() if name in frozen}
        if not self.params:
            raise ModelError("no parameter is left to train: every one is frozen; unfreeze some")

    def forward(
        self, params: Arrays, model_state: Arrays, batch: Mapping[str, jax.Array], key: jax.Array | None, train: bool
    ) -> tuple[Any, Arrays]:
        """Return (negative ELBO, new model_state) of the batch's rows; `params` holds trained and frozen leaves."""
        given = jax.random.key(0) if key is None else key
        value, state = self.module.loss(params, model_state, given, model_args(batch))
        if jnp.shape(value) != ():
            raise ModelError(f"the task's loss must give one number, got shape {list(jnp.shape(value))}")
        return value, {name: state[name].astype(old.dtype) for name, old in model_state.items()}

    def narrowed(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The batch as it is: log densities are not computed in less than the data has."""
        return dict(batch)

    def masked(self, module: Any, mask: jax.Array | None, *, train: bool) -> AbstractContextManager[None]:
        """Nothing to leave out: batches of this engine hold no padded rows."""
        return nullcontext()

    def write(self, module: Variational, params: Mapping[str, Any], model_state: Mapping[str, Any]) -> None:
        """Put copies of these leaves into `module`."""
        module.params = {name: jnp.array(params[name], copy=True) for name in module.params}
        module.model_state = {name: jnp.array(model_state[name], copy=True) for name in module.model_state}


class SVIEngine(FlaxEngine):
    """A `Variational` under the loop: the step, its hooks, windows, commits and resume are those of every engine."""

    backend = "numpyro-svi"
    make_pure = VariationalPure

    def _check_tail(self) -> None:
        """A batch with padded rows would count them.

        Raises:
            DataError: saying how to cut the rows.
        """
        rows, size = self.feed.rows, getattr(self.feed, "batch_size", None)
        if size and rows and rows % size and self.feed.descriptor().get("tail") not in ("drop", "straddle"):
            raise DataError(
                f"{rows} rows in batches of {size} leave a shorter batch, which a model would count as a full one; use "
                "data.tail: straddle, which fills it from the next pass"
            )

    def _work(self, objective: Any, train_step: Any, *, scores: bool) -> Work:
        """The ELBO, and nothing else.

        Raises:
            ConfigError: an objective or a step of the user's own.
        """
        if objective is not None or train_step is not None:
            raise ConfigError(
                "the objective of variational inference is the task's: give NumpyroTask(loss=...) an ELBO of "
                "numpyro.infer, or of your own, in place of an objective or a step"
            )
        return super()._work(None, None, scores=scores)

    def _metrics_of_outputs(self, _: Any = None) -> list[Metric]:
        """The ELBO itself, beside the loss that is its negative."""
        self._outputs(self.feed)
        return [elbo_metric(), *self._metrics(None)]


def elbo_loss() -> Loss:
    """The loss of an `SVIEngine`: minus one term, the ELBO, counted once a microbatch."""
    terms = lambda outputs, batch: (LossTerm("elbo", -outputs, jnp.float32(1), weight=-1.0),)  # noqa: E731
    return Loss("elbo", "own", terms, lambda outputs, batch: jnp.int32(0))


def elbo_metric() -> Metric:
    """The mean of the microbatches' ELBOs."""
    return Metric("elbo", 2, "max", lambda value, batch: jnp.stack([-value, jnp.ones_like(value)]), divided)


def _named(tree: Any) -> tuple[Any, Arrays]:
    """(treedef, leaves by name); the names are paths joined by dots."""
    found, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in found]
    if len(set(names)) != len(names):
        raise ModelError(f"two parameters have one name: {sorted(n for n in names if names.count(n) > 1)[0]!r}")
    return (treedef, tuple(names)), {name: jnp.asarray(leaf) for name, (_, leaf) in zip(names, found, strict=True)}


def _tree(tree: Any, named: Mapping[str, Any]) -> Any:
    treedef, names = tree
    return jax.tree.unflatten(treedef, [named[name] for name in names])
