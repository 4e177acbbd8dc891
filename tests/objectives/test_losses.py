"""Losses against numpy in float64, by hand, and on the inputs that hurt."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnx_jax.core.errors import ConfigError, DataError, ModelError
from nnx_jax.core.registry import register
from nnx_jax.objectives import LossTerm, build_loss, merge_terms, total_value, wrap_user_loss
from nnx_jax.params.losses import CrossEntropyParams, HuberParams, LossParams

RNG = np.random.default_rng(7)


def sums(loss: Any, outputs: Any, labels: Any, mask: Any = None, **columns: Any) -> tuple[float, float]:
    """Numerator and denominator of a one-term loss."""
    batch = {"y": labels, **columns} if mask is None else {"y": labels, "mask": np.asarray(mask, np.float32), **columns}
    (term,) = jax.jit(build_loss(loss).terms)(outputs, batch)
    return float(term.numerator), float(term.denominator)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide = wide - wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def test_cross_entropy_by_hand() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]], np.float32))
    numerator, denominator = sums("cross_entropy", logits, np.array([1, 1]))
    assert numerator == pytest.approx(-np.log(0.25) - np.log(0.8), rel=1e-6)
    assert denominator == 2.0


def test_cross_entropy_weights_and_smoothing_are_torchs() -> None:
    """Weighted, smoothed, with ignored labels: numbers of torch.nn.CrossEntropyLoss's formula in float64."""
    logits, labels = RNG.normal(size=(6, 4)).astype(np.float32), np.array([0, 3, -100, 2, 1, 3])
    weights, smoothing = np.array([1.0, 0.5, 2.0, 3.0]), 0.2
    log_p, valid = log_softmax(logits), labels != -100
    safe = np.where(valid, labels, 0)
    hard = -weights[safe] * log_p[np.arange(6), safe]
    soft = -(weights * log_p).sum(-1) / 4
    wanted = ((1 - smoothing) * hard + smoothing * soft)[valid].sum()
    spec = CrossEntropyParams(class_weights=tuple(weights.tolist()), label_smoothing=smoothing)
    numerator, denominator = sums(spec, logits, labels)
    assert numerator == pytest.approx(wanted, rel=1e-6)
    assert denominator == pytest.approx(weights[safe][valid].sum())


def test_labels_out_of_range_are_counted_never_learned() -> None:
    """case:L10 - of 4 classes, labels 4, -1 and -100 add neither loss nor gradient; the first two are illegal."""
    logits = jnp.tile(jnp.array([0.2, 0.1, 0.4, 0.6], jnp.float32), (4, 1))
    labels, loss = jnp.array([4, -1, -100, 2]), build_loss("cross_entropy")

    @jax.jit
    @jax.value_and_grad
    def both(x: jax.Array) -> jax.Array:
        return total_value(loss(x, {"y": labels}))

    wanted = -log_softmax(np.array([[0.2, 0.1, 0.4, 0.6]]))[0, 2]
    value, gradient = both(logits)
    gradient = np.asarray(gradient)
    assert float(value) == pytest.approx(wanted, rel=1e-6)
    assert not gradient[:3].any()
    assert np.isfinite(gradient).all()
    assert gradient[3].any()
    assert int(loss.invalid_labels(logits, {"y": labels})) == 2
    strict = build_loss(CrossEntropyParams(ignore_index=None))
    assert int(strict.invalid_labels(logits, {"y": labels})) == 3


def test_padding_rows_may_hold_anything() -> None:
    logits = np.array([[1.0, 2.0], [np.nan, np.inf]], np.float32)
    batch = {"y": np.array([1, 99]), "mask": np.array([1.0, 0.0])}
    loss = build_loss("cross_entropy")
    assert float(total_value(loss(logits, batch))) == pytest.approx(np.log(1 + np.exp(-1)), rel=1e-6)
    assert int(loss.invalid_labels(logits, batch)) == 0


