"""Losses as operators: numbers by hand, exact sums under masks and windows, and a round trip that really loads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_jax.core.errors import ConfigError, DataError, ModelError, NonFiniteError
from nnx_jax.core.operator import Operator, Sequential
from nnx_jax.data import ArrayDataset
from nnx_jax.engines.feeds import sizes_for
from nnx_jax.loop.callbacks import Callback, TrainContext
from nnx_jax.loop.updates import UpdateEvent
from nnx_jax.model import NNModel
from nnx_jax.objectives.compose import ComposedLossFunction
from nnx_jax.objectives.losses import Loss as BuiltLoss
from nnx_jax.objectives.losses import build_loss
from nnx_jax.objectives.operators import (
    KL,
    MSE,
    NLL,
    Composite,
    ElementLoss,
    Loss,
    LossOperator,
    TrainTask,
    as_loss,
    revived,
)
from nnx_jax.objectives.terms import LossTerm, merge_terms, term_value, total_value
from nnx_jax.objectives.weights import CosineWeight, LinearWeight, PiecewiseWeight
from nnx_jax.params.losses import HuberParams, LossParams
from nnx_jax.params.model import NNModelParams
from tests.e2e.own import train
from tests.e2e.toys import Slope


class Told(NamedTuple):
    """A distribution that was told its log-probabilities."""

    log_probs: Any

    def log_prob(self, target: Any) -> Any:
        return jnp.asarray(self.log_probs, jnp.float32)


class Gap(NamedTuple):
    """A distribution that was told its divergences."""

    divergence: Any

    def kl_divergence(self, other: Any) -> Any:
        return jnp.asarray(self.divergence, jnp.float32)


class Normal(NamedTuple):
    """A unit normal around `loc`, without a divergence in closed form."""

    loc: Any

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Any:
        return self.loc + jax.random.normal(key, (*sample_shape, *jnp.shape(self.loc)))

    def log_prob(self, value: Any) -> Any:
        return -0.5 * (value - self.loc) ** 2 - 0.5 * np.log(2 * np.pi)


class Seeded(Normal):
    """The same, with the key called as in Distrax."""

    def sample(self, *, seed: Any, sample_shape: tuple[int, ...] = ()) -> Any:  # type: ignore[override]
        return Normal.sample(self, seed, sample_shape)


def batch(y: Any, **more: Any) -> dict[str, Any]:
    return {"y": jnp.asarray(y), **{name: jnp.asarray(value) for name, value in more.items()}}


def value(loss: Any, outputs: Any, given: dict[str, Any]) -> float:
    return float(total_value(as_loss(loss)(outputs, given)))


# -- called ----------------------------------------------------------------------------------------------------


def test_mse_by_hand() -> None:
    """(pipekit:C1)"""
    loss, aux = MSE()(jnp.array([1.0, 2.0, 3.0]), jnp.array([1.0, 2.0, 2.0]))
    assert float(loss) == pytest.approx(1 / 3)
    assert aux.keys() == {"mse"}
    assert float(aux["mse"]) == float(loss)
    assert float(MSE("sum")([1.0, 2.0, 3.0], [0.0, 0.0, 0.0])[0]) == 14.0
    assert MSE("none")([1.0, 2.0, 3.0], [0.0, 0.0, 0.0])[0].tolist() == [1.0, 4.0, 9.0]


@pytest.mark.parametrize("loss", [MSE, NLL])
def test_a_wrong_reduction_is_refused(loss: Any) -> None:
    """(pipekit:C2)"""
    with pytest.raises(ValueError, match="reduction"):
        loss("invalid")


def test_nll_by_hand() -> None:
    """(pipekit:C3)"""
    told = Told([-1.0, -2.0, -3.0])
    assert [float(NLL(how)(told, None)[0]) for how in ("mean", "sum")] == [2.0, 6.0]
    assert NLL("none")(told, None)[1]["nll"].tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(TypeError, match="log_prob"):
        NLL()(jnp.zeros(3), jnp.zeros(3))


def test_kl_in_closed_form() -> None:
    """(pipekit:C4)"""
    loss, aux = KL()(Gap([1.0, 3.0]), None)
    assert (float(loss), float(aux["kl"])) == (2.0, 2.0)
    with pytest.raises(TypeError, match="kl_divergence"):
        KL()(jnp.zeros(3), jnp.zeros(3))


@pytest.mark.parametrize("normal", [Normal, Seeded])
def test_kl_by_sampling(normal: Any) -> None:
    """KL(N(0,1) || N(1,1)) is 0.5; one draw's log ratio 1/2 - z has a standard deviation of 1. (pipekit:C4)"""
    found, _ = KL(samples=20_000)(normal(jnp.zeros(())), normal(jnp.ones(())), key=jax.random.key(3))
    assert abs(float(found) - 0.5) < 3 / np.sqrt(20_000)
    rows, _ = KL("none", samples=10)(normal(jnp.zeros(4)), normal(jnp.zeros(4)), key=jax.random.key(0))
    assert rows.tolist() == [0.0] * 4
    with pytest.raises(TypeError, match="needs a key"):
        KL()(normal(0.0), normal(1.0))


