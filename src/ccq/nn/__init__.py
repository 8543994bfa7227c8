"""Modules: the read step with its gate, the mixers, and the layers around them."""

from ccq.nn.conv import ShortConvolution
from ccq.nn.mixers import GatedDeltaNet, GatedLinearAttention, MixerOutput, MixerState
from ccq.nn.mlp import SwiGLU
from ccq.nn.norm import RMSNormGated
from ccq.nn.read import CurvatureConditionedQuery, ReadObservation, ReadResult

__all__ = [
    "CurvatureConditionedQuery",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "MixerOutput",
    "MixerState",
    "RMSNormGated",
    "ReadObservation",
    "ReadResult",
    "ShortConvolution",
    "SwiGLU",
]
