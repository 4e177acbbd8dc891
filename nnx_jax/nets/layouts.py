"""How the arrays of one layer are named and laid out in Flax NNX and in torch, and how each becomes the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nnx_jax.core.errors import ModelError, nearest

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Layer:
    """One layer that exists in both worlds.

    Attributes:
        kind: one of `KINDS`; "array" is a parameter that stands alone, the same in both.
        torch: its dotted name in the torch module; None: the same as in Flax.
        bias, scale: whether it has them, where layers of its kind can.
        flatten: of a linear layer that sees flattened features: their shape in torch, (C, H, W) or (C, length). Flax
            flattens H, W, C, so the weights of each input are put in that order.
        heads: of an attention layer; torch's arrays do not say how many.
        lora: whether a linear layer has a low-rank addition (`nnx_jax.nets.lora`, or Hugging Face PEFT).

    Raises:
        ModelError: a kind that is none, or an attention layer without heads.
    """

    kind: str
    torch: str | None = None
    bias: bool = True
    scale: bool = True
    flatten: tuple[int, ...] | None = None
    heads: int | None = None
    lora: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ModelError(f"there is no layer kind '{self.kind}'{nearest(self.kind, KINDS)}")
        if self.kind == "attention" and not self.heads:
            raise ModelError("an attention layer needs heads=N; torch's arrays do not say how many there are")

    def moves(self) -> list[Move]:
        """Return what becomes what in this layer."""
        absent = {name for name in ("bias", "scale", "lora") if not getattr(self, name)}
        return [move for move in KINDS[self.kind] if move.part not in absent]

    def to_torch(self, arrays: Mapping[str, np.ndarray], where: str) -> Arrays:
        """Turn Flax's arrays, named within the layer, into torch's.

        Raises:
            ModelError: an array of a shape that such a layer does not have; it is named with `where`.
        """
        found: Arrays = {}
        for move in self.moves():
            given = [arrays[name] for name in move.flax]
            found[move.torch] = _done(lambda m=move, g=given: [m.out(self, *g)], self, where, move.flax, given)[0]
        return found

    def to_flax(self, arrays: Mapping[str, np.ndarray], where: str) -> Arrays:
        """Turn torch's arrays into Flax's: the inverse of `to_torch`, bit for bit; it raises the same."""
        found: Arrays = {}
        for move in self.moves():
            given = [arrays[move.torch]]
            parts = _done(lambda m=move, g=given: m.back(self, *g), self, where, (move.torch,), given)
            found |= dict(zip(move.flax, parts, strict=True))
        return found


class Move(NamedTuple):
    """One array of torch and the one or more of Flax that it holds.

    Attributes:
        out: (layer, *Flax's arrays) to torch's array; ValueError for shapes that do not fit.
        back: (layer, torch's array) to the list of Flax's.
        part: "bias", "scale" or "lora" where only some layers have it.
    """

    flax: tuple[str, ...]
    torch: str
    out: Callable[..., np.ndarray]
    back: Callable[..., list[np.ndarray]]
    part: str = ""


def _done(
    change: Callable[[], list[np.ndarray]], layer: Layer, where: str, names: tuple[str, ...], given: list[np.ndarray]
) -> list[np.ndarray]:
    try:
        return [np.asarray(array, order="C") for array in change()]
    except ValueError as error:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in zip(names, given, strict=True))
        raise ModelError(f"layer '{where}' of kind {layer.kind} has {shapes}: {error}") from error


def _same(flax: str, torch: str | None = None, part: str = "") -> Move:
    """An array with one layout in both."""
    return Move((flax,), torch or flax, lambda _, array: array, lambda _, array: [array], part)


# -- linear: Flax kernel [in, out], torch weight [out, in] -------------------------------------------------------------


def _linear_out(layer: Layer, kernel: np.ndarray) -> np.ndarray:
    weight = np.transpose(kernel, (1, 0))
    if layer.flatten is None:
        return weight
    channels, *places = _flattened(layer, weight.shape[1])
    return np.moveaxis(weight.reshape(-1, *places, channels), -1, 1).reshape(weight.shape)


def _linear_back(layer: Layer, weight: np.ndarray) -> list[np.ndarray]:
    kernel = np.transpose(weight, (1, 0))
    if layer.flatten is not None:
        features = _flattened(layer, len(kernel))
        kernel = np.moveaxis(kernel.reshape(*features, -1), 0, len(features) - 1).reshape(kernel.shape)
    return [kernel]


def _flattened(layer: Layer, inputs: int) -> tuple[int, ...]:
    assert layer.flatten is not None
    if math.prod(layer.flatten) != inputs:
        raise ValueError(f"flatten={tuple(layer.flatten)} are {math.prod(layer.flatten)} inputs, it has {inputs}")
    return layer.flatten


def _turned(flax: str, torch: str) -> Move:
    """Half of a low-rank addition: Flax [in, rank] and [rank, out], torch [rank, in] and [out, rank]."""
    return Move((flax,), torch, lambda _, a: np.transpose(a, (1, 0)), lambda _, a: [np.transpose(a, (1, 0))], "lora")


# -- convolution: Flax kernel [*window, in / groups, out], torch weight [out, in / groups, *window] --------------------


def _conv_out(_: Layer, kernel: np.ndarray) -> np.ndarray:
    return np.moveaxis(_window(kernel), (-1, -2), (0, 1))


def _conv_back(_: Layer, weight: np.ndarray) -> list[np.ndarray]:
    return [np.moveaxis(_window(weight), (0, 1), (-1, -2))]


def _window(array: np.ndarray) -> np.ndarray:
    if array.ndim < 3:
        raise ValueError("a convolution has 3 dimensions or more")
    return array


# -- attention: nnx.MultiHeadAttention and torch.nn.MultiheadAttention -------------------------------------------------


def _projections_out(_: Layer, *kernels: np.ndarray) -> np.ndarray:
    """Three kernels [width, heads, size] to one weight [3 * width, width], query, key and value below one another."""
    for kernel in kernels:
        width, heads, size = _dimensions(kernel, 3)
        if heads * size != width or kernel.shape != kernels[0].shape:
            raise ValueError("torch's attention has one width for inputs, query, key and value")
    return np.concatenate([kernel.reshape(len(kernel), -1).T for kernel in kernels])


def _projections_back(layer: Layer, weight: np.ndarray) -> list[np.ndarray]:
    rows, width = _dimensions(weight, 2)
    if rows != 3 * width:
        raise ValueError("in_proj_weight is [3 * width, width]")
    return [part.T.reshape(width, *_heads(layer, width)) for part in np.split(weight, 3)]


def _biases_out(_: Layer, *biases: np.ndarray) -> np.ndarray:
    if len({bias.shape for bias in biases}) > 1:
        raise ValueError("torch's attention has one width for query, key and value")
    return np.concatenate([bias.reshape(-1) for bias in biases])


def _biases_back(layer: Layer, bias: np.ndarray) -> list[np.ndarray]:
    (size,) = _dimensions(bias, 1)
    return [part.reshape(_heads(layer, size // 3)) for part in np.split(bias, 3)]


def _mixed_out(_: Layer, kernel: np.ndarray) -> np.ndarray:
    """Flax [heads, size, width] to torch [width, heads * size]."""
    return kernel.reshape(-1, _dimensions(kernel, 3)[-1]).T


def _mixed_back(layer: Layer, weight: np.ndarray) -> list[np.ndarray]:
    width, inputs = _dimensions(weight, 2)
    return [weight.T.reshape(*_heads(layer, inputs), width)]


def _heads(layer: Layer, width: int) -> tuple[int, int]:
    heads = layer.heads or 1
    if width % heads:
        raise ValueError(f"width {width} does not split into {heads} heads")
    return heads, width // heads


def _dimensions(array: np.ndarray, count: int) -> tuple[int, ...]:
    if array.ndim != count:
        raise ValueError(f"expected {count} dimensions")
    return array.shape


_BIAS = _same("bias", part="bias")
_NORM = (_same("scale", "weight", "scale"), _BIAS)
_QKV = ("query", "key", "value")

KINDS: dict[str, tuple[Move, ...]] = {
    "array": (_same(""),),
    "linear": (
        Move(("kernel",), "weight", _linear_out, _linear_back),
        _BIAS,
        _turned("lora_a", "lora_A.weight"),
        _turned("lora_b", "lora_B.weight"),
    ),
    "conv": (Move(("kernel",), "weight", _conv_out, _conv_back), _BIAS),
    "embedding": (_same("embedding", "weight"),),
    "layer_norm": _NORM,
    "group_norm": _NORM,
    "rms_norm": (_same("scale", "weight", "scale"),),
    "batch_norm": (*_NORM, _same("mean", "running_mean"), _same("var", "running_var")),
    "attention": (
        Move(tuple(f"{name}.kernel" for name in _QKV), "in_proj_weight", _projections_out, _projections_back),
        Move(tuple(f"{name}.bias" for name in _QKV), "in_proj_bias", _biases_out, _biases_back, "bias"),
        Move(("out.kernel",), "out_proj.weight", _mixed_out, _mixed_back),
        _same("out.bias", "out_proj.bias", "bias"),
    ),
}
"""Kind of layer to its arrays. `num_batches_tracked` of a batch norm has no counterpart: it is left out, or 0."""
