"""A torch module as an engine sees it: its tensors by name, what of it is trained, and its forward pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from nnx_jax.core.errors import ModelError, NnxError
from nnx_jax.engines.nnx_forward import matching

UNTAKEN = (TypeError, ValueError, RuntimeError, AssertionError, IndexError, KeyError, AttributeError)
"""What a module that does not take its input raises."""


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """`tree` with `function` of every tensor in it; tuples, lists and mappings keep their kind."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, part) for part in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(map_tensors(function, part) for part in tree)
    if isinstance(tree, Mapping):
        return {name: map_tensors(function, part) for name, part in tree.items()}
    return tree


def first_tensor(tree: Any) -> torch.Tensor | None:
    """The first tensor of outputs; None without one."""
    found: list[torch.Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, tree)
    return found[0] if found else None


def width(outputs: Any) -> int:
    """Size of the outputs' last axis: classes, or values per item."""
    tensor = first_tensor(outputs)
    return int(tensor.shape[-1]) if tensor is not None and tensor.ndim > 1 else 1


def named_weights(module: torch.nn.Module) -> tuple[dict[str, torch.nn.Parameter], dict[str, torch.Tensor]]:
    """(parameters, statistics) by name. A parameter that is tied has its first name; buffers that torch does not
    store (`persistent=False`) are left out."""
    stored = module.state_dict(keep_vars=True)
    return dict(module.named_parameters()), {name: t for name, t in module.named_buffers() if name in stored}


def weight_arrays(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every weight and statistic as a checkpoint names them: `params/<name>`, `model_state/<name>`."""
    params, buffers = named_weights(module)
    return {**{f"params/{n}": p for n, p in params.items()}, **{f"model_state/{n}": b for n, b in buffers.items()}}


def device_of(module: torch.nn.Module) -> torch.device:
    """Where a module's first tensor is; the CPU for one without any."""
    first = next(iter([*module.parameters(), *module.buffers()]), None)
    return torch.device("cpu") if first is None else first.device


def pick_device(device: Any) -> torch.device:
    """Return the device of a name (cpu, cuda, cuda:1, mps), a torch.device, or None for the CPU.

    Raises:
        ModelError: (a ValueError) it is not here.
    """
    try:
        found = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ModelError(f"device is {device!r}; choose cpu, cuda, cuda:<n> or mps") from error
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= count:
            raise ModelError(f"device is '{found}', and torch sees {count} CUDA devices here; choose another")
        return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)
    if found.type == "mps" and not torch.backends.mps.is_available():
        raise ModelError("device is 'mps', which this machine does not have; choose cpu")
    if found.type not in ("cpu", "mps"):
        raise ModelError(f"device is '{found}'; choose cpu, cuda, cuda:<n> or mps")
    return found


