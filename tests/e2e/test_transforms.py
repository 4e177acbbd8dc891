"""Changes of topology: recorded in checkpoints and repeated when a model is rebuilt; LoRA as one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_jax.core.errors import ConfigError, ModelError
from nnx_jax.engines.inference import weights_of
from nnx_jax.engines.transforms import _TRANSFORMS, TransformAtEnd, apply_transforms, register_transform
from nnx_jax.loop.builtin import ModelCheckpoint
from nnx_jax.loop.callbacks import Callback, TrainContext
from nnx_jax.model import NNModel
from nnx_jax.runs.resume import find_point
from nnx_jax.runs.run import NNRun
from nnx_jax.runs.transforms import NNCheckpointTransform, recorded
from tests.e2e import helpers
from tests.e2e.toys import SAME, KillAt, Killed, Slope, fit, slope, steps


@pytest.fixture(autouse=True)
def widening() -> Iterator[None]:
    """Two transforms of `Slope`: the weight is written down twice, or moved by an offset."""

    @register_transform("twice")
    def twice(module: Any) -> nnx.Module:
        module.w = nnx.Param(jnp.concatenate([module.w[...], module.w[...]]))
        return module

    @register_transform("moved", 3)
    def moved(module: Any, by: float) -> nnx.Module:
        return Slope(*(module.w[...] + by).tolist())

    yield
    for key in (("twice", 1), ("moved", 3)):
        _TRANSFORMS.pop(key, None)


def model_of(run: NNRun, name: str = "LAST", **more: Any) -> Any:
    return NNModel.from_checkpoint(f"{run.id}@{name}", runs_dir=run.root, **more)


def transforms_of(run: NNRun, name: str = "LAST") -> list[tuple[str, int, Any]]:
    return [(t.name, t.version, t.options) for t in recorded(find_point(run.root, f"{run.id}@{name}"))]


# -- callbacks --------------------------------------------------------------------------------------------------


def test_last_records_what_a_callback_did_at_the_end(tmp_path: Path) -> None:
    """nnx:B006 nnx:S24 (LAST's training state is as before; BEST and the phases record nothing)"""
    run = fit(
        tmp_path, Slope(), slope, steps(2), val=steps(1), callbacks=[TransformAtEnd("twice")], n_epochs=2,
        scheduler=SAME,
    )  # fmt: skip
    assert transforms_of(run) == [("twice", 1, {})]
    assert [transforms_of(run, name) for name in ("BEST", "FIRST")] == [[], []]
    stored = run.checkpoint().load_all()
    assert stored["params/w"] == pytest.approx([0.4])
    assert stored["final/params/w"] == pytest.approx([0.4, 0.4])
    assert model_of(run, module=Slope()).net.w[...] == pytest.approx([0.4, 0.4])
    assert model_of(run, "BEST", module=Slope()).net.w.shape == (1,)


def test_transforms_are_recorded_in_the_order_of_the_ends(tmp_path: Path) -> None:
    """nnx:B007 (the last callback ends first)"""
    ends = [TransformAtEnd("moved", 3, by=1.0), Callback(), TransformAtEnd("twice")]
    run = fit(tmp_path, Slope(), slope, steps(2), callbacks=ends)
    assert transforms_of(run) == [("twice", 1, {}), ("moved", 3, {"by": 1.0})]
    rebuilt = model_of(run, module=Slope())
    assert rebuilt.net.w[...] == pytest.approx([1.2, 1.2])
    assert [transform.name for transform in rebuilt.transforms] == ["twice", "moved"]


def test_an_unknown_transform_is_told_before_weights_are_loaded(tmp_path: Path) -> None:
    """nnx:B008"""
    ends = [TransformAtEnd("moved", 3, by=1.0), TransformAtEnd("twice")]
    run = fit(tmp_path, Slope(), slope, steps(2), callbacks=ends)
    known = _TRANSFORMS.pop(("moved", 3))
    module = Slope(5.0)
    with pytest.raises(ValueError, match=r"transform 1 is 'moved' version 3, which is not registered"):
        model_of(run, module=module)
    assert module.w[...] == pytest.approx([5.0])
    _TRANSFORMS["moved", 2] = known
    with pytest.raises(ModelError, match="known versions: 2"):
        model_of(run, module=module)


def test_training_goes_on_from_the_network_before_the_end(tmp_path: Path) -> None:
    """Two epochs at once, or one, a change at its end, and one more."""
    settings: dict[str, Any] = {"scheduler": SAME, "optim": {"momentum": 0.9}}
    whole = fit(tmp_path, Slope(), slope, steps(3), n_epochs=2, **settings)
    half = fit(tmp_path, Slope(), slope, steps(3), callbacks=[TransformAtEnd("twice")], **settings)
    rest = fit(tmp_path, Slope(), slope, steps(3), resume_from_run_id=half.id, **settings)
    assert transforms_of(rest) == []
    names = set(whole.checkpoint().load_all())
    assert set(rest.checkpoint().load_all()) == names
    for name in names:
        assert np.array_equal(whole.checkpoint().load_all()[name], rest.checkpoint().load_all()[name]), name


class Declares(Callback):
    def __init__(self, *what: Any, fails: bool = False) -> None:
        self.what, self.fails = what, fails

    def on_train_end(self, ctx: TrainContext) -> None:
        if self.fails:
            raise ValueError("no end")

    def checkpoint_transforms(self) -> Sequence[NNCheckpointTransform]:
        return self.what


def test_what_is_no_transform_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="Declares.checkpoint_transforms.. returned str"):
        fit(tmp_path, Slope(), slope, steps(2), callbacks=[Declares("twice")])
    with pytest.raises(ValueError, match="no end"):
        fit(tmp_path / "b", Slope(), slope, steps(2), callbacks=[Declares(fails=True)])
    with pytest.raises(ModelError, match="'thrice' version 1, which is not registered; did you mean 'twice'"):
        TransformAtEnd("thrice")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("", 1, {}), "name must be text"),
        (("a", 0, {}), "version must be a whole number"),
        (("a", True, {}), "version must be a whole number"),
        (("a", 1, [1]), "options must be a mapping, got list"),
        (("a", 1, {"x": object()}), "object"),
    ],
)
def test_wrong_transforms_are_refused(arguments: tuple[Any, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        NNCheckpointTransform(*arguments)


def test_options_are_as_a_file_gives_them_back() -> None:
    made = NNCheckpointTransform("a", options={"patterns": ("x", "y")})
    assert made.options == {"patterns": ["x", "y"]}
    assert NNCheckpointTransform.from_state(made.state()) == made


def test_a_taken_name_needs_another_version(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'twice' version 1 is .*twice already"):
        register_transform("twice", 1, lambda module: module)
    register_transform("twice", 1, lambda module: None, replace=True)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ModelError, match="transform 0 .'twice' version 1. returned a NoneType"):
        apply_transforms(Slope(), [NNCheckpointTransform("twice")])
    with pytest.raises(ModelError, match="transform 0 .'moved' version 3.: missing a required argument: 'by'"):
        apply_transforms(Slope(), [NNCheckpointTransform("moved", 3)])


# -- LoRA -------------------------------------------------------------------------------------------------------


def lora_model(**more: Any) -> NNModel:
    return helpers.model().transform("lora", rank=2, patterns=["layers.*"], **more)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[NNRun, NNModel]:
    """A run with a LoRA network, merged at its end."""
    model = lora_model()
    runs = tmp_path_factory.mktemp("lora")
    run = helpers.fit(runs, of=model, n_epochs=2, callbacks=[TransformAtEnd("lora_merge"), ModelCheckpoint([1], "end")])
    return run, model


def test_lora_trains_the_additions_and_leaves_every_other_weight_as_it_was(tuned: tuple[NNRun, NNModel]) -> None:
    """Bit for bit over two epochs of AdamW with weight decay: only the additions have moved."""
    run, _ = tuned
    stored = run.checkpoint().load_all()
    base = {name.removeprefix("frozen/"): value for name, value in stored.items() if name.startswith("frozen/")}
    before = dict(weights_of(helpers.model().build({"input_dim": 4, "n_classes": 3}, 0)))
    assert base.keys() == {
        "layers.0.kernel",
        "layers.0.bias",
        "norms.0.scale",
        "norms.0.bias",
        "head.kernel",
        "head.bias",
    }
    for name, value in base.items():
        assert value.tobytes() == np.asarray(before[name]).tobytes(), name
    moved = {name.removeprefix("params/"): value for name, value in stored.items() if name.startswith("params/")}
    assert moved.keys() == {"layers.0.lora_a", "layers.0.lora_b"}
    assert np.abs(moved["layers.0.lora_b"]).max() > 0


def test_a_merged_network_is_a_plain_one_with_the_same_outputs(tuned: tuple[NNRun, NNModel]) -> None:
    run, model = tuned
    assert transforms_of(run) == [("lora", 1, {"rank": 2, "patterns": ["layers.*"]}), ("lora_merge", 1, {})]
    x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    rebuilt = NNModel.from_checkpoint(run.id, runs_dir=run.root)
    tuned_one = NNModel.from_checkpoint(f"{run.id}@end_e1", runs_dir=run.root)
    assert all(type(part) is nnx.Linear for _, part in nnx.iter_modules(rebuilt.net) if isinstance(part, nnx.Linear))
    np.testing.assert_array_equal(rebuilt.predict(x).logits, model.predict(x).logits)
    np.testing.assert_allclose(rebuilt.predict(x).logits, tuned_one.predict(x).logits, rtol=1e-5, atol=1e-5)
    assert rebuilt.frozen_patterns == ()


def test_a_lora_run_is_another_run_and_continues_as_such(tmp_path: Path) -> None:
    """Its own id; killed and continued in a new model of the same recipe it equals the uninterrupted one."""
    whole = helpers.fit(tmp_path / "whole", of=lora_model(), n_epochs=2)
    with pytest.raises(Killed):
        helpers.fit(tmp_path / "cut", of=lora_model(), n_epochs=2, callbacks=[KillAt("on_epoch_begin", 2)])
    rest = helpers.fit(tmp_path / "cut", of=lora_model(), n_epochs=2)
    assert rest.id == whole.id
    helpers.assert_same_run(whole, rest)
    other = helpers.fit(tmp_path / "cut", of=lora_model(alpha=1.0), n_epochs=1)
    assert other.id not in (whole.id, helpers.fit(tmp_path / "cut", n_epochs=1).id)