def test_float_labels_and_wrong_shapes_are_refused() -> None:
    """case:L10 - label 3.5 can not be a class; nor does any other float."""
    logits = np.zeros((2, 4), np.float32)
    with pytest.raises(DataError, match="class labels are float32; give integers"):
        sums("cross_entropy", logits, np.array([3.5, 1.0], np.float32))
    with pytest.raises(ModelError, match=r"outputs have shape \(2, 4\) and labels \(3,\)"):
        sums("cross_entropy", logits, np.zeros(3, np.int32))
    with pytest.raises(ModelError, match="1 output for class labels"):
        sums("cross_entropy", np.zeros((2, 1), np.float32), np.zeros(2, np.int32))
    with pytest.raises(ModelError, match=r"outputs have shape \(2, 3\) and targets \(2,\)"):
        sums("mse", np.zeros((2, 3), np.float32), np.zeros(2, np.float32))
    with pytest.raises(DataError, match=r"column 'mask' has shape \(3,\)"):
        sums("cross_entropy", logits, np.zeros(2, np.int32), [1, 1, 1])
    with pytest.raises(ConfigError, match="class_weights has 3 numbers, the model has 4 classes"):
        sums(CrossEntropyParams(class_weights=(1.0, 1.0, 1.0)), logits, np.zeros(2, np.int32))


def test_column_labels_and_bools_are_labels() -> None:
    """case:L09 - bool targets, and labels as a column, are ordinary labels."""
    logits = RNG.normal(size=(3, 2)).astype(np.float32)
    plain = sums("cross_entropy", logits, np.array([1, 0, 1]))
    assert sums("cross_entropy", logits, np.array([True, False, True])) == plain
    assert sums("cross_entropy", logits, np.array([[1], [0], [1]], np.uint8)) == plain


def test_row_mask_covers_tokens_and_weights_multiply() -> None:
    logits, labels = RNG.normal(size=(2, 3, 5)).astype(np.float32), RNG.integers(0, 5, (2, 3))
    nll = -np.take_along_axis(log_softmax(logits), labels[..., None], -1)[..., 0]
    tokens = np.array([[1, 0.5, 0], [1, 1, 1]], np.float32)
    numerator, denominator = sums("cross_entropy", logits, labels, [1, 0], weight=tokens)
    assert numerator == pytest.approx(nll[0] @ [1, 0.5, 0], rel=1e-6)
    assert denominator == 1.5
    assert sums("cross_entropy", logits, labels, [0, 1])[1] == 3.0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sixteen_bit_outputs_are_summed_in_float32(dtype: Any) -> None:
    outputs = jnp.ones((300, 2), dtype)
    (term,) = build_loss("cross_entropy")(outputs, {"y": jnp.zeros(300, jnp.int32)})
    assert term.numerator.dtype == term.denominator.dtype == jnp.float32
    assert float(term.denominator) == 300.0  # a bfloat16 count would stop at 256
    assert float(term.numerator) == pytest.approx(300 * np.log(2), rel=1e-6)


def test_huge_logits_stay_finite() -> None:
    assert sums("cross_entropy", np.array([[1e30, -1e30]], np.float32), np.array([1]))[0] == pytest.approx(
        2e30, rel=1e-6
    )
    loss = build_loss("binary_cross_entropy")
    gradient = jax.jit(jax.grad(lambda x: total_value(loss(x, {"y": jnp.array([0.0, 1.0])}))))
    assert np.asarray(gradient(jnp.array([1e4, 1e4]))).tolist() == [0.5, 0.0]


def test_a_class_ruled_out_by_minus_infinity() -> None:
    logits = jnp.array([[0.0, 0.0, -jnp.inf]])
    loss = build_loss("cross_entropy")
    value, gradient = jax.jit(jax.value_and_grad(lambda x: total_value(loss(x, {"y": jnp.array([0])}))))(logits)
    assert float(value) == pytest.approx(np.log(2), rel=1e-6)
    assert np.asarray(gradient)[0].tolist() == pytest.approx([-0.5, 0.5, 0.0])


def test_elementwise_losses_by_hand() -> None:
    outputs, targets = np.array([[0.0, 3.0], [1.0, 1.0]], np.float32), np.array([[0.5, 0.0], [1.0, 3.0]], np.float32)
    assert sums("mse", outputs, targets) == (0.25 + 9 + 0 + 4, 4.0)
    assert sums("mae", outputs, targets, [1, 0]) == (3.5, 2.0)
    assert sums("huber", outputs, targets) == (0.125 + 2.5 + 0 + 1.5, 4.0)
    assert sums(HuberParams(delta=2.0), outputs, targets) == (0.125 + 4.0 + 0 + 2.0, 4.0)
    assert sums("mse", outputs[:, :1], targets[:, 0]) == (0.25, 2.0)


