"""Specifications: strict values in, frozen values kept, defaults left out, one hash, every problem told."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, PrivateAttr

from nnx_jax.core.errors import ConfigError
from nnx_jax.core.operator import Operator
from nnx_jax.core.registry import OneOf, register
from nnx_jax.core.spec import ENVIRONMENT, Spec


class Shape(Spec):
    """A family."""

    family: ClassVar[str] = "test_shape"


@register("circle")
class Circle(Shape):
    radius: Annotated[float, Field(gt=0)] = 1.0
    """How far it reaches."""
    tags: tuple[str, ...] = ()


@register("square")
class Square(Shape):
    side: int
    also_called: ClassVar[Mapping[str, str]] = {"width": "side"}


class Drawing(Spec):
    main: Shape | None = None
    others: tuple[Shape, ...] = ()
    any_shape: Annotated[Any, OneOf("test_shape")] | None = None
    count: Annotated[int, Field(ge=1, le=100)] = 1
    scale: float = 0.5
    flag: bool = False
    colour: Literal["red", "green"] = "red"
    title: str | None = None
    sizes: Mapping[str, int] = {}
    where: Annotated[Literal["paper", "wall"], ENVIRONMENT] = "paper"
    canvas: Any = Field(default=None, exclude=True)
    _cache: list[int] = PrivateAttr(default_factory=list)

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        if self.flag and self.title is None:
            yield "title", "a flagged drawing needs one"
        if self.count > 50 and self.others:
            yield "others[0]", "too many"


# -- what is taken in -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [2.0, True, "2", 1 + 0j, None, np.float64(2.0), np.True_, b"2"])
def test_an_integer_field_takes_integers_only(value: object) -> None:
    """nnx:B028: a float, a bool or text for an int is an error that names the field and the value."""
    with pytest.raises(ValueError, match=r"Drawing\.count: got .*; expected an integer"):
        Drawing(count=value)


@pytest.mark.parametrize("value", [np.int64(2), np.int8(2), np.uint32(2)])
def test_numpy_integers_are_stored_as_int(value: object) -> None:
    """nnx:B028: np.int64(2) is accepted and stored as int."""
    count = Drawing(count=value).count
    assert count == 2
    assert type(count) is int


@pytest.mark.parametrize("value", [2, np.float32(2.0), np.float64(2.0), np.int64(2), 2.0])
def test_numbers_for_a_real_field_are_stored_as_float(value: object) -> None:
    scale = Drawing(scale=value).scale
    assert scale == 2.0
    assert type(scale) is float


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), np.inf])
def test_non_finite_numbers_are_refused(value: object) -> None:
    """nnx:B029: NaN and both infinities."""
    with pytest.raises(ConfigError, match=r"Drawing\.scale: got -?(nan|inf).*expected a finite number"):
        Drawing(scale=value)


@pytest.mark.parametrize("value", [True, "0.5", None, [1.0]])
def test_other_things_for_a_real_field_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"Drawing\.scale: got .*expected a number"):
        Drawing(scale=value)


@pytest.mark.parametrize("value", [1, 0, "true", "yes", None])
def test_a_switch_takes_true_and_false_only(value: object) -> None:
    with pytest.raises(ConfigError, match=r"Drawing\.flag: got .*expected true or false"):
        Drawing(flag=value)


def test_an_integer_too_large_for_a_float_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Drawing\.scale: got 1000.*\.\.\. \(int\)"):
        Drawing(scale=10**400)


def test_minus_zero_is_zero() -> None:
    """Equal specifications have equal hashes, and -0.0 == 0.0."""
    assert math.copysign(1.0, Drawing(scale=-0.0).scale) == 1.0


def test_lists_become_tuples_and_mappings_freeze() -> None:
    drawing = Drawing(others=[{"kind": "square", "side": np.int64(3)}], sizes={"a": np.int64(1)})
    assert drawing.others == (Square(side=3),)
    assert drawing.sizes == {"a": 1}
    assert type(drawing.sizes["a"]) is int


def test_objects_for_python_only_stay_as_they_are() -> None:
    batches = [[1, 2], {"x": 3}]
    assert Drawing(canvas=batches).canvas is batches


# -- frozen -----------------------------------------------------------------------------------------------------------


def test_positional_arguments_are_a_type_error() -> None:
    """nnx:B031."""
    with pytest.raises(TypeError, match=r"Drawing takes keyword arguments only"):
        Drawing(3)  # type: ignore[call-arg]


def test_assigning_and_deleting_are_refused() -> None:
    """nnx:B031: assigning a field raises FrozenInstanceError."""
    drawing = Drawing()
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"'count' of Drawing; use \.replace\(count=\.\.\.\)"):
        drawing.count = 2
    with pytest.raises(dataclasses.FrozenInstanceError, match="'novel'"):
        drawing.novel = 2
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'count'"):
        del drawing.count
    assert drawing.count == 1


def test_stored_lists_and_mappings_refuse_change() -> None:
    """nnx:B031: item assignment is a TypeError, also after the caller's own object changed."""
    given: dict[str, int] = {"a": 1}
    tags = ["x"]
    drawing, circle = Drawing(sizes=given), Circle(tags=tags)
    given["a"] = 2
    tags.append("y")
    assert drawing.sizes == {"a": 1}
    assert circle.tags == ("x",)
    with pytest.raises(TypeError, match="item assignment"):
        circle.tags[0] = "z"  # type: ignore[index]
    changes = [
        lambda d: d.__setitem__("a", 3),
        lambda d: d.__delitem__("a"),
        lambda d: d.update(a=3),
        lambda d: d.pop("a"),
        lambda d: d.clear(),
        lambda d: d.setdefault("b", 1),
        lambda d: d.popitem(),
        lambda d: d.__ior__({"a": 3}),
    ]
    for change in changes:
        with pytest.raises(TypeError, match="frozen specification"):
            change(drawing.sizes)
    assert drawing.sizes == {"a": 1}


