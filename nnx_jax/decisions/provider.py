"""Who answers: anything with capabilities that it declares, and a `decide(question, inputs)`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from nnx_jax.decisions.errors import InvalidDecisionRequest, UnsupportedCapability, listed
from nnx_jax.decisions.questions import Question
from nnx_jax.decisions.results import BooleanResult, ChoiceResult, ScoreResult


@dataclass(frozen=True)
class Capabilities:
    """What a provider can be asked, told before anything is asked.

    Attributes:
        primitives: the kinds of question: "choice", "boolean", "score".
        modalities: the kinds of input, such as "tensor".
        dynamic_labels: whether a request may bring options of its own; if not, they must be exactly `labels`.
        labels: the options of a provider that has its own.
        max_batch: most rows in one call; none: any number.
        inference, training, export: whether it can answer, be trained, be exported.

    Raises:
        InvalidDecisionRequest: (a ValueError) a max_batch below 1.
    """

    primitives: frozenset[str]
    modalities: frozenset[str]
    dynamic_labels: bool = False
    labels: tuple[str, ...] | None = None
    max_batch: int | None = None
    inference: bool = True
    training: bool = False
    export: bool = False

    def __post_init__(self) -> None:
        for name in ("primitives", "modalities"):
            value: Iterable[str] = getattr(self, name)
            object.__setattr__(self, name, frozenset([value] if isinstance(value, str) else value))
        if self.labels is not None:
            object.__setattr__(self, "labels", tuple(self.labels))
        if self.max_batch is not None and (not isinstance(self.max_batch, int) or self.max_batch < 1):
            raise InvalidDecisionRequest(
                f"got {self.max_batch!r}; write a whole number from 1, or none", path="max_batch"
            )

    def check(
        self, question: Question, *, modality: str, batch_size: int, label_ids: Sequence[str] | None = None
    ) -> None:
        """Refuse what is outside these capabilities.

        Args:
            question: what would be asked.
            modality: the kind of input.
            batch_size: how many rows.
            label_ids: the provider's own label of each option, in the question's order; none: the option ids.

        Raises:
            UnsupportedCapability: naming what was asked for and what there is.
        """
        if not self.inference:
            raise UnsupportedCapability("this provider does not answer questions (inference is not among what it can)")
        if question.kind not in self.primitives:
            raise UnsupportedCapability(f"asked a {question.kind}; this provider answers: {listed(self.primitives)}")
        if modality not in self.modalities:
            raise UnsupportedCapability(f"given {modality} inputs; this provider reads: {listed(self.modalities)}")
        if self.max_batch is not None and batch_size > self.max_batch:
            raise UnsupportedCapability(f"given {batch_size} rows; this provider takes {self.max_batch} in a call")
        ids = question.option_ids if label_ids is None else tuple(label_ids)
        if self.dynamic_labels or self.labels is None or not ids:
            return
        if unknown := [label for label in ids if label not in self.labels]:
            raise UnsupportedCapability(
                f"asked about {listed(unknown)}; this provider's labels are {listed(self.labels)}"
            )
        if missing := [label for label in self.labels if label not in ids]:
            raise UnsupportedCapability(
                f"asked without {listed(missing)}; the options must be all of this provider's labels, in any order"
            )


@runtime_checkable
class DecisionProvider(Protocol):
    """Anything that answers typed questions."""

    def capabilities(self) -> Capabilities:
        """Return what can be asked."""
        ...

    def decide(self, question: Question, inputs: Any) -> list[ChoiceResult | BooleanResult | ScoreResult]:
        """Return one validated result for each row of `inputs`, in order.

        Raises:
            UnsupportedCapability: outside what is declared; before any model is called.
            ProviderFailure: (a RuntimeError) the model failed, with its own error as the cause.
        """
        ...
