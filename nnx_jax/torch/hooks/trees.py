"""Trees of tensors: dicts, lists and tuples, walked in the order and by the names that JAX gives their leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from nnx_jax.torch.arrays import host, tensor_of


def children(tree: Any) -> list[tuple[str, Any]] | None:
    """(name, part) of a node, dicts by sorted keys; None for a leaf."""
    if isinstance(tree, torch.Tensor):
        return None
    if isinstance(tree, Mapping):
        return [(str(key), tree[key]) for key in sorted(tree)]
    if isinstance(tree, list | tuple):
        return [(str(index), part) for index, part in enumerate(tree)]
    return [] if tree is None else None


def tree_map(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`function` of every leaf, and of the leaves at its place in trees of the same structure."""
    if isinstance(tree, torch.Tensor):
        return function(tree, *rest)
    if isinstance(tree, Mapping):
        return {key: tree_map(function, part, *(other[key] for other in rest)) for key, part in tree.items()}
    if isinstance(tree, list | tuple):
        parts = [tree_map(function, *each) for each in zip(tree, *rest, strict=True)]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return None if tree is None else function(tree, *rest)


def named_leaves(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """(path, leaf) in order, names joined by "/" after the prefix."""
    parts = children(tree)
    if parts is None:
        yield prefix, tree
    for name, part in parts or ():
        yield from named_leaves(part, f"{prefix}/{name}")


def leaves(tree: Any) -> list[Any]:
    """The leaves in order."""
    return [leaf for _, leaf in named_leaves(tree, "")]


def structure(tree: Any) -> Any:
    """What two trees of one structure have in common."""
    parts = children(tree)
    kind = type(tree).__name__ if isinstance(tree, list | tuple) else "dict"
    return None if parts is None else (kind, tuple((name, structure(part)) for name, part in parts))


def as_tensor(leaf: Any, device: torch.device) -> torch.Tensor:
    """A leaf as a tensor on the device: numpy's and JAX's arrays by value, Python's floats as float32."""
    if isinstance(leaf, torch.Tensor):
        return (leaf.detach() if leaf.requires_grad else leaf).to(device)
    if isinstance(leaf, bool):
        return torch.tensor(leaf, device=device)
    if isinstance(leaf, int | float):
        return torch.tensor(leaf, dtype=torch.float32 if isinstance(leaf, float) else torch.int32, device=device)
    return tensor_of(np.asarray(leaf)).to(device)


def on_host(tree: Any) -> Any:
    """The tree with copies of its tensors as host arrays."""
    return tree_map(lambda leaf: host(leaf) if isinstance(leaf, torch.Tensor) else np.asarray(leaf), tree)
