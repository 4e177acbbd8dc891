"""What a strategy takes from a checkpoint, and what it refuses: open windows, slots, places written to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nnx_jax.core.errors import ResumePointError
from nnx_jax.hooks import EMAHook, GradientAccumulationHook, TrainingUpdateHook
from nnx_jax.loop.clocks import span_batches
from nnx_jax.training import TrainingStrategy
from tests.training.toys import S, batches, strategy, toy


class Every(TrainingUpdateHook):
    """Keeps what is added up, and lets the optimizer step with every n-th microbatch; decides while it runs."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self, ctx: Any, stage: S, will_skip: Any) -> Any:
        if stage is S.BEFORE_BATCH:
            return ctx.batch_count % self.n == 0, ctx.loss
        return stage is not S.DO_OPTIMIZER_STEP or (ctx.batch_count + 1) % self.n == 0, ctx.loss


def stored(place: Path, hook: Any, n: int) -> Path:
    """A strategy with one hook, stored after n batches."""
    made = strategy(models=toy, hooks=[hook])
    for batch in batches(*[1] * n):
        made.train_batch(batch)
    made.save_checkpoint(place)
    return place


# -- open windows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hooks",
    [[], [GradientAccumulationHook(2)], [GradientAccumulationHook(4, normalize="sum")], [Every(4)]],
    ids=["none", "another k", "another sum", "another hook"],
)
def test_an_open_window_goes_on_only_as_it_began(tmp_path: Path, hooks: list[Any]) -> None:
    """3 of 4 microbatches are open: another window would never close, or close with another gradient."""
    place = stored(tmp_path / "run", GradientAccumulationHook(4), 3)
    again = TrainingStrategy.load_checkpoint(place, hooks=hooks)
    with pytest.raises(ResumePointError, match="3 of 4 microbatches are open; give k=4"):
        again.run(batches(1, 1))


def test_a_window_that_a_hook_decides_goes_on_only_with_it(tmp_path: Path) -> None:
    """3 microbatches are kept by a hook that decides by itself; a window of 2 cannot take them over."""
    place = stored(tmp_path / "run", Every(4), 3)
    again = TrainingStrategy.load_checkpoint(place, hooks=[GradientAccumulationHook(2)])
    with pytest.raises(ResumePointError, match="keeps a window open"):
        again.run(batches(1, 1))


def test_between_windows_another_length_is_fine(tmp_path: Path) -> None:
    """Stored after a whole window of two: the next has three, and its update is the second."""
    place = stored(tmp_path / "run", GradientAccumulationHook(2), 2)
    again = TrainingStrategy.load_checkpoint(place, hooks=[GradientAccumulationHook(3)], num_steps=2)
    again.run(batches(1, 1, 1, 1, 1, 1))
    assert (again.step_count, again.batch_count) == (2, 5)


def test_a_span_has_at_least_one_microbatch() -> None:
    """Whatever counters say: 3 open microbatches of a window of 2, one update to go."""
    assert span_batches(step=0, target=1, batch=3, n_batches=9, accumulate=2, open_batches=3) == 1


# -- slots -----------------------------------------------------------------------------------------------------


def test_a_slot_comes_back_only_for_the_same_settings(tmp_path: Path) -> None:
    """nvalchemi:108: another decay is refused with both values, the default's among them."""
    place = stored(tmp_path / "run", EMAHook(decay=0.5), 1)
    for decay in (0.9, 0.999):
        again = TrainingStrategy.load_checkpoint(place, hooks=[EMAHook(decay=decay)])
        with pytest.raises(ValueError, match=rf"EMAHook checkpoint conflict: decay is 0.5 in the .* and {decay} here"):
            again.train_batch(batches(1)[0])


def test_a_slot_of_another_class_is_refused(tmp_path: Path) -> None:
    """Slots are found by the class's name; another class of that name is not the same hook."""
    place = stored(tmp_path / "run", EMAHook(decay=0.5), 1)
    other: Any = type("EMAHook", (EMAHook,), {"__module__": "elsewhere"})
    again = TrainingStrategy.load_checkpoint(place, hooks=[other(decay=0.5)])
    with pytest.raises(ValueError, match="class is 'nnx_jax.hooks.ema.EMAHook' in the checkpoint and 'elsewhere"):
        again.train_batch(batches(1)[0])


def test_a_second_hook_of_a_class_starts_fresh(tmp_path: Path) -> None:
    """The second EMAHook has no stored slot and starts fresh: its average is the weight; the first goes on."""
    place = stored(tmp_path / "run", EMAHook(decay=0.5), 1)
    first, second = EMAHook(decay=0.5), EMAHook(decay=0.9)
    again = TrainingStrategy.load_checkpoint(place, hooks=[first, second])
    again.train_batch(batches(1)[0])
    assert float(first.get_averaged_model().module.w[...]) == pytest.approx(0.5 * 0.8 + 0.5 * 0.64)
    assert float(second.get_averaged_model().module.w[...]) == pytest.approx(0.64)
