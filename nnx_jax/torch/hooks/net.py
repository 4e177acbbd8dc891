"""StagedNet: a module whose forward pass tells when it is done, and of which some layers may stay in float32."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from nnx_jax.engines.nnx_forward import matching
from nnx_jax.torch.module import Net, map_tensors


class StagedNet(Net):
    """A Net for hooks.

    Attributes:
        forwarded: given the outputs of a forward pass of training, returns those to go on with; None: nobody asks.
        kept: layers that compute in float32 whatever the others do.
    """

    forwarded: Callable[[Any], Any] | None = None
    kept: tuple[torch.nn.Module, ...] = ()

    def keep_float32(self, patterns: Sequence[str]) -> None:
        """Let layers compute in float32 that hold a parameter which a glob pattern matches.

        Raises:
            ModelError: a pattern matches nothing.
        """
        chosen = matching(patterns, {**self.params, **self.frozen})
        self.kept = tuple(
            part
            for prefix, part in self.module.named_modules()
            if any((f"{prefix}.{key}" if prefix else key) in chosen for key in part._parameters)
        )

    def forward(self, batch: Mapping[str, torch.Tensor]) -> Any:
        """Outputs for a batch of real rows; see `Net.forward`."""
        with self._in_float32():
            outputs = super().forward(batch)
        return outputs if self.forwarded is None else self.forwarded(outputs)

    @contextlib.contextmanager
    def _in_float32(self) -> Iterator[None]:
        """While it is open, the layers that are kept leave autocast, and take their inputs as float32."""
        if not self.kept:
            yield
            return
        inside, handles = list[Any](), list[Any]()

        def enter(part: torch.nn.Module, args: Any) -> Any:
            inside.append(torch.autocast(self.device.type, enabled=False))
            inside[-1].__enter__()
            return map_tensors(_wide, args)

        def leave(part: torch.nn.Module, args: Any, output: Any) -> None:
            inside.pop().__exit__(None, None, None)

        for part in self.kept:
            handles += [part.register_forward_pre_hook(enter), part.register_forward_hook(leave, always_call=True)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
