"""float16's loss scale against torch's own GradScaler: the same overflows give the same scales and weights."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nnx_jax.hooks import GradientAccumulationHook, MixedPrecisionHook
from tests.hooks.toy import Toy

torch = pytest.importorskip("torch", reason="the torch extra")


def by_torch(xs, k: int, **options):
    """Scale and weight after each microbatch, with a real GradScaler and SGD of rate 0.1 on a CPU."""
    w = torch.nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.SGD([w], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", **options)
    scales, weights = [], []
    for index, x in enumerate(xs):
        loss = (w * x).square()
        scaler.scale(loss / k).backward()
        if index % k == k - 1:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        scales.append(scaler.get_scale() if scaler._scale is not None else options["init_scale"])
        weights.append(w.item())
    return scales, weights


def by_us(xs, k: int, init_scale: float, growth_interval: int, growth_factor: float, backoff_factor: float):
    mixed = MixedPrecisionHook("float16", init_scale, growth_factor, backoff_factor, growth_interval)
    toy = Toy(GradientAccumulationHook(k), mixed)
    scales, weights = [], []
    for x in xs:
        toy.step(x)
        scales.append(float(toy.slot(mixed)["scale"]))
        weights.append(toy.w)
    return scales, weights


def test_the_reference_run() -> None:
    """nvalchemi:76"""
    xs = [float("inf") if index == 5 else 1.0 for index in range(12)]
    options = {"init_scale": 1024.0, "growth_interval": 2, "growth_factor": 2.0, "backoff_factor": 0.5}
    ours, theirs = by_us(xs, 2, **options), by_torch(xs, 2, **options)
    assert ours[0] == theirs[0] == [1024, 1024, 1024, 2048, 2048, 1024, 1024, 1024, 1024, 2048, 2048, 2048]
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-6)


@settings(max_examples=15, deadline=None)
@example(bad=[0, 0, 0, 0], k=1, interval=1, factors=(2.0, 0.5), start=2.0**126)  # 1 / 2**127 is subnormal
@given(
    bad=st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=4, max_size=24),
    k=st.integers(1, 3),
    interval=st.integers(1, 4),
    factors=st.sampled_from([(2.0, 0.5), (3.0, 0.25), (1.5, 0.75)]),
    start=st.sampled_from([1.0, 1024.0, 65536.0, 2.0**126]),
)
def test_any_sequence_of_overflows(bad, k, interval, factors, start) -> None:
    """nvalchemi:76 nvalchemi:79 nvalchemi:87 (also where growth would leave float32)"""
    xs = [[0.5, float("inf"), float("nan")][kind] for kind in bad]
    options = {
        "init_scale": start,
        "growth_interval": interval,
        "growth_factor": factors[0],
        "backoff_factor": factors[1],
    }
    ours, theirs = by_us(xs, k, **options), by_torch(xs, k, **options)
    assert ours[0] == theirs[0]
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-5)
