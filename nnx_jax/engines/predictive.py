"""A posterior as an operator: the predictive mean, draws or quantiles of one site, for new rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import PrivateAttr

from nnx_jax.core.errors import ModelError
from nnx_jax.core.hashing import hash_arrays
from nnx_jax.core.registry import register
from nnx_jax.engines.bayes import NumpyroTask, by_rows, predictive_args, require_numpyro
from nnx_jax.engines.operators import ModelOp, read_blob

SAMPLES = "samples/"
"""What the names of posterior draws begin with in a weight blob; each is [draws, ...], chains one after the other."""
PARAMS, STATE = "params/", "model_state/"
"""What the names of a guide's (and a model's) fitted parameters and mutable values begin with in a weight blob."""


class SiteError(ModelError, KeyError):
    """A site that the model does not have."""


class PredictiveOp(ModelOp):
    """Base of posteriors as operators: a subclass says how to draw predictions.

    Attributes:
        seed: of the draws that `op(x)` averages: the same seed gives the same answer.
    """

    seed: int = 0
    _arrays: dict[str, np.ndarray] | None = PrivateAttr(default=None)
    _compiled: Any = PrivateAttr(default=None)

    @abstractmethod
    def draws(self, arrays: Mapping[str, Any], key: Any, x: Any) -> Any:
        """Return predictions [draws, rows, ...] for x [rows, ...]; traced. `arrays` are those of `arrays()`."""

    def __call__(
        self,
        x: Any,
        /,
        *,
        seed: int | None = None,
        return_samples: bool = False,
        quantiles: float | Sequence[float] | None = None,
    ) -> Any:
        """Return the posterior-predictive mean [rows, ...] for x [rows, ...].

        Args:
            seed: in place of the operator's own.
            return_samples: return every draw, [draws, rows, ...].
            quantiles: return these quantiles, [quantiles, rows, ...]; one number: [rows, ...].

        Raises:
            ValueError: both draws and quantiles are asked for, or a quantile is outside [0, 1].
            ModelError: (a ValueError) there is no posterior yet.
        """
        if return_samples and quantiles is not None:
            raise ModelError("ask for return_samples or for quantiles: the quantiles of the draws are theirs already")
        single = self.input_shape is not None and np.ndim(x) == len(self.input_shape)
        found = self._draw(jnp.asarray(x)[None], seed)[:, 0] if single else self._draw(x, seed)
        if return_samples:
            return found
        if quantiles is None:
            return jnp.mean(found, axis=0)
        asked = np.asarray(quantiles, np.float32)
        if not ((asked >= 0) & (asked <= 1)).all():
            raise ModelError(f"quantiles are shares from 0 to 1, got {quantiles}")
        return jnp.quantile(found, asked, axis=0)

    def samples(self, x: Any, seed: int | None = None) -> Any:
        """Return every predictive draw, [draws, rows, ...]."""
        return self(x, seed=seed, return_samples=True)

    def quantiles(self, x: Any, q: float | Sequence[float] = (0.05, 0.5, 0.95), seed: int | None = None) -> Any:
        """Return quantiles of the predictive draws, [quantiles, rows, ...]."""
        return self(x, seed=seed, quantiles=q)

    def outputs(self, x: Any) -> Any:
        """Return the posterior-predictive mean for a batch x [rows, ...]."""
        return self(x)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return what the posterior is made of, by name.

        Raises:
            ModelError: (a ValueError) it is not here.
        """
        if self._arrays is None:
            told = f"of digest {self.weights[:12]}... " if self.weights else ""
            raise ModelError(f"the posterior {told}of this operator is not here; bring it with with_weights(bytes)")
        return dict(self._arrays)

    def with_arrays(self, arrays: Mapping[str, Any]) -> Self:
        """Return this operator with another posterior."""
        found = {name: np.asarray(value) for name, value in arrays.items()}
        other = self.model_copy(update={"weights": hash_arrays(found)})
        other._arrays, other._compiled = found, None
        return other

    def with_weights(self, blob: bytes) -> Self:
        """Return this operator with the posterior of `serialize_weights()`; one without takes any of its sites.

        Raises:
            TypeError: something else than bytes.
            ModelError: (a ValueError) the bytes are no weights, or not those of this structure; naming the leaf.
        """
        if self._arrays is not None:
            return super().with_weights(blob)
        return self.with_arrays(read_blob(blob))

    def _draw(self, x: Any, seed: int | None) -> Any:
        arrays = self.arrays()
        if self._compiled is None:
            self._compiled = jax.jit(self.draws)
        return self._compiled(arrays, jax.random.key(self.seed if seed is None else seed), jnp.asarray(x))


