"""Everything that can be wrong with a plan, found without running any of it: no factory, no loader, no directory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

from flax import nnx
from pydantic import ValidationError

from nnx_jax.core.codec import dotted
from nnx_jax.core.errors import DataError
from nnx_jax.core.explain import find_problems
from nnx_jax.data.dataset import TrainingDataset
from nnx_jax.loop.callbacks import Callback
from nnx_jax.loop.components import StatefulComponent
from nnx_jax.params.callbacks import CallbackParams
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.history import HistoryJournal
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.run import RunSpec
from nnx_jax.params.train import CheckpointParams, NNTrainParams
from nnx_jax.plan.results import Diagnostic
from nnx_jax.plan.settings import SPLITS, Settings
from nnx_jax.runs.experiment import ExperimentManifest

_WHOLE: dict[str, type] = {"model": NNModelParams, "train": NNTrainParams, "data": NNDataParams}
_OBJECTS: dict[str, type] = {
    "checkpoint": CheckpointParams,
    "history": HistoryJournal,
    "provenance": ExperimentManifest,
}
_SHORTEST = {"n_epochs": 1}
"""In place of a training that was not described, so that the rest is looked at all the same."""


class Unmade(TrainingDataset):
    """Stands for what a data factory has not made yet; it has no rows, and asking for them is an error."""

    def __len__(self) -> int:
        self._refuse()

    def take(self, indices: Any) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise DataError("the data factory has not been called yet")


def validate(settings: Settings) -> tuple[Diagnostic, ...]:
    """Return every problem of a plan; nothing is called, iterated, built or written, so two calls give the same."""
    found = [*_missing(settings), *_wrong_wholes(settings), *read(settings)[1], *_own_rules(settings)]
    return tuple(dict.fromkeys(found))


def read(settings: Settings, made: Mapping[str, Any] | None = None) -> tuple[RunSpec | None, list[Diagnostic]]:
    """Return the plan as one specification, None when it has problems, and those problems.

    Args:
        made: what the data factories returned, by split; without it, placeholders stand for what they will return.
    """
    data, loaders, problems = _place_data(settings, made or {})
    train = _fields(settings, "train") | loaders
    state: dict[str, Any] = {
        "model": _fields(settings, "model") | ({} if settings.module is None else {"net": None}),
        "train": train if "n_epochs" in train or settings.said("train") else _SHORTEST | train,
        "hooks": tuple(hook for hook in settings.hooks if getattr(hook, "family", None) == "hook"),
    }
    for name, given in (("data", data), ("mesh", settings.mesh), ("sharding", settings.sharding)):
        if given is not None:
            state[name] = given
    try:
        spec = RunSpec.__pydantic_validator__.validate_python(state)
    except ValidationError as error:
        return None, [*problems, *(Diagnostic(dotted(at), text) for at, text in find_problems(RunSpec, state, error))]
    return (None if problems else spec), problems


def check_callback(callback: Any, path: str) -> Iterator[Diagnostic]:
    """Yield what is wrong with a callback object: an instance, a function of the history rows, or its parameters."""
    if isinstance(callback, type):
        yield Diagnostic(path, f"{callback.__name__} is a class; give an instance, or with_callback_factories")
    elif not isinstance(callback, Callback | CallbackParams) and not callable(callback):
        yield Diagnostic(path, f"expected a Callback or a function, got {type(callback).__name__}")


def kind_of(data: Any) -> str:
    """Return what stands for a split: "none", "dataset", "loader", "factory", or "" for what can be none of them."""
    if data is None:
        return "none"
    if isinstance(data, TrainingDataset | str | Mapping):
        return "dataset"
    if isinstance(data, type) or (callable(data) and not isinstance(data, Iterable)):
        return "factory"
    return "loader" if isinstance(data, Iterable) else ""


def data_of(settings: Settings) -> dict[str, Any]:
    """Return what was given for each split: a dataset, a loader, a factory or None."""
    fields, train = _fields(settings, "data"), _fields(settings, "train")
    return {split: fields.get(split) if split in fields else train.get(f"{split}_loader") for split in SPLITS}


# -- the parts ------------------------------------------------------------------------------------------------------


def _fields(settings: Settings, part: str) -> dict[str, Any]:
    """Fields of a part; an object of another class than the part's says nothing."""
    given = getattr(settings, part)
    return (
        settings if given is None or isinstance(given, _WHOLE[part]) else settings.changed(**{part: None})
    ).state_of(part)


