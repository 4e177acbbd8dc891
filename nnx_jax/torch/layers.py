"""Layers the built-in torch networks share: first weights from one generator, norms and activations as in Flax."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nnx_jax.core.errors import ConfigError, nearest

LAYER_NORM_EPS = 1e-6  # Flax's; torch's own default is 1e-5
BATCH_NORM_EPS = 1e-5
BATCH_NORM_MOMENTUM = 0.1  # share of the new value; Flax writes the same rule as 0.9, the share of the old one
CUT = 2.0  # first weights are a normal distribution without what lies further out than this many deviations
CUT_STD = 0.87962566103423978  # standard deviation of the standard normal distribution so cut


class Maker:
    """Makes layers whose first weights are drawn from one generator; torch's global generator is not touched.

    Args:
        seed: of the generator; None for layers on the `meta` device, which have names and shapes and no values.
    """

    def __init__(self, seed: int | None) -> None:
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)
        self.device = torch.device("meta" if seed is None else "cpu")

    def linear(self, inputs: int, outputs: int, *, bias: bool = True, std: float | None = None) -> nn.Linear:
        """A linear layer, bias 0; weights normal of this standard deviation, none: LeCun's, as `nnx.Linear`."""
        layer = nn.Linear(inputs, outputs, bias=bias, device="meta").to_empty(device=self.device)
        self._draw(layer.weight, inputs, std)
        if bias:
            self._zero(layer.bias)
        return layer

    def conv(self, inputs: int, outputs: int, side: int) -> nn.Conv2d:
        """A convolution that keeps height and width, LeCun's weights, bias 0; `same_pad` goes before an even `side`."""
        padding = side // 2 if side % 2 else 0
        layer = nn.Conv2d(inputs, outputs, side, padding=padding, device="meta").to_empty(device=self.device)
        self._draw(layer.weight, inputs * side * side, None)
        assert layer.bias is not None
        self._zero(layer.bias)
        return layer

    def embedding(self, count: int, size: int, *, std: float) -> nn.Embedding:
        """A table of normal vectors."""
        layer = nn.Embedding(count, size, device="meta").to_empty(device=self.device)
        self._draw(layer.weight, 1, std)
        return layer

    def parameter(self, *shape: int, std: float) -> nn.Parameter:
        """A parameter of normal values."""
        value = nn.Parameter(torch.empty(*shape, device=self.device))
        self._draw(value, 1, std)
        return value

    def norm(self, kind: str, size: int) -> nn.Module:
        """A norm by name.

        Raises:
            ConfigError: for an unknown name.
        """
        if kind not in NORMS:
            raise ConfigError(f"there is no norm '{kind}'{nearest(kind, NORMS)}")
        return NORMS[kind](size, device=self.device)

    def _draw(self, weight: Tensor, inputs: int, std: float | None) -> None:
        """Normal values; without `std`, LeCun's: variance 1 / inputs, cut at two deviations before it is scaled."""
        if self.generator is None:
            return
        with torch.no_grad():
            if std is not None:
                weight.normal_(0.0, std, generator=self.generator)
            else:
                scale = 1.0 / math.sqrt(inputs) / CUT_STD
                nn.init.trunc_normal_(weight, 0.0, scale, -CUT * scale, CUT * scale, generator=self.generator)

    def _zero(self, bias: Tensor) -> None:
        if self.generator is not None:
            nn.init.zeros_(bias)


class LayerNorm(nn.LayerNorm):
    """Layer norm over the last dimension, computed in float32 or wider; the result has the input's type."""

    def __init__(self, size: int, device: Any = None) -> None:
        super().__init__(size, eps=LAYER_NORM_EPS, device=device)

    def forward(self, input: Tensor) -> Tensor:
        """x [..., size] -> the same shape and type."""
        x = wide(input)
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x), self.bias.to(x), self.eps).to(input.dtype)


class BatchNorm(nn.BatchNorm1d):
    """Batch norm as Flax keeps it: running statistics take 0.1 of a microbatch's mean and *biased* variance.

    torch's own takes the unbiased variance, n / (n - 1) times as much, and refuses a single row; here one row has the
    variance 0 and no row at all moves nothing. Statistics and scaling are float32 or wider, the result has the input's
    type. `num_batches_tracked` is there so that names are torch's, and stays 0: with a momentum nothing reads it.
    """

    def __init__(self, size: int, device: Any = None) -> None:
        super().__init__(size, eps=BATCH_NORM_EPS, momentum=BATCH_NORM_MOMENTUM, device=device)

    def forward(self, input: Tensor) -> Tensor:
        """x [N, size] -> the same shape and type."""
        x = wide(input)
        weight, bias = self.weight.to(x), self.bias.to(x)
        assert self.running_mean is not None
        assert self.running_var is not None
        if not self.training:
            scale = weight * torch.rsqrt(self.running_var.to(x) + self.eps)
            return torch.addcmul(bias, x - self.running_mean.to(x), scale).to(input.dtype)
        if not len(x):
            return input * self.weight.to(input.dtype)  # empty, and backward still reaches the weights
        with torch.no_grad():
            var, mean = torch.var_mean(x, 0, correction=0)
            for running, new in ((self.running_mean, mean), (self.running_var, var)):
                running.mul_(1 - BATCH_NORM_MOMENTUM).add_(new.to(running), alpha=BATCH_NORM_MOMENTUM)
        # Torch's kernel scales x and the mean apart and then subtracts; of a mean far from 0 little would be left.
        fast = torch.backends.cudnn.enabled
        return torch.batch_norm(x - mean, weight, bias, None, None, True, 0.0, self.eps, fast).to(input.dtype)


NORMS: dict[str, Callable[..., nn.Module]] = {"batch": BatchNorm, "layer": LayerNorm}


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """x [B, ..., C] -> the same shape; norms see [N, C], so that one that torch puts in its place can read it."""
    return norm(x.reshape(-1, x.shape[-1])).reshape(x.shape)


def leaky_relu(x: Tensor) -> Tensor:
    """x or x / 100; its slope at 0 is 1 as in JAX (torch's own has 1 / 100 there, and exact zeros are common)."""
    return torch.where(x >= 0, x, 0.01 * x)


def gelu(x: Tensor) -> Tensor:
    """The form with tanh, JAX's default (torch's default is the one with erf)."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "leaky_relu": leaky_relu,
    "elu": F.elu,
    "gelu": gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "identity": lambda x: x,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The activation of a name.

    Raises:
        ConfigError: for an unknown name.
    """
    if name not in ACTIVATIONS:
        raise ConfigError(f"there is no activation '{name}'{nearest(name, ACTIVATIONS)}")
    return ACTIVATIONS[name]


def as_features(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Input of a network that computes: uint8 (images) becomes float in [0, 1], everything else float as it is."""
    if x.dtype == torch.uint8:
        return (x.to(torch.promote_types(torch.float32, dtype)) / 255.0).to(dtype)
    return x.to(dtype)


def same_pad(x: Tensor, side: int) -> Tensor:
    """x [B, C, H, W] with the zeros an even kernel needs to keep H and W: one more after than before, as XLA's SAME."""
    if side % 2:
        return x
    before, after = (side - 1) // 2, side // 2
    return F.pad(x, (before, after, before, after))


def maybe_dropout(rate: float) -> nn.Dropout | None:
    """A dropout layer, or none at all at rate 0."""
    return nn.Dropout(rate) if rate > 0 else None


def wide(x: Tensor) -> Tensor:
    """x in float32 at least."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)
