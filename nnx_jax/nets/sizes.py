"""Sizes a network needs: taken from the data when the configuration leaves them out, refused when they disagree."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nnx_jax.core.errors import ModelError

Info = Mapping[str, Any]


def settle(name: str, given: int | None, found: int | None, *, net: str) -> int:
    """One size from the configuration and the data.

    Raises:
        ModelError: when neither says it, or the two say different things.
    """
    if given is None and found is None:
        raise ModelError(f"{net} needs {name} and the data does not say it; write model.net.{name}")
    if given is not None and found is not None and given != found:
        raise ModelError(f"{net} has {name} = {given}, the data has {found}; leave {name} out to take the data's")
    size = int(given if given is not None else found or 0)
    if size < 1:
        raise ModelError(f"{net} has {name} = {size}; it must be 1 or more")
    return size


def input_dim(info: Info) -> int | None:
    """Numbers in one row of the input: `input_dim`, or the product of `input_shape`."""
    if info.get("input_dim") is not None:
        return int(info["input_dim"])
    shape = info.get("input_shape")
    return None if shape is None else math.prod(int(n) for n in shape)


def output_dim(info: Info) -> int | None:
    """Outputs the data asks for: `output_dim`, or `n_classes`."""
    for name in ("output_dim", "n_classes"):
        if info.get(name) is not None:
            return int(info[name])
    return None


def image_shape(given: tuple[int, ...] | None, info: Info) -> tuple[int, int, int]:
    """Height, width, channels; a shape of two is one channel.

    Raises:
        ModelError: when it is unknown, not an image, or differs from the data's.
    """
    shapes = [_three(shape) for shape in (given, info.get("input_shape")) if shape is not None]
    if not shapes:
        raise ModelError("conv needs input_shape (height, width, channels) and the data does not say it")
    if shapes[0] != shapes[-1]:
        raise ModelError(
            f"conv has input_shape {shapes[0]}, the data has {shapes[-1]}; leave it out to take the data's"
        )
    return shapes[0]


def _three(shape: tuple[int, ...]) -> tuple[int, int, int]:
    numbers = tuple(int(n) for n in shape)
    if len(numbers) == 2:
        numbers = (*numbers, 1)
    if len(numbers) != 3 or min(numbers) < 1:
        raise ModelError(f"conv needs images (height, width[, channels]), the input has shape {tuple(shape)}")
    return numbers[0], numbers[1], numbers[2]
