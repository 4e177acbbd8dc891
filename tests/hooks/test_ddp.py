"""DDPHook: nothing on one device; its devices in runs and strategies; what several processes are asked for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from nnx_jax.core.errors import ConfigError, DataError, ProcessGroupError
from nnx_jax.core.hooks import Hook, TrainingUpdateHook
from nnx_jax.core.stages import TrainingStage as Stage
from nnx_jax.data import ArrayDataset
from nnx_jax.distributed import DistributedManager
from nnx_jax.fit.job import prepare
from nnx_jax.hooks import DDPHook
from nnx_jax.model import NNModel
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.run import RunSpec
from nnx_jax.params.train import NNTrainParams
from tests.spmd.toy import Linear, arrays, by_hand, columns, fit, halves
from tests.training.toys import Toy, batches, per_item, squared, strategy, w


class Owner:
    """Stands for a run under a distributed manager of `world` processes."""

    def __init__(self, world: int | None = None, ready: bool = True, *, methods: bool = False) -> None:
        if world is not None:
            values = {"world_size": world, "is_initialized": ready}
            calls = {name: lambda value=value: value for name, value in values.items()}
            self.distributed_manager = SimpleNamespace(**(calls if methods else values))
        self.loader, self.model = object(), object()

    def setup(self, hook: Any) -> None:
        hook(SimpleNamespace(workflow=self, models={"main": self.model}, global_rank=0), Stage.SETUP)


class Sharing(Owner):
    """One that can split its data."""

    asked: Any = None

    def share_data_parallel(self, hook: Any) -> None:
        self.asked = hook


def test_one_device_of_one_process_changes_nothing() -> None:
    """nvalchemi:126 for the hook alone: by its own number of devices, and by a manager that counts one process."""
    for owner, devices in ((Sharing(), 1), (Sharing(1), None), (Sharing(1, methods=True), None)):
        before, hook = dict(vars(owner)), DDPHook(model_keys=("missing",), devices=devices)
        owner.setup(hook)
        assert vars(owner) == before
        assert owner.asked is None
        assert hook.split_over == ()


def test_it_claims_setup_only() -> None:
    """nvalchemi:162 for the hook alone."""
    hook = DDPHook()
    assert isinstance(hook, Hook)
    assert not isinstance(hook, TrainingUpdateHook)
    assert hook.stage is Stage.SETUP
    assert not hasattr(hook, "_runs_on_stage")


def test_the_seeds_arguments() -> None:
    hook = DDPHook(
        model_keys="main", find_unused_parameters=False, broadcast_buffers=True, static_graph=True, process_group=None,
        backend="nccl", auto_init=False, sampler_cls=None, sampler_kwargs={"seed": 3},
    )  # fmt: skip
    assert hook.model_keys == ("main",)
    assert DDPHook.from_state(hook.state()) == hook


# Devices of one process ---------------------------------------------------------------------------------------------


def test_which_devices() -> None:
    """All, a number of them, those of a trainer, those of the package's own manager."""
    all_, some = tuple(jax.local_devices()), tuple(jax.local_devices()[1:3])
    DistributedManager.initialize()
    managed, chosen = Sharing(), Sharing()
    managed.distributed_manager = DistributedManager()  # type: ignore[attr-defined]
    chosen.devices = some  # type: ignore[attr-defined]
    for owner, hook, found in (
        (Sharing(), DDPHook(), all_),
        (Sharing(), DDPHook(devices=2), all_[:2]),
        (managed, DDPHook(), all_),
        (chosen, DDPHook(), some),
        (Sharing(1), DDPHook(devices=2), all_[:2]),
    ):
        owner.setup(hook)
        assert hook.split_over == found
        assert owner.asked is None


def test_more_devices_than_there_are() -> None:
    with pytest.raises(ConfigError, match=r"DDPHook.devices: got 9, but there are 4 devices"):
        Sharing().setup(DDPHook(devices=9))


class Counts:
    """Notes both counts of updates."""

    stage, frequency = Stage.AFTER_BATCH, 1

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def __call__(self, ctx: Any, stage: Stage) -> None:
        self.seen.append((ctx.step_count, ctx.global_step_count))


@pytest.mark.parametrize("devices", [None, 2])
def test_a_run_on_its_devices_is_the_run_on_one(tmp_path: Path, devices: int | None) -> None:
    """Weights bit for bit, the same run id; an update counts for every device."""
    counts, hook = Counts(), DDPHook(devices=devices)
    run = fit(tmp_path, window=4, hooks=[hook, counts])
    plain = fit(tmp_path / "plain", window=4)
    assert len(hook.split_over) == (devices or 4)
    assert np.array_equal(arrays(run)["params/w"], by_hand(4).astype(np.float32))
    assert run.id == plain.id
    assert counts.seen[-1] == (2, 2 * (devices or 4))


