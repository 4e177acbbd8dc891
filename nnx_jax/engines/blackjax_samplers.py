"""The samplers of BlackJAX in one form: start all chains with warmup, then move all of them by one step.

Everything here is pure and traced; BlackJAX is imported when a sampler is made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from nnx_jax.core.errors import ConfigError
from nnx_jax.engines.blackjax_task import BlackjaxTask, Target


class Move(NamedTuple):
    """What one step of all chains gave.

    Attributes:
        position: where every chain (or particle) stands, [chains, ...].
        logdensity: float [chains], of the position, up to a constant; of a minibatch sampler, the estimate that the
            step was made with, NaN where there is none.
        measured: by name float [chains], the sampler's own diagnostics.
        grad_norm: scalar, norm of the gradient of the log density over all chains; NaN where no step has it in hand.
    """

    position: Any
    logdensity: Any
    measured: Mapping[str, Any]
    grad_norm: Any


class Sampler(ABC):
    """One algorithm over one target. `width` chains or particles move at once.

    Attributes:
        metrics: names of `Move.measured`.
        particles: the posterior is the ensemble at the end; else every step's positions are draws.
    """

    metrics: tuple[str, ...] = ()
    particles: bool = False

    def __init__(self, task: BlackjaxTask, target: Target) -> None:
        self.task, self.target = task, target
        self.width = task.num_particles if self.particles else int(task.num_chains or 1)
        self.warmup, self.step_size = int(task.num_warmup or 0), float(task.step_size or 0.0)

    @abstractmethod
    def start(self, key: Any, positions: Any, data: Any) -> tuple[Any, Any]:
        """Return (kernel state, adapted parameters) after the warmup, from positions [width, ...]."""

    @abstractmethod
    def step(self, key: Any, kernel: Any, params: Any, data: Any, batch: Any) -> tuple[Any, Move]:
        """Move every chain once; `batch` is a minibatch's columns, or None."""

    def rate(self, params: Any) -> Any:
        """Step size, the mean over chains."""
        del params
        return jnp.asarray(self.step_size)

    def ensemble(self, key: Any, kernel: Any) -> Any:
        """Particles of equal weight, [width, ...]."""
        raise TypeError(f"{type(self).__name__} has chains, not particles")

    def facts(self, kernel: Any, params: Any) -> dict[str, float]:
        """Plain numbers of where the sampler stands, for the run's information."""
        del kernel, params
        return {}

    def _chains(self, key: Any) -> Any:
        """One key for each chain; that of a chain does not depend on how many there are."""
        return jax.vmap(lambda chain: jax.random.fold_in(key, chain))(jnp.arange(self.width))

    def _each(self, function: Callable[..., Any], *columns: Any) -> Any:
        """`function` of every chain: vmapped. One chain is not: mapping makes it compute both sides of every branch,
        which took a quarter of a step of NUTS."""
        if self.width > 1:
            return jax.vmap(function)(*columns)
        found = function(*(jax.tree.map(lambda leaf: leaf[0], column) for column in columns))
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], found)

    def _density(self, data: Any) -> Callable[[Any], Any]:
        return lambda position: self.target.logdensity(position, data)


class Hamiltonian(Sampler):
    """NUTS and HMC; step size and diagonal mass matrix of each chain come from window adaptation."""

    metrics = ("acceptance_rate", "is_divergent")

    def __init__(self, task: BlackjaxTask, target: Target) -> None:
        super().__init__(task, target)
        import blackjax

        self.algorithm = blackjax.nuts if task.sampler == "nuts" else blackjax.hmc
        steps = {"num_integration_steps": task.num_integration_steps}
        self.options: dict[str, Any] = {} if task.sampler == "nuts" else steps
        self.kernel = self.algorithm.build_kernel()

    def start(self, key: Any, positions: Any, data: Any) -> tuple[Any, Any]:
        return self._each(lambda k, position: self._start(k, position, data), self._chains(key), positions)

    def _start(self, key: Any, position: Any, data: Any) -> tuple[Any, Any]:
        density = self._density(data)
        if self.warmup:
            import blackjax
            from blackjax.adaptation.base import get_filter_adapt_info_fn

            adaptation = blackjax.window_adaptation(
                self.algorithm,
                density,
                target_acceptance_rate=self.task.target_acceptance_rate,
                adaptation_info_fn=get_filter_adapt_info_fn(),
                **self.options,
            )
            (state, found), _ = adaptation.run(key, position, self.warmup)  # type: ignore[call-arg]
            return state, {name: found[name] for name in ("step_size", "inverse_mass_matrix")}
        flat, _ = ravel_pytree(position)
        params = {"step_size": jnp.asarray(self.step_size, flat.dtype), "inverse_mass_matrix": jnp.ones_like(flat)}
        return self.algorithm.init(position, density), params

    def step(self, key: Any, kernel: Any, params: Any, data: Any, batch: Any) -> tuple[Any, Move]:
        del batch
        density = self._density(data)

        def one(k: Any, state: Any, adapted: Any) -> tuple[Any, Any]:
            return self.kernel(k, state, density, adapted["step_size"], adapted["inverse_mass_matrix"], **self.options)

        state, info = self._each(one, self._chains(key), kernel, params)
        measured = {"acceptance_rate": info.acceptance_rate, "is_divergent": info.is_divergent}
        return state, Move(state.position, state.logdensity, measured, _norm(state.logdensity_grad))

    def rate(self, params: Any) -> Any:
        return jnp.mean(params["step_size"])


