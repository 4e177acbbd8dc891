"""LoRA: frozen linear layers with a trained low-rank addition, put in, taken out or merged in place."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_jax.core.errors import ModelError, nearest
from nnx_jax.core.precision import widened

ADAPTERS = ("lora_a", "lora_b")
"""Names of the parameters that a layer gets: float32 [in, rank] and [rank, out]."""


def add_lora(
    module: nnx.Module,
    *,
    rank: int = 8,
    alpha: float | None = None,
    patterns: Sequence[str] = ("*",),
    seed: int = 0,
    train: Sequence[str] = (),
) -> nnx.Module:
    """Give every `nnx.Linear` that matches a low-rank addition, in place; untrained, the outputs stay the same.

    Weights keep their names, so those of the plain network still fit. A linear layer of your own counts where it has
    no `__call__` of its own.

    Args:
        rank: size of the middle of the addition.
        alpha: the addition is scaled by alpha / rank; None for alpha = rank, which scales by 1.
        patterns: glob patterns of layer names such as `blocks.*.qkv`.
        seed: seed of `lora_a`, normal with standard deviation 1 / rank; `lora_b` is 0.
        train: glob patterns of parameters that are trained beside the additions, see `all_but_lora`.

    Raises:
        ModelError: a rank or scale that is none, a pattern that matches no linear layer, or one that has an addition.
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ModelError(f"lora needs a rank of 1 or more, got {rank!r}")
    scale = (rank if alpha is None else alpha) / rank
    if not scale > 0:
        raise ModelError(f"lora needs an alpha above 0, got {alpha!r}")
    layers = _matching(module, [patterns] if isinstance(patterns, str) else patterns)
    for name, layer in layers:  # all of them before the first is changed
        if is_adapted(layer):
            raise ModelError(f"layer '{name}' has a low-rank addition already; merge it first (lora_merge)")
    for number, (_, layer) in enumerate(layers):
        key = jax.random.fold_in(jax.random.key(seed), number)
        down = jax.random.normal(key, (layer.in_features, rank), layer.param_dtype) / rank
        layer.__class__ = _with_lora(type(layer))
        layer.lora_a, layer.lora_b = nnx.Param(down), nnx.Param(jnp.zeros((rank, layer.out_features), down.dtype))
        layer.lora_scale = scale
    return module


def merge_lora(module: nnx.Module) -> nnx.Module:
    """Add every addition to the weights it belongs to, in place; the layers are plain linear layers again.

    Raises:
        ModelError: there is none.
    """
    layers = [layer for _, layer in _linears(module) if is_adapted(layer)]
    if not layers:
        raise ModelError(f"{type(module).__name__} has no low-rank addition that could be merged")
    for part in layers:
        layer: Any = part
        added = widened(layer.lora_a[...]) @ widened(layer.lora_b[...]) * layer.lora_scale
        layer.kernel.set_value((widened(layer.kernel[...]) + added).astype(layer.kernel[...].dtype))
        for name in (*ADAPTERS, "lora_scale"):
            delattr(layer, name)
        layer.__class__ = type(layer).__bases__[0]
    return module


def all_but_lora(module: nnx.Module, *, train: Sequence[str] = (), **options: Any) -> tuple[str, ...]:
    """Return the names of the parameters that fine-tuning by LoRA leaves alone: all but the additions and `train`.

    None where nothing has an addition (any more).

    Raises:
        ModelError: a pattern of `train` that matches nothing.
    """
    names = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(module, nnx.Param))]
    base = [name for name in names if name.rpartition(".")[2] not in ADAPTERS]
    for pattern in train:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in base):
            raise ModelError(f"pattern {pattern!r} matches no parameter{nearest(pattern, base)}")
    kept = [name for name in base if not any(fnmatch.fnmatchcase(name, pattern) for pattern in train)]
    return tuple(kept) if len(base) < len(names) else ()


def _linears(module: nnx.Module) -> Iterator[tuple[str, Any]]:
    """The layers that compute what `nnx.Linear` does, so that an addition to the output is one to the weights."""
    for path, part in nnx.iter_modules(module):
        if isinstance(part, nnx.Linear) and (is_adapted(part) or type(part).__call__ is nnx.Linear.__call__):
            yield ".".join(map(str, path)), part


def _matching(module: nnx.Module, patterns: Sequence[str]) -> list[tuple[str, Any]]:
    """The linear layers that a pattern matches, in the order of the network."""
    layers = list(_linears(module))
    names = [name for name, _ in layers]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise ModelError(f"pattern {pattern!r} matches no linear layer{nearest(pattern, names)}")
    return [(n, layer) for n, layer in layers if any(fnmatch.fnmatchcase(n, pattern) for pattern in patterns)]


def is_adapted(layer: Any) -> bool:
    """Return whether a layer has a low-rank addition."""
    return isinstance(layer, nnx.Linear) and hasattr(layer, "lora_a")


@cache
def _with_lora(kind: type[nnx.Linear]) -> type[nnx.Linear]:
    """The class of a linear layer with an addition; of a user's own linear layer too."""

    class Adapted(kind):
        lora_a: nnx.Param[jax.Array]
        lora_b: nnx.Param[jax.Array]
        lora_scale: float

        def __call__(self, inputs: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
            """x [..., in] -> [..., out]: the layer's output plus `x @ lora_a @ lora_b` times `lora_scale`."""
            own: Any = self
            x, down, up = own.promote_dtype((inputs, self.lora_a[...], self.lora_b[...]), dtype=self.dtype)
            return super().__call__(inputs, *args, **kwargs) + (x @ down @ up) * self.lora_scale

    Adapted.__name__ = Adapted.__qualname__ = f"LoRA{kind.__name__}"
    return Adapted
