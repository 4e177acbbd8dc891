"""Weights from Flax NNX to torch and back: of the built-in networks, of your own modules, and of stored runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from nnx_jax.core.errors import ModelError, nearest
from nnx_jax.nets import opened
from nnx_jax.nets.layouts import Arrays, Layer
from nnx_jax.nets.tables import check_shapes, converted, listed
from nnx_jax.params.net import NNParams
from nnx_jax.torch.dlpack import to_jax, to_numpy, to_torch
from nnx_jax.torch.nets import build_net

__all__ = ["Layer", "flax_to_torch", "layers_of", "open_arrays", "to_jax", "to_numpy", "to_torch", "torch_to_flax"]

Layers = Mapping[str, Layer | str]
"""Flax name of a layer to the layer, or to its kind where nothing else is to be said."""

_LISTS = (nn.ParameterList, nn.ParameterDict)


def flax_to_torch(net: NNParams | nn.Module | Layers, weights: Mapping[str, Any]) -> Arrays:
    """Turn the weights of a Flax net into the state dict of the torch net, in the same dtypes.

    Args:
        net: the configuration of a built-in net with its sizes settled; or a torch module whose layers have the names
            of the Flax module's; or a table of layers, see `layers_of`.
        weights: name -> array, parameters and BatchNorm statistics as a generation names them without the part before
            the slash: `layers.0.kernel`, `norms.0.mean`.

    Returns:
        name -> numpy array in row-major order. `num_batches_tracked` is 0. Give it to
        `module.load_state_dict({name: to_torch(array) for ...})`.

    Raises:
        ModelError: names that are missing or that no layer has, shapes that do not fit; all names are listed.
    """
    layers, shapes = _described(net)
    found = converted(layers, {name: to_numpy(value) for name, value in weights.items()}, outward=True)
    check_shapes(found, shapes, "torch")
    return found


def torch_to_flax(net: NNParams | nn.Module | Layers, weights: Mapping[str, Any]) -> Arrays:
    """Turn the state dict of a torch net (tensors or arrays) into the weights of the Flax net.

    It is the inverse of `flax_to_torch`, bit for bit, and raises the same. The counter `num_batches_tracked` is left
    out.
    """
    layers, shapes = _described(net)
    weights = {name: to_numpy(value) for name, value in weights.items()}
    found = converted(layers, weights, outward=False)
    check_shapes(weights, shapes, "torch")
    return found


def layers_of(
    module: nn.Module,
    *,
    names: Mapping[str, str] | None = None,
    flatten: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, Layer]:
    """Describe a torch module's layers for `flax_to_torch` and `torch_to_flax`.

    Args:
        names: torch name of a layer -> its Flax name, where they differ; a name stands for all layers below it too.
        flatten: torch name of a linear layer behind a flattened feature map -> that map's shape, (C, H, W).

    Returns:
        Flax name -> layer: linear, convolution, embedding, layer, group, RMS and batch norm, attention. Parameters and
        buffers of any other module of yours are taken as they are.

    Raises:
        ModelError: a layer of torch's for which there is no rule, or a name that the module does not have.
    """
    flatten = dict(flatten or {})
    there = dict(module.named_modules())
    _refuse_unknown((*(names or {}), *flatten), {*there, *module.state_dict()})
    found: dict[str, Layer] = {}
    covered: list[str] = []
    for name, part in there.items():
        layer = _layer_of(name, part, flatten.pop(name, None))
        if layer is not None and not name.startswith(tuple(covered)):
            covered.append(f"{name}." if name else "")
            found[_renamed(name, names or {})] = layer
    if flatten:
        raise ModelError(f"flatten names {listed(flatten)}, which are no linear layers")
    for name in module.state_dict():
        if not name.startswith(tuple(covered)):
            owner = there[name.rpartition(".")[0]]
            if type(owner).__module__.startswith("torch.nn") and not isinstance(owner, _LISTS):
                raise ModelError(
                    f"'{name}' belongs to a {type(owner).__name__}, for which there is no rule; convert it yourself "
                    "and describe the rest with a table of layers"
                )
            found[_renamed(name, names or {})] = Layer("array", torch=name)
    return found


def open_arrays(arrays: Mapping[str, Any], net_params: NNParams, from_engine: str, to_engine: str) -> Arrays:
    """Turn the model's arrays in a generation into those of another engine; see `nets.opened.open_arrays`.

    Args:
        arrays: arrays or tensors.
    """
    return opened.open_arrays({n: to_numpy(v) for n, v in arrays.items()}, net_params, from_engine, to_engine)


# -- the inner workings ------------------------------------------------------------------------------------------------


def _described(net: NNParams | nn.Module | Layers) -> tuple[dict[str, Layer], dict[str, tuple[int, ...]]]:
    """The layers, and the shapes of the torch arrays where a module says them."""
    if isinstance(net, Mapping):
        return {name: Layer(layer) if isinstance(layer, str) else layer for name, layer in net.items()}, {}
    if isinstance(net, NNParams):
        opened.check_built_in(net)
        net = build_net(net, None)
    return layers_of(net), {name: tuple(value.shape) for name, value in net.state_dict().items()}


def _layer_of(name: str, part: nn.Module, flatten: tuple[int, ...] | None) -> Layer | None:
    """The layer that a torch module is, or None for one that is not a layer or has no arrays."""
    bias = getattr(part, "bias", None) is not None
    match part:
        case nn.Linear():
            return Layer("linear", torch=name, bias=bias, flatten=flatten)
        case nn.Conv1d() | nn.Conv2d() | nn.Conv3d():
            return Layer("conv", torch=name, bias=bias)
        case nn.Embedding():
            return Layer("embedding", torch=name)
        case nn.LayerNorm() | nn.GroupNorm() if part.weight is not None:
            kind = "layer_norm" if isinstance(part, nn.LayerNorm) else "group_norm"
            return Layer(kind, torch=name, bias=bias)
        case nn.RMSNorm() if part.weight is not None:
            return Layer("rms_norm", torch=name)
        case nn.modules.batchnorm._BatchNorm() if part.running_mean is not None:
            return Layer("batch_norm", torch=name, bias=bias, scale=part.weight is not None)
        case nn.MultiheadAttention() if part.in_proj_weight is not None and part.bias_k is None:
            return Layer("attention", torch=name, bias=part.in_proj_bias is not None, heads=part.num_heads)
    if flatten is not None:
        raise ModelError(f"flatten names '{name}', which is a {type(part).__name__} and no linear layer")
    return None


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """A torch name with its longest part that `names` has replaced."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        head = ".".join(parts[:count])
        if head in names:
            return ".".join(filter(None, (names[head], *parts[count:])))
    return name


def _refuse_unknown(given: Iterable[str], there: Iterable[str]) -> None:
    names = set(there)
    for name in given:
        if name not in names:
            raise ModelError(f"the module has no layer '{name}'{nearest(name, names - {''})}")
