"""Optimizers of a torch run: torch's own where its numbers are optax's, with rates, groups and counts in our hands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from nnx_jax.core.errors import ConfigError
from nnx_jax.optim.named import find_owners
from nnx_jax.optim.paths import check_patterns, decay_mask, matches
from nnx_jax.params.optim import OWN_KINDS, NNOptimParams
from nnx_jax.torch import foreach
from nnx_jax.torch.fused import fused_step
from nnx_jax.torch.lion import Lion, SignSGD
from nnx_jax.torch.module import sum_dtype

Params = Mapping[str, torch.nn.Parameter]
Schedules = Mapping[str, Any]
"""By optimizer, what gives a rate from its own count: `at(count)`; for those on the update clock."""

_NARROW = (torch.bfloat16, torch.float16)
_SLOTS = {
    "sgd": ("momentum_buffer",),
    "adam": ("step", "exp_avg", "exp_avg_sq"),
    "adamw": ("step", "exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "sign_sgd": (),
    "adadelta": ("step", "square_avg", "acc_delta"),
    "adamax": ("step", "exp_avg", "exp_inf"),
    "rmsprop": ("step", "square_avg", "grad_avg"),
}
"""State of one parameter by kind; only what a setting asks for is there."""
_FURTHER: dict[str, dict[str, str]] = {
    "sign_sgd": {},
    "adadelta": {"rho": "rho", "eps": "eps"},
    "adamax": {"b1": "beta1", "b2": "beta2", "eps": "eps"},
    "rmsprop": {"decay": "alpha", "eps": "eps", "centered": "centered"},
}
"""Further kinds whose numbers are optax's: optax's options, and torch's names of them."""
_OPTAX = {
    "adadelta": {"rho": 0.9, "eps": 1e-6},
    "adamax": {"b1": 0.9, "b2": 0.999, "eps": 1e-8},
    "rmsprop": {"decay": 0.9, "eps": 1e-8, "centered": False},
    "sign_sgd": {},
}
"""optax's defaults, which are not torch's."""


class Part:
    """One optimizer and the parameters it moves.

    Weight decay is coupled (L2) for sgd and adam, decoupled for adamw and lion. A 16-bit parameter is updated in
    float32 and rounded once.

    Args:
        optim: its configuration.
        schedule: gives the rate from the count of its updates; None on the epoch clock, where `held` is set.
        params: its parameters by name.

    Attributes:
        torch: torch's optimizer, one group of parameters for each factor on the rate and each decay.
        count: updates so far.
        held: rate of the epoch clock.
        used: rate of the last update; the next one's before the first.

    Raises:
        ConfigError: a kind or option that torch does not have, or a pattern that matches nothing.
    """

    def __init__(self, optim: NNOptimParams, schedule: Any, params: Params) -> None:
        self.optim, self.schedule, self.params = optim, schedule, dict(params)
        self._rounded = float if sum_dtype(params) == torch.float64 else _float32
        check_patterns([p for group in optim.param_groups for p in group.patterns], params, "param_groups")
        self.wide = {n: _shadow(p) for n, p in params.items() if p.dtype in _NARROW}
        """Float32 stand-ins of 16-bit parameters."""
        self._moved = {**self.params, **self.wide}
        groups: dict[tuple[float, float], list[str]] = {}
        decay = leaf_decay(optim, params)
        for name in params:
            key = optim.lr_scale_of(optim.group_of(name)), decay[name]
            groups.setdefault(key, []).append(name)
        self.scales = [scale for scale, _ in groups]
        listed = [
            {"params": [self._moved[name] for name in names], "weight_decay": decay}
            for (_, decay), names in groups.items()
        ]
        self.torch = _make(optim, listed)
        self._fused = fused_step(self.torch)
        self.slots = _slots(optim)
        self.reset()

    def reset(self) -> None:
        """Begin anew: no update yet, empty moments."""
        self.count, self.held = 0, self._rounded(self.optim.max_lr)
        self.used = self.rate
        fused = bool(self.torch.defaults.get("fused"))
        for group in self.torch.param_groups:
            # As torch makes them: on the device for a fused kernel alone; in one tensor, see `fused`.
            device = next((value.device for value in group["params"]), None) if fused else "cpu"
            steps = torch.zeros(len(group["params"]), device=device)
            for value, step in zip(group["params"], steps, strict=True):
                state = self.torch.state[value]
                state.clear()
                for slot in self.slots:
                    whole = slot != "step"
                    state[slot] = torch.zeros_like(value, memory_format=torch.preserve_format) if whole else step

    @property
    def rate(self) -> float:
        """The rate of the next update, as float32 holds it (float64 where the parameters are)."""
        return self.held if self.schedule is None else self._rounded(self.schedule.at(self.count))

    def set_rate(self, rate: float) -> None:
        """Set the rate of the epoch clock."""
        self.held = self._rounded(rate)
        self.used = self.rate

    def step(self) -> None:
        """One update by the gradients that were given, see `give`."""
        self.used = self.rate
        self.prepare()
        if self.wide:
            self._step_wide()
        elif self._fused is None or not self._fused():
            self.torch.step()
        self.count += 1

    def prepare(self) -> None:
        """Tell torch's optimizer the rate of the next update."""
        rate = self.rate
        for group, scale in zip(self.torch.param_groups, self.scales, strict=True):
            group["lr"] = rate * scale

    def _step_wide(self) -> None:
        with torch.no_grad():
            for name, value in self.wide.items():
                value.copy_(self.params[name])
            self.torch.step()
            for name, value in self.wide.items():
                self.params[name].copy_(value)
                value.grad = None

    def give(self, name: str, grad: torch.Tensor) -> None:
        """Hand over one parameter's gradient; a float32 one of a 16-bit parameter keeps all its digits."""
        self._moved[name].grad = grad

    def arrays(self) -> dict[str, torch.Tensor]:
        """State tensors by `<parameter>/<slot>`."""
        states = self.torch.state
        return {f"{n}/{slot}": states[value][slot] for n, value in self._moved.items() for slot in self.slots}


