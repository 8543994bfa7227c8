"""Training: the configuration, the loop, and checkpoints that a kill cannot damage."""

from ccq.train.config import Stage, TrainConfig
from ccq.train.loop import Progress, TrainedModel, initial_model, train

__all__ = ["Progress", "Stage", "TrainConfig", "TrainedModel", "initial_model", "train"]
