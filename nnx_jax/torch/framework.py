"""TorchFramework: what the faces ask of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from nnx_jax.core.errors import ResumePointError
from nnx_jax.engines.transforms import apply_transforms
from nnx_jax.fit.call import TrainCall
from nnx_jax.fit.framework import Framework, of_model
from nnx_jax.fit.job import Job
from nnx_jax.loop.hook_events import HookEvents
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.net import NNParams
from nnx_jax.params.run import RunSpec
from nnx_jax.runs.tensors import TensorWriter
from nnx_jax.runs.transforms import NNCheckpointTransform
from nnx_jax.spmd.world import World
from nnx_jax.torch import distributed as group
from nnx_jax.torch.arrays import tensor_of
from nnx_jax.torch.identity import describe_module
from nnx_jax.torch.inference import Inference, weights_of
from nnx_jax.torch.job import prepare
from nnx_jax.torch.losses import build_loss
from nnx_jax.torch.module import named_weights, pick_device
from nnx_jax.torch.nets import build_net
from nnx_jax.torch.scoring import ModelScorer


class TorchFramework(Framework):
    """Torch modules on one device.

    Args:
        device: "cpu", "cuda", "cuda:1" or "mps".

    Raises:
        ConfigError: no such device here.
    """

    backend = "torch"
    kind = "torch.nn.Module"
    make_writer = TensorWriter
    has_mesh = False

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = pick_device(device)

    # -- the network -------------------------------------------------------------------------------------------

    def is_module(self, value: Any) -> bool:
        return isinstance(value, nn.Module)

    def build(self, net: NNParams, seed: int, info: Mapping[str, Any]) -> nn.Module:
        return build_net(net, seed, info=info).to(self.device)

    def describe(self, module: nn.Module) -> str:
        return describe_module(module)

    def parameters(self, module: nn.Module) -> Mapping[str, torch.Tensor]:
        return dict(module.named_parameters())

    def weights(self, module: nn.Module) -> Mapping[str, np.ndarray]:
        return weights_of(module)

    def load(
        self, module: nn.Module, arrays: Mapping[str, Any], net: NNParams | None, written_by: str, source: str
    ) -> None:
        arrays = self.own_arrays(arrays, net, written_by, source)
        kept = {name.removeprefix("model_state/"): arrays[name] for name in arrays if name.startswith("model_state/")}
        found = {**of_model(arrays), **kept}
        params, state = named_weights(module)
        held = {**params, **state}
        if {name: tuple(v.shape) for name, v in held.items()} != {name: np.shape(v) for name, v in found.items()}:
            raise ResumePointError(f"the weights of {source} do not fit {type(module).__name__}")
        with torch.no_grad():
            for name, value in held.items():
                given = tensor_of(found[name])
                if value.dtype == given.dtype:
                    value.copy_(given)
                else:  # the stored bits, in the number format they have, as `module.double()` would set it
                    value.data = given.to(value.device)

    def transform(self, module: nn.Module, transforms: Sequence[NNCheckpointTransform]) -> nn.Module:
        return apply_transforms(module, transforms, kind=nn.Module)

    # -- asking ------------------------------------------------------------------------------------------------

    def build_loss(self, loss: Any) -> Any:
        return build_loss(loss)

    def inference(self, module: nn.Module, precision: str) -> Inference:
        return Inference(module, precision)

    def scorer(self, module: nn.Module, loss: Any, params: NNModelParams) -> ModelScorer:
        return ModelScorer(module, loss, params)

    # -- training ----------------------------------------------------------------------------------------------

    def open_world(self, distributed: Any, what: str) -> World:
        return group.open_world(distributed, what)

    def around(self) -> dict[str, Any]:
        return {"torch": str(torch.__version__), "device": self.device.type}

    def prepare(self, model: Any, spec: RunSpec, events: HookEvents | None, call: TrainCall, world: World) -> Job:
        self.check(spec)
        return prepare(model, spec, events, call, world, device=self.device)
