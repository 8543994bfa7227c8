"""Language models in the Hugging Face way: configuration, presets, model, and the cache it carries from call to call.

Importing this package tells transformers' Auto classes about model type "ccq".
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from ccq.models.attach import attach, detach, save_gates
from ccq.models.cache import CCQCache, load_state, save_state
from ccq.models.configuration import ARMS, BACKBONES, READS, CCQConfig, parse_arm
from ccq.models.conversion import from_flash_linear_attention, to_flash_linear_attention
from ccq.models.intervention import read_intervention, read_layers, read_steps, set_read
from ccq.models.modeling import CCQForCausalLM, CCQModel, load_model, save_model
from ccq.models.presets import PRESETS, preset

AutoConfig.register(CCQConfig.model_type, CCQConfig)
AutoModel.register(CCQConfig, CCQModel)
AutoModelForCausalLM.register(CCQConfig, CCQForCausalLM)

__all__ = [
    "ARMS",
    "BACKBONES",
    "PRESETS",
    "READS",
    "CCQCache",
    "CCQConfig",
    "CCQForCausalLM",
    "CCQModel",
    "attach",
    "detach",
    "from_flash_linear_attention",
    "load_model",
    "load_state",
    "parse_arm",
    "preset",
    "read_intervention",
    "read_layers",
    "read_steps",
    "save_gates",
    "save_model",
    "save_state",
    "set_read",
    "to_flash_linear_attention",
]
