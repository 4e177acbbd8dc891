"""A trained head answers what it was trained for, in the order asked; all else is refused before it is called."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_jax.data import ArrayDataset
from nnx_jax.decisions import (
    Boolean,
    BooleanResult,
    Capabilities,
    Choice,
    ChoiceResult,
    DecisionError,
    DecisionProvider,
    FixedHeadProvider,
    InvalidDecisionRequest,
    InvalidDecisionResponse,
    ProviderFailure,
    Question,
    Score,
    ScoreResult,
    UnsupportedCapability,
    validate_response,
)
from nnx_jax.engines.inference import PredictionResult
from nnx_jax.model import NNModel
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.net import FeedForwardParams

from .toys import ANIMALS, LABELS, ROW, Echo, Fails, Stranger, model, options

URGENT = Boolean("Urgent?")
LEVELS = Score("How bad?", options(*LABELS))
YES = np.log(np.array([[0.7 / 0.3]], np.float32))
"""The logit whose sigmoid is .7."""


def head(**changes: Any) -> FixedHeadProvider:
    return FixedHeadProvider(model(), **{"labels": LABELS, **changes})


# -- answers ----------------------------------------------------------------------------------------------------------


def test_the_probabilities_are_those_of_predict_proba() -> None:
    """nnx:S05 Column by column, for a network with weights of its own."""
    net = NNModel(FeedForwardParams(input_dim=4, output_dim=3, hidden_dims=(5,)), seed=3)
    rows = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)
    provider = FixedHeadProvider(net, labels=LABELS)
    results = provider.decide(ANIMALS, rows)
    expected = net.predict_proba(rows).probabilities
    assert [r.distribution for r in results] == [tuple(zip(LABELS, map(float, row), strict=True)) for row in expected]
    assert provider.model_calls == 1
    assert isinstance(provider, DecisionProvider)


def test_a_question_comes_back_as_a_validated_result() -> None:
    """nnx:S04 By hand: the softmax of the row is .2, .3, .5."""
    (result,) = head().decide(ANIMALS, ROW)
    assert isinstance(result, ChoiceResult)
    assert list(result.probabilities()) == ["x", "y", "z"]
    assert list(result.probabilities().values()) == pytest.approx([0.2, 0.3, 0.5], abs=1e-7)
    assert (result.top, result.provider, result.question_digest) == ("z", "nnx.fixed_head", ANIMALS.digest())
    np.testing.assert_allclose(result.raw, [0.2, 0.3, 0.5], atol=1e-7)


class Rule:
    """A provider without a model: the first option is as likely as the row says."""

    def capabilities(self) -> Capabilities:
        return Capabilities(primitives={"choice"}, modalities={"tensor"}, dynamic_labels=True)

    def decide(self, question: Question, inputs: Any) -> list[Any]:
        self.capabilities().check(question, modality="tensor", batch_size=len(inputs))
        first, second = question.option_ids
        return [validate_response(question, {second: 1 - p, first: p}, provider="rule") for p in inputs]


def test_a_provider_of_your_own() -> None:
    """nnx:S04 Anything with the two methods is one, and its answers go through the same check."""
    assert isinstance(Rule(), DecisionProvider)
    assert not isinstance(Stranger(None), DecisionProvider)
    yours = Choice("?", options("a", "b"))
    (result,) = Rule().decide(yours, [0.25])
    assert result.distribution == (("a", 0.25), ("b", 0.75))
    with pytest.raises(InvalidDecisionResponse):
        Rule().decide(yours, [1.25])
    with pytest.raises(UnsupportedCapability, match="asked a boolean; this provider answers: 'choice'"):
        Rule().decide(URGENT, [0.5])


def test_the_order_asked_is_the_order_answered() -> None:
    (result,) = head().decide(Choice("Which?", options("z", "x", "y")), ROW)
    assert [known for known, _ in result.distribution] == ["z", "x", "y"]
    assert [p for _, p in result.distribution] == pytest.approx([0.5, 0.2, 0.3], abs=1e-7)


def test_class_numbers_are_the_labels_where_the_width_is_known() -> None:
    net = NNModel(FeedForwardParams(input_dim=3, output_dim=3, hidden_dims=()))
    provider = FixedHeadProvider(net)
    assert provider.capabilities().labels == ("0", "1", "2")
    (result,) = provider.decide(Choice("Which?", options("2", "0", "1")), ROW)
    np.testing.assert_array_equal(
        [p for _, p in result.distribution], net.predict_proba(ROW).probabilities[0][[2, 0, 1]]
    )


def test_option_map_leads_to_the_labels() -> None:
    """nnx:B180"""
    mapped = head(option_map={"fox": "z", "cat": "x", "dog": "y"})
    (result,) = mapped.decide(Choice("Which?", options("cat", "dog", "fox")), ROW)
    assert [known for known, _ in result.distribution] == ["cat", "dog", "fox"]
    assert [p for _, p in result.distribution] == pytest.approx([0.2, 0.3, 0.5], abs=1e-7)
    (turned,) = mapped.decide(Choice("Which?", options("fox", "cat", "dog")), ROW)
    assert [p for _, p in turned.distribution] == pytest.approx([0.5, 0.2, 0.3], abs=1e-7)


@pytest.mark.parametrize(
    "option_map",
    [
        {"fox": "x", "cat": "x", "dog": "y"}, {"fox": "x", "cat": "y"}, {"fox": "x", "cat": "y", "dog": "q"},
        {"fox": "x", "cat": "y", "dog": "z", "cow": "z"}, {}, ["x", "y", "z"],
    ],
    ids=["not one to one", "not onto", "another label", "too many", "empty", "a list"],
)  # fmt: skip
def test_option_map_is_one_to_one_and_onto(option_map: Any) -> None:
    """nnx:B180"""
    with pytest.raises(InvalidDecisionRequest, match="option_map"):
        head(option_map=option_map)


def test_ordered_classes_answer_a_score() -> None:
    (result,) = head(ordinal=True).decide(LEVELS, ROW)
    assert isinstance(result, ScoreResult)
    assert result.expected_index == pytest.approx(1.3, abs=1e-6)
    assert result.vendor_score is None


@pytest.mark.parametrize("wrap", [np.asarray, jnp.asarray, lambda rows: ArrayDataset(x=rows)])
def test_rows_of_any_framework_or_a_dataset(wrap: Any) -> None:
    (result,) = head().decide(ANIMALS, wrap(ROW))
    assert result.top == "z"


def test_yes_or_no_head_answers_its_own_question() -> None:
    provider = FixedHeadProvider(model(loss="binary_cross_entropy"), question=URGENT)
    yes, no = provider.decide(URGENT, np.concatenate([YES, -YES]))
    assert isinstance(yes, BooleanResult)
    assert isinstance(no, BooleanResult)
    assert (yes.p_true, no.p_true) == pytest.approx((0.7, 0.3), abs=1e-7)
    assert provider.capabilities().primitives == {"boolean"}


def test_yes_or_no_head_is_bound_to_its_question() -> None:
    """nnx:B181"""
    yes_no = model(loss="binary_cross_entropy")
    with pytest.raises(InvalidDecisionRequest, match="question: a yes/no head has one probability"):
        FixedHeadProvider(yes_no)
    with pytest.raises(InvalidDecisionRequest, match="question: got a Choice; write the Boolean"):
        FixedHeadProvider(yes_no, question=ANIMALS)
    provider = FixedHeadProvider(model(Fails(), loss="binary_cross_entropy"), question=URGENT)
    with pytest.raises(UnsupportedCapability, match="asked 'urgent.'; this head answers the one question"):
        provider.decide(Boolean("urgent?"), YES)
    assert provider.model_calls == 0


def test_an_empty_batch_has_no_answer_and_costs_no_call() -> None:
    """nnx:B183 Even of a model that fails when it is called."""
    provider = FixedHeadProvider(model(Fails()), labels=LABELS)
    assert provider.decide(ANIMALS, ROW[:0]) == []
    assert provider.model_calls == 0
    with pytest.raises(UnsupportedCapability):
        provider.decide(URGENT, ROW[:0])


# -- refusals ---------------------------------------------------------------------------------------------------------

OUTSIDE = {
    "unknown label": (Choice("?", options("x", "y", "q")), ROW, "asked about 'q'; this provider's labels are"),
    "too few labels": (Choice("?", options("x", "y")), ROW, "asked without 'z'; the options must be all"),
    "too many labels": (Choice("?", options("x", "y", "z", "q")), ROW, "asked about 'q'"),
    "boolean": (URGENT, ROW, "asked a boolean; this provider answers: 'choice'"),
    "score": (LEVELS, ROW, "asked a score; this provider answers: 'choice'"),
    "text": (ANIMALS, "a fox", "given a str; this provider reads arrays of numbers"),
    "list": (ANIMALS, [[0.1, 0.2, 0.3]], "given a list; this provider reads arrays of numbers"),
    "array of text": (ANIMALS, np.array(["a fox"]), "given a <U5 array"),
    "objects": (ANIMALS, np.array([None]), "given a object array"),
    "one number": (ANIMALS, np.float32(1), "given a single number"),
    "batch": (ANIMALS, np.repeat(ROW, 3, axis=0), "given 3 rows; this provider takes 2 in a call"),
}


@pytest.mark.parametrize("question, inputs, expected", OUTSIDE.values(), ids=OUTSIDE.keys())
def test_what_is_outside_is_refused_before_the_model_is_called(question: Question, inputs: Any, expected: str) -> None:
    """nnx:B179 The model would fail, were it called."""
    provider = FixedHeadProvider(model(Fails()), labels=LABELS, max_batch=2)
    for refuse in (provider.decide, provider.check):
        with pytest.raises(UnsupportedCapability) as caught:
            refuse(question, inputs)
        assert expected in str(caught.value)
    assert provider.model_calls == 0
    with pytest.raises(ProviderFailure):
        provider.decide(ANIMALS, ROW)
    assert provider.model_calls == 1


def test_levels_follow_the_order_of_the_classes() -> None:
    """nnx:B179"""
    provider = FixedHeadProvider(model(Fails()), labels=LABELS, ordinal=True)
    with pytest.raises(UnsupportedCapability, match="must be in the order of the head's classes: 'x', 'y', 'z'"):
        provider.decide(Score("How bad?", options("z", "y", "x")), ROW)
    assert provider.model_calls == 0


def test_an_id_that_option_map_does_not_know() -> None:
    """nnx:B179"""
    provider = FixedHeadProvider(model(Fails()), LABELS, {"fox": "x", "cat": "y", "dog": "z"})
    with pytest.raises(UnsupportedCapability, match="asked about 'x', 'y', 'z'; option_map knows 'fox', 'cat', 'dog'"):
        provider.decide(ANIMALS, ROW)
    assert provider.model_calls == 0


def test_only_a_question_can_be_asked() -> None:
    provider = head()
    with pytest.raises(InvalidDecisionRequest, match="got a str"):
        provider.decide("Which?", ROW)
    assert provider.model_calls == 0


WIDE = FeedForwardParams(input_dim=3, output_dim=3, hidden_dims=())
ONE = FeedForwardParams(input_dim=3, output_dim=1, hidden_dims=())
YES_NO = NNModelParams(loss="binary_cross_entropy")
WRONG: dict[str, tuple[Any, type[DecisionError], str]] = {
    "no labels": (lambda: head(labels=None), InvalidDecisionRequest, "labels: is required"),
    "one label": (lambda: head(labels=["x"]), InvalidDecisionRequest, "leaves nothing to choose"),
    "label twice": (lambda: head(labels=["x", "x"]), InvalidDecisionRequest, "labels[1]: 'x' names two classes"),
    "label of number": (lambda: head(labels=[0, 1]), InvalidDecisionRequest, "labels[0]: got 0; write text"),
    "one text": (lambda: head(labels="xyz"), InvalidDecisionRequest, "labels: got the text 'xyz'; write a list"),
    "question": (lambda: head(question=URGENT), InvalidDecisionRequest, "ask this head a Choice or a Score"),
    "max_batch": (lambda: head(max_batch=0), InvalidDecisionRequest, "max_batch: got 0; write a whole number from 1"),
    "width": (lambda: FixedHeadProvider(NNModel(WIDE), ["a", "b"]), InvalidDecisionRequest, "2 labels for a head of 3"),
    "no model": (lambda: FixedHeadProvider(object(), LABELS), InvalidDecisionRequest, "object without predict_proba"),
    "values": (lambda: FixedHeadProvider(model(loss="mse"), LABELS), UnsupportedCapability, "trained to give values"),
    "many yes/no": (
        lambda: FixedHeadProvider(NNModel(WIDE, YES_NO), question=URGENT),
        UnsupportedCapability, "a head of 3 yes/no outputs",
    ),
    "many yes/no labels": (
        lambda: FixedHeadProvider(model(loss="binary_cross_entropy"), LABELS, question=URGENT),
        UnsupportedCapability, "a head of 3 yes/no outputs",
    ),
    "ordered yes/no": (
        lambda: FixedHeadProvider(NNModel(ONE, YES_NO), ordinal=True, question=URGENT),
        InvalidDecisionRequest, "ordinal: is for a head of several classes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("make, kind, expected", WRONG.values(), ids=WRONG.keys())
def test_wrong_set_up_is_refused_at_once(make: Any, kind: type[DecisionError], expected: str) -> None:
    with pytest.raises(kind) as caught:
        make()
    assert expected in str(caught.value)


def test_a_width_that_shows_only_in_the_answer() -> None:
    with pytest.raises(InvalidDecisionRequest, match="2 labels for .3. values a row"):
        head(labels=("x", "y")).decide(Choice("?", options("x", "y")), ROW)
    yes_no = FixedHeadProvider(model(loss="binary_cross_entropy"), question=URGENT)
    with pytest.raises(UnsupportedCapability, match=".3. yes/no values a row"):
        yes_no.decide(URGENT, ROW)


# -- failures ---------------------------------------------------------------------------------------------------------


def _modes(net: nnx.Module) -> list[tuple[Any, ...]]:
    return [
        (path, getattr(part, "deterministic", None), getattr(part, "use_running_average", None))
        for path, part in nnx.iter_modules(net)
    ]


def test_a_model_that_raises_is_a_provider_failure() -> None:
    """nnx:B182 The network turns its modes to evaluation before it raises; afterwards they are as they were."""
    net = Fails()
    provider = FixedHeadProvider(model(net), labels=LABELS)
    before = _modes(net)
    assert net.drop.deterministic is False
    assert net.norm.use_running_average is False
    with pytest.raises(ProviderFailure, match="nnx.fixed_head: the model failed: the graphics card left") as caught:
        provider.decide(ANIMALS, ROW)
    assert type(caught.value.__cause__) is RuntimeError
    assert str(caught.value.__cause__) == "the graphics card left"
    assert isinstance(caught.value, RuntimeError)
    assert _modes(net) == before
    assert provider.model_calls == 1


def test_asking_leaves_modes_and_weights_alone() -> None:
    """nnx:S03"""

    class Dropped(Echo):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
            self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))

        def __call__(self, x: Any) -> Any:
            return super().__call__(self.drop(self.norm(x)))

    net = Dropped()
    before, weights = _modes(net), [np.array(leaf) for leaf in _leaves(net)]
    provider = FixedHeadProvider(model(net), labels=LABELS)
    assert provider.decide(ANIMALS, ROW) == provider.decide(ANIMALS, ROW)
    assert _modes(net) == before
    for now, then in zip(_leaves(net), weights, strict=True):
        np.testing.assert_array_equal(now, then)


def _leaves(net: nnx.Module) -> list[Any]:
    return jax.tree.leaves(nnx.state(net, nnx.Any(nnx.Param, nnx.BatchStat)))


def test_rows_that_do_not_fit_are_the_cause() -> None:
    with pytest.raises(ProviderFailure, match="built for 3 inputs a row") as caught:
        FixedHeadProvider(NNModel(WIDE)).decide(Choice("?", options("0", "1", "2")), np.zeros((1, 5), np.float32))
    assert isinstance(caught.value.__cause__, ValueError)


def test_outputs_that_are_not_finite_are_a_failure() -> None:
    with pytest.raises(ProviderFailure, match="not finite"):
        head().decide(ANIMALS, ROW * np.nan)


# -- anybody's classifier ---------------------------------------------------------------------------------------------


CHANCES = np.array([[0.2, 0.3, 0.5]])


@pytest.mark.parametrize(
    "answer",
    [CHANCES, CHANCES.tolist(), PredictionResult(CHANCES, np.array([2]), np.array([0]), None)],
    ids=["array", "list", "result"],
)
def test_anything_with_predict_proba_answers(answer: Any) -> None:
    (result,) = FixedHeadProvider(Stranger(answer), labels=LABELS).decide(ANIMALS, ROW)
    assert result.distribution == (("x", 0.2), ("y", 0.3), ("z", 0.5))


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_anything_with_predict_proba_answers_yes_or_no(shape: tuple[int, ...]) -> None:
    (result,) = FixedHeadProvider(Stranger(np.full(shape, 0.7)), question=URGENT).decide(URGENT, ROW)
    assert result.p_true == 0.7


def test_a_classifier_of_scikit_learn() -> None:
    from sklearn.linear_model import LogisticRegression

    x = np.random.default_rng(0).normal(size=(60, 2))
    y = x.argmax(axis=1)
    fitted = LogisticRegression().fit(x, y)
    results = FixedHeadProvider(fitted, labels=["left", "right"]).decide(Choice("?", options("right", "left")), x)
    assert [r.distribution[0][1] for r in results] == list(fitted.predict_proba(x)[:, 1])


def _softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits.astype(np.float64))
    return powers / powers.sum(axis=-1, keepdims=True)


class HalfPrecision:
    """What a model in half precision gives: probabilities that do not sum to 1, and the logits they came from."""

    def __init__(self, logits: np.ndarray, keep: bool = True) -> None:
        self.probabilities = _softmax(logits).astype(np.float16)
        if keep:
            self.logits = logits.astype(np.float16)


def test_probabilities_of_half_precision_are_computed_again_in_float64() -> None:
    """From the logits, where there are any; without them the answer is refused, not rounded into shape."""
    logits = np.array([[0.1, 0.7, 1.9]], np.float16)
    told = HalfPrecision(logits)
    assert abs(told.probabilities.astype(np.float64).sum() - 1) > 1e-6
    (result,) = FixedHeadProvider(Stranger(told), labels=LABELS).decide(ANIMALS, ROW)
    assert [p for _, p in result.distribution] == pytest.approx(_softmax(logits)[0], abs=1e-15)
    assert result.raw.dtype == np.float16
    np.testing.assert_array_equal(result.raw, logits[0])
    with pytest.raises(InvalidDecisionResponse, match="expected 1 within 1e-06"):
        FixedHeadProvider(Stranger(HalfPrecision(logits, keep=False)), labels=LABELS).decide(ANIMALS, ROW)


NONSENSE = [
    (np.array([[0.2, 0.3, 0.6]]), "sum to 1.1"),
    (np.array([[np.nan, 0.3, 0.7]]), "p['x'] is nan"),
    (np.array([[0.2, 0.3, 0.5]] * 2), "values of shape [2, 3] for 1 rows"),
    (None, "values of shape [] for 1 rows"),
    (np.array([["a", "b", "c"]]), "holds no probabilities"),
    ([[0.1], [0.2, 0.3]], "holds no probabilities"),
    (SimpleNamespace(probabilities=None, logits=np.array([[np.inf, 0.0, 0.0]])), "p['x'] is nan"),
]


@pytest.mark.parametrize("answer, expected", NONSENSE)
def test_nonsense_of_a_model_is_no_answer(answer: Any, expected: str) -> None:
    with pytest.raises(InvalidDecisionResponse) as caught:
        FixedHeadProvider(Stranger(answer), labels=LABELS).decide(ANIMALS, ROW)
    assert expected in str(caught.value)


def test_a_loss_of_your_own_does_not_say_what_the_head_is() -> None:
    """So what the provider is given says it: labels mean softmax, a question means yes or no."""
    own = NNModel(module=Echo(), loss=lambda outputs, batch: outputs[:, 0])
    (result,) = FixedHeadProvider(own, labels=LABELS).decide(ANIMALS, ROW)
    assert [p for _, p in result.distribution] == pytest.approx([0.2, 0.3, 0.5], abs=1e-7)
    (yes,) = FixedHeadProvider(own, question=URGENT).decide(URGENT, YES)
    assert yes.p_true == pytest.approx(0.7, abs=1e-7)


def test_capabilities_say_what_there_is() -> None:
    known = head(ordinal=True, max_batch=5).capabilities()
    assert known == Capabilities(
        primitives=frozenset({"choice", "score"}), modalities=frozenset({"tensor"}), labels=LABELS, max_batch=5,
        training=True, export=True,
    )  # fmt: skip
    assert not FixedHeadProvider(Stranger(None), labels=LABELS).capabilities().training
    with pytest.raises(UnsupportedCapability, match="does not answer"):
        Capabilities(known.primitives, known.modalities, inference=False).check(
            ANIMALS, modality="tensor", batch_size=1
        )
    with pytest.raises(UnsupportedCapability, match="given text inputs; this provider reads: 'tensor'"):
        known.check(ANIMALS, modality="text", batch_size=1)
