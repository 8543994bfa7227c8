"""`ccq compare`: train arms on the same data with the same seeds, evaluate them, and report them side by side."""

from ccq.compare.run import compare
from ccq.compare.settings import PRESETS, CompareSettings, compare_preset
from ccq.compare.training import Stage, TrainConfig

__all__ = ["PRESETS", "CompareSettings", "Stage", "TrainConfig", "compare", "compare_preset"]
