"""Answers are checked and never repaired: every id once, numbers from 0 to 1, a sum within 1e-6 of 1."""

from __future__ import annotations

import dataclasses
import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from nnx_jax.decisions import (
    Boolean,
    BooleanResult,
    ChoiceResult,
    DecisionError,
    DecisionResult,
    InvalidDecisionRequest,
    InvalidDecisionResponse,
    Score,
    ScoreResult,
    validate_response,
)

from .toys import ANIMALS

URGENT = Boolean("Urgent?")
LEVELS = Score("How bad?", {"low": "Low", "mid": "Middle", "high": "High"})
GOOD = {"x": 0.2, "y": 0.3, "z": 0.5}


@pytest.mark.parametrize(
    "response",
    [{"z": 0.5, "x": 0.2, "y": 0.3}, [("z", 0.5), ("y", 0.3), ("x", 0.2)], (["y", 0.3], ["z", 0.5], ["x", 0.2])],
)
def test_answer_comes_in_the_order_of_the_question(response: Any) -> None:
    """nnx:B175"""
    result = validate_response(ANIMALS, response, provider="me")
    assert isinstance(result, ChoiceResult)
    assert result.distribution == (("x", 0.2), ("y", 0.3), ("z", 0.5))
    assert list(result.probabilities()) == ["x", "y", "z"]
    assert (result.top, result.provider, result.question_digest) == ("z", "me", ANIMALS.digest())


BAD = {
    "missing": ({"x": 0.5, "y": 0.5}, "no probability for 'z'"),
    "unknown": ({**GOOD, "q": 0.0}, "id 'q' is not in the question; its ids are 'x', 'y', 'z'"),
    "unknown for missing": ({"x": 0.2, "y": 0.3, "q": 0.5}, "id 'q' is not in the question"),
    "twice": ([("x", 0.2), ("y", 0.3), ("x", 0.5)], "id 'x' is answered twice"),
    "twice and complete": ([("x", 0.2), ("y", 0.3), ("z", 0.5), ("z", 0.5)], "id 'z' is answered twice"),
    "empty": ({"x": 0.2, "y": 0.3, "": 0.5}, "has the id ''"),
    "no text": ([("x", 0.2), ("y", 0.3), (None, 0.5)], "has the id None"),
    "negative": ({"x": -0.1, "y": 0.3, "z": 0.8}, "p['x'] is -0.1; expected a number from 0 to 1"),
    "above one": ({"x": 1.5, "y": 0.0, "z": 0.0}, "p['x'] is 1.5; expected a number from 0 to 1"),
    "nan": ({"x": math.nan, "y": 0.3, "z": 0.5}, "p['x'] is nan; expected a finite number"),
    "infinite": ({"x": math.inf, "y": 0.3, "z": 0.5}, "p['x'] is inf; expected a finite number"),
    "bool": ({"x": True, "y": 0.0, "z": 0.0}, "p['x'] is True; expected a plain number"),
    "numpy bool": ({"x": np.True_, "y": 0.0, "z": 0.0}, "expected a plain number"),
    "text": ({"x": "0.2", "y": 0.3, "z": 0.5}, "p['x'] is '0.2'; expected a plain number"),
    "none": ({"x": None, "y": 0.3, "z": 0.5}, "p['x'] is None; expected a plain number"),
    "complex": ({"x": 0.2 + 0j, "y": 0.3, "z": 0.5}, "expected a plain number"),
    "huge": ({"x": 10**400, "y": 0.3, "z": 0.5}, "p['x'] is too large for a float"),
    "huger": ({"x": 10**5000, "y": 0.3, "z": 0.5}, "p['x'] is too large for a float"),
    "sum above": ({"x": 0.2, "y": 0.3, "z": 0.500002}, "sum to 1.000002; expected 1 within 1e-06"),
    "sum below": ({"x": 0.2, "y": 0.3, "z": 0.499998}, "expected 1 within 1e-06"),
    "percent": ({"x": 0.0, "y": 0.0, "z": 0.0}, "sum to 0; expected 1"),
    "no ids": ([0.2, 0.3, 0.5], "expected an (id, probability) pair"),
    "a text": ("xyz", "the response is 'xyz'"),
    "nothing": (None, "the response is None"),
}


@pytest.mark.parametrize("response, expected", BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("question", [ANIMALS, Score(ANIMALS.prompt, ANIMALS.options)], ids=["choice", "score"])
def test_bad_answer_is_refused(question: Any, response: Any, expected: str) -> None:
    """nnx:B176"""
    with pytest.raises(InvalidDecisionResponse) as caught:
        validate_response(question, response)
    assert expected in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, DecisionError)


@pytest.mark.parametrize("last", [0.5000005, 0.4999995])
def test_a_sum_within_the_tolerance_is_kept_as_it_is(last: float) -> None:
    """nnx:B176 Accepted unchanged: nothing is renormalised."""
    result = validate_response(ANIMALS, {"x": 0.2, "y": 0.3, "z": last})
    assert isinstance(result, ChoiceResult)
    assert result.distribution == (("x", 0.2), ("y", 0.3), ("z", last))


