"""Losses of torch tensors against JAX's, against torch.nn.functional, by hand, and on the inputs that hurt."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from nnx_jax.core.errors import ConfigError, DataError, ModelError
from nnx_jax.core.registry import register
from nnx_jax.objectives import losses as of_jax
from nnx_jax.objectives.compose import BaseLossFunction
from nnx_jax.objectives.terms import LossTerm
from nnx_jax.objectives.terms import total_value as jax_total
from nnx_jax.objectives.weights import LinearWeight, PiecewiseWeight
from nnx_jax.params.losses import BinaryCrossEntropyParams, CrossEntropyParams, HuberParams, LossParams
from nnx_jax.torch.losses import LOSSES, TorchLoss, build_loss, wrap_user_loss
from nnx_jax.torch.terms import settled, term_value, total_value

RNG = np.random.default_rng(7)
EPS = 2.0**-23

SPECS = [
    CrossEntropyParams(),
    CrossEntropyParams(ignore_index=1, class_weights=(1.0, 0.5, 0.0, 3.0), label_smoothing=0.2),
    CrossEntropyParams(ignore_index=None, label_smoothing=1.0),
    BinaryCrossEntropyParams(),
    "mse",
    "mae",
    HuberParams(delta=0.7),
]


def tensors(columns: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(values) for name, values in columns.items()}


def drawn(spec: Any, seed: int, shape: tuple[int, ...], *, masked: bool, weighted: bool) -> tuple[np.ndarray, Any]:
    """Outputs and a batch for a loss: some labels ignored, some illegal, some targets outside [0, 1]."""
    rng = np.random.default_rng(seed)
    batch: dict[str, np.ndarray] = {}
    if isinstance(spec, CrossEntropyParams):
        outputs = 3 * rng.normal(size=(*shape, 4))
        batch["y"] = rng.choice([0, 1, 2, 3, 4, -1, -100], size=shape, p=[0.2, 0.2, 0.2, 0.2, 0.05, 0.05, 0.1])
        batch["y"] = batch["y"].astype(np.int32)
    else:
        outputs = 3 * rng.normal(size=shape)
        batch["y"] = rng.normal(size=shape).astype(np.float32)
        if isinstance(spec, BinaryCrossEntropyParams):
            batch["y"] = rng.choice([0, 1, 0.3, 1.5, -0.1], size=shape, p=[0.3, 0.3, 0.2, 0.1, 0.1]).astype(np.float32)
    batch["mask"] = (rng.random(shape[0]) < (0.7 if masked else 1.0)).astype(np.float32)
    batch["weight"] = rng.choice([0.0, 0.5, 2.0] if weighted else [1.0], size=shape).astype(np.float32)
    return outputs.astype(np.float32), batch


def number(value: torch.Tensor) -> float:
    return value.detach().item()


def torch_parts(loss: TorchLoss, outputs: np.ndarray, batch: Any) -> tuple[torch.Tensor, torch.Tensor, np.ndarray, int]:
    x = torch.from_numpy(outputs).requires_grad_()
    (term,) = loss(x, tensors(batch))
    term.numerator.backward()
    assert x.grad is not None
    return term.numerator, term.denominator, x.grad.numpy(), int(loss.invalid_labels(x, tensors(batch)))


@cache
def jaxs(place: int) -> Any:
    """Numerator, denominator, gradient and count of a loss in one compiled function."""
    loss = of_jax.build_loss(SPECS[place])

    def parts(x: Any, batch: Any) -> Any:
        (term,) = loss(x, batch)
        return term.numerator, (term.denominator, loss.invalid_labels(x, batch))

    return jax.jit(jax.value_and_grad(parts, has_aux=True))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, len(SPECS) - 1), st.integers(0, 2**31), st.booleans(), st.booleans())
def test_sums_gradients_and_counts_are_jaxs(place: int, seed: int, masked: bool, weighted: bool) -> None:
    """Weights, smoothing, ignored and illegal labels, masks: denominators and counts exactly, the rest to rounding.

    A float32 sum of n parts that are 0 or more is off by at most n roundings of itself; every part, of weight 6 at
    most, is made of numbers as large as the largest output (squared, for mse) with a handful of roundings each.
    """
    outputs, batch = drawn(SPECS[place], seed, (3, 2), masked=masked, weighted=weighted)
    (numerator, (denominator, illegal)), grad = jaxs(place)(outputs, batch)
    top, bottom, mine, invalid = torch_parts(build_loss(SPECS[place]), outputs, batch)
    assert number(bottom) == pytest.approx(float(denominator), rel=4 * EPS)
    assert invalid == int(illegal)
    largest = float(np.abs(outputs).max()) + float(np.abs(batch["y"]).max() if batch["y"].dtype.kind == "f" else 0)
    largest_part = (1 + largest) ** (2 if SPECS[place] == "mse" else 1)
    scale = float(numerator) + 6.0 * outputs.size * largest_part
    assert number(top) == pytest.approx(float(numerator), abs=EPS * (outputs.size + 16) * scale)
    np.testing.assert_allclose(mine, grad, atol=32 * EPS * 6 * (1 + largest))


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0.0, 0.3]), st.booleans())
def test_means_are_those_of_torchs_own_losses(seed: int, smoothing: float, weighted: bool) -> None:
    """Tokens [B, T, C] beside torch's [B, C, T]; a term's value is torch's mean, and so is its gradient."""
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.normal(size=(4, 3, 5)).astype(np.float32)).requires_grad_()
    y = torch.from_numpy(rng.integers(0, 5, (4, 3)))
    y[0, 0] = -100
    weights = (1.0, 0.5, 2.0, 3.0, 0.25) if weighted else None
    spec = CrossEntropyParams(class_weights=weights, label_smoothing=smoothing)
    mine = total_value(build_loss(spec)(x, {"y": y}))
    given_weights = None if weights is None else torch.tensor(weights)
    own = F.cross_entropy(x.permute(0, 2, 1), y, weight=given_weights, label_smoothing=smoothing)
    torch.testing.assert_close(mine, own, rtol=2e-6, atol=1e-6)
    grads = [torch.autograd.grad(value, x)[0] for value in (mine, own)]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "spec, own",
    [
        ("binary_cross_entropy", F.binary_cross_entropy_with_logits),
        ("mse", F.mse_loss),
        ("mae", F.l1_loss),
        (HuberParams(delta=0.5), lambda x, y: F.huber_loss(x, y, delta=0.5)),
    ],
)
def test_elementwise_means_are_torchs(spec: Any, own: Any) -> None:
    """Also where the pieces of a loss meet: an error of 0, and one of exactly delta."""
    x = torch.tensor([[0.0, 0.5, -40.0], [0.75, 40.0, 1.0]], requires_grad=True)
    y = torch.tensor([[0.0, 0.0, 1.0], [0.75, 1.0, 0.5]])
    mine, wanted = total_value(build_loss(spec)(x, {"y": y})), own(x, y)
    torch.testing.assert_close(mine, wanted)
    torch.testing.assert_close(torch.autograd.grad(mine, x)[0], torch.autograd.grad(wanted, x)[0])


