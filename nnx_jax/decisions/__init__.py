"""Typed questions over a trained model: ask a `Choice`, a `Boolean` or a `Score`, get checked probabilities back.

Beside the training path: nothing here trains, and importing it loads no framework.
"""

from nnx_jax.decisions.errors import (
    DecisionError,
    InvalidDecisionRequest,
    InvalidDecisionResponse,
    ProviderFailure,
    UnsupportedCapability,
)
from nnx_jax.decisions.fixed_head import FixedHeadProvider
from nnx_jax.decisions.provider import Capabilities, DecisionProvider
from nnx_jax.decisions.questions import Boolean, Choice, Option, Question, Score, load_question, question_from_state
from nnx_jax.decisions.results import (
    PROBABILITY_TOLERANCE,
    BooleanResult,
    ChoiceResult,
    DecisionResult,
    ScoreResult,
    validate_response,
)

__all__ = [
    "PROBABILITY_TOLERANCE",
    "Boolean",
    "BooleanResult",
    "Capabilities",
    "Choice",
    "ChoiceResult",
    "DecisionError",
    "DecisionProvider",
    "DecisionResult",
    "FixedHeadProvider",
    "InvalidDecisionRequest",
    "InvalidDecisionResponse",
    "Option",
    "ProviderFailure",
    "Question",
    "Score",
    "ScoreResult",
    "UnsupportedCapability",
    "load_question",
    "question_from_state",
    "validate_response",
]
