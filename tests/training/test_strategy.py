"""TrainingStrategy: order, counters, targets, standalone batches, continuing, contexts and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

from nnx_jax.core.errors import ConfigError, ModelError
from nnx_jax.hooks import (
    CheckpointHook,
    EMAHook,
    GradientAccumulationHook,
    MixedPrecisionHook,
    TracedHook,
    TrainableParameterHook,
    TrainingUpdateHook,
)
from nnx_jax.training import OptimizerConfig, TrainingStrategy, ValidationConfig
from tests.training.toys import ADAM, SGD, Loader, S, Toy, Watch, batches, squared, strategy, toy, w

ALL = [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 14, 15, 16, 17]


def arrays(made: TrainingStrategy) -> dict[str, np.ndarray]:
    return {name: np.array(leaf) for name, leaf in made._engine.programs.named(made._state).items()}


# -- order and counters ----------------------------------------------------------------------------------------


def test_the_numbers_of_the_toy() -> None:
    """0.8, 0.64, 0.512, 0.4096 over two epochs of two batches."""
    made = strategy()
    made.run(batches(1, 1))
    assert w(made) == pytest.approx(0.4096)
    assert (made.step_count, made.batch_count, made.epoch_count, made.epoch_step_count) == (4, 4, 2, 0)
    assert made.last_loss == pytest.approx(0.512**2)


def test_the_order_of_one_batch() -> None:
    """nvalchemi:2: every stage but the two that are done, in order of value."""
    watch = Watch()
    strategy(hooks=[watch], num_epochs=1).run(batches(1))
    assert watch.values() == ALL


def test_setup_comes_before_the_optimizer_and_training_after() -> None:
    """nvalchemi:20: at SETUP nothing is built, at BEFORE_TRAINING the optimizer is there."""
    watch = Watch(S.SETUP, S.BEFORE_TRAINING, look=lambda ctx: (ctx.workflow.training_began, len(ctx.optimizers)))
    strategy(hooks=[watch], num_steps=1).run(batches(1))
    assert [found for _, found in watch.seen] == [(False, 0), (True, 1)]


@pytest.mark.parametrize(
    "steps, before, after, ends",
    [
        pytest.param(3, [0, 1], 1, (1, 1), id="row 5"),
        pytest.param(2, [0], 1, (1, 0), id="row 6"),
        pytest.param(1, [0], 0, (0, 1), id="row 7"),
    ],
)
def test_epoch_events(steps: int, before: list[int], after: int, ends: tuple[int, int]) -> None:
    """nvalchemi:5, nvalchemi:6, nvalchemi:7: AFTER_EPOCH only for passes that were finished."""
    watch = Watch(S.BEFORE_EPOCH, S.AFTER_EPOCH, S.AFTER_TRAINING, look=lambda ctx: ctx.epoch)
    made = strategy(hooks=[watch], num_steps=steps)
    made.run(batches(1, 1))
    assert watch.at(S.BEFORE_EPOCH) == before
    assert len(watch.at(S.AFTER_EPOCH)) == after
    assert len(watch.at(S.AFTER_TRAINING)) == 1
    assert (made.epoch_count, made.epoch_step_count) == ends


def test_the_end_of_an_epoch_as_a_hook_sees_it() -> None:
    """nvalchemi:4: one finished epoch, and no batch of the next."""
    watch = Watch(S.AFTER_EPOCH)
    strategy(hooks=[watch], num_epochs=1).run(batches(1, 1))
    assert watch.at(S.AFTER_EPOCH) == [(2, 2, 0, 1)]


class VetoAt(TrainingUpdateHook):
    """No to the updates of some microbatches."""

    def __init__(self, *places: int) -> None:
        self.places = places

    def __call__(self, ctx: Any, stage: S, will_skip: Any) -> Any:
        if stage is not S.DO_OPTIMIZER_STEP:
            return True, ctx.loss
        return ctx.xp.all(ctx.batch_count != ctx.xp.asarray(self.places)), ctx.loss


def test_a_vetoed_batch_counts_as_a_batch() -> None:
    """nvalchemi:8: a veto on the second of three batches: two updates, three batches."""
    made = strategy(hooks=[VetoAt(1)], num_steps=2)
    made.run(Loader(4))
    assert (made.step_count, made.batch_count, made.epoch_step_count) == (2, 3, 3)
    assert w(made) == pytest.approx(0.64)


class Manager:
    """Four workers, as an object with attributes and one with methods."""

    world_size = 4

    def rank(self) -> int:
        return 0


def test_steps_of_all_workers() -> None:
    """nvalchemi:9, nvalchemi:10: four workers: AFTER_BATCH sees (1, 4), then (2, 8); a veto moves neither."""
    watch = Watch(S.AFTER_BATCH, look=lambda ctx: (ctx.step_count, ctx.global_step_count))
    made = strategy(hooks=[watch, VetoAt(1)], num_steps=2, distributed_manager=Manager())
    made.run(batches(1, 1, 1))
    assert watch.at(S.AFTER_BATCH) == [(1, 4), (1, 4), (2, 8)]
    assert made.global_step_count == 8


# -- how long --------------------------------------------------------------------------------------------------


def test_nothing_happens_at_the_target() -> None:
    """nvalchemi:11: neither BEFORE_TRAINING nor AFTER_TRAINING, and no batch is taken."""
    watch, loader = Watch(), Loader(2)
    made = strategy(hooks=[watch], num_steps=4, step_count=4)
    made.run(loader)
    assert not {S.BEFORE_TRAINING, S.AFTER_TRAINING} & {stage for stage, _ in watch.seen}
    assert loader.used == []


def test_lengths_that_cannot_be() -> None:
    """nvalchemi:12, nvalchemi:13, nvalchemi:14: epochs need a sized loader, runs need batches, and one target."""
    with pytest.raises(ValueError, match="sized loader"):
        strategy(num_epochs=1).run(iter(batches(1)))
    with pytest.raises(ValueError, match="gave no batch"):
        strategy(num_steps=1).run([])
    for given in ({"num_epochs": None}, {"num_epochs": 1, "num_steps": 1}):
        with pytest.raises(ConfigError, match="give exactly one"):
            TrainingStrategy(models=Toy(), optimizer_configs=SGD, loss_fn=squared, **given)
    with pytest.raises(TypeError, match="unexpected keyword"):
        strategy(num_stepz=1)


def test_an_endless_stream_has_steps() -> None:
    """With num_steps, batches may come from an iterator without length."""
    made = strategy(num_steps=3)
    made.run(iter(batches(1, 1, 1, 1)))
    assert (made.step_count, made.batch_count) == (3, 3)


def test_counters_that_fit_no_place() -> None:
    """nvalchemi:15: 4 microbatches are not 1 * 3 + 2."""
    with pytest.raises(ValueError, match="restart counters are inconsistent"):
        strategy(step_count=4, epoch_count=1, epoch_step_count=2, num_steps=9).run(Loader(3))


def test_a_restart_finds_its_place() -> None:
    """nvalchemi:16: 4 batches done in epoch 1 of 3 a pass: index 0 is passed over, then 1, 2 and 0 of epoch 2."""
    loader, watch = Loader(3), Watch(S.BEFORE_EPOCH, look=lambda ctx: ctx.epoch)
    made = strategy(step_count=4, epoch_count=1, num_steps=7, hooks=[watch])
    made.run(loader)
    assert (loader.epochs, loader.used[1:]) == ([1, 2], [1, 2, 0])
    assert (made.step_count, made.batch_count, made.epoch_count, made.epoch_step_count) == (7, 7, 2, 1)
    assert watch.at(S.BEFORE_EPOCH) == [2]


class Skipping(Loader):
    """A loader that can begin later."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.steps: list[int] = []

    def set_epoch_step(self, step: int) -> None:
        self.steps.append(step)

    def __iter__(self) -> Any:
        for index in range(self.steps[-1] if len(self.epochs) == 1 else 0, self.n):
            self.used.append(index)
            yield batches(1)[0]