def test_any_real_number_is_a_probability() -> None:
    response = {"x": np.float32(0.25), "y": Fraction(1, 4), "z": np.float64(0.5)}
    result = validate_response(ANIMALS, response)
    assert isinstance(result, ChoiceResult)
    assert result.distribution == (("x", 0.25), ("y", 0.25), ("z", 0.5))
    assert all(type(p) is float for _, p in result.distribution)
    assert validate_response(ANIMALS, {"x": 1, "y": 0, "z": -0.0}).state()["probabilities"] == {"x": 1, "y": 0, "z": 0}


@pytest.mark.parametrize(
    "response", [0.7, {"true": 0.7, "false": 0.3}, [("false", 0.3), ("true", 0.7)], np.float64(0.7)]
)
def test_yes_or_no(response: Any) -> None:
    """nnx:B177"""
    result = validate_response(URGENT, response)
    assert isinstance(result, BooleanResult)
    assert result.p_true == 0.7
    assert result.p_false == pytest.approx(0.3)
    assert result.question_digest == URGENT.digest()


@pytest.mark.parametrize(
    "response",
    [
        {"true": 0.7, "false": 0.4}, {"true": 0.7}, {"yes": 0.7, "no": 0.3}, {"true": 0.7, "false": 0.3, "maybe": 0.0},
        {True: 0.7, False: 0.3}, 1.1, -0.1, math.nan, True, "0.7", None, 10**400,
    ],
)  # fmt: skip
def test_bad_yes_or_no_is_refused(response: Any) -> None:
    """nnx:B177"""
    with pytest.raises(InvalidDecisionResponse):
        validate_response(URGENT, response)


def test_score_has_an_expected_index_and_keeps_the_vendors_number_apart() -> None:
    """nnx:B178 0 x .2 + 1 x .3 + 2 x .5 = 1.3"""
    result = validate_response(LEVELS, {"high": 0.5, "low": 0.2, "mid": 0.3}, vendor_score=88)
    assert isinstance(result, ScoreResult)
    assert result.expected_index == pytest.approx(1.3, abs=1e-15)
    assert result.vendor_score == 88.0
    assert result.distribution == (("low", 0.2), ("mid", 0.3), ("high", 0.5))
    plain = validate_response(LEVELS, {"high": 0.5, "low": 0.2, "mid": 0.3})
    assert isinstance(plain, ScoreResult)
    assert plain.vendor_score is None
    assert plain.expected_index == result.expected_index
    assert plain != result


@pytest.mark.parametrize("score", [math.nan, math.inf, True, "88", 10**400])
def test_a_vendors_number_is_a_finite_number(score: Any) -> None:
    with pytest.raises(InvalidDecisionResponse, match="vendor_score"):
        validate_response(LEVELS, {"low": 0.2, "mid": 0.3, "high": 0.5}, vendor_score=score)


@pytest.mark.parametrize("question, response", [(ANIMALS, GOOD), (URGENT, 0.7)])
def test_only_a_score_has_a_vendors_number(question: Any, response: Any) -> None:
    with pytest.raises(InvalidDecisionResponse, match="only a Score has one"):
        validate_response(question, response, vendor_score=1.0)


def test_raw_is_kept_and_counts_for_nothing() -> None:
    one = validate_response(ANIMALS, GOOD, raw=np.zeros(3))
    two = validate_response(ANIMALS, GOOD, raw={"any": "thing"})
    assert one == two
    assert hash(one) == hash(two)
    assert one.raw is not two.raw
    assert "raw" not in repr(one)
    assert one != validate_response(ANIMALS, GOOD, provider="somebody")


def test_the_first_of_equal_probabilities_is_the_top() -> None:
    result = validate_response(ANIMALS, {"z": 0.4, "y": 0.4, "x": 0.2})
    assert isinstance(result, ChoiceResult)
    assert result.top == "y"


@pytest.mark.parametrize(
    "make",
    [
        lambda: ChoiceResult(ANIMALS.digest(), (("x", 1.0),)),
        lambda: ChoiceResult(ANIMALS.digest(), (("x", 0.5), ("x", 0.5))),
        lambda: ChoiceResult(ANIMALS.digest(), ((1, 0.5), (2, 0.5))),
        lambda: ScoreResult(LEVELS.digest(), (("x", 0.5), ("y", 0.6))),
        lambda: ChoiceResult("e9fd", tuple(GOOD.items())),
        lambda: BooleanResult(URGENT.digest(), 2.0),
    ],
)
def test_no_result_can_be_built_wrong(make: Any) -> None:
    with pytest.raises(InvalidDecisionResponse):
        make()


def test_a_result_is_frozen_and_can_be_written() -> None:
    result = validate_response(LEVELS, {"low": 0.2, "mid": 0.3, "high": 0.5}, provider="me", raw=object())
    assert isinstance(result, DecisionResult)
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.distribution = ()
    assert json.loads(json.dumps(result.state())) == {
        "kind": "score", "question": LEVELS.digest(), "provider": "me", "top": "high",
        "probabilities": {"low": 0.2, "mid": 0.3, "high": 0.5}, "vendor_score": None,
        "expected_index": pytest.approx(1.3),
    }  # fmt: skip
    assert validate_response(URGENT, 0.7).state() == {
        "kind": "boolean", "question": URGENT.digest(), "provider": None, "p_true": 0.7,
    }  # fmt: skip


@pytest.mark.parametrize("question", ["Which?", None, ANIMALS.state()])
def test_an_answer_needs_a_question(question: Any) -> None:
    with pytest.raises(InvalidDecisionRequest, match="write a Choice, a Boolean or a Score"):
        validate_response(question, GOOD)
