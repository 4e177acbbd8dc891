"""Equinox as a backend: EquinoxModel is NNModel over an Equinox module, `run` trains one under a TrainingLoop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax.backends.base import Trained
from nnx_jax.backends.carry import TrainerCarryState
from nnx_jax.backends.gradient import Recipe, train
from nnx_jax.core.errors import ConfigError, DataError, ModelError, NnxError, ResumePointError
from nnx_jax.core.hashing import hash_arrays
from nnx_jax.data.dtypes import settle
from nnx_jax.engines.equinox import EquinoxEngine, EquinoxModelOp, EquinoxNet, OpenedNet, PureEquinox
from nnx_jax.engines.equinox_net import load_equinox
from nnx_jax.engines.scoring import Scorer, width
from nnx_jax.engines.transforms import apply_transforms
from nnx_jax.fit.call import TrainCall
from nnx_jax.fit.framework import Framework, of_model
from nnx_jax.fit.identity import describe_layer, named_digest, new_trail, register_kind
from nnx_jax.fit.job import Job
from nnx_jax.loop.hook_events import HookEvents
from nnx_jax.model import NNModel
from nnx_jax.objectives.metrics import build_metric
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.net import NNParams
from nnx_jax.params.run import RunSpec
from nnx_jax.runs.transforms import NNCheckpointTransform
from nnx_jax.spmd.world import World


def run(loop: Any, state: TrainerCarryState | None) -> Trained:
    """Train the operator's Equinox module as the loop says; see `TrainingLoop`.

    Raises:
        ImportError: Equinox is not installed.
        TypeError: `model_op` is no EquinoxModelOp.
    """
    load_equinox()
    return train(loop, state, RECIPE)


class EquinoxFramework(Framework):
    """Equinox modules, each held by an EquinoxNet."""

    backend = "equinox"
    kind = "eqx.Module, or the pair (module, state) of eqx.nn.make_with_state"
    engine_class = EquinoxEngine

    # -- the network -------------------------------------------------------------------------------------------

    def is_module(self, value: Any) -> bool:
        return isinstance(value, EquinoxNet)

    def build(self, net: NNParams, seed: int, info: Mapping[str, Any]) -> Any:
        told = "the built-in networks are Flax modules; give an Equinox module of your own: EquinoxModel(module=...)"
        raise ConfigError(f"got '{net.kind}', but {told}", path="model.net")

    def describe(self, module: EquinoxNet) -> str:
        return named_digest(module.module, _layers(module.module, new_trail()))

    def parameters(self, module: EquinoxNet) -> Mapping[str, Any]:
        return PureEquinox(module).params

    def weights(self, module: EquinoxNet) -> Mapping[str, np.ndarray]:
        return {name: np.asarray(value) for name, value in {**module.arrays(), **module.state_arrays()}.items()}

    def load(
        self, module: EquinoxNet, arrays: Mapping[str, Any], net: NNParams | None, written_by: str, source: str
    ) -> None:
        arrays = self.own_arrays(arrays, net, written_by, source)
        state = {name.removeprefix("model_state/"): arrays[name] for name in arrays if name.startswith("model_state/")}
        found = {**of_model(arrays), **state}
        held = self.weights(module)
        for name in sorted({*held, *found}):
            then, now = (f"{np.shape(each[name])}" if name in each else "not there" for each in (found, held))
            if then != now:
                raise ResumePointError(
                    f"the weights of {source} do not fit {module.called}: {name} is {then} in the checkpoint, {now} in "
                    "the module"
                )
        module.put(found)

    def transform(self, module: EquinoxNet, transforms: Sequence[NNCheckpointTransform]) -> EquinoxNet:
        return apply_transforms(module, transforms, kind=EquinoxNet)

    # -- asking ------------------------------------------------------------------------------------------------

    def inference(self, module: EquinoxNet, precision: str) -> EquinoxInference:
        return EquinoxInference(module, precision)

    def scorer(self, module: EquinoxNet, loss: Any, params: NNModelParams) -> EquinoxScorer:
        return EquinoxScorer(module, loss, params)

    # -- training ----------------------------------------------------------------------------------------------

    def prepare(self, model: Any, spec: RunSpec, events: HookEvents | None, call: TrainCall, world: World) -> Job:
        if call.train_step_fn is not None:
            raise ConfigError(
                "a step of your own changes a Flax module in place, and Equinox modules never change; give an "
                "objective, which returns loss terms, or hooks",
                path="train_step_fn",
            )
        return super().prepare(model, spec, events, call, world)


class EquinoxInference:
    """Outputs of one net in evaluation mode; its weights are taken anew at every call.

    Args:
        module: the net.
        precision: what it computes in.
    """

    def __init__(self, module: EquinoxNet, precision: str = "float32") -> None:
        self.module, self.dtype = module, jnp.dtype(precision)
        self._compiled: Any = None
        self._kind: Any = None

    def outputs(self, x: Any, batch_size: int) -> np.ndarray:
        """Return outputs [N, ...] for rows x [N, ...], `batch_size` rows at a time, the last batch padded.

        Raises:
            DataError: no rows.
            ModelError: the network does not take rows of this shape.
        """
        rows = settle("x", np.asarray(x), "predict", wide=self.dtype == np.float64)
        if rows.ndim == 0 or len(rows) == 0:
            raise DataError("predict needs at least one row, got none")
        if batch_size < 1:
            raise DataError(f"batch_size must be 1 or more, got {batch_size}")
        size, forward = min(batch_size, len(rows)), self._forward()
        padded = np.concatenate([rows, np.repeat(rows[:1], -len(rows) % size, axis=0)])
        try:
            found = [np.asarray(forward(padded[start : start + size])) for start in range(0, len(rows), size)]
        except (TypeError, ValueError) as error:
            if isinstance(error, NnxError):
                raise
            told = f"{self.module.called} does not take rows of {rows.dtype}{list(rows.shape[1:])}: {error}"
            raise ModelError(told) from error
        return np.concatenate(found)[: len(rows)]

    def _forward(self) -> Callable[[Any], Any]:
        """The compiled forward pass with the weights of now; compiled again where it is another module."""
        pure = PureEquinox(self.module, compute_dtype=self.dtype)
        kind = self.module.kind
        if self._compiled is None or kind != self._kind:
            self._kind = kind
            self._compiled = jax.jit(lambda held, state, x: pure.forward(held, state, {"x": x}, None, False)[0])
        leaves = {**pure.params, **pure.frozen}
        return lambda x: self._compiled(leaves, pure.model_state, x)


class EquinoxScorer:
    """Scores of one net with one loss and its metrics; weights are taken anew at every use."""

    def __init__(self, module: EquinoxNet, loss: Any, params: NNModelParams) -> None:
        self.module, self.loss, self.params = module, loss, params
        self._scorer: Scorer | None = None
        self._kind: Any = None

    def score(self, feed: Any) -> dict[str, float]:
        """Return loss and metrics over a feed."""
        pure = PureEquinox(self.module, compute_dtype=jnp.dtype(self.params.precision))
        leaves, kind = {**pure.params, **pure.frozen}, self.module.kind
        if self._scorer is None or kind != self._kind:
            self._kind = kind
            batch = {n: jax.ShapeDtypeStruct(column.shape, column.dtype) for n, column in feed.signature().items()}
            forward = lambda p, s, b: pure.forward(p, s, b, None, False)[0]  # noqa: E731
            outputs = jax.eval_shape(forward, leaves, pure.model_state, batch)
            metrics = [build_metric(metric, width(outputs), loss=self.loss) for metric in self.params.metrics]
            self._scorer = Scorer(pure.forward, self.loss, metrics, keep=False)
        return dict(self._scorer.score(leaves, pure.model_state, feed).values)


class EquinoxModel(NNModel):
    """An Equinox module with its loss and metrics, ready to be trained, asked and stored; see `nnx_jax.NNModel`.

    Args:
        module: any `equinox.Module` called with one row x, or as `module(x, key=key)`; or the pair (module, state) of
            `equinox.nn.make_with_state`, called as `module(x, state)`, which returns (output, state). It is mapped over
            the rows of a batch. One whose class says `takes_batch = True` is called with the whole batch, a dict of
            columns. It never changes: `model.module` is the trained one.
        params: loss, metrics, precision, and `freeze` with patterns of leaves such as "layers.0.*".
        loss: a loss of your own, `(outputs, batch)` or `(predicted, target)`.
        seed: has no use here, where the module brings its weights.

    Raises:
        ImportError: Equinox is not installed.
        TypeError: something else than a module.
        ModelError: (a ValueError) a module with state is given without it.
    """

    framework = EquinoxFramework()

    def __init__(
        self,
        module: Any = None,
        params: NNModelParams | None = None,
        *,
        loss: Any = None,
        seed: int = 0,
    ) -> None:
        load_equinox()
        _known()
        given = module if module is None else EquinoxNet.of(module)
        super().__init__(None, params, module=given, loss=loss, seed=seed)

    @property
    def _net(self) -> EquinoxNet:
        net: Any = self.net
        return net

    @property
    def module(self) -> Any:
        """The module with the weights of now."""
        return self._net.module

    @property
    def state(self) -> Any:
        """The `equinox.nn.State` beside it; None for a module without one."""
        return self._net.state

    @classmethod
    def from_checkpoint(cls, source: str, *, runs_dir: str | Path = "runs", module: Any = None) -> Self:
        """Return the model of a stored run, with the weights of `RUN[@LAST|BEST|tag|step]`; see `nnx_jax.NNModel`.

        Args:
            module: a module, or pair (module, state), like the one the run was trained with.
        """
        return super().from_checkpoint(source, runs_dir=runs_dir, module=module)


# -- what the run id knows ---------------------------------------------------------------------------------------


def _known() -> None:
    """Let functions and settings that hold Equinox modules be described."""
    eqx = load_equinox()
    register_kind(EquinoxNet, lambda net, inside: _described(net.module, inside))
    register_kind(eqx.Module, _described)


def _described(module: Any, inside: Any) -> list[Any]:
    """Classes and settings of a module, and the digest of its arrays."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(module) if isinstance(leaf, jax.Array | np.ndarray)]
    return [_layers(module, inside), hash_arrays({str(index): leaf for index, leaf in enumerate(leaves)})]


