"""Find a rate and a width for the digits: orders of magnitude in one program, then around the best by runs.

python examples/search_digits.py --trials 4      the same command again goes on; --trials 8 adds to the study
"""

import argparse

from nnx_jax import DigitsDataset, ExperimentPlan, FeedForwardParams, MonitorSpec, NNOptimParams, NNSchedulerParams
from nnx_jax.search import (
    CategoricalParam,
    FloatParam,
    GridSampler,
    IntParam,
    MedianPruner,
    RandomSampler,
    SearchBudget,
    SearchSpace,
    search,
)


def base(epochs):
    """What all trials have in common."""
    return (
        ExperimentPlan()
        .with_net(FeedForwardParams(hidden_dims=[16], dropout_prob=0.1))
        .with_metrics("accuracy")
        .with_epochs(epochs)
        .with_scheduler(NNSchedulerParams(kind="warmup_cosine", clock="optimizer_update"))
        .with_data(train=DigitsDataset(split="train"), val=DigitsDataset(split="val"), batch_size=64)
    )


def with_rate(plan, values):
    plan = plan.with_optim(NNOptimParams(kind="adamw", max_lr=values["rate"]))
    return plan.with_seed(values["seed"]) if "seed" in values else plan


def with_width(plan, values):
    return with_rate(plan, values).with_net(FeedForwardParams(hidden_dims=[values["width"]], dropout_prob=0.1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    common = {"monitor": MonitorSpec(metric="accuracy"), "storage": "studies", "quiet": True}

    # Three rates and two seeds as one program: which order of magnitude?
    rates = SearchSpace(rate=FloatParam(low=1e-4, high=1e-1, log=True), seed=IntParam(low=0, high=1))
    grid = {"sampler": GridSampler(3), "budget": SearchBudget(trials=6), "vmapped": True}
    coarse = search(base(args.epochs), rates, apply=with_rate, study_name="rates", **grid, **common)
    print(coarse.table())

    # Around the best of them, with the width: runs of their own, the weak ones ended early.
    near, widths = coarse.best.values["rate"], CategoricalParam(choices=[16, 32, 64])
    space = SearchSpace(rate=FloatParam(low=near / 3, high=near * 3, log=True), width=widths)
    draws = {"sampler": RandomSampler(), "budget": SearchBudget(trials=args.trials), "pruner": MedianPruner(3)}
    fine = search(base(args.epochs), space, apply=with_width, study_name="digits", **draws, **common)
    print(fine.table())

    # The winner once more, scored on rows that no trial has seen.
    plan = with_width(base(args.epochs), fine.best.values).with_data(test=DigitsDataset(split="test"))
    result = plan.fit(quiet=True)
    print(f"run {result.run.id}: test accuracy {result.metrics['test'].values['accuracy']:.4f}")


if __name__ == "__main__":
    main()
