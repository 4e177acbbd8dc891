"""Documents of operators: written the same every time, read back equal in fields and behaviour, safe to read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from nnx_jax.core.codec import parse_json, parse_yaml
from nnx_jax.core.errors import ConfigError, NotLoadableError, OperatorTypeError, UnregisteredError
from nnx_jax.core.function import FunctionOperator
from nnx_jax.core.operator import Operator, Sequential
from nnx_jax.core.registry import register, unregister
from nnx_jax.core.serial import dumps, from_document, from_yaml, loads, to_document, to_yaml
from nnx_jax.core.spec import ENVIRONMENT
from nnx_jax.core.stateful import StatefulOperator


@register("doc_scale", replace=True)
class Scale(Operator):
    factor: float = 1.0
    threads: Annotated[int, ENVIRONMENT] = 1

    def _apply(self, x: Any) -> Any:
        return x * self.factor


class Penalty(Operator):
    family: ClassVar[str] = "doc_penalty"


@register("square", replace=True)
class Square(Penalty):
    reduction: Literal["mean", "sum"] = "mean"

    def _apply(self, x: Any) -> float:
        return float(getattr(np, self.reduction)(np.square(x)))


@register("weighted", replace=True)
class Weighted(Penalty):
    components: Annotated[tuple[tuple[float, Penalty], ...], Field(min_length=1)]

    def _apply(self, x: Any) -> float:
        return sum(weight * part(x) for weight, part in self.components)


@register("doc_count", replace=True)
class Count(StatefulOperator):
    by: int = 1

    def _apply(self, carrier: Any, state: int) -> tuple[Any, int]:
        return carrier, state + self.by


NESTED = Sequential([Scale(factor=2.0), Weighted(components=((1, Square()), (0.5, Square(reduction="sum"))))])
FORMS = [(to_yaml, from_yaml), (dumps, loads), (to_document, from_document)]


@pytest.mark.parametrize(("write", "read"), FORMS)
def test_nested_operators_come_back_for_real(write: Callable[..., Any], read: Callable[..., Operator]) -> None:
    """pipekit:A20: fields, weights, reductions, hash and behaviour of operators in operators are equal.

    By hand: x = [1, 2] scaled by 2 is [2, 4]; the mean of squares is 10, the sum 20: 1 * 10 + 0.5 * 20 = 20.
    """
    again = read(write(NESTED))
    assert type(again) is Sequential
    assert again == NESTED
    assert again.get_config() == NESTED.get_config()
    assert again.content_hash() == NESTED.content_hash()
    assert [weight for weight, _ in again[1].components] == [1.0, 0.5]  # type: ignore[attr-defined]
    assert [part.reduction for _, part in again[1].components] == ["mean", "sum"]  # type: ignore[attr-defined]
    assert again(np.array([1.0, 2.0])) == 20.0
    assert write(again) == write(NESTED)


def test_losses_in_a_sequence_come_back_with_their_weights() -> None:
    """pipekit:A20: Sequential([Scale(2), Composite(((1, MSE()), (0.5, NLL("sum"))))]) through YAML.

    By hand, for the composite's first part alone: predicted [1, 3] against [0, 0] has a mean square of 5.
    """
    from nnx_jax.objectives.operators import MSE, NLL, Composite

    pipeline = Sequential([Scale(factor=2.0), Composite(components=((1.0, MSE()), (0.5, NLL(reduction="sum"))))])
    again = from_yaml(to_yaml(pipeline))
    assert again == pipeline
    assert again.get_config() == pipeline.get_config()
    assert again.content_hash() == pipeline.content_hash()
    first, second = again[1].components  # type: ignore[attr-defined]
    assert (first.weight, second.weight, second.loss.reduction) == (1.0, 0.5, "sum")
    assert float(first.loss(np.array([1.0, 3.0]), np.zeros(2))[0]) == 5.0


def test_the_yaml_is_what_a_person_would_write() -> None:
    """pipekit:A20: real YAML, kinds in full where any operator may stand."""
    assert to_yaml(NESTED) == (
        "kind: sequential\n"
        "operators:\n"
        "- kind: doc_scale\n  factor: 2.0\n"
        "- kind: doc_penalty.weighted\n  components:\n"
        "  - - 1.0\n    - kind: square\n"
        "  - - 0.5\n    - kind: square\n      reduction: sum\n"
    )


def test_loading_what_was_dumped_gives_equal_configuration_and_type() -> None:
    """pipekit:A1: loads(dumps(op)) has equal config and type."""
    again = loads(dumps(Scale(factor=2.5)))
    assert type(again) is Scale
    assert again.get_config() == Scale(factor=2.5).get_config()


def test_the_text_is_the_same_every_time_with_sorted_keys() -> None:
    """pipekit:A9: byte-stable, keys sorted."""
    text = dumps(Sequential([Scale(factor=2.0, threads=4), Square(reduction="sum")]))
    assert text == (
        '{"kind":"sequential","operators":[{"factor":2.0,"kind":"doc_scale","threads":4},'
        '{"kind":"doc_penalty.square","reduction":"sum"}]}'
    )
    assert dumps(NESTED) == dumps(NESTED) == dumps(loads(dumps(NESTED)))


operators = st.recursive(
    st.one_of(
        st.builds(lambda f, t: Scale(factor=f, threads=t), st.floats(-1e9, 1e9), st.integers(1, 4)),
        st.builds(lambda r: Square(reduction=r), st.sampled_from(["mean", "sum"])),
        st.builds(lambda by: Count(by=by), st.integers(-5, 5)),
    ),
    lambda inner: st.lists(inner, max_size=3).map(Sequential),
    max_leaves=8,
)


@settings(max_examples=40)
@given(operators)
def test_every_operator_comes_back(operator: Operator) -> None:
    """pipekit:A20: any nesting, in both forms, equal and with an equal hash."""
    for write, read in FORMS:
        again = read(write(operator))
        assert again == operator
        assert again.content_hash() == operator.content_hash()
        assert again.get_config() == operator.get_config()


def test_a_stateful_pipeline_behaves_the_same_when_it_comes_back() -> None:
    pipeline = Scale(factor=3.0) | Count(by=2) | Count()
    assert loads(dumps(pipeline))(2.0, 10) == pipeline(2.0, 10) == (6.0, 13)


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [3, "text", None, Scale, {"kind": "doc_scale"}])
def test_only_an_operator_is_written(value: object) -> None:
    for write, _ in FORMS:
        with pytest.raises(TypeError, match="only an operator is written"):
            write(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", r"<text>: expected a mapping with a kind, got a list"),
        ("null", "got a NoneType"),
        ('"doc_scale"', "got a str"),
        ("{", "not valid JSON"),
        ('{"kind":"doc_scale","factor":NaN}', "numbers must be finite"),
        ('{"kind":"doc_scale","kind":"square"}', "twice"),
        ("{}", "give a kind"),
        ('{"kind":"doc_scale","factr":2.0}', "did you mean 'factor'"),
        ('{"kind":"doc_scale","factor":"2"}', "expected a number"),
    ],
)
def test_text_that_is_no_operator_is_a_value_error(text: str, message: str) -> None:
    """pipekit:A7: JSON of another shape, and what is no JSON, is a ValueError."""
    with pytest.raises(ValueError, match=message):
        loads(text)


UNKNOWN = [
    '{"kind":"doc_nothing"}',
    '{"kind":"sequential","operators":[{"kind":"doc_scale"},{"kind":"doc_nothing"}]}',
    '{"kind":"doc_penalty.weighted","components":[[1.0,{"kind":"nothing"}]]}',
    '{"kind":"sequential","operators":[{"kind":"subprocess:Popen","args":"true"}]}',
]


@pytest.mark.parametrize("text", UNKNOWN)
def test_a_document_that_names_an_unregistered_class_is_refused(text: str) -> None:
    """pipekit:A20: a PermissionError at any depth, from YAML too (JSON is YAML)."""
    for read in (loads, from_yaml):
        with pytest.raises(PermissionError, match="there is no") as caught:
            read(text)
        assert isinstance(caught.value, ConfigError)


def test_registration_is_the_sandbox() -> None:
    """pipekit:A8: unregistered PermissionError; registered it loads; unregistered again PermissionError."""

    class Door(Operator):
        width: int = 1

    text = dumps(Door(width=2))
    assert parse_json(text) == {"kind": f"{Door.__module__}:{Door.__qualname__}", "width": 2}
    with pytest.raises(PermissionError, match="Door"):
        loads(text)
    register("doc_door")(Door)
    text = dumps(Door(width=2))
    assert loads(text) == Door(width=2)
    unregister(Door)
    with pytest.raises(PermissionError, match="doc_door"):
        loads(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("!!python/object/apply:os.system ['true']", r"<text>:1: has the tag .*python/object/apply:os.system"),
        ("kind: doc_scale\nfactor: !!python/name:os.system ''", "line|:2: factor: has the tag"),
        ("kind: sequential\noperators:\n- !!python/object:os.Thing {}", r":3: operators\[0\]: has the tag"),
        ("kind: &a doc_scale", "anchor"),
    ],
)
def test_tags_of_yaml_are_refused(text: str, message: str) -> None:
    """pipekit:A20: a tag that would build a Python object is rejected before anything is read."""
    with pytest.raises(ConfigError, match=message):
        from_yaml(text)


def test_errors_of_a_file_name_its_line() -> None:
    with pytest.raises(UnregisteredError, match=r"ops\.yaml:4: operators\[1\]: .*did you mean 'doc_scale'"):
        from_yaml("kind: sequential\noperators:\n- kind: doc_scale\n- kind: doc_scal\n", source="ops.yaml")


def test_a_class_for_python_only_is_written_and_refused() -> None:
    """pipekit:A4: dumps works, for people to read; loads raises a RuntimeError that names the class."""

    @register("doc_live", replace=True)
    class Live(Operator):
        forbid_in_yaml: ClassVar[bool] = True
        source: Any = Field(default=None, exclude=True)
        seed: int = 0

    pipeline = Sequential([Scale(), Live(source=object(), seed=3)])
    assert parse_yaml(to_yaml(pipeline))["operators"][1] == {"kind": "doc_live", "seed": 3}
    for write, read in FORMS:
        with pytest.raises(NotLoadableError, match=r"operators\[1\]: Live cannot be loaded from a file"):
            read(write(pipeline))
        with pytest.raises(RuntimeError, match="Live"):
            read(write(pipeline[1]))


def test_what_a_document_cannot_hold_is_refused_with_its_path() -> None:
    """pipekit:A6: a mapping and operators inside are fine; a function is refused by the name of its field."""

    @register("doc_any", replace=True)
    class Loose(Operator):
        options: dict[str, Any] = {}

    fine = Loose(options={"a": {"b": [1, None]}})
    assert loads(dumps(fine)) == fine
    with pytest.raises(ConfigError, match=r"Loose\.options: a function cannot be written"):
        dumps(Sequential([Loose(options={"f": lambda: 0})]))


# -- functions -------------------------------------------------------------------------------------------------------


def halve(x: float) -> float:
    return x / 2


def test_a_wrapped_function_comes_back_by_its_name() -> None:
    operator = FunctionOperator(function=halve)
    assert operator(3.0) == 1.5
    assert operator.state() == {"kind": "function", "function": f"{__name__}.halve"}
    pipeline = Scale(factor=4.0) | operator
    assert loads(dumps(pipeline)) == pipeline
    assert loads(dumps(pipeline))(3.0) == 6.0
    assert operator.replace() == operator
    assert operator.content_hash() != FunctionOperator(function=np.tanh).content_hash()


def inner() -> Callable[[float], float]:
    def local(x: float) -> float:
        return x

    return local


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x, "could not find the function <lambda>"),
        (inner(), r"could not find the function inner\.<locals>\.local"),
        (np.zeros(2).sum, "could not find the"),
        (int, "could not find the type int"),
        (Scale(), "could not find the Scale without a name"),
    ],
)
def test_a_function_that_has_no_name_elsewhere_is_refused(function: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"{message}.*top of a module.*_apply"):
        FunctionOperator(function=function)


def test_a_function_of_the_main_program_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def f() -> None: ...

    f.__module__, f.__qualname__ = "__main__", "f"
    monkeypatch.setattr(sys.modules["__main__"], "f", f, raising=False)
    with pytest.raises(ConfigError, match=r"importing __main__; .*not of __main__"):
        FunctionOperator(function=f)


@pytest.mark.parametrize("name", ["os.system", "posix.system", "builtins.eval", "nothing", "", "no.such.thing"])
def test_a_function_that_was_not_allowed_is_refused(name: str) -> None:
    with pytest.raises(PermissionError, match="is not known here; list its module under `imports:`"):
        loads(f'{{"kind":"function","function":"{name}"}}')
    with pytest.raises(UnregisteredError):
        FunctionOperator(function=name)


def test_an_allowed_module_gives_its_own_functions_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_steps.py").write_text(
        "from os import system\nimport os\nclass Thing:\n    pass\nnumber = 3\ndef double(x):\n    return 2 * x\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    text = '{"kind":"function","function":"my_steps.double"}'
    with pytest.raises(PermissionError):
        loads(text)
    assert "my_steps" not in sys.modules
    operator = loads(text, imports=["my_steps"])
    assert operator(4) == 8
    assert loads(text) == operator
    for name in ("system", "os", "Thing", "number", "missing", "os.system"):
        with pytest.raises(PermissionError, match=f"my_steps.{name}"):
            loads(f'{{"kind":"function","function":"my_steps.{name}"}}')
    sys.modules.pop("my_steps")
    with pytest.raises(ConfigError, match="expected a module name"):
        loads(text, imports=["../evil"])


def test_another_process_reads_the_document(tmp_path: Path) -> None:
    """pipekit:A20: a fresh process that imports the module of the classes builds an operator that behaves the same."""
    (tmp_path / "my_ops.py").write_text(
        "from nnx_jax.core.operator import Operator\nfrom nnx_jax.core.registry import register\n"
        "def halve(x):\n    return x / 2\n"
        "@register('my_add')\nclass Add(Operator):\n    by: float = 0.0\n"
        "    def _apply(self, x):\n        return x + self.by\n"
    )
    document = "kind: sequential\noperators:\n- {kind: my_add, by: 3.0}\n- {kind: function, function: my_ops.halve}\n"
    program = (
        "import sys\nfrom nnx_jax.core.serial import from_yaml, to_yaml\n"
        "try:\n    from_yaml(sys.argv[1])\nexcept PermissionError:\n    print('refused')\n"
        "op = from_yaml(sys.argv[1], imports=['my_ops'])\n"
        "print(op(5.0), from_yaml(to_yaml(op)) == op, 'jax' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, document],
        env={"PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["refused", "4.0", "True", "False"]


def test_a_non_operator_type_error_is_also_a_config_error() -> None:
    assert issubclass(OperatorTypeError, ConfigError)
    with pytest.raises(OperatorTypeError):
        to_document(3)  # type: ignore[arg-type]
