"""A trained classifier as a provider: the head's classes are the options, `predict_proba` gives the probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from nnx_jax.data.dataset import TrainingDataset
from nnx_jax.decisions.errors import (
    InvalidDecisionRequest,
    InvalidDecisionResponse,
    ProviderFailure,
    UnsupportedCapability,
    listed,
)
from nnx_jax.decisions.provider import Capabilities
from nnx_jax.decisions.questions import Boolean, Choice, Question, Score
from nnx_jax.decisions.results import BooleanResult, ChoiceResult, ScoreResult, validate_response
from nnx_jax.params.model import NNModelParams

Head = Literal["categorical", "bernoulli"]

_HEADS: dict[str | None, Head] = {"classes": "categorical", "bernoulli": "bernoulli"}
_NOT_NUMBERS = "USOMm"  # numpy's kinds of text, objects and dates


class FixedHeadProvider:
    """Answers with the head a classifier was trained with; nothing is trained, and no label is made up.

    A softmax head answers a `Choice` between its classes, and with `ordinal` a `Score` whose levels are its classes in
    their order. A head of one yes/no output answers the one `Boolean` it was trained for. Any other head is refused.

    Args:
        model: an `NNModel`, or anything with a `predict_proba(inputs)` that returns probabilities [N, C] (for a
            `Boolean` [N] or [N, 1]), or an object with `probabilities` and perhaps `logits` of those shapes.
        labels: the name of each class, in the order of the head's outputs. None: the class numbers "0", "1", ..., when
            the model says how many outputs it has.
        option_map: option id -> label, one to one and onto; None: an option's id is its label.
        ordinal: whether the order of the classes means something, lowest first.
        max_batch: most rows in one call.
        name: recorded in every result.
        question: the `Boolean` that a yes/no head was trained for.

    Attributes:
        model_calls: how often the model was called; checks come before, so a refused request does not count.

    Raises:
        InvalidDecisionRequest: (a ValueError) labels that do not fit the head, an `option_map` that is not one to one
            and onto, a yes/no head without its `question`.
        UnsupportedCapability: a head of values, or of several yes/no outputs: it decides nothing by itself.
    """

    def __init__(
        self,
        model: Any,
        labels: Sequence[str] | None = None,
        option_map: Mapping[str, str] | None = None,
        ordinal: bool = False,
        max_batch: int | None = None,
        name: str = "nnx.fixed_head",
        question: Boolean | None = None,
    ) -> None:
        if not callable(getattr(model, "predict_proba", None)):
            raise _refused("model", f"got a {type(model).__name__} without predict_proba; give a trained classifier")
        if isinstance(labels, str | bytes):
            raise _refused("labels", f"got the text {labels!r}; write a list with the name of each class")
        self.model, self.name, self.question = model, name, question
        self.model_calls = 0
        self._task = _task_of(model)
        self._head: Head = _head_of(self._task, question)
        width = _width_of(model)
        named = None if labels is None else tuple(labels)
        if self._head == "bernoulli":
            self.labels, self.option_map, self.ordinal = named, None, False
            _check_yes_no(named, width, question, option_map, ordinal)
        else:
            if question is not None:
                message = "a Boolean is for a head of one yes/no output; ask this head a Choice or a Score"
                raise _refused("question", message)
            self.labels = _class_labels(named, width)
            self.option_map = None if option_map is None else _one_to_one(option_map, self.labels)
            self.ordinal = bool(ordinal)
        many = ("choice", "score") if self.ordinal else ("choice",)
        self._capabilities = Capabilities(
            primitives=frozenset(("boolean",) if self._head == "bernoulli" else many),
            modalities=frozenset(("tensor",)),
            labels=self.labels,
            max_batch=max_batch,
            training=callable(getattr(model, "train", None)),
            export=callable(getattr(model, "export_state_dict", None)),
        )

    def capabilities(self) -> Capabilities:
        """Return what can be asked of this head."""
        return self._capabilities

    def check(self, question: Question, inputs: Any) -> None:
        """Make every check that `decide` makes before it calls the model.

        Raises:
            InvalidDecisionRequest: (a ValueError) `question` is no question.
            UnsupportedCapability: another kind of question or input, too many rows, other labels, another `Boolean`,
                levels in another order than the classes.
        """
        if not isinstance(question, Choice | Boolean | Score):
            raise _refused("question", f"got a {type(question).__name__}; write a Choice, a Boolean or a Score")
        modality, rows = _read(inputs)
        wanted = self._wanted(question)
        self._capabilities.check(question, modality=modality, batch_size=rows, label_ids=wanted)
        if self.question is not None and question.digest() != self.question.digest():
            raise UnsupportedCapability(
                f"asked {question.prompt!r}; this head answers the one question it was trained for, "
                f"{self.question.prompt!r}, word for word"
            )
        if isinstance(question, Score) and wanted != self.labels:
            raise UnsupportedCapability(
                f"the levels are {listed(wanted or ())}; they must be in the order of the head's classes: "
                f"{listed(self.labels or ())}"
            )

    def decide(self, question: Question, inputs: Any) -> list[ChoiceResult | BooleanResult | ScoreResult]:
        """Return one result for each row of `inputs`, in order.

        `raw` of a result is the model's own row: its logits where it gives them, else its probabilities.

        Args:
            question: what is asked of each row.
            inputs: rows [N, ...], an array of any framework, or a dataset. No row, no answer and no call.

        Raises:
            InvalidDecisionRequest, UnsupportedCapability: before the model is called, see `check`; or the head turned
                out to have another number of outputs than labels.
            ProviderFailure: (a RuntimeError) the model raised; its error is the `__cause__`.
            InvalidDecisionResponse: (a ValueError) what the model gave are no probabilities.
        """
        self.check(question, inputs)
        rows = _read(inputs)[1]
        if rows == 0:
            return []
        raw, chances = self._predict(inputs, rows)
        answers = self._keyed(question, chances)
        return [
            validate_response(question, answer, provider=self.name, raw=np.array(row))
            for answer, row in zip(answers, raw, strict=True)
        ]

    def _predict(self, inputs: Any, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Call the model; return what it gave, as it gave it, and the probabilities in float64: both [N, ...]."""
        self.model_calls += 1
        try:
            prediction = self.model.predict_proba(inputs, *self._spec())
        except Exception as error:
            raise ProviderFailure(f"{self.name}: the model failed: {error}") from error
        logits = getattr(prediction, "logits", None)
        try:
            raw = np.asarray(getattr(prediction, "probabilities", prediction) if logits is None else logits)
            wide = raw.astype(np.float64)
        except (TypeError, ValueError, RuntimeError) as error:
            message = f"{self.name} gave a {type(prediction).__name__} that holds no probabilities: {error}"
            raise InvalidDecisionResponse(message) from error
        if wide.ndim == 0 or len(wide) != rows:
            raise InvalidDecisionResponse(f"{self.name} gave values of shape {list(wide.shape)} for {rows} rows")
        return raw, wide if logits is None else _from_logits(wide, self._head)

    def _spec(self) -> tuple[Any, ...]:
        """What `predict_proba` must be told besides: how to read the outputs, when the model's loss is the user's."""
        if self._task != "own":
            return ()
        from nnx_jax.engines.inference import ProbabilitySpec  # imports jax, which the model has done already

        return (ProbabilitySpec(self._head),)

    def _wanted(self, question: Question) -> tuple[str, ...] | None:
        """Return the head's label of each option, in the question's order."""
        if self.option_map is None:
            return question.option_ids or None
        if unknown := [known for known in question.option_ids if known not in self.option_map]:
            raise UnsupportedCapability(f"asked about {listed(unknown)}; option_map knows {listed(self.option_map)}")
        return tuple(self.option_map[known] for known in question.option_ids) or None

    def _keyed(self, question: Question, chances: np.ndarray) -> Iterator[Any]:
        """Yield each row's probabilities [N, C] as the response that the question expects."""
        if self._head == "bernoulli":
            if chances.size != len(chances):
                raise UnsupportedCapability(
                    f"the head gave {list(chances.shape[1:])} yes/no values a row; a Boolean needs a head of one output"
                )
            yield from map(float, chances.reshape(-1))
            return
        labels = self.labels or ()
        if chances.ndim != 2 or chances.shape[1] != len(labels):
            raise _refused("labels", f"{len(labels)} labels for {list(chances.shape[1:])} values a row; give one each")
        columns = [labels.index(label) for label in self._wanted(question) or ()]
        for row in chances:
            yield {known: float(row[column]) for known, column in zip(question.option_ids, columns, strict=True)}


