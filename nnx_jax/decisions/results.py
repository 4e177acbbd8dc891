"""Validated answers: probabilities that fit their question exactly, checked and never repaired."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from nnx_jax.decisions.errors import InvalidDecisionRequest, InvalidDecisionResponse, listed
from nnx_jax.decisions.questions import Boolean, Choice, Question, Score

PROBABILITY_TOLERANCE = 1e-6
"""How far from 1 probabilities may sum. They are never renormalised: what the provider said is what is stored."""

_DIGEST = re.compile(r"[0-9a-f]{64}\Z")

Distribution = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class DecisionResult:
    """What the three kinds of result share. An object of a subclass is valid: building it checks it.

    Attributes:
        question_digest: `digest()` of the question this answers, 64 hex digits.
        provider: the name of who answered.
        raw: the provider's own output, as it came; not part of equality.
    """

    kind: ClassVar[str] = ""

    question_digest: str

    def __post_init__(self) -> None:
        if not isinstance(self.question_digest, str) or not _DIGEST.match(self.question_digest):
            raise InvalidDecisionResponse(
                f"question_digest is {_shown(self.question_digest)}; give the question's digest(), 64 hex digits"
            )

    def state(self) -> dict[str, Any]:
        """Return plain values without `raw`, for JSON."""
        return {"kind": self.kind, "question": self.question_digest, "provider": getattr(self, "provider", None)}


@dataclass(frozen=True)
class _Distributed(DecisionResult):
    """One probability for each option, in the question's order."""

    distribution: Distribution
    provider: str | None = None
    raw: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "distribution", _checked(self.distribution, type(self).__name__))

    def probabilities(self) -> dict[str, float]:
        """Return id -> probability, in the question's order."""
        return dict(self.distribution)

    @property
    def top(self) -> str:
        """The id with the largest probability; of equal ones the first in the question's order."""
        return max(self.distribution, key=lambda pair: pair[1])[0]

    def state(self) -> dict[str, Any]:
        """Return plain values without `raw`, for JSON."""
        return {**super().state(), "top": self.top, "probabilities": self.probabilities()}


@dataclass(frozen=True)
class ChoiceResult(_Distributed):
    """The answer to a `Choice`: `distribution` holds (id, probability) in the question's order.

    Raises:
        InvalidDecisionResponse: (a ValueError) an id twice, no probability, or a sum further than 1e-6 from 1.
    """

    kind: ClassVar[str] = "choice"


@dataclass(frozen=True)
class BooleanResult(DecisionResult):
    """The answer to a `Boolean`: `p_true`, the probability of yes.

    Raises:
        InvalidDecisionResponse: (a ValueError) not a number from 0 to 1.
    """

    kind: ClassVar[str] = "boolean"

    p_true: float
    provider: str | None = None
    raw: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "p_true", _probability(self.p_true, "p_true"))

    @property
    def p_false(self) -> float:
        """The probability of no: 1 - p_true."""
        return 1.0 - self.p_true

    def state(self) -> dict[str, Any]:
        """Return plain values without `raw`, for JSON."""
        return {**super().state(), "p_true": self.p_true}


@dataclass(frozen=True)
class ScoreResult(_Distributed):
    """The answer to a `Score`: `distribution` holds (id, probability), lowest level first.

    Attributes:
        vendor_score: a number the provider reports itself, or None; it takes no part in anything else here.

    Raises:
        InvalidDecisionResponse: (a ValueError) as for a `ChoiceResult`, or a vendor_score that is no finite number.
    """

    kind: ClassVar[str] = "score"

    vendor_score: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vendor_score is not None:
            object.__setattr__(self, "vendor_score", _finite(self.vendor_score, "vendor_score"))

    @property
    def expected_index(self) -> float:
        """The sum of level number (from 0) times probability: a place in the order, not a measured quantity."""
        return math.fsum(index * p for index, (_, p) in enumerate(self.distribution))

    def state(self) -> dict[str, Any]:
        """Return plain values without `raw`, for JSON."""
        return {**super().state(), "expected_index": self.expected_index, "vendor_score": self.vendor_score}


