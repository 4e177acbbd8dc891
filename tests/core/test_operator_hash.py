"""Content hashes of operators: every real field counts, defaults and addresses do not, every process agrees."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest

from nnx_jax.core.errors import ConfigError
from nnx_jax.core.hashing import content_hash, hash_config
from nnx_jax.core.operator import Operator, Sequential
from nnx_jax.core.registry import register
from nnx_jax.core.spec import ENVIRONMENT


@register("hash_scale", replace=True)
class Scale(Operator):
    factor: float = 1.0
    threads: Annotated[int, ENVIRONMENT] = 1

    def _apply(self, x: Any) -> Any:
        return x * self.factor


class Weighted(Operator):
    components: tuple[tuple[float, Operator], ...] = ()
    note: str = ""
    options: dict[str, Any] = {}


class Blob(Operator):
    """An operator whose content is more than its fields, as a dataset's rows are."""

    content: ClassVar[str] = "0" * 64

    def content_hash(self) -> str:
        return self.content


def test_the_hash_by_hand() -> None:
    """Golden form: it names everything that was ever stored under the hash of an operator."""
    assert Scale(factor=2.0).content_hash() == content_hash({"class": "hash_scale", "fields": {"factor": 2.0}})
    inner = Scale(factor=2.0).content_hash()
    assert Sequential([Scale(factor=2.0)]).content_hash() == content_hash(
        {"class": "sequential", "fields": {"operators": [inner]}}
    )


def test_every_real_field_changes_it() -> None:
    """Operators whose fields differ have different hashes, however deep the difference."""
    variants = [
        Weighted(),
        Weighted(note="a"),
        Weighted(options={"a": 1}),
        Weighted(options={"a": 1.0}),
        Weighted(options={"a": True}),
        Weighted(components=((1.0, Scale()),)),
        Weighted(components=((0.5, Scale()),)),
        Weighted(components=((1.0, Scale(factor=2.0)),)),
        Weighted(components=((1.0, Scale()), (1.0, Scale()))),
        Weighted(components=((1.0, Sequential([Scale()])),)),
        Sequential([Scale(), Weighted()]),
        Sequential([Weighted(), Scale()]),
        Sequential([Sequential([Scale(), Weighted()])]),
        Scale(),
    ]
    assert len({operator.content_hash() for operator in variants}) == len(variants)
    assert Weighted(options={"a": 1, "b": 2}).content_hash() == Weighted(options={"b": 2, "a": 1}).content_hash()


def test_classes_with_equal_fields_differ() -> None:
    def twin(module: str) -> type[Operator]:
        return type("Twin", (Operator,), {"__module__": module, "__annotations__": {}})

    assert twin("a")().content_hash() == twin("a")().content_hash()
    assert twin("a")().content_hash() != twin("b")().content_hash()


def test_a_default_that_was_added_and_the_environment_do_not_count() -> None:
    class First(Operator):
        size: int = 1

    def later() -> type[Operator]:
        class First(Operator):
            size: int = 1
            colour: str = "red"

        First.__qualname__ = "test_a_default_that_was_added_and_the_environment_do_not_count.<locals>.First"
        return First

    assert First(size=2).content_hash() == later()(size=2).content_hash()
    assert later()(size=2, colour="blue").content_hash() != First(size=2).content_hash()
    assert Scale(threads=8).content_hash() == Scale().content_hash()


def test_an_operators_own_content_counts_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a dataset and the weights of a model are no fields; they count inside a Sequential all the same."""
    places = [
        lambda: Sequential([Scale(), Blob()]),
        lambda: Sequential([Sequential([Blob()])]),
        lambda: Weighted(components=((1.0, Blob()),)),
    ]
    before = [place().content_hash() for place in places]
    monkeypatch.setattr(Blob, "content", "1" * 64)
    assert all(old != place().content_hash() for old, place in zip(before, places, strict=True))


@pytest.mark.parametrize(
    ("operator", "path"),
    [
        (lambda: Weighted(note=repr(object())), r"fields\.note"),
        (lambda: Weighted(options={"a": {"b": [0, str(object())]}}), r"fields\.options\.a\.b\[1\]"),
        (lambda: Weighted(options={str(object()): 1}), r"fields\.options\.<object object at"),
        (lambda: Weighted(options={"a": {object(): 1}}), r"fields\.options\.a\.<object object at"),
        (lambda: Weighted(note=repr(test_the_hash_by_hand)), r"fields\.note"),
    ],
)
def test_a_memory_address_is_refused_with_its_path(operator: Any, path: str) -> None:
    """pipekit:A21: the repr of an object with its address would give another hash in every process."""
    with pytest.raises(ValueError, match=rf"{path}.*: holds <.* at 0x[0-9a-f]+>, a memory address"):
        operator().content_hash()


def test_an_object_in_a_configuration_is_refused_with_its_path() -> None:
    """pipekit:A21: an object without a form in a file is never replaced by its repr."""
    with pytest.raises(ValueError, match=r"Weighted\.options: a object cannot be written"):
        Weighted(options={"a": object()}).content_hash()


def test_words_that_only_look_like_an_address_are_text() -> None:
    assert Weighted(note="look at 0x1f").content_hash() != Weighted(note="look at 0x2f").content_hash()


PROCESS = """
from nnx_jax.core.hashing import hash_config
from nnx_jax.core.operator import Operator, Sequential

class Net(Operator):
    sizes: dict[str, int]
    tags: tuple[str, ...] = ()

pipeline = Sequential([Net(sizes={name: len(name) for name in {"b", "aa", "ccc"}}), Net(sizes={}, tags=("a",))])
import sys
print(pipeline.content_hash(), hash_config(pipeline.state(), {"seed": 1}), "jax" in sys.modules)
"""


def test_two_fresh_processes_agree() -> None:
    """pipekit:A21: the same configuration has the same digest in two fresh processes, under other hash seeds."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    found = [process.communicate()[0].split() for process in processes]
    assert found[0] == found[1]
    assert len(found[0][0]) == 64
    assert found[0][2] == "False"


def test_the_order_of_keys_does_not_count_and_where_a_part_ends_does() -> None:
    """pipekit:A18: equal for another insertion order; two parts differ from the same content in one."""
    assert hash_config({"b": 1, "a": 2}) == hash_config({"a": 2, "b": 1})
    assert hash_config("p", "q") != hash_config("pq")
    assert hash_config([1], [2]) != hash_config([1, 2])
    assert hash_config("p", "q") != hash_config("q", "p")


def test_the_golden_value_of_the_earlier_package() -> None:
    """pipekit:A19: an identity that was recorded with the earlier package is found again."""
    known = "bf01860e66f8c04cbb50110b9ae6bff4ef727e98f0faec8562e111fe7e9db296"
    assert hash_config("IterableDataset", {"hash": "abc", "seed": 0, "split": "train"}) == known


@pytest.mark.parametrize(
    "part", [object(), float("nan"), {1: 2}, repr(object())], ids=["object", "nan", "whole key", "address"]
)
def test_what_is_not_plain_is_refused(part: object) -> None:
    with pytest.raises(ConfigError):
        hash_config("name", part)
