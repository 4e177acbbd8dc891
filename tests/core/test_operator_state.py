"""Carried states: frozen dataclasses that are pytrees, compared field by field, hashed where that can be."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_jax.core.errors import ConfigError
from nnx_jax.core.stateful import CarryState, register_pytrees


@dataclasses.dataclass(frozen=True)
class Mean(CarryState):
    total: Any = 0.0
    count: int = 0
    label: str = dataclasses.field(default="mean", metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class Other(CarryState):
    total: Any = 0.0
    count: int = 0
    label: str = "mean"


@dataclasses.dataclass(frozen=True)
class Needs(CarryState):
    sums: Any
    names: tuple[str, ...] = ()


@pytest.mark.parametrize(
    "state",
    [Mean(), Mean(total=2.5, count=3), Needs(sums={"a": [1, 2]}, names=("a",)), Needs(sums=None)],
)
def test_a_state_comes_back_from_its_dictionary(state: CarryState) -> None:
    """pipekit:A16: from_dict(to_dict(s)) == s."""
    assert type(state).from_dict(state.to_dict()) == state


def test_the_dictionary_holds_the_values_as_they_are() -> None:
    array = np.arange(3)
    assert Needs(sums=array).to_dict() == {"sums": array, "names": ()}
    assert Needs(sums=array).to_dict()["sums"] is array
    assert Mean.from_dict({"count": 2}) == Mean(count=2)


def test_states_of_other_types_differ() -> None:
    """pipekit:A16: two classes with equal fields are not equal, nor is a dict."""
    assert Mean() != Other()
    assert Mean() != {"total": 0.0, "count": 0, "label": "mean"}
    assert Mean() != Mean(count=1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sums": 1, "nams": ()}, r"Needs has no field 'nams'; did you mean 'names'"),
        ({"names": ()}, "Needs needs sums"),
    ],
)
def test_a_dictionary_that_does_not_fit_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Needs.from_dict(values)


A = np.array([1.0, 2.0])
KEY = jax.random.key(0)


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (A, A.copy(), True),
        (A, np.array([1.0, 3.0]), False),
        (A, np.array([1.0]), False),
        (A, A[None], False),
        (A, A.astype(np.float32), False),
        (A.astype(np.float32), jnp.asarray(A, jnp.float32), True),
        (A, [1.0, 2.0], False),
        ([1.0, 2.0, 3.0], A, False),
        (A, None, False),
        ({"w": A, "b": (A, 1)}, {"w": A.copy(), "b": (A.copy(), 1)}, True),
        ({"w": A, "b": (A, 1)}, {"w": A.copy(), "b": (A + 1, 1)}, False),
        ({"w": A}, {"v": A}, False),
        ((A, A), (A,), False),
        ([A], (A,), False),
        (np.float64(2.0), 2.0, True),
        (2, np.array(3), False),
        (np.zeros((0,)), np.zeros((0,)), True),
        (KEY, jax.random.key(0), True),
        (KEY, jax.random.key(1), False),
        (Mean(total=A), Mean(total=A.copy()), True),
        (Mean(total=A), Mean(total=A + 1), False),
        (np.array([np.nan]), np.array([np.nan]), False),
        ("a", "a", True),
    ],
)
def test_arrays_are_compared_element_by_element_to_one_bool(left: Any, right: Any, equal: bool) -> None:
    """pipekit:A17: equality of states with arrays is one bool, in fields, containers and states inside."""
    result = Needs(sums=left) == Needs(sums=right)
    assert result is equal
    assert (Needs(sums=left) != Needs(sums=right)) is not equal


@pytest.mark.parametrize("value", [A, jnp.asarray(A), {"a": 1}, [1], (A,), Mean(total=A)])
def test_a_state_without_hash_says_which_field(value: Any) -> None:
    """pipekit:A17: a hash works or is refused with a TypeError that names the field."""
    with pytest.raises(TypeError, match="Needs has no hash, since its field 'sums' holds a"):
        hash(Needs(sums=value))


def test_equal_states_have_equal_hashes() -> None:
    """pipekit:A17: where every field has a hash, equal states share it."""
    assert hash(Mean(total=2.0)) == hash(Mean(total=2.0)) == hash(Mean(total=np.float64(2.0)))
    assert hash(Mean(total=2.0)) != hash(Other(total=2.0))
    assert {Mean(): 1}[Mean()] == 1


def test_a_state_does_not_change() -> None:
    state = Mean(total=1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.total = 2.0  # type: ignore[misc]
    assert state.replace(total=2.0).total == 2.0
    assert state.total == 1.0


@pytest.mark.parametrize("options", [{"eq": False}, {"kw_only": True}, {"repr": False}])
def test_the_equality_outlives_the_decorator(options: dict[str, bool]) -> None:
    @dataclasses.dataclass(frozen=True, **options)
    class Both(CarryState):
        values: Any = None

    assert Both(values=A) == Both(values=A.copy())
    with pytest.raises(TypeError, match="Both has no hash"):
        hash(Both(values=A))


def test_a_class_may_say_itself_what_is_equal() -> None:
    @dataclasses.dataclass(frozen=True)
    class Loose(CarryState):
        values: Any = None

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Loose)

    assert Loose(values=1) == Loose(values=2)


def test_a_class_that_is_no_frozen_dataclass_says_what_to_add() -> None:
    class Plain(CarryState):
        total: float = 0.0

    with pytest.raises(TypeError, match=r"put @dataclasses.dataclass\(frozen=True\) on top of Plain"):
        Plain()
    assert Mean() == Mean()  # the unfinished class stands in nobody's way


def test_a_state_is_a_pytree_with_named_leaves() -> None:
    """A state goes through jit, grad and scan as it is; a static field is no leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(Mean(total=1.0, count=2))
    assert [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves] == [(".total", 1.0), (".count", 2)]

    def add(state: Mean, x: jax.Array) -> tuple[Mean, jax.Array]:
        return state.replace(total=state.total + x, count=state.count + 1), x

    end, _ = jax.jit(lambda s: jax.lax.scan(add, s, jnp.arange(4.0)))(Mean(total=jnp.zeros(())))
    assert end == Mean(total=jnp.float32(6.0), count=jnp.int32(4))
    slope = jax.grad(lambda s: s.total**2, allow_int=True)(Mean(total=3.0))
    assert float(slope.total) == 6.0


def test_a_class_made_before_jax_is_a_pytree_as_soon_as_a_state_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither defining a class nor making a state imports jax; the next state after it was imported enters them all."""
    with monkeypatch.context() as without:
        without.delitem(sys.modules, "jax")

        @dataclasses.dataclass(frozen=True)
        class Early(CarryState):
            x: Any = 0.0

        @dataclasses.dataclass(frozen=True)
        class Unused(CarryState):
            x: Any = 0.0

        first, unused = Early(x=1.0), Unused(x=2.0)
        assert jax.tree.leaves(first) == [first]
    assert jax.tree.leaves(Early(x=3.0)) == [3.0]
    assert jax.tree.leaves((first, unused)) == [1.0, 2.0]
    register_pytrees()  # twice is once


def test_the_base_is_an_empty_state() -> None:
    assert CarryState() == CarryState()
    assert CarryState().to_dict() == {}
    assert jax.tree.leaves(CarryState()) == []
