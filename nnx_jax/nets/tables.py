"""A table of layers, and what it makes of a whole network's arrays: from Flax NNX to torch and back, in numpy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from nnx_jax.core.errors import ModelError
from nnx_jax.nets.layouts import Arrays, Layer

COUNTER = "num_batches_tracked"  # torch reads it only in a batch norm without momentum, which Flax does not have


def converted(layers: Mapping[str, Layer], weights: Mapping[str, Any], *, outward: bool) -> Arrays:
    """Return every layer's arrays under the other names and in the other layout, row-major, in the same dtypes.

    Args:
        layers: Flax name of a layer -> the layer.
        weights: name -> array (numpy's or JAX's), all that the layers have and nothing else.
        outward: from Flax to torch.

    Raises:
        ModelError: names that are missing or that no layer has, all of them listed; or shapes that no such layer has.
    """
    wanted: dict[str, tuple[str, Layer, dict[str, str]]] = {}
    for name, layer in layers.items():
        where = name if outward else _torch_name(name, layer)
        parts = [part for move in layer.moves() for part in (move.flax if outward else (move.torch,))]
        wanted[name] = where, layer, {part: _joined(where, part) for part in parts}
    names = {full for _, _, parts in wanted.values() for full in parts.values()}
    counters = {_joined(where, COUNTER) for where, layer, _ in wanted.values() if layer.kind == "batch_norm"}
    _refuse(missing=names - weights.keys(), unknown=weights.keys() - names - (set() if outward else counters))
    found: Arrays = {}
    for name, (where, layer, parts) in wanted.items():
        arrays = {part: np.asarray(weights[full]) for part, full in parts.items()}
        done = layer.to_torch(arrays, where) if outward else layer.to_flax(arrays, where)
        target = _torch_name(name, layer) if outward else name
        found |= {_joined(target, part): array for part, array in done.items()}
        if outward and layer.kind == "batch_norm":
            found[_joined(target, COUNTER)] = np.zeros((), np.int64)
    return found


def pairs(layers: Mapping[str, Layer]) -> Iterator[tuple[str, str]]:
    """(Flax name, torch name) of every array; of one that torch holds together with others, once for each."""
    for name, layer in layers.items():
        for move in layer.moves():
            for part in move.flax:
                yield _joined(name, part), _joined(_torch_name(name, layer), move.torch)


def check_shapes(weights: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], whose: str) -> None:
    """Check arrays against the shapes that are known.

    Args:
        whose: the library of the names and layouts, for the message.

    Raises:
        ModelError: every one that is of another shape.
    """
    wrong = [
        f"{name} has {np.shape(weights[name])}, this net {shape}"
        for name, shape in shapes.items()
        if name in weights and np.shape(weights[name]) != shape
    ]
    if wrong:
        raise ModelError(f"the weights are those of another size ({whose}'s names and layouts): {'; '.join(wrong)}")


def listed(names: Iterable[str]) -> str:
    """Names in order, in quotes."""
    return ", ".join(f"'{name}'" for name in sorted(names))


def _refuse(*, missing: Iterable[str], unknown: Iterable[str]) -> None:
    problems = [
        f"{what}: {listed(names)}" for what, names in (("missing", missing), ("not in this net", unknown)) if names
    ]
    if problems:
        raise ModelError(f"the weights are not those of this net; {'; '.join(problems)}")


def _torch_name(name: str, layer: Layer) -> str:
    return name if layer.torch is None else layer.torch


def _joined(layer: str, part: str) -> str:
    return ".".join(filter(None, (layer, part)))
