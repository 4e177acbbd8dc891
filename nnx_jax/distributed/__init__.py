"""Several processes that train one model: join them, deal them their rows, train with `DDP()`, leave together.

from nnx_jax import distributed

rank, world = distributed.init_process_group()
train = distributed.train_loader(dataset, batch_size=32, seed=0)
run = model.train(params, data=..., distributed=distributed.DDP())
distributed.shutdown()
"""

from nnx_jax.core.errors import DistributedFailure
from nnx_jax.distributed.group import DDP, current_world, init_process_group, shutdown, tell_failure
from nnx_jax.distributed.loaders import train_loader, validation_loader
from nnx_jax.distributed.manager import DistributedManager
from nnx_jax.loop.writer_only import writer_only
from nnx_jax.spmd.processes import leave

__all__ = [
    "DDP",
    "DistributedFailure",
    "DistributedManager",
    "current_world",
    "init_process_group",
    "leave",
    "shutdown",
    "tell_failure",
    "train_loader",
    "validation_loader",
    "writer_only",
]
