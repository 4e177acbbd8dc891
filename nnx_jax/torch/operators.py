"""A torch module as an operator: numpy in, numpy out, with its weights in its hash and in a blob without pickle."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch
from pydantic import PrivateAttr

from nnx_jax.core.errors import ModelError
from nnx_jax.core.hashing import hash_arrays
from nnx_jax.core.registry import register
from nnx_jax.engines.operators import ModelOp
from nnx_jax.torch.batches import as_tensor
from nnx_jax.torch.inference import weights_of
from nnx_jax.torch.module import weight_arrays


@register("torch_model")
class TorchModelOp(ModelOp):
    """A `torch.nn.Module`, called with a batch, as an operator; it is copied, never changed.

    Raises:
        TypeError: something else.
    """

    module_class: str = ""
    """Class of the module, which no file can rebuild."""
    _module: Any = PrivateAttr(default=None)

    def __new__(cls, /, *args: Any, **data: Any) -> TorchModelOp:
        """Allow the module by position."""
        return super().__new__(cls, **data)

    def __init__(self, module: Any = None, /, **data: Any) -> None:
        if module is not None:
            if not isinstance(module, torch.nn.Module):
                raise TypeError(f"TorchModelOp takes a torch.nn.Module, got {type(module).__name__}")
            module = copy.deepcopy(module)
            data["module_class"] = f"{type(module).__module__}.{type(module).__qualname__}"
            data["weights"] = hash_arrays(dict(weights_of(module)))
        super().__init__(**data)
        self._module = module

    @property
    def module(self) -> torch.nn.Module:
        """The module.

        Raises:
            ModelError: (a ValueError) this operator was read from a file, which holds none.
        """
        if self._module is None:
            told = f"{self.module_class or 'the module'} is in no file; make it with TorchModelOp(module)"
            raise ModelError(f"{told}, and bring its weights with with_weights(bytes)")
        return self._module

    def of(self, module: torch.nn.Module, **changes: Any) -> TorchModelOp:
        """Return the operator of another module in place of this one's."""
        return TorchModelOp(module, **({"input_shape": self.input_shape} | changes))

    def arrays(self) -> dict[str, np.ndarray]:
        """Return every parameter and buffer by name."""
        return dict(weights_of(self.module))

    def with_arrays(self, arrays: Mapping[str, Any]) -> Self:
        """Return an operator of the same structure with these weights."""
        module: Any = copy.deepcopy(self.module)
        with torch.no_grad():
            for name, value in weight_arrays(module).items():
                value.copy_(as_tensor(np.asarray(arrays[name.partition("/")[2]]), value.device))
        found: Any = self.of(module)
        return found

    def outputs(self, x: Any) -> Any:
        """Return the outputs for a batch x [N, ...] as a numpy array, in evaluation mode."""
        module = self.module
        before = {name: part.training for name, part in module.named_modules()}
        try:
            module.eval()
            with torch.inference_mode():
                return module(as_tensor(np.asarray(x), torch.device("cpu"))).numpy()
        finally:
            for name, part in module.named_modules():
                part.training = before[name]
