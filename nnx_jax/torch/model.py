"""NNModel over torch: the JAX one's face, with a torch module and a device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from nnx_jax.model import NNModel as _Face
from nnx_jax.model import train_spec as _train_spec
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.net import NNParams
from nnx_jax.params.run import RunSpec
from nnx_jax.torch.compiled import compiler_of
from nnx_jax.torch.costs import costs_of
from nnx_jax.torch.framework import TorchFramework
from nnx_jax.torch.job import prepare
from nnx_jax.torch.module import device_of


class NNModel(_Face):
    """A torch module with its loss and metrics, ready to be trained, asked and stored; see `nnx_jax.NNModel`.

    Args:
        net_params: shape of a built-in network; sizes left out are taken from the training data.
        params: loss, metrics, precision; `params.net` may hold the network instead of `net_params`.
        module: a torch module of your own instead of a built-in network; it is trained in place, never copied.
        loss: a loss of your own, `(outputs, batch)` or `(predicted, target)`, of tensors.
        seed: seed of the first weights when the network is needed before `train`, which otherwise uses its own seed.
        device: "cpu", "cuda", "cuda:1" or "mps"; None: where the module is, the CPU for a built-in network.
        compile: let torch compile the forward pass of training and validation: True for its own backend, or the name
            of one; see `torch.compile`. Numbers are those without it up to the rounding of sums in another order, and
            the run id is the same.

    Raises:
        ConfigError: no network, or two, or no such device or backend.
    """

    framework = TorchFramework()

    def __init__(
        self,
        net_params: NNParams | None = None,
        params: NNModelParams | None = None,
        *,
        module: nn.Module | None = None,
        loss: Callable[..., Any] | None = None,
        seed: int = 0,
        device: str | torch.device | None = None,
        compile: bool | str = False,
    ) -> None:
        given: Any = module
        self.compile = compiler_of(compile)
        super().__init__(net_params, params, module=given, loss=loss, seed=seed)
        self.to(device if device is not None else _place(module))

    def to(self, device: str | torch.device) -> Self:
        """Move the network to a device; return the model.

        Raises:
            ConfigError: no such device here.
            ModelError: the model is being trained.
        """
        self._check_idle("to")
        self.framework = TorchFramework(device)
        module: Any = self._module
        if module is not None:
            module.to(self.framework.device)
        return self

    @property
    def device(self) -> torch.device:
        """Where the network is, and is trained."""
        return self.framework.device

    @classmethod
    def from_checkpoint(
        cls,
        source: str,
        *,
        runs_dir: str | Path = "runs",
        module: nn.Module | None = None,
        device: str | torch.device | None = None,
    ) -> Self:
        """Return the model of a stored run, with the weights of `RUN[@LAST|BEST|tag|step]`; see `nnx_jax.NNModel`.

        A run that the JAX engine wrote opens here too when its network is a built-in one; reading it starts JAX.

        Args:
            device: where the model shall be; None: where `module` is, the CPU for a built-in network.
        """
        given: Any = module
        found = super().from_checkpoint(source, runs_dir=runs_dir, module=given)
        return found.to(device if device is not None else _place(module))


def _place(module: nn.Module | None) -> torch.device:
    return torch.device("cpu") if module is None else device_of(module)


def train_spec(
    spec: RunSpec,
    *,
    runs_dir: str | Path = "runs",
    quiet: bool = False,
    distributed: Any = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Train what a configuration file describes; see `nnx_jax.model.train_spec` and, for the device, `NNModel`."""
    face = partial(NNModel, device=device)
    return _train_spec(spec, runs_dir=runs_dir, quiet=quiet, distributed=distributed, face=face)


def dry_run(spec: RunSpec, *, device: str = "cpu") -> dict[str, Any]:
    """Check everything and build the model; return what it holds. Nothing is trained or written."""
    model = NNModel(params=spec.model, device=device)
    job = prepare(model, spec, device=model.device)
    return {"run_id": job.run_id, **costs_of(job.engine)}