class Optimizers:
    """The optimizers of a run, one or several by name.

    Args:
        optims: their configurations, in alphabetical order.
        schedules: those on the update clock.
        params: the parameters that are updated, by name.
        several: they have names: each moves what its groups match, and clips by its own norm.

    Raises:
        ConfigError: see `Part` and `optim.named.find_owners`.
    """

    def __init__(
        self, optims: Mapping[str, NNOptimParams], schedules: Schedules, params: Params, *, several: bool
    ) -> None:
        self.several = several
        self.kinds = {name: optim.kind for name, optim in optims.items()}
        self.parts: dict[str, Part] = {}
        if not several:
            name, optim = next(iter(optims.items()))
            self.parts[name] = Part(optim, next(iter(schedules.values()), None), params)
            return
        for name, paths in find_owners(optims, params).owned.items():
            try:
                self.parts[name] = Part(optims[name], schedules.get(name), {path: params[path] for path in paths})
            except ConfigError as error:
                raise ConfigError(str(error.args[0]), path=f"trainer.optims.{name}") from error

    @property
    def first(self) -> Part:
        """The only one, or the alphabetically first."""
        return next(iter(self.parts.values()))

    def set_rate(self, rates: float | Mapping[str, float]) -> None:
        """Set the rates of the epoch clock: one number, or one by optimizer.

        Raises:
            ConfigError: there is no optimizer of that name.
        """
        named = rates if isinstance(rates, Mapping) else {next(iter(self.parts)): rates}
        for name, rate in named.items():
            if name not in self.parts:
                raise ConfigError(f"there is no optimizer '{name}'; the optimizers are {', '.join(self.parts)}")
            self.parts[name].set_rate(rate)

    def update(self, grads: Mapping[str, torch.Tensor], factor: float, norm: float) -> None:
        """Clip and step; each of several by the norm of its own parameters.

        Args:
            grads: of every trained parameter by name, those that are not updated too; they are changed.
            factor: what they still have to be multiplied with.
            norm: their global norm with the factor.
        """
        limit = None if self.several else self.first.optim.grad_clip_norm
        if limit is not None and norm > limit:
            factor *= limit / norm
        if factor != 1.0:
            foreach.mul_(list(grads.values()), factor)
        for part in self.parts.values():
            limit = part.optim.grad_clip_norm if self.several else None
            if limit is not None:
                own = [grads[name] for name in part.params]
                if (length := foreach.length(own).item()) > limit:
                    foreach.mul_(own, limit / length)
            for name in part.params:
                part.give(name, grads[name])
            part.step()

    def apply(self, norm: float) -> None:
        """Clip and step the only optimizer, by the gradients in `.grad` of every parameter; `norm` is theirs."""
        part = self.first
        if (limit := part.optim.grad_clip_norm) is not None and norm > limit:
            foreach.mul_([value.grad for value in part.params.values()], limit / norm)
        part.step()

    def reset(self) -> None:
        """Begin anew."""
        for part in self.parts.values():
            part.reset()

    def arrays(self) -> dict[str, torch.Tensor]:
        """State tensors of all of them by `<parameter>/<slot>`; no parameter belongs to two."""
        return {name: tensor for part in self.parts.values() for name, tensor in part.arrays().items()}

    def rates(self) -> dict[str, float] | None:
        """The rates the last updates used, by name; None for a single one."""
        return {name: part.used for name, part in self.parts.items()} if self.several else None