def test_labels_out_of_range_are_counted_never_learned() -> None:
    """case:L10 - of 4 classes, labels 4, -1, 2**32 and -100 add neither loss nor gradient; the first three are illegal.

    torch's own cross_entropy ends the process on an accelerator for such a label.
    """
    x = torch.tensor([[0.2, 0.1, 0.4, 0.6]]).repeat(5, 1).requires_grad_()
    batch, loss = {"y": torch.tensor([4, -1, 2**32, -100, 2])}, build_loss("cross_entropy")
    value = total_value(loss(x, batch))
    value.backward()
    assert x.grad is not None
    assert number(value) == pytest.approx(number(F.cross_entropy(x[4:], torch.tensor([2]))), rel=1e-6)
    assert not x.grad[:4].any()
    assert x.grad[4].any()
    assert int(loss.invalid_labels(x, batch)) == 3
    assert int(build_loss(CrossEntropyParams(ignore_index=None)).invalid_labels(x, batch)) == 4


def test_padding_rows_may_hold_anything() -> None:
    x = torch.tensor([[1.0, 2.0], [float("nan"), float("inf")]])
    batch = {"y": torch.tensor([1, 99]), "mask": torch.tensor([1.0, 0.0])}
    loss = build_loss("cross_entropy")
    assert float(total_value(loss(x, batch))) == pytest.approx(np.log(1 + np.exp(-1)), rel=1e-6)
    assert int(loss.invalid_labels(x, batch)) == 0


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("rows", [0, 3])
def test_a_batch_without_a_row_is_worth_nothing_not_nan(spec: Any, rows: int) -> None:
    """No row at all, and rows that are all masked."""
    outputs, batch = drawn(spec, 1, (rows,), masked=True, weighted=False)
    batch["mask"] = np.zeros(rows, np.float32)
    x = torch.from_numpy(outputs).requires_grad_()
    (term,) = build_loss(spec)(x, tensors(batch))
    value = total_value([term])
    value.backward()
    assert (number(term.numerator), number(term.denominator), number(value)) == (0.0, 0.0, 0.0)
    assert x.grad is not None
    assert not x.grad.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_outputs_of_16_bits_are_summed_in_float32(dtype: torch.dtype) -> None:
    """case:L09 - 70000 ones in float16 add up to 70000, not to infinity; gradients come back in the outputs' type."""
    x = torch.ones(70000, dtype=dtype, requires_grad=True)
    (term,) = build_loss("mae")(x, {"y": torch.zeros(70000, dtype=dtype)})
    assert term.numerator.dtype == term.denominator.dtype == torch.float32
    assert (number(term.numerator), number(term.denominator)) == (70000.0, 70000.0)
    term.numerator.backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype
    logits = torch.randn(3, 4).to(dtype)
    labels = {"y": torch.tensor([0, 1, 2])}
    narrow, wide = (build_loss("cross_entropy")(given, labels)[0] for given in (logits, logits.float()))
    assert float(narrow.numerator) == float(wide.numerator)


