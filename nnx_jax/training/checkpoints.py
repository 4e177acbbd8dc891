"""A strategy's checkpoints: what is written beside the arrays, and how a strategy comes back from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from nnx_jax.core import codec
from nnx_jax.core.errors import ConfigError, ResumePointError, RunExistsError
from nnx_jax.core.hook_registry import describe_hook
from nnx_jax.engines.hook_plan import described
from nnx_jax.hooks.checkpoint import CheckpointHook
from nnx_jax.loop.records import history_columns
from nnx_jax.nets.build import build_net
from nnx_jax.nets.resolve import resolve as resolve_sizes
from nnx_jax.params.net import NNParams
from nnx_jax.runs.address import load_address
from nnx_jax.runs.resume import ResumePoint, require_same
from nnx_jax.runs.store import RunStore
from nnx_jax.step import state as step_state
from nnx_jax.step.plan import HookPlan
from nnx_jax.training.models import MAIN, as_models, dotted, put, resolve
from nnx_jax.training.optimizers import OptimizerConfig, of_model

_FREE = ("slots/", "accum/")
"""Leaves that may be missing in a checkpoint, or only there: of hooks that came or went."""

_OF_ENGINE = ("plateaus", "hooks", "window")
"""What a recipe knows only of a strategy that trains."""

_STARTS = ("num_updates",)
"""Settings that only say where a hook begins, and are not compared."""


@dataclass(frozen=True)
class Loaded:
    """A verified checkpoint with its arrays, read once."""

    point: ResumePoint
    arrays: Mapping[str, Any]

    @classmethod
    def read(cls, address: str | Path) -> Loaded:
        """The checkpoint that a path means."""
        point = load_address(address)
        _stored_recipe(point)
        return cls(point, point.load_all())


Models = tuple[dict[str, nnx.Module], bool, dict[str, Any]]


def build_models(given: Any, seed: int) -> Models:
    """(modules by name, whether there is a single one, how a checkpoint can name what makes them).

    Raises:
        ModelError, ConfigError: see `as_models` and `resolve`.
    """
    if isinstance(given, Mapping):
        made = {name: _build(value, seed) for name, value in given.items()}
        models, single = as_models({name: model for name, (model, _) in made.items()})
        return models, single, {name: source for name, (_, source) in made.items()}
    module, source = _build(given, seed)
    models, single = as_models(module)
    return models, single, {MAIN: source}


def _build(given: Any, seed: int) -> tuple[Any, Any]:
    if isinstance(given, nnx.Module):
        return given, None
    if isinstance(given, NNParams):
        return build_net(resolve_sizes(given, {}), rngs=nnx.Rngs(seed), info={}), {"net": given.state()}
    made = function(given, "models")
    return (made(), {"function": dotted(made)}) if callable(made) else (given, None)


def function(given: Any, what: str) -> Any:
    """A function given as it is or by its dotted name."""
    return resolve(given, what) if isinstance(given, str) else given


def recipe(strategy: Any) -> dict[str, Any]:
    """What a checkpoint says of the strategy, as plain values; None for what has no name."""
    loss = strategy.loss_fn
    return {
        "models": dict(strategy.sources),
        "single": strategy.single_model,
        "training_fn": dotted(strategy.training_fn),
        "loss_fn": loss if isinstance(loss, str) else dotted(loss),
        "optimizers": {name: config.state() for name, config in strategy.configs.items()},
        "num_epochs": strategy.num_epochs,
        "num_steps": strategy.num_steps,
        "epoch_step_modifier": strategy.epoch_step_modifier,
        "seed": strategy.seed,
        "hooks": _hooks(strategy._engine),
        "window": _window(strategy._engine),
        "plateaus": {name: plateau.state() for name, plateau in _plateaus(strategy).items()},
    }


def _hooks(engine: Any) -> dict[str, Any]:
    """Class and settings of every hook that may have a slot, as they come back from a file."""
    return {} if engine is None else slot_owners(engine.hooks)


def slot_owners(plan: HookPlan | None) -> dict[str, Any]:
    """Class and all settings of a plan's hooks, by slot."""
    told = described(plan)
    for hook in (*plan.update, *plan.traced) if plan is not None else ():
        fields = getattr(type(hook), "model_fields", {})
        if (key := plan.key(hook)) in told and fields:  # type: ignore[union-attr]
            told[key] = {name: getattr(hook, name) for name in fields} | told[key]
    return codec.parse_json(json.dumps(told, default=repr), source="hooks")


