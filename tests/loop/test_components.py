"""Components are named in order, checked before anything is changed, and restored all or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from nnx_jax.core.errors import ComponentRestoreError, ConfigError
from nnx_jax.loop.callbacks import Callback
from nnx_jax.loop.components import Components, ComponentSpec, StatefulComponent, plain, revived


class Mean:
    """A component that is no callback; `broken` fails while it loads."""

    def __init__(self, name: str = "mean", *, version: int = 1, numbered: bool = False, broken: str = "") -> None:
        self.spec = ComponentSpec(name, version=version, numbered=numbered)
        self.values: list[Any] = []
        self.loaded: list[int] = []
        self.broken = broken

    def component_spec(self) -> ComponentSpec:
        return self.spec

    def component_state(self) -> dict[str, Any]:
        return {"values": self.values}

    def check_component_state(self, state: Mapping[str, Any], *, version: int) -> list[str]:
        return ["it has no values", "of version " + str(version)] if "values" not in state else []

    def load_component_state(self, state: Mapping[str, Any], *, version: int) -> None:
        self.values, _ = list(state["values"]), self.loaded.append(version)
        if self.broken and self.values:
            raise OSError(self.broken)


class Old(Callback):
    """A callback of the older form: its name as an attribute, and no version when it loads."""

    component_name = "old"

    def __init__(self) -> None:
        self.count = 0

    def component_state(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_component_state(self, state: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.count = state["count"]


def entry(state: Any, *, version: int = 1, required: bool = True) -> dict[str, Any]:
    return {"version": version, "required": required, "state": state}


def test_components_are_named_in_the_order_they_come() -> None:
    """Objects without state are left out, one that comes twice counts once."""
    mean, old = Mean(), Old()
    named = Components(
        [Callback(), old, len, None, mean, Mean("free", numbered=True)], [mean, Mean("free", numbered=True)]
    )
    assert list(named) == ["old", "mean", "free", "free.2"]
    assert isinstance(mean, StatefulComponent)


def test_what_is_no_component_is_refused() -> None:
    """nnx:B135 (a TypeError)"""
    for wrong in (3, len, Mean):
        with pytest.raises(TypeError, match="components takes objects with component_spec"):
            Components([], [wrong])
    assert list(Components([Mean])) == []

    class Says(Mean):
        def component_spec(self) -> Any:
            return "mean"

    with pytest.raises(TypeError, match="Says.component_spec.. returned str; return a ComponentSpec"):
        Components([Says()])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("",), "takes letters, digits"),
        (("a/b",), "takes letters, digits"),
        (("a", 0), "version must be a whole number"),
        (("a", 1, 1), "required must be True or False"),
        (("a", 1, True, "no"), "numbered must be True or False"),
    ],
)
def test_a_wrong_spec_is_refused(arguments: tuple[Any, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ComponentSpec(*arguments)


def test_the_stored_version_is_told_to_who_asks() -> None:
    mean, old = Mean(version=3), Old()
    Components([mean, old]).load({"mean": entry({"values": [1]}, version=2), "old": entry({"count": 4})})
    assert (mean.loaded, mean.values, old.count) == ([2], [1], 4)


def test_one_error_lists_everything_and_nothing_is_changed() -> None:
    """nnx:B131 nnx:B132 (also where a load fails for a reason of its own, and where what follows refuses)

    One that cannot even be put back is told too, after the others were.
    """
    good, old, checked, broken = Mean("good"), Old(), Mean("checked"), Mean("broken", broken="no disk")
    good.values, old.count = [7], 7
    stored = {
        "good": entry({"values": [1]}),
        "old": entry({"count": 1}, version=9, required=False),
        "checked": entry({}),
        "broken": entry({"values": [1]}),
        "gone": entry({}),
    }
    with pytest.raises(ComponentRestoreError) as caught:
        Components([good, old, checked, broken, Mean("absent")]).load(stored)
    assert caught.value.problems == (
        "component gone: the checkpoint needs it and this run has no such component",
        "component old: stored as version 9, known is 1",
        "component checked: it has no values",
        "component checked: of version 1",
        "component absent: the checkpoint has no state for it",
        "component broken: OSError: no disk",
    )
    assert (good.values, old.count, checked.values) == ([7], 7, [])

    def refuse() -> None:
        raise ComponentRestoreError(["a hook: no"])

    with pytest.raises(ComponentRestoreError) as caught:
        Components([good]).load({"good": entry({"values": [1]})}, then=refuse)
    assert (caught.value.problems, good.values) == (("a hook: no",), [7])

    stuck = Mean("stuck", broken="no disk")
    stuck.values = [3]
    with pytest.raises(ComponentRestoreError) as caught:
        Components([stuck, good]).load({"stuck": entry({"values": [1]}), "good": entry({"values": [1]})})
    told = ("component stuck: OSError: no disk", "component stuck: it could not be put back: OSError: no disk")
    assert (caught.value.problems, good.values) == (told, [7])


def test_states_hold_arrays_and_numbers_of_every_kind() -> None:
    state = {
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "scalar": np.float32(0.1),
        "odd": [float("nan"), float("-inf"), 0.1, None, True, "nan", 2**60],
        "empty": np.zeros((0, 2)),
    }
    again = revived(plain(state, "x"))
    assert again["array"].dtype == np.int16
    np.testing.assert_array_equal(again["array"], state["array"])
    assert again["scalar"] == np.float32(0.1)
    assert repr(again["odd"]) == repr(state["odd"])
    assert again["empty"].shape == (0, 2)
    with pytest.raises(TypeError, match="component x: a state holds numbers, text, arrays of numbers.*; found object"):
        plain({"a": [object()]}, "component x")


@pytest.mark.parametrize(
    "state", [{"float": "1.5"}, {"array": "x", "dtype": "y", "shape": []}, {"mapping": {"float": "nan"}}]
)
def test_a_state_that_looks_like_a_mark_comes_back(state: Any) -> None:
    """Words of the stored form are words like others in a state."""
    assert revived(plain({"held": state}, "component c")) == {"held": state}


@pytest.mark.parametrize("value", [b"ab", np.array(["a"]), np.array(["2020-01-01"], np.datetime64), {1, 2}])
def test_what_would_not_come_back_is_not_stored(value: Any) -> None:
    """A state that no resume could read is refused at the commit, with what it holds."""
    with pytest.raises(TypeError, match="component c: a state holds numbers, text, arrays of numbers.*found"):
        plain({"held": value}, "component c")
