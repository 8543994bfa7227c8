"""Training: strict recipes, one engine for one process or many, and runs that an interruption at any moment cannot
damage.
"""

from ccq.processes import Processes, processes
from ccq.train.config import OptimizerRecipe, Recipe, load_recipe
from ccq.train.engine import Engine, StepResult, TargetBatch, initial_model
from ccq.train.loop import BatchSource, Outcome, Progress, Schedule, train
from ccq.train.metrics import read_metrics
from ccq.train.run import plan_recipe, run_recipe

__all__ = [
    "BatchSource",
    "Engine",
    "OptimizerRecipe",
    "Outcome",
    "Processes",
    "Progress",
    "Recipe",
    "Schedule",
    "StepResult",
    "TargetBatch",
    "initial_model",
    "load_recipe",
    "plan_recipe",
    "processes",
    "read_metrics",
    "run_recipe",
    "train",
]