def _window(engine: Any) -> dict[str, Any] | None:
    """What decides how long a window is, as it comes back from a file."""
    if engine is None:
        return None
    hooks = [] if engine.hooks is None else engine.hooks.update
    found = [describe_hook(hook) for hook in hooks if hook.exclusive_key == "accumulation"]
    dynamic = "accum/pending" in engine.programs.paths  # hooks decide for each microbatch what is kept
    window = {"k": engine.accumulate, "hook": found[0] if found else None, "dynamic": dynamic}
    return codec.parse_json(json.dumps(window), source="window")


def _plateaus(strategy: Any) -> Mapping[str, Any]:
    engine = strategy._engine
    return {} if engine is None else engine.plateaus


# -- writing ---------------------------------------------------------------------------------------------------


def open_store(strategy: Any, directory: Path) -> RunStore:
    """Open a run directory for writing."""
    directory = directory.expanduser().absolute()
    state = {"strategy": {name: value for name, value in recipe(strategy).items() if name not in _OF_ENGINE}}
    columns = history_columns(())
    return RunStore.open(directory.parent, directory.name, state, columns, keep=1)


def open_own_store(strategy: Any) -> RunStore | None:
    """The run directory that the strategy's CheckpointHook names, open; None where none is named.

    Raises:
        ConfigError: two directories.
        RunExistsError: (a FileExistsError) another training's checkpoints lie there.
    """
    hooks = [hook for hook in strategy.registry if isinstance(hook, CheckpointHook)]
    named = {Path(hook.checkpoint_dir).expanduser().absolute() for hook in hooks if hook.checkpoint_dir is not None}
    if len(named) > 1:
        raise ConfigError(f"CheckpointHooks name {len(named)} directories; one strategy writes one")
    if not named:
        return None
    place = named.pop()
    store = open_store(strategy, place)
    if store.point is not None and place not in strategy.own_stores:
        store.close()
        raise RunExistsError(
            f"{place} holds checkpoints of another training; continue it with TrainingStrategy.load_checkpoint("
            f"{str(place)!r}, hooks=[...]), or choose another directory"
        )
    strategy.own_stores.add(place)
    return store


def save(strategy: Any, root: Path, tag: str | None) -> int:
    """Commit the strategy's state to a run directory under a tag; returns the generation's number.

    Raises:
        ConfigError: nothing was trained yet, so there is no state.
    """
    if strategy._engine is None:
        raise ConfigError("there is nothing to save: no batch was trained, so there is no optimizer state yet")
    session = strategy._session or strategy._begin(strategy.epoch_count, strategy.epoch_step_count, None, None)
    session._read()
    root = root.expanduser().absolute()
    own = strategy._store if strategy._store is not None and strategy._store.paths.run == root else None
    store = own or open_store(strategy, root)
    kept, session.plan.store = session.plan.store, store
    try:
        session.ctx.deferred.append(tag or f"step_{session.step}")
        session._commit()
        store.committer.drain()
        last = store.committer.last
        return 0 if last is None else last.generation
    finally:
        session.plan.store = kept
        if own is None:
            strategy.own_stores.add(root)
            store.close()


# -- reading ---------------------------------------------------------------------------------------------------


def load(
    cls: Any,
    address: str | Path,
    *,
    hooks: Sequence[Any] = (),
    validators: Mapping[str, Callable[[nnx.Module], Any]] | None = None,
    **given: Any,
) -> Any:
    """A strategy that continues where a checkpoint was made.

    What is not given is taken from the checkpoint, as far as it names it: functions that this program has loaded and
    built-in networks. Nothing is imported because a file says so.

    Args:
        cls: TrainingStrategy.
        address: `<dir>` for its last checkpoint, `<dir>/step_500` for one of a name.
        hooks: those of the run; their states come back, the others' are left.
        validators: by model, called with it once the weights are in.
        given: arguments of TrainingStrategy that take the place of the stored ones, such as `models`.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ConfigError: (a ValueError) something has to be given, because the checkpoint cannot name it.
        ResumePointError: (a ValueError) it is damaged, or does not fit the models.
    """
    found = Loaded.read(address)
    strategy = cls(hooks=hooks, **_arguments(found.point, given))
    put_weights(strategy, found)
    strategy.events.load(found.point.host["components"])
    _take(strategy, found)
    for name, check in (validators or {}).items():
        try:
            check(strategy.models[name])
        except Exception as error:
            raise ConfigError(f"validator of model {name!r} refused it: {error}") from error
    return strategy