def test_a_configuration_names_it(tmp_path: Path) -> None:
    """`{kind: ddp}` beside a mesh: the mesh says how many devices."""
    data = NNDataParams(train=ArrayDataset(columns()), batch_size=8, shuffle=False)
    spec = RunSpec(data=data, train=NNTrainParams(n_epochs=1), hooks=({"kind": "ddp"},), mesh={"data": 2})
    engine = prepare(NNModel(module=Linear(), loss=halves), spec).engine
    assert engine.place.sharding is not None
    assert engine.place.sharding.parts == 2


def trained(*hooks: Any, rows: int = 8, loss: Any = per_item, **given: Any) -> Any:
    """A strategy of one weight after four updates of batches of so many whole numbers."""
    made = strategy(hooks=hooks, loss_fn=loss, **given)
    made.run(batches(*[np.arange(rows) % 3 - 1.0] * 4))
    return made


def test_a_strategy_on_its_devices_is_the_strategy_on_one() -> None:
    """The models stay the objects they are, without a trace of the devices."""
    model = Toy()
    many, one = trained(DDPHook(), models=model), trained()
    assert many.models["main"] is model
    assert model.w[...].devices() == {jax.devices()[0]}
    assert w(many) == pytest.approx(w(one), rel=1e-6)
    assert (many.step_count, many.global_step_count, one.global_step_count) == (4, 16, 4)


def test_a_strategy_by_single_batches() -> None:
    made, plain = strategy(hooks=[DDPHook()]), strategy()
    for batch in batches(*[np.arange(8) - 2.0] * 3):
        made.train_batch(batch)
        plain.train_batch(batch)
    assert w(made) == pytest.approx(w(plain), rel=1e-6)
    assert made.global_step_count == 12


def test_a_built_in_loss_leaves_rows_out() -> None:
    """Batches of 6 rows on four devices are filled up, and say so."""
    with pytest.warns(UserWarning, match="batches of 6 rows are computed as 8 on 4 devices"):
        made = trained(DDPHook(), rows=6, loss="mse")
    assert w(made) == pytest.approx(w(trained(rows=6, loss="mse")), rel=1e-6)


def test_a_strategys_own_devices() -> None:
    devices = jax.local_devices()[2:]
    made = trained(DDPHook(), devices=devices)
    assert made.global_step_count == 8
    assert w(made) == pytest.approx(w(trained()), rel=1e-6)
    with pytest.raises(ConfigError, match="2 devices given; a strategy trains on one, and with DDPHook"):
        strategy(devices=devices)
    with pytest.raises(ConfigError, match=r"give jax.local_devices\(\), or some, each once"):
        strategy(devices=devices[:1] * 2, hooks=[DDPHook()])


def test_restart_counters_of_a_strategy_on_devices() -> None:
    assert strategy(step_count=2, global_step_count=8, hooks=[DDPHook()]).global_step_count == 8
    with pytest.raises(ConfigError, match="step_count=2 with 4 workers make 8"):
        strategy(step_count=2, global_step_count=9, hooks=[DDPHook()])


def test_a_loss_without_a_mask_needs_batches_that_split() -> None:
    """A plain mean over the batch: 6 rows on 4 devices would become another mean with rows that fill up."""
    with pytest.raises(DataError, match=r"6 rows does not split over 4 devices .* a built-in loss"):
        trained(DDPHook(), rows=6, loss=squared)
    with pytest.raises(DataError, match=r"6 rows does not split over 4 devices"):
        strategy(hooks=[DDPHook()]).train_batch(batches(np.arange(6))[0])
    assert w(trained(DDPHook(), loss=squared)) == pytest.approx(w(trained(loss=squared)), rel=1e-6)


# Processes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("methods", [False, True])
def test_several_processes_are_asked_for_once(methods: bool) -> None:
    owner, hook = Sharing(2, methods=methods), DDPHook(model_keys=["main"])
    owner.setup(hook)
    assert owner.asked is hook


def test_a_model_that_is_not_there() -> None:
    """nvalchemi:127"""
    with pytest.raises(KeyError, match="'missing', which is no model"):
        Sharing(2).setup(DDPHook(model_keys=("missing",)))


def test_processes_that_do_not_know_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvalchemi:132: by the manager, and by what a launcher says."""
    with pytest.raises(RuntimeError, match=r"2 processes that do not know each other .*initialize\(\)"):
        Sharing(2, ready=False).setup(DDPHook())
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError, match=r"4 processes that do not know each other .*initialize\(\)"):
        Sharing().setup(DDPHook())


def test_a_trainer_of_one_process_says_so() -> None:
    with pytest.raises(ProcessGroupError, match="2 processes, but splits the data of a Owner over the devices of one"):
        Owner(2).setup(DDPHook())
