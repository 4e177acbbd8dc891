"""Trained models as operators: callable, with their weights in their hash and in a blob without pickle."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import jax
import numpy as np
from flax import nnx
from pydantic import PrivateAttr

from nnx_jax.core.errors import ConfigError, ModelError, nearest
from nnx_jax.core.hashing import hash_arrays
from nnx_jax.core.operator import Operator
from nnx_jax.core.registry import register
from nnx_jax.engines.blobs import read_blob, write_blob
from nnx_jax.engines.function_module import FunctionModule
from nnx_jax.engines.inference import weights_of
from nnx_jax.engines.nnx_forward import PureModule
from nnx_jax.nets import build_net
from nnx_jax.nets.resolve import resolve
from nnx_jax.params.fields import Precision
from nnx_jax.params.net import NNParams


class ModelOp(Operator):
    """A model as an operator: `op(x)` gives its outputs in evaluation mode.

    The weights are not fields, their digest is: two operators of equal structure and weights are equal, and
    `content_hash()` changes with every weight. `serialize_weights()` gives them as bytes (safetensors), which
    `with_weights` of an operator of the same structure takes back.

    Attributes:
        input_shape: of one sample, without the row axis. Where it is known, `op` takes one sample as well as a batch;
            else what it is given is a batch.
        weights: SHA-256 of the weights; "" for the fresh ones that the configuration itself makes.
    """

    family: ClassVar[str] = "operator"

    input_shape: tuple[int, ...] | None = None
    weights: str = ""

    @property
    @abstractmethod
    def module(self) -> Any:
        """The model itself."""

    @property
    def whole(self) -> Any:
        """The model with everything that belongs to it, as an operator's `of` takes it."""
        return self.module

    @abstractmethod
    def arrays(self) -> dict[str, np.ndarray]:
        """Return every weight and statistic by name."""

    @abstractmethod
    def with_arrays(self, arrays: Mapping[str, Any]) -> Self:
        """Return an operator of the same structure with these weights; they are known to fit."""

    @abstractmethod
    def outputs(self, x: Any) -> Any:
        """Return the outputs for a batch x [N, ...]."""

    def __call__(self, x: Any, /) -> Any:
        """Return the outputs [N, ...] for a batch x [N, ...], or those of one sample where `input_shape` is known.

        Under a trace (jit, grad, vmap) it is traced with the rest.
        """
        if self.input_shape is not None and np.ndim(x) == len(self.input_shape):
            return jax.tree.map(lambda output: output[0], self.outputs(_row(x)))
        return self.outputs(x)

    def serialize_weights(self) -> bytes:
        """Return every weight and statistic as the bytes of a safetensors file: names, shapes, dtypes, values."""
        return write_blob(self.arrays())

    def with_weights(self, blob: bytes) -> Self:
        """Return this operator with the weights of `serialize_weights()`; this one stays as it is.

        Raises:
            TypeError: something else than bytes.
            ModelError: (a ValueError) the bytes are no weights, or not those of this structure; naming the leaf.
        """
        return self.with_arrays(check_fit(type(self).__name__, self._layout(), read_blob(blob)))

    def from_registry(self, registry: Any, ref: str) -> Self:
        """Return this operator with the weights of a model in a registry; this one stays as it is.

        Args:
            registry: a ModelRegistry with `load_weights`.
            ref: hash or name of a model of the same structure.

        Raises:
            TypeError: a registry that gives no weights.
            KeyError: it has no such model.
            ModelError: (a ValueError) the model was stored without weights, or they do not fit; naming the leaf.
        """
        load = getattr(registry, "load_weights", None)
        if not callable(load):
            raise TypeError(f"{type(registry).__name__} has no load_weights(ref), so it gives no weights")
        blob = load(ref)
        if not blob:
            raise ModelError(f"{ref} was stored without weights: there is no weights blob")
        return self.with_weights(blob)  # type: ignore[arg-type]

    def _layout(self) -> Mapping[str, Any]:
        """What the weights look like: name -> something with a shape and a dtype."""
        return self.arrays()


