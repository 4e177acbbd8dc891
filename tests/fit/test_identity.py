"""What the run id knows of what is given from Python: another text or setting is another run, and nothing else is."""

from __future__ import annotations

import dataclasses
import enum
import functools
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from nnx_jax import NNModel, Objective, kd_objective
from nnx_jax.fit.identity import describe_function
from nnx_jax.plan.identity import describe


def cell(text: str, name: str, **known: Any) -> Any:
    """What a notebook's cell defines: it has no file that its text could be read from."""
    names: dict[str, Any] = {"__name__": "__main__", "Objective": Objective, "jax": jax, **known}
    exec(textwrap.dedent(text), names)
    return names[name]


def closing(value: Any) -> Any:
    def step(ctx: Any) -> Any:
        return value

    return step


class Kind(enum.Enum):
    A = 1
    B = 2


@dataclasses.dataclass
class Config:
    rate: float


class Slotted:
    __slots__ = ("rate",)

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, ctx: Any) -> Any:
        return self.rate


class Dense(nnx.Module):
    """One layer and what follows it, which no weight tells."""

    def __init__(self, after: Any = jax.nn.relu, drop: float = 0.1) -> None:
        self.layer, self.after = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), after
        self.drop = nnx.Dropout(drop, rngs=nnx.Rngs(1))

    def __call__(self, x: Any) -> Any:
        return self.after(self.drop(self.layer(x)))


PAIRS: list[tuple[Any, Any]] = [
    (Config(0.1), Config(0.2)),
    (SimpleNamespace(rate=0.1), SimpleNamespace(rate=0.2)),
    (Kind.A, Kind.B),
    ({1, 2}, {1, 3}),
    (b"a", b"b"),
    (range(3), range(4)),
    (Path("a"), Path("b")),
    (np.dtype("float32"), np.dtype("float64")),
    (Dense(jax.nn.relu), Dense(jax.nn.gelu)),
]


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda value: type(value).__name__)
def test_what_a_function_closes_over_is_known_whatever_holds_it(one: Any, other: Any) -> None:
    assert describe_function(closing(one)) == describe_function(closing(one))
    assert describe_function(closing(one)) != describe_function(closing(other))


def test_attributes_in_slots_and_two_lambdas_of_one_line_are_told_apart() -> None:
    assert describe_function(Slotted(0.1)) != describe_function(Slotted(0.2))
    both = [lambda ctx: ctx.batch["x"], lambda ctx: ctx.batch["y"]]
    assert describe_function(both[0]) != describe_function(both[1])


OBJECTIVE = """
class Mine(Objective):
    def __call__(self, ctx):
        return self.scaled(ctx) + super().identity()

    def scaled(self, ctx):
        return {factor} * ctx.apply()
"""


def test_a_class_defined_again_in_a_notebook_is_another_one() -> None:
    first, again, other = (describe_function(cell(OBJECTIVE.format(factor=f), "Mine")()) for f in (1, 1, 2))
    assert first == again != other


def test_a_base_class_of_the_users_own_counts() -> None:
    bases = [cell(OBJECTIVE.format(factor=f), "Mine") for f in (1, 2)]
    ids = {describe_function(cell("class Child(Mine):\n    pass", "Child", Mine=base)()) for base in bases}
    assert len(ids) == 2


HELPERS = """
SCALE = {scale}

@jax.jit
def helper(x):
    return SCALE * x {more}

def other(x, depth):
    return step(x) if depth else helper(x)

def step(ctx):
    return other(ctx.SCALE, 0) + helper(ctx.batch["x"])
"""


def test_functions_and_numbers_that_are_looked_up_count_also_where_they_call_each_other() -> None:
    told = lambda scale, more: describe_function(cell(HELPERS.format(scale=scale, more=more), "step"))  # noqa: E731
    assert told(1, "") == told(1, "")
    assert len({told(1, ""), told(2, ""), told(1, "+ 1")}) == 3


def test_a_name_that_is_only_an_attribute_is_not_looked_up() -> None:
    text = "batch = {}\ndef step(ctx):\n    return ctx.batch['x']"
    assert describe_function(cell(text.format(1), "step")) == describe_function(cell(text.format(2), "step"))


def test_many_functions_that_call_each_other_are_told_once_each() -> None:
    lines = ["def f0(x):\n    return x"]
    lines += [f"def f{i}(x):\n    return f{i - 1}(x) + f{max(i - 2, 0)}(x)" for i in range(1, 60)]
    assert describe_function(cell("\n".join(lines), "f59"))  # 60 functions; Fibonacci(60) paths


def test_another_forward_pass_of_a_module_is_another_run_with_the_same_weights() -> None:
    """The modes of a module are how it is used just now, and no part of it."""
    ids = [str(NNModel(module=module).identity(0)) for module in (Dense(), Dense(jax.nn.gelu), Dense(drop=0.5))]
    assert len(set(ids)) == 3
    quiet = Dense()
    quiet.eval()
    assert str(NNModel(module=quiet).identity(0)) == ids[0]
    text = "class Net(nnx.Module):\n    def __init__(self): self.a = nnx.Param(jax.numpy.ones(2))\n"
    text += "    def __call__(self, x): return {} * x @ self.a"
    nets = [NNModel(module=cell(text.format(f), "Net", nnx=nnx)()).identity(0) for f in (1, 1, 2)]
    assert nets[0] == nets[1] != nets[2]


def test_a_study_knows_the_settings_of_an_objective_and_what_functions_close_over() -> None:
    teacher = Dense()
    assert describe(kd_objective(teacher, alpha=0.3)) != describe(kd_objective(teacher, alpha=0.5))
    assert describe(closing(1)) == describe(closing(1)) != describe(closing(2))
    assert describe(functools.partial(closing, 1)) != describe(functools.partial(closing, 2))
