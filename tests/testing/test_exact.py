"""assert_exact on models as users have them: its table, its tolerances, what it refuses, and that it sees faults."""

from __future__ import annotations

import re

import numpy as np
import pytest

from nnx_jax.core.errors import ConfigError
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.train import NNTrainParams
from nnx_jax.testing import assert_exact
from nnx_jax.testing.report import Difference, ExactReport, Outcome, Row, compare
from tests.testing import toys

SHORT = NNTrainParams(n_epochs=1, optim=NNOptimParams(kind="adamw", max_lr=1e-2))


def test_every_combination_of_a_built_in_net() -> None:
    """Devices, windows and dispatch; the last update of an epoch is padded, and the rows are shuffled."""
    found = assert_exact(
        toys.plain, toys.data(), SHORT, val=toys.data(10), devices=(1, 4), windows=(1, 2), dispatch=("span",)
    )
    assert found.exact
    assert len(found.rows) == 4
    table = str(found).splitlines()
    assert table[0].split() == ["trained", "on", "compared", "with", "params", "opt_state", "records"]
    assert table[2].startswith("1 device, window 1, span  ")
    assert table[2].count("equal bit for bit") == 3


@pytest.mark.slow
def test_processes() -> None:
    """Two processes of one and of two devices beside one process of one device: every bit; nnx:B202."""
    found = assert_exact(
        toys.plain, toys.data(), SHORT, val=toys.data(10), devices=(2, 4), windows=(1,), processes=(2,),
        dispatch=("span",),
    )  # fmt: skip
    assert found.exact
    assert [row.case for row in found.rows] == [f"2 processes, {n} devices, window 1, span" for n in (2, 4)]


@pytest.mark.slow
def test_a_module_with_dropout_is_exact_too() -> None:
    """Each microbatch has noise of its own, so a window is compared with its like; nnx:B211."""
    found = assert_exact(toys.Noisy(norm=False), toys.data(), SHORT, devices=(2,), windows=(1, 2), dispatch=("step",))
    assert found.exact
    assert [row.reference for row in found.rows] == [f"1 device, window {n}, step" for n in (1, 2)]
    assert "draws noise for every microbatch" in str(found)


@pytest.mark.slow
def test_batch_statistics_are_exact() -> None:
    """BatchNorm needs all rows of a batch, padded ones left out, so every device computes all of them."""
    found = assert_exact(
        toys.Noisy(norm=True), toys.data(), SHORT, val=toys.data(10), devices=(3, 4), windows=(1, 2),
        dispatch=("step",),
    )  # fmt: skip
    assert found.exact
    assert "as the BatchNorm 'norm' does, which no shard sees" in str(found)
    assert [row.reference for row in found.rows] == [f"1 device, window {n}, step" for n in (1, 2)] * 2


def test_rows_that_know_of_each_other_are_exact() -> None:
    """Their loss is not the sum over shards, which is found before the training, not in its numbers."""
    found = assert_exact(toys.Mixing(), toys.data(), SHORT, devices=(2,), windows=(1,), dispatch=("step",))
    assert found.exact
    assert "the loss of a batch is not the sum over its rows" in str(found)


def test_the_fast_reduction_is_compared_by_a_tolerance() -> None:
    sgd = NNTrainParams(n_epochs=1, optim=NNOptimParams(kind="sgd", max_lr=0.1))
    found = assert_exact(toys.plain, toys.data(), sgd, devices=(4,), windows=(1,), dispatch=("step",), reduction="fast")
    assert found.rtol == 1e-3


def test_a_model_that_is_never_the_same_fails() -> None:
    """The message is the table, with the leaf that differs most."""
    shifts = iter(range(100))

    def moved() -> toys.Noisy:
        model = toys.Noisy(norm=False)
        model.head.kernel[...] += 0.01 * next(shifts)
        return model

    with pytest.raises(AssertionError, match=r"NOT EQUAL: \d.* rel, .* abs at params/"):
        assert_exact(moved, toys.data(), SHORT, devices=(1,), windows=(1,), dispatch=("span",))


@pytest.mark.parametrize(
    "given, path, said",
    [
        (
            {"devices": (1, 64)},
            "devices",
            r"this process has 4; .* set JAX_NUM_CPU_DEVICES=64 .* before anything imports",
        ),
        ({"devices": (0,)}, "devices", "give numbers from 1 on"),
        ({"dispatch": ("eager",)}, "dispatch", "give 'step', 'span' or both"),
        ({"reduction": "slow"}, "reduction", "write 'canonical' or 'fast'"),
        ({"batch_size": 12}, "batch_size", "a multiple of 16: write 16"),
        (
            {"model": lambda: toys.plain(), "processes": (2,), "windows": (1,), "devices": (2,)},
            "model",
            "cannot import",
        ),
    ],
)
def test_what_cannot_be_compared_is_said(given: dict[str, object], path: str, said: str) -> None:
    asked = {"model": toys.plain, "data": toys.data(), "params": SHORT, **given}
    with pytest.raises(ConfigError, match=said) as caught:
        assert_exact(**asked)  # type: ignore[arg-type]
    assert caught.value.path == path


# The comparison -------------------------------------------------------------------------------------------------------


def outcome(weight: float, loss: float = 1.0, best: tuple[int, int] = (0, 1), batch: int = 4) -> Outcome:
    arrays = {"params/w": np.array([2.0, weight], np.float32), "opt_state/m": np.zeros(2, np.float32)}
    return Outcome(arrays, [{"kind": "epoch", "batch": batch, "loss": loss, "seconds": weight}], best)


def test_groups_are_told_apart() -> None:
    """Largest differences, of arrays relative to their largest value; times and, of other windows, batches left out."""
    found = compare(outcome(1.0), outcome(1.5, batch=8), same_window=False)
    assert found["params"] == Difference(False, 0.5, 0.25, "params/w")
    assert found["opt_state"].exact
    assert found["records"].exact
    assert not compare(outcome(1.0), outcome(1.0, batch=8), same_window=True)["records"].exact


@pytest.mark.parametrize(
    "other, where",
    [
        (outcome(1.0, loss=2.0), "record 0, loss"),
        (outcome(1.0, best=(0, 2)), r"BEST: \(epoch, step\) is \(0, 1\), not \(0, 2\)"),
        (Outcome(outcome(1.0).arrays, [], (0, 1)), "1 records in place of 0"),
    ],
)
def test_records_that_differ(other: Outcome, where: str) -> None:
    found = compare(outcome(1.0), other, same_window=True)["records"]
    assert not found.exact
    assert re.search(where, found.where)


def test_a_tolerance_is_not_equality() -> None:
    """Within it the report passes and says how far; without it the same difference fails; NaN never passes."""
    near = {group: Difference(False, 1e-7, 1e-6, "params/w") for group in ("params", "opt_state", "records")}
    loose, strict = (ExactReport((Row("a", "b", near),), rtol) for rtol in (1e-5, None))
    assert loose.passed
    assert not loose.exact
    assert "within 1.0e-06 rel, 1.0e-07 abs at params/w" in str(loose)
    assert not strict.passed
    lost = compare(outcome(float("nan")), outcome(1.0), same_window=True)["params"]
    assert not lost.within(1e-1)
