"""The language model: configuration, presets, model, and the state it carries from call to call."""

from ccq.models.configuration import ARMS, BACKBONES, READS, ModelConfig, parse_arm
from ccq.models.modeling import (
    CausalLanguageModel,
    ModelOutput,
    ModelState,
    generate,
    load_model,
    load_state,
    save_model,
    save_state,
)
from ccq.models.presets import PRESETS, preset

__all__ = [
    "ARMS",
    "BACKBONES",
    "PRESETS",
    "READS",
    "CausalLanguageModel",
    "ModelConfig",
    "ModelOutput",
    "ModelState",
    "generate",
    "load_model",
    "load_state",
    "parse_arm",
    "preset",
    "save_model",
    "save_state",
]
