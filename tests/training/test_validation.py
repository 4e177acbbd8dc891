"""Validation: cadence, weights, precision, sums over samples, and what it leaves alone."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_jax.core.errors import ConfigError
from nnx_jax.hooks import EMAHook, GradientAccumulationHook, MixedPrecisionHook, TracedHook
from nnx_jax.training import ValidationConfig, ValidationLoop
from tests.training.toys import S, Toy, Watch, batches, per_item, squared, strategy, w


def validations() -> Watch:
    return Watch(S.AFTER_VALIDATION, look=lambda ctx: (ctx.step_count, ctx.validation))


def steps_of(watch: Watch) -> list[int]:
    return [step for step, _ in watch.at(S.AFTER_VALIDATION)]


def test_without_a_config_and_with_data_that_ends() -> None:
    """nvalchemi:133: no config is a RuntimeError; a generator is refused when the config is made."""
    with pytest.raises(RuntimeError, match="no validation_config"):
        strategy().validate()
    with pytest.raises(ConfigError, match="only once"):
        ValidationConfig(batch for batch in batches(1))
    with pytest.raises(ConfigError, match="at most one"):
        ValidationConfig(batches(1), every_n_steps=1, every_n_epochs=1)
    with pytest.raises(ConfigError, match="auto, always, never"):
        ValidationConfig(batches(1), use_ema="sometimes")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "every, steps, expected",
    [
        pytest.param(2, 5, [2, 4, 5], id="row 134"),
        pytest.param(3, 2, [2], id="row 135"),
        pytest.param(None, 3, [3], id="only the last"),
    ],
)
def test_cadence_by_steps(every, steps, expected) -> None:
    """nvalchemi:134, nvalchemi:135: at multiples of every_n_steps, and once after training."""
    watch = validations()
    config = ValidationConfig(batches(1), every_n_steps=every)
    strategy(hooks=[watch], num_steps=steps, validation_config=config).run(batches(1, 1))
    assert steps_of(watch) == expected


def test_parked_counts_do_not_validate_again() -> None:
    """nvalchemi:68: every_n_steps=2, K=3, 12 batches: at updates 2 and 4 and after training, never on open windows."""
    watch = validations()
    config = ValidationConfig(batches(1), every_n_steps=2)
    made = strategy(hooks=[watch, GradientAccumulationHook(3)], num_epochs=1, validation_config=config)
    made.run(batches(*[1] * 12))
    assert steps_of(watch) == [2, 4, 4]
    assert made.batch_count == 12


def test_cadence_by_epochs() -> None:
    """Every second epoch, and after training; the order is AFTER_EPOCH, then AFTER_VALIDATION."""
    watch = Watch(S.AFTER_EPOCH, S.AFTER_TRAINING, S.AFTER_VALIDATION)
    config = ValidationConfig(batches(1), every_n_epochs=2)
    strategy(hooks=[watch], num_epochs=3, validation_config=config).run(batches(1))
    assert watch.values() == [16, 16, 18, 16, 17, 18]


def test_the_event_has_the_summary_also_before_training() -> None:
    """nvalchemi:136: ctx.validation is what validate() returns, also before any batch was trained.

    w = 1, x = 2: the loss is 4; after one update of x = 1 it is (0.8 * 2)^2 = 2.56.
    """
    watch = validations()
    made = strategy(hooks=[watch], validation_config=ValidationConfig(batches(2)))
    first = made.validate()
    made.train_batch(batches(1)[0])
    second = made.validate()
    assert [summary for _, summary in watch.at(S.AFTER_VALIDATION)] == [first, second]
    assert first["total_loss"] == pytest.approx(4.0)
    assert second["total_loss"] == pytest.approx(2.56)
    assert (first["num_batches"], first["num_samples"], first["model_source"]) == (1, 1, "live")


def one_or_nine(predictions, batch):
    """A batch of one row has loss 1, a batch of three has loss 9."""
    return jnp.sum(predictions) * 0 + (1.0 if predictions.shape[0] == 1 else 9.0)


@pytest.mark.parametrize("aggregation, expected", [pytest.param("sample", 7.0), pytest.param("batch_mean", 5.0)])
def test_every_sample_counts_once(aggregation, expected) -> None:
    """nvalchemi:137: sizes 1 and 3 with losses 1 and 9: (1 + 27) / 4 = 7; by batches (1 + 9) / 2 = 5."""
    config = ValidationConfig(batches(1, [1, 1, 1]), loss_fn=one_or_nine, aggregation=aggregation)
    assert strategy(validation_config=config).validate()["total_loss"] == expected


def test_terms_divide_by_their_own_counts() -> None:
    """nvalchemi:137: losses of LossTerms: x = 1 | 1, 2, 3 at w = 1: (1 + 1 + 4 + 9) / 4."""
    for loss in (per_item, "mse"):
        config = ValidationConfig(batches([1, 2, 3], 1), loss_fn=loss)
        assert strategy(validation_config=config).validate()["total_loss"] == pytest.approx(3.75)


def test_an_error_leaves_the_strategy_as_it_was() -> None:
    """nvalchemi:139: a failing validation raises, modes and state stay, and training goes on."""

    def fails(model, batch):
        raise RuntimeError("broken")

    model = nnx.Sequential(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), Toy())
    made = strategy(models=model, validation_config=ValidationConfig(batches(1), validation_fn=fails))
    with pytest.raises(RuntimeError, match="broken"):
        made.validate()
    assert model.layers[0].deterministic is False
    made.train_batch(batches(1)[0])
    assert made.step_count == 1


def test_the_loop_by_itself() -> None:
    """nvalchemi:140: outside of its context, both or neither model, no function, no loss: each is told."""
    data = batches(2)
    forward = lambda model, batch: model(batch["x"])  # noqa: E731
    with pytest.raises(ConfigError, match="neither of model and models"):
        ValidationLoop(data, loss_fn=squared, validation_fn=forward)
    with pytest.raises(ConfigError, match="both of model and models"):
        ValidationLoop(data, model=Toy(), models={"a": Toy()}, loss_fn=squared, validation_fn=forward)
    with pytest.raises(ConfigError, match="no validation_fn"):
        ValidationLoop(data, model=Toy(), loss_fn=squared)
    with pytest.raises(ConfigError, match="no loss_fn"):
        ValidationLoop(data, model=Toy(), validation_fn=forward)
    loop = ValidationLoop(data, model=Toy(), loss_fn=squared, validation_fn=forward)
    with pytest.raises(RuntimeError, match="with loop"):
        loop.execute()
    with loop:
        assert loop.execute()["total_loss"] == 4.0


def test_the_loop_takes_its_precision_and_weights_from_the_caller() -> None:
    """An explicit precision, and other weights: w = 3, x = 2 gives 36, from an EMA model."""

    class Dense(nnx.Module):
        def __init__(self, value: float) -> None:
            self.layer = nnx.Linear(
                1, 1, use_bias=False, kernel_init=nnx.initializers.constant(value), rngs=nnx.Rngs(0)
            )
            self.types: list = nnx.data([])

        def __call__(self, x):
            outputs = self.layer(x[:, None])[:, 0]
            seen.append(outputs.dtype)
            return outputs

    seen: list = []
    forward = lambda model, batch: model(batch["x"])  # noqa: E731
    given = {"model": Dense(1.0), "loss_fn": squared, "validation_fn": forward, "precision": "bf16"}
    with ValidationLoop(batches(2), inference_model={"main": Dense(3.0)}, **given) as loop:
        summary = loop.execute()
    assert (summary["total_loss"], summary["precision"], summary["model_source"]) == (36.0, "bfloat16", "ema")
    assert set(seen) == {jnp.dtype("bfloat16")}


def test_training_does_not_notice_validation() -> None:
    """nvalchemi:141: with dropout, an open window and a loss scale: every array of the state is equal bit for bit."""

    def trained(validates: bool) -> dict:
        model = nnx.Sequential(nnx.Dropout(0.5, rngs=nnx.Rngs(7)), Toy())
        hooks = [GradientAccumulationHook(2), MixedPrecisionHook("fp16", init_scale=64.0), EMAHook(decay=0.5)]
        made = strategy(models=model, hooks=hooks, validation_config=ValidationConfig(batches(3)))
        with made:
            for batch in batches([1, 2, 3, 4], [5, 6, 7, 8], [1, 1, 2, 2]):
                made.train_batch(batch)
                before = (made.step_count, made.batch_count, made.epoch_step_count)
                if validates:
                    made.validate()
                assert (made.step_count, made.batch_count, made.epoch_step_count) == before
            return {name: np.array(leaf) for name, leaf in made._engine.programs.named(made._state).items()}

    plain, watched = trained(False), trained(True)
    assert plain.keys() == watched.keys()
    for name, leaf in plain.items():
        assert np.array_equal(leaf, watched[name]), name


def test_precision_of_a_pass() -> None:
    """nvalchemi:85: auto follows the hook, never is float32, always needs a hook; the scale is not touched."""
    scaled = MixedPrecisionHook("fp16", init_scale=8.0)
    for use, precision in (("auto", "float16"), ("always", "float16"), ("never", "float32")):
        made = strategy(hooks=[scaled], validation_config=ValidationConfig(batches(1), use_mixed_precision=use))
        made.train_batch(batches(1)[0])
        assert made.validate()["precision"] == precision
        assert float(scaled.state_dict()["state"]["scale"]) == 8.0
    bare = strategy(validation_config=ValidationConfig(batches(1), use_mixed_precision="always"))
    with pytest.raises(RuntimeError, match="no MixedPrecisionHook"):
        bare.validate()


def test_averages_are_scored_once_there_are_some() -> None:
    """nvalchemi:110: start_step 3: the passes at updates 1 and 2 are "live", from 3 on "ema".

    The first average copies the weight 0.512; the second is 0.9 * 0.512 + 0.1 * 0.4096 = 0.50176.
    """
    watch = validations()
    config = ValidationConfig(batches(1), every_n_steps=1)
    ema = EMAHook(decay=0.9, start_step=3)
    strategy(hooks=[watch, ema], num_steps=4, validation_config=config).run(batches(1))
    found = [summary for _, summary in watch.at(S.AFTER_VALIDATION)][:4]
    assert [summary["model_source"] for summary in found] == ["live", "live", "ema", "ema"]
    weights = [0.8, 0.64, 0.512, 0.50176]
    assert [summary["total_loss"] for summary in found] == pytest.approx([w * w for w in weights], rel=1e-5)


def test_use_ema_always_and_never() -> None:
    """ "always" without an average is a RuntimeError, "never" leaves it alone."""
    made = strategy(hooks=[EMAHook(decay=0.5)], validation_config=ValidationConfig(batches(1), use_ema="always"))
    with pytest.raises(RuntimeError, match="no averaged weights yet"):
        made.validate()
    made = strategy(hooks=[EMAHook(decay=0.5)], validation_config=ValidationConfig(batches(1), use_ema="never"))
    made.run(batches(1))
    assert made.last_validation is not None
    assert made.last_validation["total_loss"] == pytest.approx(0.4096**2, rel=1e-5)


def test_two_averages_of_two_models() -> None:
    """nvalchemi:105: each model has its own average; both are scored.

    Loss (a x)^2 + (b x)^2 at 1 and 1: both go 0.8, 0.64; decay 0.5 gives 0.72, decay 0 the weight itself, 0.64.
    """
    from nnx_jax.training import OptimizerConfig

    configs = {name: OptimizerConfig("sgd", {"lr": 0.1, "momentum": 0.0}) for name in ("a", "b")}

    def both(models, batch):
        return {name: models[name](batch["x"]) for name in ("a", "b")}

    def added(predictions, batch):
        return jnp.mean(predictions["a"] ** 2) + jnp.mean(predictions["b"] ** 2)

    hooks = [EMAHook("a", decay=0.5), EMAHook("b", decay=0.0)]
    config = ValidationConfig(batches(1))
    made = strategy(
        configs, models={"a": Toy(), "b": Toy()}, training_fn=both, loss_fn=added, hooks=hooks, num_steps=2,
        validation_config=config,
    )  # fmt: skip
    made.run(batches(1))
    averages = [float(hook.get_averaged_model().module.w[...]) for hook in hooks]
    assert averages == pytest.approx([0.72, 0.64], abs=1e-6)
    assert made.last_validation is not None
    assert made.last_validation["total_loss"] == pytest.approx(0.72**2 + 0.64**2, rel=1e-5)
    assert made.last_validation["ema_model_keys"] == ("a", "b")


def test_published_weights_are_scored() -> None:
    """Set_inference_model puts another module's weights in; None takes it back."""
    made = strategy(validation_config=ValidationConfig(batches(1)))
    made.set_inference_model(Toy(3.0))
    assert made.validate()["total_loss"] == 9.0
    assert w(made) == 1.0
    made.set_inference_model(None)
    assert made.validate()["total_loss"] == 1.0
    with pytest.raises(KeyError, match="there is no model 'ghost'"):
        made.set_inference_model(Toy(), "ghost")


