"""Token mixers: a backbone's write rule as a layer, each with `read=None` or a read step."""

from ccq.nn.mixers.common import MixerOutput, MixerState
from ccq.nn.mixers.gated_deltanet import GatedDeltaNet
from ccq.nn.mixers.gated_linear_attention import GatedLinearAttention

__all__ = ["GatedDeltaNet", "GatedLinearAttention", "MixerOutput", "MixerState"]
