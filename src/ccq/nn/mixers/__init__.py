"""Token mixers: a backbone's write rule as a layer, each with `read=None` or a read step; and softmax attention."""

from ccq.nn.mixers.attention import SoftmaxAttention
from ccq.nn.mixers.common import (
    AttentionState,
    LayerState,
    MixerOutput,
    MixerState,
    map_state,
    state_from_tensors,
    state_tensors,
)
from ccq.nn.mixers.gated_deltanet import GatedDeltaNet
from ccq.nn.mixers.gated_linear_attention import GatedLinearAttention
from ccq.nn.mixers.mamba2 import Mamba2

__all__ = [
    "AttentionState",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "LayerState",
    "Mamba2",
    "MixerOutput",
    "MixerState",
    "SoftmaxAttention",
    "map_state",
    "state_from_tensors",
    "state_tensors",
]
