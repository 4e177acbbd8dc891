"""One forward pass of a planned model on one batch: shapes and loss before anything is trained or written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax.core.errors import ModelError, NnxError
from nnx_jax.data.dataset import TrainingDataset, describe
from nnx_jax.data.loader import LoaderFeed
from nnx_jax.engines.feeds import sizes_for
from nnx_jax.engines.nnx_forward import PureModule
from nnx_jax.objectives.losses import Loss, build_loss
from nnx_jax.objectives.terms import check_terms
from nnx_jax.plan import checks
from nnx_jax.plan.fitting import build_model
from nnx_jax.plan.results import PlanError
from nnx_jax.plan.seeding import seeded
from nnx_jax.plan.settings import Settings


@dataclass(frozen=True)
class ProbeResult:
    """What one forward pass showed.

    Attributes:
        inputs: shape and dtype of every column of the batch, by name, as the network gets it.
        outputs: shape and dtype of the network's outputs, in their own structure.
        loss: the model's loss over the batch, None for a batch without targets.
        parameters: how many numbers the network has.
    """

    inputs: Mapping[str, jax.ShapeDtypeStruct]
    outputs: Any
    loss: float | None
    parameters: int


def probe(settings: Settings, batch: Any) -> ProbeResult:
    """Run the pass; see `ExperimentPlan.probe`."""
    problems = [each for each in checks.validate(settings) if each.path.split(".")[0] in ("model", "net")]
    if problems:
        raise PlanError(problems)
    spec, problems = checks.read(settings.changed(train=None, train_changes={}, data=None, data_changes={}, hooks=()))
    if spec is None:
        raise PlanError(problems)
    seed = settings.state_of("train").get("seed", 0)
    with seeded(seed):
        columns = next(iter(LoaderFeed([batch]).batches()))
        loss = build_loss(spec.model.loss if settings.loss is None else settings.loss)
        model = build_model(settings, spec.with_training(spec.train.replace(seed=seed)))
        module = model.build(sizes_for(loss, _info(settings, columns)), seed)
        return _pass(PureModule(module, compute_dtype=jnp.dtype(spec.precision)), loss, columns, type(module).__name__)


def _info(settings: Settings, columns: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """What is known of sizes: from the planned dataset where there is one, else from the batch."""
    train = checks.data_of(settings)["train"]
    if isinstance(train, TrainingDataset):
        return dict(train.info)
    return describe({name: column for name, column in columns.items() if name != "mask"})


def _pass(pure: PureModule, loss: Loss, columns: Mapping[str, np.ndarray], name: str) -> ProbeResult:
    weights = {**pure.params, **pure.frozen}

    @jax.jit
    def forward(weights: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        outputs, _ = pure.forward(weights, state, batch, None, False)
        if "y" not in batch:
            return outputs, None
        total = jnp.float32(0)
        for term in check_terms(loss(outputs, batch)):
            total += term.weight * (term.scaled if term.denominator is None else term.scaled / term.denominator)
        return outputs, total

    try:
        outputs, value = forward(weights, pure.model_state, dict(columns))
    except NnxError:
        raise
    except (TypeError, ValueError, AssertionError) as error:
        given = ", ".join(f"{n} {column.dtype}{list(column.shape)}" for n, column in columns.items() if n != "mask")
        raise ModelError(f"{name} does not take the batch ({given}): {error}") from error
    shapes = lambda tree: jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)  # noqa: E731
    inputs = {column: shapes(value) for column, value in columns.items() if column != "mask"}
    size = sum(int(leaf.size) for leaf in weights.values())
    return ProbeResult(inputs, shapes(outputs), None if value is None else float(value), size)