def check_fit(what: str, wanted: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given arrays in the wanted order, once names, shapes and dtypes are the same.

    Raises:
        ModelError: (a ValueError) naming the first leaf that is missing, not wanted, or other than wanted.
    """
    for name in wanted:
        if name not in given:
            raise ModelError(f"the weights do not fit {what}: {name} is missing{nearest(name, given)}")
    for name in given:
        if name not in wanted:
            raise ModelError(f"the weights do not fit {what}: it has no {name}{nearest(name, wanted)}")
    for name, like in wanted.items():
        then, now = (f"{np.dtype(leaf.dtype)}{list(leaf.shape)}" for leaf in (given[name], like))
        if then != now:
            raise ModelError(f"the weights do not fit {what}: {name} is {then} there, {now} here")
    return {name: given[name] for name in wanted}


@register("nnx_model")
class NNXModelOp(ModelOp):
    """A Flax NNX module as an operator.

    `NNXModelOp(module)` takes a module of yours, `NNXModelOp(net=FeedForwardParams(...), seed=0)` a built-in network,
    whose configuration and first weights a YAML file says in full. After training `weights` is the digest of what was
    learned: the configuration then names the weights, and `with_weights` brings them.

    Args:
        module: any `flax.nnx.Module` called with a batch; it is copied, never changed.
        net: shape of a built-in network, in place of a module.
        seed: of a built-in network's first weights.
        precision: what it computes in.

    Raises:
        TypeError: the module is no `flax.nnx.Module`.
        ConfigError: (a ValueError) neither or both of them.
    """

    net: NNParams | None = None
    seed: int = 0
    precision: Precision = "float32"
    module_class: str = ""
    """Class of a module of the user's own, which no file can rebuild."""
    _module: Any = PrivateAttr(default=None)
    _call: Any = PrivateAttr(default=None)

    def __new__(cls, /, *args: Any, **data: Any) -> NNXModelOp:
        """Allow the module by position, which other specifications do not."""
        return super().__new__(cls)

    @classmethod
    def from_function(cls, function: Callable[[Any, Any], Any], params: Mapping[str, Any], **data: Any) -> NNXModelOp:
        """Return the operator of a pure function (params, x) -> outputs and its parameters; see `FunctionModule`."""
        return cls(FunctionModule(function, params), **data)

    def __init__(self, module: Any = None, /, **data: Any) -> None:
        if module is not None and not isinstance(module, nnx.Module):
            raise TypeError(f"NNXModelOp takes a flax.nnx.Module, got {type(module).__name__}")
        if module is not None and data.get("net") is None:
            data["module_class"] = f"{type(module).__module__}.{type(module).__qualname__}"
        if module is None and data.get("net") is None and not data.get("module_class"):
            raise ConfigError("give a module, or net= with the shape of a built-in network", path="NNXModelOp")
        if module is not None:
            module = nnx.clone(module)
            data["weights"] = hash_arrays(weights_of(module))
        super().__init__(**data)
        self._module = module

    @property
    def module(self) -> nnx.Module:
        """The module; of a built-in network with fresh weights it is built on first use.

        Raises:
            ModelError: (a ValueError) the weights, or the module itself, are not here; only their digest is.
        """
        if self._module is None:
            with jax.ensure_compile_time_eval():  # the first use may be under a trace; the weights are kept after it
                self._module = self.build({})
            if self.weights:
                self._module = None
                raise ModelError(
                    f"the weights {self.weights[:12]}... of this operator are not here, only their digest; bring them "
                    "with with_weights(bytes), or load it from the registry that has them"
                )
        return self._module

    def build(self, info: Mapping[str, Any]) -> nnx.Module:
        """Return a built-in network with fresh weights, its open sizes taken from what the data says of itself.

        Raises:
            ModelError: (a ValueError) it is a module of the user's own, or a size is not known.
        """
        if self._module is not None:
            return nnx.clone(self._module)
        if self.net is None:
            raise ModelError(f"{self.module_class} cannot be rebuilt from a file; make it, and bring its weights")
        return build_net(resolve(self.net, info), rngs=nnx.Rngs(self.seed), info=info)

    def of(self, module: nnx.Module, **changes: Any) -> NNXModelOp:
        """Return the operator of another module in place of this one's."""
        state = {name: value for name, value in self.changed().items() if name not in ("weights", "module_class")}
        return NNXModelOp(module, **{**state, **changes})

    def arrays(self) -> dict[str, np.ndarray]:
        """Return every parameter and statistic by name."""
        return {name: np.asarray(value) for name, value in weights_of(self.module).items()}

    def with_arrays(self, arrays: Mapping[str, Any]) -> NNXModelOp:
        """Return an operator of the same structure with these weights."""
        module = nnx.clone(self._skeleton())
        pure = PureModule(module)
        pure.write(module, arrays, arrays)
        return self.of(module)

    def outputs(self, x: Any) -> Any:
        """Return the outputs for a batch x [N, ...], in evaluation mode."""
        if self._call is None:
            with jax.ensure_compile_time_eval():
                pure = PureModule(self.module, compute_dtype=self.precision)
            leaves = {**pure.params, **pure.frozen}
            forward = jax.jit(lambda held, state, rows: pure.forward(held, state, {"x": rows}, None, False)[0])
            self._call = lambda rows: forward(leaves, pure.model_state, rows)
        return self._call(x)

    def _layout(self) -> Mapping[str, Any]:
        return weights_of(self._skeleton())

    def _skeleton(self) -> nnx.Module:
        """The module, with whatever weights."""
        return self._module if self._module is not None else self.build({})


def _row(x: Any) -> Any:
    return x[None] if hasattr(x, "shape") else np.asarray(x)[None]