def restore(strategy: Any, address: str | Path) -> None:
    """Put a checkpoint into a live strategy; see `TrainingStrategy.restore_checkpoint`."""
    found, engine = Loaded.read(address), strategy._engine
    if engine is None:
        put_weights(strategy, found)
        strategy.events.load(found.point.host["components"])
        _take(strategy, found)
        return
    strategy._state = revive(engine, found)
    strategy.events.load(found.point.host["components"])
    _take(strategy, found)
    strategy._loaded = strategy._session = None
    engine.bind(strategy._state)
    strategy.sync_models()


def _take(strategy: Any, found: Loaded) -> None:
    """Counters from a checkpoint, and its state when training begins."""
    counters, position = np.asarray(found.arrays["counters"]), found.point.host["position"]
    strategy._counts = {
        "step": int(counters[step_state.STEP]),
        "batch": int(counters[step_state.BATCH]),
        "epoch": int(position["epoch"]),
        "epoch_batch": int(position["batch"]),
    }
    strategy._loaded = found
    strategy.own_stores.add(found.point.paths.run)


def put_weights(strategy: Any, found: Loaded) -> None:
    """Put a checkpoint's weights into the strategy's models, so that they can be looked at before training."""
    weights = ("params/", "frozen/", "model_state/")
    stored = {n.split("/", 1)[1]: value for n, value in found.arrays.items() if n.startswith(weights)}
    parts = {key: {n.removeprefix(f"{key}."): v for n, v in of_model(stored, key).items()} for key in strategy.models}
    for key, own in parts.items():
        if not own:
            raise ResumePointError(f"the checkpoint has no model {key!r}; nothing was restored")
    for key, own in parts.items():
        put(strategy.models[key], own)


def revive(engine: Any, found: Loaded) -> Any:
    """The stored state in this engine; slots of hooks that are new stay fresh, those of hooks that went are left.

    Plateaus go on where they stood.

    Raises:
        ResumePointError: (a ValueError) a hook has a stored slot and other settings, or a window is open and its length
            or its hook is another.
    """
    same = _check_window(engine, found)
    host = found.point.host["topology"]
    loose = ("recipe", "accumulate")
    stored = {name: value for name, value in host.items() if name not in loose}
    require_same(stored, {name: value for name, value in engine.topology.items() if name not in loose}, "topology")
    carry = engine.start()
    fresh = engine.programs.named(carry)
    for name in (*fresh, *found.arrays):
        if (name in fresh) != (name in found.arrays) and not name.startswith(_FREE):
            where = "this strategy" if name in fresh else "the checkpoint"
            raise ResumePointError(f"only {where} has {name!r}; nothing was restored")
    kept_slots = stored_slots(found, _hooks(engine), [name for name in fresh if name.startswith("slots/")])
    left = ("slots/",) if same else _FREE
    held = {name: value for name, value in found.arrays.items() if not name.startswith(left)} | kept_slots
    state = engine.restore(carry, {name: held.get(name, value) for name, value in fresh.items()})
    for name, kept in _stored_recipe(found.point).get("plateaus", {}).items():
        if name in engine.plateaus:
            engine.plateaus[name].restore(kept)
    return state


def _check_window(engine: Any, found: Loaded) -> bool:
    """Are windows what they were? One that is open goes on only as it began."""
    stored, now = _stored_recipe(found.point)["window"], _window(engine)
    if stored == now:
        return True
    done = int(np.asarray(found.arrays["counters"])[step_state.MICRO])
    if done:
        raise ResumePointError(f"{done} of {stored['k']} microbatches are open; give k={stored['k']} and the same hook")
    if bool(found.arrays.get("accum/pending", False)):
        raise ResumePointError("a hook of the checkpoint keeps a window open; give that hook")
    return False


