"""The feeds of a run, from its configuration or from loaders, and what they tell a network of its sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nnx_jax.core.errors import ConfigError, DataError
from nnx_jax.data.deal import ONCE
from nnx_jax.data.loader import LoaderFeed
from nnx_jax.data.pipeline import Feed
from nnx_jax.data.stream import stream_feed
from nnx_jax.objectives.losses import Loss
from nnx_jax.params.run import RunSpec
from nnx_jax.spmd.world import World


def make_feeds(spec: RunSpec) -> dict[str, Feed | LoaderFeed]:
    """Return the feeds of the run by split, from `data` or from the loaders given in Python.

    Raises:
        ConfigError: no training data at all; a stream without the length of an epoch.
        DataError: a dataset that cannot be trained on.
    """
    feeds: dict[str, Feed | LoaderFeed] = {}
    data, train = spec.data, spec.training
    if data is not None:
        order = {"tail": data.tail, "shuffle": data.shuffle, "seed": spec.data_seed}
        with _naming_split("train"):
            streams = not data.train.indexable
            length = None if streams or data.tail != "straddle" else _epoch(spec)
            feeds["train"] = (
                _stream(spec) if streams else Feed(data.train, batch_size=data.batch_size, n_batches=length, **order)
            )
        for split in ("val", "test"):
            dataset = getattr(data, split)
            if dataset is not None:
                size = data.eval_batch_size or data.batch_size
                with _naming_split(split):
                    whole = dataset.indexable
                    feeds[split] = (Feed.evaluation if whole else _stream_once)(dataset, batch_size=size)
    for split, loader in (("train", train.train_loader), ("val", train.val_loader)):
        if loader is not None:
            feeds[split] = LoaderFeed(loader, data_id=train.data_id, wide=spec.precision == "float64")
    if "train" not in feeds:
        raise ConfigError("there is no training data; give data.train, or train_loader from Python", path="data.train")
    return feeds


def _stream(spec: RunSpec) -> LoaderFeed:
    """The feed of a training set whose rows only come one after another; its epochs are as long as somebody says.

    Raises:
        ConfigError: nobody says how long.
    """
    data, train = spec.data, spec.training
    assert data is not None
    if train.steps_per_epoch is None:
        told = "is not given, and a stream has no epochs of its own; say how many updates make one"
        raise ConfigError(told, path=f"{spec.block}.steps_per_epoch")
    return stream_feed(
        data.train, batch_size=data.batch_size, n_batches=_epoch(spec), seed=spec.data_seed, shuffle=data.shuffle
    )


def _epoch(spec: RunSpec) -> int | None:
    """Microbatches of an epoch whose length somebody says."""
    updates = spec.training.steps_per_epoch
    return None if updates is None else updates * spec.training.window


def _stream_once(dataset: Any, batch_size: int) -> LoaderFeed:
    """The feed of a set to evaluate on whose rows only come one after another: one pass, from its beginning."""
    return stream_feed(dataset, batch_size=batch_size, once=True)


def check_group(feeds: Mapping[str, Any], world: World) -> None:
    """Check that every process of a group has data of its own; a configuration's data is cut by the run itself.

    Raises:
        DataError: (a ValueError) a loader that gives every process the same batches, or was dealt to another group.
    """
    for split, feed in feeds.items():
        if not isinstance(feed, LoaderFeed):
            continue
        name = f"{split}_loader"
        kind = "train" if split == "train" else "validation"
        told = feed.partition
        if told is None:
            if not world.alone:
                raise DataError(
                    f"{name} gives each of the {world.size} processes all its batches; make it with "
                    f"nnx_jax.distributed.{kind}_loader(dataset, batch_size), which deals every process its rows, or "
                    "give the dataset as `data`"
                )
        elif told.get("world") != world.size or feed.rank not in (None, world.rank):
            raise DataError(
                f"{name} was dealt to process {feed.rank} of {told.get('world')}; this is process {world.rank} of "
                f"{world.size}: make it anew in this group"
            )
        elif (told.get("policy") == ONCE) != (kind == "validation"):
            given = "validation_loader, which deals rows unevenly" if kind == "train" else "train_loader, which repeats"
            raise DataError(f"{name} was made by {given}; make it with nnx_jax.distributed.{kind}_loader")


@contextmanager
def _naming_split(split: str) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise DataError(f"data.{split}: {error.args[0]}") from error


def data_info(feeds: Mapping[str, Feed | LoaderFeed]) -> dict[str, Any]:
    """Return what the training data tells a network about its sizes."""
    feed = feeds["train"]
    if isinstance(feed, Feed):
        return dict(feed.dataset.info)
    return {"input_shape": feed.signature()["x"].shape[1:]} | feed.info


def sizes_for(loss: Loss, info: dict[str, Any]) -> dict[str, Any]:
    """What the data says of sizes, with the outputs that the loss compares: values, not classes, for a regression."""
    if loss.task in ("bernoulli", "values") and "target_shape" in info:
        values = {name: size for name, size in info.items() if name != "n_classes"}
        return values | {"output_dim": math.prod(info["target_shape"])}
    return info
