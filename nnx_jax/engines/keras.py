"""A Keras model as an operator; Keras is imported where it is used, and computes with JAX unless told otherwise."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Self

import numpy as np
from pydantic import PrivateAttr

from nnx_jax.core.errors import ModelError
from nnx_jax.core.hashing import hash_arrays
from nnx_jax.core.registry import register
from nnx_jax.engines.operators import ModelOp


def keras_module() -> Any:
    """Return the `keras` package, with JAX as its backend where nobody has chosen one.

    Raises:
        ImportError: it is missing; it names the extra.
    """
    if find_spec("keras") is None:
        raise ImportError("backend: 'keras' needs keras; pip install 'nnx_jax[keras]'")
    if "keras" not in sys.modules:
        os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras

    return keras


@register("keras_model")
class KerasModelOp(ModelOp):
    """A built `keras.Model` as an operator: numpy or JAX arrays in, numpy out; it is cloned, never changed.

    Raises:
        TypeError: something else.
        ModelError: (a ValueError) it is not built, so it has no weights yet.
    """

    model_name: str = ""
    """Name of the model, which no file can rebuild."""
    _module: Any = PrivateAttr(default=None)

    def __new__(cls, /, *args: Any, **data: Any) -> KerasModelOp:
        """Allow the model by position."""
        return super().__new__(cls, **data)

    def __init__(self, module: Any = None, /, **data: Any) -> None:
        if module is not None:
            if not isinstance(module, keras_module().Model):
                raise TypeError(f"KerasModelOp takes a keras.Model, got {type(module).__name__}")
            if not module.built:
                raise ModelError(f"the model {module.name} is not built; call model.build(shape), or give it an Input")
            module = copied(module)
            data["model_name"] = module.name
            data["weights"] = hash_arrays(weights_of(module))
        super().__init__(**data)
        self._module = module

    @property
    def module(self) -> Any:
        """The model.

        Raises:
            ModelError: (a ValueError) this operator was read from a file, which holds none.
        """
        if self._module is None:
            told = f"the model {self.model_name} is in no file; make it with KerasModelOp(model)"
            raise ModelError(f"{told}, and bring its weights with with_weights(bytes)")
        return self._module

    def of(self, module: Any, **changes: Any) -> KerasModelOp:
        """Return the operator of another model in place of this one's."""
        return KerasModelOp(module, **({"input_shape": self.input_shape} | changes))

    def arrays(self) -> dict[str, np.ndarray]:
        """Return every weight by its path, with its place in front."""
        return weights_of(self.module)

    def with_arrays(self, arrays: Mapping[str, Any]) -> Self:
        """Return an operator of the same structure with these weights."""
        module = copied(self.module)
        module.set_weights([np.asarray(arrays[name]) for name in weights_of(module)])
        found: Any = self.of(module)
        return found

    def outputs(self, x: Any) -> Any:
        """Return the outputs for a batch x [N, ...] as a numpy array, in evaluation mode."""
        keras = keras_module()
        return np.asarray(keras.ops.convert_to_numpy(self.module(np.asarray(x), training=False)))


def weights_of(model: Any) -> dict[str, np.ndarray]:
    """Every weight of a Keras model by `<place>/<name>`: places tell layers of one name apart."""
    keras = keras_module()
    return {
        f"{place}/{weight.name}": np.asarray(keras.ops.convert_to_numpy(weight.value))
        for place, weight in enumerate(model.weights)
    }


def copied(model: Any) -> Any:
    """A model of the same layers and weights, which shares nothing with this one; it is not compiled."""
    keras = keras_module()
    found = type(model).from_config(model.get_config())
    if not found.built:
        found.build(model.input_shape)
    found.set_weights([keras.ops.convert_to_numpy(weight.value) for weight in model.weights])
    return found
