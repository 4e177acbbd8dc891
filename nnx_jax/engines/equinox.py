"""The Equinox engine: an Equinox module under the one loop, and as an operator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import PrivateAttr

from nnx_jax.core.errors import ConfigError, DataError, ModelError
from nnx_jax.core.hashing import hash_arrays
from nnx_jax.core.registry import register
from nnx_jax.engines.equinox_forward import OpenedNet, PureEquinox
from nnx_jax.engines.equinox_net import EquinoxCopies, EquinoxNet
from nnx_jax.engines.flax import FlaxEngine
from nnx_jax.engines.operators import ModelOp
from nnx_jax.engines.validation import Batches, EvalStepContext
from nnx_jax.engines.work import Work
from nnx_jax.params.fields import Precision

__all__ = ["EquinoxEngine", "EquinoxModelOp", "EquinoxNet", "OpenedNet", "PureEquinox"]


class EquinoxEngine(FlaxEngine):
    """One Equinox module under the loop; see FlaxEngine, whose module is an EquinoxNet here.

    Raises:
        DataError: batches have padded rows, and the module keeps a state of its own that they would enter.
    """

    backend = "equinox"
    make_pure = PureEquinox

    def copies(self) -> EquinoxCopies:
        """What an average makes its model from."""
        return EquinoxCopies(self.module)

    def weights(self, model: Any) -> dict[str, jax.Array]:
        """Every array of the model's network as it is now, trained or not."""
        now = self.make_pure(model.net, compute_dtype=self.pure.compute_dtype)
        found = {"params": {**now.params, **now.frozen}, "model_state": now.model_state}
        return {f"{head}/{name}": value for head, named in found.items() for name, value in named.items()}

    def _work(self, *given: Any, **options: Any) -> Work:
        self.pure.row_axes = len(self.feed.signature()["x"].shape) - 1
        return super()._work(*given, **options)

    def _eval_context(self, state: Any, feed: Any) -> EvalStepContext:
        """What a validation of the user's own sees: the model in evaluation mode, called with rows."""
        train, extra = self.programs.state(state), self.spec.training.extra_metrics or {}
        leaves, model_state = self.place.home(({**train.frozen, **train.params}, train.model_state))
        model = self.pure.opened(leaves, model_state, None, train=False)
        default = lambda: self._score(state, "val").values  # noqa: E731
        return EvalStepContext(model, Batches(feed), self._epoch, self.score_names, extra, default)

    def _untaken(self, batch: Mapping[str, Any], error: Exception) -> ModelError:
        x = batch["x"]
        given = f"a batch x of {x.dtype}{list(x.shape)}"
        if not self.pure.takes_batch:
            given = f"rows x of {x.dtype}{list(x.shape[1:])}"
        told = "fix the module's input size or the data's shape; one that takes whole batches says takes_batch = True"
        return ModelError(f"{self.module.called} does not take {given}: {error}; {told}")

    def _check_tail(self) -> None:
        super()._check_tail()
        if not self._pads:
            return
        norms = tuple(f"{name}." for name in self.pure.batch_norms)
        own = [name for name in self._follows_rows() if not name.startswith(norms)]
        if own:
            raise DataError(
                f"{self.module.called} keeps '{own[0]}' of the rows it sees, and padded rows would enter it; use "
                "data.tail: drop, and batches that split evenly over the devices"
            )

    @property
    def _pads(self) -> bool:
        """A batch may have padded rows."""
        signature, sharding = self.feed.signature(), None if self.hooks is None else self.hooks.sharding
        size, rows = signature["mask"].shape[0], self.feed.rows
        if sharding is not None and sharding.padded(size) != size:
            return True
        fills = getattr(self.feed, "pad", getattr(self.feed, "tail", "pad") == "pad")
        return fills and (rows is None or rows % size != 0)

    def _follows_rows(self) -> list[str]:
        """Names of the state that a training pass makes from the rows; found by tracing, nothing is computed."""
        pure, key = self.pure, jax.eval_shape(lambda: jax.random.key(0))
        batch = {name: jax.ShapeDtypeStruct(c.shape, c.dtype) for name, c in self.feed.signature().items()}
        rows = {name: column for name, column in batch.items() if name != "mask"}
        others = {**pure.params, **pure.frozen}, pure.model_state, batch["mask"], key

        def new_state(rows: Any, params: Any, state: Any, mask: Any, key: Any) -> Any:
            return pure.forward(params, state, {**rows, "mask": mask}, key, True)[1]

        try:
            traced = jax.make_jaxpr(new_state)(rows, *others).jaxpr
        except (TypeError, ValueError) as error:
            raise self._untaken(batch, error) from error
        reached = {id(value) for value in traced.invars[: len(rows)]}
        for equation in traced.eqns:
            if any(id(value) in reached for value in equation.invars):
                reached.update(id(value) for value in equation.outvars)
        return [name for name, out in zip(sorted(pure.model_state), traced.outvars, strict=True) if id(out) in reached]


