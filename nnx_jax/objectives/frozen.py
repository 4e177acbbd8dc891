"""Frozen: a network that an objective asks and nothing trains: its weights of now, in evaluation mode."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class Frozen:
    """A teacher, a reference: called like the network it is made of, with its weights as they were then.

    The weights become constants of the program that asks it (JAX copies them into the program), which is fine up to
    some hundred megabytes and costs compile time and memory beyond.

    Args:
        given: an NNModel, a Flax NNX module, or a function of arrays.
        who: what takes it, for messages.

    Raises:
        TypeError: something that cannot be called.
    """

    def __init__(self, given: Any, who: str) -> None:
        net = given if isinstance(given, nnx.Module) else getattr(given, "net", given)
        if isinstance(net, nnx.Module):
            modes = {"deterministic": True, "use_running_average": True}
            net = nnx.view(nnx.clone(net), raise_if_not_found=False, **modes)
        elif not callable(net):
            kind = type(net).__name__
            raise TypeError(f"{who} is called with arrays: give an NNModel, a module or a function, got {kind}")
        self.net: Any = net
        """The module, which shares no variable with the one that was given, or the function."""

    def __call__(self, *inputs: Any) -> Any:
        """Outputs, float32 where 16 bits; no gradient goes through them."""
        return self.ask(*self.parts(), *inputs)

    def parts(self) -> tuple[Any, Any]:
        """(the network without its arrays, its arrays), or (the function, None): what `ask` takes."""
        return nnx.split(self.net) if isinstance(self.net, nnx.Module) else (self.net, None)

    @staticmethod
    def ask(kind: Any, state: Any, *inputs: Any) -> Any:
        """Outputs of the two parts, for a program that has the arrays as an argument."""
        network = kind if state is None else nnx.merge(kind, state, copy=True)
        return jax.lax.stop_gradient(jax.tree.map(_to_float32, network(*inputs)))


def _to_float32(leaf: Any) -> Any:
    wide = jnp.asarray(leaf)
    return wide.astype(jnp.float32) if wide.dtype in (jnp.bfloat16, jnp.float16) else wide
