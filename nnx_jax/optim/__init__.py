"""Optimizers and learning-rate schedules over flat parameter dictionaries."""

from nnx_jax.optim.build import (
    Group,
    Optimizer,
    OptState,
    describe,
    make_optimizer,
    optimizer_names,
    register_optimizer,
    set_rate,
)
from nnx_jax.optim.clip import clip_scale, clipped, square_sums
from nnx_jax.optim.epochs import EpochSchedule, FormulaSchedule, PlateauSchedule
from nnx_jax.optim.named import NamedOptimizers, Ownership, find_owners, named_optimizers
from nnx_jax.optim.paths import check_patterns, decay_mask, decays, group_of, matches
from nnx_jax.optim.schedules import SCHEDULES, Schedule, ScheduleError, make_schedule, planned_updates
from nnx_jax.optim.specs import (
    build_epoch_schedule,
    build_epoch_schedules,
    build_optimizer,
    build_schedule,
    build_schedules,
)

__all__ = [
    "SCHEDULES",
    "EpochSchedule",
    "FormulaSchedule",
    "Group",
    "NamedOptimizers",
    "OptState",
    "Optimizer",
    "Ownership",
    "PlateauSchedule",
    "Schedule",
    "ScheduleError",
    "build_epoch_schedule",
    "build_epoch_schedules",
    "build_optimizer",
    "build_schedule",
    "build_schedules",
    "check_patterns",
    "clip_scale",
    "clipped",
    "decay_mask",
    "decays",
    "describe",
    "find_owners",
    "group_of",
    "make_optimizer",
    "make_schedule",
    "matches",
    "named_optimizers",
    "optimizer_names",
    "planned_updates",
    "register_optimizer",
    "set_rate",
    "square_sums",
]