def _missing(settings: Settings) -> Iterator[Diagnostic]:
    if settings.module is None and _fields(settings, "model").get("net") is None:
        how = "with_net(FeedForwardParams(...)), or with_net of a function that takes rngs and returns a module"
        path = "net" if settings.said("model") else "model"
        yield Diagnostic(path, f"there is no network; give {how}")
    if not settings.said("train"):
        yield Diagnostic("train", "is required; give with_train(NNTrainParams(...)), or with_epochs(n)")
    if data_of(settings)["train"] is None:
        yield Diagnostic("data.train", "is required; give with_data(train=...): a dataset, a loader, or a function")


def _wrong_wholes(settings: Settings) -> Iterator[Diagnostic]:
    for part, cls in _WHOLE.items():
        given = getattr(settings, part)
        if given is not None and not isinstance(given, cls):
            yield Diagnostic(part, f"expected {cls.__name__}, got {type(given).__name__}")


def _place_data(
    settings: Settings, made: Mapping[str, Any]
) -> tuple[dict[str, Any] | None, dict[str, Any], list[Diagnostic]]:
    """Return the fields of `data`, the loaders as fields of `train`, and what is in the wrong place."""
    fields, given, problems = _fields(settings, "data"), {**data_of(settings), **made}, []
    cut = {name: value for name, value in fields.items() if name not in SPLITS}
    kinds = {split: kind_of(value) for split, value in given.items()}
    loaders = {f"{split}_loader": given[split] for split in ("train", "val") if kinds[split] == "loader"}
    data = {split: Unmade() if kinds[split] == "factory" else given[split] for split in SPLITS
            if kinds[split] in ("factory", "dataset")}  # fmt: skip
    for split, kind in kinds.items():
        if not kind:
            found = f"expected a dataset, a loader, or a function that returns one; got {type(given[split]).__name__}"
            problems.append(Diagnostic(f"data.{split}", found))
        elif kind == "loader" and split == "test":
            problems.append(Diagnostic("data.test", "is a loader; the test split is a dataset"))
        elif kind == "loader" and split not in made and isinstance(given[split], Iterator):
            problems.append(
                Diagnostic(f"data.{split}", "is an iterator, used up by one fit; give a list or a function")
            )
    if kinds["train"] != "loader":
        return {"train": Unmade(), **cut, **data}, loaders, problems
    problems += [Diagnostic(f"data.{name}", "a loader makes its own batches; leave this out") for name in cut]
    for split in data:
        problems.append(Diagnostic(f"data.{split}", "is a dataset while data.train is a loader; give both alike"))
    return None, loaders, problems


# -- rules of plans alone -------------------------------------------------------------------------------------------


def _own_rules(settings: Settings) -> Iterator[Diagnostic]:
    train = _fields(settings, "train")
    if train.get("overwrite_existing"):
        yield Diagnostic(
            "train.overwrite_existing", "a fit never replaces another one; leave it out, or name an attempt"
        )
    if train.get("salt") is not None:
        yield Diagnostic("train.salt", "the attempt tells the fits of a plan apart; give fit(attempt=...) instead")
    if isinstance(settings.module, nnx.Module):
        yield Diagnostic("net", "a module is trained in place, so a second fit would go on from the first; give a "
                         "function that takes rngs and returns a new one")  # fmt: skip
    elif settings.module is not None and not callable(settings.module):
        yield Diagnostic("net", f"expected NNParams or a function, got {type(settings.module).__name__}")
    for index, callback in enumerate(settings.callbacks):
        yield from check_callback(callback, f"callbacks[{index}]")
    for index, factory in enumerate(settings.callback_factories):
        if not callable(factory) or isinstance(factory, Callback | CallbackParams):
            found = f"expected a function that returns a Callback, got {type(factory).__name__}"
            yield Diagnostic(f"callback_factories[{index}]", found)
    for name, function in (("step_fns.train", settings.train_step_fn), ("step_fns.evaluate", settings.eval_step_fn)):
        if function is not None and not callable(function):
            yield Diagnostic(name, f"expected a function, got {type(function).__name__}")
    if settings.objective is not None and settings.train_step_fn is not None:
        yield Diagnostic("objective", "step_fns.train makes the update already; give one of them")
    for name, cls in _OBJECTS.items():
        given = getattr(settings, name)
        if given is not None and not isinstance(given, cls):
            yield Diagnostic(name, f"expected {cls.__name__}, got {type(given).__name__}")
    for index, component in enumerate(settings.components):
        if not isinstance(component, StatefulComponent):
            text = f"{type(component).__name__} has no component_spec, component_state and load_component_state"
            yield Diagnostic(f"components[{index}]", text)
