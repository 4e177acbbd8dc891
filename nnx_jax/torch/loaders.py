"""Loaders of the user's own: the random streams an epoch's order is drawn from, kept so that a resume draws it again.

torch's DataLoader draws the order of an epoch when that is begun, from its generator or from the global stream. The
first epoch is begun before there is a training, by whoever asks how wide the batches are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nnx_jax.data.loader import LoaderFeed
from nnx_jax.torch.state import TorchState
from nnx_jax.torch.streams import capture, put


def look(feed: Any, device: torch.device) -> None:
    """Look at a feed for the first time; of a loader, the streams it begins with are kept before."""
    if isinstance(feed, LoaderFeed) and not feed.looked_at:
        feed.began = capture(device, generator_of(feed))
        feed.signature()


def generator_of(feed: Any) -> torch.Generator | None:
    """The loader's own generator; None where it draws from the global stream."""
    found = getattr(getattr(feed, "_loader", None), "generator", None)
    return found if isinstance(found, torch.Generator) else None


def epoch_begins(feed: Any, state: TorchState, device: torch.device, *, first: bool) -> Callable[[], None] | None:
    """Before an epoch of a loader is opened: keep the streams it draws its order from, or go back to them for a while.

    Args:
        first: it is opened at its beginning, and not where a training goes on.

    Returns:
        What is to be called when the position is reached.
    """
    if not isinstance(feed, LoaderFeed):
        return None
    began, feed.began = feed.began, None
    if first or state.epoch_began is None:
        state.epoch_began = capture(device, state.loader) if began is None else began
        return None
    now = capture(device, state.loader)
    put(state.epoch_began, device, state.loader)
    return lambda: put(now, device, state.loader)


def forget(feed: Any) -> None:
    """A training goes on from streams that were stored: an order that was drawn before is not its order."""
    if isinstance(feed, LoaderFeed):
        feed.began = None
        feed.forget()