def test_float64_outputs_are_summed_in_float64() -> None:
    rng = np.random.default_rng(3)
    logits, y = rng.normal(size=(50, 4)), rng.integers(0, 4, 50)
    (term,) = build_loss("cross_entropy")(torch.from_numpy(logits), {"y": torch.from_numpy(y)})
    wanted = (np.log(np.exp(logits).sum(-1)) - logits[np.arange(50), y]).sum()
    assert term.numerator.dtype == torch.float64
    assert float(term.numerator) == pytest.approx(wanted, rel=1e-14)
    # Targets and weights of 64 bits, as numpy makes them, do not widen a model of 32 bits.
    (term,) = build_loss("mse")(torch.zeros(2), {"y": torch.ones(2).double(), "weight": torch.ones(2).double()})
    assert (term.numerator.dtype, term.denominator.dtype) == (torch.float32, torch.float32)


BAD: list[tuple[Any, Any, Any, Any, type[Exception]]] = [
    ("cross_entropy", np.zeros((2, 4)), np.array([3.5, 1.0], np.float32), None, DataError),
    ("cross_entropy", np.zeros((2, 4)), np.zeros(3, np.int32), None, ModelError),
    ("cross_entropy", np.zeros((2, 1)), np.zeros(2, np.int32), None, ModelError),
    ("mse", np.zeros((2, 3)), np.zeros(2, np.float32), None, ModelError),
    ("binary_cross_entropy", np.zeros((2, 1, 1)), np.zeros(2, np.float32), None, ModelError),
    ("cross_entropy", np.zeros((2, 4)), np.zeros(2, np.int32), np.ones(3), DataError),
    (CrossEntropyParams(class_weights=(1.0, 1.0, 1.0)), np.zeros((2, 4)), np.zeros(2, np.int32), None, ConfigError),
]


@pytest.mark.parametrize("spec, outputs, y, mask, kind", BAD)
def test_what_does_not_fit_is_refused_in_the_same_words(spec: Any, outputs: Any, y: Any, mask: Any, kind: Any) -> None:
    """case:L10 - a float is no label; shapes, masks and class weights that do not fit, told as for JAX."""
    outputs = outputs.astype(np.float32)
    batch = {"y": y} if mask is None else {"y": y, "mask": mask.astype(np.float32)}
    with pytest.raises(kind) as theirs:
        of_jax.build_loss(spec)(outputs, batch)
    with pytest.raises(kind) as mine:
        build_loss(spec)(torch.from_numpy(outputs), tensors(batch))
    assert str(mine.value) == str(theirs.value)


def test_outputs_that_are_no_tensor_are_refused() -> None:
    with pytest.raises(ModelError, match="outputs are dict; a tensor is needed"):
        build_loss("mse")({"logits": torch.zeros(2)}, {"y": torch.zeros(2)})


def test_column_labels_bools_and_bytes_are_labels() -> None:
    """case:L09 - bool targets, and labels as a column, are ordinary labels."""
    x, loss = torch.randn(3, 2), build_loss("cross_entropy")
    plain = float(loss(x, {"y": torch.tensor([1, 0, 1])})[0].numerator)
    for labels in ([True, False, True], np.array([[1], [0], [1]], np.uint8), np.array([1, 0, 1], np.uint16)):
        assert float(loss(x, {"y": torch.as_tensor(labels)})[0].numerator) == plain
    assert float(build_loss("mse")(torch.ones(3, 1), {"y": torch.zeros(3)})[0].numerator) == 3.0


