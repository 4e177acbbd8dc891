"""OnlineTrainer: learn from a stream one sample at a time, and predict each before learning from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import PlainValidator, PrivateAttr

from nnx_jax.backends.base import load_backend
from nnx_jax.backends.carry import TrainerCarryState
from nnx_jax.backends.optimizers import DEFAULT, read_optimizer, settle_optimizer
from nnx_jax.backends.parts import Part, import_built_in
from nnx_jax.core.errors import ConfigError, DataError
from nnx_jax.core.operator import Operator
from nnx_jax.core.registry import register
from nnx_jax.core.spec import Keywords
from nnx_jax.core.stateful import CarryState, StatefulOperator
from nnx_jax.engines.compile_cache import enable_compile_cache
from nnx_jax.objectives.operators import as_loss
from nnx_jax.objectives.terms import total_value
from nnx_jax.params.fields import Count, Precision, Seed, Whole
from nnx_jax.params.run import RunSpec
from nnx_jax.params.train import NNTrainParams
from nnx_jax.training.feed import Pushed

_PICKS = 0x0F17
"""Keeps the draws from past samples apart from the keys of the training."""


@dataclass(frozen=True, eq=False)
class OnlineState(CarryState):
    """Where an OnlineTrainer stands: arrays only, so that it can be stored after every update.

    Attributes:
        arrays: every array of the training by name, weights included; those of `TrainState`.
        step: updates so far.
        total: sum of the losses that predictions had before the model learned from their samples.
        past: columns of the last samples [capacity, ...], where some are trained on again.
    """

    arrays: Mapping[str, Any]
    step: int = 0
    total: float = 0.0
    past: Mapping[str, np.ndarray] | None = None

    @property
    def mean_loss(self) -> float:
        """The mean of those losses (prequential: each sample is tested on before it is trained on); NaN before one."""
        return self.total / self.step if self.step else float("nan")


@register("online_trainer")
class OnlineTrainer(StatefulOperator):
    """One compiled update for each call: `trainer((x, y), state) -> (prediction of x before the update, state)`.

    k calls are the k updates of a TrainingLoop with `batch_size=1` on the same sequence, bit for bit. The state that a
    loop left is gone on from by `trainer.begin(state)`.

    Args:
        model_op: the operator to begin with; it is never changed.
        loss: as a TrainingLoop takes it.
        optimizer_config: as a TrainingLoop takes it.
        replay: past samples that every update is made of besides the new one.
        replay_capacity: how many of the last samples these are drawn from.

    Raises:
        ConfigError: (a ValueError) no loss.
    """

    model_op: Operator
    loss: Annotated[Operator | Any, Part("loss")] = None
    optimizer_config: Annotated[Any, PlainValidator(settle_optimizer)] = DEFAULT
    backend: str = "nnx"
    replay: Whole = 0
    """Past samples in every update."""
    replay_capacity: Count = 1024
    """How many of the last samples they are drawn from."""
    precision: Precision = "float32"
    """What is computed in."""
    seed: Seed = 0
    """Of dropout, and of which past samples are drawn."""
    _built: Any = PrivateAttr(default=None)

    columns: ClassVar[tuple[str, str]] = ("x", "y")

    @classmethod
    def _normalised(cls, value: Mapping[Any, Any]) -> dict[Any, Any]:
        if not isinstance(value, Keywords):  # a document: what it names must be registered
            import_built_in()
        return super()._normalised(value)

    def _apply(self, carrier: Any, state: OnlineState | None = None) -> tuple[Any, OnlineState]:
        """Predict, then learn.

        Args:
            carrier: (x, y), one sample each, without a row axis.
            state: of the call before; None begins.

        Raises:
            DataError: (a ValueError) no pair, or a sample of another shape than the first.
            NonFiniteError: (a FloatingPointError) the loss or a gradient is not finite; the state given stays good.
        """
        sample = _sample(carrier)
        built = self._ready(sample)
        state = state or OnlineState(built.named(built.engine.start()))
        _check_alike(built.first, sample)
        rows = self._rows(sample, state)
        prediction, loss = built.predict(state.arrays, sample)
        arrays = built.update(state.arrays, rows)
        total = state.total + float(loss)
        return prediction, OnlineState(arrays, state.step + 1, total, self._remembered(sample, state))

    def update(self, x: Any, y: Any, state: OnlineState | None = None) -> tuple[Any, OnlineState]:
        """`trainer((x, y), state)`."""
        return self((x, y), state)

    def begin(self, state: TrainerCarryState, sample: Any) -> OnlineState:
        """Return the state that goes on where a TrainingLoop ended: its weights, optimizer, counters and key.

        Args:
            sample: an (x, y), for the shapes.

        Raises:
            ConfigError: (a ValueError) the loop left no such state, or one of another structure.
        """
        built = self._ready(_sample(sample))
        weights = built.recipe.face.framework.weights(built.recipe.take(state.model, {}))
        fresh = built.named(built.engine.start())
        held = {**(state.opt_state or {})}
        held |= {name: weights[name.partition("/")[2]] for name in fresh if name.partition("/")[2] in weights}
        for name, like in fresh.items():
            if name not in held or np.shape(held[name]) != like.shape:
                raise ConfigError(
                    f"the state has no {name} of shape {list(like.shape)}; it is of another loop or model"
                )
        return OnlineState({name: jnp.asarray(held[name]) for name in fresh}, state.step)

    def trained(self, state: OnlineState) -> Any:
        """Return the model as an operator with the weights of a state."""
        if self._built is None:
            raise ConfigError("nothing was trained yet; call the trainer with a first sample")
        return self._built.operator(state.arrays)

    # -- what an update is made of -----------------------------------------------------------------------------

    def _rows(self, sample: Mapping[str, np.ndarray], state: OnlineState) -> dict[str, np.ndarray]:
        """The batch of an update: the sample, and past ones; those that are not there yet count nothing."""
        if not self.replay:
            return {name: value[None] for name, value in sample.items()}
        kept = 0 if state.past is None else len(state.past["x"])
        generator = np.random.Generator(np.random.Philox(key=[self.seed * 2**16 + _PICKS, state.step]))
        picks = generator.integers(0, kept, self.replay) if kept else np.zeros(self.replay, np.int64)
        found = {}
        for name, value in sample.items():
            again = (
                state.past[name][picks] if state.past is not None and kept else np.repeat(value[None], self.replay, 0)
            )
            found[name] = np.concatenate([value[None], again])
        found["mask"] = np.array([1.0] + [float(kept > 0)] * self.replay, np.float32)
        return found

    def _remembered(self, sample: Mapping[str, np.ndarray], state: OnlineState) -> Mapping[str, np.ndarray] | None:
        if not self.replay:
            return None
        past = state.past or {name: value[None][:0] for name, value in sample.items()}
        return {
            name: np.concatenate([past[name], value[None]])[-self.replay_capacity :] for name, value in sample.items()
        }

    def _ready(self, sample: Mapping[str, np.ndarray]) -> _Built:
        if self._built is None:
            if self.loss is None:
                raise ConfigError("no loss is given; give one as a TrainingLoop takes it", path="OnlineTrainer.loss")
            enable_compile_cache()
            self._built = _Built(self, sample)
        return self._built


class _Built:
    """The engine of one trainer, for samples like the first."""

    def __init__(self, trainer: OnlineTrainer, first: Mapping[str, np.ndarray]) -> None:
        self.recipe = recipe_of(trainer.backend)
        optim, schedule, given = read_optimizer(trainer.optimizer_config)
        train = NNTrainParams(
            max_steps=1, seed=trainer.seed, optim=optim, precision=trainer.precision, data_id="stream",
            save_phase_checkpoints=False,
        )  # fmt: skip
        framework = self.recipe.face.framework
        spec = RunSpec(backend=framework.backend, train=train)
        self.op, self.first = trainer.model_op, first
        self.loss = as_loss(trainer.loss)
        module = self.recipe.take(trainer.model_op, _sizes(first))
        feed = Pushed(_batch(first, trainer.replay), pad=True)
        schedules = {} if schedule is None else {"main": schedule}
        self.engine = framework.engine_class(
            spec, module, self.loss, {"train": feed}, schedules=schedules, optimizer=given
        )
        pure = self.engine.pure

        def predict(arrays: Mapping[str, Any], batch: Mapping[str, Any]) -> tuple[Any, Any]:
            params = {n.partition("/")[2]: a for n, a in arrays.items() if n.startswith(("params/", "frozen/"))}
            held = {n.partition("/")[2]: a for n, a in arrays.items() if n.startswith("model_state/")}
            outputs = pure.forward(params, held, batch, None, False)[0]
            return jax.tree.map(lambda output: output[0], outputs), total_value(self.loss(outputs, batch))

        self._predict = jax.jit(predict)

    def named(self, carry: Any) -> dict[str, Any]:
        """Every array of a state by name, copies that nothing else will give away."""
        return {name: jnp.array(leaf, copy=True) for name, leaf in self.engine.programs.named(carry).items()}

    def predict(self, arrays: Mapping[str, Any], sample: Mapping[str, np.ndarray]) -> tuple[Any, Any]:
        """(the prediction of a sample in evaluation mode, its loss)."""
        batch = {name: value[None] for name, value in sample.items()}
        return self._predict(arrays, {**batch, "mask": np.ones(1, np.float32)})

    def update(self, arrays: Mapping[str, Any], rows: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """The arrays after one update."""
        carry = self.engine.programs.load_named(arrays)
        feed: Any = self.engine.feed
        feed.push(dict(rows), 0)
        self.engine.programs.step(carry, self.engine.place.batch(feed.current), closes=True)
        _, failure = self.engine.read_records(carry)
        if failure is not None:
            raise failure
        return self.named(carry)

    def operator(self, arrays: Mapping[str, Any]) -> Any:
        """The model with these weights."""
        carry = self.engine.programs.load_named(arrays)
        return self.recipe.give(self.op, self.engine.trained(carry), tuple(self.first["x"].shape))


def recipe_of(backend: str) -> Any:
    """The recipe of a gradient backend, see `backends.gradient.Recipe`.

    Raises:
        ConfigError: (a ValueError) the backend does not train by gradients of a loss.
    """
    found = getattr(load_backend(backend), "RECIPE", None)
    if found is None:
        told = f"'{backend}' does not train a model by gradients of a loss; use nnx or equinox"
        raise ConfigError(told, path="OnlineTrainer.backend")
    return found


def _sample(carrier: Any) -> dict[str, np.ndarray]:
    if not (isinstance(carrier, tuple | list) and len(carrier) == 2):
        raise DataError(f"a sample is a pair (x, y), got {type(carrier).__name__}")
    return {name: np.asarray(value) for name, value in zip(OnlineTrainer.columns, carrier, strict=True)}


def _check_alike(first: Mapping[str, np.ndarray], sample: Mapping[str, np.ndarray]) -> None:
    for name, value in sample.items():
        if value.shape != first[name].shape:
            raise DataError(
                f"{name} is of shape {list(value.shape)}, that of the first sample was {list(first[name].shape)}"
            )


def _batch(sample: Mapping[str, np.ndarray], more: int) -> dict[str, np.ndarray]:
    return {name: np.repeat(value[None], 1 + more, 0) for name, value in sample.items()}


def _sizes(sample: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {"input_shape": sample["x"].shape, "input_dim": int(sample["x"].size), "output_dim": int(sample["y"].size)}