def test_a_loader_that_begins_later_passes_over_nothing() -> None:
    """nvalchemi:17: set_epoch_step(3) once, and the first batch taken is index 3."""
    loader = Skipping(4)
    made = strategy(step_count=3, epoch_step_count=3, num_steps=5)
    made.run(loader)
    assert (loader.steps, loader.used) == ([3], [3, 0])
    assert (made.step_count, made.epoch_count, made.epoch_step_count) == (5, 1, 1)


def test_a_veto_for_ever_is_an_error() -> None:
    """nvalchemi:21: the run ends with the name of the hook that said no."""

    class Never(TrainingUpdateHook):
        def __call__(self, ctx: Any, stage: S, will_skip: Any) -> Any:
            return stage is not S.DO_OPTIMIZER_STEP, ctx.loss

    with pytest.raises(RuntimeError, match="Never vetoes"):
        strategy(num_steps=1, hooks=[Never()]).run(batches(1, 1))


def test_epochs_are_passes_over_the_data() -> None:
    """nvalchemi:22: one epoch of 4 batches with K=4: 4 batches, 1 update, 1 epoch."""
    loader = Loader(4)
    made = strategy(num_epochs=1, hooks=[GradientAccumulationHook(4)])
    made.run(loader)
    assert (len(loader.used), made.step_count, made.epoch_count) == (4, 1, 1)