def _task_of(model: Any) -> str | None:
    """Return how the model's loss reads its outputs ("own": it does not say), or None for a stranger's model."""
    loss = getattr(model, "loss", None)
    if isinstance(task := getattr(loss, "task", None), str):
        return task
    if not isinstance(getattr(model, "params", None), NNModelParams):
        return None
    from nnx_jax.objectives.losses import build_loss  # imports jax, which the model has done already

    return build_loss(loss).task


def _head_of(task: str | None, question: Boolean | None) -> Head:
    if task == "values":
        raise UnsupportedCapability("the model was trained to give values; such a head answers no typed question")
    return _HEADS.get(task) or ("categorical" if question is None else "bernoulli")


def _width_of(model: Any) -> int | None:
    """Return the number of outputs a row, where it is known before the model is called."""
    state = getattr(model, "net_state", None)
    width = state.get("output_dim") if isinstance(state, Mapping) else None
    return width if isinstance(width, int) else None


def _check_yes_no(
    labels: tuple[str, ...] | None, width: int | None, question: Any, option_map: Any, ordinal: bool
) -> None:
    """A yes/no head has one output and is bound to the question it was trained for."""
    for count in (width, None if labels is None else len(labels)):
        if count not in (None, 1):
            raise UnsupportedCapability(f"a head of {count} yes/no outputs answers no single question; one output does")
    if question is None:
        raise _refused("question", "a yes/no head has one probability, which answers one Boolean; give that Boolean")
    if not isinstance(question, Boolean):
        raise _refused("question", f"got a {type(question).__name__}; write the Boolean this head was trained for")
    for name, value in (("option_map", option_map), ("ordinal", ordinal)):
        if value:
            raise _refused(name, "is for a head of several classes; a yes/no head answers with one probability")