@register("equinox_model")
class EquinoxModelOp(ModelOp):
    """An Equinox module as an operator, in evaluation mode.

    `op(x)` takes a batch [N, ...] and, where `input_shape` is known, one sample as well: of a sample it is `module(x)`,
    of a batch the module mapped over its rows. `input_shape` is read off modules that say `in_size` or `in_features`,
    as `equinox.nn.MLP` and `Linear` do, and set by training.

    Args:
        module: any `equinox.Module`, or the pair (module, state) of `equinox.nn.make_with_state`.
        state: the State, in place of a pair.
        precision: what it computes in.

    Raises:
        TypeError: the module is no `eqx.Module`.
        ModelError: (a ValueError) a module with state without its State.
    """

    precision: Precision = "float32"
    module_class: str = ""
    """Class of the module, which no file can rebuild."""
    _net: Any = PrivateAttr(default=None)
    _call: Any = PrivateAttr(default=None)

    def __new__(cls, /, *args: Any, **data: Any) -> EquinoxModelOp:
        """Allow the module by position, which other specifications do not."""
        return super().__new__(cls)

    def __init__(self, module: Any = None, state: Any = None, /, **data: Any) -> None:
        if module is None and not data.get("module_class"):
            raise ConfigError("give an eqx.Module", path="EquinoxModelOp")
        net = None
        if module is not None:
            net = EquinoxNet.of(module if state is None else (module, state))
            kind = type(net.module)
            data["module_class"] = f"{kind.__module__}.{kind.__qualname__}"
            data["weights"] = hash_arrays(_numpy(net))
            data.setdefault("input_shape", _input_shape(net.module))
        super().__init__(**data)
        self._net = net

    @property
    def net(self) -> EquinoxNet:
        """The module and its State.

        Raises:
            ModelError: (a ValueError) they are not here; only the name of the class and the digest of the weights are.
        """
        if self._net is None:
            raise ModelError(f"{self.module_class} cannot be rebuilt from a file; make it, and bring its weights")
        return self._net

    @property
    def module(self) -> Any:
        """The module; see `net`."""
        return self.net.module

    @property
    def whole(self) -> Any:
        """The module and its State, as `of` takes them."""
        return self.net

    def get_config(self) -> dict[str, Any]:
        """Return what is known of the module without its weights."""
        return {"module_class": self.module_class.rpartition(".")[2]}

    def of(self, net: Any, **changes: Any) -> EquinoxModelOp:
        """Return the operator of another module in place of this one's."""
        kept = {name: value for name, value in self.changed().items() if name not in ("weights", "module_class")}
        return EquinoxModelOp(net, **{**kept, **changes})

    def arrays(self) -> dict[str, np.ndarray]:
        """Return every leaf that is an array, and every one of the State, by name."""
        return _numpy(self.net)

    def with_arrays(self, arrays: Mapping[str, Any]) -> EquinoxModelOp:
        """Return an operator of the same structure with these weights."""
        net = EquinoxNet.of(self.net)
        net.put(arrays)
        return self.of(net)

    def outputs(self, x: Any) -> Any:
        """Return the outputs for a batch x [N, ...], in evaluation mode."""
        if self._call is None:
            pure = PureEquinox(self.net, compute_dtype=jnp.dtype(self.precision))
            leaves = {**pure.params, **pure.frozen}
            forward = jax.jit(lambda held, state, rows: pure.forward(held, state, {"x": rows}, None, False)[0])
            self._call = lambda rows: forward(leaves, pure.model_state, rows)
        return self._call(x)


def _numpy(net: EquinoxNet) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in {**net.arrays(), **net.state_arrays()}.items()}


def _input_shape(module: Any) -> tuple[int, ...] | None:
    """Shape of a sample where the module says it; None where it does not."""
    size = getattr(module, "in_size", getattr(module, "in_features", None))
    return () if size == "scalar" else (size,) if isinstance(size, int) else None