class Microcanonical(Sampler):
    """MCLMC, unadjusted; momentum length, step size and mass matrix of each chain are found by the warmup."""

    metrics = ("energy_change", "is_divergent")

    def __init__(self, task: BlackjaxTask, target: Target) -> None:
        super().__init__(task, target)
        import blackjax

        self.algorithm, self.kernel = blackjax.mclmc, blackjax.mclmc.build_kernel()

    def start(self, key: Any, positions: Any, data: Any) -> tuple[Any, Any]:
        size = sum(leaf[0].size for leaf in jax.tree.leaves(positions))
        if size < 2:
            raise ConfigError(
                f"mclmc moves on spheres, so it needs a position of 2 numbers or more, got {size}; use nuts or hmc",
                path="task.sampler",
            )
        return self._each(lambda k, position: self._start(k, position, data), self._chains(key), positions)

    def _start(self, key: Any, position: Any, data: Any) -> tuple[Any, Any]:
        import blackjax

        density = self._density(data)
        momentum, tuning = jax.random.split(key)
        state = self.algorithm.init(position, density, momentum)
        if not self.warmup:
            flat, _ = ravel_pytree(position)
            length = jnp.sqrt(jnp.asarray(flat.size, flat.dtype))
            params = {"L": length, "step_size": jnp.asarray(self.step_size, flat.dtype)}
            return state, {**params, "inverse_mass_matrix": jnp.ones_like(flat)}
        state, found, _ = blackjax.mclmc_find_L_and_step_size(
            self.kernel, self.warmup, state, tuning, density, frac_tune1=0.3, frac_tune2=0.3, frac_tune3=0.3
        )  # the second phase takes a third more, for the mass matrix: with it, every warmup step is used
        return state, found._asdict()

    def step(self, key: Any, kernel: Any, params: Any, data: Any, batch: Any) -> tuple[Any, Move]:
        del batch
        density = self._density(data)

        def one(k: Any, state: Any, p: Any) -> tuple[Any, Any]:
            return self.kernel(k, state, density, p["inverse_mass_matrix"], p["L"], p["step_size"])

        state, info = self._each(one, self._chains(key), kernel, params)
        measured = {"energy_change": info.energy_change, "is_divergent": ~info.nonans}
        return state, Move(state.position, state.logdensity, measured, _norm(state.logdensity_grad))

    def rate(self, params: Any) -> Any:
        return jnp.mean(params["step_size"])


class StochasticGradient(Sampler):
    """SGLD and SGHMC: a step sees one minibatch, the same one in every chain, and accepts every move."""

    def __init__(self, task: BlackjaxTask, target: Target) -> None:
        super().__init__(task, target)
        import blackjax

        found: Any = blackjax.sgld if task.sampler == "sgld" else blackjax.sghmc
        self.kernel = found.build_kernel()
        self.steps = () if task.sampler == "sgld" else (task.num_integration_steps,)

    def start(self, key: Any, positions: Any, data: Any) -> tuple[Any, Any]:
        del key, data
        return positions, {}

    def step(self, key: Any, kernel: Any, params: Any, data: Any, batch: Any) -> tuple[Any, Move]:
        del params, data

        def one(k: Any, position: Any) -> tuple[Any, Any]:
            value = self.target.estimate(position, batch) if self.target.valued else jnp.full((), jnp.nan)
            return self.kernel(k, position, self.target.gradient, batch, self.step_size, *self.steps), value

        positions, values = self._each(one, self._chains(key), kernel)
        return positions, Move(positions, values, {}, jnp.full((), jnp.nan))


class Pathfinder(Sampler):
    """Each chain fits its own normal approximation along L-BFGS once; every step draws from it."""

    def __init__(self, task: BlackjaxTask, target: Target) -> None:
        super().__init__(task, target)
        from blackjax.vi import pathfinder

        self.algorithm = pathfinder

    def start(self, key: Any, positions: Any, data: Any) -> tuple[Any, Any]:
        density = self._density(data)
        fit = lambda k, position: self.algorithm.approximate(k, density, position)[0]  # noqa: E731
        return self._each(fit, self._chains(key), positions), {}

    def step(self, key: Any, kernel: Any, params: Any, data: Any, batch: Any) -> tuple[Any, Move]:
        del params, batch

        def one(k: Any, fitted: Any) -> Any:
            drawn: Any = self.algorithm.sample(k, fitted, 1)
            return jax.tree.map(lambda leaf: leaf[0], drawn[0])

        positions = self._each(one, self._chains(key), kernel)
        values = jax.vmap(self._density(data))(positions)
        return kernel, Move(positions, values, {}, jnp.full((), jnp.nan))

    def facts(self, kernel: Any, params: Any) -> dict[str, float]:
        return {"elbo": float(jnp.mean(kernel.elbo))}