def _layers(module: Any, trail: Any) -> list[Any]:
    """Classes and settings of a module and of all within it; of settings all that is no array and no layer."""
    inside = trail.into(module)
    found: list[Any] = []
    for path, layer in _modules(module, ""):
        held = {name: item for name, item in vars(layer).items() if name != "inference" and not _has_parts(item)}
        found.append([path, *describe_layer(layer, held, inside)])
    return sorted(found, key=lambda each: each[0])


def _modules(part: Any, path: str) -> list[tuple[str, Any]]:
    """Every module within a value, itself included, by path."""
    kind = load_equinox().Module
    below = lambda value: value is not part and isinstance(value, kind)  # noqa: E731
    leaves, _ = jax.tree_util.tree_flatten_with_path(part, is_leaf=below)
    found = [(path, part)] if isinstance(part, kind) else []
    for where, leaf in leaves:
        if isinstance(leaf, kind) and leaf is not part:
            found += _modules(leaf, path + jax.tree_util.keystr(where))
    return found


def _has_parts(item: Any) -> bool:
    """Weights and layers, which are known by themselves."""
    kind = load_equinox().Module
    leaves = jax.tree.leaves(item, is_leaf=lambda part: isinstance(part, kind))
    return any(isinstance(leaf, kind | jax.Array | np.ndarray) for leaf in leaves)


# -- under a TrainingLoop ----------------------------------------------------------------------------------------


def _take(op: Any, info: Mapping[str, Any]) -> EquinoxNet:
    if not isinstance(op, EquinoxModelOp):
        told = f"model_op is {type(op).__name__}; the backend 'equinox' trains an EquinoxModelOp(module)"
        raise TypeError(told)
    return EquinoxNet.of(op.net)


def _give(op: EquinoxModelOp, module: EquinoxNet, input_shape: tuple[int, ...] | None) -> EquinoxModelOp:
    return op.of(module, **({} if input_shape is None else {"input_shape": input_shape}))


def _load(module: EquinoxNet, arrays: Mapping[str, Any], source: str) -> None:
    EquinoxModel.framework.load(module, arrays, None, EquinoxModel.framework.backend, source)


def _split(model: OpenedNet) -> tuple[Any, Callable[[Any], OpenedNet]]:
    return model.leaves, model.holding


RECIPE = Recipe("equinox", EquinoxModel, ("equinox", "optax"), _take, _give, _load, _split)
