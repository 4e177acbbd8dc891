"""TorchState: what a training holds between two microbatches, as named host arrays and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from nnx_jax.torch import streams
from nnx_jax.torch.arrays import check_forms, form, host, tensor_of
from nnx_jax.torch.module import Net
from nnx_jax.torch.optim import Optimizers
from nnx_jax.torch.window import Window

COUNTERS = ("batch", "micro", "step", "epoch_step", "skipped", "nonfinite", "consecutive", "epoch", "epoch_batch")
"""Microbatches seen, microbatches in the open window, committed updates, those of this epoch, skipped windows, those
skipped as non-finite, those of them in a row, the epoch, and microbatches of this epoch."""
WEIGHTS = ("params/", "frozen/", "model_state/")
"""Prefixes of the arrays that are the model; the rest belongs to training."""


@dataclass
class TorchState:
    """One training state; the tensors are the module's and the optimizers' own.

    Attributes:
        counters: by name, see `COUNTERS`.
        window: the open window.
        opened: the counters when it opened: where a halt goes back to.
        halted: why training ended; None while it goes on.
    """

    net: Net
    optimizers: Optimizers
    window: Window
    capacity: int
    loader: torch.Generator | None = None
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    opened: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    halted: Exception | None = None
    epoch_began: dict[str, np.ndarray] | None = None
    """Every stream at the beginning of the epoch, where a loader of the user's own draws its order then."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by the name a checkpoint has for it, but for the streams."""
        net, held = self.net, self._window()
        found = {f"params/{name}": value for name, value in net.params.items()}
        found |= {f"frozen/{name}": value for name, value in net.frozen.items()}
        found |= {f"model_state/{name}": value for name, value in net.state().items()}
        found |= {f"opt_state/{name}": value for name, value in self.optimizers.arrays().items()}
        return found | {f"window/{name}": value for name, value in held.items()}

    def arrays(self) -> dict[str, np.ndarray]:
        """Copies of everything on the host, by name."""
        found = {name: host(value) for name, value in self.tensors().items()}
        for name, value in self._numbers().items():
            found[name] = np.asarray(value)
        for name, value in self._streams().items():
            found[f"rng/{name}"] = value
        return found

    def forms(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of every array of `arrays`."""
        found = {name: form(value) for name, value in self.tensors().items()}
        rest = {**self._numbers(), **{f"rng/{name}": value for name, value in self._streams().items()}}
        return found | {name: (np.shape(value), np.asarray(value).dtype.name) for name, value in rest.items()}

    def reset(self) -> None:
        """A training that has not begun, of the weights there are."""
        self.window.clear()
        self.optimizers.reset()
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.opened, self.halted, self.epoch_began = dict(self.counters), None, None

    def put_weights(self, arrays: Mapping[str, Any]) -> None:
        """Write weights and statistics into the module.

        Raises:
            ResumePointError: a name, shape or dtype differs; nothing is changed.
        """
        wanted = {name: value for name, value in self.tensors().items() if name.startswith(WEIGHTS)}
        check_forms(arrays, {name: form(value) for name, value in wanted.items()})
        _copy(arrays, wanted)

    def put(self, arrays: Mapping[str, Any]) -> None:
        """Go on from stored arrays, all or nothing.

        Raises:
            ResumePointError: a name, shape or dtype differs; nothing is changed.
        """
        forms = self.forms()
        streams_of = lambda names: {name for name in names if name.startswith("rng/")}  # noqa: E731
        # A stream of a device that only one of both has, or of a loader that draws none, changes nothing.
        optional = streams_of(forms) ^ streams_of(arrays)
        given = {name: value for name, value in arrays.items() if name not in optional}
        check_forms(given, {name: value for name, value in forms.items() if name not in optional})
        self.reset()
        stored = {name: value for name, value in self.tensors().items() if not name.startswith("window/")}
        _copy(arrays, stored)
        self.counters = {name: int(arrays[f"counters/{name}"]) for name in COUNTERS}
        self.opened = {name: int(arrays[f"counters/opened/{name}"]) for name in COUNTERS}
        for name, part in self.optimizers.parts.items():
            part.count = int(arrays[f"counters/updates/{name}"])
            part.held, part.used = np.asarray(arrays[f"counters/rates/{name}"]).tolist()
        if self.capacity > 1:
            prefix = "window/"
            window = {n.removeprefix(prefix): tensor_of(v) for n, v in arrays.items() if n.startswith(prefix)}
            self.window.put(window, self.counters["micro"], int(arrays["counters/told"]))
        now = {n.removeprefix("rng/"): v for n, v in arrays.items() if n.startswith("rng/")}
        began = {n.removeprefix("epoch/"): now.pop(n) for n in list(now) if n.startswith("epoch/")}
        self.epoch_began = began or None
        streams.put(now, self.net.device, self.loader)

    def rewind(self) -> None:
        """Give the open window up: the model and the counters are as they were when it opened."""
        self.net.put_state(self.window.entry)
        self.window.clear()
        self.counters = dict(self.opened)

    def _window(self) -> dict[str, torch.Tensor]:
        """The open window; its entry is that of the model while none is open."""
        if self.capacity == 1:
            return {}
        found = self.window.arrays(self.capacity)
        entry = self.window.entry if len(self.window) else self.net.state()
        return found | {f"entry/{name}": value for name, value in entry.items()}

    def _numbers(self) -> dict[str, Any]:
        found: dict[str, Any] = {f"counters/{name}": np.int64(value) for name, value in self.counters.items()}
        found |= {f"counters/opened/{name}": np.int64(value) for name, value in self.opened.items()}
        for name, part in self.optimizers.parts.items():
            found[f"counters/updates/{name}"] = np.int64(part.count)
            found[f"counters/rates/{name}"] = np.array([part.held, part.used])
        if self.capacity > 1:
            found["counters/told"] = np.int64(self.window.told)
        return found

    def _streams(self) -> dict[str, np.ndarray]:
        now = streams.capture(self.net.device, self.loader)
        return {**now, **{f"epoch/{name}": value for name, value in (self.epoch_began or {}).items()}}


def _copy(arrays: Mapping[str, Any], into: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, value in into.items():
            value.copy_(tensor_of(arrays[name]))
