"""Kinds: entered once, looked up by name, refused with the nearest name, brought in by explicit imports only."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

import pytest

from nnx_jax.core.errors import ConfigError
from nnx_jax.core.registry import OneOf, allow_imports, is_family, kinds, lookup, register
from nnx_jax.core.spec import Spec


class Tool(Spec):
    family: ClassVar[str] = "test_tool"


@register("hammer")
class Hammer(Tool):
    weight: int = 1


def test_a_registered_class_knows_its_kind_and_is_found() -> None:
    assert Hammer.kind == Hammer().kind == "hammer"
    assert lookup("test_tool", "hammer") is Hammer
    assert kinds("test_tool") == ["hammer"]
    assert kinds("nothing") == []


def test_a_family_and_its_members_are_told_apart() -> None:
    assert is_family(Tool)
    assert not is_family(Hammer)
    assert not is_family(Spec)


def test_a_class_that_is_its_own_family_can_be_built() -> None:
    @register("only")
    class Only(Spec):
        family: ClassVar[str] = "test_only"
        n: int = 0

    assert not is_family(Only)
    assert Only.from_state(Only(n=2).state()) == Only(n=2)


@pytest.mark.parametrize("asked", ["hamer", "HAMMER", 3, None, ["hammer"]])
def test_an_unknown_kind_names_the_nearest_and_the_way_in(asked: object) -> None:
    with pytest.raises(ConfigError, match=r"there is no test_tool kind .*hammer.*`imports:`"):
        lookup("test_tool", asked)


def test_a_taken_kind_is_refused_unless_replaced() -> None:
    with pytest.raises(ConfigError, match=r"test_tool kind 'hammer' is taken by .*Hammer; choose another name"):

        @register("hammer")
        class Other(Tool):
            pass

    assert lookup("test_tool", "hammer") is Hammer

    @register("hammer", replace=True)
    class Sledge(Tool):
        pass

    assert lookup("test_tool", "hammer") is Sledge
    register("hammer", replace=True)(Hammer)


def test_running_the_same_definition_again_replaces_it() -> None:
    """A notebook cell that is run twice defines the same class twice."""

    def cell() -> type[Tool]:
        @register("cell")
        class Cell(Tool):
            pass

        return Cell

    first, second = cell(), cell()
    assert first is not second
    assert lookup("test_tool", "cell") is second


@pytest.mark.parametrize("kind", ["", "Hammer", "a b", "a.b", "../x", "1x", "x" * 65, "a\n", None])
def test_a_kind_is_a_lower_case_name(kind: object) -> None:
    with pytest.raises(ConfigError, match="expected lower-case letters"):
        register(kind)(Hammer)  # type: ignore[arg-type]


def test_a_class_without_family_is_refused() -> None:
    with pytest.raises(ConfigError, match="Loose has no family"):

        @register("loose")
        class Loose(Spec):
            pass


def test_one_of_tells_the_class_a_value_would_become() -> None:
    mark = OneOf("test_tool")
    assert mark.target("hammer") is Hammer
    assert mark.target({"kind": "hammer"}) is Hammer
    assert mark.target({"kind": "saw"}) is None
    assert mark.target(3) is None
    tool = Hammer()
    assert mark.admit(tool) is tool


def test_imports_register_the_classes_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_saws.py").write_text(
        "from nnx_jax.core.registry import register\n"
        "from nnx_jax.core.spec import Spec\n"
        "from typing import ClassVar\n"
        "class Saws(Spec):\n    family: ClassVar[str] = 'test_saw'\n"
        "@register('fret')\nclass Fret(Saws):\n    teeth: int = 9\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    allow_imports(["my_saws"])
    assert lookup("test_saw", "fret")().teeth == 9
    sys.modules.pop("my_saws")


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["no_such_module_xyz"], r"imports\.0: the module 'no_such_module_xyz' cannot be imported"),
        (["os", "a/b"], r"imports\.1: got 'a/b'; expected a module name"),
        (["../evil"], r"got '\.\./evil'; expected a module name"),
        ([".relative"], r"got '\.relative'; expected a module name"),
        (["os; print(1)"], r"expected a module name"),
        ([3], r"got 3; expected a module name"),
    ],
)
def test_what_is_no_module_is_refused(modules: list[object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        allow_imports(modules)  # type: ignore[arg-type]
