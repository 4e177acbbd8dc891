"""TrainerCarryState: where a training loop stands, as a value that a later stage, or the same loop, goes on from."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from nnx_jax.backends.parts import import_built_in
from nnx_jax.core.errors import ConfigError
from nnx_jax.core.operator import Operator
from nnx_jax.core.stateful import CarryState
from nnx_jax.engines.blobs import read_blob, write_blob


@dataclasses.dataclass(frozen=True, eq=False)
class TrainerCarryState(CarryState):
    """The six fields of a training loop's state (founding document, decision D3), and what a resume needs besides.

    Attributes:
        model: the trained operator.
        opt_state: every array of the training that is no weight, by name: moments, an open window, slots of hooks,
            counters.
        step: committed updates of all stages so far.
        epoch: epochs of the last stage.
        metrics: the last values by name.
        rng: uint32 [2], the run key.
        loop: hash of the loop that left it, without its length and cadences; "" for none.
        host: what the loop's last commit kept beside its arrays, as JSON values.
    """

    model: Any
    opt_state: Mapping[str, np.ndarray] | None = None
    step: int = 0
    epoch: int = 0
    metrics: Mapping[str, float] | None = None
    rng: np.ndarray | None = None
    loop: str = ""
    host: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values that `from_dict` gives an equal state of; arrays are safetensors bytes in base64.

        Raises:
            ConfigError: the operator has no form in a file and no weight blob.
        """
        return {
            "model": None if self.model is None else {"state": self.model.state(), "weights": _text(self.model)},
            "opt_state": None if self.opt_state is None else _packed(self.opt_state),
            "step": self.step,
            "epoch": self.epoch,
            "metrics": None if self.metrics is None else {name: _number(v) for name, v in self.metrics.items()},
            "rng": None if self.rng is None else np.asarray(self.rng).tolist(),
            "loop": self.loop,
            "host": None if self.host is None else dict(self.host),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, model: Operator | None = None) -> Self:
        """Return the state that `to_dict` describes.

        Args:
            model: an operator of the same structure, for a module of the user's own that no file can rebuild.

        Raises:
            ConfigError: (a ValueError) a field is missing or unknown.
            UnregisteredError: (a PermissionError) the operator's class is not built in; import its module first.
            ModelError: (a ValueError) the weights do not fit the operator.
        """
        names = [each.name for each in dataclasses.fields(cls)]
        state = dict(values)
        if set(state) != set(names):
            odd = sorted(set(state) ^ set(names))
            raise ConfigError(f"a TrainerCarryState has {', '.join(names)}; {', '.join(odd)} is missing or unknown")
        stored = state["model"]
        if stored is not None:
            stored = _revived(stored["state"], base64.b64decode(stored["weights"]), model)
        return cls(
            model=stored,
            opt_state=None if state["opt_state"] is None else _unpacked(state["opt_state"]),
            step=state["step"],
            epoch=state["epoch"],
            metrics=None if state["metrics"] is None else {n: float(v) for n, v in state["metrics"].items()},
            rng=None if state["rng"] is None else np.asarray(state["rng"], np.uint32),
            loop=state["loop"],
            host=state["host"],
        )

    def __eq__(self, other: object) -> bool:
        """One bool: equal operators, equal arrays element by element, equal values."""
        if not isinstance(other, TrainerCarryState):
            return NotImplemented
        mine, theirs = self.to_dict(), other.to_dict()
        return mine == theirs

    __hash__ = None  # type: ignore[assignment]  # its arrays have none


def _text(model: Any) -> str:
    if not hasattr(model, "serialize_weights"):
        raise ConfigError(f"{type(model).__name__} has no serialize_weights(), so its state has no form in a file")
    return base64.b64encode(model.serialize_weights()).decode()


def _revived(state: Mapping[str, Any], weights: bytes, template: Any) -> Any:
    """The operator of a state, its module taken from a template where there is one."""
    import_built_in()  # nothing else may be imported yet
    described: Any = Operator.from_state(state)
    if template is None:
        return described.with_weights(weights)
    found = template.with_weights(weights)
    return described.of(found.whole) if hasattr(described, "of") else found


def _packed(arrays: Mapping[str, np.ndarray]) -> str:
    return base64.b64encode(write_blob(arrays)).decode()


def _unpacked(text: str) -> dict[str, np.ndarray]:
    return read_blob(base64.b64decode(text), "the arrays of a state")


def _number(value: float) -> float | str:
    """A number as JSON has it; those that are not finite as text."""
    return value if np.isfinite(value) else repr(float(value))
