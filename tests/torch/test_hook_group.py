"""The same hooks in two real gloo processes as in one: decisions are those of all rows, and of all processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.processes import results
from tests.torch import hook_group
from tests.torch.group_runs import arrays

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return hook_group.lists(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two")
    return results("tests.torch.hook_group:life", 2, args={"folder": str(folder)}, timeout=240, framework="torch")


def close(found: Any, wanted: Any, rtol: float = 2e-5, atol: float = 2e-6) -> None:
    """Equal names and lengths, and numbers but for the order of their sums."""
    assert set(found) == set(wanted)
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=rtol, atol=atol, err_msg=name)


def test_the_same_vetoes_and_averages(one: Any, two: Any) -> None:
    """nvalchemi:131 nvalchemi:95: windows, clipping, spikes that one process alone has, and averages."""
    assert two[0]["list"] == two[1]["list"]
    close(two[0]["list"]["weights"], one["list"]["weights"])
    close(two[0]["list"]["slots"], one["list"]["slots"])
    assert one["list"]["slots"]["slots/SpikeSkipHook/skips"] >= 1


def test_a_spike_of_the_loss_is_judged_over_all_rows(one: Any, two: Any) -> None:
    """nvalchemi:95: a rank-local loss would be another one on each process."""
    assert two[0]["loss"] == two[1]["loss"]
    close(two[0]["loss"]["weights"], one["loss"]["weights"])
    steps = [[row["step"] for row in found["loss"]["records"]] for found in (one, two[0])]
    assert steps[0] == steps[1]


def test_a_veto_of_one_is_a_veto_of_all(one: Any, two: Any) -> None:
    """A hook of the user's own sees the loss of all rows after the backward pass, and speaks for the group."""
    assert two[0]["says"] == two[1]["says"]
    assert two[0]["says"]["skips"] == one["says"]["skips"] == [False] * 3 + [True] + [False] * 8
    np.testing.assert_allclose(two[0]["says"]["losses"], one["says"]["losses"], rtol=2e-5)
    close(two[0]["says"]["weights"], one["says"]["weights"])


def test_mixed_precision_and_profiles_of_each_process(one: Any, two: Any) -> None:
    """nvalchemi:130 nvalchemi:142: bfloat16 in a group, and a trace below every rank's own name."""
    close(two[0]["mixed"]["weights"], one["mixed"]["weights"], rtol=0.1, atol=0.02)
    assert two[0]["mixed"] == two[1]["mixed"]
    names = [f"profiles/rank_{rank}/torch/trace_0.json" for rank in range(2)]
    assert set(two[0]["traces"]) | set(two[1]["traces"]) == set(names)


def test_loaders_get_a_distributed_sampler(two: Any) -> None:
    """nvalchemi:128 nvalchemi:129: each process has the complement of the other's rows, a sampler of the user's own
    stays, and every epoch has its order, which comes again."""
    first, second = (each["samplers"] for each in two)
    assert sorted(first["rows"] + second["rows"]) == sorted(arrays()["x"][:, 0].tolist())
    assert first["seed"] == 3
    for each in (first, second):
        assert each["kept"]
        assert each["orders"][0] == each["orders"][2] != each["orders"][1]
    assert not set(first["orders"][0]) & set(second["orders"][0])
    assert first["weights"] == second["weights"]
    assert first["records"] == second["records"]