def test_binary_cross_entropy_reads_logits() -> None:
    logits, targets = np.array([0.5, -2.0, 30.0], np.float32), np.array([1, 0, 0.25])
    x = logits.astype(np.float64)
    wanted = (targets * np.logaddexp(0, -x) + (1 - targets) * np.logaddexp(0, x)).sum()
    assert sums("binary_cross_entropy", logits, targets.astype(np.float32))[0] == pytest.approx(wanted, rel=1e-6)
    assert sums("binary_cross_entropy", logits[:, None], np.array([True, False, False]))[1] == 3.0
    wrong = {"y": np.array([2.0, np.nan, 1.0], np.float32)}
    loss = build_loss("binary_cross_entropy")
    assert int(loss.invalid_labels(logits, wrong)) == 2
    assert float(total_value(loss(logits, wrong))) == pytest.approx(np.log1p(np.exp(-30.0)), abs=1e-9)


def test_a_nan_value_stays_visible_in_regression() -> None:
    assert np.isnan(sums("mse", np.zeros(2, np.float32), np.array([np.nan, 1.0], np.float32))[0])


def test_user_losses_become_terms() -> None:
    outputs, batch = jnp.array([1.0, 2.0, 3.0]), {"y": jnp.zeros(3), "mask": jnp.array([1.0, 1.0, 0.0])}

    def per_example(predicted: jax.Array, target: jax.Array) -> jax.Array:
        return (predicted - target) ** 2

    def masked(predicted: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        return predicted, predicted > 1.5

    def terms(predicted: jax.Array, batch: dict) -> list[LossTerm]:
        return [LossTerm("a", jnp.sum(predicted * batch["mask"]), reduction="sum"), LossTerm("b", 1.0, 2.0)]

    (term,) = wrap_user_loss(per_example)(outputs, batch)
    assert (term.name, float(term.numerator), float(term.denominator)) == ("per_example", 5.0, 2.0)
    (term,) = wrap_user_loss(masked)(outputs, batch)
    assert (float(term.numerator), float(term.denominator)) == (2.0, 1.0)
    assert [float(t.numerator) for t in build_loss(terms)(outputs, batch)] == [3.0, 1.0]
    with pytest.raises(ConfigError, match="returned one number"):
        wrap_user_loss(lambda p, t: jnp.mean(p))(outputs, batch)
    with pytest.raises(ConfigError, match="got int"):
        wrap_user_loss(3)  # type: ignore[arg-type]


def test_a_registered_loss_of_the_users() -> None:
    @register("test_cube")
    class Cube(LossParams):
        power: int = 3

        def __call__(self, outputs: Any, batch: Any) -> Any:
            return (outputs - batch["y"]) ** self.power

    (term,) = build_loss(Cube())(jnp.array([3.0]), {"y": jnp.array([1.0])})
    assert (term.name, float(term.numerator)) == ("test_cube", 8.0)


def test_unknown_losses_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match="there is no loss 'cross_entropie'; did you mean 'cross_entropy'"):
        build_loss("cross_entropie")


LOSS = jax.jit(build_loss(CrossEntropyParams(ignore_index=-1, class_weights=(1.0, 2.0, 0.5))).terms)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.booleans(), min_size=10, max_size=10), st.integers(0, 2**31))
def test_any_split_gives_the_whole(first: list[bool], seed: int) -> None:
    """Sums of two microbatches add up to the sums of the union, ignored labels and class weights included."""
    rng = np.random.default_rng(seed)
    logits, labels = rng.normal(size=(10, 3)).astype(np.float32), rng.integers(-1, 3, 10)
    masks = [np.ones(10), np.array(first), ~np.array(first)]
    whole, *parts = [LOSS(logits, {"y": labels, "mask": mask.astype(np.float32)}) for mask in masks]
    (merged,) = merge_terms(*parts)
    assert float(merged.numerator) == pytest.approx(float(whole[0].numerator), rel=1e-5)
    assert float(merged.denominator) == float(whole[0].denominator)


def test_illegal_labels_of_a_composition_are_counted() -> None:
    """A composition given as the model's loss refuses what its parts refuse; a plain function sees no labels."""
    logits, batch = np.zeros((3, 2), np.float32), {"y": np.array([0, 2, 1])}
    composed = build_loss(2.0 * build_loss("cross_entropy") + wrap_user_loss(lambda outputs, targets: outputs[:, 0]))
    assert int(composed.invalid_labels(logits, batch)) == 1
    assert int(build_loss(lambda outputs, targets: outputs[:, 0]).invalid_labels(logits, batch)) == 0
