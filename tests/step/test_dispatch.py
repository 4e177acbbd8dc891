"""The rule that chooses how the step is called."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nnx_jax.core.errors import StepError
from nnx_jax.data.arrays import ArrayDataset
from nnx_jax.data.pipeline import Feed
from nnx_jax.step import build_step, place_columns, place_table
from nnx_jax.step.dispatch import BLOCK_BYTES, CALL_SECONDS, choose_dispatch

Kit = SimpleNamespace


def feed(width: int, batch: int, **options: Any) -> Feed:
    draw = np.random.default_rng(0)
    columns = {"x": draw.normal(size=(batch * 3 - 1, width)).astype(np.float32), "y": np.zeros(batch * 3 - 1, np.int32)}
    return Feed(ArrayDataset(columns), batch_size=batch, **options)


class NotInMemory(Feed):
    def arrays(self) -> None:
        return None


def programs(kit: Kit, sizes: list[int], source: Feed, **options: Any) -> Any:
    params, forward = kit.mlp(sizes)
    signature = {name: (column.shape, column.dtype) for name, column in source.signature().items()}
    return build_step(
        forward, kit.ce_terms, kit.sgd(0.1), params=params, model_state={}, signature=signature, **options
    ), params  # fmt: skip


def test_data_in_memory_runs_in_spans_from_the_device(kit: Kit) -> None:
    """Also: choosing does not make the step compile twice, and the chosen call runs."""
    source = feed(4, 2)
    step, params = programs(kit, [4, 2], source)
    chosen = choose_dispatch(step, source)
    assert (chosen.mode, chosen.resident) == ("span", True)
    assert chosen.windows * chosen.seconds <= CALL_SECONDS
    assert chosen.windows > 1000
    carry = step.init(params, {})
    step.span_resident(carry, place_columns(source.arrays()), place_table(source.order(0)), 0, 3)
    assert len(step.read_records(carry)) == 3
    assert step.watch.compiles == {"span_resident": 1}
    assert step.watch.check() == []


def test_calls_get_shorter_with_the_work(kit: Kit) -> None:
    source = feed(784, 128)
    windows = [
        choose_dispatch(programs(kit, sizes, source, accumulate=k)[0], source).windows
        for sizes, k in [([784, 10], 1), ([784, 512, 512, 10], 1), ([784, 512, 512, 10], 4), ([784, 8192, 8192, 10], 1)]
    ]
    assert windows == sorted(windows, reverse=True)
    assert windows[0] > windows[1] > windows[2] >= windows[3] == 3  # the least for data on the device


def test_host_batches_are_stacked_while_steps_are_short(kit: Kit) -> None:
    draw = NotInMemory(feed(4, 2).dataset, batch_size=2)
    small = choose_dispatch(programs(kit, [4, 2], draw)[0], draw)
    assert (small.mode, small.resident, small.windows) == ("span", False, 3)  # an epoch's worth, no more
    wide = NotInMemory(feed(784, 128).dataset, batch_size=128)
    large, _ = programs(kit, [784, 512, 512, 10], wide)
    assert choose_dispatch(large, wide).mode == "step"
    forced = choose_dispatch(large, wide, "span")
    assert (forced.mode, forced.resident) == ("span", False)
    assert forced.windows * 128 * 786 * 4 <= BLOCK_BYTES


def test_step_mode_and_short_tails(kit: Kit) -> None:
    source = feed(4, 2, tail="keep")
    step, _ = programs(kit, [4, 2], source)
    assert choose_dispatch(step, source, "step").mode == "step"
    assert not choose_dispatch(step, source).resident  # the table would pad what the user wants short
    with pytest.raises(StepError, match="dispatch is 'spam'; did you mean 'span'"):
        choose_dispatch(step, source, "spam")
