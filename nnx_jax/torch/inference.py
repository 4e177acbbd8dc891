"""A trained torch module asked for outputs: batched, in evaluation mode, its own modes put back afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from nnx_jax.core.errors import DataError, ModelError, NnxError
from nnx_jax.data.dtypes import settle
from nnx_jax.torch.arrays import host
from nnx_jax.torch.batches import as_tensor
from nnx_jax.torch.module import UNTAKEN, Net, device_of, named_weights
from nnx_jax.torch.streams import EVALUATION, Streams


class Inference:
    """Outputs of one module in evaluation mode.

    Args:
        module: the network; its weights are taken anew at every call.
        precision: what it computes in.
        device: where it computes; None: where the module is.
    """

    def __init__(self, module: torch.nn.Module, precision: str = "float32", device: Any = None) -> None:
        self.module, self.precision, self._device = module, precision, device

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return device_of(self.module) if self._device is None else torch.device(self._device)

    def outputs(self, x: Any, batch_size: int) -> np.ndarray:
        """Return outputs float32 [N, ...] for rows x [N, ...], at most `batch_size` rows at a time.

        Raises:
            DataError: no rows.
            ModelError: the network does not take rows of this shape.
        """
        if isinstance(x, torch.Tensor):
            x = host(x)
        rows = settle("x", np.asarray(x), "predict", wide=self.precision == "float64")
        if rows.ndim == 0 or len(rows) == 0:
            raise DataError("predict needs at least one row, got none")
        if batch_size < 1:
            raise DataError(f"batch_size must be 1 or more, got {batch_size}")
        device = self.device
        net = Net(self.module, device=device, precision=self.precision, trains=False)
        streams, found = Streams(device, 0), []
        with torch.no_grad(), net.mode(train=False), streams.lent():
            streams.begin(EVALUATION)
            for start in range(0, len(rows), batch_size):
                part = as_tensor(rows[start : start + batch_size], device)
                batch = {"x": part, "mask": torch.ones(len(part), device=device)}
                try:
                    outputs = net.forward(batch)
                except NnxError:
                    raise
                except UNTAKEN as error:
                    shape = f"{rows.dtype}{list(rows.shape[1:])}"
                    raise ModelError(f"{type(self.module).__name__} does not take rows of {shape}: {error}") from error
                if not isinstance(outputs, torch.Tensor):
                    kind = type(outputs).__name__
                    raise ModelError(
                        f"{type(self.module).__name__} gives a {kind}; predict needs one tensor of outputs"
                    )
                found.append(host(outputs))
        return np.concatenate(found)


def weights_of(module: torch.nn.Module) -> Mapping[str, np.ndarray]:
    """Return every weight and statistic of a module by name, as numpy arrays."""
    params, buffers = named_weights(module)
    return {name: host(value) for name, value in {**params, **buffers}.items()}