def test_kl_draws_anew_at_every_update() -> None:
    loss = as_loss(KL(samples=10))
    data = {"y": Normal(jnp.ones(3))}
    terms = [loss.at(step, 0)(Normal(jnp.zeros(3)), data) for step in (0, 0, 1)]  # type: ignore[attr-defined]
    first, again, second = (float(term_value(term)) for (term,) in terms)
    assert first == again != second


def test_composite_by_hand() -> None:
    """(pipekit:C5)"""
    loss, aux = Composite(((1, MSE()), (0.5, MSE())))(jnp.array([1.0]), jnp.array([0.0]))
    assert float(loss) == 1.5
    assert {name: float(each) for name, each in aux.items()} == {"MSE_0": 1.0, "MSE_1": 1.0, "total": 1.5}
    loss, aux = Composite(((0.25, MSE()),))(jnp.array([2.0]), jnp.array([0.0]))
    assert (float(loss), float(aux["MSE_0"])) == (1.0, 4.0)


def test_an_empty_composite_is_refused_and_a_full_one_tells_its_parts() -> None:
    """(pipekit:C6)"""
    for nothing in ((), []):
        with pytest.raises(ValueError, match="at least 1"):
            Composite(nothing)
    parts = Composite(((2.0, MSE()), (0.5, NLL("sum")))).state()["components"]
    assert [(part["weight"], part["loss"]["kind"]) for part in parts] == [(2.0, "squared_error"), (0.5, "nll")]


def test_a_composite_is_loaded_with_weights_children_and_their_settings() -> None:
    """(pipekit:C7)"""
    nested = Composite(((1, MSE("sum")), (0.5, KL(samples=7)), (2, HuberParams(delta=3.0))))
    whole = Composite(((0.1, nested), (LinearWeight(0.0, 1.0, 10), MSE()), (CosineWeight(1.0, 0.0, 5), NLL("sum"))))
    found = LossParams.from_yaml(whole.to_yaml())
    assert found == whole
    assert found.content_hash() == whole.content_hash()
    assert found.components[0].loss.components[0].loss.reduction == "sum"  # type: ignore[attr-defined]
    assert found.components[1].schedule == LinearWeight(0.0, 1.0, 10)  # type: ignore[attr-defined]
    piecewise = Composite(((PiecewiseWeight((2,), (1.0, 3.0)), MSE()),))
    assert LossParams.from_state(piecewise.state()) == piecewise
    assert whole.content_hash() != whole.replace(components=whole.components[:2]).content_hash()


def test_a_loss_stands_in_a_sequence() -> None:
    """A full kind reaches it where any operator may stand. (pipekit:C8)"""
    pipeline = Sequential([Composite(((1, MSE()),))])
    assert Operator.from_yaml(pipeline.to_yaml()) == pipeline


@pytest.mark.parametrize("loss", [MSE(), NLL(), KL(), Composite(((1, MSE()),))])
def test_every_common_loss_is_an_operator_and_a_loss(loss: Any) -> None:
    """(pipekit:C8)"""
    assert isinstance(loss, Operator)
    assert isinstance(loss, Loss)
    assert isinstance(as_loss(loss), BuiltLoss)