def test_the_kinds_options_and_defaults_are_jaxs() -> None:
    assert LOSSES.keys() == of_jax.LOSSES.keys()
    for kind, make in LOSSES.items():
        mine, theirs = inspect.signature(make).parameters, inspect.signature(of_jax.LOSSES[kind]).parameters
        assert [(p.name, p.kind, p.default) for p in mine.values()] == [
            (p.name, p.kind, p.default) for p in theirs.values()
        ]
        one, other = make(), of_jax.LOSSES[kind]()
        for attribute in ("name", "task", "ignore_index", "by_rows"):
            assert getattr(one, attribute) == getattr(other, attribute)
    for make in (build_loss, of_jax.build_loss):
        with pytest.raises(ConfigError, match="no loss 'mes'; did you mean 'mse'"):
            make("mes")
    with pytest.raises(ConfigError, match="label_smoothing must be between 0 and 1"):
        LOSSES["cross_entropy"](label_smoothing=1.5)
    with pytest.raises(ConfigError, match="huber delta must be above 0"):
        LOSSES["huber"](delta=0.0)
    with pytest.raises(ConfigError, match="loss 'mse' is built for JAX"):
        build_loss(of_jax.build_loss("mse"))
    mse = build_loss("mse")
    assert build_loss(mse) is mse


def test_class_weights_first_used_in_an_evaluation_serve_training_too() -> None:
    loss = build_loss(CrossEntropyParams(class_weights=(1.0, 2.0), label_smoothing=0.1))
    x, batch = torch.randn(3, 2, requires_grad=True), {"y": torch.tensor([0, 1, 1])}
    with torch.inference_mode():
        before = float(loss(x, batch)[0].numerator)
    (term,) = loss(x, batch)
    term.numerator.backward()
    assert number(term.numerator) == before


# -- the user's own ------------------------------------------------------------------------------------------------


def absolute(outputs: Any, targets: Any) -> Any:
    return abs(outputs - targets)


def ends(outputs: Any, batch: Any) -> Any:
    return abs(outputs - batch["y"]), batch["keep"]


def named(outputs: Any, batch: Any) -> Any:
    error = abs(outputs - batch["y"])
    return [LossTerm("sum", error.sum(), len(error)), LossTerm("first", error[0], reduction="sum", weight=0.5)]


@pytest.mark.parametrize("fn", [absolute, ends, named])
def test_a_function_of_the_users_is_read_as_with_jax(fn: Any) -> None:
    batch = {
        "y": np.array([1.0, 2.0, 4.0], np.float32),
        "mask": np.array([1, 1, 0], np.float32),
        "keep": np.array([0, 1, 1], np.float32),
    }
    theirs, x = of_jax.build_loss(fn)(jnp.zeros(3), batch), torch.zeros(3, requires_grad=True)
    mine = build_loss(fn)(x, tensors(batch))
    assert [term.layout for term in mine] == [term.layout for term in theirs]
    for one, other in zip(mine, theirs, strict=True):
        assert number(one.numerator) == float(other.numerator)
        assert (one.denominator is None) == (other.denominator is None)
        assert one.denominator is None or float(one.denominator) == float(other.denominator)
        assert one.denominator is None or one.denominator.dtype == torch.float32
    assert number(total_value(mine)) == float(jax_total(theirs))
    none = build_loss(fn).invalid_labels(x, tensors(batch))
    assert (none.dtype, int(none)) == (torch.int32, 0)


def test_functions_that_cannot_be_a_loss_are_refused() -> None:
    def turned(y_true: Any, y_pred: Any) -> Any:
        return y_pred - y_true

    with pytest.raises(ConfigError, match="takes 'y_true' first, turn it round"):
        wrap_user_loss(turned)
    with pytest.raises(ConfigError, match="a loss is a function of"):
        wrap_user_loss(3)  # type: ignore[arg-type]
    averaged = wrap_user_loss(torch.nn.functional.mse_loss, "mine")
    with pytest.raises(ConfigError, match="loss 'mine' returned one number; return the loss of each example"):
        averaged(torch.zeros(2), {"y": torch.ones(2)})


def test_a_specification_of_the_users_computes_with_torch() -> None:
    @register("test_torch_cubed")
    class Cubed(LossParams):
        def __call__(self, outputs: Any, batch: Any) -> torch.Tensor:
            return (outputs - batch["y"]).abs() ** 3

    loss = build_loss(Cubed())
    (term,) = loss(torch.full((2,), 2.0), {"y": torch.zeros(2)})
    assert (loss.name, loss.task, float(term.numerator), float(term.denominator)) == ("test_torch_cubed", "own", 16, 2)


