"""A trained Flax NNX module asked for outputs and scores: batched, compiled once per shape, modes untouched."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_jax.core.errors import DataError, ModelError, NnxError
from nnx_jax.data.dtypes import settle
from nnx_jax.engines.nnx_forward import PureModule


class PredictionValidationError(NnxError, ValueError):
    """Outputs or the request do not allow what was asked of a prediction."""

    layer = "model"


@dataclasses.dataclass(frozen=True)
class ProbabilitySpec:
    """How to read outputs as probabilities.

    Attributes:
        kind: "categorical" (softmax over the class axis) or "bernoulli" (sigmoid of each output).
        class_axis: axis of the classes; it must be the last one.
        labels: names of the classes, in order.
    """

    kind: str
    class_axis: int = -1
    labels: tuple[str, ...] | None = None


class PredictResult(NamedTuple):
    """Outputs of the network, float32 or wider [N, ...], and the decided classes, int64 [N, ...] (None for values)."""

    logits: np.ndarray
    classes: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class PredictionResult:
    """Probabilities, float32 [N, ...], the decided classes, row numbers int64 [N], and the labels if given."""

    probabilities: np.ndarray
    classes: np.ndarray
    sample_ids: np.ndarray
    labels: tuple[str, ...] | None


class Inference:
    """Outputs of one module in evaluation mode; the module itself is only read, so its modes never change.

    Args:
        module: the network; its weights are taken anew at every call.
        precision: dtype of the matmuls.
    """

    def __init__(self, module: nnx.Module, precision: str = "float32") -> None:
        self.module, self.dtype = module, jnp.dtype(precision)
        self._forward = jax.jit(self._outputs)

    def _outputs(self, params: Any, model_state: Any, x: jax.Array) -> Any:
        return self._pure.forward(params, model_state, {"x": x}, None, False)[0]

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
        self._pure = PureModule(self.module, compute_dtype=self.dtype)
        params = {**self._pure.params, **self._pure.frozen}
        size = min(batch_size, len(rows))
        found = []
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            fill = size - len(part)
            padded = np.concatenate([part, np.repeat(part[:1], fill, axis=0)]) if fill else part
            try:
                outputs = self._forward(params, self._pure.model_state, padded)
            except (TypeError, ValueError) as error:
                if isinstance(error, NnxError):
                    raise
                raise ModelError(
                    f"{type(self.module).__name__} does not take rows of {rows.dtype}{list(rows.shape[1:])}: {error}"
                ) from error
            found.append(np.asarray(outputs)[: len(part)])
        return np.concatenate(found)


def decide(task: str, logits: np.ndarray) -> np.ndarray | None:
    """Return the classes of outputs: argmax, `logit >= 0` for yes/no outputs, None for values."""
    if task == "classes":
        return logits.argmax(axis=-1).astype(np.int64)
    return (logits >= 0).astype(np.int64) if task == "bernoulli" else None


def probabilities(logits: np.ndarray, spec: ProbabilitySpec) -> PredictionResult:
    """Read outputs [N, ..., C] as probabilities, computed in float64.

    Raises:
        PredictionValidationError: outputs that are not finite, another class axis, or a wrong number of labels.
    """
    if spec.kind not in ("categorical", "bernoulli"):
        raise PredictionValidationError(f"kind is {spec.kind!r}; write 'categorical' or 'bernoulli'")
    if spec.class_axis not in (-1, logits.ndim - 1):
        raise PredictionValidationError(f"class_axis is {spec.class_axis}; the classes must be on the last axis (-1)")
    if spec.labels is not None and len(spec.labels) != logits.shape[-1]:
        raise PredictionValidationError(f"{len(spec.labels)} labels for {logits.shape[-1]} classes; give one each")
    if not np.isfinite(logits).all():
        row = int(np.argwhere(~np.isfinite(logits))[0][0])
        raise PredictionValidationError(f"the outputs of row {row} are not finite, so they are no probabilities")
    wide = logits.astype(np.float64)
    if spec.kind == "categorical":
        powers = np.exp(wide - wide.max(axis=-1, keepdims=True))
        found = powers / powers.sum(axis=-1, keepdims=True)
        classes = found.argmax(axis=-1)
    else:
        found = 1.0 / (1.0 + np.exp(-wide))
        classes = found >= 0.5
    ids = np.arange(len(logits), dtype=np.int64)
    return PredictionResult(found.astype(np.float32), classes.astype(np.int64), ids, spec.labels)


def weights_of(module: nnx.Module) -> Mapping[str, np.ndarray]:
    """Return every weight and statistic of a module by name, as numpy arrays."""
    pure = PureModule(module)
    return {name: np.asarray(value) for name, value in {**pure.params, **pure.model_state}.items()}
