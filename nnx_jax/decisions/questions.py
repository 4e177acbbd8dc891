"""Typed questions: which option, yes or no, which level; each frozen, and known by a digest of every word in it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BeforeValidator, PrivateAttr

from nnx_jax.core.codec import load_yaml_with_lines
from nnx_jax.core.errors import ConfigError, UnsafePathError, nearest
from nnx_jax.core.registry import kinds, register
from nnx_jax.core.spec import Spec
from nnx_jax.decisions.errors import InvalidDecisionRequest, as_request

_FAMILY = "question"


def _quoted(value: Any) -> Any:
    if isinstance(value, bool | int | float):
        written = str(value).lower() if isinstance(value, bool) else value
        raise ValueError(f"expected text; in a file put it in quotes: '{written}'")
    return value


def _words(text: str) -> str:
    if not text.strip():
        raise ValueError("expected text that is not blank")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair; write the whole character") from None
    return text


def _id(text: str) -> str:
    if _words(text) != text.strip():
        raise ValueError("expected an id without white space around it")
    return text


Words = Annotated[str, BeforeValidator(_quoted), AfterValidator(_words)]
Id = Annotated[str, BeforeValidator(_quoted), AfterValidator(_id)]


class _Asked(Spec):
    """What questions and their options share: a malformed one is an InvalidDecisionRequest, however it is made."""

    def __new__(cls, /, *args: Any, **fields: Any) -> Self:
        """Allow the fields by position, which other specifications do not."""
        return super().__new__(cls, **fields)

    def __init__(self, /, **fields: Any) -> None:
        with as_request():
            super().__init__(**fields)

    # pydantic: validate nested values against the fields, without calling this constructor.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def from_state(cls, state: Any, **origin: Any) -> Self:
        """Return the object a `state()` describes; see `Spec.from_state`.

        Raises:
            InvalidDecisionRequest: listing every problem with its file, line and path.
        """
        with as_request():
            return super().from_state(state, **origin)

    @classmethod
    def from_yaml(cls, text: str | bytes, *, source: str = "<text>") -> Self:
        """Return the object written in `text`.

        Raises:
            InvalidDecisionRequest: for text that is not strict YAML, or no question.
        """
        with as_request():
            return super().from_yaml(text, source=source)


class Option(_Asked):
    """One answer of a `Choice`, or one level of a `Score`: `Option(id, description)`.

    Raises:
        InvalidDecisionRequest: (a ValueError) a blank text, or white space around the id.
    """

    id: Id
    """What results are keyed by; never shown to a model."""
    description: Words
    """What a model is shown."""

    def __init__(self, id: str, description: str, **unknown: Any) -> None:
        super().__init__(id=id, description=description, **unknown)

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


def _option(value: Any) -> Any:
    """Take `(id, description)` for an Option."""
    if isinstance(value, str):
        raise ValueError("a bare text says no id; write the pair [id, description]")
    if isinstance(value, tuple):
        if len(value) != 2:
            raise ValueError(f"has {len(value)} items; write the pair [id, description]")
        return {"id": value[0], "description": value[1]}
    return value


def _listed(value: Any) -> Any:
    """Take `{id: description}` for a list of options."""
    return tuple(value.items()) if isinstance(value, Mapping) else value


Options = Annotated[tuple[Annotated[Option, BeforeValidator(_option)], ...], BeforeValidator(_listed)]
GivenOptions = Sequence[Option | tuple[str, str]] | Mapping[str, str]


class Question(_Asked):
    """Family `question`: `Choice`, `Boolean` or `Score`; equal words in the same order, equal question."""

    family: ClassVar[str] = _FAMILY

    prompt: Words
    """What is asked."""

    _digest: str | None = PrivateAttr(default=None)

    def __init__(self, /, **fields: Any) -> None:
        super().__init__(**fields)

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @property
    def answers(self) -> tuple[Option, ...]:
        """The options or levels in the question's order; none for a yes/no question."""
        return ()

    @property
    def option_ids(self) -> tuple[str, ...]:
        """The ids that an answer is keyed by, in the question's order."""
        return tuple(option.id for option in self.answers)

    def digest(self) -> str:
        """Return 64 hex digits: SHA-256 of the compact sorted JSON of `state()`, so of every word and of the order."""
        if self._digest is None:
            self._digest = self.content_hash()
        return self._digest

    def model_view(self) -> dict[str, Any]:
        """Return what a model may see: the prompt and the descriptions in order, never an id."""
        return {"prompt": self.prompt}

    @classmethod
    def from_state(cls, state: Any, **origin: Any) -> Self:
        """Return the question a `state()` describes, of the class its `kind` names; see `question_from_state`."""
        if cls is Question:
            _check_kind(state, origin.get("source"), origin.get("lines") or {})
        return super().from_state(state, **origin)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Two options or more, each id once."""
        yield from super().problems()
        field = next((name for name in type(self).model_fields if name != "prompt"), None)
        if field is None:
            return
        ids = self.option_ids
        if len(ids) < 2:
            yield field, f"a question with {len(ids)} of them has nothing to decide; write at least 2"
        for index, known in enumerate(ids):
            if known in ids[:index]:
                yield f"{field}[{index}]", f"the id {known!r} is given twice; give every one its own"


@register("choice")
class Choice(Question):
    """Which of two or more options: `Choice(prompt, options)`; answered by one probability for each option.

    `options` are `Option`s, `(id, description)` pairs, or one mapping of id to description.

    Raises:
        InvalidDecisionRequest: (a ValueError) blank text, fewer than two options, an id given twice, a bare text.
    """

    options: Options
    """The possible answers; their order counts."""

    def __init__(self, prompt: str, options: GivenOptions, **unknown: Any) -> None:
        super().__init__(prompt=prompt, options=options, **unknown)

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @property
    def answers(self) -> tuple[Option, ...]:
        """The options, in order."""
        return self.options

    def state(self, *, environment: bool = False) -> dict[str, Any]:
        """Return plain values; an option is the pair `[id, description]`."""
        return {**super().state(environment=environment), "options": _pairs(self.options)}

    def model_view(self) -> dict[str, Any]:
        """Return prompt and option descriptions."""
        return {**super().model_view(), "options": [option.description for option in self.options]}


@register("boolean")
class Boolean(Question):
    """Yes or no: `Boolean(prompt)`; answered by the probability of yes.

    Raises:
        InvalidDecisionRequest: (a ValueError) a blank prompt.
    """

    def __init__(self, prompt: str, **unknown: Any) -> None:
        super().__init__(prompt=prompt, **unknown)

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


@register("score")
class Score(Question):
    """Which of two or more ordered levels, lowest first: `Score(prompt, levels)`; one probability for each level.

    The order of the levels means something, the distance between two of them does not. `levels` are given as the
    options of a `Choice` are.

    Raises:
        InvalidDecisionRequest: (a ValueError) blank text, fewer than two levels, an id given twice, a bare text.
    """

    levels: Options
    """The levels, lowest first."""

    def __init__(self, prompt: str, levels: GivenOptions, **unknown: Any) -> None:
        super().__init__(prompt=prompt, levels=levels, **unknown)

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @property
    def answers(self) -> tuple[Option, ...]:
        """The levels, lowest first."""
        return self.levels

    def state(self, *, environment: bool = False) -> dict[str, Any]:
        """Return plain values; a level is the pair `[id, description]`."""
        return {**super().state(environment=environment), "levels": _pairs(self.levels)}

    def model_view(self) -> dict[str, Any]:
        """Return prompt and level descriptions."""
        return {**super().model_view(), "levels": [level.description for level in self.levels]}


def question_from_state(
    state: Any, *, source: str | None = None, lines: Mapping[tuple[Any, ...], int] | None = None
) -> Question:
    """Return the question that plain values describe: `{kind: choice, prompt: ..., options: ...}`.

    Args:
        state: what `Question.state()` gives, or a YAML file holds.
        source: file to name in errors.
        lines: line of each path in that file.

    Raises:
        InvalidDecisionRequest: (a ValueError) with every problem and its place.
    """
    return Question.from_state(state, source=source, lines=lines)


def load_question(path: str | os.PathLike[str]) -> Question:
    """Return the question that a YAML file holds (a link is followed).

    Raises:
        InvalidDecisionRequest: (a ValueError) the file cannot be read, or with every problem, its line and path.
    """
    source = os.fspath(path)
    with as_request():
        try:
            state, lines = load_yaml_with_lines(path, follow=True)
        except (OSError, UnsafePathError) as error:
            reason = getattr(error, "strerror", None) or error.args[0]
            raise ConfigError(f"cannot be read ({reason}); give the path of a YAML file", file=source) from error
    return question_from_state(state, source=source, lines=lines)


def _pairs(options: tuple[Option, ...]) -> list[list[str]]:
    return [[option.id, option.description] for option in options]


def _check_kind(state: Any, source: str | None, lines: Mapping[tuple[Any, ...], int]) -> None:
    """There are three kinds and no others, so the registry's hint at classes of your own would lead astray."""
    known = ", ".join(kinds(_FAMILY))
    if isinstance(state, Question):
        return
    if not isinstance(state, Mapping):
        found = "nothing" if state is None else f"a {type(state).__name__}"
        message = f"holds {found}; expected a mapping with a kind ({known}) and a prompt"
        raise InvalidDecisionRequest(message, file=source, line=lines.get(()))
    if "kind" not in state:
        raise InvalidDecisionRequest(f"is required: one of {known}", path="kind", file=source, line=lines.get(()))
    kind = state["kind"]
    if kind not in kinds(_FAMILY):
        message = f"there is no question kind {kind!r:.80}{nearest(kind, kinds(_FAMILY))}"
        raise InvalidDecisionRequest(message, path="kind", file=source, line=lines.get(("kind",)))