# -- losses put together -------------------------------------------------------------------------------------------


class Scalar(BaseLossFunction):
    """A loss of the user's that gives one number."""

    name = "level"

    def __call__(self, outputs: Any, batch: Any) -> Any:
        return abs(outputs).sum() / 2.0


def test_compositions_are_jaxs() -> None:
    """Fixed weights, keys of outputs and columns, and a number of the user's as one item of weight 1."""
    x, batch = RNG.normal(size=(4, 3)).astype(np.float32), {"y": np.array([0, 1, 3, 2]), "z": np.zeros((4, 3))}
    batch["z"] = batch["z"].astype(np.float32)

    def make(build: Any) -> Any:
        return 2.0 * build("cross_entropy").on("a") + build("mse").on("a", "z") + 0.5 * Keyed()

    class Keyed(Scalar):
        def __call__(self, outputs: Any, batch: Any) -> Any:
            return super().__call__(outputs["a"], batch)

    theirs, mine = make(of_jax.build_loss), make(build_loss)
    found, wanted = mine({"a": torch.from_numpy(x)}, tensors(batch)), theirs({"a": jnp.asarray(x)}, batch)
    assert [term.layout for term in found] == [term.layout for term in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert float(one.numerator) == pytest.approx(float(other.numerator), rel=1e-6)
        assert float(one.denominator) == float(other.denominator)
    assert int(mine.invalid_labels({"a": torch.from_numpy(x)}, tensors(batch))) == 1
    assert int(build_loss(mine).invalid_labels({"a": torch.from_numpy(x)}, tensors(batch))) == 1


@pytest.mark.parametrize("step", [0, 3, 40])
def test_weights_that_follow_a_schedule_are_jaxs(step: int) -> None:
    x, batch = np.array([1.0, 2.0], np.float32), {"y": np.zeros(2, np.float32)}

    def make(build: Any) -> Any:
        moving = LinearWeight(0.0, 1.0, 10) * build("mse")
        return moving + PiecewiseWeight([1], [3.0, 1.0], per_epoch=True) * build("mae")

    found = make(build_loss).at(step, 1)(torch.from_numpy(x), tensors(batch))
    wanted = make(of_jax.build_loss).at(step, 1)(jnp.asarray(x), batch)
    assert [float(term.scale) for term in found] == pytest.approx([float(term.scale) for term in wanted], rel=1e-7)
    assert float(total_value(found)) == pytest.approx(float(jax_total(wanted)), rel=1e-6)
    with pytest.raises(ConfigError, match="weights of this loss follow a schedule"):
        build_loss(make(build_loss))


def test_what_no_component_may_return() -> None:
    composed = build_loss("mse") + build_loss("mae")
    for wrong, told in ((torch.zeros(2), r"an array of shape \[2\]"), (torch.tensor(3), r"an array of shape \[\]")):
        with pytest.raises(TypeError, match=told):
            type(composed)([lambda outputs, batch, wrong=wrong: wrong])(None, {})


# -- terms ---------------------------------------------------------------------------------------------------------


def test_terms_of_tensors_are_checked_like_numbers() -> None:
    """nnx:B086 - a vector numerator, a negative denominator, a denominator on a sum; all as torch tensors."""
    one = torch.tensor(1.0)
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((torch.ones(3), one), "numerator must be one number, got shape"),
        ((one, torch.tensor(-1.0)), r"denominator is negative \(-1.0\)"),
        ((one, None), "is a mean and needs its denominator"),
        ((one, one, "sum"), "takes no denominator"),
    ]
    for parts, match in cases:
        with pytest.raises(ConfigError, match=match):
            LossTerm("a", *parts)


def test_building_a_term_waits_for_no_device() -> None:
    """A tensor whose value is not on the host is taken as it is: `meta` has none, as an accelerator's would cost."""
    there = torch.zeros((), device="meta")
    assert LossTerm("a", there, there).denominator is there


def test_plain_numbers_in_terms_become_tensors() -> None:
    terms = settled([LossTerm("a", torch.tensor(6.0).half(), 3), LossTerm("b", 4, reduction="sum", weight=2.0)])
    assert [term.numerator.dtype for term in terms] == [torch.float32, torch.float32]
    assert (float(term_value(terms[0])), float(total_value(terms))) == (2.0, 10.0)
