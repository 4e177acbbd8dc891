"""Diagnostics of chains, and the posterior-predictive operator over their draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from pydantic import PrivateAttr

from nnx_jax.core.errors import ConfigError, ModelError
from nnx_jax.core.hashing import hash_arrays
from nnx_jax.core.registry import register
from nnx_jax.engines.blackjax_task import named_leaves
from nnx_jax.engines.predictive import SAMPLES, PredictiveOp


def diagnose(posterior: Mapping[str, Any], *, chains: bool = True) -> dict[str, dict[str, Any]]:
    """Return what the draws of every site say of themselves, by site: mean, sd, r_hat, ess and mcse.

    `r_hat` is the rank-normalised split R-hat and `ess` the bulk effective sample size of Vehtari et al. (2021,
    doi:10.1214/20-BA1221), by BlackJAX; of a site with several elements the worst one. `mean` and `sd` are those of all
    elements together, so they tell something of scalar sites only. `mcse` is the largest Monte Carlo standard error of
    an element's mean, sd / sqrt(ess of the mean). What is not finite, as of chains that stand still, is None.

    Args:
        posterior: values by site, [chains, draws, ...].
        chains: the draws are successive; those of an ensemble are not, and have neither `r_hat` nor `ess`.
    """
    values = {name: np.asarray(given, np.float64) for name, given in posterior.items()}
    found: dict[str, dict[str, Any]] = {
        name: {"mean": float(array.mean()), "sd": float(array.std())} for name, array in values.items()
    }
    if not values or not chains or next(iter(values.values())).shape[1] < 4:
        return found
    flat = [array.reshape(*array.shape[:2], -1) for array in values.values()]
    r_hat, bulk, plain = (np.reshape(each, -1) for each in _judge(np.concatenate(flat, axis=2).astype(np.float32)))
    spread, first = np.concatenate([array.std(axis=(0, 1)) for array in flat]), 0
    for name, array in zip(values, flat, strict=True):
        here = slice(first, first + array.shape[2])
        with np.errstate(divide="ignore", invalid="ignore"):  # chains that stand still have no effective size
            error = spread[here] / np.sqrt(plain[here])
        told = {"r_hat": r_hat[here].max(), "ess": bulk[here].min(), "mcse": error.max()}
        found[name] |= {key: float(value) if np.isfinite(value) else None for key, value in told.items()}
        first = here.stop
    return found


@jax.jit
def _judge(draws: Any) -> Any:
    """Split R-hat, bulk and plain effective sample sizes of every element of [chains, draws, elements]."""
    from blackjax.diagnostics import effective_sample_size, ess_bulk, rhat

    return rhat(draws), ess_bulk(draws), effective_sample_size(draws)


@dataclass(frozen=True)
class Posterior:
    """Every draw of a run.

    Attributes:
        values: by site, in its support: [chains, draws, ...]; of an ensemble [1, particles, ...]. Empty without a draw.
        positions: the pytree that a position is, as it was sampled, with the same leading axes; None without a draw.
        stats: what was measured of each step by name, [steps, chains].
        facts: plain numbers of the sampler at the end.
        successive: the draws of a chain follow each other; particles do not.
    """

    values: Mapping[str, np.ndarray]
    positions: Any = None
    stats: Mapping[str, np.ndarray] = field(default_factory=dict)
    facts: Mapping[str, float] = field(default_factory=dict)
    successive: bool = True

    def flat(self, tree: Any) -> Any:
        """These arrays with chains one after the other: [chains * draws, ...]."""
        return jax.tree.map(lambda leaf: np.reshape(leaf, (-1, *np.shape(leaf)[2:])), tree)

    def diagnostics(self) -> dict[str, dict[str, Any]]:
        """See `diagnose`."""
        return diagnose(self.values, chains=self.successive)


class NoPredictionError(ModelError, RuntimeError):
    """A posterior was asked for a prediction, and nobody said how one is made from a position."""


@register("blackjax_predictive")
class BlackjaxPredictiveOp(PredictiveOp):
    """The posterior predictive of a log density: `predict_fn` averaged over the draws.

    `op(x)` is the mean over draws, `op.samples(x)` the prediction of every draw, `op.quantiles(x)` their quantiles. The
    draws are the operator's weights: in its hash, and in `serialize_weights()`.

    Args:
        predict_fn: (position, x) -> prediction for x [rows, ...], traced under vmap over the draws.
        posterior: draws as the pytree that a position is, every array with a leading axis of draws: [draws, ...].
        predictive_site: what is predicted, a name.

    Raises:
        ConfigError: (a ValueError) no posterior, or arrays without one number of draws for all.
        TypeError: `predict_fn` cannot be called.
    """

    predictive_site: str = "obs"
    predict: str = ""
    """Name of the function, which no file can rebuild."""
    _predict_fn: Any = PrivateAttr(default=None)
    _tree: Any = PrivateAttr(default=None)

    def __new__(cls, /, *args: Any, **data: Any) -> BlackjaxPredictiveOp:
        """Allow its parts by position, which other specifications do not."""
        return super().__new__(cls)

    def __init__(
        self,
        predict_fn: Callable[[Any, Any], Any] | None = None,
        posterior: Any = None,
        predictive_site: str = "obs",
        **data: Any,
    ) -> None:
        if predict_fn is not None:
            if not callable(predict_fn):
                raise TypeError(f"predict_fn must be a function of (position, x), got {type(predict_fn).__name__}")
            data["predict"] = getattr(predict_fn, "__qualname__", type(predict_fn).__qualname__)
        if posterior is None and not data.get("weights"):
            raise ConfigError("give a posterior: draws as arrays with a leading axis", path="BlackjaxPredictiveOp")
        arrays = None
        if posterior is not None:
            arrays = {SAMPLES + name: np.asarray(leaf) for name, leaf in named_leaves(posterior).items()}
            sizes = {np.shape(leaf)[:1] for leaf in arrays.values()}
            if len(sizes) != 1 or sizes & {(), (0,)}:
                told = f"the arrays of a posterior share a leading axis of draws, got {sorted(sizes)}"
                raise ConfigError(told, path="BlackjaxPredictiveOp")
            data["weights"] = hash_arrays(arrays)
        data["predictive_site"] = predictive_site
        super().__init__(**data)
        self._predict_fn, self._tree, self._arrays = predict_fn, jax.tree.structure(posterior), arrays

    @property
    def module(self) -> Callable[[Any, Any], Any]:
        """The function that predicts from a position.

        Raises:
            NoPredictionError: (a RuntimeError) there is none.
        """
        if self._predict_fn is None:
            raise NoPredictionError(
                f"nobody said how {self.predictive_site!r} is predicted from a position; give predict_fn, a function "
                "of (position, x)"
            )
        return self._predict_fn

    @property
    def posterior(self) -> Any:
        """The draws, as the pytree that a position is, [draws, ...]."""
        return jax.tree.unflatten(self._tree, list(self.arrays().values()))

    def draws(self, arrays: Mapping[str, Any], key: Any, x: Any) -> Any:
        """Return the prediction of every draw, [draws, rows, ...].

        Raises:
            NoPredictionError: (a RuntimeError) there is no `predict_fn`.
        """
        del key
        positions = jax.tree.unflatten(self._tree, [arrays[name] for name in self.arrays()])
        return jax.vmap(self.module, in_axes=(0, None))(positions, x)
