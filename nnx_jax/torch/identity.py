"""What the run id knows of torch modules and tensors: the text of their classes, settings and weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nnx_jax.core.hashing import hash_array, hash_arrays
from nnx_jax.fit.identity import describe_layer, named_digest, new_trail, register_kind

_INNER = {"training"}
"""Attributes of every module that are no settings; what torch itself keeps begins with an underscore."""


def describe_module(module: nn.Module) -> str:
    """Name and digest of a network of the user's own: the text of its classes, and the settings its layers hold."""
    return named_digest(module, _layers(module, new_trail()))


def _layers(module: nn.Module, trail: Any) -> list[Any]:
    inside = trail.into(module)
    found = []
    for path, layer in module.named_modules():
        held = {n: item for n, item in vars(layer).items() if not n.startswith("_") and n not in _INNER}
        held = {n: item for n, item in held.items() if not isinstance(item, nn.Module | torch.Tensor)}
        found.append([path, *describe_layer(layer, held, inside)])
    return sorted(found, key=lambda each: each[0])


def _module(module: nn.Module, inside: Any) -> list[Any]:
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return [_layers(module, inside), hash_arrays({name: _array(value) for name, value in held.items()})]


def _array(value: torch.Tensor) -> Any:
    value = value.detach().cpu()
    return (value.view(torch.uint16) if value.dtype == torch.bfloat16 else value).numpy()


register_kind(nn.Module, _module)
register_kind(torch.Tensor, lambda value, inside: hash_array(_array(value)))
register_kind(torch.Generator, lambda value, inside: "torch.Generator")
