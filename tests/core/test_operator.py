"""Operators: called through `_apply`, told by their fields, given where one is required or refused with what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import numpy as np
import pytest
from pydantic import Field, PrivateAttr

from nnx_jax.core.errors import ConfigError, NotLoadableError, OperatorTypeError, UnregisteredError
from nnx_jax.core.operator import Operator
from nnx_jax.core.registry import full_kind, kinds, lookup, register, unregister
from nnx_jax.core.spec import ENVIRONMENT, Spec
from nnx_jax.params.losses import LossParams, MSEParams
from nnx_jax.params.metrics import MetricParams


@register("op_scale", replace=True)
class Scale(Operator):
    factor: float = 1.0

    def _apply(self, x: Any) -> Any:
        return x * self.factor


class Bench(Operator):
    family: ClassVar[str] = "op_tester"


@register("op_scale", replace=True)
class OtherScale(Bench):
    """The same kind in another family."""

    factor: float = 1.0


class Holder(Operator):
    """Operators in every place that a field can have them."""

    one: Operator | None = None
    pairs: tuple[tuple[float, Operator], ...] = ()
    named: dict[str, Operator] = {}
    loss: LossParams | None = None
    run: Any = Field(default=None, exclude=True)
    threads: Annotated[int, ENVIRONMENT] = 1


register("op_holder", replace=True)(Holder)


def test_calling_runs_apply() -> None:
    assert Scale(factor=2.5)(4.0) == 10.0

    class Add(Operator):
        def _apply(self, a: int, b: int = 0, *, c: int = 0) -> int:
            return a + 10 * b + 100 * c

    assert Add()(1, 2, c=3) == 321


def test_calling_an_operator_without_a_meaning_says_what_to_define() -> None:
    class Idle(Operator):
        pass

    with pytest.raises(TypeError, match="Idle does not say what calling it does; define __call__ or _apply"):
        Idle()(1)


def test_the_configuration_has_every_field_by_name() -> None:
    """pipekit:A1: a class that stores a factor gives it back, also where it is the default."""
    assert Scale(factor=2.5).get_config() == {"factor": 2.5}
    assert Scale().get_config() == {"factor": 1.0}
    assert Scale().state() == {"kind": "op_scale"}


def test_the_configuration_of_operators_inside_has_their_kind_and_defaults() -> None:
    holder = Holder(pairs=((0.5, Scale()), (2, OtherScale(factor=3.0))), loss=MSEParams(), threads=4)
    assert holder.get_config() == {
        "one": None,
        "pairs": [[0.5, {"kind": "op_scale", "factor": 1.0}], [2.0, {"kind": "op_tester.op_scale", "factor": 3.0}]],
        "named": {},
        "loss": {"kind": "loss.mse"},
        "threads": 4,
    }


def test_a_field_for_python_only_is_in_no_configuration() -> None:
    """pipekit:A2: an excluded field is absent from get_config even where it is set."""
    holder = Holder(run=object())
    assert holder.run is not None
    assert "run" not in holder.get_config()


def test_a_class_without_fields_has_an_empty_configuration() -> None:
    """pipekit:A3: values a class does not declare as fields are no configuration."""

    class Counter(Operator):
        _seen: int = PrivateAttr(default=3)

    assert Counter()._seen == 3
    assert Counter().get_config() == {}


def test_what_a_configuration_cannot_hold_is_refused_with_its_path() -> None:
    class Keeps(Operator):
        values: Any = None

    with pytest.raises(ConfigError, match=r"Keeps\.values: a ndarray cannot be written in a configuration"):
        Keeps(values=[np.zeros(2)]).get_config()


def test_the_repr_is_the_class_and_its_fields() -> None:
    assert repr(Scale(factor=2.0)) == "Scale(factor=2.0)"


# -- an operator of any family ---------------------------------------------------------------------------------------


def test_a_full_kind_names_the_family() -> None:
    assert full_kind(Scale) == "op_scale"
    assert full_kind(OtherScale) == "op_tester.op_scale"
    assert full_kind(MSEParams) == "loss.mse"
    assert lookup("loss", "loss.mse") is MSEParams
    assert lookup("operator", "loss.mse") is MSEParams
    assert LossParams.from_state({"kind": "loss.mse"}) == MSEParams()
    assert Operator.from_state("loss.mse") == MSEParams()


def test_a_place_for_any_operator_writes_full_kinds_and_a_family_its_own() -> None:
    holder = Holder(one=MSEParams(), named={"a": OtherScale(), "b": Scale(factor=2.0)}, loss=MSEParams())
    assert holder.state() == {
        "kind": "op_holder",
        "one": {"kind": "loss.mse"},
        "named": {"a": {"kind": "op_tester.op_scale"}, "b": {"kind": "op_scale", "factor": 2.0}},
        "loss": {"kind": "mse"},
    }
    again = Holder.from_state(holder.state())
    assert again == holder
    assert [type(again.one), type(again.named["a"]), type(again.named["b"])] == [MSEParams, OtherScale, Scale]


def test_a_default_of_another_family_is_not_left_out() -> None:
    """The same kind with the same fields in two families: only the full kind tells the default from another one."""

    class Chooses(Operator):
        tool: Operator = Scale()

    assert Chooses(tool=Scale()).state() == {}
    assert Chooses(tool=OtherScale()).state() == {"tool": {"kind": "op_tester.op_scale"}}


@pytest.mark.parametrize(
    ("kind", "hint"),
    [
        ("op_scal", "did you mean 'op_scale'"),
        ("mse", "write it in full, with its family: loss.mse or metric.mse"),
        ("loss.msee", "did you mean 'loss.mse'"),
        ("metric.huber_", "there is no operator kind"),
        ("tests.core:Scale", "register them and list their module"),
        ("os.system", "there is no operator kind"),
        (3, "there is no operator kind 3"),
    ],
)
def test_an_unregistered_kind_is_refused_with_the_way_in(kind: object, hint: str) -> None:
    """pipekit:A5: a record of a class that is not there is refused, whatever else it holds."""
    with pytest.raises(UnregisteredError, match=hint) as caught:
        Operator.from_state({"kind": kind, "factor": 2.0})
    assert isinstance(caught.value, PermissionError)
    assert isinstance(caught.value, ConfigError)
    with pytest.raises(PermissionError, match=r"Holder\.one: .*there is no"):
        Holder(one={"kind": kind})


def test_a_family_refuses_the_full_kind_of_another() -> None:
    with pytest.raises(UnregisteredError, match="there is no metric kind 'loss.mse'"):
        MetricParams.from_state({"kind": "loss.mse"})


def test_a_registered_class_that_is_no_operator_is_refused() -> None:
    class Paper(Spec):
        family: ClassVar[str] = "op_paper"

    @register("op_plain", replace=True)
    class Plain(Paper):
        pass

    with pytest.raises(ConfigError, match=r"'op_paper.op_plain' is a Plain, which is no Operator"):
        Operator.from_state({"kind": "op_paper.op_plain"})


@pytest.mark.parametrize("record", [{}, {"factor": 2.0}, [], None])
def test_a_record_without_a_kind_is_refused(record: object) -> None:
    """pipekit:A5: a record that does not name its class, or is no mapping, is a ValueError."""
    with pytest.raises(ValueError, match="give a kind|expected an Operator"):
        Operator.from_state(record)


def test_a_field_of_the_wrong_shape_is_refused() -> None:
    """pipekit:A5: a configuration that does not fit the class is a ValueError that names the field."""
    with pytest.raises(ValueError, match=r"factor: got \(\) \(tuple\); expected a number"):
        Operator.from_state({"kind": "op_scale", "factor": []})


# -- what stands for an operator -------------------------------------------------------------------------------------


def _halve(x: float) -> float:
    return x / 2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (_halve, r"got the function _halve; expected an Operator.*_apply.*FunctionOperator\(function=\.\.\.\)"),
        (lambda x: x, r"got the function .*<lambda>; expected an Operator"),
        (Scale, r"got the \w+ Scale; expected an Operator: an object of the class, Scale\(\.\.\.\)"),
        (3, r"got 3 \(int\); expected an Operator or a mapping with its kind"),
        (np.zeros(2), r"got a ndarray; expected an Operator"),
    ],
)
def test_what_is_no_operator_is_refused_with_what_to_do(value: object, message: str) -> None:
    with pytest.raises(OperatorTypeError, match=rf"Holder\.one: {message}") as caught:
        Holder(one=value)
    assert isinstance(caught.value, TypeError)
    assert " at 0x" not in str(caught.value)


def test_several_problems_are_told_at_once_under_the_first_special_class() -> None:
    with pytest.raises(OperatorTypeError, match="2 problems") as caught:
        Holder(one=3, threads="x")
    assert "Holder.one" in str(caught.value)
    assert "Holder.threads" in str(caught.value)


# -- classes that no file may build ----------------------------------------------------------------------------------


@register("op_live", replace=True)
class Live(Operator):
    forbid_in_yaml: ClassVar[bool] = True
    size: int = 0


@pytest.mark.parametrize(
    "load",
    [
        lambda: Operator.from_state({"kind": "op_live", "size": 2}),
        lambda: Live.from_state({"size": 2}),
        lambda: Live.from_yaml("size: 2"),
        lambda: Holder(named={"a": {"kind": "op_live"}}),
        lambda: Holder(one="op_live"),
    ],
)
def test_a_class_that_is_built_in_python_only_is_refused_by_name(load: Callable[[], object]) -> None:
    """pipekit:A4: writing it works, for people to read; loading raises a RuntimeError that names the class."""
    assert Live(size=2).to_yaml() == "kind: op_live\nsize: 2\n"
    with pytest.raises(NotLoadableError, match="Live cannot be loaded from a file; build it in Python") as caught:
        load()
    assert isinstance(caught.value, RuntimeError)


def test_python_builds_it_in_every_way() -> None:
    live = Live(size=2)
    assert Operator(kind="op_live", size=2) == live  # type: ignore[call-arg]
    assert live.replace(size=3).size == 3
    assert Holder(one=live).one is live


# -- registration ----------------------------------------------------------------------------------------------------


def test_unregistering_closes_the_door_again() -> None:
    """pipekit:A8: refused before registration, loaded after it, refused again after unregistration."""

    class Door(Operator):
        width: int = 1

    record = {"kind": "op_door", "width": 2}
    with pytest.raises(PermissionError, match="op_door"):
        Operator.from_state(record)
    register("op_door")(Door)
    assert Operator.from_state(record) == Door(width=2)
    unregister(Door)
    with pytest.raises(PermissionError, match="op_door"):
        Operator.from_state(record)
    assert "op_door" not in kinds("operator")
    with pytest.raises(ConfigError, match="Door is not registered"):
        unregister(Door)
    with pytest.raises(ConfigError, match="int has no family"):
        register("op_int")(int)


def test_the_json_schema_of_a_place_for_any_operator_asks_for_a_kind() -> None:
    schema = Holder.model_json_schema()
    place = schema["$defs"]["Operator"]["anyOf"]
    assert place[1]["required"] == ["kind"]
    assert "Operator" in schema["properties"]["one"]["anyOf"][0]["$ref"]


def test_the_json_schema_of_a_family_whose_members_hold_members_ends() -> None:
    @register("op_stack", replace=True)
    class Stack(Bench):
        below: tuple[Bench, ...] = ()

    class Room(Spec):
        bench: Bench

    schema = Room.model_json_schema()
    assert "op_stack" in schema["$defs"]["Bench"]["anyOf"][0]["enum"]
    assert schema["$defs"]["Stack"]["properties"]["below"]["items"] == {"$ref": "#/$defs/Bench"}
    assert schema["$defs"]["OtherScale"]["properties"]["kind"] == {"const": "op_scale"}
    unregister(Stack)