def test_mse_compares_values_so_an_open_network_learns_its_outputs_from_the_targets() -> None:
    data = ArrayDataset(x=np.ones((4, 1), np.float32), y=np.ones((4, 3), np.float32))
    assert sizes_for(as_loss(MSE()), data.info)["output_dim"] == 3
    assert as_loss(MSE()).by_rows
    assert not as_loss(NLL()).by_rows  # what a distribution does with its rows is its own affair


def test_a_plain_function_is_a_loss_and_a_number_is_none() -> None:
    """(pipekit:C8)"""
    assert isinstance(lambda predicted, target: 0.0, Loss)
    assert not isinstance(3, Loss)
    with pytest.raises(ConfigError):
        as_loss(3)


def test_a_task_is_told_by_its_loss_fn() -> None:
    class Task:
        def loss_fn(self, model: Any, batch: Any, key: Any) -> Any: ...

    assert isinstance(Task(), TrainTask)
    assert not isinstance(MSE(), TrainTask)


def test_shapes_that_would_be_broadcast_are_refused() -> None:
    """(pipekit:C11)"""
    for call in (lambda *pair: MSE()(*pair), lambda p, t: value(MSE(), p, batch(t))):
        with pytest.raises(ValueError, match="shape mismatch"):
            call(jnp.zeros((4, 1)), jnp.zeros(4))
        with pytest.raises(ModelError, match="shape mismatch"):
            call(jnp.zeros(3), jnp.zeros(1))


def test_losses_are_differentiated_compiled_and_vectorised() -> None:
    """(pipekit:C12)"""
    gradient = jax.grad(lambda predicted: MSE()(predicted, jnp.array([0.0]))[0])
    assert gradient(jnp.array([1.0])).tolist() == [2.0]
    assert jax.jit(gradient)(jnp.array([1.0])).tolist() == [2.0]
    both = jax.vmap(lambda p, t: Composite(((1, MSE()), (1, MSE("sum"))))(p, t)[0])
    assert both(jnp.array([[1.0, 1.0], [2.0, 0.0]]), jnp.zeros((2, 2))).tolist() == [3.0, 6.0]


def test_integers_are_compared_as_floats() -> None:
    assert float(MSE()(np.array([250], np.uint8), np.array([255], np.uint8))[0]) == 25.0


# -- composites ------------------------------------------------------------------------------------------------


def rooted(predicted: Any, target: Any) -> Any:
    """A plain loss that reports a value of its own."""
    loss = jnp.mean((predicted - target) ** 2)
    return loss, {"rmse": jnp.sqrt(loss), "loss": loss}


def test_values_of_parts_never_hide_each_other() -> None:
    """(pipekit:C14)"""
    _, aux = Composite(((1, rooted), (2, rooted), (1, MSE())))(jnp.array([3.0]), jnp.array([0.0]))
    assert {name: float(each) for name, each in aux.items()} == {
        "rooted_0": 9.0, "rooted_0.rmse": 3.0, "rooted_0.loss": 9.0,
        "rooted_1": 9.0, "rooted_1.rmse": 3.0, "rooted_1.loss": 9.0, "MSE_2": 9.0, "total": 36.0,
    }  # fmt: skip
    terms = as_loss(Composite(((1, rooted), (2, rooted), (1, MSE()))))(jnp.array([3.0]), batch([0.0]))
    assert {t.name: float(term_value(t)) for t in terms} == {
        "rooted_0": 9.0, "rooted_0.rmse": 3.0, "rooted_1": 9.0, "rooted_1.rmse": 3.0, "MSE_2": 9.0,
    }  # fmt: skip
    assert float(total_value(terms)) == 36.0


