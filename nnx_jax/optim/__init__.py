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
from nnx_jax.optim.epochs import EpochSchedule, FormulaSchedule, PlateauSchedule
from nnx_jax.optim.paths import check_patterns, decay_mask, decays, group_of, matches
from nnx_jax.optim.schedules import SCHEDULES, Schedule, ScheduleError, make_schedule, planned_updates
from nnx_jax.optim.specs import build_epoch_schedule, build_optimizer, build_schedule

__all__ = [
    "SCHEDULES",
    "EpochSchedule",
    "FormulaSchedule",
    "Group",
    "OptState",
    "Optimizer",
    "PlateauSchedule",
    "Schedule",
    "ScheduleError",
    "build_epoch_schedule",
    "build_optimizer",
    "build_schedule",
    "check_patterns",
    "decay_mask",
    "decays",
    "describe",
    "group_of",
    "make_optimizer",
    "make_schedule",
    "matches",
    "optimizer_names",
    "planned_updates",
    "register_optimizer",
    "set_rate",
]