def stored_slots(found: Loaded, hooks: Mapping[str, Any], names: Sequence[str] | None = None) -> dict[str, Any]:
    """The stored leaves of the hooks described here, whole or not at all; nothing of a hook that has none.

    Args:
        hooks: class and settings by slot, see `engines.hook_plan.described`.
        names: leaves of the fresh slots, to compare with; None to take what is stored.

    Raises:
        ResumePointError: (a ValueError) naming both values of a setting that differs.
    """
    stored_hooks, kept = _stored_recipe(found.point)["hooks"], {}
    for key, now in hooks.items():
        own = {name: value for name, value in found.arrays.items() if name.startswith(f"slots/{key}/")}
        own |= {name: value for name, value in found.arrays.items() if name == f"slots/{key}"}
        if not own:
            continue
        before, after = _settings(stored_hooks.get(key, {})), _settings(now)
        for name in sorted({*before, *after}):
            if before.get(name) != after.get(name):
                raise ResumePointError(
                    f"{key} checkpoint conflict: {name} is {before.get(name)!r} in the checkpoint and "
                    f"{after.get(name)!r} here; build the hook with the checkpoint's value, or leave it out"
                )
        fresh = {name for name in names or () if name == f"slots/{key}" or name.startswith(f"slots/{key}/")}
        if names is not None and fresh != set(own):
            name = sorted(fresh ^ set(own))[0]
            where = "the checkpoint" if name in own else "this strategy"
            raise ResumePointError(f"{key} checkpoint conflict: only {where} has {name!r}; nothing was restored")
        kept |= own
    return kept


def nested_slots(found: Loaded, plan: HookPlan, params: Mapping[str, Any], model_state: Any) -> dict[str, Any]:
    """The stored slots of a plan's hooks as they are in a training state, before there is one.

    Raises:
        ResumePointError: see `stored_slots`.
    """
    nested: dict[str, Any] = {}
    for name, value in stored_slots(found, slot_owners(plan)).items():
        *path, last = name.split("/")[1:]
        at = nested
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    for key, fresh in plan.init(params, model_state).items():  # what is empty has no leaf
        if isinstance(fresh, Mapping) and key in nested:
            empty = [part for part, held in fresh.items() if isinstance(held, Mapping) and not held]
            nested[key] |= {part: {} for part in empty}
    return nested


def _settings(told: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a described hook, its class among them."""
    more = told.get("settings")
    flat = {**told, **more} if isinstance(more, Mapping) else dict(told)
    return {name: value for name, value in flat.items() if name != "settings" and name not in _STARTS}


def _arguments(point: ResumePoint, given: Mapping[str, Any]) -> dict[str, Any]:
    stored = _stored_recipe(point)
    found = dict(given)
    found.setdefault("seed", stored["seed"])
    if found.get("num_steps") is None:
        found.setdefault("epoch_step_modifier", stored["epoch_step_modifier"])
    if "num_epochs" not in found and "num_steps" not in found:
        found |= {"num_epochs": stored["num_epochs"], "num_steps": stored["num_steps"]}
    if "models" not in found:
        made = {name: _source(name, source) for name, source in stored["models"].items()}
        found["models"] = made[MAIN] if stored["single"] else made
    for name in ("training_fn", "loss_fn"):
        if name not in found:
            found[name] = _stored_function(stored[name], name)
    if "optimizer_configs" not in found:
        found["optimizer_configs"] = {name: _config(name, state) for name, state in stored["optimizers"].items()}
    return found


def _source(name: str, source: Any) -> Any:
    if source is not None and source.get("net") is not None:
        return NNParams.from_state(source["net"])
    if source is None or source.get("function") is None:
        raise ConfigError(
            f"the checkpoint holds the weights of model {name!r}, but not what makes it; give models=, or train with "
            "a function of a module as models="
        )
    return resolve(source["function"], "models", loaded_only=True)


def _stored_function(stored: Any, name: str) -> Any:
    if stored is None:
        raise ConfigError(f"the checkpoint cannot name its {name} (it is no function of a module); give {name}=")
    return resolve(stored, name, loaded_only=True) if ":" in stored else stored


def _config(name: str, state: Mapping[str, Any]) -> OptimizerConfig:
    what = f"optimizer_configs[{name!r}]"

    def named(value: Any) -> Any:
        return resolve(value, what, loaded_only=True) if isinstance(value, str) and ":" in value else value

    return OptimizerConfig(
        named(state["optimizer"]),
        {key: named(value) for key, value in state["settings"].items()},
        named(state["schedule"]),
        {key: named(value) for key, value in state["schedule_settings"].items()},
    )


def _stored_recipe(point: ResumePoint) -> Mapping[str, Any]:
    found = point.host.get("topology", {}).get("recipe")
    if found is None:
        raise ResumePointError(f"checkpoint {point.name} of run {point.run_id!r} was not written by a TrainingStrategy")
    return found