def test_the_default_mapping_is_frozen_too() -> None:
    with pytest.raises(TypeError, match="frozen specification"):
        Drawing().sizes["a"] = 1  # type: ignore[index]


def test_private_attributes_are_free() -> None:
    drawing = Drawing()
    drawing._cache = [1]
    assert drawing._cache == [1]
    assert drawing == Drawing()


# -- state ------------------------------------------------------------------------------------------------------------


def test_state_leaves_defaults_out_and_puts_kind_first() -> None:
    drawing = Drawing(main=Circle(), others=(Square(side=2), Circle(radius=2)), count=1, scale=1)
    assert drawing.state() == {
        "main": {"kind": "circle"},
        "others": [{"kind": "square", "side": 2}, {"kind": "circle", "radius": 2.0}],
        "scale": 1.0,
    }
    assert list(Square(side=1).state()) == ["kind", "side"]


def test_a_falsy_value_is_not_a_default() -> None:
    """False, 0 and empty text are values; only the default itself is left out."""

    class Odd(Spec):
        flag: bool = True
        seed: int | None = None
        count: int = 1
        name: str = "x"

    assert Odd(flag=False, seed=0, count=0, name="").state() == {"flag": False, "seed": 0, "count": 0, "name": ""}
    assert Odd(seed=None).state() == {}


def test_environment_is_kept_in_files_and_never_counts() -> None:
    wall = Drawing(where="wall")
    assert wall.state() == {}
    assert wall == Drawing()
    assert wall.content_hash() == Drawing().content_hash()
    assert wall.state(environment=True) == {"where": "wall"}
    assert Drawing.from_yaml(wall.to_yaml()).where == "wall"


def test_python_only_fields_never_enter_a_state() -> None:
    assert Drawing(canvas=object()).state(environment=True) == {}
    assert Drawing(canvas=[1]) == Drawing()


def test_what_a_file_cannot_hold_is_refused_by_name() -> None:
    class Loose(Spec):
        thing: Any = None

    with pytest.raises(ConfigError, match=r"Loose\.thing: a ndarray cannot be written in a configuration"):
        Loose(thing=np.zeros(2)).state()


def test_loads_of_dumps_gives_equal_type_and_configuration() -> None:
    """pipekit:A1: a class that stores a factor gives it back, and loading what it dumps gives an equal object."""

    @register("test_scale", replace=True)
    class Scale(Operator):
        family: ClassVar[str] = "test_operator"
        factor: float

        def __call__(self, value: float) -> float:
            return value * self.factor

    scale = Scale(factor=2.5)
    again = Scale.from_yaml(scale.to_yaml())
    assert scale.state() == {"kind": "test_scale", "factor": 2.5}
    assert type(again) is Scale
    assert again == scale
    assert again(2.0) == 5.0


shapes = st.one_of(
    st.builds(lambda r, t: Circle(radius=r, tags=t), st.floats(0.001, 1e30), st.lists(st.text(max_size=5), max_size=3)),
    st.builds(lambda s: Square(side=s), st.integers(-(2**60), 2**60)),
)
drawings = st.builds(
    lambda **kw: Drawing(**kw),
    main=st.none() | shapes,
    others=st.lists(shapes, max_size=3),
    any_shape=st.none() | shapes,
    count=st.integers(1, 50),
    scale=st.floats(allow_nan=False, allow_infinity=False),
    colour=st.sampled_from(["red", "green"]),
    title=st.none() | st.text(max_size=20),
    sizes=st.dictionaries(st.text(max_size=5), st.integers(-5, 5), max_size=3),
    where=st.sampled_from(["paper", "wall"]),
)


