"""A module whose forward pass torch compiles: once for training and once for scoring, however many rows a batch has."""

from __future__ import annotations

from typing import Any

import torch
from torch._functorch import config as _functorch

from nnx_jax.core.errors import ConfigError, nearest
from nnx_jax.torch.module import map_tensors

DEFAULT = "inductor"
"""torch's own backend; on a CPU it needs a C++ compiler."""


def compiler_of(given: bool | str) -> str | None:
    """The backend of `NNModel(compile=)`; None for none.

    Raises:
        ConfigError: (a ValueError) torch has no such backend; with the names there are.
        TypeError: something else.
    """
    if not isinstance(given, bool | str):
        raise TypeError(f"compile must be True, False or the name of a backend, got {given!r}")
    if isinstance(given, bool):
        return DEFAULT if given else None
    known = torch._dynamo.list_backends(exclude_tags=None)
    if given not in known:
        names = ", ".join(torch._dynamo.list_backends())
        raise ConfigError(f"got '{given}'; torch has {names}{nearest(given, known)}", path="NNModel.compile")
    return given


class Compiled:
    """A module, called through what torch compiled of it; its attributes are the module's own.

    The rows of a batch are a size that may change, all other sizes are fixed. So there is one program for training and
    one for scoring; a batch of one row, whose size torch takes for a constant, makes one more of each.

    Args:
        module: its weights and modes are read at every call.
        backend: of `torch.compile`.
    """

    def __init__(self, module: torch.nn.Module, backend: str) -> None:
        _functorch.donated_buffer = False  # terms with denominators of their own are differentiated one by one
        self._orig_mod = module  # as torch calls it, so that whoever looks behind torch's own wrapper finds it
        self._program = torch.compile(module, backend=backend, dynamic=False)

    def __call__(self, *args: Any, **more: Any) -> Any:
        """What the module gives."""
        map_tensors(_rows_change, (args, more))
        return self._program(*args, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_orig_mod"], name)


def _rows_change(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.ndim:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensor
