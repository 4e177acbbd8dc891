"""One model in several processes, each with its own rows: the same recipe for torch under torchrun, and for JAX.

    torchrun --standalone --nproc_per_node=2 examples/ddp_supervised.py [--out DIR] [--epochs N]
    python -m nnx_jax.launch --processes 2 --script examples/ddp_supervised.py -- --backend jax [--out DIR] [--epochs N]

Every process joins the group, takes its share of the digits, and calls `train`; one of them writes the run. All see the
same records, stop at the same epoch and have the same weights, which are those of one process that trains on all
rows. One sees what every process has at the end: the same run, and the same accuracy on the test images.
"""

import argparse
from pathlib import Path

from nnx_jax import (
    CheckpointParams,
    DigitsDataset,
    EarlyStopping,
    FeedForwardParams,
    LRMonitor,
    MonitorSpec,
    NNModelParams,
    NNOptimParams,
    NNSchedulerParams,
    NNTrainParams,
    TensorBoardCallback,
)


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--backend", choices=("torch", "jax"), default="torch")
    options.add_argument("--out", default="runs", help="where the run is kept")
    options.add_argument("--epochs", type=int, default=20)
    given = options.parse_args()
    if given.backend == "torch":
        from nnx_jax.torch import NNModel, distributed
    else:
        from nnx_jax import NNModel, distributed

    rank, world = distributed.init_process_group()  # the first thing that is done with torch, or with JAX
    monitor, optim = MonitorSpec(metric="loss", split="val"), NNOptimParams(kind="adamw", max_lr=3e-3)
    params = NNTrainParams(
        n_epochs=given.epochs,
        train_loader=distributed.train_loader(DigitsDataset(split="train"), batch_size=32 // world, seed=0),
        val_loader=distributed.validation_loader(DigitsDataset(split="val"), batch_size=64),
        optim=optim,
        scheduler=NNSchedulerParams(kind="warmup_cosine", clock="optimizer_update"),
        monitor=monitor,
        overwrite_existing=True,
    )
    shape = FeedForwardParams(input_dim=64, output_dim=10, hidden_dims=[128])
    model = NNModel(shape, NNModelParams(loss="cross_entropy", metrics=["accuracy"]))
    rates = LRMonitor()  # on every process, as early stopping: both write nothing
    events = distributed.writer_only(lambda: TensorBoardCallback(Path(given.out, "events")))
    run = model.train(
        params,
        [EarlyStopping(patience=10, monitor=monitor), rates, events],
        distributed=distributed.DDP(),
        checkpoint=CheckpointParams(every_n_epochs=5),
        runs_dir=given.out,
        quiet=rank > 0,
    )
    accuracy = model.evaluate(DigitsDataset(split="test"))["accuracy"]
    distributed.shutdown()
    print(f"rank {rank} of {world}: run {run.id}, {len(rates.history)} rates, test accuracy {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