@given(drawings)
def test_every_round_trip_is_exact(drawing: Drawing) -> None:
    """nnx:B026: from_state(state()) is equal with the same hash; YAML is byte-stable and keeps the environment."""
    again = Drawing.from_state(drawing.state())
    assert again == drawing
    assert again.content_hash() == drawing.content_hash()
    text = drawing.to_yaml()
    read = Drawing.from_yaml(text)
    assert read.state(environment=True) == drawing.state(environment=True)
    assert read.to_yaml() == text
    assert copy.deepcopy(drawing) == drawing
    assert hash(read) == hash(drawing)


@pytest.mark.parametrize(
    ("spec", "digest"),
    [
        (Drawing(), "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"),
        (Square(side=3), "68362dec4550ee03b25db8b6f97c73ecef1ed798c09e805acd9bf397b041304e"),
        (
            Drawing(main=Circle(radius=0.1), others=(Square(side=2),), scale=1e-5, title="é", sizes={"b": 1, "a": 2}),
            "126404b7d4fdc380136564129427ae6ebbd7e4e4a19b4515230dde8b7cddbc4a",
        ),
    ],
    ids=["empty", "kind", "nested"],
)
def test_golden_hashes(spec: Spec, digest: str) -> None:
    """The hashes of these states never change: stored run ids depend on it. The first is SHA-256 of `{}`."""
    assert spec.content_hash() == digest


def test_key_order_does_not_matter() -> None:
    left = Drawing.from_state({"scale": 2.0, "count": 3, "sizes": {"a": 1, "b": 2}})
    right = Drawing.from_state({"sizes": {"b": 2, "a": 1}, "count": 3, "scale": 2})
    assert left.content_hash() == right.content_hash()
    assert left == right


def test_a_new_field_with_a_default_moves_no_hash() -> None:
    class Before(Spec):
        a: int = 1

    class After(Spec):
        b: float = 0.5
        a: int = 1

    assert Before(a=2).content_hash() == After(a=2).content_hash()
    assert Before(a=2) != After(a=2)


def test_replace_is_a_validated_copy() -> None:
    drawing = Drawing(main=Circle(), scale=2.0, canvas=[1])
    other = drawing.replace(count=4)
    assert (other.count, other.scale, other.main, other.canvas) == (4, 2.0, Circle(), [1])
    assert drawing.count == 1
    with pytest.raises(ConfigError, match=r"Drawing\.count: got 0 \(int\); expected a value >= 1"):
        drawing.replace(count=0)
    with pytest.raises(ConfigError, match="unknown key 'cuont'; did you mean 'count'"):
        drawing.replace(cuont=0)


# -- kinds ------------------------------------------------------------------------------------------------------------


