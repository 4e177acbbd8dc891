"""The import lines of the founding document, with the package's name in them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nnx_jax.core.errors import ProcessGroupError
from nnx_jax.distributed import DistributedManager
from nnx_jax.training import TrainingStrategy

LINES = (
    "from nnx_jax.distributed import DistributedManager",
    "from nnx_jax.hooks import Hook, CheckpointableHook, StageTimingHook, TorchProfilerHook",
    "from nnx_jax.training import CheckpointHook, TrainingStrategy",
    "from nnx_jax.training import TrainingStage, ValidationConfig, ValidationLoop",
    "from nnx_jax.training.hooks import DDPHook, MixedPrecisionHook",
    "from nnx_jax.training.hooks import EMAHook, CheckpointHook",
    "from nnx_jax.training.hooks import ModulePatchHook, TrainableParameterHook",
    "from nnx_jax.training.hooks import TorchProfilerHook",
    "from nnx_jax.training.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator",
    "from nnx_jax.training.optimizers import zero_gradients, step_optimizers, step_lr_schedulers, setup_optimizers",
    "from nnx_jax.training import zero_gradients, step_optimizers, step_lr_schedulers, setup_optimizers",
    "from nnx_jax.training.strategy import TrainingStrategy",
)


@pytest.mark.parametrize("line", LINES)
def test_the_documents_import_lines_run(line: str) -> None:
    """nvalchemi:159: every one resolves."""
    exec(line, {})


def test_one_class_under_every_name() -> None:
    """nvalchemi:159: EMAHook of training, of training.hooks and of hooks is one class; and so are the others."""
    import nnx_jax.hooks
    import nnx_jax.training
    import nnx_jax.training.hooks

    for name in ("EMAHook", "CheckpointHook", "MixedPrecisionHook"):
        places = (nnx_jax.training, nnx_jax.training.hooks, nnx_jax.hooks)
        assert len({getattr(place, name) for place in places}) == 1
    for name in nnx_jax.training.hooks.__all__:
        assert getattr(nnx_jax.training.hooks, name) is getattr(nnx_jax.hooks, name)
    for name in nnx_jax.training.__all__:
        assert getattr(nnx_jax.training, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'EMAHok'"):
        nnx_jax.training.EMAHok  # noqa: B018


def test_importing_the_package_of_strategies_loads_no_framework() -> None:
    code = "import sys, nnx_jax.training, nnx_jax.hooks; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert not {"jax", "flax", "optax", "torch"} & set(done.stdout.split())


def test_one_process_is_its_own_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvalchemi:164: initialize() first, then the manager's numbers, which a strategy takes."""
    monkeypatch.setattr(DistributedManager, "_ready", False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert not DistributedManager.is_initialized()
    with pytest.raises(ProcessGroupError, match="call DistributedManager.initialize"):
        DistributedManager()
    DistributedManager.initialize()
    manager = DistributedManager()
    assert (manager.rank, manager.local_rank, manager.world_size, manager.distributed) == (0, 0, 1, False)
    assert (manager.find_unused_parameters, manager.broadcast_buffers) == (False, False)
    assert manager.device.platform
    assert DistributedManager.is_initialized()


def test_processes_that_were_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvalchemi:132: several processes launched, one known: a RuntimeError that says what to do."""
    monkeypatch.setattr(DistributedManager, "_ready", False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="launcher started 2 processes"):
        DistributedManager.initialize()
    assert not DistributedManager.is_initialized()


def test_the_documents_example_runs_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvalchemi:164: the data-parallel example, with its two hooks, trains in one process as it stands."""
    from nnx_jax.training.hooks import DDPHook, MixedPrecisionHook
    from tests.training.toys import SGD, Toy, batches, squared, w

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    DistributedManager.initialize()
    strategy = TrainingStrategy(
        models=Toy(),
        optimizer_configs=SGD,
        loss_fn=squared,
        num_steps=1,
        distributed_manager=DistributedManager(),
        hooks=[DDPHook(find_unused_parameters=False), MixedPrecisionHook(precision="fp32")],
    )
    strategy.run(batches([1, 1, 1, 1]))  # the tests have four devices, which DDPHook splits the rows over
    assert w(strategy) == pytest.approx(0.8)
    assert strategy.global_step_count == 1
