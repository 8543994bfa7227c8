"""Named model sizes."""

from __future__ import annotations

import difflib
from typing import Any

from ccq.models.configuration import ModelConfig

PRESETS: dict[str, dict[str, Any]] = {
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
    },
}


def preset(name: str, arm: str, **changes: Any) -> ModelConfig:
    """The configuration of preset `name` for `arm`; `changes` (such as vocab_size=1024) replace single fields of it."""
    if name not in PRESETS:
        nearest = difflib.get_close_matches(name, list(PRESETS), 1)
        hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        raise ValueError(f"unknown preset {name!r}{hint}; accepted: {', '.join(PRESETS)}")
    return ModelConfig.from_dict({**PRESETS[name], "arm": arm, **changes})