def _class_labels(labels: tuple[str, ...] | None, width: int | None) -> tuple[str, ...]:
    if labels is None and width is None:
        raise _refused("labels", "is required: the model does not say how many classes it has; name each, in order")
    found = tuple(map(str, range(width or 0))) if labels is None else labels
    for index, label in enumerate(found):
        if not isinstance(label, str) or not label or label != label.strip():
            raise _refused(f"labels[{index}]", f"got {label!r:.80}; write text without white space around it")
        if label in found[:index]:
            raise _refused(f"labels[{index}]", f"{label!r} names two classes; give every one its own")
    if len(found) < 2:
        raise _refused("labels", f"{len(found)} class leaves nothing to choose; a Choice needs a head of 2 or more")
    if width is not None and width != len(found):
        raise _refused("labels", f"{len(found)} labels for a head of {width} classes; give one each, in order")
    return found


def _one_to_one(option_map: Mapping[str, str], labels: tuple[str, ...]) -> dict[str, str]:
    """Return the map from option ids onto all labels."""
    if not isinstance(option_map, Mapping):
        raise _refused("option_map", f"got a {type(option_map).__name__}; write a mapping of option id to label")
    targets = list(option_map.values())
    if len(targets) != len(labels) or any(targets.count(label) != 1 for label in labels):
        raise _refused("option_map", f"maps onto {listed(targets)}; it must name each of {listed(labels)} exactly once")
    return dict(option_map)


def _read(inputs: Any) -> tuple[str, int]:
    """Return the modality and the number of rows."""
    if isinstance(inputs, TrainingDataset):
        return "tensor", len(inputs)
    shape = getattr(inputs, "shape", None)
    if shape is None or getattr(getattr(inputs, "dtype", None), "kind", "f") in _NOT_NUMBERS:
        what = type(inputs).__name__ if shape is None else f"{inputs.dtype} array"
        raise UnsupportedCapability(f"given a {what}; this provider reads arrays of numbers (numpy.asarray(rows))")
    if len(shape) == 0:
        raise UnsupportedCapability("given a single number; this provider reads rows, an array [N, ...]")
    return "tensor", int(shape[0])


def _from_logits(logits: np.ndarray, head: Head) -> np.ndarray:
    """Return float64 probabilities [N, ...] of float64 logits; of infinite ones not a number, which no answer holds."""
    with np.errstate(invalid="ignore"):
        if head == "bernoulli":
            return np.exp(-np.logaddexp(0.0, -logits))
        powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return powers / powers.sum(axis=-1, keepdims=True)


def _refused(path: str, message: str) -> InvalidDecisionRequest:
    return InvalidDecisionRequest(message, path=path)
