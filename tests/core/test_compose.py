"""Sequences of operators: flat, indexed, threaded with one state, refused where they could not run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnx_jax.core.errors import ConfigError, OperatorTypeError
from nnx_jax.core.operator import Operator, Sequential
from nnx_jax.core.registry import register
from nnx_jax.core.stateful import CarryState, StatefulOperator


@register("seq_scale", replace=True)
class Scale(Operator):
    factor: float = 1.0

    def _apply(self, x: Any) -> Any:
        return x * self.factor


class Shift(Operator):
    """Defines `__call__` itself, as datasets, losses and models do."""

    by: float = 0.0

    def __call__(self, x: Any) -> Any:
        return x + self.by


class Save(Operator):
    terminal: ClassVar[bool] = True

    def _apply(self, x: Any) -> str:
        return f"saved {x}"


class Rows(Operator):
    never_called: ClassVar[str] = "rows are iterated; map an operator over them"


@dataclasses.dataclass(frozen=True)
class Sums(CarryState):
    total: float = 0.0
    calls: int = 0


@register("seq_add_up", replace=True)
class AddUp(StatefulOperator):
    """Adds its carrier to the total and hands the carrier on, negated."""

    start: float = 0.0

    def initial_state(self) -> Sums:
        return Sums(total=self.start)

    def _apply(self, carrier: Any, state: Sums) -> tuple[Any, Sums]:
        return -carrier, state.replace(total=state.total + carrier, calls=state.calls + 1)


def test_the_operators_are_called_in_order() -> None:
    assert Sequential([Scale(factor=3.0), Shift(by=1.0)])(2.0) == 7.0
    assert (Shift(by=1.0) | Scale(factor=3.0))(2.0) == 9.0
    assert Sequential([Scale(factor=3.0)])(carrier=2.0) == 6.0


def test_the_bar_is_associative_and_flat() -> None:
    """pipekit:A10: both groupings have length 3 and are equal; an index gives the operator, a slice a Sequential."""
    a, b, c = Scale(factor=2.0), Shift(by=1.0), Scale(factor=5.0)
    left, right = (a | b) | c, a | (b | c)
    assert len(left) == len(right) == 3
    assert left == right
    assert left.content_hash() == right.content_hash()
    assert list(left) == [a, b, c]
    assert left[0] is a
    assert left[-1] is c
    assert isinstance(left[:1], Sequential)
    assert len(left[:1]) == 1
    assert left[1:](1.0) == 10.0
    assert left[::-1](1.0) == (5.0 + 1.0) * 2.0
    with pytest.raises(IndexError):
        left[3]


@settings(max_examples=40)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=6), st.data())
def test_every_grouping_of_a_chain_is_the_same(kinds: list[int], data: st.DataObject) -> None:
    """pipekit:A10: fold the chain anywhere; the result is the flat sequence."""
    makes = (lambda i: Scale(factor=i + 1.0), lambda i: Shift(by=float(i)), lambda i: AddUp(start=float(i)))
    parts = [makes[kind](index) for index, kind in enumerate(kinds)]
    groups: list[Any] = list(parts)
    while len(groups) > 1:
        at = data.draw(st.integers(0, len(groups) - 2))
        groups[at : at + 2] = [groups[at] | groups[at + 1]]
    assert groups[0] == Sequential(parts)


def test_a_sequence_given_as_an_element_stays_one() -> None:
    inner = Sequential([Scale(factor=2.0), Shift(by=1.0)])
    outer = Sequential([inner, Scale(factor=10.0)])
    assert len(outer) == 2
    assert outer(1.0) == 30.0
    assert outer != inner | Scale(factor=10.0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Sequential([1]), r"Sequential\.operators\[0\]: got 1 \(int\); expected an Operator"),
        (lambda: Sequential([Scale(), abs]), r"Sequential\.operators\[1\]: got the \w+ abs; .*FunctionOperator"),
        (lambda: Sequential([Scale(), Scale]), r"operators\[1\]: .*an object of the class, Scale\(\.\.\.\)"),
        (lambda: Sequential([Save(), Scale()]), r"operators\[0\], a Save, is terminal, so nothing can follow it"),
        (lambda: Sequential([Save()]) | Scale(), r"operators\[0\], a Save, is terminal"),
        (lambda: Sequential([Sequential([Save()]), Scale()]), r"operators\[0\], a Sequential, is terminal"),
        (lambda: Sequential([Scale(), Rows()]), r"operators\[1\], a Rows, cannot stand in a sequence: rows are iter"),
        (lambda: Sequential(Scale()), r"a Sequential takes a list: Sequential\(\[Scale\(\.\.\.\), \.\.\.\]\)"),
        (lambda: Scale() | abs, r"operators\[1\]: got the \w+ abs; .*_apply"),
        (lambda: Scale() | Scale, r"operators\[1\]: .*an object of the class"),
    ],
)
def test_what_cannot_run_is_refused_with_its_index(build: Callable[[], object], message: str) -> None:
    """pipekit:A11: an element that is no operator, or a terminal one before the last, is a TypeError."""
    with pytest.raises(TypeError, match=message) as caught:
        build()
    assert isinstance(caught.value, ConfigError)


def test_a_terminal_operator_is_fine_as_the_last() -> None:
    """pipekit:A11: as the last one a terminal operator is accepted, and its result is the result."""
    pipeline = Scale(factor=2.0) | Save()
    assert pipeline(1.5) == "saved 3.0"
    assert pipeline.is_terminal
    assert not pipeline[:1].is_terminal


def test_a_class_with_its_own_bar_on_the_right_is_asked() -> None:
    class Right:
        def __ror__(self, left: Operator) -> str:
            return f"after {type(left).__name__}"

    assert Scale() | Right() == "after Scale"
    for other in ({"a": 1}, 3, None):
        with pytest.raises(TypeError, match="unsupported operand"):
            Scale() | other


def test_the_empty_sequence_is_the_identity() -> None:
    """pipekit:A12: without an input a TypeError; with one, the input."""
    empty = Sequential([])
    assert empty(5) == 5
    assert bool(empty)
    assert len(empty) == 0
    assert not empty.is_terminal
    with pytest.raises(TypeError, match="needs an input"):
        empty()
    assert len(empty | Scale()) == 1


def test_a_stateful_operator_needs_a_state() -> None:
    """pipekit:A13: without `state` a TypeError that names it; with one, the pair (carrier, state)."""
    pipeline = Scale(factor=2.0) | AddUp()
    with pytest.raises(TypeError, match="state"):
        pipeline(1.0)
    assert pipeline(1.0, Sums()) == (-2.0, Sums(total=2.0, calls=1))
    assert pipeline(1.0, state=Sums()) == pipeline(carrier=1.0, state=Sums())
    assert pipeline.is_stateful
    assert not pipeline[:1].is_stateful


def test_the_state_goes_through_all_stateful_operators() -> None:
    """pipekit:A15: two that add their carrier leave the sum of both; each sees the carrier of the one before.

    By hand: 3 -> total 3, carrier -3 -> times 2 is -6 -> total -3, carrier 6.
    """
    pipeline = AddUp() | Scale(factor=2.0) | AddUp()
    assert pipeline(3.0, Sums()) == (6.0, Sums(total=-3.0, calls=2))
    carrier, state = 3.0, Sums()
    for _ in range(2):
        carrier, state = pipeline(carrier, state)
    assert (carrier, state) == (12.0, Sums(total=-3.0 + 6.0 - 12.0, calls=4))


def test_stateless_operators_leave_the_state_alone() -> None:
    """pipekit:A14: between stateful ones the state passes untouched, as the same object."""
    seen: list[object] = []

    class Sees(StatefulOperator):
        def _apply(self, carrier: Any, state: Any) -> tuple[Any, Any]:
            seen.append(state)
            return carrier, state

    state = object()
    pipeline = Sequential([Sees(), Scale(factor=2.0), Sequential([Shift(by=1.0), Sees()]), Scale()])
    assert pipeline(1.0, state) == (3.0, state)
    assert seen == [state, state]


def test_none_is_a_state() -> None:
    class Starts(StatefulOperator):
        def _apply(self, carrier: Any, state: Any) -> tuple[Any, Any]:
            return carrier, (state or 0) + 1

    assert Sequential([Starts(), Starts()])(None, None) == (None, 2)
    assert Starts().initial_state() is None


def test_the_initial_state_is_that_of_the_first_stateful_operator() -> None:
    assert (Scale() | AddUp(start=2.0) | AddUp(start=5.0)).initial_state() == Sums(total=2.0)
    assert Sequential([Sequential([Scale()]), Sequential([AddUp(start=3.0)])]).initial_state() == Sums(total=3.0)
    assert Scale().__or__(Shift()).initial_state() is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Sequential([Scale()])(1.0, Sums()), "no operator of this Sequential keeps a state"),
        (lambda: Sequential([AddUp()])(1.0, Sums(), 3), "each once"),
        (lambda: Sequential([AddUp()])(1.0, carrier=2.0, state=Sums()), "each once"),
        (lambda: Sequential([Scale()])(1.0, factor=2.0), "each once"),
    ],
)
def test_a_call_with_other_arguments_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(OperatorTypeError, match=message):
        call()


@pytest.mark.parametrize(("result", "told"), [(3.0, r"3\.0 \(float\)"), ((1, 2, 3), "a tuple"), ([1, 2], "a list")])
def test_a_stateful_operator_that_returns_no_pair_is_named(result: object, told: str) -> None:
    class Forgets(StatefulOperator):
        def _apply(self, carrier: Any, state: Any) -> Any:
            return result

    with pytest.raises(
        TypeError, match=rf"operators\[1\]: Forgets .* must return \(carrier, state\); it returned {told}"
    ):
        Sequential([Scale(), Forgets()])(1.0, None)


def test_a_stateful_operator_without_a_meaning_says_so() -> None:
    class Bare(StatefulOperator):
        pass

    with pytest.raises(TypeError, match="Bare does not say what calling it does"):
        Bare()(1.0, None)


def test_a_place_for_a_stateful_operator_takes_no_other() -> None:
    class Steps(Operator):
        step: StatefulOperator

    assert isinstance(Steps(step={"kind": "seq_add_up", "start": 2.0}).step, AddUp)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"Steps\.step: .*the kind 'seq_scale' is a Scale, which is no StatefulOperator"
    ):
        Steps(step="seq_scale")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Steps\.step: got a Scale; expected a StatefulOperator"):
        Steps(step=Scale())  # type: ignore[arg-type]


def test_a_sequence_describes_itself() -> None:
    pipeline = Sequential([Scale(factor=2.0), Sequential([Shift(by=1.0), AddUp()]), Save()])
    assert pipeline.describe() == (
        "0: Scale(factor=2.0)\n1: Sequential of 2\n  0: Shift(by=1.0)\n  1: AddUp(start=0.0)\n2: Save()"
    )
    assert Sequential([]).describe() == ""


def test_a_summary_follows_the_signature() -> None:
    class Flatten(Operator):
        def output_signature(self, signature: Any) -> Any:
            return SimpleNamespace(shape=(signature.shape[0], int(np.prod(signature.shape[1:]))))

    pipeline = Sequential([Scale(factor=2.0), Sequential([Flatten(), Shift()])])
    image = SimpleNamespace(shape=(8, 2, 3))
    assert pipeline.output_signature(image).shape == (8, 6)
    assert pipeline.summary(image) == (
        "input: namespace(shape=(8, 2, 3))\n"
        "0: Scale(factor=2.0) -> namespace(shape=(8, 2, 3))\n"
        "1: Sequential of 2 -> namespace(shape=(8, 6))\n"
        "  0: Flatten()\n"
        "  1: Shift(by=0.0)"
    )


def test_a_sequence_is_built_like_any_specification() -> None:
    pipeline = Sequential(operators=[Scale(factor=2.0), {"kind": "seq_scale"}, "seq_scale"])
    assert pipeline == Sequential([Scale(factor=2.0), Scale(), Scale()])
    assert pipeline.replace(operators=(Scale(),)) == Sequential([Scale()])
    assert Operator(kind="sequential", operators=(Scale(),)) == Sequential([Scale()])  # type: ignore[call-arg]
    assert pipeline.get_config() == {
        "operators": [{"kind": "seq_scale", "factor": factor} for factor in (2.0, 1.0, 1.0)],
    }
