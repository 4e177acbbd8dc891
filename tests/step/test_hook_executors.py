"""One list of hooks under four executors: the same state, counters and records, whatever is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnx_jax.hooks import (
    EMAHook,
    GradientAccumulationHook,
    GradientClipHook,
    MixedPrecisionHook,
    SkipNonFinite,
    SpikeSkipHook,
)
from nnx_jax.step import stack_batches
from tests.hooks.toy import Toy
from tests.step.test_hook_edges import two
from tests.step.test_hooks import Decay, Scale, Veto

KINDS: dict[str, Any] = {
    "scale": lambda: Scale(4.0),
    "decay": Decay,
    "veto": lambda: Veto(1, 4),
    "fp16": lambda: MixedPrecisionHook("fp16", init_scale=2.0**14, growth_interval=2),
    "bf16": lambda: MixedPrecisionHook("bf16"),
    "clip": lambda: GradientClipHook(0.5),
    "spike": lambda: SpikeSkipHook(factor=2.0, warmup=1, decay=0.5),
    "spike_loss": lambda: SpikeSkipHook(factor=2.0, warmup=1, decay=0.5, metric="loss"),
    "finite": lambda: SkipNonFinite(drop="microbatch"),
    "ema": lambda: EMAHook(decay=0.5),
}


def hooks(names: Sequence[str], k: int) -> list[Any]:
    made = [KINDS[name]() for name in dict.fromkeys(names)]
    return [GradientAccumulationHook(k), *made] if k > 1 else made


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(
    names=st.lists(st.sampled_from(sorted(KINDS)), max_size=4),
    k=st.sampled_from([1, 2, 3]),
    xs=st.lists(st.sampled_from([0.25, 0.5, 1.0, 1.5, 8.0, float("nan")]), min_size=2, max_size=4),
    terms=st.sampled_from([None, two]),
)
def test_four_executors_agree(names: list[str], k: int, xs: list[float], terms: Any) -> None:
    """nvalchemi:156: step and span to the bit; staged and eager to float32 rounding, which Adam makes grow a little."""
    if "fp16" in names:
        names = [name for name in names if name != "bf16"]
    if "finite" not in names:
        xs = [1.0 if np.isnan(x) else x for x in xs]
    toys = {}
    for executor in ("compiled", "staged", "eager"):
        toys[executor] = Toy(*hooks(names, k), optimizer="adam", terms=terms, executor=executor)
        toys[executor].trace(xs * k, 1.0)
    step = toys["compiled"]
    want, counted = step.leaves(), step.counters()
    rows = step.programs.read_records(step.carry)
    step.fresh()
    blocks = stack_batches([step.batch(x, 1.0) for x in xs * k], 12)
    step.programs.span_stacked(step.carry, blocks, len(xs) * k)
    assert step.leaves() == want
    assert step.counters() == counted
    named = step.programs.named(step.carry)
    for executor in ("staged", "eager"):
        other = toys[executor]
        assert other.counters() == counted, executor
        for path, leaf in other.programs.named(other.carry).items():
            np.testing.assert_allclose(leaf, named[path], rtol=1e-4, atol=1e-6, err_msg=f"{executor} {path}")
        theirs = other.programs.read_records(other.carry)
        assert theirs.committed.tolist() == rows.committed.tolist()
        assert theirs.ints["veto"].tolist() == rows.ints["veto"].tolist()
        np.testing.assert_allclose(theirs.grad_norm, rows.grad_norm, rtol=1e-4, atol=1e-6)
