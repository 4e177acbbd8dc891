"""ProfilerHook: real traces, in the right folder, of the right batches, once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from nnx_jax.core.errors import ConfigError, HookStateError
from nnx_jax.core.hooks import Hook
from nnx_jax.core.stages import TrainingStage as Stage
from nnx_jax.hooks import ProfilerHook, TorchProfilerHook
from nnx_jax.hooks.profiler import ProfileSchedule, schedule


@pytest.fixture(autouse=True)
def no_profiler_left() -> Iterator[None]:
    yield
    with pytest.raises(RuntimeError):  # a test that leaves a trace open would spoil the next
        jax.profiler.stop_trace()


def context(rank: int = 0) -> Any:
    return SimpleNamespace(global_rank=rank, loss=jnp.float32(1))


def batches(hook: ProfilerHook, count: int, rank: int = 0) -> None:
    for _ in range(count):
        hook(context(rank), Stage.BEFORE_BATCH)
        jax.jit(lambda x: x * 2)(jnp.ones(8)).block_until_ready()
        hook(context(rank), Stage.AFTER_BATCH)


def traces(folder: Path) -> list[str]:
    """Folders below which a trace lies, relative to `folder`."""
    found = {path.relative_to(folder).parts for path in folder.rglob("*.trace.json.gz")}
    return sorted("/".join(parts[: parts.index("plugins")]) for parts in found)


def test_a_run_is_recorded_once_below_its_rank(tmp_path: Path) -> None:
    """nvalchemi:142 for the hook alone."""
    hook = ProfilerHook(tmp_path / "profiles")
    assert isinstance(hook, Hook)
    with hook:
        assert not (tmp_path / "profiles").exists()
        hook(context(1), Stage.BEFORE_TRAINING)
        batches(hook, 2, rank=1)
        hook(context(1), Stage.AFTER_TRAINING)
        assert traces(tmp_path / "profiles") == ["rank_1/jax"]
    with pytest.raises(RuntimeError, match="has written .* and ended"):
        hook(context(1), Stage.BEFORE_TRAINING)


def test_a_lone_batch_starts_it_and_leaving_ends_it(tmp_path: Path) -> None:
    """nvalchemi:143 for the hook alone."""
    with ProfilerHook(tmp_path) as hook:
        batches(hook, 1)
        assert traces(tmp_path) == []
    assert traces(tmp_path) == ["rank_0/jax"]
    hook.close()
    with pytest.raises(HookStateError):
        hook(context(), Stage.BEFORE_BATCH)


def test_without_a_batch_there_is_no_file(tmp_path: Path) -> None:
    """nvalchemi:143 for the hook alone."""
    with ProfilerHook(tmp_path / "out"):
        pass
    assert not (tmp_path / "out").exists()


def test_a_schedule_records_each_cycle(tmp_path: Path) -> None:
    hook = ProfilerHook(tmp_path, schedule=schedule(wait=1, warmup=1, active=2, repeat=2), rank_subdirs=False, name="t")
    with hook:
        hook(context(), Stage.BEFORE_TRAINING)
        batches(hook, 3)
        assert traces(tmp_path) == []
        batches(hook, 1)
        assert traces(tmp_path) == ["t/cycle_0"]
        batches(hook, 8)
        assert traces(tmp_path) == ["t/cycle_0", "t/cycle_1"]


def test_an_error_in_the_run_ends_the_recording(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), ProfilerHook(tmp_path) as hook:
        batches(hook, 1)
        raise ZeroDivisionError
    assert traces(tmp_path) == ["rank_0/jax"]


def test_another_profiler_is_active(tmp_path: Path) -> None:
    with jax.profiler.trace(str(tmp_path / "other")), pytest.raises(RuntimeError, match="another profiler is active"):
        ProfilerHook(tmp_path / "mine")(context(), Stage.BEFORE_TRAINING)


@pytest.mark.parametrize(
    "plan, recorded",
    [
        (ProfileSchedule(), [0, None, None, None, None, None]),
        (ProfileSchedule(wait=1, active=2, repeat=1), [None, 0, 0, None, None, None]),
        (ProfileSchedule(wait=1, warmup=1, active=1, repeat=0), [None, None, 0, None, None, 1]),
        (ProfileSchedule(active=2, repeat=2), [0, 0, 1, 1, None, None]),
    ],
)
def test_which_batches_a_schedule_records(plan: ProfileSchedule, recorded: list[int | None]) -> None:
    assert [plan.cycle(batch) for batch in range(6)] == recorded


@pytest.mark.parametrize("fields", [{"frequency": 2}, {"schedule": {"active": 0}}, {}])
def test_what_cannot_be_asked_for(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ProfilerHook(**({"output_dir": "out"} if fields else {}), **fields)


def test_the_torch_profiler_says_what_to_use() -> None:
    hook = TorchProfilerHook(output_dir="profiles")
    owner = SimpleNamespace(framework=SimpleNamespace(backend="jax"))
    with pytest.raises(ValueError, match="ProfilerHook takes the same output_dir"):
        hook(SimpleNamespace(workflow=owner, global_rank=0), Stage.BEFORE_TRAINING)