def test_a_modifier_counts_updates() -> None:
    """One epoch of 4 batches with K=2, times 1.5: ceil(2 * 1.5) = 3 updates."""
    made = strategy(num_epochs=1, epoch_step_modifier=1.5, hooks=[GradientAccumulationHook(2)])
    made.run(Loader(4))
    assert (made.step_count, made.batch_count) == (3, 6)


def test_windows_go_on_over_the_epochs_end() -> None:
    """nvalchemi:62: K=4, 6 batches a pass, 3 updates: 12 batches."""
    made = strategy(num_steps=3, hooks=[GradientAccumulationHook(4)])
    made.run(Loader(6))
    assert (made.batch_count, made.epoch_count, made.epoch_step_count) == (12, 2, 0)


def test_or_end_with_it() -> None:
    """nvalchemi:63: flush: 6 batches of K=4 make 2 updates; the second is divided by its own two.

    x = 1, 1, 1, 1 | 2, 4 at w = 1: 0.8 after the first; gradient 2 * 0.8 * (4 + 16) / 2 = 16: 0.8 - 1.6 = -0.8.
    """
    made = strategy(num_epochs=1, hooks=[GradientAccumulationHook(4, on_partial="flush")])
    made.run(batches(1, 1, 1, 1, 2, 4))
    assert made.step_count == 2
    assert w(made) == pytest.approx(-0.8, abs=1e-6)


# -- standalone batches, continuing ----------------------------------------------------------------------------


def test_a_batch_by_itself() -> None:
    """nvalchemi:20, nvalchemi:23: SETUP once in three calls, then stages 4 to 15 only; no target is looked at."""
    watch = Watch()
    made = strategy(hooks=[watch], num_steps=1)
    with made:
        for _ in range(3):
            made.train_batch(batches(1)[0])
    assert watch.values() == [1, *[4, 5, 6, 7, 8, 9, 11, 12, 14, 15] * 3]
    assert made.step_count == 3
    assert w(made) == pytest.approx(0.512)


def test_batches_outside_of_a_context_are_set_up_once() -> None:
    """nvalchemi:20: without `with`, too."""
    watch = Watch(S.SETUP)
    made = strategy(hooks=[watch])
    made.train_batch(batches(1)[0])
    made.train_batch(batches(1)[0])
    made.run(batches(1, 1))
    assert len(watch.seen) == 1


def test_batch_and_run_give_the_same_bits() -> None:
    """nvalchemi:23: three train_batch calls are three batches of a run."""
    one, other = strategy(ADAM, num_steps=3), strategy(ADAM, num_steps=3)
    for batch in batches(1, 2, 3):
        one.train_batch(batch)
    other.run(batches(1, 2, 3))
    assert w(one) == w(other)


def test_scale_and_window_live_between_calls() -> None:
    """nvalchemi:81: fp16 outside of `with`: an overflow in the first call leaves half the scale for the second."""
    hook = MixedPrecisionHook("fp16", init_scale=1024.0)
    made = strategy(hooks=[hook])
    made.train_batch({"x": np.array([1e30], np.float32), "y": np.zeros(1, np.float32)})
    assert float(hook.state_dict()["state"]["scale"]) == 512.0
    assert (made.step_count, made.batch_count) == (0, 1)
    made.train_batch(batches(1)[0])
    assert (made.step_count, made.batch_count) == (1, 2)


