"""What users of other trainers ran into: accumulation and non-finite values, by the numbers of the torch engine.

Toys: the squared error of one weight that starts at 0, so that its gradient is w - t; and a loss that is the output, so
that the gradient is x itself. Plain SGD; rows in order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nnx_jax.core.errors import NonFiniteError
from tests.torch.engines import advance, engine_of, joined, spec_of


class Weights(nn.Module):
    def __init__(self, *start: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w


def half_squares(outputs: Any, targets: Any) -> Any:
    return 0.5 * (outputs - targets) ** 2


def itself(outputs: Any, targets: Any) -> Any:
    return outputs


def poisoned(outputs: Any, targets: Any) -> Any:
    """The output, and no number where the target says so."""
    return torch.where(targets > 0, torch.nan, 1.0) * outputs


def trained(
    data: dict[str, Any],
    loss: Any,
    *,
    start: tuple[float, ...] = (0.0,),
    batch: int = 1,
    window: int = 1,
    optim: dict[str, Any] | None = None,
    epochs: int = 1,
    **training: Any,
) -> tuple[list[list[float]], dict[str, Any], Any]:
    """The weights after every window, the records' columns, and the last state."""
    columns = {name: np.asarray(values, np.float32) for name, values in data.items()}
    columns = {"y": np.zeros(len(next(iter(columns.values()))), np.float32), **columns}
    columns.setdefault("x", np.ones((len(columns["y"]), 1), np.float32))
    chosen = {"kind": "sgd", "max_lr": 0.1, "momentum": 0.0, **(optim or {}), "accumulate_grad_batches": window}
    spec = spec_of(columns, batch_size=batch, optim=chosen, data={"shuffle": False}, **training)
    module = Weights(*start)
    engine = engine_of(spec, module, loss)
    state, steps, records = engine.start(), [], []
    for _ in range(epochs):
        left = engine.n_batches
        while left:
            count = min(window, left)
            records += advance(engine, state, count, closes=False)
            left -= count
            steps.append(module.w.detach().tolist())
    names = ("loss", "step", "committed", "grad_norm")
    return steps, {name: joined(records, name) for name in names}, state


def last(found: tuple[list[list[float]], Any, Any]) -> Any:
    return pytest.approx(found[0][-1], rel=1e-6)


def test_unequal_valid_counts_in_one_window() -> None:
    """case:A01 - 1 valid item of target 8, then 3 of target 0: w = 0.2 and loss 8.0, not 0.4 and 16."""
    data = {"y": [8, 5, 5, 5, 0, 0, 0, 5], "weight": [1, 0, 0, 0, 1, 1, 1, 0]}
    found = trained(data, half_squares, batch=4, window=2)
    assert last(found) == [0.2]
    assert found[1]["loss"].tolist() == pytest.approx([8.0])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_microbatches_and_windows_without_a_valid_item(momentum: float) -> None:
    """case:A03 - an empty microbatch halves nothing; an empty window moves nothing, momentum and counters included."""
    optim = {"momentum": momentum}
    first = trained({"y": [4, 0, 9, 9], "weight": [1, 1, 0, 0]}, half_squares, batch=2, window=2, optim=optim)
    assert last(first) == [0.2]
    data = {"y": [4, 0, 9, 9, 9, 9, 9, 9], "weight": [1, 1, 0, 0, 0, 0, 0, 0]}
    steps, records, state = trained(data, half_squares, batch=2, window=2, optim=optim)
    assert steps[1] == steps[0]
    assert records["committed"].tolist() == [True, False]
    assert (state.counters["step"], state.counters["skipped"]) == (1, 1)
    assert np.isfinite(records["loss"][0])


def test_the_shorter_last_window_is_divided_by_what_it_holds() -> None:
    """case:A04, case:A06 - 0.15, 0.485, 0.9365 and not 0.71075; the logged loss is the window's mean, 1.25."""
    steps, records, _ = trained({"y": [1, 2, 3, 4, 5]}, half_squares, window=2)
    assert [w for (w,) in steps] == pytest.approx([0.15, 0.485, 0.9365], rel=1e-6)
    assert records["loss"][0] == pytest.approx(1.25)
    assert records["step"].tolist() == [1, 2, 3]


