"""The eighteen places of a training run where hooks are called, and which of them are traced into the step."""

from __future__ import annotations

from enum import Enum
from typing import Literal


class TrainingStage(Enum):
    """Where a hook is called, in the order of a run (names and values: founding document 3).

    The host stages run Python around the compiled step. The traced stages are compiled into it: Python runs there once,
    while the step is traced. Host hooks may watch a traced stage; they are called after the step, in stage order.
    """

    SETUP = 1
    BEFORE_TRAINING = 2
    BEFORE_EPOCH = 3
    BEFORE_BATCH = 4
    BEFORE_FORWARD = 5
    AFTER_FORWARD = 6
    BEFORE_LOSS = 7
    AFTER_LOSS = 8
    BEFORE_BACKWARD = 9
    DO_BACKWARD = 10
    AFTER_BACKWARD = 11
    BEFORE_OPTIMIZER_STEP = 12
    DO_OPTIMIZER_STEP = 13
    AFTER_OPTIMIZER_STEP = 14
    AFTER_BATCH = 15
    AFTER_EPOCH = 16
    AFTER_TRAINING = 17
    AFTER_VALIDATION = 18

    @property
    def place(self) -> Literal["host", "traced", "both"]:
        """Who runs it: the host, the compiled step, or both (BEFORE_BATCH: watchers first, then the zero policy)."""
        if self is TrainingStage.BEFORE_BATCH:
            return "both"
        inside = TrainingStage.BEFORE_FORWARD.value <= self.value <= TrainingStage.AFTER_OPTIMIZER_STEP.value
        return "traced" if inside else "host"

    @property
    def traced(self) -> bool:
        """Python of traced hooks runs here, while the step is traced."""
        return self.place != "host"

    @property
    def of_batch(self) -> bool:
        """It comes once a microbatch."""
        return TrainingStage.BEFORE_BATCH.value <= self.value <= TrainingStage.AFTER_BATCH.value


UPDATE_STAGES = (
    TrainingStage.BEFORE_BATCH,
    TrainingStage.DO_BACKWARD,
    TrainingStage.DO_OPTIMIZER_STEP,
    TrainingStage.AFTER_OPTIMIZER_STEP,
)
"""Where update hooks are called."""

REPLACEMENT_STAGES = (TrainingStage.DO_BACKWARD, TrainingStage.DO_OPTIMIZER_STEP)
"""The stages that one owner may do itself."""
