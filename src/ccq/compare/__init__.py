"""`ccq compare`: train arms on the same data with the same seeds, evaluate them, and report them side by side."""

from ccq.compare.grid import GridSettings, load_grid
from ccq.compare.run import compare
from ccq.compare.run_grid import compare_grid
from ccq.compare.settings import PRESETS, CompareSettings, compare_preset
from ccq.compare.training import Stage, TrainConfig

__all__ = [
    "PRESETS",
    "CompareSettings",
    "GridSettings",
    "Stage",
    "TrainConfig",
    "compare",
    "compare_grid",
    "compare_preset",
    "load_grid",
]