def test_a_window_longer_than_the_epoch_ends_with_it() -> None:
    """case:A05 - two epochs of three batches in windows of 8: two updates, 0.2 and 0.38."""
    steps, _, state = trained({"y": [1, 2, 3]}, half_squares, window=8, epochs=2)
    assert [w for (w,) in steps] == pytest.approx([0.2, 0.38], rel=1e-6)
    assert state.counters["step"] == 2


def test_a_window_is_clipped_not_its_microbatches() -> None:
    """case:A08 - gradients (3, 0) and (0, 4): mean norm 2.5, update -(0.6, 0.8) and not -(0.5, 0.5)."""
    optim = {"max_lr": 1.0, "grad_clip_norm": 1.0}
    found = trained({"x": [[3, 0], [0, 4]]}, itself, start=(0.0, 0.0), window=2, optim=optim)
    assert last(found) == [-0.6, -0.8]
    assert found[1]["grad_norm"].tolist() == pytest.approx([2.5])


def test_weights_decay_once_an_update() -> None:
    """case:A09 - zero gradients, decoupled decay 0.1 at rate 0.1, a window of 4: w = 0.99, not 0.9606 and not 1."""
    optim = {"kind": "adamw", "momentum": None, "weight_decay": 0.1, "decay_mask": "all"}
    found = trained({"x": np.zeros((4, 1))}, itself, start=(1.0,), window=4, optim=optim)
    assert last(found) == [0.99]
    assert found[2].counters["step"] == 1


def test_one_bad_microbatch_spoils_its_window_alone() -> None:
    """case:C01 - gradients -1, NaN, then -1: 0, 0.1, 0.2, one window skipped, and its borders do not move."""
    data = {"x": [[-1.0]] * 6, "y": [0, 1, 0, 0, 0, 0]}
    steps, records, state = trained(data, poisoned, window=2, nonfinite="skip", max_consecutive_skips=3)
    assert [w for (w,) in steps] == pytest.approx([0.0, 0.1, 0.2], rel=1e-6)
    assert records["committed"].tolist() == [False, True, True]
    assert (state.counters["step"], state.counters["nonfinite"]) == (2, 1)


def test_a_skipped_window_leaves_the_optimizer_as_it_was() -> None:
    """case:C02 - Adam on 1, NaN, 1: -0.1, -0.1, -0.2, and two updates; not -0.167 and -0.2488 of a zeroed gradient."""
    optim = {"kind": "adam", "momentum": None}
    found = trained({"y": [0, 1, 0]}, poisoned, optim=optim, nonfinite="skip", max_consecutive_skips=3)
    assert [w for (w,) in found[0]] == pytest.approx([-0.1, -0.1, -0.2], rel=1e-5)
    assert found[2].counters["step"] == 2


def test_too_many_bad_windows_end_the_run_with_the_last_good_weights() -> None:
    """case:C03 - after two in a row the third is an error, and nothing of it was applied."""
    spec = spec_of(
        {"x": -np.ones((5, 1), np.float32), "y": np.array([0, 1, 1, 1, 0], np.float32)},
        batch_size=1,
        optim={"kind": "sgd", "max_lr": 0.1, "momentum": 0.0},
        data={"shuffle": False},
        nonfinite="skip",
        max_consecutive_skips=2,
    )
    module = Weights(0.0)
    engine = engine_of(spec, module, poisoned)
    with pytest.raises(NonFiniteError, match="after 3 bad windows in a row"):
        advance(engine, engine.start(), 5)
    assert module.w.tolist() == pytest.approx([0.1])


def test_an_infinite_norm_is_not_clipped_into_nan() -> None:
    """case:C07 - a gradient (inf, 1) under a clip of 1 is skipped: torch's own clip makes (NaN, 0) of it."""

    def steep(outputs: Any, targets: Any) -> Any:
        return 1e30 * outputs

    optim = {"max_lr": 1.0, "grad_clip_norm": 1.0}
    data = {"x": [[1e30, 1.0]]}  # 1e60 is no float32
    found = trained(data, steep, start=(0.0, 0.0), optim=optim, nonfinite="skip", max_consecutive_skips=1)
    assert found[0] == [[0.0, 0.0]]
    assert not np.isfinite(found[1]["grad_norm"][0])
    assert (found[2].counters["step"], found[2].counters["skipped"]) == (0, 1)