def test_terms_of_a_composite_are_unweighted_and_their_sum_is_not() -> None:
    loss = Composite(((1, Composite(((3, MSE()), (1, MSE("sum"))))), (0.5, HuberParams(delta=1.0))))
    terms = as_loss(loss)(jnp.array([2.0, 2.0]), batch([0.0, 0.0]))
    found = {t.name: float(term_value(t)) for t in terms}
    assert found == {"Composite_0.MSE_0": 4.0, "Composite_0.MSE_1": 8.0, "HuberParams_1": 1.5}
    assert float(total_value(terms)) == 3 * 4 + 8 + 0.75
    assert float(loss(jnp.array([2.0, 2.0]), jnp.array([0.0, 0.0]))[0]) == 20.75


def test_a_weight_that_moves_keeps_the_value_without_it() -> None:
    loss = as_loss(Composite(((LinearWeight(0.0, 1.0, 10), MSE()), (1.0, MSE("sum")))))
    terms = loss.at(5, 0)(jnp.array([2.0, 2.0]), batch([0.0, 0.0]))  # type: ignore[attr-defined]
    assert {t.name: float(term_value(t)) for t in terms} == {"MSE_0": 4.0, "MSE_0.weighted": 4.0, "MSE_1": 8.0}
    assert float(total_value(terms)) == 0.5 * 4 + 8
    assert float(Composite(((LinearWeight(0.0, 1.0, 10), MSE()),))([2.0], [0.0], step=5)[0]) == 2.0


@pytest.mark.parametrize("weight", [True, "1", None, float("nan"), float("inf")])
def test_a_wrong_weight_is_refused(weight: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="weight"):
        Composite(((weight, MSE()),))


def test_a_schedule_is_described_or_refused() -> None:
    assert revived({"kind": "LinearWeight", "start": 0.0, "end": 1.0, "num_steps": 3}) == LinearWeight(0.0, 1.0, 3)
    for wrong in ({"kind": "Sawtooth"}, {"kind": "LinearWeight", "begin": 0.0}):
        with pytest.raises(ConfigError, match=r"Sawtooth|begin"):
            revived(wrong)
        with pytest.raises(ConfigError):
            LossParams.from_state({"kind": "composite", "components": [{"weight": wrong, "loss": "nll"}]})


def test_a_function_inside_is_for_python_only() -> None:
    loss = Composite(((1.0, rooted),))
    with pytest.raises(ConfigError, match="Python only"):
        loss.state()


# -- sums underneath -------------------------------------------------------------------------------------------


def mean_square(predicted: Any, target: Any) -> Any:
    return jnp.mean((predicted - target) ** 2)


@pytest.mark.parametrize("loss", [MSE(), MSE("none"), mean_square, Composite(((1, MSE()),)), NLL()])
def test_masks_and_weights_count_rows(loss: Any) -> None:
    """Errors 1, 4, 9 with weights 1, 3, 0 and padding: (1 + 12) / 4; log-probabilities as the errors. (pipekit:C13)"""
    y = jnp.zeros((4, 1))
    outputs = Told(-jnp.array([[1.0], [4.0], [9.0], [7.0]])) if isinstance(loss, NLL) else jnp.array(
        [[1.0], [2.0], [3.0], [jnp.nan]]
    )  # fmt: skip
    given = batch(y, mask=[1.0, 1.0, 1.0, 0.0], weight=[1.0, 3.0, 0.0, 1.0])
    assert value(loss, outputs, given) == pytest.approx(13 / 4)
    assert value(loss, outputs, {**given, "mask": jnp.zeros(4)}) == 0.0  # nothing counts: not NaN


@pytest.mark.parametrize("loss", [MSE(), mean_square, Composite(((1, MSE()),))])
def test_a_window_of_unequal_batches_is_the_loss_of_their_rows(loss: Any) -> None:
    """One row of error 1 and three of error 2: 13/4, where the mean of means is 5/2."""
    built = as_loss(loss)
    first = built(jnp.array([1.0]), batch([0.0]))
    second = built(jnp.array([2.0] * 3), batch([0.0] * 3))
    assert float(total_value(merge_terms(first, second))) == pytest.approx(13 / 4)


