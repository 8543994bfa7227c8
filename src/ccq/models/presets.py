"""Named models: an arm and a scale, such as gla+ccq-1.3b."""

from __future__ import annotations

from typing import Any

from ccq.models.configuration import ARMS, CCQConfig, nearest, parse_arm

# The sizes of the linear-attention arms at each scale. 500m and 1.3b are those of the paper (arXiv:2606.01294, table 1,
# and the head sizes of its appendix D; six heads follow from its figures); what it leaves open is as in
# flash-linear-attention's models of these names.
_SCALES: dict[str, dict[str, Any]] = {
    # Small enough to train on one core in minutes. Models of this size learn recall only with a short convolution in
    # every arm, and with decay that starts slow enough for half a window of 256 tokens to be remembered.
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 2,
        "head_dim": 32,
        "value_head_dim": 32,
        "intermediate_size": 176,
        "short_convolution": 4,
        "gate_logit_normalizer": 64,
        "max_a": 1.0,
        "dt_min": 0.001,
        "dt_max": 0.02,
        # About the square root of 1 / hidden_size; at the usual 0.02 Gated DeltaNet does not learn in this time.
        "initializer_range": 0.07,
        "max_position_embeddings": 256,
    },
    "30m": {
        "vocab_size": 32_000,
        "hidden_size": 256,
        "num_layers": 12,
        "num_heads": 4,
        "head_dim": 64,
        "value_head_dim": 128,
        "intermediate_size": 704,
        "max_position_embeddings": 2048,
    },
    "60m": {
        "vocab_size": 32_000,
        "hidden_size": 384,
        "num_layers": 14,
        "num_heads": 6,
        "head_dim": 64,
        "value_head_dim": 128,
        "intermediate_size": 1056,
        "max_position_embeddings": 2048,
    },
    "500m": {
        "vocab_size": 32_000,
        "hidden_size": 1024,
        "num_layers": 21,
        "num_heads": 6,
        "head_dim": 256,
        "value_head_dim": 512,
        "intermediate_size": 2816,
        "norm_eps": 1e-6,
    },
    "1.3b": {
        "vocab_size": 32_000,
        "hidden_size": 2048,
        "num_layers": 21,
        "num_heads": 6,
        "head_dim": 256,
        "value_head_dim": 512,
        "intermediate_size": 5632,
        "norm_eps": 1e-6,
    },
}
SCALES = tuple(_SCALES)
# Layers of the other two kinds of block, so that the parameters of a scale are about the same.
_LAYERS = {
    "mamba2": {"tiny": 4, "30m": 28, "60m": 33, "500m": 65, "1.3b": 48},
    "transformer": {"tiny": 2, "30m": 16, "60m": 19, "500m": 35, "1.3b": 24},
}
_CONTROLS = ("gla", "gated-deltanet")


def _values(arm: str, scale: str) -> dict[str, Any]:
    sizes = {"arm": arm, **_SCALES[scale]}
    backbone = parse_arm(arm)[0]
    small = scale == "tiny"
    if backbone in _LAYERS:
        sizes["num_layers"] = _LAYERS[backbone][scale]
    if backbone.startswith("gla") and not small:
        sizes["short_convolution"] = None
    if backbone == "transformer":
        size = sizes["head_dim"] if small else 64
        heads = sizes["hidden_size"] // size
        sizes |= {"num_heads": heads, "head_dim": size, "value_head_dim": size, "short_convolution": None}
    if backbone == "mamba2":
        # Mamba2's own: an inner size of twice the hidden size, heads of 64, a state of 128, blocks without SwiGLU.
        size, state = (32, 32) if small else (64, 128)
        sizes |= {"head_dim": state, "value_head_dim": size, "num_heads": 2 * sizes["hidden_size"] // size}
        sizes |= {"intermediate_size": None, "keep_length": arm != backbone}
        if small:
            sizes["min_a"] = 0.1
    return sizes


def _wide(backbone: str, scale: str) -> dict[str, Any]:
    """The control for what a read step's own state is worth: the backbone with values larger by the key size, which
    is as much state as the (whole) second moments, and a SwiGLU smaller by as many parameters as that costs.
    """
    sizes = _values(backbone, scale)
    size = sizes["head_dim"]
    sizes["value_head_dim"] += size
    sizes["intermediate_size"] -= sizes["num_heads"] * size
    return sizes


PRESETS: dict[str, dict[str, Any]] = {
    **{f"{arm}-{scale}": _values(arm, scale) for scale in _SCALES for arm in ARMS},
    **{f"{backbone}-wide-{scale}": _wide(backbone, scale) for scale in _SCALES for backbone in _CONTROLS},
}
"""The fields of every named configuration that differ from `CCQConfig`'s own."""


def preset(name: str, **changes: Any) -> CCQConfig:
    """The configuration of the preset ARM-SCALE, such as "gla+ccq-1.3b"; `changes` (such as vocab_size=1024) replace
    single fields of it. The arm may have any read step, also one that `PRESETS` does not list.
    """
    arm, _, scale = name.rpartition("-")
    if name in PRESETS:
        values = PRESETS[name]
    elif "+" in arm and scale in _SCALES:
        values = _values(arm, scale)
    else:
        raise ValueError(f"unknown preset {name!r}{nearest(name, PRESETS)}; accepted: {', '.join(PRESETS)}")
    return CCQConfig(**{**values, **changes})