def test_a_family_builds_the_registered_member() -> None:
    assert type(Shape(kind="square", side=2)) is Square
    assert type(Shape.from_state({"kind": "circle"})) is Circle
    assert Circle(kind="circle") == Circle()
    assert Drawing(main="circle").main == Circle()
    assert Drawing(any_shape={"kind": "square", "side": 1}).any_shape == Square(side=1)
    assert Drawing(any_shape=Circle()).any_shape == Circle()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Shape(), r"Shape is a family; give a kind.*circle, square"),
        (lambda: Shape(kind="cirle"), r"no test_shape kind 'cirle'; did you mean 'circle'\?"),
        (lambda: Shape(kind=3), r"no test_shape kind 3"),
        (lambda: Square(kind="circle", side=1), r"Square is of kind 'square'"),
        (lambda: Shape.from_state({"kind": "circel"}), r"did you mean 'circle'\?"),
        (lambda: Shape.from_state({"radius": 1.0}), r"Shape is a family; give a kind"),
        (lambda: Shape.from_state([1]), r"got \[1\] \(list\); expected a mapping or a Shape"),
        (lambda: Drawing.from_state(None), r"got None; expected a mapping or a Drawing"),
        (lambda: Drawing(main=Drawing()), r"Drawing\.main: .*expected a mapping or a Shape"),
        (lambda: Drawing(any_shape=3), r"Drawing\.any_shape: got 3 .int.; expected a test_shape"),
        (lambda: Drawing(any_shape={"radius": 2.0}), r"Drawing\.any_shape: a test_shape needs a `kind`"),
        (lambda: Drawing(any_shape="circel"), r"Drawing\.any_shape: got 'circel'; there is no test_shape kind"),
        (lambda: Drawing(any_shape={"kind": "square"}), r"Drawing\.any_shape\.side: is required"),
    ],
)
def test_a_wrong_kind_says_what_to_write(build: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


def test_an_unregistered_subclass_has_no_kind_in_its_state() -> None:
    class Disc(Circle):
        depth: int = 1

    assert Disc(depth=2).state() == {"depth": 2}


# -- messages ---------------------------------------------------------------------------------------------------------


def test_all_problems_of_an_object_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Drawing(main={"kind": "circle", "radis": 2.0}, others=[Circle(), {"kind": "square"}], count=0, colour="rad")
    assert str(caught.value).splitlines() == [
        "config: 4 problems:",
        "  - Drawing.main.radis: unknown key 'radis'; did you mean 'radius'?",
        "  - Drawing.others[1].side: is required",
        "  - Drawing.count: got 0 (int); expected a value >= 1",
        "  - Drawing.colour: got 'rad'; expected one of 'red' or 'green'; did you mean 'red'?",
    ]


def test_rules_between_fields_name_their_field() -> None:
    with pytest.raises(ConfigError, match=r"Drawing\.title: a flagged drawing needs one"):
        Drawing(flag=True)
    with pytest.raises(ConfigError, match=r"2 problems:\n  - Drawing\.title.*\n  - Drawing\.others\[0\]: too many"):
        Drawing(flag=True, count=60, others=[Circle()])


def test_a_name_from_elsewhere_is_pointed_to() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'width'; did you mean 'side'\?"):
        Square(side=1, width=2)
    with pytest.raises(ConfigError, match=r"unknown key 'width'; did you mean 'main\.side'\?"):
        Drawing(main=Square(side=1), width=2)
    with pytest.raises(ConfigError, match=r"unknown key 'zzz'; legal names: any_shape, "):
        Drawing(zzz=1)


def test_python_only_fields_are_not_offered() -> None:
    with pytest.raises(ConfigError, match="unknown key 'canvass'") as caught:
        Drawing(canvass=1)
    assert "'canvas'" not in str(caught.value)


def test_an_error_from_a_file_has_file_line_and_path() -> None:
    text = "count: 2\nothers:\n- kind: circle\n- kind: square\n  side: 2.0\nscal: 1\n"
    with pytest.raises(ConfigError, match="2 problems") as caught:
        Drawing.from_yaml(text, source="a.yaml")
    assert "a.yaml:5: others[1].side: got 2.0 (float); expected an integer" in str(caught.value)
    assert "a.yaml:6: scal: unknown key 'scal'; did you mean 'scale'?" in str(caught.value)
    with pytest.raises(ConfigError, match=r"^config: a\.yaml:1: count: got 0") as caught:
        Drawing.from_yaml("count: 0", source="a.yaml")
    assert (caught.value.file, caught.value.line, caught.value.path) == ("a.yaml", 1, "count")


def test_a_missing_key_points_at_what_it_is_missing_from() -> None:
    with pytest.raises(ConfigError, match=r"a\.yaml:2: main\.side: is required"):
        Drawing.from_yaml("count: 2\nmain: {kind: square}\n", source="a.yaml")


def test_text_where_a_number_is_wanted_names_the_quotes() -> None:
    with pytest.raises(ConfigError, match="expected a number .numbers, true and false are written without quotes"):
        Drawing(scale="1e-3")


def test_an_empty_document_is_all_defaults() -> None:
    assert Drawing.from_yaml("") == Drawing()


def test_calling_an_operator_without_a_meaning_says_so() -> None:
    class Idle(Operator):
        pass

    with pytest.raises(TypeError, match="Idle does not say what calling it does; define __call__"):
        Idle()(1)


def test_json_schema_describes_kinds_bounds_and_meaning() -> None:
    schema = Drawing.model_json_schema()
    members = schema["$defs"]["Shape"]["anyOf"]
    assert members[0] == {"enum": ["circle", "square"]}
    circle = schema["$defs"]["Circle"]
    assert circle["properties"]["kind"] == {"const": "circle"}
    assert circle["required"] == ["kind"]
    assert circle["properties"]["radius"]["description"] == "How far it reaches."
    assert schema["$defs"]["Square"]["required"] == ["kind", "side"]
    count = {"default": 1, "maximum": 100, "minimum": 1, "title": "Count", "type": "integer"}
    assert schema["properties"]["count"] == count
    assert "canvas" not in schema["properties"]
    assert schema["additionalProperties"] is False


def test_a_specification_survives_the_copies_of_other_tools() -> None:
    drawing = Drawing(sizes={"a": 1}, main=Circle())
    assert copy.copy(drawing) == drawing
    assert copy.deepcopy(drawing.sizes) == {"a": 1}