def validate_response(
    question: Question,
    response: Any,
    *,
    provider: str | None = None,
    raw: Any = None,
    vendor_score: float | None = None,
) -> ChoiceResult | BooleanResult | ScoreResult:
    """Return a provider's answer as a result, in the question's order.

    Args:
        question: what was asked.
        response: for a `Choice` or `Score`, id -> probability, a mapping or (id, probability) pairs in any order; for a
            `Boolean`, the probability of yes, or both under "true" and "false".
        provider: the name of who answered.
        raw: the provider's own output, kept beside the result.
        vendor_score: the number a provider of a `Score` reports itself.

    Raises:
        InvalidDecisionResponse: (a ValueError) an id that is missing, unknown, empty or given twice; a probability that
            is no number from 0 to 1; a sum further than 1e-6 from 1, which is never renormalised.
        InvalidDecisionRequest: (a ValueError) `question` is no question.
    """
    if not isinstance(question, Choice | Boolean | Score):
        raise InvalidDecisionRequest(f"asked with a {type(question).__name__}; write a Choice, a Boolean or a Score")
    digest = question.digest()
    if vendor_score is not None and not isinstance(question, Score):
        raise InvalidDecisionResponse(
            f"vendor_score {_shown(vendor_score)} for a {question.kind}; only a Score has one"
        )
    if isinstance(question, Boolean):
        p_true: Any = response
        if isinstance(response, Mapping | Sequence) and not isinstance(response, str | bytes):
            p_true = _matched(response, ("true", "false"))[0][1]
        return BooleanResult(digest, p_true, provider, raw)
    distribution = _matched(response, question.option_ids)
    if isinstance(question, Choice):
        return ChoiceResult(digest, distribution, provider, raw)
    return ScoreResult(digest, distribution, provider, raw, vendor_score)


def _matched(response: Any, ids: Sequence[str]) -> Distribution:
    """Return (id, probability) in the order of `ids`, which the response names each exactly once."""
    found: dict[str, Any] = {}
    for key, value in _pairs(response):
        if key not in ids:
            raise InvalidDecisionResponse(f"id {_shown(key)} is not in the question; its ids are {listed(ids)}")
        if key in found:
            raise InvalidDecisionResponse(f"id {key!r} is answered twice; give one probability for each id")
        found[key] = value
    if missing := [known for known in ids if known not in found]:
        raise InvalidDecisionResponse(f"no probability for {listed(missing)}; give one for each of {listed(ids)}")
    return _checked([(known, found[known]) for known in ids], "the response")


def _pairs(response: Any) -> list[tuple[str, Any]]:
    """Return the (id, probability) pairs of a mapping, or of a list of them."""
    if isinstance(response, Mapping):
        response = list(response.items())
    if isinstance(response, str | bytes) or not isinstance(response, Sequence):
        raise InvalidDecisionResponse(
            f"the response is {_shown(response)}; expected id -> probability, or (id, probability) pairs"
        )
    for pair in response:
        if isinstance(pair, str | bytes) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise InvalidDecisionResponse(f"the response holds {_shown(pair)}; expected an (id, probability) pair")
        if not isinstance(pair[0], str) or not pair[0].strip():
            raise InvalidDecisionResponse(f"the response has the id {_shown(pair[0])}; expected the id of an option")
    return [(pair[0], pair[1]) for pair in response]


def _checked(pairs: Any, owner: str) -> Distribution:
    """Return the pairs as a distribution: two or more ids, each once, numbers from 0 to 1 that sum to 1."""
    known = [(key, _probability(value, f"p[{key!r:.80}]")) for key, value in _pairs(pairs)]
    ids = [key for key, _ in known]
    if len(known) < 2:
        raise InvalidDecisionResponse(f"{owner} has {len(known)} of the probabilities; expected at least 2")
    if len(set(ids)) != len(ids):
        raise InvalidDecisionResponse(f"{owner} has an id twice: {listed(ids)}")
    total = math.fsum(value for _, value in known)
    if abs(total - 1.0) > PROBABILITY_TOLERANCE:
        raise InvalidDecisionResponse(
            f"the probabilities of {owner} sum to {total:.9g}; expected 1 within {PROBABILITY_TOLERANCE:g} "
            "(nothing is renormalised: let the provider give a distribution)"
        )
    return tuple(known)


def _probability(value: Any, what: str) -> float:
    number = _finite(value, what)
    if not 0.0 <= number <= 1.0:
        raise InvalidDecisionResponse(f"{what} is {_shown(value)}; expected a number from 0 to 1")
    return number + 0.0  # -0.0 is 0.0


def _finite(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidDecisionResponse(f"{what} is {_shown(value)}; expected a plain number")
    try:
        number = float(value)
    except OverflowError:
        raise InvalidDecisionResponse(f"{what} is too large for a float; expected a plain number") from None
    if not math.isfinite(number):
        raise InvalidDecisionResponse(f"{what} is {number!r}; expected a finite number")
    return number


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return f"a {type(value).__name__} too long to write"
    return text if len(text) <= 80 else text[:77] + "..."
