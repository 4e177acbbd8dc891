"""An operator is a specification that can be called, and `a | b` is the operator that calls one after the other.

Datasets, losses, metrics, trained models and training loops are operators. A class says what calling it does in
`_apply`, and registers itself so that files can name it:

    @register("scale")
    class Scale(Operator):
        factor: float

        def _apply(self, x):
            return x * self.factor

    pipeline = Scale(factor=2.0) | Scale(factor=3.0)     # Sequential of two; pipeline(1.0) == 6.0
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Self, overload

from pydantic import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from nnx_jax.core.errors import ConfigError, NotLoadableError, OperatorTypeError
from nnx_jax.core.hashing import content_hash
from nnx_jax.core.registry import ANY_FAMILY, full_kind, register
from nnx_jax.core.spec import ENVIRONMENT, Keywords, Spec


class Operator(Spec):
    """Base of everything that is configured like a Spec and used like a function.

    A field of this type takes an operator of any family: one that was built, a mapping with a full `kind` (`scale`,
    `loss.mse`), or a bare kind.
    """

    family: ClassVar[str] = ANY_FAMILY
    forbid_in_yaml: ClassVar[bool] = False
    """Whether objects are built in Python only: they can be written, for people to read, and are refused on loading."""
    terminal: ClassVar[bool] = False
    """Whether nothing can follow in a Sequential: the result is no carrier for a next operator."""
    never_called: ClassVar[str] = ""
    """Why an object of this class cannot stand in a Sequential, and what to do instead; "" for one that can."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do the work of the operator: `_apply`."""
        return self._apply(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Do the work; a subclass defines it.

        Raises:
            TypeError: when the class does not say what calling it means.
        """
        raise TypeError(f"{type(self).__name__} does not say what calling it does; define __call__ or _apply in it")

    @property
    def is_stateful(self) -> bool:
        """Whether it is called `(carrier, state) -> (carrier, state)`."""
        return False

    @property
    def is_terminal(self) -> bool:
        """Whether nothing can follow it in a Sequential."""
        return self.terminal

    def output_signature(self, signature: Any) -> Any:
        """Return the signature (`jax.ShapeDtypeStruct`s, or what your carriers need) of the output for an input's.

        The default says that the operator keeps it; override it where shapes or dtypes change.
        """
        return signature

    def __or__(self, other: Any) -> Sequential:
        """Return the flat Sequential of both.

        Raises:
            OperatorTypeError: (a TypeError) `other` is a function, a class, or an operator that cannot stand there.
        """
        if not callable(other):
            return NotImplemented
        return Sequential([*_elements(self), *_elements(other)])

    def content_hash(self) -> str:
        """Return 64 hex digits that change with the class and every field that is not at its default.

        An operator inside takes part with its own `content_hash()`, so the rows of a dataset and the weights of a model
        count wherever it stands. No memory address takes part; environment fields do not either.
        """
        fields = type(self).model_fields
        state = {
            name: self._written(name, value, lambda spec: spec.content_hash())
            for name, value in self.changed().items()
            if not (fields[name].exclude or ENVIRONMENT in fields[name].metadata)
        }
        return content_hash({"class": full_kind(type(self)), "fields": state})

    @classmethod
    def _member(cls, data: Mapping[str, Any]) -> type[Self]:
        found = super()._member(data)
        if not issubclass(found, cls):
            raise ConfigError(f"the kind {data['kind']!r} is {_a(found.__name__)}, which is no {cls.__name__}")
        return found

    @classmethod
    def _normalised(cls, value: Mapping[Any, Any]) -> dict[Any, Any]:
        if cls.forbid_in_yaml and not isinstance(value, Keywords):
            raise NotLoadableError(f"{cls.__name__} cannot be loaded from a file; build it in Python")
        return super()._normalised(value)

    @classmethod
    def _stranger(cls, value: Any) -> Exception:
        return OperatorTypeError(f"got {_told(value)}; expected {_a(cls.__name__)}{_advice(value)}")

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describe a place for any operator by its `kind` only: which kinds there are depends on what is imported."""
        if cls._is_family() and cls.family == ANY_FAMILY:
            kind = {"type": "string"}
            return {"anyOf": [kind, {"type": "object", "properties": {"kind": kind}, "required": ["kind"]}]}
        return super().__get_pydantic_json_schema__(schema, handler)


@register("sequential")
class Sequential(Operator):
    """Operators called one after the other: `Sequential([a, b])` is `a | b`; `a | b | c` is flat.

    Without stateful operators `pipeline(carrier)` returns a carrier. With one, `pipeline(carrier, state)` returns
    `(carrier, state)`: one state goes through all stateful operators in order, the others leave it untouched.

    Raises:
        OperatorTypeError: (a TypeError) an element is no operator or is never called, or a terminal one is not last;
            it names the index.
    """

    operators: tuple[Operator, ...] = ()

    def __new__(cls, operators: Iterable[Any] = (), /, **data: Any) -> Self:
        """See the class; `operators` is the one argument by position."""
        return super().__new__(cls, **data)

    def __init__(self, operators: Iterable[Any] = (), /, **data: Any) -> None:
        """See the class."""
        if isinstance(operators, Operator):
            raise OperatorTypeError(f"a Sequential takes a list: Sequential([{type(operators).__name__}(...), ...])")
        super().__init__(**({"operators": tuple(operators)} | data))

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # errors of a document keep their path

    def problems(self) -> Iterator[tuple[str, str]]:
        """Every operator must be callable, and a terminal one last."""
        yield from super().problems()
        for index, operator in enumerate(self.operators):
            place = f"operators[{index}], {_a(type(operator).__name__)},"
            if operator.never_called:
                raise OperatorTypeError(f"{place} cannot stand in a sequence: {operator.never_called}")
            if operator.is_terminal and index < len(self.operators) - 1:
                raise OperatorTypeError(f"{place} is terminal, so nothing can follow it; put it last")

    @property
    def is_stateful(self) -> bool:
        """Whether an operator inside is stateful."""
        return any(operator.is_stateful for operator in self.operators)

    @property
    def is_terminal(self) -> bool:
        """Whether the last operator is terminal."""
        return bool(self.operators) and self.operators[-1].is_terminal

    def __len__(self) -> int:
        """Return the number of operators."""
        return len(self.operators)

    def __bool__(self) -> bool:
        """Return True: an empty sequence is still an operator."""
        return True

    def __iter__(self) -> Iterator[Operator]:  # type: ignore[override]
        """Iterate over the operators."""
        return iter(self.operators)

    @overload
    def __getitem__(self, index: int) -> Operator: ...
    @overload
    def __getitem__(self, index: slice) -> Sequential: ...
    def __getitem__(self, index: int | slice) -> Operator | Sequential:
        """Return one operator, or the Sequential of a slice."""
        return Sequential(self.operators[index]) if isinstance(index, slice) else self.operators[index]

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Call the operators in order; see the class.

        Args:
            args: the carrier, and the state when an operator is stateful (or `state=`).

        Raises:
            OperatorTypeError: (a TypeError) without a carrier, without the state it needs or with one it has no use
                for, or when a stateful operator returns anything but a pair; it names the index.
        """
        carrier, *rest = _carrier_and_state(self, *args, **kwargs)
        if not rest:
            for operator in self.operators:
                carrier = operator(carrier)
            return carrier
        state = rest[0]
        for index, operator in enumerate(self.operators):
            if not operator.is_stateful:
                carrier = operator(carrier)
                continue
            result = operator(carrier, state)
            if not isinstance(result, tuple) or len(result) != 2:
                name = type(operator).__name__
                message = f"{name} is stateful, so it must return (carrier, state); it returned {_told(result)}"
                raise OperatorTypeError(message, path=f"Sequential.operators[{index}]")
            carrier, state = result
        return carrier, state

    def initial_state(self) -> Any:
        """Return the first stateful operator's initial state, None when there is no such operator."""
        for operator in self.operators:
            if operator.is_stateful and hasattr(operator, "initial_state"):
                return operator.initial_state()  # type: ignore[attr-defined]
        return None

    def output_signature(self, signature: Any) -> Any:
        """Return the last operator's output signature."""
        for operator in self.operators:
            signature = operator.output_signature(signature)
        return signature

    def describe(self) -> str:
        """Return one line an operator, `0: Scale(factor=2.0)`; those of a Sequential inside are indented."""
        return "\n".join(self._lines())

    def summary(self, signature: Any) -> str:
        """Return `describe()` with the signature of each operator's output, from that of the input."""
        lines = [f"input: {signature}"]
        for index, operator in enumerate(self.operators):
            signature = operator.output_signature(signature)
            inner = operator._lines("  ") if isinstance(operator, Sequential) else ()
            lines += [f"{index}: {_head(operator)} -> {signature}", *inner]
        return "\n".join(lines)

    def _lines(self, indent: str = "") -> Iterator[str]:
        for index, operator in enumerate(self.operators):
            yield f"{indent}{index}: {_head(operator)}"
            if isinstance(operator, Sequential):
                yield from operator._lines(indent + "  ")


def _head(operator: Operator) -> str:
    return f"Sequential of {len(operator)}" if isinstance(operator, Sequential) else repr(operator)


def _elements(value: Any) -> Iterable[Any]:
    return value.operators if isinstance(value, Sequential) else (value,)


def _carrier_and_state(pipeline: Sequential, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Return (carrier, state), or (carrier,) for a pipeline that keeps no state, from the arguments of a call."""
    legal = ("carrier", "state")
    given = dict(zip(legal, args, strict=False))
    if len(args) > 2 or set(kwargs) - set(legal) or set(given) & set(kwargs):
        raise OperatorTypeError("a Sequential is called with (carrier) or (carrier, state), each once")
    given |= kwargs
    if "carrier" not in given:
        raise OperatorTypeError("a Sequential needs an input; call it with a carrier")
    if pipeline.is_stateful and "state" not in given:
        raise OperatorTypeError(
            "an operator of this Sequential is stateful; call it with (carrier, state), first with "
            "`state=pipeline.initial_state()`"
        )
    if not pipeline.is_stateful and "state" in given:
        raise OperatorTypeError("no operator of this Sequential keeps a state; call it with the carrier alone")
    return tuple(given[name] for name in legal if name in given)


def _told(value: Any) -> str:
    """Return a value in one short line, without the memory address that a repr may hold."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return f"{value!r:.80} ({type(value).__name__})"
    name = getattr(value, "__qualname__", "")
    return f"the {type(value).__name__} {name}" if name else _a(type(value).__name__)


def _a(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeio' else 'a'} {noun}"


def _advice(value: Any) -> str:
    if isinstance(value, type) and issubclass(value, Operator):
        return f": an object of the class, {value.__name__}(...)"
    if not callable(value):
        return " or a mapping with its kind"
    return (
        ": put what it does into the `_apply` of a registered subclass of Operator, or, for a function at the top of a "
        "module, wrap it: FunctionOperator(function=...)"
    )