def test_a_second_run_goes_on() -> None:
    """nvalchemi:24: two updates, then up to four: Adam's own count is 4, and all bits are those of one run."""
    twice, once = strategy(ADAM, num_steps=2), strategy(ADAM, num_steps=4)
    twice.run(batches(1, 2, 3))
    twice.num_steps = 4
    twice.run(batches(1, 2, 3))
    once.run(batches(1, 2, 3))
    state = arrays(twice)
    assert int(state["opt_state/inner/main/inner/0/count"]) == 4
    assert {name: leaf.tobytes() for name, leaf in state.items()} == {n: a.tobytes() for n, a in arrays(once).items()}


# -- hooks -----------------------------------------------------------------------------------------------------


class Context:
    """A hook that notes how it is entered and left."""

    frequency = 1
    stage = S.BEFORE_BATCH

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def __call__(self, ctx: Any, stage: S) -> None:
        """Watch."""

    def __enter__(self) -> None:
        self.log.append(f"+{self.name}")

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.log.append(f"-{self.name}{'' if kind is None else ' ' + kind.__name__}")


def test_nested_contexts_enter_once() -> None:
    """nvalchemi:19: entered in order, left in reverse, whatever is nested."""
    log: list[str] = []
    made = strategy(hooks=[Context("a", log), Context("b", log)])
    with made, made:
        made.train_batch(batches(1)[0])
        made.register_hook(Context("c", log))
        made.train_batch(batches(1)[0])
        assert log == ["+a", "+b", "+c"]
    assert log == ["+a", "+b", "+c", "-c", "-b", "-a"]


class Breaks(TracedHook):
    """Fails while the step is traced, the first time."""

    stage = S.AFTER_LOSS
    broken = True

    def __call__(self, ctx: Any, stage: S) -> None:
        if Breaks.broken:
            raise RuntimeError("at AFTER_LOSS")


def test_an_error_inside_a_batch_leaves_everything() -> None:
    """nvalchemi:18: it escapes, hooks are left with its type, counters and weight stay, and the retry works."""
    log: list[str] = []
    Breaks.broken = True
    made = strategy(hooks=[Context("a", log), Breaks()])
    with pytest.raises(RuntimeError, match="at AFTER_LOSS"), made:
        made.train_batch(batches(1)[0])
    assert log == ["+a", "-a RuntimeError"]
    assert (made.batch_count, made.step_count, w(made)) == (0, 0, 1.0)
    Breaks.broken = False
    made.train_batch(batches(1)[0])
    assert (made.batch_count, made.step_count) == (1, 1)
    assert w(made) == pytest.approx(0.8)


class Decay(TrainingUpdateHook):
    """Adds half the squared parameters to the loss."""

    def __call__(self, ctx: Any, stage: S, will_skip: Any) -> Any:
        if stage is not S.DO_BACKWARD:
            return True, ctx.loss
        return True, ctx.loss + 0.5 * sum(ctx.xp.sum(value**2) for value in ctx.models["main"].values())


def test_a_loss_of_the_parameters_is_differentiated() -> None:
    """nvalchemi:46: 2 w + w = 3 at w = 1: 0.7."""
    made = strategy(hooks=[Decay()], num_steps=1)
    made.run(batches(1))
    assert w(made) == pytest.approx(0.7)


def test_an_update_hook_registered_later_goes_on_from_there() -> None:
    """Two updates, then a hook: the third has its part, Adam goes on counting."""
    made = strategy(ADAM)
    for _ in range(2):
        made.train_batch(batches(1)[0])
    ema = EMAHook(decay=0.5)
    made.register_hook(ema)
    made.train_batch(batches(1)[0])
    assert (made.step_count, made.batch_count) == (3, 3)
    assert int(arrays(made)["opt_state/inner/main/inner/0/count"]) == 3
    assert float(ema.get_averaged_model().module.w[...]) == w(made)


