"""ExperimentPlan: an experiment that is checked as a whole before anything runs, and can be run any number of times."""

from nnx_jax.plan.plan import ExperimentPlan
from nnx_jax.plan.probing import ProbeResult
from nnx_jax.plan.results import Diagnostic, FitResult, PlanError, SplitMetrics

__all__ = ["Diagnostic", "ExperimentPlan", "FitResult", "PlanError", "ProbeResult", "SplitMetrics"]