@register("numpyro_predictive")
class NumpyroPredictiveOp(PredictiveOp):
    """The posterior predictive of a NumPyro model.

    `NumpyroPredictiveOp(task)` is the operator without a posterior: `with_samples` or `with_weights` bring one. Draws
    from a guide need the guide, which an engine hands over; see `engines.numpyro_svi`.

    Args:
        task: the model, and the site that is predicted.

    Attributes:
        site: what is predicted.
        num_samples: draws from a guide; posterior draws are all used.
        model_name: of the model, which no file can rebuild.
    """

    site: str = "obs"
    num_samples: int = 200
    model_name: str = ""
    _task: Any = PrivateAttr(default=None)
    _guide: Callable[..., Any] | None = PrivateAttr(default=None)
    _values: Callable[..., Any] | None = PrivateAttr(default=None)

    def __new__(cls, /, *args: Any, **data: Any) -> NumpyroPredictiveOp:
        """Allow the task by position, which other specifications do not."""
        return super().__new__(cls)

    def __init__(self, task: NumpyroTask | None = None, /, **data: Any) -> None:
        if task is not None:
            if not isinstance(task, NumpyroTask):
                raise TypeError(f"NumpyroPredictiveOp takes a NumpyroTask, got {type(task).__name__}")
            data.setdefault("site", task.predictive_site)
            data.setdefault("num_samples", task.predictive_samples)
            data.setdefault("model_name", getattr(task.model, "__qualname__", type(task.model).__qualname__))
        super().__init__(**data)
        self._task = task

    @property
    def module(self) -> NumpyroTask:
        """The task, with its model.

        Raises:
            ModelError: (a ValueError) the operator is from a file.
        """
        if self._task is None:
            told = f"the model {self.model_name} cannot be rebuilt from a file"
            raise ModelError(f"{told}; make NumpyroPredictiveOp(task), and bring its weights with with_weights(bytes)")
        return self._task

    @property
    def posterior(self) -> dict[str, np.ndarray]:
        """Posterior draws by site, [draws, ...]; of a guide, its fitted parameters."""
        return {name.partition("/")[2]: value for name, value in self.arrays().items()}

    def with_samples(self, samples: Mapping[str, Any]) -> Self:
        """Return this operator with these posterior draws, site -> [draws, ...].

        Raises:
            ModelError: (a ValueError) no draws, or sites of unequal numbers.
        """
        counts = {name: np.shape(value)[:1] for name, value in samples.items()}
        if len(set(counts.values())) != 1 or counts[next(iter(counts))] in ((), (0,)):
            raise ModelError(f"posterior draws are [draws, ...], as many for every site, got {counts}")
        return self.with_arrays({SAMPLES + name: value for name, value in samples.items()})

    def with_guide(
        self,
        guide: Callable[..., Any],
        values: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]],
        params: Mapping[str, Any],
        model_state: Mapping[str, Any],
    ) -> Self:
        """Return this operator with draws from a guide.

        Args:
            guide: set up for the data.
            values: (params, model_state) -> the values of param and mutable sites, pytrees by site.
            params: unconstrained parameters by name.
            model_state: mutable values by name.
        """
        held = {PARAMS + name: value for name, value in params.items()}
        other = self.with_arrays(held | {STATE + name: value for name, value in model_state.items()})
        other._guide, other._values = guide, values
        return other

    def guide_arrays(self) -> dict[str, np.ndarray]:
        """Parameters and mutable values of a guide by name; nothing where the posterior is draws, or not here."""
        return {
            name.removeprefix(head): value
            for name, value in (self._arrays or {}).items()
            for head in (PARAMS, STATE)
            if name.startswith(head)
        }

    def draws(self, arrays: Mapping[str, Any], key: Any, x: Any) -> Any:
        """Return draws of the site, [draws, rows, ...].

        Raises:
            SiteError: (a KeyError) the model has no such site.
            ModelError: (a ValueError) the posterior is a guide's, and there is no guide.
        """
        require_numpyro()
        from numpyro.handlers import substitute
        from numpyro.infer import Predictive

        task, (key, guide_key) = self.module, jax.random.split(key)
        latents = _under(SAMPLES, arrays)
        model = by_rows(task.model)
        if not latents:
            if self._guide is None or self._values is None:
                raise ModelError("these are the parameters of a guide; only the operator of that training has it")
            values = self._values(_under(PARAMS, arrays), _under(STATE, arrays))
            model = substitute(model, data=values)
            ask = Predictive(by_rows(self._guide), params=values, num_samples=self.num_samples, parallel=True)
            latents = ask(guide_key, *predictive_args(self._guide, x))
        args = predictive_args(task.model, x)
        found = Predictive(model, latents, return_sites=[self.site], parallel=True)(key, *args)
        if self.site not in found:
            raise unknown_site(self.site, model_sites(task, x))
        return found[self.site]


def _under(head: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(head): value for name, value in arrays.items() if name.startswith(head)}


def check_site(task: NumpyroTask, x: Any) -> None:
    """Check, before anything is trained, that the model predicts the task's site.

    Raises:
        SiteError: (a KeyError) listing the sites there are.
    """
    if task.predictive_site not in (known := model_sites(task, x)):
        raise unknown_site(task.predictive_site, known)


def model_sites(task: NumpyroTask, x: Any) -> list[str]:
    """Every site of the model that has a value when it predicts; found without computing."""
    from numpyro.handlers import seed, trace

    def run(rows: Any) -> dict[str, Any]:
        found = trace(seed(by_rows(task.model), jax.random.key(0))).get_trace(*predictive_args(task.model, rows))
        return {name: site["value"] for name, site in found.items() if site["type"] in ("sample", "deterministic")}

    return sorted(jax.eval_shape(run, x))


def unknown_site(site: str, known: Iterable[str]) -> SiteError:
    """The error that names a site that is not there, and those that are."""
    return SiteError(f"the model has no site {site!r} to predict; its sites are: {', '.join(sorted(known))}")