class Doubles(TracedHook):
    """An input transform."""

    stage = S.BEFORE_FORWARD

    def __call__(self, ctx, stage):
        ctx.batch = {**ctx.batch, "x": 2 * ctx.batch["x"]}


def test_input_transforms_of_the_step_hold_in_validation() -> None:
    """A traced hook at BEFORE_FORWARD transforms validation batches as training's: (2 * w)^2."""
    made = strategy(hooks=[Doubles()], validation_config=ValidationConfig(batches(1)), num_steps=1)
    made.run(batches(1))  # gradient 2 * (2 w) * 2 = 8: w = 0.2
    assert made.last_validation is not None
    assert made.last_validation["total_loss"] == pytest.approx((2 * 0.2) ** 2, rel=1e-5)


def test_callbacks_of_a_pass() -> None:
    """Batches may be prepared before, and are looked at after, with their number and the counters."""
    looked = []

    def prepare(*, batch, **at):
        return {**batch, "x": batch["x"] + 1}

    def look(*, batch, predictions, loss, batch_count, step_count, epoch):
        looked.append((float(predictions[0]), batch_count, step_count, epoch, sorted(loss)))

    config = ValidationConfig(batches(1, 2), batch_preparation_callback=prepare, batch_callback=look)
    assert strategy(validation_config=config).validate()["total_loss"] == pytest.approx((4 + 9) / 2)
    assert looked == [(2.0, 0, 0, 0, ["squared"]), (3.0, 1, 0, 0, ["squared"])]
