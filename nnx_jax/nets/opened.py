"""The arrays of a stored built-in network as another engine holds them; torch itself is not needed for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import nnx

from nnx_jax.core.errors import ModelError, nearest
from nnx_jax.nets.build import NETS, build_net
from nnx_jax.nets.layouts import Arrays, Layer
from nnx_jax.nets.tables import check_shapes, converted, pairs
from nnx_jax.params.net import NNParams

ENGINES = ("flax", "torch")
PREFIXES = ("params/", "frozen/", "model_state/")
"""What the names of a model's own arrays begin with in a generation."""


def open_arrays(arrays: Mapping[str, Any], net_params: NNParams, from_engine: str, to_engine: str) -> Arrays:
    """Turn the model's arrays in a generation, `params/layers.0.kernel` and the like, into those of another engine.

    Args:
        arrays: what `runs.transforms.model_arrays` returns; names that are not the model's own are left out.
        net_params: the net that the run trained, sizes settled.
        from_engine, to_engine: "flax" or "torch"; of one to itself nothing is converted.

    Returns:
        The arrays under the other engine's names, the same bits; what was frozen is so again.

    Raises:
        ModelError: another engine, a net that is not built in, or arrays that are not its own.
    """
    for engine in (from_engine, to_engine):
        if engine not in ENGINES:
            raise ModelError(f"weights of engine '{engine}' cannot be opened by another{nearest(engine, ENGINES)}")
    own = {name: value for name, value in arrays.items() if name.startswith(PREFIXES)}
    if from_engine == to_engine:
        return {name: np.asarray(value) for name, value in own.items()}
    outward = to_engine == "torch"
    weights = {name.partition("/")[2]: value for name, value in own.items()}
    layers, shapes = described(net_params)
    found = converted(layers, weights, outward=outward)
    check_shapes(weights if outward else found, shapes, "Flax")
    prefix = {name.partition("/")[2]: name.partition("/")[0] for name in own}
    renamed = {}
    for flax, torch in pairs(layers):
        source, target = (flax, torch) if outward else (torch, flax)
        renamed[target] = f"{prefix[source]}/{target}"
    return {renamed.get(name, f"model_state/{name}"): value for name, value in found.items()}


def is_built_in(net: Any) -> bool:
    """Whether the layers of a configured network are known here."""
    return getattr(net, "kind", None) in NETS


def check_built_in(net: NNParams) -> None:
    """Check that the layers of a configured network are known here.

    Raises:
        ModelError: they are not.
    """
    if not is_built_in(net):
        raise ModelError(
            f"net '{getattr(net, 'kind', type(net).__name__)}' is not built in, so nothing is known of its layers; "
            "give nnx_jax.torch.convert its torch module or a table of layers instead"
        )


def described(params: NNParams) -> tuple[dict[str, Layer], dict[str, tuple[int, ...]]]:
    """Return a built-in network's layers by their name, the same in both libraries, and its shapes in Flax.

    The Flax module is made of shapes alone: nothing is computed and no device is asked.

    Raises:
        ModelError: a network that is not built in.
    """
    check_built_in(params)
    module = nnx.eval_shape(lambda: build_net(params, rngs=nnx.Rngs(0)))
    layers: dict[str, Layer] = {}
    for path, part in nnx.iter_modules(module):
        name = ".".join(map(str, path))
        if (layer := _layer_of(name, part)) is not None:
            layers[name] = layer
    inside = {flax for flax, _ in pairs(layers)}
    flat = nnx.to_flat_state(nnx.state(module, (nnx.Param, nnx.BatchStat)))
    shapes = {".".join(map(str, path)): tuple(variable.get_value().shape) for path, variable in flat}
    layers |= {name: Layer("array", torch=name) for name in shapes if name not in inside}
    return layers, shapes


def _layer_of(name: str, part: Any) -> Layer | None:
    """The layer that a module of Flax is; None for what has no arrays of its own, or arrays that stand alone."""
    bias = getattr(part, "bias", None) is not None
    match part:
        case nnx.Linear():
            return Layer("linear", torch=name, bias=bias)
        case nnx.Conv():
            return Layer("conv", torch=name, bias=bias)
        case nnx.Embed():
            return Layer("embedding", torch=name)
        case nnx.LayerNorm():
            return Layer("layer_norm", torch=name, bias=bias)
        case nnx.BatchNorm():
            return Layer("batch_norm", torch=name, bias=bias)
    return None