def leaf_decay(optim: NNOptimParams, params: Mapping[str, Any]) -> dict[str, float]:
    """Weight decay of every parameter: its group's own, else the optimizer's where the mask allows it.

    Raises:
        ConfigError: the mask, or one of its patterns, matches nothing.
    """
    found = {path: optim.group_of(path) for path in params}
    own = {path: None if at is None else optim.param_groups[at].weight_decay for path, at in found.items()}
    rest = {path: value for path, value in params.items() if own[path] is None}
    decay, rule = optim.weight_decay or 0.0, optim.decay_mask
    if not isinstance(rule, str):
        check_patterns(rule, params, "decay_mask")
        allowed = {path: matches(path, rule) for path in params}
    else:
        allowed = decay_mask(rule, rest) if decay else dict.fromkeys(rest, False)
    return {path: value if value is not None else decay * allowed[path] for path, value in own.items()}


def _make(optim: NNOptimParams, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
    """torch's optimizer of a kind; the fused kernels where there are some, which are the fastest."""
    kind, lr = optim.kind, optim.max_lr
    fused = {"fused": True} if _fuses(groups) else {}
    listed: Any = list(groups)
    if kind == "sgd":
        return torch.optim.SGD(listed, lr=lr, momentum=optim.momentum or 0.0, nesterov=bool(optim.nesterov), **fused)
    if kind in ("adam", "adamw"):
        make: Callable[..., torch.optim.Optimizer] = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
        return make(listed, lr=lr, betas=_pair(optim), eps=float(optim.eps or 0.0), **fused)
    if kind == "lion":
        return Lion(listed, lr=lr, betas=_pair(optim))
    options = _further_options(optim)
    if kind == "sign_sgd":
        return SignSGD(listed, lr=lr)
    if kind == "adadelta":
        return torch.optim.Adadelta(listed, lr=lr, **options)
    if kind == "adamax":
        betas = options["beta1"], options["beta2"]
        return torch.optim.Adamax(listed, lr=lr, betas=betas, eps=options["eps"])
    return torch.optim.RMSprop(listed, lr=lr, **options)


def _further_options(optim: NNOptimParams) -> dict[str, Any]:
    """A further kind's options by torch's names.

    Raises:
        ConfigError: torch does not have the kind, or it computes other numbers than optax with these options.
    """
    kind, given = optim.kind, dict(optim.options)
    offered = f"backend torch has {', '.join((*OWN_KINDS, *sorted(_FURTHER)))}"
    if kind not in _FURTHER:
        raise ConfigError(f"optimizer '{kind}' is not there, or its numbers are others than optax's; {offered}")
    if kind == "rmsprop" and given.pop("eps_in_sqrt", True):
        raise ConfigError(
            "optimizer 'rmsprop' of torch adds eps outside of the root, optax's by default inside; write options: "
            "{eps_in_sqrt: false}, which both compute alike"
        )
    unknown = sorted(set(given) - set(_FURTHER[kind]))
    if unknown:
        legal = ", ".join(_FURTHER[kind]) or "none"
        raise ConfigError(f"optimizer '{kind}' with backend torch has no option '{unknown[0]}'; its options: {legal}")
    if optim.weight_decay or any(group.weight_decay for group in optim.param_groups):
        raise ConfigError(f"optimizer '{kind}' takes no weight decay with backend torch; write weight_decay: 0")
    return {_FURTHER[kind][name]: value for name, value in {**_OPTAX[kind], **given}.items()}


def _pair(optim: NNOptimParams) -> tuple[float, float]:
    first, second = optim.betas or (0.0, 0.0)
    return float(first), float(second)


def _slots(optim: NNOptimParams) -> tuple[str, ...]:
    slots = _SLOTS[optim.kind]
    if optim.kind == "sgd":
        return slots if optim.momentum else ()
    if optim.kind == "rmsprop" and not optim.options.get("centered"):
        return slots[:2]
    return slots


def _fuses(groups: Sequence[dict[str, Any]]) -> bool:
    """Whether torch's fused kernels take these parameters."""
    values = [value for group in groups for value in group["params"]]
    kinds = {(value.device.type, value.dtype) for value in values}
    return all(device in ("cpu", "cuda") and dtype in (torch.float32, torch.float64) for device, dtype in kinds)


def _shadow(value: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(value.detach().float(), requires_grad=True)


def _float32(rate: float) -> float:
    return float(np.float32(rate))
