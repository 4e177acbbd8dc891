"""The compiled step: state, window arithmetic, records, and one call for one window or for many.

programs = build_step(forward, terms, optimizer, params=params, model_state={}, signature=feed.signature(),
                      metrics=metrics, accumulate=4, clip_norm=1.0)
carry = programs.init(params, {}, seed=0)            # copies: your arrays stay yours
for epoch in range(n_epochs):
    programs.start_epoch(carry)
    for number, batch in enumerate(batches):         # one call a microbatch ...
        programs.step(carry, batch, closes=number == n_batches - 1)
    # ... or many windows a call, from a device-resident dataset:
    #   table = place_table(feed.order(epoch))
    #   programs.span_resident(carry, columns, table, start=0, micros=n_batches)
    # ... or from host batches, always stacked to the same capacity:
    #   programs.span_stacked(carry, stack_batches(some, capacity), len(some))
    rows = programs.read_records(carry)              # the only read; raises if training halted
saved = programs.named(carry)                        # {"params/layer.kernel": array, "opt_state/...": ...}
carry = programs.load_named(saved)                   # exact, all or nothing
"""

from nnx_jax.step.batches import place_columns, place_table, stack_batches
from nnx_jax.step.build import build_step
from nnx_jax.step.programs import Carry, StepPrograms
from nnx_jax.step.records import Records
from nnx_jax.step.state import TrainState

__all__ = [
    "Carry", "Records", "StepPrograms", "TrainState", "build_step", "place_columns", "place_table", "stack_batches",
]  # fmt: skip
