"""Data: datasets with an identity, and feeds that hand out their batches in a reproducible, resumable order."""

from nnx_jax.data.arrays import ArrayDataset, NpzDataset, as_dataset
from nnx_jax.data.checks import TAILS, check
from nnx_jax.data.csv import CsvDataset
from nnx_jax.data.dataset import ColumnInfo, InMemoryDataset, TrainingDataset
from nnx_jax.data.deal import DealtLoader, dealt_loader, validation_shard
from nnx_jax.data.digits import DigitsDataset
from nnx_jax.data.dtypes import MASK
from nnx_jax.data.loader import LoaderFeed
from nnx_jax.data.pipeline import BatchFeed, BatchIterator, Feed, compare_descriptors
from nnx_jax.data.text import TextBytesDataset

__all__ = [
    "MASK",
    "TAILS",
    "ArrayDataset",
    "BatchFeed",
    "BatchIterator",
    "ColumnInfo",
    "CsvDataset",
    "DealtLoader",
    "DigitsDataset",
    "Feed",
    "InMemoryDataset",
    "LoaderFeed",
    "NpzDataset",
    "TextBytesDataset",
    "TrainingDataset",
    "as_dataset",
    "check",
    "compare_descriptors",
    "dealt_loader",
    "validation_shard",
]