def test_models_without_an_optimizer_rest() -> None:
    """A frozen teacher is called as in evaluation, and stays; patterns freeze parameters of others."""
    teacher = nnx.Sequential(nnx.Dropout(1.0, rngs=nnx.Rngs(0)), Toy(2.0))
    seen = lambda models, batch: models["student"](batch["x"]) - models["teacher"](batch["x"])  # noqa: E731
    made = strategy({"student": SGD}, models={"student": Toy(), "teacher": teacher}, training_fn=seen, num_steps=1)
    made.run(batches(1))
    assert w(made, "student") == pytest.approx(1.2)  # gradient 2 * (1 - 2): with dropout it would be 0.8
    assert float(teacher.layers[1].w[...]) == 2.0
    assert teacher.layers[0].deterministic is False
    two = {"a": Toy(), "b": Toy()}
    both = lambda models, batch: models["a"](batch["x"]) + models["b"](batch["x"])  # noqa: E731
    made = strategy(
        {"a": SGD, "b": SGD}, models=two, training_fn=both, num_steps=1,
        hooks=[TrainableParameterHook(freeze_patterns="b.*", freeze_mode="optimizer_only")],
    )  # fmt: skip
    with pytest.raises(ConfigError, match="model 'b' has an optimizer but no parameter"):
        made.run(batches(1))


def test_what_runs_where(tmp_path: Path) -> None:
    """The report names stages, hooks, slots with bytes, programs and waits."""
    watch = Watch(S.AFTER_BATCH)
    hooks = [watch, GradientAccumulationHook(2), EMAHook(decay=0.9), CheckpointHook(tmp_path / "run", step_interval=5)]
    made = strategy(hooks=hooks, validation_config=ValidationConfig(batches(1), every_n_steps=3))
    made.train_batch(batches(1)[0])
    told = made.explain()
    for line in (
        "13 DO_OPTIMIZER_STEP: GradientAccumulationHook (traced, priority 10), EMAHook (traced, priority 50)",
        "15 AFTER_BATCH: Watch (host), CheckpointHook (host, every 5)",
        "EMAHook: 12 bytes",
        "for 1 of 2 microbatches",
        "one read for every 3 updates (validation)",
        "microbatch by microbatch for Watch",
    ):
        assert line in told


@pytest.mark.parametrize(
    "given, error, says",
    [
        ({"models": {}}, ModelError, "give a Flax NNX module"),
        ({"models": {"_a": Toy()}}, ModelError, "cannot be a model's name"),
        ({"models": {"a": 3}}, ModelError, "give a Flax NNX module"),
        ({"models": {"a": Toy(), "b": Toy()}, "config": {"a": SGD}}, ConfigError, "need a training_fn"),
        ({"training_fn": lambda model: model}, ConfigError, r"training_fn\(model, batch\)"),
        ({"training_fn": "no.such.thing"}, ConfigError, "cannot be imported"),
        ({"loss_fn": 3}, ConfigError, "loss_fn is int"),
        ({"loss_fn": "msq"}, ConfigError, "mse"),
        ({"devices": [1, 2]}, ConfigError, "2 devices"),
        ({"num_steps": 0}, ConfigError, "whole number from 1"),
        ({"hooks": "ema"}, ConfigError, "give a list"),
        ({"validation_config": 3}, ConfigError, "give a ValidationConfig"),
    ],
)
def test_what_is_refused(given: Any, error: Any, says: str) -> None:
    """Wrong arguments are told at construction."""
    with pytest.raises(error, match=says):
        strategy(given.pop("config", SGD), **given)


# -- checkpoints -----------------------------------------------------------------------------------------------


def test_the_documents_example(tmp_path: Path) -> None:
    """nvalchemi:113, nvalchemi:114: "<dir>/step_2" with the same hook: step 2, and then every bit of the whole run."""
    place = tmp_path / "my-model" / "checkpoints"
    checkpoint = CheckpointHook(place, step_interval=2)
    whole = strategy(ADAM, models=toy, hooks=[checkpoint])
    whole.run(batches(1, 2, 3))
    assert checkpoint.checkpoints == ("step_2", "step_4")
    assert TrainingStrategy.load_checkpoint(place / "step_4", hooks=[checkpoint]).step_count == 4
    again = TrainingStrategy.load_checkpoint(place / "step_2", hooks=[checkpoint])
    assert (again.step_count, again.epoch_step_count) == (2, 2)
    again.run(batches(1, 2, 3))
    assert w(again) == w(whole)
    assert {n: a.tobytes() for n, a in arrays(again).items()} == {n: a.tobytes() for n, a in arrays(whole).items()}