def test_a_sum_stays_a_sum() -> None:
    (term,) = as_loss(MSE("sum"))(jnp.array([1.0, 2.0]), batch([0.0, 0.0], mask=[1.0, 0.0]))
    assert (float(term.numerator), term.denominator, term.reduction) == (1.0, None, "sum")


def test_a_scalar_of_a_whole_batch_may_compare_rows() -> None:
    """Without padding the function sees the batch as it is, also where the step has a mask."""

    def spread(predicted: Any, target: Any) -> Any:
        return jnp.var(predicted)

    outputs = jnp.array([1.0, 3.0])
    assert value(spread, outputs, batch([0.0, 0.0])) == 1.0
    assert value(spread, outputs, batch([0.0, 0.0], mask=[1.0, 1.0])) == 1.0


def test_a_scalar_that_no_row_has_by_itself_is_nan_in_short_batches_only() -> None:
    def paired(predicted: Any, target: Any) -> Any:
        first, second = predicted
        return (first - second) ** 2

    outputs = jnp.array([1.0, 3.0])
    assert value(paired, outputs, batch([0.0, 0.0], mask=[1.0, 1.0])) == 4.0
    assert np.isnan(value(paired, outputs, batch([0.0, 0.0], mask=[1.0, 0.0])))


def test_a_composition_of_functions_keeps_its_schedule() -> None:
    composed = LinearWeight(0.0, 1.0, 10) * build_loss("mse") + build_loss("mae")
    loss = as_loss(ComposedLossFunction(composed.components, composed.weights, normalize_weights=False))
    for step, expected in ((0, 2.0), (5, 4.0), (10, 6.0)):
        terms = loss.at(step, 0)(jnp.array([2.0]), batch([0.0]))  # type: ignore[attr-defined]
        assert float(total_value(terms)) == expected
    assert value(composed.components[0], jnp.array([2.0]), batch([0.0])) == 4.0


def test_a_function_may_give_rows_terms_or_rows_with_a_mask() -> None:
    rows = lambda predicted, target: (predicted - target) ** 2  # noqa: E731
    masked = lambda predicted, target: ((predicted - target) ** 2, jnp.array([1.0, 0.0]))  # noqa: E731
    term = lambda predicted, batch: LossTerm("own", jnp.sum(predicted), 2.0)  # noqa: E731
    assert value(rows, jnp.array([1.0, 3.0]), batch([0.0, 0.0])) == 5.0
    assert value(masked, jnp.array([1.0, 3.0]), batch([0.0, 0.0])) == 1.0
    assert value(term, jnp.array([1.0, 3.0]), batch([0.0, 0.0])) == 2.0


def test_reported_values_are_not_differentiated() -> None:
    """(pipekit:C9)"""

    def loss(w: Any) -> Any:
        terms = as_loss(lambda p, t: (jnp.sum(p), {"other": 100.0 * jnp.sum(p)}))(w, batch([0.0]))
        assert [term.name for term in terms] == ["loss", "other"]
        return total_value(terms)

    assert jax.grad(loss)(jnp.array([1.0])).tolist() == [1.0]


def test_a_loss_per_batch_without_rows_is_told_what_to_give() -> None:
    class Whole(ElementLoss):
        def elements(self, predicted: Any, target: Any) -> Any:
            return jnp.sum(predicted)

    with pytest.raises(ConfigError, match="each example"):
        as_loss(Whole())(jnp.zeros(2), batch([0.0, 0.0]))
    with pytest.raises(TypeError, match="elements"):
        ElementLoss()(1, 2)
    with pytest.raises(TypeError, match="as_loss"):
        as_loss(LossOperator())


# -- in a run --------------------------------------------------------------------------------------------------


ROWS = ArrayDataset(x=np.ones((4, 1), np.float32), y=np.array([[1.0], [2.0], [3.0], [4.0]], np.float32))


class Updates(Callback):
    """Keeps every update."""

    def __init__(self) -> None:
        self.events: list[UpdateEvent] = []

    def on_updates(self, ctx: TrainContext, events: Sequence[UpdateEvent]) -> None:
        self.events += events