class Net:
    """The parts of a module that training needs; the module itself is trained, it is not copied.

    Args:
        module: called as `module(x)`, or as `module(x, mask=mask)` when its `forward` has a parameter of that name
            (float32 [B]); one whose class says `takes_batch = True` is called with the whole batch. It is moved to the
            device.
        freeze: glob patterns of parameters that are not trained. One that says `requires_grad=False` is not, either.
        trains: False for a module that is only asked, which may have nothing to train.
        precision: what layers compute in: in 16 bits the forward pass runs in torch's autocast; parameters and
            outputs are float32. With "float64" the module is made float64.

    Attributes:
        params, frozen: parameters by name; a tied one has its first name.
        buffers: (module, key) of every stored buffer by name: what the forward pass itself updates.

    Raises:
        ModelError: no parameter is left to train, one is no floating-point number, or a pattern matches nothing.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        device: torch.device,
        freeze: Sequence[str] = (),
        precision: str = "float32",
        trains: bool = True,
    ) -> None:
        module.to(device)
        if precision == "float64":
            module.double()
        self.module, self.device, self.precision = module, device, precision
        self.call: Callable[..., Any] = module
        """What the forward pass calls; the wrapped module among several processes."""
        named, stored = named_weights(module)
        held = matching(freeze, named)
        still = {name for name, value in named.items() if not value.requires_grad}
        self.params = {n: p for n, p in named.items() if n not in held and n not in still}
        self.frozen = {n: p for n, p in named.items() if n in held or n in still}
        if trains and not self.params:
            told = "every one is frozen; unfreeze some" if named else f"{type(module).__name__} has none; add a layer"
            raise ModelError(f"no parameter is left to train: {told}")
        for name, value in self.params.items():
            if not value.is_floating_point():
                raise ModelError(
                    f"parameter '{name}' is {value.dtype}; only real floating-point parameters can be trained"
                )
            if value.dtype == torch.float64 and precision != "float64":
                raise ModelError(
                    f"parameter '{name}' is float64, but precision is '{precision}'; write precision: float64, or "
                    "make the module float32 (module.float())"
                )
        self.buffers = {}
        for prefix, part in module.named_modules():
            for key, value in part._buffers.items():
                name = f"{prefix}.{key}" if prefix else key
                if value is not None and name in stored:
                    self.buffers[name] = part, key
        forward = inspect.signature(type(module).forward).parameters
        self.takes_mask, self.takes_batch = "mask" in forward, bool(getattr(type(module), "takes_batch", False))
        norms = (torch.nn.modules.batchnorm._BatchNorm,)
        self.batch_norms = [name for name, part in module.named_modules() if isinstance(part, norms)]

    def state(self) -> dict[str, torch.Tensor]:
        """The buffers as they are now."""
        return {name: part._buffers[key] for name, (part, key) in self.buffers.items()}  # type: ignore[misc]

    def put_state(self, values: Mapping[str, torch.Tensor]) -> None:
        """Write values into the buffers."""
        with torch.no_grad():
            for name, value in values.items():
                part, key = self.buffers[name]
                buffer = part._buffers[key]
                assert buffer is not None
                buffer.copy_(value)

    def forward(self, batch: Mapping[str, torch.Tensor]) -> Any:
        """Outputs for a batch of real rows, float32 where the model computes in 16 bits."""
        if self.precision in ("bfloat16", "float16"):
            with self.autocast():
                outputs = self._outputs(batch)
        else:
            outputs = self._outputs(batch)
        return _wide(outputs) if isinstance(outputs, torch.Tensor) else map_tensors(_wide, outputs)

    def _outputs(self, batch: Mapping[str, torch.Tensor]) -> Any:
        if self.takes_batch:
            return self.call(batch)
        if self.takes_mask:
            return self.call(batch["x"], mask=batch["mask"])
        return self.call(batch["x"])

    def autocast(self) -> AbstractContextManager[Any]:
        """The number format the model computes in."""
        if self.precision not in ("bfloat16", "float16"):
            return nullcontext()
        return torch.autocast(self.device.type, getattr(torch, self.precision))

    @contextmanager
    def mode(self, *, train: bool) -> Iterator[None]:
        """While it is open, every layer is in training (or evaluation) mode, and only what is trained has gradients.

        Modes and flags are put back as they were, those of layers that were in another mode than their neighbours too.
        """
        modes = [(part, part.training) for part in self.module.modules() if part.training != train]
        flags = [value for value in self.frozen.values() if value.requires_grad] if train else []
        try:
            for part, _ in modes:
                part.training = train
            for value in flags:
                value.requires_grad_(False)
            yield
        finally:
            for part, before in modes:
                part.training = before
            for value in flags:
                value.requires_grad_(True)

    def outputs(self, batch: Mapping[str, torch.Tensor]) -> Any:
        """Outputs in evaluation mode, to see what the model makes of a batch; nothing of the model changes.

        Raises:
            ModelError: it does not take the batch; with its own error.
        """
        kept = {name: value.clone() for name, value in self.state().items()}
        try:
            with torch.no_grad(), self.mode(train=False):
                return self.forward(batch)
        except NnxError:
            raise
        except UNTAKEN as error:
            raise self.untaken(batch, error) from error
        finally:
            self.put_state(kept)

    def untaken(self, batch: Mapping[str, torch.Tensor], error: Exception) -> ModelError:
        """What to say when the model does not take a batch."""
        x = batch["x"]
        shape = f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
        return ModelError(
            f"{type(self.module).__name__} does not take a batch x of {shape}: {error}; fix the net's input size or "
            "the data's shape"
        )


def sum_dtype(params: Mapping[str, torch.Tensor]) -> torch.dtype:
    """The type in which a model's loss and gradients are added up: float64 where a parameter is, else float32."""
    return torch.float64 if any(value.dtype == torch.float64 for value in params.values()) else torch.float32


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