def test_an_open_window_is_stored(tmp_path: Path) -> None:
    """nvalchemi:67: two of four microbatches, stored, loaded, two more: w = 0.25."""
    made = strategy(models=toy, hooks=[GradientAccumulationHook(4)])
    for batch in batches(1, 2):
        made.train_batch(batch)
    made.save_checkpoint(tmp_path / "run")
    again = TrainingStrategy.load_checkpoint(tmp_path / "run", hooks=[GradientAccumulationHook(4)])
    assert (again.step_count, again.batch_count) == (0, 2)
    for batch in batches(1, 3):
        again.train_batch(batch)
    assert w(again) == pytest.approx(0.25, abs=1e-6)


def test_a_checkpoint_goes_into_a_live_strategy(tmp_path: Path) -> None:
    """Weights, optimizer and counters are the stored ones; the schedule goes on."""
    config = OptimizerConfig("sgd", {"lr": 0.1, "momentum": 0.0}, "step", {"step_size": 1, "factor": 0.5})
    made = strategy(config, models=toy)
    made.train_batch(batches(1)[0])
    made.save_checkpoint(tmp_path / "run")
    made.train_batch(batches(9)[0])
    made.restore_checkpoint(tmp_path / "run" / "step_1")
    assert (w(made), made.step_count, made.batch_count) == (pytest.approx(0.8), 1, 1)
    assert made.learning_rates["main"] == pytest.approx(0.05)
    made.train_batch(batches(1)[0])
    assert w(made) == pytest.approx(0.8 - 0.05 * 1.6)


def test_what_a_checkpoint_cannot_name_is_asked_for(tmp_path: Path) -> None:
    """nvalchemi:124: a lambda as training_fn, a module made in place: both have to be given again."""
    made = strategy(training_fn=lambda model, batch: model(batch["x"]))
    made.train_batch(batches(1)[0])
    made.save_checkpoint(tmp_path / "run")
    with pytest.raises(ValueError, match="give models="):
        TrainingStrategy.load_checkpoint(tmp_path / "run")
    with pytest.raises(ValueError, match="give training_fn="):
        TrainingStrategy.load_checkpoint(tmp_path / "run", models=Toy())
    again = TrainingStrategy.load_checkpoint(tmp_path / "run", models=Toy(), training_fn=made.training_fn)
    assert (w(again), again.step_count) == (pytest.approx(0.8), 1)


def test_a_directory_without_checkpoints(tmp_path: Path) -> None:
    """nvalchemi:122: FileNotFoundError; and a validator that refuses a model is a ValueError naming it."""
    with pytest.raises(FileNotFoundError, match="there is no run here"):
        TrainingStrategy.load_checkpoint(tmp_path / "none")
    made = strategy(models=toy)
    made.train_batch(batches(1)[0])
    made.save_checkpoint(tmp_path / "run")

    def refuses(model: Any) -> None:
        raise TypeError("not this one")

    with pytest.raises(ValueError, match="validator of model 'main' refused it: not this one"):
        TrainingStrategy.load_checkpoint(tmp_path / "run", validators={"main": refuses})


def test_another_trainings_directory_is_not_overwritten(tmp_path: Path) -> None:
    """A fresh strategy in a directory with checkpoints is refused, and they stay."""
    for _ in range(2):
        made = strategy(models=toy, hooks=[CheckpointHook(tmp_path / "run", step_interval=2)])
        if _ == 0:
            made.run(batches(1))
        else:
            with pytest.raises(FileExistsError, match="load_checkpoint"):
                made.run(batches(1))
    assert TrainingStrategy.load_checkpoint(tmp_path / "run").step_count == 4


def test_states_of_hooks_that_came_and_went(tmp_path: Path) -> None:
    """nvalchemi:119: a slot without its hook is left, a hook without a stored slot starts fresh."""
    made = strategy(models=toy, hooks=[EMAHook(decay=0.5)])
    made.train_batch(batches(1)[0])
    made.save_checkpoint(tmp_path / "run")
    scaled = MixedPrecisionHook("fp16", init_scale=4.0)
    again = TrainingStrategy.load_checkpoint(tmp_path / "run", hooks=[scaled])
    again.train_batch(batches(1)[0])
    assert again.step_count == 2
    assert float(scaled.state_dict()["state"]["scale"]) == 4.0