def run(runs: Path, loss: Any, data: Any = ROWS, module: Any = None) -> list[UpdateEvent]:
    seen = Updates()
    train(runs, module or Slope(0.0), data, loss=as_loss(loss), batch_size=2, given={"callbacks": [seen]})
    return seen.events


def test_a_scheduled_composite_trains(tmp_path: Path) -> None:
    """w starts at 0, targets 1, 2 then 3, 4; weights 0 then 0.5 of the squared error beside a part of weight 1."""
    loss = Composite(((LinearWeight(0.0, 1.0, 2), MSE()), (1.0, mean_square)))
    one, two = run(tmp_path, loss)
    assert one.losses["MSE_0"] == pytest.approx(2.5)  # unweighted, though its weight is 0
    assert one.loss == pytest.approx(2.5)
    w = 0.1 * 2 * 1.5  # the gradient of the mean square at 0 is -2 * 1.5
    second = ((3 - w) ** 2 + (4 - w) ** 2) / 2
    assert two.losses["MSE_0"] == pytest.approx(second)
    assert two.loss == pytest.approx(1.5 * second)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_loss_of_elements_trains_by_its_mean(tmp_path: Path, reduction: Any) -> None:
    """(pipekit:C10)"""
    events = run(tmp_path, MSE(reduction))
    assert events[0].loss == pytest.approx(2.5)
    assert events[0].losses.keys() == {"mse"}


def test_an_update_without_a_weighted_row_is_skipped(tmp_path: Path) -> None:
    """The first batch weighs nothing: no update is made of it, and the next one starts from the first weights.

    (pipekit:C13)
    """
    data = ArrayDataset(
        x=np.ones((4, 1), np.float32),
        y=np.array([[1.0], [2.0], [3.0], [4.0]], np.float32),
        weight=np.array([0.0, 0.0, 1.0, 1.0], np.float32),
    )
    events = run(tmp_path, MSE(), data)
    assert [(event.update_idx, event.batch_idx) for event in events] == [(1, 1)]
    assert events[0].loss == pytest.approx((9 + 16) / 2)


def test_a_loss_that_is_no_number_is_reported(tmp_path: Path) -> None:
    """Targets that are none are refused before; this is a weight that is none. (pipekit:C15)"""
    with pytest.raises(NonFiniteError):
        run(tmp_path, MSE(), module=Slope(float("nan")))
    data = ArrayDataset(x=np.ones((2, 1), np.float32), y=np.array([[1.0], [np.nan]], np.float32))
    with pytest.raises(DataError, match="nan"):
        run(tmp_path, MSE(), data)


def test_a_short_last_batch_is_scored_by_its_rows(tmp_path: Path) -> None:
    """A plain scalar function, 5 rows in batches of 2: the mean over rows, where the mean of batches is 13/3."""
    y = np.array([[1.0], [1.0], [2.0], [2.0], [3.0]], np.float32)
    data = ArrayDataset(x=np.ones((5, 1), np.float32), y=y)
    model = NNModel(params=NNModelParams(), module=Slope(0.0), loss=as_loss(mean_square))
    found = model.evaluate(data, batch_size=2)
    assert found["loss"] == pytest.approx((1 + 1 + 4 + 4 + 9) / 5)


def test_a_term_keeps_its_reduction_in_a_composite() -> None:
    (term,) = as_loss(Composite(((2.0, MSE("sum")),)))(jnp.array([1.0]), batch([0.0]))
    assert dataclasses.astuple(term)[0] == "MSE_0"
    assert (term.reduction, term.weight) == ("sum", 2.0)


def test_a_model_takes_a_loss_operator() -> None:
    """What trains by a loss's name trains by the operator: the same terms, masks included."""
    batch = {"y": jnp.array([1.0, 2.0, 9.0]), "mask": jnp.array([1.0, 1.0, 0.0])}
    outputs = jnp.array([3.0, 2.0, 0.0])
    (mine,), (builtin,) = build_loss(MSE())(outputs, batch), build_loss("mse")(outputs, batch)
    assert (float(mine.numerator), float(mine.denominator)) == (4.0, 2.0)
    assert (float(builtin.numerator), float(builtin.denominator)) == (4.0, 2.0)
