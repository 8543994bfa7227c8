"""Weights and configurations to and from flash-linear-attention's GLA and Gated DeltaNet models (its release 0.6).

The names of the parameters are the same there and here; what differs is the configuration, and older or unfused layouts
of single weights.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ccq.models.configuration import CCQConfig
from ccq.models.modeling import CCQForCausalLM, remove_other_weights, save_model, weight_files, write_whole

_BACKBONES = {"gla": "gla", "gated_deltanet": "gated-deltanet"}
_MODEL_TYPES = {backbone: model_type for model_type, backbone in _BACKBONES.items()}
_CLASSES = {"gla": "GLAForCausalLM", "gated_deltanet": "GatedDeltaNetForCausalLM"}

# What that library takes where its configuration file says nothing.
_DEFAULTS: dict[str, Any] = {
    "hidden_size": 2048,
    "hidden_ratio": 4,
    "intermediate_size": None,
    "conv_size": 4,
    "norm_eps": 1e-6,
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "use_cache": True,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_OWN_DEFAULTS: dict[str, dict[str, Any]] = {
    "gla": {"num_hidden_layers": 24, "num_heads": 4, "expand_k": 0.5, "expand_v": 1.0, "use_short_conv": False},
    "gated_deltanet": {"num_hidden_layers": 21, "num_heads": 6, "head_dim": 256, "expand_v": 2.0},
}
# Options that change what a model computes and that this library has in one form only: (the values it can take, the
# first being the default there).
_FIXED: dict[str, dict[str, tuple[Any, ...]]] = {
    "gla": {
        "feature_map": (None,),
        "use_output_gate": (True,),
        "clamp_min": (None,),
        "elementwise_affine": (True,),
    },
    "gated_deltanet": {
        "use_gate": (True,),
        "use_short_conv": (True,),
        "allow_neg_eigval": (False,),
        "output_gate_activation": ("swish", "silu"),
    },
}
_FIXED_EVERYWHERE: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("swish",),
    "attn": (None,),
    "attnres_block_size": (None,),
}
# Fields of one name and meaning on both sides.
_SHARED = (
    "hidden_size num_heads norm_eps vocab_size max_position_embeddings initializer_range use_cache tie_word_embeddings "
    "bos_token_id eos_token_id pad_token_id"
).split()
# Inside that library's models this is a constant.
_GATE_LOGIT_NORMALIZER = 16


def from_flash_linear_attention(
    source: str | os.PathLike[str] | Mapping[str, Tensor],
    config: Mapping[str, Any] | CCQConfig | None = None,
    **options: Any,
) -> CCQForCausalLM:
    """A model of this library, arm gla or gated-deltanet, with the weights of one of flash-linear-attention's
    GLAForCausalLM or GatedDeltaNetForCausalLM.

    Args:
        source: the folder of a checkpoint (config.json and safetensors files), or the state dict of a model.
        config: the configuration, as that library's `config.to_dict()` or as one of this library; by default the
            folder's config.json. A state dict needs one.
        options: for `CCQForCausalLM.from_pretrained`, such as dtype and device_map. By default the weights keep their
            dtype.

    Raises:
        FileNotFoundError: the folder lacks its configuration or has no safetensors files.
        ValueError: the configuration is of another kind of model or has an option that this library has no counterpart
            for; weights are missing, unexpected or of another shape. All of them are named.
    """
    if isinstance(source, Mapping):
        if config is None:
            raise ValueError("a state dict needs the configuration of its model: give config=model.config.to_dict()")
        where, weights = "the state dict", dict(source)
    else:
        if config is None:
            config = _read_configuration(Path(source))
        where, weights = str(source), _read_weights(Path(source))
    own = config if isinstance(config, CCQConfig) else config_from_flash_linear_attention(config)
    if own.read is not None or own.backbone not in _MODEL_TYPES:
        raise ValueError(
            f"config must be of arm {' or '.join(_MODEL_TYPES)}, got {own.arm!r}; a read step is attached afterwards, "
            "see ccq.attach"
        )
    weights = _own_layout(weights, own)
    _check_weights(weights, own, where)
    with torch.random.fork_rng(devices=[]):
        model: CCQForCausalLM = CCQForCausalLM.from_pretrained(None, config=own, state_dict=weights, **options)
        return model


def to_flash_linear_attention(model: CCQForCausalLM, folder: str | os.PathLike[str], **options: Any) -> None:
    """Write a model of arm gla or gated-deltanet as a checkpoint that flash-linear-attention loads with
    `AutoModelForCausalLM.from_pretrained(folder)` once `fla` is imported; each file whole or not at all. `options` are
    save_pretrained's, such as max_shard_size.

    Raises:
        ValueError: that library has no counterpart for the model.
    """
    if not isinstance(model, CCQForCausalLM):
        raise TypeError(f"model must be a CCQForCausalLM, got {type(model).__name__}")
    config = config_to_flash_linear_attention(model.config)
    config["dtype"] = str(model.dtype).removeprefix("torch.")

    def write(staging: Path) -> None:
        save_model(model, staging, **options)
        (staging / "config.json").write_text(json.dumps(config, indent=2, allow_nan=False) + "\n")

    remove_other_weights(folder, write_whole(folder, write))


def config_from_flash_linear_attention(config: Mapping[str, Any]) -> CCQConfig:
    """The counterpart of a configuration of that library, given as its `to_dict()` or config.json. What acts on
    training or on the choice of kernels only is left out.
    """
    if not isinstance(config, Mapping):
        raise TypeError(f"config must be a CCQConfig or a table of names and values, got {type(config).__name__}")
    model_type = config.get("model_type")
    if model_type not in _BACKBONES:
        raise ValueError(f"model_type must be one of {', '.join(map(repr, _BACKBONES))}, got {model_type!r}")
    value = {**_DEFAULTS, **_OWN_DEFAULTS[model_type], **config}
    heads = value["num_heads"]
    wrong = [
        f"{name}={config[name]!r} (accepted: {' or '.join(map(repr, accepted))})"
        for name, accepted in (_FIXED[model_type] | _FIXED_EVERYWHERE).items()
        if name in config and config[name] not in accepted
    ]
    shared = "num_kv_heads" if model_type == "gla" else "num_v_heads"
    if value.get(shared) not in (None, heads):
        wrong.append(f"{shared}={value[shared]!r} (accepted: None or num_heads, {heads})")
    if wrong:
        raise ValueError(f"the configuration has options that this library has no counterpart for: {'; '.join(wrong)}")
    hidden = value["hidden_size"]
    if model_type == "gla":
        key_size, value_size = (round(hidden * value[name]) for name in ("expand_k", "expand_v"))
        if key_size % heads or value_size % heads:
            raise ValueError(f"num_heads must divide the key and value sizes, got {heads}, {key_size} and {value_size}")
        head_dim, value_head_dim = key_size // heads, value_size // heads
        convolution = value["conv_size"] if value["use_short_conv"] else None
    else:
        head_dim = value["head_dim"]
        value_head_dim, convolution = int(head_dim * value["expand_v"]), value["conv_size"]
    inner = value["intermediate_size"]
    if inner is None:
        # The multiple of 256 from two thirds of hidden_ratio * hidden_size on.
        ratio = 4 if value["hidden_ratio"] is None else value["hidden_ratio"]
        inner = 256 * -(-int(hidden * ratio * 2 / 3) // 256)
    return CCQConfig(
        arm=_BACKBONES[model_type],
        num_layers=value["num_hidden_layers"],
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        intermediate_size=inner,
        short_convolution=convolution,
        gate_logit_normalizer=_GATE_LOGIT_NORMALIZER,
        **{name: value[name] for name in _SHARED},
    )


def config_to_flash_linear_attention(config: CCQConfig) -> dict[str, Any]:
    """The config.json of the same model in that library."""
    if config.read is not None or config.backbone not in _MODEL_TYPES:
        reason = "; it has no read step: detach it first, see ccq.attach" if config.read is not None else ""
        raise ValueError(
            f"flash-linear-attention's models have no counterpart for arm {config.arm!r}; accepted: "
            f"{', '.join(_MODEL_TYPES)}{reason}"
        )
    model_type = _MODEL_TYPES[config.backbone]
    if config.intermediate_size is None:
        raise ValueError("flash-linear-attention's blocks have a SwiGLU; a model with intermediate_size=None has none")
    if model_type == "gla" and config.gate_logit_normalizer != _GATE_LOGIT_NORMALIZER:
        raise ValueError(
            f"flash-linear-attention's GLA models have gate_logit_normalizer={_GATE_LOGIT_NORMALIZER}, this one has "
            f"{config.gate_logit_normalizer}"
        )
    result: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [_CLASSES[model_type]],
        "num_hidden_layers": config.num_layers,
        "intermediate_size": config.intermediate_size,
        "conv_size": config.short_convolution or _DEFAULTS["conv_size"],
        **{name: getattr(config, name) for name in _SHARED},
    }
    if model_type == "gla":
        result["use_short_conv"] = config.short_convolution is not None
        for name, size in (("expand_k", config.head_dim), ("expand_v", config.value_head_dim)):
            result[name] = config.num_heads * size / config.hidden_size
    else:
        result["head_dim"], result["expand_v"] = config.head_dim, config.value_head_dim / config.head_dim
        # There the product is cut off, not rounded.
        while int(config.head_dim * result["expand_v"]) < config.value_head_dim:
            result["expand_v"] = math.nextafter(result["expand_v"], math.inf)
    return result


def _read_configuration(folder: Path) -> Mapping[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no checkpoint: {path} does not exist")
    try:
        values: Mapping[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not a model configuration: {error}") from error
    return values


def _read_weights(folder: Path) -> dict[str, Tensor]:
    files = [path for path in weight_files(folder) if path.suffix == ".safetensors"]
    if not files:
        raise FileNotFoundError(
            f"{folder} holds no weights as model.safetensors or model-*-of-*.safetensors; load an older checkpoint "
            "with its own library and write it again with save_pretrained"
        )
    weights = {}
    for path in files:
        try:
            weights.update(load_file(path))
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged or is not a safetensors file ({error})") from error
    return weights


def _own_layout(weights: Mapping[str, Tensor], config: CCQConfig) -> dict[str, Tensor]:
    """The weights under the names and in the shapes of this library."""
    own = {}
    for name, x in weights.items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        # Early releases held both halves of the SwiGLU in one weight, the gate first.
        if name.endswith("mlp.gate_proj.weight") and x.shape[0] == 2 * (config.intermediate_size or 0):
            own[name], own[name.replace("gate_proj", "up_proj")] = (half.contiguous() for half in x.chunk(2))
        else:
            # With fuse_norm=False the norm of GLA has the other name.
            own[name.replace("attn.g_norm.weight", "attn.g_norm_swish_gate.weight")] = x
    return own


def _check_weights(weights: Mapping[str, Tensor], config: CCQConfig, where: str) -> None:
    with torch.device("meta"):
        asked = {name: list(x.shape) for name, x in CCQForCausalLM(config).state_dict().items()}
    if config.tie_word_embeddings:
        del asked["lm_head.weight"]
    wrong = [f"missing {name}" for name in sorted(asked.keys() - weights.keys())]
    wrong += [f"unexpected {name}" for name in sorted(weights.keys() - asked.keys())]
    wrong += [
        f"{name} has shape {list(weights[name].shape)}, the configuration asks for {shape}"
        for name, shape in asked.items()
        if name in weights and list(weights[name].shape) != shape
    ]
    if wrong:
        kind = _CLASSES[_MODEL_TYPES[config.backbone]]
        raise ValueError(
            f"the weights in {where} are not those of flash-linear-attention's {kind} with this configuration: "
            f"{'; '.join(wrong)}"
        )
