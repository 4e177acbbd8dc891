"""Data: datasets with an identity, and feeds that hand out their batches in a reproducible, resumable order."""

from nnx_jax.data.arrays import ArrayDataset, NpzDataset, as_dataset
from nnx_jax.data.cached import CachedDataset
from nnx_jax.data.catalog import CatalogDataset
from nnx_jax.data.checks import TAILS, check
from nnx_jax.data.csv import CsvDataset
from nnx_jax.data.dataset import SPLITS, ColumnInfo, InMemoryDataset, TrainingDataset
from nnx_jax.data.deal import DealtLoader, dealt_loader, validation_shard
from nnx_jax.data.digits import DigitsDataset
from nnx_jax.data.dtypes import MASK
from nnx_jax.data.iterable import IterableDataset, StreamingDataset
from nnx_jax.data.loader import LoaderFeed
from nnx_jax.data.mapped import MappedDataset
from nnx_jax.data.pipeline import BatchFeed, BatchIterator, Feed, compare_descriptors
from nnx_jax.data.simulation import SimulationDataset, sample_seed
from nnx_jax.data.sources import GrainDataset, SequenceDataset, adapt
from nnx_jax.data.splits import PartitionedDataset, SplitDataset, tenths
from nnx_jax.data.stream import StreamDataset, StreamLoader, stream_feed
from nnx_jax.data.text import TextBytesDataset
from nnx_jax.data.windows import WindowDataset

__all__ = [
    "MASK",
    "SPLITS",
    "TAILS",
    "ArrayDataset",
    "BatchFeed",
    "BatchIterator",
    "CachedDataset",
    "CatalogDataset",
    "ColumnInfo",
    "CsvDataset",
    "DealtLoader",
    "DigitsDataset",
    "Feed",
    "GrainDataset",
    "InMemoryDataset",
    "IterableDataset",
    "LoaderFeed",
    "MappedDataset",
    "NpzDataset",
    "PartitionedDataset",
    "SequenceDataset",
    "SimulationDataset",
    "SplitDataset",
    "StreamDataset",
    "StreamLoader",
    "StreamingDataset",
    "TextBytesDataset",
    "TrainingDataset",
    "WindowDataset",
    "adapt",
    "as_dataset",
    "check",
    "compare_descriptors",
    "dealt_loader",
    "sample_seed",
    "stream_feed",
    "tenths",
    "validation_shard",
]
