"""The BlackJAX engine: the chains of one sampler under the loop, a step being one draw of every chain.

Draws are made in blocks by one compiled program, whatever the number of draws in a block, so that draws do not depend
on how the loop cuts them. The key of draw i is `fold_in(run key, i)`; nothing depends on who logs or commits when.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax.core.errors import ModelError, NonFiniteError, ResumePointError
from nnx_jax.engines.blackjax_batches import Minibatches
from nnx_jax.engines.blackjax_draws import ChainState, Drawn, cut_from, joined, length
from nnx_jax.engines.blackjax_samplers import Sampler
from nnx_jax.engines.blackjax_task import named_leaves
from nnx_jax.engines.chains import Posterior
from nnx_jax.loop.engine import Evaluation, Poll, Records, Snapshot, Span
from nnx_jax.loop.records import history_columns
from nnx_jax.params.run import RunSpec

BLOCK = 8192
"""Most draws in one call of the device."""
FIRST_BLOCK = 64
"""Draws of the first call, which tells what a draw costs."""
BLOCK_SECONDS = 0.5
"""What a later call is to take: so long waits who interrupts a run, unless one draw takes longer."""
USUAL_BLOCK = 256
CHEAP_BYTES = 4 * 1024**2
"""More draws than the usual are made in a call while they take no more than this: a short call pays for all of it."""
BLOCK_BYTES = 64 * 1024**2
"""Most bytes that the draws of one call, or its minibatches, may take; one draw may take more."""

_START, _WARMUP, _DRAWS, _ENSEMBLE = range(4)
"""What a key is for, folded into the run key first."""


class BlackjaxEngine:
    """The chains of one sampler.

    Args:
        spec: the run's configuration; seed and dispatch are taken from it.
        sampler: what moves the chains.
        n_batches: draws of one epoch.
        batches: for a sampler that takes minibatches; else None.
        description: digest of what is sampled, compared on resume.

    Raises:
        ModelError: the log density is not finite where a chain starts.
    """

    accumulate = 1
    carries = False
    in_place = False
    owns_windows = True
    never_updates = False
    wrote = False
    eval_step = None

    def __init__(
        self,
        spec: RunSpec,
        sampler: Sampler,
        n_batches: int,
        batches: Minibatches | None = None,
        description: str = "",
    ) -> None:
        self.spec, self.sampler, self.n_batches, self.batches = spec, sampler, n_batches, batches
        self.description = description
        self.task, self.target = sampler.task, sampler.target
        self.metric_names, self.score_names = sampler.metrics, ()
        self.feeds: dict[str, Any] = {}
        self.watched: tuple[str, ...] = ()
        self.key = jax.random.key(spec.training.seed)
        self._draw_key = jax.random.fold_in(self.key, _DRAWS)
        self._rated: tuple[Any, float] | None = None
        self.posterior = Posterior({})
        """Every draw, as of the last `trained`."""

    # -- the protocol: running ---------------------------------------------------------------------------------

    def batch_count(self, state: ChainState) -> int:
        """Draws handed over so far."""
        return state.drawn

    def open_batches(self, state: ChainState) -> int:
        """No window is ever open: every draw is one."""
        return 0

    def start(self) -> ChainState:
        """Chains that have not begun; the warmup runs before the first draw, where no stored state takes its place."""
        return ChainState()

    def run_span(self, state: ChainState, span: Span, poll: Poll) -> tuple[ChainState, int]:
        """Draw in blocks; `poll` is asked between them, about twice a second whatever a draw costs."""
        self._begin(state)
        done = 0
        while done < span.n_batches:
            if state.failure is not None:  # the loop finds it where it reads, and what was done with it
                return state, span.n_batches
            count, began = min(self._most(state), span.n_batches - done), time.perf_counter()
            self._draw(state, count)
            state.pace = (time.perf_counter() - began) / count
            done += count
            if poll(done):
                break
        return state, done

    def _most(self, state: ChainState) -> int:
        """Most draws of the next call, by what those of the last one took."""
        if self.spec.training.dispatch == "step":
            return 1
        wanted = FIRST_BLOCK if state.pace is None else int(BLOCK_SECONDS / state.pace)
        return max(1, min(wanted, self.block))

    def _begin(self, state: ChainState) -> None:
        """Place the chains and run the warmup, once.

        Raises:
            ModelError: a chain starts where the log density is not finite.
        """
        if state.kernel is not None:
            return
        values, kernel, params = self._started(self.positions, self.target.data)
        if not np.all(np.isfinite(values)):
            bad = np.flatnonzero(~np.isfinite(np.asarray(values))).tolist()
            raise ModelError(
                f"the log density is not finite where chains {bad} of {self.sampler.width} start "
                f"(got {np.asarray(values)[bad[0]]}); give another init_position or init_fn"
            )
        state.kernel, state.params = kernel, params
        if self.batches is not None and self.sampler.warmup:
            state.kernel = self._burned(state)

    def _burned(self, state: ChainState) -> Any:
        """The kernel state after the warmup of a minibatch sampler: steps like any other, thrown away."""
        kernel, done = state.kernel, 0
        key = jax.random.fold_in(self.key, _WARMUP)
        while done < self.sampler.warmup:
            count = min(self.block, self.sampler.warmup - done)
            kernel, made, _ = self._call(kernel, state.params, key, done, count)
            if int(made) < count:
                raise self._not_finite(f"warmup step {done + int(made)}")
            done += count
        return kernel

    def _call(self, kernel: Any, params: Any, key: Any, first: int, count: int) -> Any:
        """One call of the device for draws `first .. first + count - 1`; see `_block`."""
        held, rows = (
            (None, None) if self.batches is None else (self.batches.held, self.batches.block(first, count, self.block))
        )
        return self._block(kernel, params, key, first, count, self.target.data, held, rows)

    def _draw(self, state: ChainState, count: int) -> None:
        """Draw one block and bring it to the host; a draw that is not finite ends it, and training.

        The next block is not handed over meanwhile: XLA on a CPU runs a program that came too early a third slower.
        """
        state.kernel, done, moves = self._call(state.kernel, state.params, self._draw_key, state.drawn, count)
        made = int(done)
        if made:
            whole = jax.device_get(moves)
            cut = jax.tree.map(lambda leaf: np.array(leaf[:made]), whole)
            stats = {"logdensity": cut.logdensity, **cut.measured}
            positions = {} if self.sampler.particles else named_leaves(cut.position)
            state.blocks.append(Drawn(positions, stats, cut.grad_norm))
        if made < count:
            state.failure = self._not_finite(f"draw {state.drawn + made}")
        state.drawn += made

    def _not_finite(self, where: str) -> NonFiniteError:
        sampler, step = self.task.sampler, self.sampler.step_size
        return NonFiniteError(
            f"{where} of {sampler} is not finite in some chain; the chains are as before it. Lower step_size "
            f"({step:g}), or look at the log density's gradient"
        )

    # -- the protocol: records ---------------------------------------------------------------------------------

    def read_records(self, state: ChainState) -> tuple[list[Records], Exception | None]:
        """Records since the last call, one a draw; with the error where a draw was not finite."""
        records, first = [], 0
        rate = self._rate(state.params) if state.read < length(state.blocks) else 0.0
        for block in state.blocks:
            end = first + len(block.grad_norm)
            if end > state.read:
                records.append(self._records(cut_from(block, max(state.read - first, 0)), max(first, state.read), rate))
            first = end
        state.read = first
        failure, state.failure = state.failure, None
        return records, failure

    def _rate(self, params: Any) -> float:
        """The step size of these parameters, which are read once."""
        if self._rated is None or self._rated[0] is not params:
            self._rated = params, float(self.sampler.rate(params))
        return self._rated[1]

    def _records(self, block: Drawn, first: int, rate: float) -> Records:
        count = len(block.grad_norm)
        batch = first + np.arange(count)
        values = {"loss": -block.stats["logdensity"].astype(np.float64)}
        values |= {name: block.stats[name].astype(np.float64) for name in self.metric_names}
        totals = {name: array.sum(axis=1) for name, array in values.items()}
        counts = {name: np.full(count, float(array.shape[1])) for name, array in values.items()}
        sums = {name: np.stack([totals[name], counts[name]], axis=1) for name in self.metric_names}
        sums["loss"] = np.stack([*totals.values(), *counts.values()], axis=1)  # what single updates tell, see `losses`
        return Records(
            batch=batch,
            step=batch + 1,
            loss=totals["loss"] / counts["loss"],
            rate=np.full(count, rate),
            grad_norm=block.grad_norm.astype(np.float64),
            closed=np.ones(count, bool),
            committed=np.ones(count, bool),
            sums=sums,
        )

    def summarize(self, sums: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Means over draws and chains."""
        found = {"loss": float(sums["loss"][0] / sums["loss"][len(sums["loss"]) // 2])}
        return found | {name: float(sums[name][0] / sums[name][1]) for name in self.metric_names}

    def values(self, sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Means over chains, of every draw."""
        return {name: sums[name][:, 0] / sums[name][:, 1] for name in self.metric_names}

    def losses(self, sums: Sequence[float]) -> tuple[float, dict[str, float]]:
        """Negative log density, and the sampler's own values: means over chains."""
        half = len(sums) // 2
        loss, *measured = (float(top / bottom) for top, bottom in zip(sums[:half], sums[half:], strict=True))
        return loss, dict(zip(self.metric_names, measured, strict=True))

    def columns(self) -> tuple[str, ...]:
        """Columns of the history."""
        return history_columns(self.metric_names)

    def evaluate(self, state: ChainState, split: str) -> Evaluation | None:
        """A sampler has no validation: its draws are judged by `facts` and diagnostics, not by held-out rows."""
        return None

    def set_rate(self, state: ChainState, rate: Any) -> ChainState:
        """No schedule moves a sampler's step size."""
        return state

    # -- the protocol: storing ---------------------------------------------------------------------------------

    def snapshot(self, state: ChainState, epoch: int, batch: int) -> Snapshot:
        """Kernel states, adapted parameters and every draw so far, by name."""
        self._begin(state)
        arrays = _flat("kernel", state.kernel) | _flat("adapted", state.params)
        return Snapshot(arrays | self._held(state), {"epoch": epoch, "next": batch}, self.topology)

    def _held(self, state: ChainState) -> dict[str, np.ndarray]:
        """Every draw so far by name, in one array each; none before the first."""
        if not state.blocks:
            return {}
        if len(state.blocks) > 1:
            state.blocks = [joined(state.blocks)]
        whole = state.blocks[0]
        held = {f"draws/{name}": array for name, array in whole.positions.items()}
        held |= {f"stats/{name}": array for name, array in whole.stats.items()}
        return held | {"stats/grad_norm": whole.grad_norm}

    @cached_property
    def topology(self) -> dict[str, Any]:
        """Plain description of what a stored state fits."""
        return {
            "engine": "blackjax",
            "net": None,
            "target": self.description,
            "optimizer": {"kind": self.task.sampler},
            "sampler": {
                "name": self.task.sampler,
                "width": self.sampler.width,
                "warmup": self.sampler.warmup,
                "step_size": self.sampler.step_size,
            },
            "precision": self.spec.precision,
            "data": None if self.batches is None else self.batches.feed.descriptor(),
        }

    def abstract(self, state: ChainState, stored: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Shape and dtype of every array of a snapshot; with as many draws as `stored` has, else as this state has."""
        _, kernel, params = self._shapes
        found = {name: (leaf.shape, str(leaf.dtype)) for name, leaf in _flat("kernel", kernel).items()}
        found |= {name: (leaf.shape, str(leaf.dtype)) for name, leaf in _flat("adapted", params).items()}
        count = state.drawn
        if stored is not None:
            count = stored["stats/grad_norm"].shape[0] if "stats/grad_norm" in stored else 0
        if not count:
            return found
        move = self._move
        draws = {} if self.sampler.particles else named_leaves(move.position)
        parts = {f"draws/{name}": leaf for name, leaf in draws.items()}
        measured = {"logdensity": move.logdensity, **move.measured, "grad_norm": move.grad_norm}
        parts |= {f"stats/{name}": leaf for name, leaf in measured.items()}
        return found | {name: ((count, *leaf.shape), str(leaf.dtype)) for name, leaf in parts.items()}

    def restore(self, state: ChainState, arrays: Mapping[str, Any], *, weights_only: bool = False) -> ChainState:
        """The stored chains, exactly, with every draw.

        Raises:
            ResumePointError: a name, shape or dtype differs; nothing is changed.
        """
        wanted = self.abstract(state, arrays)
        given = {name: (tuple(array.shape), str(array.dtype)) for name, array in arrays.items()}
        if given != wanted:
            odd = next(n for n in (*wanted, *given) if wanted.get(n) != given.get(n))
            raise ResumePointError(
                f"the checkpoint does not fit this run: {odd} is {given.get(odd)} there, {wanted.get(odd)} here"
            )
        _, kernel, params = self._shapes
        found = ChainState(_filled("kernel", kernel, arrays), _filled("adapted", params, arrays))
        stats = {name.removeprefix("stats/"): np.asarray(a) for name, a in arrays.items() if name.startswith("stats/")}
        if stats:
            draws = {n.removeprefix("draws/"): np.asarray(a) for n, a in arrays.items() if n.startswith("draws/")}
            found.blocks = [Drawn(draws, stats, stats.pop("grad_norm"))]
        found.drawn = found.read = length(found.blocks)
        return found

    # -- the protocol: the result ------------------------------------------------------------------------------

    def trained(self, state: ChainState) -> Posterior:
        """Every draw so far; positions are mapped back to each site's support."""
        positions, sampler = self._positions(state), self.sampler
        values = {} if positions is None else named_leaves(self._constrained(positions))
        self.posterior = Posterior(
            {name: np.asarray(array) for name, array in values.items()},
            positions,
            joined(state.blocks).stats if state.blocks else {},
            {} if state.kernel is None else sampler.facts(state.kernel, state.params),
            not sampler.particles,
        )
        return self.posterior

    def _positions(self, state: ChainState) -> Any:
        """Positions [chains, draws, ...] as the pytree they are; None before there is one."""
        if self.sampler.particles:
            if state.kernel is None:
                return None
            particles = self.sampler.ensemble(jax.random.fold_in(self.key, _ENSEMBLE), state.kernel)
            return jax.tree.map(lambda leaf: np.asarray(leaf)[None], particles)
        if not state.blocks:
            return None
        held = self._held(state)
        tree = jax.tree.structure(self._move.position)
        names = named_leaves(self._move.position)
        return jax.tree.unflatten(tree, [np.swapaxes(held[f"draws/{name}"], 0, 1) for name in names])

    @cached_property
    def _constrained(self) -> Any:
        return jax.jit(jax.vmap(jax.vmap(self.target.constrain)))

    def undo(self) -> None:
        """Nothing outside was changed."""

    def weights(self, model: Any) -> Mapping[str, Any]:
        """A sampler's model has no topology of its own to store."""
        return {}

    def absorb(self, state: ChainState) -> ChainState:
        """Draws are not changed by callbacks."""
        return state

    def bind(self, state: ChainState) -> None:
        """No hook has a slot in a sampler's state."""

    def hook_name(self, number: int) -> str:
        """No hook vetoes a draw."""
        raise ValueError(f"no update hook takes part in sampling, asked for number {number}")

    def batch(self, epoch: int, place: int) -> Any:
        """What is drawn from is not shown."""
        return None

    def look(self, state: ChainState, name: str) -> Any:
        """The draws so far, as "posterior"; nothing else."""
        return self.trained(state) if name == "posterior" else None

    def parts(self) -> dict[str, Any]:
        """A sampler has neither optimizers nor schedules."""
        return {"optimizers": [], "lr_schedulers": []}

    # -- programs ----------------------------------------------------------------------------------------------

    @cached_property
    def positions(self) -> Any:
        """Where the chains start, [chains, ...]."""
        return self.target.initial(jax.random.fold_in(self.key, _START), self.sampler.width)

    @cached_property
    def _started(self) -> Any:
        key = jax.random.fold_in(self.key, _WARMUP)

        def started(positions: Any, data: Any) -> Any:
            kernel, params = self.sampler.start(key, positions, data)
            values = jnp.zeros(self.sampler.width)
            if self.batches is None:
                values = jax.vmap(lambda position: self.target.logdensity(position, data))(positions)
            return jax.tree.map(_strong, (values, kernel, params))

        return jax.jit(started)

    @cached_property
    def _shapes(self) -> Any:
        """Log densities, kernel states and parameters as shapes."""
        return jax.eval_shape(self._started, self.positions, self.target.data)

    @cached_property
    def _move(self) -> Any:
        """One step of all chains as shapes."""
        _, kernel, params = self._shapes
        batch = None if self.batches is None else self.batches.shapes
        step = lambda k, p, b: self.sampler.step(self.key, k, p, self.target.data, b)[1]  # noqa: E731
        return jax.eval_shape(step, kernel, params, batch)

    @cached_property
    def block(self) -> int:
        """Most draws of one call: as many as fit the memory set aside, with their minibatches."""
        shapes = (self._move, None if self.batches is None else self.batches.shapes)
        sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes)]
        row = max(sum(sizes), 1)
        return max(1, min(BLOCK, max(CHEAP_BYTES // row, min(USUAL_BLOCK, BLOCK_BYTES // row))))

    @cached_property
    def _block(self) -> Any:
        """(kernel, params, key, first, count, data, held, rows) -> (kernel, draws made, moves).

        Moves are [block, ...]; `held` and `rows` say what the minibatches are, see `Minibatches`.

        One program for every count, so that a draw has the same bits however the loop cuts them into calls.
        """
        size, sampler, like, batches = self.block, self.sampler, self._move, self.batches

        def block(kernel: Any, params: Any, key: Any, first: Any, count: Any, data: Any, held: Any, rows: Any):
            made = jax.tree.map(lambda leaf: jnp.zeros((size, *leaf.shape), leaf.dtype), like)

            def going(carry: Any) -> Any:
                place, _, alive, _ = carry
                return (place < count) & alive

            def draw(carry: Any) -> Any:
                place, kernel, _, made = carry
                batch = None if batches is None else batches.pick(held, rows, place)
                moved, move = sampler.step(jax.random.fold_in(key, first + place), kernel, params, data, batch)
                fine = _finite(move.position)
                kernel = jax.tree.map(lambda new, old: jnp.where(fine, new, old), moved, kernel)
                made = jax.tree.map(lambda column, one: column.at[place].set(one), made, move)
                return place + fine, kernel, fine, made

            carry = (jnp.zeros((), jnp.int32), kernel, jnp.asarray(True), made)
            place, kernel, _, made = jax.lax.while_loop(going, draw, carry)
            return jax.tree.map(_strong, kernel), place, made

        return jax.jit(block)


def _finite(tree: Any) -> Any:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def _strong(leaf: Any) -> Any:
    """An array whose dtype is its own, as a stored one's is: a weak one would be another program's input."""
    leaf = jnp.asarray(leaf)
    return jax.lax.convert_element_type(leaf, leaf.dtype)


def _flat(prefix: str, tree: Any) -> dict[str, Any]:
    return {f"{prefix}/{name}": leaf for name, leaf in named_leaves(tree).items()}


def _filled(prefix: str, like: Any, arrays: Mapping[str, Any]) -> Any:
    """A pytree like this with the stored arrays."""
    leaves = [jnp.asarray(arrays[name]) for name in _flat(prefix, like)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)
