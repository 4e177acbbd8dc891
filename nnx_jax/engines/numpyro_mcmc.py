"""Markov chain Monte Carlo by NumPyro: one blocking run of NUTS or HMC over all rows, with its diagnostics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax.core.errors import ModelError
from nnx_jax.engines.bayes import Args, NumpyroTask, by_rows, check_scales, require_numpyro
from nnx_jax.engines.predictive import check_site

FEWEST = 4
"""Draws of a chain that its two halves need to be compared (split R-hat)."""


@dataclass(frozen=True)
class Draws:
    """The posterior draws of several chains.

    Attributes:
        samples: latent site -> [chains, draws, ...], values in the site's support.
        diverging: bool [chains, draws], the trajectories that left the energy surface.
        accept_prob: [chains, draws], the mean acceptance probability of each trajectory.
        warmup: draws of each chain that adapted the kernel and are not here.
    """

    samples: Mapping[str, np.ndarray]
    diverging: np.ndarray
    accept_prob: np.ndarray
    warmup: int

    @property
    def flat(self) -> dict[str, np.ndarray]:
        """Site -> [chains * draws, ...], one chain after the other."""
        return {name: value.reshape(-1, *value.shape[2:]) for name, value in self.samples.items()}

    def diagnostics(self) -> dict[str, Any]:
        """JSON-safe facts: divergences, acceptance, and by site the worst split R-hat and effective sample size."""
        chains, draws = self.diverging.shape
        found = {name: _worst(value) for name, value in self.samples.items()}
        return {
            "num_chains": chains,
            "num_samples": draws,
            "num_warmup": self.warmup,
            "num_divergences": int(self.diverging.sum()),
            "acceptance_rate": float(self.accept_prob.mean()),
            "sites": {
                name: {"mean": float(value.mean()), "sd": float(value.std()), "r_hat": rhat, "ess": ess}
                for (name, value), (rhat, ess) in zip(self.samples.items(), found.values(), strict=True)
            },
            "r_hat": {name: rhat for name, (rhat, _) in found.items()},
            "ess": {name: ess for name, (_, ess) in found.items()},
        }


def sample(task: NumpyroTask, args: Args, seed: int = 0) -> Draws:
    """Draw from the posterior of the task's model, all chains at once (vmap).

    Args:
        args: all rows, (x, y) or (x,).
        seed: of the starting points and the draws.

    Raises:
        DataError: a plate of the model says that these are not all rows.
        ModelError: no starting point of finite density, or no latent site.
        SiteError: (a KeyError) the model has no such site as the task predicts.
        ImportError: NumPyro is not installed.
    """
    require_numpyro()
    from numpyro.infer import HMC, MCMC, NUTS

    args = tuple(jnp.asarray(column) for column in args)
    model = by_rows(task.model)
    check_site(task, args[0])
    check_scales(model, args, len(args[0]))
    kernel = {"nuts": NUTS, "hmc": HMC}[task.kernel](model, **task.kernel_options)
    mcmc = MCMC(
        kernel,
        num_warmup=task.num_warmup,
        num_samples=task.num_samples,
        num_chains=task.num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    try:
        mcmc.run(jax.random.key(seed), *args, extra_fields=("diverging", "accept_prob"))
    except RuntimeError as error:
        raise ModelError(f"the posterior cannot be sampled: {error}") from error
    last: Any = mcmc.last_state
    latent = last.z  # what moves; get_samples has deterministic sites as well, one value a row
    if not latent:
        raise ModelError("the model has no latent site to infer; every numpyro.sample of it is observed")
    drawn, fields = mcmc.get_samples(group_by_chain=True), mcmc.get_extra_fields(group_by_chain=True)
    return Draws(
        {name: np.asarray(drawn[name]) for name in sorted(latent)},
        np.asarray(fields["diverging"]),
        np.asarray(fields["accept_prob"]),
        task.num_warmup,
    )


def _worst(value: np.ndarray) -> tuple[float | None, float | None]:
    """(largest split R-hat, smallest effective sample size) over the elements of a site; None where there is none.

    Both as in Gelman et al., Bayesian Data Analysis, 3rd edition, section 11.4 and 11.5, by NumPyro. A site whose draws
    are all equal has neither.
    """
    from numpyro.diagnostics import effective_sample_size, split_gelman_rubin

    if value.shape[1] < FEWEST or value.size == 0:
        return None, None
    with np.errstate(divide="ignore", invalid="ignore"):
        rhat, ess = np.max(split_gelman_rubin(value)), np.min(effective_sample_size(value))
    return _number(rhat), _number(ess)


def _number(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None
