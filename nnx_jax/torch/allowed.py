"""What several torch processes do together: what a DDP allows beyond the plain case, and what else is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from nnx_jax.core.errors import ConfigError, nearest
from nnx_jax.distributed.group import DDP as _Plain
from nnx_jax.fit.call import Given
from nnx_jax.params.run import RunSpec
from nnx_jax.spmd.world import World
from nnx_jax.torch.layers import BatchNorm

ALLOWED = ("objective", "step", "validation", "journal", "autocast", "compile")
"""What `DDP.allow` may name."""
BATCH_NORMS = ("refuse", "sync")
"""What `DDP.batch_norm` may be."""
_KNOWN = {
    torch.nn.modules.batchnorm._BatchNorm.forward, torch.nn.SyncBatchNorm.forward, BatchNorm.forward,
}  # fmt: skip
"""Forward passes of batch norms whose arithmetic is known."""


@dataclass(frozen=True)
class DDP(_Plain):
    """Data parallel: every process has the model, and its own rows. `model.train(..., distributed=DDP())`.

    Without more words an update is made by the model's own loss, in full precision, and is that of one process on the
    union of the batches. What goes beyond that is named, since its rules are worth knowing first:

    - "objective": an objective makes the loss terms, each process those of its own rows; numerators and denominators
      are added up as of the built-in loss. What it computes of several rows together (negatives of a batch, rows that
      are mixed) is computed of one process's rows. Its model is the module itself, gradients are added up once at the
      end of a window, and a process without a row in a microbatch does not ask it.
    - "step": a `train_step_fn` or `trainer_step_fn` of your own; the rules are `nnx_jax.torch.together`'s.
    - "validation": an `eval_step_fn` of your own runs on every process, and the writer's values are everybody's.
    - "journal": a history journal; the process that writes the run writes it, the others hold its newest records.
    - "autocast": 16 bits, by `precision` or a MixedPrecisionHook; a step is made, or a scale is changed, on all.
    - "compile": a module that torch compiles, see `NNModel(compile=)`.

    Args:
        writer_rank: the process that writes the run; all others hold the same records in memory.
        find_unused_parameters: a microbatch may use a part of the parameters.
        allow: of the above.
        batch_norm: "sync": in training, statistics of batch norms are those of all processes' rows, forward and
            backward, as one process has them of the union. "refuse": a network with a batch norm is an error.

    Raises:
        ConfigError: (a ValueError) a negative rank, or a name that is not there.
        TypeError: a value of another type.
    """

    allow: Sequence[str] = ()
    batch_norm: str = "refuse"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.allow, str) or not all(isinstance(name, str) for name in self.allow):
            raise TypeError(f"DDP.allow must be a list of names, got {self.allow!r}; write allow=['objective']")
        for name in self.allow:
            if name not in ALLOWED:
                told = f"got '{name}'; it may name {', '.join(ALLOWED)}{nearest(name, ALLOWED)}"
                raise ConfigError(told, path="DDP.allow")
        object.__setattr__(self, "allow", tuple(sorted(set(self.allow))))
        if self.batch_norm not in BATCH_NORMS:
            raise ConfigError(f"got {self.batch_norm!r}; write one of {', '.join(BATCH_NORMS)}", path="DDP.batch_norm")


def as_ddp(given: _Plain) -> DDP:
    """The settings as torch's; those of `nnx_jax.distributed` allow nothing more."""
    return given if isinstance(given, DDP) else DDP(given.writer_rank, given.find_unused_parameters)


def check_alike(world: World, given: DDP, *, compile: str | None) -> None:
    """Check that every process was given the same settings, and compiles alike.

    Raises:
        ConfigError: (a ValueError) on every process, with each difference.
    """
    found = world.gather("the settings of DDP", {**asdict(given), "compile": compile})
    for name in found[0]:
        values = [each[name] for each in found]
        if any(value != values[0] for value in values):
            told = ", ".join(f"rank {rank} has {value!r}" for rank, value in enumerate(values))
            raise ConfigError(
                f"the processes were not given the same: {told}",
                path="NNModel.compile" if name == "compile" else f"DDP.{name}",
            )


def check_alone(
    spec: RunSpec, given: Given, settings: DDP, *, journal: Any, precision: str, compile: str | None
) -> None:  # fmt: skip
    """Refuse what several torch processes do not do together, or only where they are told to.

    Args:
        precision: what the model computes in, by the configuration or a hook.
        compile: what compiles the forward pass; None for nothing.

    Raises:
        ConfigError: naming it and what to do.
    """
    step = "train_step_fn" if spec.trainer is None else "trainer_step_fn"
    needs = (
        ("step", given.step is not None, f"a {step} of your own", step),
        ("validation", given.validation is not None, "an eval_step_fn of your own", "eval_step_fn"),
        ("objective", given.objective is not None, f"the objective {type(given.objective).__name__}", "objective"),
        ("journal", journal is not None or spec.history is not None, "a history journal", "history"),
        ("autocast", precision in ("bfloat16", "float16"), f"mixed precision ({precision})", "precision"),
        ("compile", compile is not None, f"a forward pass that torch compiles ({compile})", "NNModel.compile"),
    )
    for name, asked, what, path in needs:
        if asked and name not in settings.allow:
            raise ConfigError(
                f"{what} is for one process of the engine 'torch' unless it is allowed; see "
                f"nnx_jax.torch.distributed.DDP and write DDP(allow=['{name}']), train in one process, or leave it out",
                path=path,
            )
    if spec.elastic:
        raise ConfigError(
            "an elastic run is for one process of the engine 'torch'; train in one process, or leave it out (the "
            "engine 'flax' has it in a group too)",
            path="elastic",
        )


def check_net(module: torch.nn.Module, settings: DDP) -> bool:
    """Refuse layers whose running statistics would differ from process to process; whether some are kept equal.

    Raises:
        ConfigError: naming the first.
    """
    norms = batch_norms(module)
    for name, part in norms.items():
        told = f"layer '{name}' is a BatchNorm, "
        if settings.batch_norm != "sync":
            told += "whose statistics would be those of each process's rows; write DDP(batch_norm='sync'), take "
            raise ConfigError(f"{told}LayerNorm or GroupNorm, or train in one process", path="model.net")
        if not part.track_running_stats:
            told += "that keeps no running statistics, so it would score with those of each process's rows; write "
            raise ConfigError(f"{told}track_running_stats=True, or train in one process", path="model.net")
        if type(part).forward not in _KNOWN:
            told += f"of a class of your own, {type(part).__name__}, whose forward pass is not known; take torch's, or "
            raise ConfigError(f"{told}train in one process", path="model.net")
    return bool(norms)


def batch_norms(module: torch.nn.Module) -> dict[str, torch.nn.modules.batchnorm._BatchNorm]:
    """The batch norms of a network, by name."""
    kind = torch.nn.modules.batchnorm._BatchNorm
    return {name: part for name, part in module.named_modules() if isinstance(part, kind)}