class Stein(Sampler):
    """SVGD by Adam: particles drift together towards the posterior."""

    particles = True

    def __init__(self, task: BlackjaxTask, target: Target) -> None:
        super().__init__(task, target)
        import optax

        self.optimizer = optax.adam(self.step_size)

    def _algorithm(self, data: Any) -> Any:
        import blackjax

        return blackjax.svgd(jax.grad(self._density(data)), self.optimizer)

    def start(self, key: Any, positions: Any, data: Any) -> tuple[Any, Any]:
        del key
        return self._algorithm(data).init(positions, {"length_scale": jnp.ones(())}), {}

    def step(self, key: Any, kernel: Any, params: Any, data: Any, batch: Any) -> tuple[Any, Move]:
        del key, params, batch
        state = self._algorithm(data).step(kernel)
        values = jax.vmap(self._density(data))(state.particles)
        return state, Move(state.particles, values, {}, jnp.full((), jnp.nan))

    def ensemble(self, key: Any, kernel: Any) -> Any:
        del key
        return kernel.particles


class TemperedSMC(Sampler):
    """Adaptive tempered SMC: a step raises the temperature as far as half the particles keep their weight, then moves
    all by HMC scaled to their spread. At temperature 1 the particles are of the posterior."""

    metrics = ("acceptance_rate", "tempering_param", "effective_particles")
    particles = True

    def __init__(self, task: BlackjaxTask, target: Target) -> None:
        super().__init__(task, target)
        import blackjax
        from blackjax.smc import resampling

        self.resample, self.hmc = resampling.systematic, blackjax.hmc.build_kernel()
        self.init = blackjax.hmc.init

    def _algorithm(self, data: Any) -> Any:
        from blackjax.smc import adaptive_tempered

        steps = self.task.num_integration_steps

        def move(k: Any, state: Any, density: Any, step_size: Any, inverse_mass_matrix: Any) -> Any:
            return self.hmc(k, state, density, step_size, inverse_mass_matrix, steps)

        return adaptive_tempered.build_kernel(
            lambda position: self.target.logprior(position, data),
            lambda position: self.target.loglikelihood(position, data),
            move,
            self.init,
            self.resample,
            target_ess=0.5,
        )

    def start(self, key: Any, positions: Any, data: Any) -> tuple[Any, Any]:
        from blackjax.smc import tempered

        del key, data
        return tempered.init(positions), {}

    def step(self, key: Any, kernel: Any, params: Any, data: Any, batch: Any) -> tuple[Any, Move]:
        del params, batch
        flat = jax.vmap(lambda particle: ravel_pytree(particle)[0])(kernel.particles)
        centre = jnp.average(flat, axis=0, weights=kernel.weights)
        spread = jnp.average(jnp.square(flat - centre), axis=0, weights=kernel.weights)
        scale = {
            "inverse_mass_matrix": jnp.maximum(spread, jnp.finfo(flat.dtype).tiny)[None],
            "step_size": jnp.full((1,), self.step_size, flat.dtype),
        }
        state, info = self._algorithm(data)(key, kernel, _MOVES, scale)
        values = jax.vmap(self._density(data))(state.particles)
        measured = {
            "acceptance_rate": jnp.broadcast_to(jnp.mean(info.update_info.acceptance_rate), values.shape),
            "tempering_param": jnp.broadcast_to(state.tempering_param, values.shape),
            "effective_particles": jnp.broadcast_to(1.0 / jnp.sum(jnp.square(state.weights)), values.shape),
        }
        return state, Move(state.particles, values, measured, jnp.full((), jnp.nan))

    def ensemble(self, key: Any, kernel: Any) -> Any:
        chosen = self.resample(key, kernel.weights, self.width)
        return jax.tree.map(lambda leaf: leaf[chosen], kernel.particles)

    def facts(self, kernel: Any, params: Any) -> dict[str, float]:
        return {"tempering_param": float(kernel.tempering_param)}


_MOVES = 5
"""HMC moves of every particle in a step of tempered SMC."""

_ALGORITHMS: dict[str, type[Sampler]] = {
    "nuts": Hamiltonian,
    "hmc": Hamiltonian,
    "mclmc": Microcanonical,
    "sgld": StochasticGradient,
    "sghmc": StochasticGradient,
    "pathfinder": Pathfinder,
    "svgd": Stein,
    "tempered_smc": TemperedSMC,
}


def make_sampler(task: BlackjaxTask, target: Target) -> Sampler:
    """Return the sampler that a settled task names.

    Raises:
        ImportError: BlackJAX is not installed.
    """
    require_blackjax()
    return _ALGORITHMS[task.sampler](task, target)


def require_blackjax() -> None:
    """Import BlackJAX, or say which extra has it.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import blackjax  # noqa: F401
    except ImportError as error:
        raise ImportError("BlackJAX is not installed; pip install 'nnx_jax[blackjax]'", name="blackjax") from error


def _norm(tree: Any) -> Any:
    return jnp.sqrt(sum((jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)), jnp.zeros(())))
