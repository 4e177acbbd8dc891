"""Steps and validations of the user's own by two gloo processes: what one process makes of the union, by the rules of
`nnx_jax.torch.together`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.processes import results
from tests.torch import ddp_steps
from tests.torch.test_ddp_beyond import equal

pytestmark = pytest.mark.slow

STEPS = "tests.torch.ddp_steps"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(what each of two processes made, what one made of the union)."""
    folder = tmp_path_factory.mktemp("steps")
    given = {"folder": str(folder / "group"), "world": 2}
    found = results(f"{STEPS}:steps", 2, args=given, timeout=200, framework="torch")
    return found, ddp_steps.steps(str(folder / "one"), 2)


@pytest.mark.parametrize(
    "case",
    [
        "default",
        "jax",
        "torch",
        "tail",
        "none",
        "counted",
        "norms",
        "default norms",
        "Trainer",
        "validation",
        "skipped",
    ],
)
def test_one_process_on_the_union(seen: Any, case: str) -> None:
    """Delegating and by itself, in the words of JAX and of torch; processes with fewer rows and with none; what is
    recorded; batch norms; two optimizers, one of which steps now and then; and a microbatch that is undone."""
    equal(seen, case)


def test_what_is_not_finite_on_one_process_undoes_the_microbatch_on_all(seen: Any) -> None:
    (first, second), one = seen
    assert sum(first["skipped"]["skipped"]) == 2  # one microbatch of each epoch
    for found in (first, second, one):
        assert "FloatingPointError" in found["not finite"]["kinds"], found["not finite"]
        assert found["not finite"]["text"] == one["not finite"]["text"]


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Any:
    given = {"folder": str(tmp_path_factory.mktemp("apart"))}
    return results(f"{STEPS}:apart", 2, args=given, timeout=100, framework="torch")


@pytest.mark.parametrize(
    "case, words",
    [
        ("steps_once_more", "has ended on rank 0, steps 'main' on rank 1"),
        ("reports_nothing", "reports {'main': 1} on rank 0, {'main': 0} on rank 1"),
        ("takes_no_mean", "takes a mean on rank 0, steps 'main' on rank 1"),
        ("records_more", "records ['loss'] on rank 0, ['loss', 'labels', 'twice'] on rank 1"),
    ],
)
def test_a_step_that_does_something_else_on_one_process(apart: Any, case: str, words: str) -> None:
    """A StepError on both, at once."""
    for told in apart:
        assert told[case]["type"] == "StepError", told[case]
        assert words in told[case]["text"]
        assert told[case]["seconds"] < 30
