"""Modules: the read step with its gate, the mixers, and the layers around them."""

from ccq.nn.conv import ShortConvolution
from ccq.nn.feature_map import HedgehogFeatureMap
from ccq.nn.mixers import (
    AttentionState,
    GatedDeltaNet,
    GatedLinearAttention,
    LayerState,
    Mamba2,
    MixerOutput,
    MixerState,
    SoftmaxAttention,
)
from ccq.nn.mlp import SwiGLU
from ccq.nn.norm import GatedGroupRMSNorm, ResidualRMSNorm, RMSNormGated
from ccq.nn.read import CurvatureConditionedQuery, ReadObservation, ReadResult, ReadStep

__all__ = [
    "AttentionState",
    "CurvatureConditionedQuery",
    "GatedDeltaNet",
    "GatedGroupRMSNorm",
    "GatedLinearAttention",
    "HedgehogFeatureMap",
    "LayerState",
    "Mamba2",
    "MixerOutput",
    "MixerState",
    "RMSNormGated",
    "ReadObservation",
    "ReadResult",
    "ReadStep",
    "ResidualRMSNorm",
    "ShortConvolution",
    "SoftmaxAttention",
    "SwiGLU",
]
