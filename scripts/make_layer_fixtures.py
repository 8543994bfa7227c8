"""Write the fixtures of tests/nn/test_layer_parity.py: weights, input, output and gradients of
flash-linear-attention's layers and of its Hedgehog feature map.

The library's kernels run on a CPU in Triton's interpreter, with a helper module `fla_on_cpu` that stands in for the
GPU driver:

    TRITON_INTERPRET=1 PYTHONPATH=<flash-linear-attention>:<folder of fla_on_cpu.py> python
    scripts/make_layer_fixtures.py tests/nn/fixtures

Made with flash-linear-attention 0.6.0, torch 2.13.0, triton 3.7.1, in float32.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import fla_on_cpu  # isort: skip - before fla and before any kernel is defined
import fla
import safetensors.torch
import torch
from fla.layers import GatedDeltaNet, GatedLinearAttention, Mamba2
from fla.modules.feature_map import HedgehogFeatureMap

HIDDEN, HEADS, TOKENS = 32, 2, 70
# Above 64 tokens the library's GLA takes its chunked kernel, at 64 and below its recurrent one.
CASES = {
    "gla": (lambda: GatedLinearAttention(hidden_size=HIDDEN, num_heads=HEADS), TOKENS),
    "gla_recurrent": (lambda: GatedLinearAttention(hidden_size=HIDDEN, num_heads=HEADS), 40),
    "gla_convolution": (lambda: GatedLinearAttention(hidden_size=HIDDEN, num_heads=HEADS, use_short_conv=True), TOKENS),
    "gated_deltanet": (lambda: GatedDeltaNet(hidden_size=HIDDEN, num_heads=HEADS, head_dim=8, expand_v=2), TOKENS),
    # With one group only: with more, the form of the layer that runs without mamba_ssm's kernels gives the heads to the
    # groups in turn, which those kernels (and transformers) do not.
    "mamba2": (lambda: Mamba2(hidden_size=HIDDEN, head_dim=16, state_size=8), TOKENS),
    "hedgehog": (lambda: HedgehogFeatureMap(HIDDEN), 5),
}
# Parameters that start at constants, where a mistake in their use would not show.
CONSTANT_STARTS = ("D", "norm.weight", "layer.weight", "layer.bias")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    fla_on_cpu.patch_ranges()
    for name, (make, tokens) in CASES.items():
        torch.manual_seed(0)
        layer = make()
        x = torch.randn(1, tokens, HIDDEN, requires_grad=True)
        with torch.no_grad():
            for key, value in layer.named_parameters():
                if key in CONSTANT_STARTS:
                    value.add_(torch.randn_like(value), alpha=0.3)
        output = layer(x)
        output = output[0] if isinstance(output, tuple) else output
        upstream = torch.randn_like(output)
        output.backward(upstream)
        tensors = {f"weights.{key}": value for key, value in layer.state_dict().items()}
        tensors |= {f"gradients.{key}": value.grad for key, value in layer.named_parameters()}
        tensors |= {"input": x, "output": output, "output_gradient": upstream, "input_gradient": x.grad}
        tensors = {key: value.detach().contiguous() for key, value in tensors.items()}
        settings = {"flash-linear-attention": fla.__version__, "torch": torch.__version__, "tokens": str(tokens)}
        safetensors.torch.save_file(tensors, folder / f"{name}.safetensors", settings)
        print(f"{name}: {sum(value.numel() for value in tensors.values()) * 4} bytes")


if __name__ == "__main__":
    main()
