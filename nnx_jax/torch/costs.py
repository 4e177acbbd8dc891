"""What one update costs: counts and FLOPs, from one forward and backward pass that leaves everything as it was."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from nnx_jax.torch.scoring import probe
from nnx_jax.torch.streams import BUILDING


def costs_of(engine: Any) -> dict[str, Any]:
    """Return parameters, FLOPs of an update's matrix products, and bytes of weights and gradients.

    One microbatch is computed on the engine's device and thrown away; statistics, gradients and random numbers are
    afterwards what they were.
    """
    net = engine.net
    trained = {name: value.numel() for name, value in net.params.items()}
    frozen = {name: value.numel() for name, value in net.frozen.items()}
    weights = sum(value.numel() * value.element_size() for value in (*net.params.values(), *net.frozen.values()))
    gradients = sum(value.numel() * value.element_size() for value in net.params.values())
    return {
        "parameters": sum(trained.values()) + sum(frozen.values()),
        "trainable_parameters": sum(trained.values()),
        "updates_per_epoch": -(-engine.n_batches // engine.accumulate),
        "flops_per_update": _flops(engine) * engine.accumulate,
        "weight_bytes": weights,
        "gradient_bytes": gradients,
    }


def _flops(engine: Any) -> int:
    """FLOPs of one microbatch, forward and backward: of the rows that are tried, and as many for each of the others."""
    net, batch = engine.net, probe(engine.feed, engine.device)
    rows = engine.feed.signature()["mask"].shape[0]
    statistics = {name: value.clone() for name, value in net.state().items()}
    with engine.streams.lent():
        engine.streams.begin(BUILDING)
        with net.mode(train=True), FlopCounterMode(display=False) as counter:
            numerators = [term.scaled for term in engine.work.measure(batch, True).terms]
            torch.autograd.grad(torch.stack(numerators).sum(), list(net.params.values()), allow_unused=True)
    net.put_state(statistics)
    return counter.get_total_flops() * rows // len(batch["mask"])
